"""GPT-NeoX: attention and feed-forward side by side, rotary positions on part of each head."""
