"""The preflight step: from headers and config alone, say whether the port can work, and what stands in its way.

No weight is read and no torch imported, so the verdict comes in the first second. Enforced gates refuse (the engine
would stop), silent gates fail (it would run and be wrong). Whether the emulator agrees is the align step's question.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from porting_kit.architectures.base_config import BaseConfig, read_base_config
from porting_kit.conversion.base_checkpoint import plan_joining
from porting_kit.conversion.config_fields import FieldRow, build_config
from porting_kit.conversion.heads import HeadSet, read_head_set
from porting_kit.conversion.plan import ConversionPlan, plan_conversion
from porting_kit.conversion.tensor_source import TensorSource, open_tensor_source
from porting_kit.errors import BaseModelError, PortFileError, RunFolderError
from porting_kit.kernel_fit.plan import FitPlan
from porting_kit.medusa.tree import MedusaTree, read_tree
from porting_kit.medusa.tree_limits import check_tree, trim_tree
from porting_kit.outcomes import StepOutcome
from porting_kit.port import Port, load_port
from porting_kit.releases.kernels import GateResult, KernelProfile, evaluate_gates, kernel_profile
from porting_kit.releases.pinning import Pin, pin_release
from porting_kit.releases.shape import AttentionShape, attention_shape
from porting_kit.source_tree import SourceTree, open_source_tree
from porting_kit.steps.context import (
    RUNS_FOLDER,
    PortRun,
    find_tree_file,
    finish_step,
    open_port_run,
    running_step,
)
from porting_kit.steps.fit import plan_port_fit
from porting_kit.steps.joined_base import open_joined_base
from porting_kit.steps.port_gates import MAX_DRAFT_LEN, judge_gates, list_port_gates, list_resource_gates
from porting_kit.steps.prompts import require_prompts
from porting_kit.whole_files import require_writable

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
        profile: the kernels that were judged; those of no release when the port names none.
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
    profile: KernelProfile
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
    """Evaluate every gate of a port, and look for its prompts; writes nothing.

    Args:
        run_folder: where the products would go; the port's own under the working directory when None.

    Raises:
        PortFileError, SourceTreeError, BaseModelError, HeadsError, TreeError, ConversionError: unusable input.
        CheckpointError: the port's base checkpoint cannot be used.
    """
    result = evaluate_port(port, run_folder)
    require_prompts(port)
    return result


def judge_engine(port: Port) -> StepOutcome:
    """Preflight's verdict on a port's engine, for the steps after it: without the prompts, and without the disk."""
    result = evaluate_port(port)
    gates = tuple(gate for gate in result.gates if gate.name != "disk")
    return judge_gates(gates, result.profile, result.pin, result.fit)


def evaluate_port(port: Port, run_folder: Path | None = None) -> PreflightResult:
    """Every gate of a port, as `check_port` evaluates them."""
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
    source_tree.find_model(base.architecture)
    tree = read_port_tree(port, heads)
    _, field_table = build_config(base, dtype=port.dtype, heads=heads, max_draft_len=MAX_DRAFT_LEN)

    shape = attention_shape(base, port.target, dtype=port.dtype, positions_in_graph=True)
    fit = _plan_fit_if_possible(port, base, profile)
    if port.base_checkpoint_path is not None:
        plan = plan_joining(*open_joined_base(port, base, source, fit, release, source_tree), heads)
    fitted = fit.fitted if fit is not None else shape
    gates = (
        *evaluate_gates(shape, profile, fitted=fitted),
        *list_port_gates(port, base, heads, tree, profile, shape),
        *list_resource_gates(port, base, heads, tree, plan, fitted, run_folder or Path(RUNS_FOLDER) / port.name),
    )
    pin = pin_release(fitted)
    return PreflightResult(
        outcome=judge_gates(gates, profile, pin, fit),
        gates=gates,
        base=base,
        heads=heads,
        tree=tree,
        plan=plan,
        field_table=field_table,
        shape=shape,
        fit=fit,
        profile=profile,
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
    file = find_tree_file(port)
    tree = read_tree(port.tree if file is None else str(file))
    check_tree(tree, num_heads=heads.num_heads, max_draft_len=MAX_DRAFT_LEN)
    return tree


def _plan_fit_if_possible(port: Port, base: BaseConfig, profile: KernelProfile) -> FitPlan | None:
    """The fit, or None where no combination passes: the gates then show which one is not mended."""
    try:
        return plan_port_fit(port, base, profile)
    except BaseModelError:
        return None


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
    for warning in (*result.heads.warnings, *result.heads.compare_base(result.base)):
        lines.append(f"warning: {warning}")
    if result.fit is not None and result.fit.steps:
        lines.append(f"fit: {result.fit}")
    lines.append(f"release to build with: {describe_pin(result.pin)}")
    if result.profile.release is None:
        lines.append("kernels: not judged, for no release is named; name one with -p kernel=release:<release>")
    lines.append(f"preflight: {result.outcome.said}")
    return "\n".join(lines)
