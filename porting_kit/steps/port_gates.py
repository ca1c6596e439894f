"""Every gate of a port but the kernels': sizes, lengths, release and resources, and the verdict on all of them.

Headers and config alone are read, so that preflight, convert and build can all ask.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from porting_kit.architectures.base_config import BaseConfig
from porting_kit.architectures.release_needs import find_release_faults, find_unmet_needs
from porting_kit.conversion.heads import HeadSet
from porting_kit.conversion.plan import ConversionPlan
from porting_kit.kernel_fit.plan import FitPlan
from porting_kit.medusa.tree import MedusaTree
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.port import Port
from porting_kit.releases.facts import find_release_facts
from porting_kit.releases.kernels import GateResult, KernelProfile
from porting_kit.releases.pinning import Pin
from porting_kit.releases.port_gates import (
    batch_gate,
    dtype_gate,
    length_gate,
    model_class_gate,
    model_need_gate,
    pipeline_parallel_gate,
    position_gate,
    tensor_parallel_gate,
    tree_gate,
    vocabulary_gate,
    window_gate,
)
from porting_kit.releases.resources import (
    DTYPE_BYTES,
    count_parameters,
    disk_gate,
    estimate_memory,
    kv_bytes_per_token,
    memory_gate,
)
from porting_kit.releases.shape import AttentionShape
from porting_kit.steps.fit import describe_fit

MAX_DRAFT_LEN = 63
ADVISORY_GATES = ("dtype", "lengths", "batch", "pipeline parallel")
"""Silent gates that warn: what they say may or may not happen, and the align step can tell."""


def list_port_gates(
    port: Port, base: BaseConfig, heads: HeadSet, tree: MedusaTree, profile: KernelProfile, shape: AttentionShape
) -> tuple[GateResult, ...]:
    """Ranks, vocabulary, tree, dtype and lengths; with a release, what it does to positions, batches and this class."""
    target = port.target
    gates = [
        tensor_parallel_gate(
            tp_size=target.tp_size,
            query_heads=base.num_heads,
            kv_heads=base.num_kv_heads,
            intermediate_size=base.intermediate_size,
        ),
        pipeline_parallel_gate(pp_size=target.pp_size, num_layers=base.num_layers),
        vocabulary_gate(vocab_size=base.vocab_size, tp_size=target.tp_size, head_rows=heads.vocab_size),
        tree_gate(num_drafts=tree.num_drafts, depth=tree.depth, num_heads=heads.num_heads, max_draft_len=MAX_DRAFT_LEN),
        dtype_gate(source_dtype=base.dtype, dtype=port.dtype),
        length_gate(
            max_seq_len=target.max_seq_len,
            max_input_len=target.max_input_len,
            max_positions=base.max_positions,
            position_kind=base.position_kind,
            scaling_factor=float((base.rope_scaling or {}).get("factor") or 1.0),
        ),
    ]
    window = shape.sliding_window
    if profile.limits is None and window is not None and not shape.window_varies and target.max_seq_len > window:
        gates.append(window_gate(window=window, max_seq_len=target.max_seq_len))
    if profile.release is not None:
        facts = find_release_facts(profile.release)
        gates += [
            position_gate(
                position_kind=base.position_kind, rope_scaling=base.rope_scaling, facts=facts, release=profile.release
            ),
            batch_gate(max_batch_size=target.max_batch_size, release=profile.release, facts=facts),
        ]
        gates += [model_class_gate(fault, profile.release) for fault in find_release_faults(base, profile.release)]
        needs = find_unmet_needs(base, profile.release, target.tp_size)
        gates += [model_need_gate(need, profile.release) for need in needs]
    return tuple(gates)


def list_resource_gates(
    port: Port,
    base: BaseConfig,
    heads: HeadSet,
    tree: MedusaTree,
    plan: ConversionPlan,
    fitted: AttentionShape,
    run_folder: Path,
) -> tuple[GateResult, ...]:
    """The card's memory, and the disk of the run folder."""
    target = port.target
    parameters = count_parameters(piece.shape for planned in plan.tensors for piece in planned.pieces)
    cache_dtype = port.dtype if target.kv_cache_type == "auto" else target.kv_cache_type
    estimate = estimate_memory(
        parameters=parameters,
        dtype=port.dtype,
        kv_token_bytes=kv_bytes_per_token(
            num_layers=base.num_layers,
            kv_heads=fitted.kv_heads,
            head_size=fitted.head_size,
            cache_dtype=cache_dtype,
            tp_size=target.tp_size,
            pp_size=target.pp_size,
        ),
        max_batch_size=target.max_batch_size,
        max_seq_len=target.max_seq_len,
        num_nodes=tree.num_nodes,
        num_heads=heads.num_heads,
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=base.intermediate_size,
        max_num_tokens=max(target.max_input_len, target.max_batch_size * tree.num_nodes),
        tokens_per_block=target.tokens_per_block,
        tp_size=target.tp_size,
        pp_size=target.pp_size,
    )
    place = next(folder for folder in (run_folder, *run_folder.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    return (
        memory_gate(estimate, card_bytes=None),
        disk_gate(weight_bytes=parameters * DTYPE_BYTES[port.dtype], free_bytes=free),
    )


def judge_gates(gates: tuple[GateResult, ...], profile: KernelProfile, pin: Pin, fit: FitPlan | None) -> StepOutcome:
    """Preflight's outcome: refused by an enforced gate, else failed by a silent one that does not only warn."""
    refused = [gate for gate in gates if gate.verdict == "refused"]
    silent = [gate for gate in gates if gate.verdict == "silent" and gate.name not in ADVISORY_GATES]
    # Where no fit was found, what stands in its way is a gate that no transform mends.
    if fit is None:
        refused.sort(key=lambda gate: bool(gate.mended_by))
    worst = (refused or silent or [None])[0]
    where = f"TensorRT-LLM {profile.release}" if profile.release else "no release named, kernel gates not judged"
    figures: dict[str, Any] = {
        "target_release": profile.release,
        "gates_passed": sum(gate.verdict == "pass" for gate in gates),
        "gates_refused": [gate.name for gate in refused],
        "gates_silent": [gate.name for gate in gates if gate.verdict == "silent"],
        "pin": pin.candidate.facts.name,
        "pin_reason": pin.reason,
        "fit": describe_fit(fit) if fit is not None else None,
        "gates": [gate.as_dict() for gate in gates],
    }
    if worst is None:
        return StepOutcome("preflight", Verdict.PASS, f"{len(gates)} gates pass ({where})", figures=figures)
    verdict = Verdict.REFUSED if refused else Verdict.FAIL
    figures["next_step"] = worst.remedy
    summary = f"{worst.name}: {worst.value} ({where}); {worst.effect}"
    return StepOutcome("preflight", verdict, summary, figures=figures, failing_gate=worst.name)
