"""Qwen2: LLaMA's layers with biases on queries, keys and values."""
