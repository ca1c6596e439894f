"""The kernel gates at which the library stops, in the order in which it meets them: at build time, then at dispatch.

`gptAttentionCommon.cpp` is cpp/tensorrt_llm/plugins/gptAttentionCommon/gptAttentionCommon.cpp of the TensorRT-LLM
repository; decoderXQARunner.h, decoderXQAImplPrecompiled.cpp and cubin/ are in
cpp/tensorrt_llm/kernels/decoderMaskedMultiheadAttention/.
"""

from __future__ import annotations

from porting_kit.releases.facts import KernelLimits
from porting_kit.releases.gate import KernelGate, enforced_gate
from porting_kit.releases.shape import ROPE_KINDS, AttentionShape, window_covers


def _is_power_of_two(group: float) -> bool:
    return group == int(group) and int(group) & (int(group) - 1) == 0


def _jit_kernel(shape: AttentionShape, limits: KernelLimits) -> bool:
    """Whether this shape takes the run-time compiled kernel instead of a precompiled one."""
    return (
        limits.fp8_kv_uses_jit
        and shape.cache_dtype == "fp8"
        and shape.compute_capability == 90
        and 64 % shape.group_size == 0
    )


def _has_kernel(shape: AttentionShape, limits: KernelLimits) -> bool:
    """Whether a kernel is compiled for this head size, on this card and block as far as any kernel takes those.

    A block or a card that no kernel takes at all is the fault of their own gates, not of the head size.
    """
    cards = limits.cards(shape.cache_dtype)
    return any(
        kernels.head_size == shape.head_size
        and (shape.tokens_per_block not in limits.blocks or shape.tokens_per_block in kernels.blocks)
        and (shape.compute_capability not in cards or shape.compute_capability in kernels.cards(shape.cache_dtype))
        for kernels in limits.compiled
    )


def _describe_kernels(limits: KernelLimits) -> str:
    """`128; 64 (block 64, compute capability 90)`: a set that takes all blocks and cards is named by its size alone."""
    texts = []
    for kernels in limits.compiled:
        conditions = []
        if set(kernels.blocks) < set(limits.blocks):
            conditions.append("block " + " or ".join(_block_text(block) for block in kernels.blocks))
        if set(kernels.compute_capabilities) < set(limits.cards("")):
            conditions.append("compute capability " + " or ".join(map(str, kernels.compute_capabilities)))
        texts.append(f"{kernels.head_size}" + (f" ({', '.join(conditions)})" if conditions else ""))
    return "; ".join(texts)


def _join(cards: tuple[int, ...]) -> str:
    return ", ".join(map(str, cards))


def _head_size_remedy(shape: AttentionShape, limits: KernelLimits) -> str:
    if shape.head_size < max(kernels.head_size for kernels in limits.compiled):
        return "pad_head_size pads the heads with zeros up to the next size that has a kernel (exact)"
    return "none: no multi-query kernel is compiled for a head size this large in any release from 0.8 to 1.2"


def _block_text(block: int | None) -> str:
    return "contiguous" if block is None else str(block)


ENFORCED_GATES: tuple[KernelGate, ...] = (
    enforced_gate(
        "data type",
        holds=lambda shape, limits: shape.dtype in ("float16", "bfloat16"),
        value=lambda shape: shape.dtype,
        demand=lambda limits: "float16 or bfloat16",
        message=lambda limits: limits.init_message,
        stage="build",
        remedy="convert with dtype float16 or bfloat16",
        source="gptAttentionCommon.cpp 0.9.0.dev2024022700 l.1483, 0.11.0.dev2024062500 l.1602-1628",
    ),
    enforced_gate(
        "cross attention",
        holds=lambda shape, limits: not shape.cross_attention,
        value=lambda shape: shape.cross_attention,
        demand=lambda limits: "decoder-only attention",
        message=lambda limits: limits.init_message,
        stage="build",
        remedy="none: an encoder-decoder model has no multi-query kernel",
        source="gptAttentionCommon.cpp 0.9.0.dev2024022700 l.1483, 0.11.0.dev2024062500 l.1602-1628",
    ),
    enforced_gate(
        "head counts",
        holds=lambda shape, limits: shape.query_heads % shape.kv_heads == 0,
        value=lambda shape: f"{shape.query_heads} / {shape.kv_heads}",
        demand=lambda limits: "query heads a multiple of key/value heads",
        message=lambda limits: "mNumHeads should be multiples of mNumKVHeads.",
        stage="build",
        remedy="none: the config is wrong",
        source="gptAttentionCommon.cpp 0.9.0.dev2024022700 l.1470, 0.11.0.dev2024062500 l.1619",
    ),
    enforced_gate(
        "query group",
        applies=lambda limits: limits.group_power_of_two,
        holds=lambda shape, limits: _is_power_of_two(shape.group_size),
        value=lambda shape: f"{shape.group_size:g}",
        demand=lambda limits: "a power of two",
        message=lambda limits: "numQHeadsPerKV should be power of 2 for Medusa",
        stage="build",
        remedy="pad_query_groups adds zero query heads up to the next power of two (exact); or use 0.11 or later",
        mended_by=("pad_query_groups",),
        source="gptAttentionCommon.cpp 0.9.0.dev2024022700 l.1473, 0.10.0.dev2024043000 l.1510; "
        "gone in 0.11.0.dev2024051400",
    ),
    enforced_gate(
        "multi-block mode",
        applies=lambda limits: limits.multi_block_mode == "refused",
        holds=lambda shape, limits: not shape.multi_block_mode,
        value=lambda shape: "on" if shape.multi_block_mode else "off",
        demand=lambda limits: "off",
        message=lambda limits: "Medusa doesn't support multi-block mode.",
        stage="build",
        remedy="leave multi_block_mode off when building",
        source="gptAttentionCommon.cpp 0.11.0.dev2024051400, 0.11.0.dev2024062500 l.1620; the library turns it off "
        "itself from 0.12.0.dev2024072300 (0.13.0.dev2024090300 l.1411)",
    ),
    enforced_gate(
        "head size",
        # The run-time compiled kernel has its own rule, the gate of its own below.
        holds=lambda shape, limits: _jit_kernel(shape, limits) or _has_kernel(shape, limits),
        value=lambda shape: shape.head_size,
        demand=_describe_kernels,
        remedy=_head_size_remedy,
        mended_by=("pad_head_size",),
        mendable=lambda shape, limits: shape.head_size < max(kernels.head_size for kernels in limits.compiled),
        source="decoderXQAImplPrecompiled.cpp (dispatcher: 0.13.0.dev2024090300 l.417-421; 64 from "
        "0.15.0.dev2024111200 l.415) and cubin/xqa_kernel_cubin.h (kernels with nqpkv_0: d_128 in all; d_64 with block "
        "64, on sm_90 from 0.15.0.dev2024111200, on sm_80 to sm_90 from 0.16.0.dev2024120300; no d_256 anywhere)",
    ),
    enforced_gate(
        "q scaling",
        holds=lambda shape, limits: shape.q_scaling == 1.0,
        value=lambda shape: f"{shape.q_scaling:g}",
        demand=lambda limits: "1",
        remedy="fold_scale multiplies the scaling into the query weights and bias (exact)",
        mended_by=("fold_scale",),
        source="decoderXQARunner.h 0.9.0.dev2024022700; XQA precompiled 0.13.0.dev2024090300 l.427",
    ),
    enforced_gate(
        "mask",
        holds=lambda shape, limits: shape.mask == "causal",
        value=lambda shape: shape.mask,
        demand=lambda limits: "causal",
        remedy="none: a mask that looks ahead or is block-sparse has no multi-query kernel",
        source="decoderXQARunner.h 0.9.0.dev2024022700; XQA precompiled 0.13.0.dev2024090300 l.423-434",
    ),
    enforced_gate(
        "tokens per block",
        holds=lambda shape, limits: _jit_kernel(shape, limits) or shape.tokens_per_block in limits.blocks,
        value=lambda shape: _block_text(shape.tokens_per_block),
        demand=lambda limits: " or ".join(_block_text(block) for block in limits.blocks),
        remedy="build with --tokens_per_block 64",
        source="decoderXQARunner.h 0.9.0.dev2024022700; decoderXQAImplPrecompiled.cpp 0.13.0.dev2024090300 l.440, "
        "0.16.0.dev2024121000 l.433; 32 in later ones",
    ),
    enforced_gate(
        "beam width",
        holds=lambda shape, limits: shape.beam_width == 1,
        value=lambda shape: shape.beam_width,
        demand=lambda limits: "1",
        remedy="build with --max_beam_width 1: Medusa verifies one greedy sequence",
        source="decoderXQARunner.h 0.9.0.dev2024022700; XQA precompiled 0.13.0.dev2024090300 l.445",
    ),
    enforced_gate(
        "window per layer",
        holds=lambda shape, limits: not shape.window_varies or window_covers(shape),
        value=lambda shape: "differs between layers" if shape.window_varies else "the same in every layer",
        demand=lambda limits: "the same in every layer",
        remedy="none when prompts reach the window; below it, build with max_seq_len at most the smallest window and "
        "drop the windows from the config (every layer then sees all of the past, which is the same)",
        source="XQA precompiled 0.13.0.dev2024090300 l.449 (cyclic window against largest window)",
    ),
    enforced_gate(
        "sink tokens",
        holds=lambda shape, limits: shape.sink_tokens == 0,
        value=lambda shape: shape.sink_tokens,
        demand=lambda limits: "0",
        remedy="run without a sink token length",
        source="XQA precompiled 0.13.0.dev2024090300 l.453 (streaming-llm)",
    ),
    enforced_gate(
        "compute capability",
        holds=lambda shape, limits: (
            shape.compute_capability is None or shape.compute_capability in limits.cards(shape.cache_dtype)
        ),
        value=lambda shape: "not given" if shape.compute_capability is None else shape.compute_capability,
        demand=lambda limits: f"{_join(limits.cards(''))} (fp8 cache: {_join(limits.cards('fp8'))})",
        remedy="use a card with compute capability 8.0, 8.6, 8.9 or 9.0 (8.9 or 9.0 for an fp8 cache); Blackwell cards "
        "(10.0, 12.0) have no multi-query kernel in the TensorRT backend",
        source="cubin/xqa_kernel_cubin.h 0.9.0.dev2024022700 to 0.16.0.dev2024121000: nqpkv_0 for sm 80, 86, 89, 90; "
        "e4m3: 89, 90; xqaDispatcher.cpp of later releases for 100",
    ),
    enforced_gate(
        "run-time kernel: positions",
        applies=lambda limits: limits.fp8_kv_uses_jit,
        holds=lambda shape, limits: not _jit_kernel(shape, limits) or shape.position_kind in ROPE_KINDS,
        value=lambda shape: shape.position_kind,
        demand=lambda limits: "rotary, when the cache is fp8 on compute capability 90",
        remedy="keep the KV cache in the model's own type: what stands for ALiBi is too coarse in an fp8 cache",
        source="decoderXQARunner.cpp and decoderXQAImplJIT supportConfigCommon of releases from April 2025 on",
    ),
    enforced_gate(
        "run-time kernel: sizes",
        applies=lambda limits: limits.fp8_kv_uses_jit,
        holds=lambda shape, limits: (
            not _jit_kernel(shape, limits)
            or (
                shape.head_size % 16 == 0
                and 16 <= shape.head_size <= 256
                and shape.group_size <= 32
                and (shape.tokens_per_block is None or shape.tokens_per_block in (8, 16, 32, 64, 128))
            )
        ),
        value=lambda shape: f"head size {shape.head_size}, group {shape.group_size:g}",
        demand=lambda limits: "head size a multiple of 16 up to 256, group up to 32, block 8 to 128",
        remedy="pad_head_size pads the heads up to a multiple of 16 (exact); a group above 32 has no remedy",
        mended_by=("pad_head_size",),
        mendable=lambda shape, limits: shape.head_size < 256 and shape.group_size <= 32,
        source="decoderXQAImplJIT supportConfigCommon of later releases",
    ),
)
