"""What kernels leave out or read wrongly in the generation phase; the context phase is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from porting_kit.diagnosis import config_faults as config
from porting_kit.diagnosis import runtime_faults as runtime
from porting_kit.diagnosis import tree_faults as tree
from porting_kit.diagnosis.fault import EVERY, EVERY_RELEASE, GENERATION, Fault
from porting_kit.diagnosis.head_faults import lacks_heads
from porting_kit.diagnosis.port_state import PortState


def _kernel(**changes: bool) -> Callable[[PortState], PortState]:
    """Exact kernels but for these attributes of the profile."""
    name = " ".join(changes)
    return lambda state: replace(state, kernel=replace(state.kernel, name=f"hypothesis: {name}", **changes))


def needs_position(word: str) -> Callable[[PortState], str | None]:
    """Applies to ports whose positions are of this kind."""

    def check(state: PortState) -> str | None:
        kind = str(state.config.get("position_embedding_type"))
        return None if word in kind else f"positions are {kind}"

    return check


def _needs_softcap(state: PortState) -> str | None:
    found = any("soft" in key and value for key, value in state.config.items())
    return None if found else "no soft-cap in the config"


def _needs_alibi_tree(state: PortState) -> str | None:
    return needs_position("alibi")(state) or needs_branches(state)


def needs_branches(state: PortState) -> str | None:
    """Applies to ports with heads and a tree that is not one path."""
    if reason := lacks_heads(state):
        return reason
    return None if len(state.tree.leaf_paths) > 1 else "the tree is a chain"


KERNEL_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="alibi_dropped_in_generation",
        kind="kernel",
        title="ALiBi bias dropped in the generation phase",
        symptom="the first token is right, the text after it is poor; no error is raised",
        cause="the XQA multi-query kernel that verifies the draft tree takes no ALiBi slopes; the context phase's "
        "kernel does",
        fix="let the kernel fit say ALiBi in words that this kernel knows: fit: auto in the port file (write_positions "
        "in bfloat16, fold_alibi in float16); no other position_embedding_type can mend it by itself",
        releases=f"{EVERY_RELEASE}, precompiled kernels; the just-in-time kernels refuse ALiBi",
        source="gptAttentionCommon.cpp l.235 and xqaParams.h l.49, 0.14.0.dev2024100800; measured on an H200",
        apply=_kernel(alibi_in_generation=False),
        applies=needs_position("alibi"),
        phase=GENERATION,
    ),
    Fault(
        name="alibi_by_cache_slot",
        kind="kernel",
        title="ALiBi distance counted in cache slots, not in tree depth",
        symptom="the first token of each step is right, deeper ones are often wrong, more so in wide trees",
        cause="the bias is slope times the distance of the cache rows; a draft's row is its number in the tree, not "
        "its depth",
        fix="compute the distance from spec_decoding_position_offsets, or fit the model (fit: auto): rotary dimensions "
        "and written positions follow those offsets",
        releases="kernels that take slopes in the generation phase (masked multi-head attention in place of XQA)",
        source="decoderMaskedMultiheadAttentionTemplate.h, linear bias by time step, 0.11.0.dev2024062500",
        apply=lambda state: state.with_wrapper(tree.number_offsets),
        applies=_needs_alibi_tree,
        phase=GENERATION,
    ),
    Fault(
        name="softcap_dropped_in_generation",
        kind="kernel",
        title="soft-cap on attention logits dropped in the generation phase",
        symptom="small deviations after the first token, larger where attention is sharp",
        cause="the multi-query kernel does not read the tanh scale",
        fix="none in these releases: choose a release whose kernels have it, or a base without soft-cap",
        releases=EVERY_RELEASE,
        source="decoderXQAImplPrecompiled.cpp, 0.14.0.dev2024100800: no use of the tanh scale",
        apply=_kernel(softcap_in_generation=False),
        applies=_needs_softcap,
        phase=GENERATION,
    ),
    Fault(
        name="one_position_id_per_request",
        kind="kernel",
        title="learned positions fed with one id per request",
        symptom="drafts are judged as if they all stood at one position; at batch 2 a shape error",
        cause="both runtimes feed position_ids of one value per request, counted in iterations and not in tokens",
        fix="use the patched module of this port: it computes positions in the graph from past length and offsets",
        releases=EVERY_RELEASE,
        source="runtime/generation.py l.2606 and speculativeDecodingMode.h l.78, 0.14.0.dev2024100800",
        apply=_kernel(one_position_id_per_request=True),
        applies=needs_position("learned"),
        phase=GENERATION,
    ),
    Fault(
        name="sliding_window_ignored",
        kind="kernel",
        title="sliding window ignored",
        symptom="right until the text is longer than the window, then it drifts away",
        cause="the window is a run-time option (max_attention_window_size), not part of the checkpoint, and the kernel "
        "that verifies several tokens does not check for it; where the base's layers differ (Gemma 2), its class gives "
        "every layer the whole past",
        fix="build with max_seq_len at most the window; a longer text cannot be right in these releases",
        releases=EVERY_RELEASE,
        source="decoderXQAImplPrecompiled.cpp l.480, 0.13.0.dev2024090300",
        apply=config.drop_window,
        applies=config.lacks_window,
        phase=EVERY,
    ),
    Fault(
        name="kv_scale_one",
        kind="kernel",
        title="quantised KV cache read with scale 1",
        symptom="the first token is right, the text after it is poor",
        cause="the kernel's scale of an int8 cache is the constant 1.0",
        fix="keep the KV cache in float16 or bfloat16 (no --int8_kv_cache), or use 0.11 or later",
        releases="0.8 to 0.10",
        source="decoderXQAImplPrecompiled.cpp l.322, 0.9.0.dev2024022700; l.428, 0.10.0.dev2024043000",
        apply=lambda state: state.with_wrapper(runtime.ClippedCacheModel),
        phase=GENERATION,
    ),
)
