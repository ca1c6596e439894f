"""From a Hugging Face base and Medusa heads to a TensorRT-LLM checkpoint, every tensor accounted for on both sides.

Letters: E hidden, D head size, H query heads, K key/value heads, V vocabulary, Vp padded vocabulary, L layers, M Medusa
heads, R residual layers per head.
"""

from porting_kit.conversion.convert import (
    ConversionOutcome,
    add_heads,
    checkpoint_ranks,
    checkpoint_tensors,
    convert_checkpoint,
)
from porting_kit.conversion.heads import HeadSet, read_head_set
from porting_kit.conversion.plan import plan_conversion
from porting_kit.conversion.planned import ConversionPlan
from porting_kit.conversion.sharding import UnevenRanks
from porting_kit.conversion.tensor_source import TensorSource, open_tensor_source

__all__ = [
    "ConversionOutcome",
    "ConversionPlan",
    "HeadSet",
    "TensorSource",
    "UnevenRanks",
    "add_heads",
    "checkpoint_ranks",
    "checkpoint_tensors",
    "convert_checkpoint",
    "open_tensor_source",
    "plan_conversion",
    "read_head_set",
]
