"""The build step: the exact `trtllm-build` command line for the port's release, and the engine where one can be built.

Without tensorrt_llm or a GPU the plan is the product and the verdict is "not run": that is not a pass of the engine.
Paths in the written plan are relative to the run folder, which is what travels to the build machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.engine.command import CommandPlan
from porting_kit.engine.plan import plan_build
from porting_kit.engine.record import write_record
from porting_kit.engine.run import CommandRun, find_environment, run_command
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.run_folder import write_json, write_text
from porting_kit.steps.context import PortRun, finish_step, running_step
from porting_kit.steps.convert import TREE_FILE
from porting_kit.steps.prerequisites import require_steps

ENGINE = "trtllm"
PLAN_FILE = "build_plan.json"
SCRIPT_FILE = "build.sh"


@dataclass(frozen=True)
class BuildResult:
    """What the build step made: always a plan, and how its execution went where it was executed."""

    outcome: StepOutcome
    plan: CommandPlan
    run: CommandRun | None

    def document(self) -> dict[str, Any]:
        """The `--json` document, with the plan."""
        return {**self.outcome.as_dict(), "plan": self.plan.as_dict()}


def build_port(
    run: PortRun, *, plan_only: bool = False, on_phase: Callable[[str, float], None] | None = None
) -> BuildResult:
    """Plan the build of the run's checkpoint, and execute it where tensorrt_llm and a GPU are.

    Args:
        run: the run; patch and convert must have finished in it.
        plan_only: write the plan and run nothing; the verdict is then that of the plan.
        on_phase: called with each phase of the build and the seconds since its start.

    Raises:
        RunFolderError: a step before is missing or stale.
        CheckpointError, TreeError, PortFileError, SourceTreeError: no command line can be right.
    """
    require_steps(run, "patch", "convert")
    with running_step(run, "build") as watch:
        plan, basis = plan_port(run, run.folder.root)
        portable, _ = plan_port(run, Path())
        write_json(run.folder.engine / PLAN_FILE, portable.as_dict())
        write_text(run.folder.engine / SCRIPT_FILE, _as_script(portable))
        executed = None if plan_only else _execute(run, plan, on_phase)
        outcome = _judge(plan, basis, executed)
        return BuildResult(finish_step(run, outcome, watch), portable, executed)


def plan_port(run: PortRun, root: Path) -> tuple[CommandPlan, str]:
    """The build command with paths under `root`, and how its release was settled."""
    from porting_kit.architectures.base_config import read_base_config
    from porting_kit.releases.pinning import pin_release
    from porting_kit.releases.shape import attention_shape
    from porting_kit.steps.preflight import open_port_tree, target_profile

    port = run.port
    source_tree = open_port_tree(port)
    patch = run.folder.outcome("patch")
    config = json.loads((run.folder.checkpoint / "config.json").read_text(encoding="utf-8"))
    choices = json.loads((run.folder.checkpoint / TREE_FILE).read_text(encoding="utf-8"))
    release = target_profile(port, source_tree).release
    basis = "the release the port names"
    if release is None:
        shape = attention_shape(read_base_config(port.base_path), port.target, dtype=port.dtype)
        release = pin_release(shape).candidate.facts.since
        basis = "the port names no release; this is the one preflight would pin"
    module = next(product for product in patch.products if product.endswith(".py"))
    plan = plan_build(
        config,
        checkpoint_dir=root / "checkpoint",
        output_dir=root / "engine" / ENGINE,
        target=port.target,
        num_nodes=len(choices) + 1,
        release=release,
        module_file=root / module,
        class_name=patch.figures["class_name"],
        tree=source_tree if source_tree.release == release else None,
    )
    return plan, basis


def _execute(run: PortRun, plan: CommandPlan, on_phase: Callable[[str, float], None] | None) -> CommandRun:
    folder = run.folder.engine / ENGINE
    executed = run_command(
        plan,
        log_file=run.folder.engine / "build.log",
        expected_files=(folder / "config.json", folder / "rank0.engine"),
        on_phase=on_phase,
        environment=find_environment(),
    )
    if executed.verdict is Verdict.PASS:
        choices = json.loads((run.folder.checkpoint / TREE_FILE).read_text(encoding="utf-8"))
        write_record(folder, plan=plan, choices=choices, checkpoint_dir=run.folder.checkpoint, seconds=executed.seconds)
    return executed


def _judge(plan: CommandPlan, basis: str, executed: CommandRun | None) -> StepOutcome:
    figures: dict[str, Any] = {
        "release": plan.release,
        "release_basis": basis,
        "checked_against": plan.checked_against,
        "flags": len(plan.flags),
        "remarks": list(plan.remarks),
    }
    products = (f"engine/{PLAN_FILE}", f"engine/{SCRIPT_FILE}")
    if executed is None:
        summary = f"plan for TensorRT-LLM {plan.release} written, nothing run"
        return StepOutcome("build", Verdict.PASS, summary, figures=figures | {"plan_only": True}, products=products)
    figures |= {"build_seconds": executed.seconds, "phases": executed.phases or {}}
    if executed.verdict is Verdict.NOT_RUN:
        summary = f"not run: {executed.reason}; the plan for TensorRT-LLM {plan.release} is written"
        return StepOutcome("build", Verdict.NOT_RUN, summary, figures=figures, products=products)
    covered = (Coverage.ENGINE,) if executed.verdict is Verdict.PASS else ()
    figures["next_step"] = executed.next_step
    return StepOutcome(
        "build",
        executed.verdict,
        executed.reason,
        covered=covered,
        figures=figures,
        products=(*products, "engine/build.log", f"engine/{ENGINE}"),
        failing_gate=None if covered else "trtllm-build",
    )


def _as_script(plan: CommandPlan) -> str:
    header = "#!/bin/sh\n# Run this where TensorRT-LLM is; the run folder travels as a whole.\nset -e\n"
    return f'{header}cd "$(dirname "$0")/.."\n{plan.shell}'


def format_build(result: BuildResult) -> str:
    """The command with the reason of each flag, and a closing line, for a terminal."""
    lines = [result.plan.shell]
    lines += [f"  --{flag.name}: {flag.reason}" for flag in result.plan.flags]
    lines += [f"remark: {remark}" for remark in result.plan.remarks]
    lines.append(f"build: {result.outcome.verdict.value} - {result.outcome.summary}")
    return "\n".join(lines)
