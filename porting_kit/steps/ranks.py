"""A sharded checkpoint is checked as its ranks run: one process a rank, connected by torch.distributed.

`porting-kit align` starts the processes itself; under `torchrun -m porting_kit align PORT.yaml` it is one of them.
Every rank runs the same alignment on its own file and takes part in every collective; the first one judges and writes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from porting_kit import errors
from porting_kit.alignment.result import AlignmentResult
from porting_kit.conversion import checkpoint_tensors
from porting_kit.conversion.proof import open_ranks, prove_targets
from porting_kit.conversion.shard_faults import explain_failures
from porting_kit.diagnosis import PortState, name_cause
from porting_kit.diagnosis.changes import as_cause
from porting_kit.diagnosis.port_state import describe_port
from porting_kit.emulator.collectives import connect_ranks
from porting_kit.errors import EmulatorError, PortFileError, PortingKitError
from porting_kit.outcomes import Verdict
from porting_kit.steps.alignment_session import AlignmentSession, current_rank
from porting_kit.steps.context import PortRun
from porting_kit.steps.conversion_inputs import open_conversion

RUN_FILE, RESULT_FILE, ERROR_FILE = "run.pickle", "result.pickle", "error{rank}.pickle"


def world_size(run: PortRun) -> int:
    """Ranks of the port's checkpoint."""
    return run.port.target.tp_size * run.port.target.pp_size


def is_under_torchrun() -> bool:
    """Whether this process was started as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def needs_ranks(run: PortRun) -> bool:
    """Whether the alignment needs processes that are not there yet."""
    return run.port.engine == "emulator" and world_size(run) > 1 and not is_under_torchrun()


def join_ranks(run: PortRun) -> None:
    """Connect this process to the other ranks, when torchrun started it.

    Raises:
        PortFileError: torchrun started another number of processes than the port has ranks.
    """
    if not is_under_torchrun():
        return
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size(run) or run.port.engine != "emulator":
        raise PortFileError(
            "torchrun started another number of processes than the port has ranks",
            expected=f"{world_size(run)} (target.tp_size x target.pp_size, engine: emulator)",
            found=f"{started} processes, engine: {run.port.engine}",
            next_step=f"torchrun --nproc-per-node {world_size(run)} -m porting_kit align PORT.yaml",
        )
    connect_ranks(world_size(run), torch.device("cpu"))


def wait_for_ranks() -> None:
    """Wait until every rank is here; nothing to wait for without torchrun."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def launch_ranks(run: PortRun) -> AlignmentResult:
    """Run the alignment in one process a rank. Returns what the first rank found.

    Raises:
        what the alignment raises in any rank; EmulatorError when a process dies.
    """
    ranks = world_size(run)
    with tempfile.TemporaryDirectory(prefix="porting-kit-ranks-") as name:
        folder = Path(name)
        (folder / RUN_FILE).write_bytes(pickle.dumps(run))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "porting_kit.steps.rank_process", str(folder)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        # all of these were written a moment ago by our own processes, into a folder that only this user can open
        errors_found = sorted(folder.glob(ERROR_FILE.format(rank="*")))
        if errors_found:  # the other ranks then end for want of this one
            raise rebuild_error(*pickle.loads(errors_found[0].read_bytes()))
        if done.returncode or not (folder / RESULT_FILE).is_file():
            raise EmulatorError(
                "a rank's process died",
                expected=f"{ranks} processes that end with a result",
                found=_last_words(done.stderr) or f"exit code {done.returncode}",
                next_step="run one of them alone to see more: torchrun --nproc-per-node "
                f"{ranks} -m porting_kit align PORT.yaml",
            )
        return pickle.loads((folder / RESULT_FILE).read_bytes())


def _last_words(stderr: str) -> str:
    """The last lines of the first traceback: torchrun's own summary after it says only that a process died."""
    before, found, rest = stderr.partition("Traceback (most recent call last)")
    lines = rest.splitlines() if found else before.splitlines()
    end = next((k for k, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), len(lines) - 1)
    return "\n".join(lines[max(end - 4, 0) : end + 1])


def describe_error(error: PortingKitError) -> tuple[str, dict[str, Any]]:
    """An error in a form that another process can raise again."""
    fields = error.as_dict()
    return str(fields.pop("kind")), fields


def rebuild_error(kind: str, fields: dict[str, Any]) -> PortingKitError:
    """The error that `describe_error` described; one of a module of its own comes back as the base class."""
    cls = getattr(errors, kind, PortingKitError)
    return cls(fields.pop("subject"), **fields)


def explain_ranks(session: AlignmentSession, result: AlignmentResult) -> AlignmentResult:
    """A failed alignment of several ranks with its cause: first config.json and the rank files against the
    source, then the rest.

    Only the first rank looks; the others return the result as it is.
    """
    if result.verdict is Verdict.PASS or current_rank():
        return result
    if session.checkpoint_check.fields:
        return replace(result, cause=as_cause(session.checkpoint_check.fields))
    inputs = open_conversion(session.run.port)
    if not inputs.fit.steps:  # a fitted checkpoint has no way back to compare with
        plan = inputs.plan()
        readers = open_ranks(plan, session.run.folder.checkpoint)
        proof = prove_targets(plan, inputs.source, inputs.heads, readers)
        if proof.failures:
            first, *others = explain_failures(plan, inputs.source, inputs.heads, readers, proof)
            return replace(result, cause=first.as_cause(others))
    return replace(result, cause=name_cause(_read_one_rank_state(session), result).as_dict())


def _read_one_rank_state(session: AlignmentSession) -> PortState:
    """The port as one rank, converted in memory: what a fault of anything but the cutting is looked for in."""
    config, tensors = checkpoint_tensors(
        session.run.port.base_path, session.head_set, session.run.port.dtype, release=session.release
    )
    module_file, class_name = session.module
    return describe_port(
        session.source_tree,
        config,
        tensors,
        tree=session.tree,
        module_source=module_file.read_text(encoding="utf-8"),
        class_name=class_name,
    )
