"""Run a planned command where tensorrt_llm and a GPU are present; say "not run" where they are not.

The command runs in a process group of its own: log streamed to a file, phases reported as they pass, stopped at a time
limit, the library's messages read. This is the only module that looks for tensorrt_llm; even it imports nothing of it,
because importing it takes the GPU.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from porting_kit.engine.command import CommandPlan
from porting_kit.engine.messages import PHASES, VERSION_LINE, RecognisedMessage, recognise_messages
from porting_kit.errors import EnvironmentMissing
from porting_kit.outcomes import Verdict
from porting_kit.releases.build_flags import compare_releases
from porting_kit.releases.facts import find_release_facts

STOP_GRACE_SECONDS = 10.0
TAIL_LINES = 20


@dataclass(frozen=True)
class EngineEnvironment:
    """What this machine has for building and running engines.

    Args:
        program: path of trtllm-build, None when there is none.
        release: installed release of tensorrt_llm, None when this Python has none.
        gpus: names of the cards.
        card: name and compute_capability of the first card, None when the driver does not say.
    """

    program: str | None
    release: str | None
    gpus: tuple[str, ...]
    card: dict[str, str] | None = None

    @property
    def missing(self) -> str | None:
        """Why nothing can be built here, None when something can."""
        if self.program is None:
            return "no tensorrt_llm here (no trtllm-build on the PATH)"
        if not self.gpus:
            return "no GPU here"
        return None


@dataclass(frozen=True)
class CommandRun:
    """How a command went.

    Args:
        verdict: pass, fail or not_run.
        reason: one sentence.
        seconds: wall time.
        log_file: everything it printed, None when it did not run.
        phases: phase -> seconds after the start.
        messages: catalogue entries found in the log.
        tail: the last lines of the log.
        returncode: of the process; negative for a signal; None when it did not run.
        release: the release the program itself stated.
    """

    verdict: Verdict
    reason: str
    seconds: float = 0.0
    log_file: Path | None = None
    phases: dict[str, float] | None = None
    messages: tuple[RecognisedMessage, ...] = ()
    tail: tuple[str, ...] = ()
    returncode: int | None = None
    release: str | None = None

    @property
    def next_step(self) -> str | None:
        """What to do about the first fatal message, None when there is none."""
        return next((found.message.next_step for found in self.messages if found.message.fatal), None)


def find_environment() -> EngineEnvironment:
    """Look for trtllm-build, the installed release and the cards, importing neither tensorrt_llm nor torch."""
    try:
        release = metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        release = None
    return EngineEnvironment(shutil.which("trtllm-build"), release, _list_gpus(), _describe_card())


def _list_gpus() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in listing.stdout.splitlines() if line.startswith("GPU "))


def _describe_card() -> dict[str, str] | None:
    """Name and compute capability of the first card, as the driver states them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    name, comma, capability = listing.stdout.partition("\n")[0].rpartition(",")
    return (
        {"name": name.strip(), "compute_capability": capability.strip()} if comma and not listing.returncode else None
    )


def run_command(
    plan: CommandPlan,
    *,
    log_file: Path,
    expected_files: tuple[Path, ...] = (),
    time_limit_seconds: float | None = None,
    on_phase: Callable[[str, float], None] | None = None,
    environment: EngineEnvironment | None = None,
) -> CommandRun:
    """Run a plan, or say why it cannot run here.

    Args:
        plan: from `plan_build` or `plan_inference`.
        log_file: where everything it prints goes; kept whatever happens.
        expected_files: files that must exist afterwards and hold something.
        time_limit_seconds: the process group is stopped after this time; no limit when None.
        on_phase: called with each phase and the seconds since the start.
        environment: what the machine has; found when None.

    Returns:
        not_run when tensorrt_llm or a GPU is missing; fail for a return code, a time limit or a missing file.

    Raises:
        EnvironmentMissing: the installed release is not the one the plan is for; the differences are listed.
    """
    environment = environment or find_environment()
    if environment.missing is not None:
        return CommandRun(Verdict.NOT_RUN, environment.missing)
    if environment.release is not None:
        require_same_release(plan, environment.release)
    started = time.monotonic()
    lines, phases, returncode, timed_out = _stream(plan, log_file, time_limit_seconds, on_phase, started)
    seconds = time.monotonic() - started
    stated = next((match.group(1) for line in lines if (match := VERSION_LINE.search(line))), None)
    messages = recognise_messages(lines)
    verdict, reason = _judge(returncode, timed_out, seconds, messages, expected_files, plan, stated)
    return CommandRun(
        verdict, reason, seconds, log_file, phases, messages, tuple(lines[-TAIL_LINES:]), returncode, stated
    )


def require_same_release(plan: CommandPlan, installed: str) -> None:
    """Refuse to run a plan on another release.

    Releases of one range with no difference in the planned flags are one.

    Raises:
        EnvironmentMissing: another range, or flags that changed; lists what differs.
        PortFileError: the installed release is outside the known ranges.
    """
    names = tuple(flag.name for flag in plan.flags)
    differences = compare_releases(plan.release, installed, names)
    same_range = find_release_facts(plan.release).name == find_release_facts(installed).name
    if same_range and not differences:
        return
    raise EnvironmentMissing(
        "the installed TensorRT-LLM is another release than the one planned for",
        expected=plan.release,
        found=installed,
        items=[f"{item.subject}: {item.first} -> {item.second}" for item in differences],
        next_step=f"plan for {installed} (trtllm.release: {installed}), or install {plan.release}",
    )


def _stream(
    plan: CommandPlan,
    log_file: Path,
    limit: float | None,
    on_phase: Callable[[str, float], None] | None,
    started: float,
) -> tuple[list[str], dict[str, float], int, bool]:
    """Run the process, log its lines, report phases; stop its group at the limit."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        plan.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    waiting: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(process, waiting), daemon=True)
    reader.start()
    lines: list[str] = []
    phases: dict[str, float] = {}
    timed_out = False
    with log_file.open("w", encoding="utf-8") as log:
        log.write(f"$ {' '.join(plan.command)}\n")
        while True:
            remaining = None if limit is None else limit - (time.monotonic() - started)
            try:
                line = waiting.get(timeout=None if remaining is None else max(remaining, 0.01))
            except queue.Empty:
                timed_out = True
                _stop_group(process)
                limit = None  # what it still printed is logged
                continue
            if line is None:
                break
            log.write(line)
            log.flush()
            lines.append(line.rstrip("\n"))
            _note_phase(line, phases, on_phase, time.monotonic() - started)
    return lines, phases, process.wait(), timed_out


def _read_lines(process: subprocess.Popen[str], waiting: queue.Queue[str | None]) -> None:
    for line in process.stdout:
        waiting.put(line)
    waiting.put(None)


def _note_phase(
    line: str, phases: dict[str, float], on_phase: Callable[[str, float], None] | None, seconds: float
) -> None:
    for name, pattern in PHASES:
        if name not in phases and re.search(pattern, line):
            phases[name] = seconds
            if on_phase is not None:
                on_phase(name, seconds)


def _stop_group(process: subprocess.Popen[str]) -> None:
    """Stop the process and its children: politely, then for certain."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=STOP_GRACE_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


def _judge(
    returncode: int,
    timed_out: bool,
    seconds: float,
    messages: tuple[RecognisedMessage, ...],
    expected_files: tuple[Path, ...],
    plan: CommandPlan,
    stated: str | None,
) -> tuple[Verdict, str]:
    program = plan.program[0]
    fatal = next((found for found in messages if found.message.fatal), None)
    if timed_out:
        return Verdict.FAIL, f"{program} was stopped at the time limit after {seconds:.0f} s"
    if returncode != 0:
        if fatal is not None:
            return Verdict.FAIL, f"{fatal.message.name}: {fatal.message.cause}"
        if returncode == -signal.SIGKILL:
            return Verdict.FAIL, f"{program} was killed: the machine ran out of memory, most likely"
        return Verdict.FAIL, f"{program} ended with return code {returncode} and no message this catalogue knows"
    absent = [str(file) for file in expected_files if not file.is_file() or file.stat().st_size == 0]
    if absent:
        return Verdict.FAIL, f"{program} ended without an error and left nothing at {', '.join(absent)}"
    if stated is not None and stated != plan.release:
        return Verdict.PASS, f"{program} ended well; it is release {stated}, planned for {plan.release}"
    return Verdict.PASS, f"{program} ended well"
