"""Proves a checkpoint against its sources, tensor by tensor, through the inverse rules; every failure is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from porting_kit.conversion.apply import join_pieces
from porting_kit.conversion.inverse import verify_fitted, verify_target
from porting_kit.conversion.planned import FITTED_ORIGIN, ConversionPlan, PlannedTensor, TargetFit, read_source
from porting_kit.conversion.stream import MEMORY_BYTES, MemoryGate
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.conversion.weight_files import read_header
from porting_kit.errors import CheckpointError, ConversionError, PortingKitError

if TYPE_CHECKING:
    from porting_kit.conversion.heads import HeadSet

ReadTensor = Callable[[str], torch.Tensor]
COPIES = 4
"""Copies of a target in memory while it is proved: joined, taken apart, cast, compared."""


@dataclass(frozen=True)
class Failure:
    """One target that does not lead back to its sources.

    Args:
        target: its name in the whole model.
        ranks: ranks that hold a part of it.
        message: what differs.
    """

    target: str
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Proof:
    """How many targets were proved, and those that failed, in the plan's order."""

    proved: int
    failures: tuple[Failure, ...] = ()

    def require(self) -> None:
        """Raise ConversionError when a target failed."""
        if self.failures:
            raise ConversionError(
                self.failures[0].message,
                expected="every tensor leads back to the base's and the heads' own",
                found=f"{len(self.failures)} of {self.proved + len(self.failures)} tensors fail",
                items=[failure.target for failure in self.failures],
                next_step="convert again; if it stays, the disk or the memory is faulty",
            )


def prove_targets(
    plan: ConversionPlan,
    source: TensorSource,
    heads: HeadSet | None,
    readers: Sequence[ReadTensor],
    workers: int = 1,
    tensors: Sequence[PlannedTensor] | None = None,
) -> Proof:
    """Compare every target with its sources.

    Args:
        readers: one per rank; gives a tensor of that rank's file by name.
        workers: threads.
        tensors: only these targets of the plan; all when None.
    """
    gate = MemoryGate(MEMORY_BYTES)

    def prove(planned: PlannedTensor) -> Failure | None:
        size = planned.num_bytes * COPIES + sum(_source_bytes(planned, name, source, heads) for name in planned.sources)
        gate.enter(size)
        try:
            parts = [readers[piece.rank](piece.name) for piece in planned.pieces]
            values = [read_source(planned, name, source, heads) for name in planned.sources]
            verify_target(planned, join_pieces(planned, parts), values, plan)
        except (ConversionError, CheckpointError) as problem:
            ranks = tuple(piece.rank for piece in planned.pieces)
            return Failure(planned.target, ranks, _one_line(problem))
        finally:
            gate.leave(size)
        return None

    chosen = plan.tensors if tensors is None else tensors
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers, "proof") as pool:
            failures = tuple(failure for failure in pool.map(prove, chosen) if failure is not None)
    finally:
        torch.set_num_threads(threads)
    return Proof(len(chosen) - len(failures), failures)


def prove_checkpoint(
    plan: ConversionPlan, source: TensorSource, heads: HeadSet | None, folder: Path, workers: int = 1
) -> Proof:
    """Compare every tensor of a checkpoint folder with its sources.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or holds other tensors than the plan says.
    """
    return prove_targets(plan, source, heads, open_ranks(plan, folder), workers)


def prove_fitted(
    plan: ConversionPlan, source: TensorSource, heads: HeadSet | None, readers: Sequence[ReadTensor], fit: TargetFit
) -> Proof:
    """The same for a fitted checkpoint: what the fit changed is made again and compared, the rest is led back.

    Args:
        plan: the plan that `fit.refit_plan` gave.
        fit: the fit, made anew for this proof.
    """
    from porting_kit.conversion.convert import iterate_targets

    failures = []
    for planned, sources, whole in iterate_targets(plan, source, heads, fit):
        try:
            joined = join_pieces(planned, [readers[piece.rank](piece.name) for piece in planned.pieces])
            if planned.origin == FITTED_ORIGIN:
                verify_fitted(planned, joined, whole)
            else:
                verify_target(planned, joined, sources, plan)
        except ConversionError as problem:
            failures.append(Failure(planned.target, tuple(piece.rank for piece in planned.pieces), _one_line(problem)))
    return Proof(len(plan.tensors) - len(failures), tuple(failures))


def open_ranks(plan: ConversionPlan, folder: Path) -> list[ReadTensor]:
    """One reader per rank file, after its names, dtypes and shapes were compared with the plan.

    Raises:
        CheckpointError: a file is missing or damaged, or holds other tensors.
    """
    readers = []
    for rank in range(plan.world_size):
        file = folder / f"rank{rank}.safetensors"
        entries = read_header(file, CheckpointError)
        expected = plan.rank_tensors(rank)
        found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
        wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        if wrong:
            raise CheckpointError(
                f"{file.name} does not hold the tensors of this conversion",
                expected=f"{len(expected)} tensors, {wrong[0]}: {expected.get(wrong[0], 'absent')}",
                found=f"{len(found)} tensors, {wrong[0]}: {found.get(wrong[0], 'absent')}",
                where=file,
                items=wrong,
                next_step="convert again",
            )
        readers.append(TensorSource(entries, folder, CheckpointError).read)
    return readers


def _source_bytes(planned: PlannedTensor, name: str, source: TensorSource, heads: HeadSet | None) -> int:
    """Memory that one source takes while it is compared."""
    if planned.origin != "heads" or heads is None:
        return source.read_bytes(name)
    origin = heads.origins[name]
    return heads.source.read_bytes(origin) if origin is not None else 0


def _one_line(problem: PortingKitError) -> str:
    return f"{problem.subject}: {problem.found}" if problem.found else problem.subject
