"""What an attention layer asks of a kernel: sizes, types, positions, cache. The input of every kernel gate."""

from __future__ import annotations

from dataclasses import dataclass

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
                    f"attention shape has an impossible {field}", expected="a whole number from 1", found=repr(value)
                )

    @property
    def group_size(self) -> float:
        """Query heads per key/value head; not whole when H is no multiple of K."""
        return self.query_heads / self.kv_heads

    @property
    def cache_dtype(self) -> str:
        """Type of the KV cache."""
        return self.kv_dtype or self.dtype
