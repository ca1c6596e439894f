"""The building blocks of the models."""

from ..functional import AttentionMaskType, PositionEmbeddingType
from .attention import Attention, AttentionParams, KeyValueCacheParams, SpecDecodingParams
from .embedding import Embedding
from .linear import ColumnLinear, Linear, RowLinear
from .mlp import MLP, GatedMLP
from .normalization import LayerNorm, RmsNorm

__all__ = [
    "MLP",
    "Attention",
    "AttentionMaskType",
    "AttentionParams",
    "ColumnLinear",
    "Embedding",
    "GatedMLP",
    "KeyValueCacheParams",
    "LayerNorm",
    "Linear",
    "PositionEmbeddingType",
    "RmsNorm",
    "RowLinear",
    "SpecDecodingParams",
]
