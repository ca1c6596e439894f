"""Which rows a tree gets: every architecture with its cases, and every case whose architecture the tree lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from porting_kit.architectures.family import load_families
from porting_kit.architectures.releases import release_key
from porting_kit.coverage.cases import CASES
from porting_kit.coverage.reference_models import ReferenceCase
from porting_kit.source_tree import SourceTree


@dataclass(frozen=True)
class PlannedRow:
    """One row before it is measured.

    Args:
        arch: the architecture that the checkpoint will name.
        case: the variant; None: no case has this architecture.
        text: how the row names the variant.
        hugging_face_class: write this class name into the model's config.json in place of its own.
        position_batch: B of a row on one position id per request; 0: an ordinary row.
    """

    arch: str
    case: ReferenceCase | None
    text: str
    hugging_face_class: str | None = None
    position_batch: int = 0


def plan_rows(
    tree: SourceTree, architectures: Sequence[str] = (), cases: Sequence[ReferenceCase] = CASES
) -> list[PlannedRow]:
    """The rows of a tree.

    Args:
        tree: the tree.
        architectures: names in MODEL_MAP; empty for all, and for what the tree lacks.
        cases: the variants.

    Raises:
        SourceTreeError: the tree has no architecture of that name.
    """
    names = sorted(tree.model_names())
    for unknown in [name for name in architectures if name not in names]:
        tree.find_model(unknown)  # says which names are near
    served = {case: find_architecture(case, tree.release) for case in cases}
    rows: list[PlannedRow] = []
    for arch in names:
        found = [PlannedRow(arch, case, case.text) for case, served_by in served.items() if arch == served_by]
        rows += found or _plan_other_name(arch, cases) or [PlannedRow(arch, None, "-")]
    if architectures:
        rows = [row for row in rows if row.arch in architectures]
    else:
        rows += [PlannedRow(arch, case, case.text) for case, arch in served.items() if arch not in names]
    return [each for row in rows for each in (row, *_plan_position_rows(row))]


def find_architecture(case: ReferenceCase, release: str) -> str:
    """The architecture that a checkpoint of this case names in a release."""
    family = load_families()[case.family]
    asked = release_key(release)
    if asked is not None and family.renamed is not None and asked < release_key(family.renamed[0]):
        return family.renamed[1]
    return family.architectures[case.class_in_config]


def _plan_other_name(arch: str, cases: Sequence[ReferenceCase]) -> list[PlannedRow]:
    """MODEL_MAP enters some classes under their Hugging Face names as well: one case is enough there."""
    for case in cases:
        if arch == case.class_in_config:
            return [PlannedRow(arch, case, f"{case.text}, under this name")]
    for case in cases:
        if arch in load_families()[case.family].architectures:
            return [PlannedRow(arch, case, f"{case.text}, under this name", hugging_face_class=arch)]
    return []


def _plan_position_rows(row: PlannedRow) -> list[PlannedRow]:
    """The same case as both runtimes feed it: one position id per request."""
    if row.case is None or not row.case.learned_positions or row.text != row.case.text:
        return []
    text = "{}, one position id per request, batch {}"
    return [replace(row, text=text.format(row.text, batch), position_batch=batch) for batch in (1, 3)]
