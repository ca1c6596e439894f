"""`porting-kit compare A B`: are two checkpoints the same, and if not, in which tensors and fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from porting_kit.conversion.comparison import CheckpointComparison, compare_checkpoints
from porting_kit.outcomes import Coverage, StepOutcome, Verdict

LISTED = 20


@dataclass(frozen=True)
class CompareResult:
    """What the comparison found; its verdict is pass when nothing differs."""

    outcome: StepOutcome
    comparison: CheckpointComparison

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {**self.outcome.as_dict(), **asdict(self.comparison)}


def compare_folders(first: Path, second: Path) -> CompareResult:
    """Compare two checkpoint folders.

    Raises:
        CheckpointError: see `compare_checkpoints`.
    """
    found = compare_checkpoints(first, second)
    summary = f"{found.equal} of {found.compared} tensors are the same, bit by bit"
    if not found.is_same:
        summary += f"; {len(found.differences)} tensors and {len(found.fields)} config fields differ"
    verdict = Verdict.PASS if found.is_same else Verdict.FAIL
    gate = None if found.is_same else "same bits"
    figures = {"compared": found.compared, "equal": found.equal, "different": len(found.differences)}
    outcome = StepOutcome("compare", verdict, summary, (Coverage.WEIGHTS,), figures, failing_gate=gate)
    return CompareResult(outcome, found)


def format_comparison(result: CompareResult) -> str:
    """One line per difference, then the verdict."""
    found = result.comparison
    lines = [f"config {key}: {one!r} and {two!r}" for key, (one, two) in found.fields.items()]
    lines += [f"{each.file} {each.name}: {each.kind}, {each.detail}" for each in found.differences[:LISTED]]
    if len(found.differences) > LISTED:
        lines.append(f"... {len(found.differences)} tensors in all")
    lines.append(f"compare: {result.outcome.said}")
    return "\n".join(lines)
