"""The rows of a tree over several processes: each plans the same rows, opens the tree itself, and measures by number.

Cases hold functions, which no process can hand to another; numbers of rows it can.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from porting_kit.coverage.row import Row
from porting_kit.coverage.sharded import Sharding
from porting_kit.errors import EmulatorError

_OWN: dict[str, Any] = {}


def cover_in_processes(
    source: str | Path,
    numbers: Sequence[int],
    jobs: int,
    *,
    architectures: Sequence[str] = (),
    dtype: str = "float32",
    shardings: Sequence[Sharding] = (),
    progress: Callable[[Row], None] | None = None,
) -> tuple[Row, ...]:
    """Measure rows of `plan_rows(tree, architectures)`.

    Args:
        source: as `open_source_tree` takes it; its Python code is executed in every process.
        numbers: which rows.
        jobs: how many processes.
        dtype, shardings, progress: as `cover_tree` takes them; progress in the order in which rows are done.

    Returns:
        The rows in the order of the numbers.

    Raises:
        EmulatorError: a process died.
    """
    found: dict[int, Row] = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["porting_kit.coverage.matrix", "transformers"])
    with tempfile.TemporaryDirectory(prefix="porting-kit-coverage-") as folder:
        arguments = (source, tuple(architectures), dtype, tuple(shardings), folder)
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=arguments) as pool:
            try:
                for future in as_completed([pool.submit(_measure, number) for number in numbers]):
                    number, row = future.result()
                    found[number] = row
                    if progress is not None:
                        progress(row)
            except BrokenExecutor as error:
                raise EmulatorError(
                    "a process that measured rows died",
                    expected=f"{len(numbers)} rows",
                    found=f"{len(found)} rows",
                    next_step="run with one process to see where, or with fewer if memory ran out",
                ) from error
    return tuple(found[number] for number in numbers)


def _start(
    source: str | Path, architectures: tuple[str, ...], dtype: str, shardings: tuple[Sharding, ...], folder: str
) -> None:
    import torch

    from porting_kit.coverage.matrix import TreeCoverage
    from porting_kit.coverage.planned import plan_rows
    from porting_kit.source_tree import open_source_tree

    torch.set_num_threads(1)
    tree = open_source_tree(source)
    _OWN["coverage"] = TreeCoverage(tree, Path(tempfile.mkdtemp(dir=folder)), dtype, shardings)
    _OWN["rows"] = plan_rows(tree, architectures)


def _measure(number: int) -> tuple[int, Row]:
    return number, _OWN["coverage"].measure_row(_OWN["rows"][number])
