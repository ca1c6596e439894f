"""The kernel gates that nobody watches: the engine builds and runs, and what it computes is wrong.

Paths as in `enforced_gates`.
"""

from __future__ import annotations

from porting_kit.releases.gate import KernelGate, silent_gate
from porting_kit.releases.shape import ALIBI_KINDS, PER_REQUEST_POSITION_KINDS

SILENT_GATES: tuple[KernelGate, ...] = (
    silent_gate(
        "ALiBi",
        holds=lambda shape, limits: shape.position_kind not in ALIBI_KINDS,
        value=lambda shape: shape.position_kind,
        demand="no ALiBi: the kernel takes no slopes",
        effect="the context phase applies ALiBi, the generation phase does not: every token after the first comes "
        "from wrong attention, with no message",
        remedy="write_positions (bfloat16) puts slopes into queries and positions into keys, exactly; fold_alibi "
        "expresses the bias as extra rotary dims (small measured error): the kernel computes both",
        mended_by=("write_positions", "fold_alibi"),
        source="gptAttentionCommon.cpp 0.13.0.dev2024090300 (slopes set in xqaParams), xqaParams.h l.49-50 (not used "
        "by any kernel argument)",
    ),
    silent_gate(
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
    silent_gate(
        "logit soft-cap",
        holds=lambda shape, limits: not shape.softcap,
        value=lambda shape: "none" if not shape.softcap else f"{shape.softcap:g}",
        demand="none: the kernel applies no tanh",
        effect="attention logits are not capped in the generation phase; the result differs, with no message",
        remedy="none that is exact; check the alignment, and use another release or model if it fails",
        source="no use of a tanh scale in XQA precompiled or xqaParams.h, 0.13.0.dev2024090300",
    ),
    silent_gate(
        "relative attention bias",
        holds=lambda shape, limits: not shape.relative_bias and shape.position_kind != "relative",
        value=lambda shape: "yes" if shape.relative_bias or shape.position_kind == "relative" else "none",
        demand="none: the kernel takes no bias",
        effect="the bias is left out in the generation phase, with no message",
        remedy="none: use a model without a relative attention bias",
        source="XQA precompiled 0.13.0.dev2024090300 shouldUse (not looked at) and its kernel arguments (no bias)",
    ),
    silent_gate(
        "KV-cache scale",
        applies=lambda limits: not limits.kv_scale_applied,
        holds=lambda shape, limits: shape.cache_dtype not in ("int8", "fp8"),
        value=lambda shape: shape.cache_dtype,
        demand="a cache in the model's own type: the kernel's scale is fixed to 1",
        effect="an int8 or fp8 cache is read with scale 1; the result is wrong unless the calibrated scale is 1",
        remedy="keep the KV cache in float16 or bfloat16, or use 0.11 or later",
        source="decoderXQAImplPrecompiled.cpp 0.9.0.dev2024022700 l.322, 0.10.0.dev2024043000 l.428",
    ),
    silent_gate(
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
