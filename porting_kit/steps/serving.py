"""The serving step: settings that go with the port's engine, and a look at the serving files a user already has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.alignment.reference import read_reference_settings
from porting_kit.engine.engine_config import EngineConfig
from porting_kit.engine.engine_folder import open_engine_folder
from porting_kit.engine.serve_check import check_llm_options, check_serve_command
from porting_kit.engine.server_files import read_serving_file
from porting_kit.engine.serving import (
    check_commands,
    check_server_settings,
    make_server_settings,
    write_llm_snippet,
    write_pbtxt,
)
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.releases.kernels import GateResult
from porting_kit.releases.serve_facts import PROGRAM
from porting_kit.steps.build import ENGINE, plan_port
from porting_kit.steps.context import PortRun, Stopwatch
from porting_kit.steps.convert import TREE_FILE
from porting_kit.steps.prerequisites import read_checkpoint_document, require_steps
from porting_kit.whole_files import write_text

FOLDER = "serving"
PBTXT_FILE, SNIPPET_FILE = "config.pbtxt", "serve.py"


@dataclass(frozen=True)
class ServingResult:
    """What was written, and the gates of each file that was looked at."""

    outcome: StepOutcome
    settings: dict[str, str]
    snippet: str | None
    gates: dict[str, tuple[GateResult, ...]]

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        gates = {file: [gate.as_dict() for gate in rows] for file, rows in self.gates.items()}
        return {**self.outcome.as_dict(), "settings": self.settings, "snippet": self.snippet, "gates": gates}


def write_serving(run: PortRun, *, engine_dir: Path | None = None, check: Sequence[Path] = ()) -> ServingResult:
    """Write the settings for an engine, and check existing files against it.

    Args:
        run: the run; patch and convert are run when they have not been.
        engine_dir: the engine's folder; the run's own when None. Without one the plan stands in for it.
        check: config.pbtxt files, shell scripts, and YAML files with commands.

    Raises:
        CheckpointError: the folder holds no whole engine, or one of another tree, checkpoint, release or card.
        CapturedFileError: a file to check is missing, empty, no text, or holds nothing of Medusa's.
    """
    require_steps(run, "patch", "convert")
    watch = Stopwatch()
    choices = read_checkpoint_document(run, TREE_FILE)
    plan, _ = plan_port(run, Path())
    folder = engine_dir or run.folder.engine / ENGINE
    is_built = engine_dir is not None or (folder / "config.json").is_file()
    if is_built:
        engine = open_engine_folder(
            folder,
            config=read_checkpoint_document(run),
            choices=choices,
            checkpoint_dir=run.folder.checkpoint,
            release=plan.release,
            compute_capability=run.port.target.compute_capability,
        )
    else:
        engine = _planned_engine(run, plan.release)
    place = str(folder.resolve()) if is_built else f"engine/{ENGINE}"
    settings = make_server_settings(engine, choices, place)
    snippet = write_llm_snippet(
        engine.release,
        choices,
        num_heads=engine.num_medusa_heads,
        max_draft_len=engine.max_draft_len,
        engine_dir=place,
        tokenizer_dir=str(run.port.base_path) if is_built else "tokenizer",
    )
    write_text(run.folder.engine / FOLDER / PBTXT_FILE, write_pbtxt(settings))
    if snippet is not None:
        write_text(run.folder.engine / FOLDER / SNIPPET_FILE, snippet)
    end_ids = read_reference_settings(run.port.base_path)[0].end_ids if check else ()
    gates = {str(file): _check_file(file, engine, choices, end_ids) for file in check}
    return ServingResult(_judge(engine, is_built, snippet, gates, watch), settings, snippet, gates)


def _check_file(
    file: Path, engine: EngineConfig, choices: list[list[int]], end_ids: Sequence[int]
) -> tuple[GateResult, ...]:
    found = read_serving_file(file)
    gates = [gate for one in found.settings for gate in check_server_settings(one, engine, choices, end_ids)]
    served = [command for command in found.commands if command.program == PROGRAM]
    gates += check_commands([command for command in found.commands if command.program != PROGRAM], engine.release)
    gates += [gate for command in served for gate in check_serve_command(command, engine, choices)]
    return (*gates, *(check_llm_options(found.options, engine, choices) if found.options else ()))


def _planned_engine(run: PortRun, release: str) -> EngineConfig:
    """The engine that the plan would build."""
    config = read_checkpoint_document(run)
    target = run.port.target
    return EngineConfig(
        release=release,
        architecture=config["architecture"],
        mode="medusa",
        max_draft_len=config["max_draft_len"],
        num_medusa_heads=config["num_medusa_heads"],
        max_batch_size=target.max_batch_size,
        max_input_len=target.max_input_len,
        max_seq_len=target.max_seq_len,
        max_num_tokens=None,
        tokens_per_block=target.tokens_per_block,
        tp_size=target.tp_size,
        pp_size=target.pp_size,
        gather_generation_logits=False,
        where="the plan",
    )


def _judge(
    engine: EngineConfig,
    is_built: bool,
    snippet: str | None,
    gates: dict[str, tuple[GateResult, ...]],
    watch: Stopwatch,
) -> StepOutcome:
    refused = [(file, gate) for file, rows in gates.items() for gate in rows if gate.verdict != "pass"]
    of = "the engine" if is_built else "the planned engine"
    summary = f"settings for {of} of TensorRT-LLM {engine.release} written"
    if gates:
        summary += f"; {len(gates)} files looked at, {len(refused)} contradictions"
    if refused:
        file, gate = refused[0]
        summary += f", first in {Path(file).name}: {gate.name} is {gate.value}"
    products = [f"engine/{FOLDER}/{PBTXT_FILE}"] + ([f"engine/{FOLDER}/{SNIPPET_FILE}"] if snippet else [])
    return StepOutcome(
        "serving",
        Verdict.FAIL if refused else Verdict.PASS,
        summary,
        figures={"release": engine.release, "next_step": refused[0][1].remedy if refused else None},
        products=tuple(products),
        seconds=round(watch.seconds, 3),
        failing_gate=refused[0][1].name if refused else None,
    )


def format_serving(result: ServingResult) -> str:
    """Each contradiction with its effect and remedy, and what was written, for a terminal."""
    lines = []
    for file, gates in result.gates.items():
        lines.append(file)
        for gate in gates:
            if gate.verdict == "pass":
                lines.append(f"  pass     {gate.name}: {gate.value}")
            else:
                lines.append(f"  REFUSED  {gate.name}: {gate.value}, expected {gate.expected}")
                lines += [f"           then: {gate.effect}", f"           fix:  {gate.remedy}"]
    lines += [f"  {product}" for product in result.outcome.products]
    lines.append(f"serving: {result.outcome.said}")
    return "\n".join(lines)
