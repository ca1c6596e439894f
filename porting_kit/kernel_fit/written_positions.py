"""write_positions: ALiBi as a product that every kernel computes, with each token's position written into its key.

Softmax ignores what depends on the query alone, so of the bias -m*(i - j) only m*j is needed: the slope in the query
times the position in the key. Four dims of each head hold it. Keys get the position's high digit, low digit, and both
again; queries get the slope in two parts, through the projection's bias:

    q = (m1*B, m1, m2*B, m2)    k = (high, low, high, low)    q.k = (m1 + m2) * (B*high + low) = m*j

Digits are whole numbers up to 256 and B is a power of two, so half precision holds them exactly, and two parts hold the
slope to 16 bits in bfloat16. The patched model computes the digits in its graph (`position_source`), as it computes
learned positions.

The product grows with the position, up to slope * length nats, so it must be summed in float32: the context kernels do
so for bfloat16 always (fmhaRunner.cpp 0.13.0.dev2024090300 l.247, force_fp32_acc), for float16 only where the build or
the run asks for it. Float16 is therefore refused here; the waves of `fold_alibi` are within their bound there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.alibi import insert_front, model_slopes, require_alibi, require_room
from porting_kit.kernel_fit.alibi_line import FLOOR_NATS
from porting_kit.kernel_fit.attention_tensors import HeadTensors, has_dense_bias
from porting_kit.kernel_fit.exact_transforms import Fitted, Tensors, change_layers
from porting_kit.kernel_fit.note import FitNote
from porting_kit.kernel_fit.settings import (
    DENSE_BIAS_KEY,
    DIGIT_BASE,
    LARGEST_DIGIT,
    POSITION_DIMS,
    QKV_BIAS_KEY,
    WRITING_DTYPES,
    refuse_changed_rows,
)


def write_positions(
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    head_size: int,
    length_tokens: int,
    content_size: int | None = None,
) -> Fitted:
    """Put the slopes into the queries' bias, and leave the dims free that the graph writes positions into.

    Args:
        head_size: D of the fitted model; from the content's size to it there is room for four dims.
        length_tokens: the longest sequence, prompt included.
        content_size: dims of queries and keys that are in use (the first ones); all of them when None.

    Raises:
        ConversionError: no ALiBi, no room, a type whose products are not summed in float32, positions that two digits
            do not hold, a scaling that must be folded first, or projections that are clipped.
    """
    old, dtype = config["head_size"], str(config["dtype"])
    content = old if content_size is None else content_size
    require_alibi(config, head_size, content, "write_positions", POSITION_DIMS)
    refuse_changed_rows(config, "write_positions")
    _require_digits(dtype, length_tokens)
    slopes = model_slopes(config)
    query = slope_parts(slopes, head_size, dtype)
    key = torch.zeros(config["num_key_value_heads"], POSITION_DIMS)
    factor = math.sqrt(head_size / old)

    def write(prefix: str, heads: HeadTensors) -> HeadTensors:
        require_room(heads, content, prefix, "write_positions")
        return insert_front(heads.with_bias(), query, key, head_size, content, factor)

    written = change_layers(config, tensors, write)
    fitted = {
        **config,
        "head_size": head_size,
        "position_embedding_type": "learned_absolute",
        QKV_BIAS_KEY: True,
        DENSE_BIAS_KEY: has_dense_bias(tensors),
        "max_position_embeddings": max(int(config.get("max_position_embeddings") or 0), length_tokens),
    }
    figures = {
        "head_size": [old, head_size],
        "content_dims": content,
        "position_dims": POSITION_DIMS,
        "length_tokens": length_tokens,
        "logit_error_nats": measure_slopes(slopes, query, head_size, length_tokens),
    }
    what = (
        f"ALiBi becomes the product of slopes in the queries and positions in the keys, in {POSITION_DIMS} dims before "
        f"{content} content dims, up to {length_tokens} tokens"
    )
    return fitted, written, FitNote("write_positions", True, what, figures)


def _require_digits(dtype: str, length_tokens: int) -> None:
    if dtype not in WRITING_DTYPES:
        raise ConversionError(
            "write_positions needs attention logits that are summed in float32",
            expected=" or ".join(WRITING_DTYPES),
            found=dtype,
            next_step="convert to bfloat16, or use fold_alibi, which keeps its bound in float16",
        )
    longest = DIGIT_BASE * LARGEST_DIGIT
    if not 1 < length_tokens <= longest:
        raise ConversionError(
            "write_positions has two digits for a position",
            expected=f"2 to {longest} tokens",
            found=str(length_tokens),
            next_step=f"set target.max_seq_len to at most {longest}",
        )


def slope_parts(slopes: np.ndarray, head_size: int, dtype: str) -> torch.Tensor:
    """What the queries hold, float32 [H, 4]: the slope in two parts of the type, each for the high and the low digit.

    The kernel divides by the square root of the head size, so they hold that much more.
    """
    wanted = torch.from_numpy(slopes * math.sqrt(head_size))
    kind = getattr(torch, dtype)
    first = wanted.to(kind).double()
    second = (wanted - first).to(kind).double()
    parts = [part * factor for part in (first, second) for factor in (DIGIT_BASE, 1)]
    return torch.stack(parts, dim=1).float()


def measure_slopes(slopes: np.ndarray, query: torch.Tensor, head_size: int, length_tokens: int) -> float:
    """Largest error in nats of the line that the stored slopes give, where keys matter."""
    stored = query.double()[:, [1, 3]].sum(1).numpy() / math.sqrt(head_size)
    reach = np.minimum(FLOOR_NATS / slopes, length_tokens - 1)
    return float((np.abs(stored - slopes) * reach).max())
