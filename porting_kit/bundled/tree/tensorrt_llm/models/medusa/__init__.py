"""LLaMA with Medusa heads."""
