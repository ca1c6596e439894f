"""One line of the coverage table, and what the whole table says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

RowStatus = Literal["aligned", "refused", "failed"]


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

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {**asdict(self), "inherent": list(self.inherent), "seconds": round(self.seconds, 3)}


def count_rows(rows: tuple[Row, ...]) -> dict[str, int]:
    """How many rows have each status."""
    return {status: sum(row.status == status for row in rows) for status in ("aligned", "refused", "failed")}
