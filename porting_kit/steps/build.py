"""The build step: the exact `trtllm-build` command line for the port's release, and the engine where one can be built.

Without tensorrt_llm or a GPU the plan is the product and the verdict is "not run": that is not a pass of the engine.
Paths in the written plan are relative to the run folder, which is what travels to the build machine; with it go the
capture script, which runs the engine there on the port's prompts, and the command for upstream's own run script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.engine.capture_kit import SCRIPT_NAME, write_script
from porting_kit.engine.command import CommandPlan
from porting_kit.engine.messages import LogReading, read_log
from porting_kit.engine.plan import plan_build
from porting_kit.engine.record import write_record
from porting_kit.engine.run import CommandRun, find_environment, run_command
from porting_kit.engine.run_script import write_prompt_file
from porting_kit.errors import KernelRefusal, PortingKitError
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.steps.context import PortRun, finish_step, running_step
from porting_kit.steps.convert import TREE_FILE
from porting_kit.steps.prerequisites import read_checkpoint_document, require_steps
from porting_kit.whole_files import write_json, write_text

ENGINE = "trtllm"
PLAN_FILE = "build_plan.json"
SCRIPT_FILE = "build.sh"
RUN_FILE = "run.sh"
PROMPTS_FILE = "prompts.csv"
KIT_FILES = (SCRIPT_NAME, RUN_FILE, PROMPTS_FILE)


@dataclass(frozen=True)
class BuildResult:
    """What the build step made: always a plan, and how its execution went where it was executed.

    Args:
        outcome: the step's outcome.
        plan: the build's command, paths in the run folder.
        run: how it went; None when nothing was to be run.
        run_plan: the command for TensorRT-LLM's own run script on the port's prompts; None without a capture script.
    """

    outcome: StepOutcome
    plan: CommandPlan
    run: CommandRun | None
    run_plan: CommandPlan | None = None

    @property
    def run_text(self) -> str:
        """The run script's command as text, or where to read why there is none."""
        return "none: the remarks say why" if self.run_plan is None else self.run_plan.shell

    def document(self) -> dict[str, Any]:
        """The `--json` document, with the plan."""
        return {**self.outcome.as_dict(), "plan": self.plan.as_dict()}


def build_port(
    run: PortRun,
    *,
    plan_only: bool = False,
    on_phase: Callable[[str, float], None] | None = None,
    time_limit_seconds: float | None = None,
    keep_logits: bool = False,
) -> BuildResult:
    """Plan the build of the run's checkpoint, and execute it where tensorrt_llm and a GPU are.

    Args:
        run: the run; patch and convert must have finished in it.
        plan_only: write the plan and run nothing; the verdict is then that of the plan.
        on_phase: called with each phase of the build and the seconds since its start.
        time_limit_seconds: the build is stopped after this time; no limit when None.
        keep_logits: the engine keeps the logits of accepted tokens, so that its arithmetic can be compared.

    Raises:
        RunFolderError: a step before is missing or stale.
        CheckpointError, TreeError, PortFileError, SourceTreeError: no command line can be right.
        KernelRefusal: preflight refuses the port; nothing is planned.
    """
    preflight = _require_possible(run)
    require_steps(run, "patch", "convert")
    with running_step(run, "build") as watch:
        plan, basis = plan_port(run, run.folder.root, keep_logits)
        portable, _ = plan_port(run, Path(), keep_logits)
        write_json(run.folder.engine / PLAN_FILE, portable.as_dict())
        run_plan, remarks = _write_capture_kit(run, portable)
        write_text(run.folder.engine / SCRIPT_FILE, _as_script(portable, record=run_plan is not None))
        executed = None if plan_only else _execute(run, plan, on_phase, time_limit_seconds)
        written = (PLAN_FILE, SCRIPT_FILE, *(KIT_FILES if run_plan else ()))
        outcome = _judge(plan, basis, executed, (*_describe_preflight(preflight, plan), *remarks), written)
        return BuildResult(finish_step(run, outcome, watch), portable, executed, run_plan)


def _require_possible(run: PortRun) -> StepOutcome:
    """Preflight's verdict on the port's engine. Raises KernelRefusal, in its words, when it refuses."""
    from porting_kit.steps.preflight import judge_engine

    verdict = judge_engine(run.port)
    if verdict.verdict is not Verdict.REFUSED:
        return verdict
    raise KernelRefusal(
        f"no engine can be planned, for preflight refuses the port: {verdict.summary}",
        expected="a port that preflight lets pass",
        found=f"gate {verdict.failing_gate!r} refuses it",
        where=f"gate {verdict.failing_gate!r}",
        next_step=verdict.figures["next_step"],
    )


def _describe_preflight(verdict: StepOutcome, plan: CommandPlan) -> tuple[str, ...]:
    if verdict.figures["target_release"] is None:
        ask = f"porting-kit preflight PORT.yaml -p kernel=release:{plan.release}"
        return (f"the port names no release, so nobody asked whether kernels of {plan.release} take the model: {ask}",)
    return () if verdict.verdict is Verdict.PASS else (f"preflight fails this port: {verdict.summary}",)


def plan_port(run: PortRun, root: Path, keep_logits: bool = False) -> tuple[CommandPlan, str]:
    """The build command with paths under `root`, and how its release was settled."""
    from porting_kit.releases.pinning import pin_release
    from porting_kit.releases.shape import attention_shape
    from porting_kit.steps.preflight import open_port_tree, read_port_base, target_profile

    port = run.port
    source_tree = open_port_tree(port)
    patch = run.folder.outcome("patch")
    config = read_checkpoint_document(run)
    choices = read_checkpoint_document(run, TREE_FILE)
    release = target_profile(port, source_tree).release
    basis = "the release the port names"
    if release is None:
        shape = attention_shape(read_port_base(port, None), port.target, dtype=port.dtype)
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
        gather_generation_logits=keep_logits,
    )
    return plan, basis


def _write_capture_kit(run: PortRun, plan: CommandPlan) -> tuple[CommandPlan | None, tuple[str, ...]]:
    """The capture script, and the same prompts with the command for upstream's run script.

    A base whose config or tokenizer cannot be read here can still be built: then there is a remark, and no script.
    """
    from porting_kit.steps.capture_request import make_capture_request, plan_run_script
    from porting_kit.steps.preflight import open_port_tree

    for name in KIT_FILES:
        (run.folder.engine / name).unlink(missing_ok=True)
    try:
        wanted = make_capture_request(run, plan.release)
    except PortingKitError as error:
        return None, (f"no capture script: {error.subject}",)
    write_script(run.folder.engine / SCRIPT_NAME, wanted.request)
    write_prompt_file(run.folder.engine / PROMPTS_FILE, wanted.request["prompts"])
    tree = open_port_tree(run.port)
    run_plan = plan_run_script(
        wanted.request, tree if tree.release == plan.release else None, tokenizer_dir=Path("tokenizer")
    )
    note = "# The base's own folder stands at `tokenizer`: run.py loads a tokenizer even for prompts of token ids.\n"
    write_text(run.folder.engine / RUN_FILE, _as_script(run_plan, note))
    return run_plan, (*wanted.remarks, *run_plan.remarks)


def _execute(
    run: PortRun,
    plan: CommandPlan,
    on_phase: Callable[[str, float], None] | None,
    time_limit_seconds: float | None,
) -> CommandRun:
    folder = run.folder.engine / ENGINE
    environment = find_environment()
    ranks = run.port.target.tp_size * run.port.target.pp_size
    executed = run_command(
        plan,
        log_file=run.folder.engine / "build.log",
        expected_files=(folder / "config.json", *(folder / f"rank{rank}.engine" for rank in range(ranks))),
        time_limit_seconds=time_limit_seconds,
        on_phase=on_phase,
        environment=environment,
    )
    if executed.verdict is Verdict.PASS:
        choices = read_checkpoint_document(run, TREE_FILE)
        write_record(
            folder,
            plan=plan,
            choices=choices,
            checkpoint_dir=run.folder.checkpoint,
            seconds=executed.seconds,
            card=environment.card,
        )
    return executed


def _judge(
    plan: CommandPlan, basis: str, executed: CommandRun | None, remarks: tuple[str, ...], written: tuple[str, ...]
) -> StepOutcome:
    figures: dict[str, Any] = {
        "release": plan.release,
        "release_basis": basis,
        "checked_against": plan.checked_against,
        "flags": len(plan.flags),
        "remarks": [*plan.remarks, *remarks],
    }
    products = tuple(f"engine/{name}" for name in written)
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


def _as_script(plan: CommandPlan, note: str = "", *, record: bool = False) -> str:
    header = "#!/bin/sh\n# Run this where TensorRT-LLM is; the run folder travels as a whole.\nset -e\n"
    tail = f"python3 engine/{SCRIPT_NAME} record\n" if record else ""
    return f'{header}{note}cd "$(dirname "$0")/.."\n{plan.shell}{tail}'


@dataclass(frozen=True)
class LogResult:
    """What the log of a build made elsewhere says."""

    outcome: StepOutcome
    reading: LogReading

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        found = [
            {"name": found.message.name, "line": found.line_number, "text": found.line, "cause": found.message.cause}
            for found in self.reading.messages
        ]
        return {**self.outcome.as_dict(), "messages": found, "phases": list(self.reading.phases)}


def explain_log(file: Path) -> LogResult:
    """Read the log of a build that ran elsewhere. Raises CapturedFileError: no such file, empty, or no text."""
    reading = read_log(file)
    fatal = next((found.message.name for found in reading.messages if found.message.fatal), None)
    has_passed = fatal is None and reading.is_complete
    outcome = StepOutcome(
        "build",
        Verdict.PASS if has_passed else Verdict.FAIL,
        reading.summary,
        figures={"release": reading.release, "lines": reading.lines, "next_step": reading.next_step},
        failing_gate=None if has_passed else fatal or "the log breaks off",
    )
    return LogResult(outcome, reading)


def format_log(result: LogResult) -> str:
    """Each recognised line with its cause and remedy, for a terminal."""
    lines = [f"reached: {', '.join(result.reading.phases) or 'nothing'}"]
    for found in result.reading.messages:
        lines += [f"line {found.line_number}: {found.line}", f"  cause: {found.message.cause}"]
        lines.append(f"  fix:   {found.message.next_step}")
    if result.reading.next_step and not result.reading.messages:
        lines.append(f"next step: {result.reading.next_step}")
    lines.append(f"log: {result.outcome.said}")
    return "\n".join(lines)


def format_build(result: BuildResult) -> str:
    """The command with the reason of each flag, and a closing line, for a terminal."""
    lines = [result.plan.shell]
    lines += [f"  --{flag.name}: {flag.reason}" for flag in result.plan.flags]
    lines += [f"remark: {remark}" for remark in result.outcome.figures["remarks"]]
    lines.append(f"build: {result.outcome.said}")
    return "\n".join(lines)
