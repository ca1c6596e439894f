"""Bloom: LayerNorm after the embedding, ALiBi positions, a plain feed-forward block."""
