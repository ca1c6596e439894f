"""The kernel gates: what the generation phase with speculative decoding demands of a model, as data.

In this phase there is one kernel family (XQA with several query tokens) and no fallback: what it refuses stops the
engine at its first generation step, and what it does not look at is computed without (silent). Each gate says what it
looks at, in which releases, what the library prints, what follows, what mends it, and where that was read.

Paths are of the TensorRT-LLM repository: `gptAttentionCommon.cpp` is
cpp/tensorrt_llm/plugins/gptAttentionCommon/gptAttentionCommon.cpp, `XQA precompiled` is
cpp/tensorrt_llm/kernels/decoderMaskedMultiheadAttention/decoderXQAImplPrecompiled.cpp (decoderXQARunner.h in 0.8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from porting_kit.releases.facts import KernelLimits
from porting_kit.releases.shape import ALIBI_KINDS, PER_REQUEST_POSITION_KINDS, ROPE_KINDS, AttentionShape

ENFORCED = "enforced"
SILENT = "silent"
STAGES = ("build", "generation")


@dataclass(frozen=True)
class KernelGate:
    """One demand of the kernels.

    Args:
        name: what is looked at; the key of preflight's table.
        kind: `enforced` (the library stops) or `silent` (it runs and the result is wrong).
        applies: whether a release has this gate at all.
        holds: whether a shape passes it.
        value: what the shape has, for the table.
        demand: what the release wants, for the table and the message.
        message: what the library prints, None for a silent gate.
        stage: `build` when the plugin refuses at build time, `generation` at the first generation step.
        effect: what the user sees.
        remedy: what to do about it.
        mended_by: kernel-fit transforms (or `patch_positions`) that mend it, best first.
        source: where it was read.
    """

    name: str
    kind: str
    applies: Callable[[KernelLimits], bool]
    holds: Callable[[AttentionShape, KernelLimits], bool]
    value: Callable[[AttentionShape], object]
    demand: Callable[[KernelLimits], str]
    message: Callable[[KernelLimits], str | None]
    stage: str
    effect: str
    remedy: str
    mended_by: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        if self.kind not in (ENFORCED, SILENT):
            raise ValueError(f"gate {self.name}: unknown kind {self.kind!r}")
        if self.stage not in STAGES:
            raise ValueError(f"gate {self.name}: unknown stage {self.stage!r}")


def _always(limits: KernelLimits) -> bool:
    return True


def _no_kernel(limits: KernelLimits) -> str:
    return limits.no_kernel_message


def _nothing(limits: KernelLimits) -> None:
    return None


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


def _block_text(block: int | None) -> str:
    return "contiguous" if block is None else str(block)


def _enforced(
    name: str,
    *,
    holds: Callable[[AttentionShape, KernelLimits], bool],
    value: Callable[[AttentionShape], object],
    demand: Callable[[KernelLimits], str],
    remedy: str,
    source: str,
    applies: Callable[[KernelLimits], bool] = _always,
    message: Callable[[KernelLimits], str | None] = _no_kernel,
    stage: str = "generation",
    mended_by: tuple[str, ...] = (),
) -> KernelGate:
    effect = (
        "the engine cannot be built"
        if stage == "build"
        else "the engine builds, and stops at its first generation step"
    )
    return KernelGate(name, ENFORCED, applies, holds, value, demand, message, stage, effect, remedy, mended_by, source)


def _silent(
    name: str,
    *,
    holds: Callable[[AttentionShape, KernelLimits], bool],
    value: Callable[[AttentionShape], object],
    demand: str,
    effect: str,
    remedy: str,
    source: str,
    applies: Callable[[KernelLimits], bool] = _always,
    mended_by: tuple[str, ...] = (),
) -> KernelGate:
    return KernelGate(
        name, SILENT, applies, holds, value, lambda limits: demand, _nothing, "generation", effect, remedy, mended_by,
        source,
    )  # fmt: skip


GATES: tuple[KernelGate, ...] = (
    _enforced(
        "data type",
        holds=lambda shape, limits: shape.dtype in ("float16", "bfloat16"),
        value=lambda shape: shape.dtype,
        demand=lambda limits: "float16 or bfloat16",
        message=lambda limits: limits.init_message,
        stage="build",
        remedy="convert with dtype float16 or bfloat16",
        source="gptAttentionCommon.cpp 0.9.0.dev2024022700 l.1483, 0.11.0.dev2024062500 l.1602-1628",
    ),
    _enforced(
        "cross attention",
        holds=lambda shape, limits: not shape.cross_attention,
        value=lambda shape: shape.cross_attention,
        demand=lambda limits: "decoder-only attention",
        message=lambda limits: limits.init_message,
        stage="build",
        remedy="none: an encoder-decoder model has no multi-query kernel",
        source="gptAttentionCommon.cpp 0.9.0.dev2024022700 l.1483, 0.11.0.dev2024062500 l.1602-1628",
    ),
    _enforced(
        "head counts",
        holds=lambda shape, limits: shape.query_heads % shape.kv_heads == 0,
        value=lambda shape: f"{shape.query_heads} / {shape.kv_heads}",
        demand=lambda limits: "query heads a multiple of key/value heads",
        message=lambda limits: "mNumHeads should be multiples of mNumKVHeads.",
        stage="build",
        remedy="none: the config is wrong",
        source="gptAttentionCommon.cpp 0.9.0.dev2024022700 l.1470, 0.11.0.dev2024062500 l.1619",
    ),
    _enforced(
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
    _enforced(
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
    _enforced(
        "head size",
        # The run-time compiled kernel has its own rule, the gate of its own below.
        holds=lambda shape, limits: _jit_kernel(shape, limits) or _has_kernel(shape, limits),
        value=lambda shape: shape.head_size,
        demand=_describe_kernels,
        remedy="pad_head_size pads the heads with zeros up to the next size that has a kernel (exact); "
        "a head size above the largest kernel has no remedy",
        mended_by=("pad_head_size",),
        source="decoderXQAImplPrecompiled.cpp (dispatcher: 0.13.0.dev2024090300 l.417-421; 64 from 0.15.0.dev2024111200 "
        "l.415) and cubin/xqa_kernel_cubin.h (kernels with nqpkv_0: d_128 in all, d_64 with block 64 on sm_90 from "
        "0.15.0.dev2024111200 and on sm_80 to sm_90 from 0.16.0.dev2024120300, no d_256 anywhere)",
    ),
    _enforced(
        "q scaling",
        holds=lambda shape, limits: shape.q_scaling == 1.0,
        value=lambda shape: f"{shape.q_scaling:g}",
        demand=lambda limits: "1",
        remedy="fold_scale multiplies the scaling into the query weights and bias (exact)",
        mended_by=("fold_scale",),
        source="decoderXQARunner.h 0.9.0.dev2024022700; XQA precompiled 0.13.0.dev2024090300 l.427",
    ),
    _enforced(
        "mask",
        holds=lambda shape, limits: shape.mask == "causal",
        value=lambda shape: shape.mask,
        demand=lambda limits: "causal",
        remedy="none: a mask that looks ahead or is block-sparse has no multi-query kernel",
        source="decoderXQARunner.h 0.9.0.dev2024022700; XQA precompiled 0.13.0.dev2024090300 l.423-434",
    ),
    _enforced(
        "tokens per block",
        holds=lambda shape, limits: _jit_kernel(shape, limits) or shape.tokens_per_block in limits.blocks,
        value=lambda shape: _block_text(shape.tokens_per_block),
        demand=lambda limits: " or ".join(_block_text(block) for block in limits.blocks),
        remedy="build with --tokens_per_block 64",
        source="decoderXQARunner.h 0.9.0.dev2024022700; decoderXQAImplPrecompiled.cpp 0.13.0.dev2024090300 l.440, "
        "0.16.0.dev2024121000 l.433; 32 in later ones",
    ),
    _enforced(
        "beam width",
        holds=lambda shape, limits: shape.beam_width == 1,
        value=lambda shape: shape.beam_width,
        demand=lambda limits: "1",
        remedy="build with --max_beam_width 1: Medusa verifies one greedy sequence",
        source="decoderXQARunner.h 0.9.0.dev2024022700; XQA precompiled 0.13.0.dev2024090300 l.445",
    ),
    _enforced(
        "window per layer",
        holds=lambda shape, limits: not shape.window_varies,
        value=lambda shape: "differs between layers" if shape.window_varies else "the same in every layer",
        demand=lambda limits: "the same in every layer",
        remedy="none when prompts reach the window; below it, build with max_seq_len at most the smallest window and "
        "drop the windows from the config (every layer then sees all of the past, which is the same)",
        source="XQA precompiled 0.13.0.dev2024090300 l.449 (cyclic window against largest window)",
    ),
    _enforced(
        "sink tokens",
        holds=lambda shape, limits: shape.sink_tokens == 0,
        value=lambda shape: shape.sink_tokens,
        demand=lambda limits: "0",
        remedy="run without a sink token length",
        source="XQA precompiled 0.13.0.dev2024090300 l.453 (streaming-llm)",
    ),
    _enforced(
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
    _enforced(
        "run-time kernel: positions",
        applies=lambda limits: limits.fp8_kv_uses_jit,
        holds=lambda shape, limits: not _jit_kernel(shape, limits) or shape.position_kind in ROPE_KINDS,
        value=lambda shape: shape.position_kind,
        demand=lambda limits: "rotary, when the cache is fp8 on compute capability 90",
        remedy="fold_alibi turns ALiBi into rotary positions; or keep the KV cache in the model's own type",
        mended_by=("fold_alibi",),
        source="decoderXQARunner.cpp and decoderXQAImplJIT supportConfigCommon of later releases (PR 3269)",
    ),
    _enforced(
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
        remedy="pad_head_size pads the heads up to a multiple of 16 (exact)",
        mended_by=("pad_head_size",),
        source="decoderXQAImplJIT supportConfigCommon of later releases",
    ),
    _silent(
        "ALiBi",
        holds=lambda shape, limits: shape.position_kind not in ALIBI_KINDS,
        value=lambda shape: shape.position_kind,
        demand="no ALiBi: the kernel takes no slopes",
        effect="the context phase applies ALiBi, the generation phase does not: every token after the first comes "
        "from wrong attention, with no message",
        remedy="fold_alibi expresses the bias as extra rotary dims, which the kernel does compute "
        "(small measured error)",
        mended_by=("fold_alibi",),
        source="gptAttentionCommon.cpp 0.13.0.dev2024090300 (slopes set in xqaParams), xqaParams.h l.49-50 (not used "
        "by any kernel argument)",
    ),
    _silent(
        "positions outside the kernel",
        holds=lambda shape, limits: shape.positions_in_graph or shape.position_kind not in PER_REQUEST_POSITION_KINDS,
        value=lambda shape: shape.position_kind,
        demand="rotary inside the kernel, or positions computed in the graph",
        effect="both runtimes feed one position id per request: every node of the tree gets the same position (batch "
        "1), or the engine stops with a shape error (batch above 1)",
        remedy="patch_positions: the patched model computes positions from past length and position offsets",
        mended_by=("patch_positions",),
        source="runtime/generation.py 0.13.0.dev2024090300 (position_ids from context length + step); "
        "speculativeDecodingMode.h (updatesPositionIds leaves Medusa out)",
    ),
    _silent(
        "logit soft-cap",
        holds=lambda shape, limits: not shape.softcap,
        value=lambda shape: "none" if not shape.softcap else f"{shape.softcap:g}",
        demand="none: the kernel applies no tanh",
        effect="attention logits are not capped in the generation phase; the result differs, with no message",
        remedy="none that is exact; check the alignment, and use another release or model if it fails",
        source="no use of a tanh scale in XQA precompiled or xqaParams.h, 0.13.0.dev2024090300",
    ),
    _silent(
        "relative attention bias",
        holds=lambda shape, limits: not shape.relative_bias and shape.position_kind != "relative",
        value=lambda shape: "yes" if shape.relative_bias or shape.position_kind == "relative" else "none",
        demand="none: the kernel takes no bias",
        effect="the bias is left out in the generation phase, with no message",
        remedy="none: use a model without a relative attention bias",
        source="XQA precompiled 0.13.0.dev2024090300 shouldUse (not looked at) and its kernel arguments (no bias)",
    ),
    _silent(
        "KV-cache scale",
        applies=lambda limits: not limits.kv_scale_applied,
        holds=lambda shape, limits: shape.cache_dtype not in ("int8", "fp8"),
        value=lambda shape: shape.cache_dtype,
        demand="a cache in the model's own type: the kernel's scale is fixed to 1",
        effect="an int8 or fp8 cache is read with scale 1; the result is wrong unless the calibrated scale is 1",
        remedy="keep the KV cache in float16 or bfloat16, or use 0.11 or later",
        source="decoderXQAImplPrecompiled.cpp 0.9.0.dev2024022700 l.322, 0.10.0.dev2024043000 l.428",
    ),
    _silent(
        "sliding window",
        holds=lambda shape, limits: (
            shape.sliding_window is None
            or shape.window_varies
            or (shape.max_seq_len is not None and shape.max_seq_len <= shape.sliding_window)
        ),
        value=lambda shape: "none" if shape.sliding_window is None else f"{shape.sliding_window} tokens",
        demand="max_seq_len at most the window",
        effect="the dispatcher does not check for it when it verifies several tokens: beyond the window the result is "
        "not to be relied on, with no message",
        remedy="build with max_seq_len at most the window",
        source="XQA precompiled 0.13.0.dev2024090300 l.480-487 (remark at the check)",
    ),
)
"""Every gate, in the order in which the library meets them: build, dispatch, then what nobody looks at."""
