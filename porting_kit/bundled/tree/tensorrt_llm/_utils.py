"""Sizes and names that several modules need."""

import math


def pad_vocab_size(vocab_size, tp_size):
    """V -> Vp: the next multiple of the tensor-parallel size, so that every rank holds equally many rows."""
    return math.ceil(vocab_size / tp_size) * tp_size
