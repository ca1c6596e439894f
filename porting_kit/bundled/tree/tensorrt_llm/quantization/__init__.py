"""Quantisation settings of a checkpoint."""

from .mode import QuantMode

__all__ = ["QuantMode"]
