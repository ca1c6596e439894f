"""The preflight step: from headers and config alone, say whether the port can work, and what stands in its way.

No weight is read and no torch imported, so the verdict comes in the first second. Enforced gates refuse (the engine
would stop), silent gates fail (it would run and be wrong). Whether the emulator agrees is the align step's question.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from porting_kit.architectures.base_config import BaseConfig, read_base_config
from porting_kit.architectures.release_needs import find_release_faults
from porting_kit.conversion.base_checkpoint import plan_joining
from porting_kit.conversion.config_fields import FieldRow, build_config
from porting_kit.conversion.heads import HeadSet, read_head_set
from porting_kit.conversion.plan import ConversionPlan, plan_conversion
from porting_kit.conversion.tensor_source import TensorSource, open_tensor_source
from porting_kit.errors import BaseModelError, PortFileError, RunFolderError
from porting_kit.kernel_fit.plan import FitPlan
from porting_kit.medusa.tree import MedusaTree, read_tree
from porting_kit.medusa.tree_limits import check_tree, trim_tree
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.port import Port, load_port
from porting_kit.releases.facts import find_release_facts
from porting_kit.releases.kernels import GateResult, KernelProfile, evaluate_gates, kernel_profile
from porting_kit.releases.pinning import Pin, pin_release
from porting_kit.releases.port_gates import (
    batch_gate,
    dtype_gate,
    length_gate,
    model_class_gate,
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
from porting_kit.releases.shape import AttentionShape, attention_shape
from porting_kit.run_folder import require_writable
from porting_kit.source_tree import SourceTree, open_source_tree
from porting_kit.steps.context import RUNS_FOLDER, PortRun, finish_step, open_port_run, running_step
from porting_kit.steps.fit import describe_fit, plan_port_fit
from porting_kit.steps.joined_base import open_joined_base
from porting_kit.steps.prompts import require_prompts

MAX_DRAFT_LEN = 63
STOCK_TREE = "mc_sim_7b_63"


@dataclass(frozen=True)
class PreflightResult:
    """What preflight found.

    Args:
        outcome: the verdict; `refused` for an enforced gate, `fail` for a silent one.
        gates: every gate in order, kernels first.
        base: the base's normalised config.
        heads: what the heads' headers say.
        tree: the tree of the port, trimmed to the heads when the port leaves it to us.
        plan: the conversion as it would be done.
        field_table: the config fields the checkpoint would get.
        shape: the attention shape as it is.
        fit: the kernel fit that was planned; None when `auto` finds none.
        target_release: the release whose kernels were judged, None when the port names none.
        pin: which release to build with, and why.
    """

    outcome: StepOutcome
    gates: tuple[GateResult, ...]
    base: BaseConfig
    heads: HeadSet
    tree: MedusaTree
    plan: ConversionPlan
    field_table: tuple[FieldRow, ...]
    shape: AttentionShape
    fit: FitPlan | None
    target_release: str | None
    pin: Pin

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        document = self.outcome.as_dict()
        figures = {name: value for name, value in document["figures"].items() if name != "gates"}
        return {**document, "figures": figures, "gates": [gate.as_dict() for gate in self.gates]}


def check_port_file(
    port_file: Path, *, run_folder: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> PreflightResult:
    """Preflight of a port file, with its outcome in the run folder like every step's.

    Where the port's own run folder cannot be written, there is a verdict without an outcome, and it is said on stderr.

    Raises:
        RunFolderError: a run folder that was asked for belongs to something else, or cannot be written.
    """
    try:
        run = open_port_run(port_file, run_folder=run_folder, overrides=overrides)
        require_writable(run.folder.step("preflight"))
    except RunFolderError as error:
        if run_folder is not None:
            raise
        print(f"preflight: its outcome is not kept; {error.message}", file=sys.stderr)
        return check_port(load_port(port_file, overrides))
    return preflight_port(run)


def preflight_port(run: PortRun) -> PreflightResult:
    """Preflight of a run: the same check, with its outcome written into the run folder."""
    with running_step(run, "preflight") as watch:
        result = check_port(run.port, run.folder.root)
        return replace(result, outcome=finish_step(run, result.outcome, watch))


def check_port(port: Port, run_folder: Path | None = None) -> PreflightResult:
    """Evaluate every gate of a port; writes nothing.

    Args:
        run_folder: where the products would go; the port's own under the working directory when None.

    Raises:
        PortFileError, SourceTreeError, BaseModelError, HeadsError, TreeError, ConversionError: unusable input.
        CheckpointError: the port's base checkpoint cannot be used.
    """
    source_tree = open_port_tree(port)
    source = open_tensor_source(port.base_path)
    profile = target_profile(port, source_tree)
    release = target_release(source_tree, profile)
    base = read_port_base(port, release, source)
    heads = read_port_heads(port, base)
    plan = plan_conversion(
        base, source, tp_size=1, pp_size=1, dtype=port.dtype, heads=heads, release=release
    )  # ranks are a gate below, with the sizes that would work, not an error here
    base = plan.base
    base.require_supported()
    require_prompts(port)
    source_tree.find_model(base.architecture)
    tree = read_port_tree(port, heads)
    _, field_table = build_config(base, dtype=port.dtype, heads=heads, max_draft_len=MAX_DRAFT_LEN)

    shape = attention_shape(base, port.target, dtype=port.dtype, positions_in_graph=True)
    fit = _plan_fit_if_possible(port, base, profile)
    if port.base_checkpoint_path is not None:
        plan = plan_joining(*open_joined_base(port, base, fit), heads)
    fitted = fit.fitted if fit is not None else shape
    gates = (
        *evaluate_gates(shape, profile, fitted=fitted),
        *_port_gates(port, base, heads, tree, profile, shape),
        *_resource_gates(port, base, heads, tree, plan, fitted, run_folder or Path(RUNS_FOLDER) / port.name),
    )
    pin = pin_release(fitted)
    return PreflightResult(
        outcome=_judge(gates, profile, pin, fit),
        gates=gates,
        base=base,
        heads=heads,
        tree=tree,
        plan=plan,
        field_table=field_table,
        shape=shape,
        fit=fit,
        target_release=profile.release,
        pin=pin,
    )


def open_port_tree(port: Port) -> SourceTree:
    """The port's source tree, whose release must be the one the port states.

    Raises:
        SourceTreeError: no such tree.
        PortFileError: the port states another release than the tree has.
    """
    tree = open_source_tree(port.source)
    stated = port.trtllm.release
    if stated != "auto" and tree.kind != "bundled" and stated != tree.release:
        raise PortFileError(
            "the port file and the source tree disagree about the release",
            expected=f"trtllm.release: {stated}",
            found=f"the tree says {tree.release}",
            where=tree.root,
            next_step="name the tree of the stated release, or write release: auto",
        )
    return tree


def target_profile(port: Port, tree: SourceTree) -> KernelProfile:
    """The kernels the engine will run on: those the port names, otherwise those of the tree's release.

    The bundled definitions belong to no release, so a port that names none has no kernel gates.
    """
    if port.kernel.startswith("release:"):
        return kernel_profile(port.kernel)
    if port.trtllm.release != "auto":
        return kernel_profile(f"release:{port.trtllm.release}")
    return kernel_profile("exact") if tree.kind == "bundled" else kernel_profile(f"release:{tree.release}")


def target_release(tree: SourceTree, profile: KernelProfile) -> str | None:
    """The release the checkpoint is for: the tree's own; for the bundled definitions that of the kernels, if any."""
    return profile.release if tree.kind == "bundled" else tree.release


def read_port_base(port: Port, release: str | None, source: TensorSource | None = None) -> BaseConfig:
    """The base's config, settled by its tensor names and by the release (which decides the architecture's name)."""
    source = source or open_tensor_source(port.base_path)
    return read_base_config(port.base_path, source.names()).for_release(release)


def read_port_heads(port: Port, base: BaseConfig, *, check_values: bool = False) -> HeadSet:
    """The heads the port names, checked against the base's sizes.

    Raises:
        HeadsError: see `read_head_set`; or base and heads are swapped.
    """
    heads = read_head_set(port.heads_path, use=port.heads.use, check_values=check_values)
    heads.check_against(base)
    return heads


def read_port_tree(port: Port, heads: HeadSet) -> MedusaTree:
    """The port's tree. `auto` is the stock tree, trimmed to the heads in use; any other is used as it is.

    Raises:
        TreeError: not a usable tree, or deeper than the heads.
    """
    if port.tree == "auto":
        return trim_tree(read_tree(STOCK_TREE), num_heads=heads.num_heads, max_draft_len=MAX_DRAFT_LEN)
    spec = port.tree
    if isinstance(spec, str) and (port.folder / spec).is_file():
        spec = str(port.folder / spec)
    tree = read_tree(spec)
    check_tree(tree, num_heads=heads.num_heads, max_draft_len=MAX_DRAFT_LEN)
    return tree


def _plan_fit_if_possible(port: Port, base: BaseConfig, profile: KernelProfile) -> FitPlan | None:
    """The fit, or None where no combination passes: the gates then show which one is not mended."""
    try:
        return plan_port_fit(port, base, profile)
    except BaseModelError:
        return None


def _port_gates(
    port: Port, base: BaseConfig, heads: HeadSet, tree: MedusaTree, profile: KernelProfile, shape: AttentionShape
) -> tuple[GateResult, ...]:
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
    return tuple(gates)


def _resource_gates(
    port: Port,
    base: BaseConfig,
    heads: HeadSet,
    tree: MedusaTree,
    plan: ConversionPlan,
    fitted: AttentionShape,
    run_folder: Path,
) -> tuple[GateResult, ...]:
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


def _judge(gates: tuple[GateResult, ...], profile: KernelProfile, pin: Pin, fit: FitPlan | None) -> StepOutcome:
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


VALUE_COLUMNS = 48
"""Longer values are cut in the terminal's table; `--json` has them whole."""


def shorten(value: str) -> str:
    """A value that fits its column, marked where it was cut."""
    return value if len(value) <= VALUE_COLUMNS else f"{value[: VALUE_COLUMNS - 1]}…"


def describe_pin(pin: Pin) -> str:
    """Which release to build with, in one line; plain about it when none takes the model as it is."""
    if pin.usable:
        return pin.reason
    gate = (*pin.candidate.refused, *pin.candidate.silent)[0]
    return f"none takes the model as it is. Nearest: {pin.reason}. To mend it: {gate.remedy}"


ADVISORY_GATES = ("dtype", "lengths", "batch", "pipeline parallel")
"""Silent gates that warn: what they say may or may not happen, and the align step can tell."""


def format_preflight(result: PreflightResult) -> str:
    """One table for a terminal: gate, value, verdict, remedy."""
    rows = [("gate", "value", "verdict", "remedy")]
    rows += [(gate.name, gate.value, gate.verdict, gate.remedy or "") for gate in result.gates]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    widths[1] = min(widths[1], VALUE_COLUMNS)
    lines = [
        f"{row[0]:<{widths[0]}}  {shorten(row[1]):<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    for warning in result.heads.warnings:
        lines.append(f"warning: {warning}")
    if result.fit is not None and result.fit.steps:
        lines.append(f"fit: {result.fit}")
    lines.append(f"release to build with: {describe_pin(result.pin)}")
    if result.target_release is None:
        lines.append("kernels: not judged, for no release is named; name one with -p kernel=release:<release>")
    lines.append(f"preflight: {result.outcome.verdict.value} - {result.outcome.summary}")
    return "\n".join(lines)
