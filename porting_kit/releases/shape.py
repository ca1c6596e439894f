"""What an attention layer asks of a kernel: sizes, types, positions, cache. The input of every kernel gate.

This module reads no config file: `attention_shape` takes the normalised base config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from porting_kit.errors import PortFileError

ALIBI_KINDS = ("alibi", "alibi_with_scale")
ROPE_KINDS = ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn", "mrope")
# chatglm (the 6B model) rotates outside the attention plugin from position ids, so it shares the fate of learned ones.
PER_REQUEST_POSITION_KINDS = ("learned_absolute", "chatglm")
POSITION_KINDS = (*ROPE_KINDS, *PER_REQUEST_POSITION_KINDS, *ALIBI_KINDS, "relative", "none")


@dataclass(frozen=True)
class AttentionShape:
    """The attention layers of one model on one target, as a kernel sees them.

    Args:
        head_size: D, after any kernel fit.
        query_heads: H of the whole model (not of one rank; the group H / K is the same on every rank).
        kv_heads: K of the whole model.
        dtype: `float16`, `bfloat16` or `float32`.
        kv_dtype: type of the KV cache, `int8` and `fp8` included; None means dtype.
        position_kind: TensorRT-LLM's PositionEmbeddingType name (`rope_gpt_neox`, `alibi`, `learned_absolute` ...).
        q_scaling: attention logits are divided by sqrt(D) * q_scaling.
        softcap: bound of a tanh on the attention logits, None or 0 when there is none.
        sliding_window: attention window in tokens, None when every layer sees all of the past.
        window_varies: layers have different windows (local and global layers in turn).
        max_seq_len: longest sequence, prompt included, in tokens; None when not known yet.
        sink_tokens: attention sinks of a streaming set-up, in tokens.
        tokens_per_block: block of the paged KV cache in tokens; None for a contiguous cache.
        beam_width: 1 for greedy decoding.
        compute_capability: 80, 86, 89, 90, 100, 120 ...; None when the card is not known.
        mask: `causal`, or another mask (`bidirectional`, `bidirectional_glm`, `block_sparse`).
        cross_attention: the layer attends to an encoder.
        multi_block_mode: the attention plugin's option of that name.
        relative_bias: a learned bias is added to the attention logits (T5).
        positions_in_graph: the patched model computes its positions itself from past length and position offsets.
    """

    head_size: int
    query_heads: int
    kv_heads: int
    dtype: str
    kv_dtype: str | None = None
    position_kind: str = "rope_gpt_neox"
    q_scaling: float = 1.0
    softcap: float | None = None
    sliding_window: int | None = None
    window_varies: bool = False
    max_seq_len: int | None = None
    sink_tokens: int = 0
    tokens_per_block: int | None = 64
    beam_width: int = 1
    compute_capability: int | None = None
    mask: str = "causal"
    cross_attention: bool = False
    multi_block_mode: bool = False
    relative_bias: bool = False
    positions_in_graph: bool = False

    def __post_init__(self) -> None:
        for field in ("head_size", "query_heads", "kv_heads", "beam_width"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PortFileError(
                    f"attention shape has an impossible {field}",
                    expected="a whole number from 1",
                    found=repr(value),
                    next_step="correct the field in the base's config.json",
                )

    @property
    def group_size(self) -> float:
        """Query heads per key/value head; not whole when H is no multiple of K."""
        return self.query_heads / self.kv_heads

    @property
    def cache_dtype(self) -> str:
        """Type of the KV cache."""
        return self.kv_dtype or self.dtype


def attention_shape(
    base: Any, target: Any, *, dtype: str | None = None, positions_in_graph: bool = False
) -> AttentionShape:
    """The attention shape of a base model on a target.

    Args:
        base: a `BaseConfig` (or anything with its attributes).
        target: the port file's target section: compute_capability "9.0", kv_cache_type, tokens_per_block, max_seq_len.
        dtype: the port's dtype; the base's own when None.
        positions_in_graph: the model is patched to compute its positions itself.

    Raises:
        PortFileError: an impossible head count or size.
    """
    raw = base.raw
    cache = getattr(target, "kv_cache_type", "auto")
    window = None if raw.get("use_sliding_window") is False else base.sliding_window
    return AttentionShape(
        head_size=base.head_size,
        query_heads=base.num_heads,
        kv_heads=base.num_kv_heads,
        dtype=dtype or base.dtype or "float16",
        kv_dtype=None if cache == "auto" else cache,
        position_kind=base.position_kind,
        q_scaling=base.q_scaling,
        softcap=base.attention_softcap,
        sliding_window=window,
        window_varies=window is not None and _window_varies(raw),
        max_seq_len=target.max_seq_len,
        tokens_per_block=target.tokens_per_block,
        compute_capability=read_compute_capability(target.compute_capability),
        mask="block_sparse" if raw.get("blocksparse_block_size") else "causal",
        relative_bias=base.position_kind == "relative",
        positions_in_graph=positions_in_graph,
    )


def read_compute_capability(value: object) -> int | None:
    """90 from `9.0`, 90, `sm90` or `sm_90`; None stays None.

    Raises:
        PortFileError: not a compute capability.
    """
    if value is None:
        return None
    text = str(value).lower().removeprefix("sm").lstrip("_").replace(".", "")
    if not (text.isascii() and text.isdigit()) or len(text) < 2:
        raise PortFileError(
            "not a compute capability",
            expected="a number such as 9.0 or sm90",
            found=repr(value),
            next_step="correct target.compute_capability",
        )
    return int(text)


def _window_varies(raw: Any) -> bool:
    """Whether only some layers have the window (Gemma 2 and 3, Phi-3-small, Cohere 2 ...)."""
    kinds = raw.get("layer_types")
    if kinds:
        return len(set(kinds)) > 1
    return (raw.get("sliding_window_pattern") or 1) > 1 or raw.get("model_type") in ("gemma2", "gemma3_text", "cohere2")


PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Model type -> every how manieth layer sees the whole past, where the config does not list its layers' kinds."""


def find_sliding_layers(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers of a base have its sliding window, by its own config."""
    kinds = raw.get("layer_types")
    if kinds:
        return [kind == "sliding_attention" for kind in kinds]
    pattern = raw.get("sliding_window_pattern") or PATTERNS.get(str(raw.get("model_type")), 0)
    return [pattern < 2 or (layer + 1) % pattern != 0 for layer in range(num_layers)]


def find_reached_window(
    shape: AttentionShape, raw: Mapping[str, Any], num_layers: int, longest: int
) -> int | tuple[int, ...] | None:
    """The window of a base's layers, where texts of `longest` tokens outgrow it: one number, or one a layer.

    A layer without a window among others that have one gets `longest`.
    """
    window = shape.sliding_window
    if window is None or longest <= window:
        return None
    if not shape.window_varies:
        return window
    return tuple(window if slides else longest for slides in find_sliding_layers(raw, num_layers))


def window_covers(shape: AttentionShape) -> bool:
    """Whether the window is never reached: no sequence is longer than it."""
    return (
        shape.sliding_window is not None and shape.max_seq_len is not None and shape.max_seq_len <= shape.sliding_window
    )
