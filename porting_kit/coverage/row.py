"""One line of the coverage table, and what the whole table says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

RowStatus = Literal["aligned", "refused", "failed"]


@dataclass(frozen=True)
class ShardedRun:
    """A row on several ranks; errors as in `Row`.

    Args:
        ranks: "tp 2", "tp 4", "pp 2".
        status, reason: as of a row.
    """

    ranks: str
    status: RowStatus
    reason: str | None = None
    context_error: float | None = None
    tree_error: float | None = None
    heads_error: float | None = None
    tokens_equal: bool | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


@dataclass(frozen=True)
class Row:
    """One architecture and one case.

    Args:
        arch: the architecture's name in MODEL_MAP, or the one that this tree lacks.
        case: which variant, and what the reference was made from.
        status: `aligned`; `refused` with a reason; `failed` with a reason.
        patched: what became of the model's source: `patched`, `already_accepts`, `refused`; None: it was not reached.
        reason: why it is not aligned.
        context_error: relative logits error against Hugging Face over the prompts, unmodified and patched model.
        tree_error: the same at every node of a tree and after acceptance, patched model.
        tokens_equal: Medusa's tokens equal the reference's greedy tokens.
        seconds: wall time of the row.
        heads_error: relative error of the Medusa heads' logits at every node.
        tokens_per_step: mean of the accepted lengths: above 1 shows that drafts were accepted.
        inherent: differences by design under which reference and port were compared.
        note: what else the row shows.
        bound, heads_bound: what the errors may be: fixed in float32, measured rounding in half precision.
        sharded: the same on several ranks.
    """

    arch: str
    case: str
    status: RowStatus
    patched: str | None = None
    reason: str | None = None
    context_error: float | None = None
    tree_error: float | None = None
    tokens_equal: bool | None = None
    seconds: float = 0.0
    heads_error: float | None = None
    tokens_per_step: float | None = None
    inherent: tuple[str, ...] = ()
    note: str | None = None
    bound: float | None = None
    heads_bound: float | None = None
    sharded: tuple[ShardedRun, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        sharded = [run.as_dict() for run in self.sharded]
        return {**asdict(self), "inherent": list(self.inherent), "seconds": round(self.seconds, 3), "sharded": sharded}


def count_rows(rows: Iterable[Row | ShardedRun]) -> dict[str, int]:
    """How many rows have each status."""
    found = Counter(row.status for row in rows)
    return {status: found[status] for status in ("aligned", "refused", "failed")}


def count_sharded(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Ranks -> how many runs have each status."""
    runs = [run for row in rows for run in row.sharded]
    return {
        ranks: count_rows(run for run in runs if run.ranks == ranks) for ranks in dict.fromkeys(r.ranks for r in runs)
    }
