"""LLaMA and the models that share its layers (Mistral, Yi, SmolLM2 ...)."""
