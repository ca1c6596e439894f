"""The coverage command: every decoder class of a TensorRT-LLM tree patched, run and compared with Hugging Face.

It needs no port: the models are small random ones. The tree's own Python code is executed: name only trees you trust.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.coverage.matrix import cover_tree, is_measured
from porting_kit.coverage.origin import TreeOrigin, read_origin
from porting_kit.coverage.planned import plan_rows
from porting_kit.coverage.precision import BOUND, DTYPES
from porting_kit.coverage.processes import cover_in_processes
from porting_kit.coverage.row import Row, count_rows, count_sharded
from porting_kit.coverage.sharded import Sharding
from porting_kit.errors import PortFileError
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.source_tree import open_source_tree

COVERED = (Coverage.WEIGHTS, Coverage.MODEL_CODE, Coverage.TREE_AND_ACCEPTANCE)
MAX_RANKS = 16
WIDTHS = {"arch": 27, "case": 44}


@dataclass(frozen=True)
class CoverageResult:
    """The rows of one tree.

    Args:
        outcome: `pass` when no row failed.
        origin: release and, for a checkout, commit.
        rows: in the order of MODEL_MAP's names, then what the tree lacks.
        date: of the run, ISO 8601.
    """

    outcome: StepOutcome
    origin: TreeOrigin
    rows: tuple[Row, ...]
    date: str

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each status."""
        return count_rows(self.rows)

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {
            **self.outcome.as_dict(),
            "release": self.origin.release,
            "tree": self.origin.as_dict(),
            "date": self.date,
            "counts": self.counts,
            "rows": [row.as_dict() for row in self.rows],
        }


def check_coverage(
    source: str | Path,
    *,
    architectures: Sequence[str] = (),
    dtype: str = "float32",
    tp_sizes: Sequence[int] = (),
    pp_sizes: Sequence[int] = (),
    part: str = "1/1",
    jobs: int = 1,
    progress: Callable[[str], None] | None = None,
) -> CoverageResult:
    """Patch, run and compare every decoder of a tree.

    Args:
        source: a checkout, a package folder, `installed` or `bundled`.
        architectures: names in the tree's MODEL_MAP; empty for all.
        dtype: of the checkpoints: float32, float16 or bfloat16.
        tp_sizes, pp_sizes: run every aligned row also on so many tensor-parallel, and on so many pipeline ranks.
        part: "2/4" is the second of four parts of the rows, for as many processes; the coverage page joins them.
        jobs: processes to share the rows.
        progress: called with one line for each finished row.

    Raises:
        SourceTreeError: no usable tree there, or it has no architecture of that name.
        EnvironmentMissing: `installed`, and tensorrt_llm is not.
        PortFileError: an unknown dtype, a number of ranks that is none, or a part that is none.
    """
    if dtype not in DTYPES:
        raise PortFileError(
            "unknown dtype",
            expected=f"one of {list(DTYPES)}",
            found=repr(dtype),
            where="--dtype",
            next_step="name one of them with --dtype",
        )
    shardings = [Sharding(tp_size=size) for size in tp_sizes] + [Sharding(pp_size=size) for size in pp_sizes]
    if wrong := [size for size in (*tp_sizes, *pp_sizes) if not 2 <= size <= MAX_RANKS]:
        raise PortFileError(
            "not a number of ranks",
            expected=f"2 to {MAX_RANKS}",
            found=wrong,
            where="--tp, --pp",
            next_step="correct --tp or --pp",
        )
    started = time.perf_counter()
    tree = open_source_tree(source)
    numbered = list(enumerate(plan_rows(tree, architectures)))[_read_part(part)]
    planned = {number: row for number, row in numbered if is_measured(row, dtype)}

    def report(row: Row) -> None:
        if progress is not None:
            progress(format_row(row))

    if jobs > 1:
        rows = cover_in_processes(
            source,
            list(planned),
            jobs,
            architectures=architectures,
            dtype=dtype,
            shardings=shardings,
            progress=report,
        )
    else:
        rows = cover_tree(tree, planned.values(), report, dtype, shardings)
    counts, sharded = count_rows(rows), count_sharded(rows)
    failed = counts["failed"] + sum(each["failed"] for each in sharded.values())
    outcome = StepOutcome(
        step="coverage",
        verdict=Verdict.FAIL if failed else Verdict.PASS,
        summary=f"TensorRT-LLM {tree.release}: {_list_counts(counts)}"
        + "".join(f"; {ranks}: {_list_counts(each)}" for ranks, each in sharded.items()),
        covered=COVERED if counts["aligned"] else (),
        figures={
            "bound": BOUND if dtype == "float32" else None,
            "dtype": dtype,
            **counts,
            "sharded": sharded,
            "patched": dict(Counter(str(row.patched) for row in rows)),
        },
        seconds=time.perf_counter() - started,
        failing_gate="coverage" if failed else None,
    )
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return CoverageResult(outcome, read_origin(tree), rows, date)


def _read_part(part: str) -> slice:
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise PortFileError(
            "not a part of the rows",
            expected="K/N with 1 <= K <= N",
            found=part,
            where="--part",
            next_step="write --part 1/4 for the first quarter of the rows",
        )
    return slice(int(number) - 1, None, int(parts))


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def format_row(row: Row) -> str:
    """One row as a line of the table."""
    case = row.case if len(row.case) <= WIDTHS["case"] else row.case[: WIDTHS["case"] - 3] + "..."
    errors = [f"{error:8.1e}" if error is not None else " " * 8 for error in (row.context_error, row.tree_error)]
    tokens = {True: "equal", False: "differ", None: ""}[row.tokens_equal]
    line = f"{row.arch:{WIDTHS['arch']}} {case:{WIDTHS['case']}} {row.status:8} {row.patched or '-':15} {errors[0]} "
    line += f"{errors[1]} {tokens:6} {row.seconds:6.1f}"
    marks = "".join(f"  {run.ranks} {run.status}" + f": {run.reason}" * bool(run.reason) for run in row.sharded)
    return line + (f"  {row.reason}" if row.reason else "") + marks


def format_coverage(result: CoverageResult) -> str:
    """The whole table for a terminal, failed rows once more at the end."""
    heading = f"{'architecture':{WIDTHS['arch']}} {'case':{WIDTHS['case']}} {'status':8} {'source':15} "
    heading += f"{'context':>8} {'tree':>8} {'tokens':6} {'seconds':>7}"
    lines = [heading, *(format_row(row) for row in result.rows), ""]
    lines += [f"failed: {row.arch}, {row.case}: {row.reason}" for row in result.rows if row.status == "failed"]
    lines += [
        f"failed: {row.arch}, {row.case} on {run.ranks}: {run.reason}"
        for row in result.rows
        for run in row.sharded
        if run.status == "failed"
    ]
    covered = ", ".join(item.value for item in result.outcome.covered) or "nothing"
    lines.append(f"coverage: {result.outcome.said}")
    bound = result.outcome.figures["bound"]
    said = f"bound {bound:g}" if bound else "bound: four times what rounding does to the reference, row by row"
    lines.append(f"covered: {covered}; errors are relative to the largest logit, {said}")
    return "\n".join(lines)
