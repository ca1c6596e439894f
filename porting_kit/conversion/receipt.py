"""The account of a conversion: the fate of every source tensor, the origin of every target, the table of fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.conversion.config_fields import FieldRow
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor
from porting_kit.conversion.source_digests import SourceFile
from porting_kit.provenance import describe_environment

if TYPE_CHECKING:
    from porting_kit.conversion.heads import HeadSet
    from porting_kit.conversion.tensor_source import TensorSource


@dataclass(frozen=True)
class SourceFate:
    """What became of one source tensor: the targets it went into, or why it was dropped."""

    name: str
    file: str
    targets: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class TargetOrigin:
    """Where one target came from: sources, operations, and shape on each rank."""

    name: str
    origin: str
    sources: tuple[str, ...]
    operations: tuple[str, ...]
    dtype: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ConversionOutcome:
    """What a conversion did.

    Args:
        config: the config.json written.
        field_table: one row per config field, kept / derived / defaulted / dropped.
        sources: every source tensor's fate.
        targets: every target's origin.
        files: files written, config.json last.
        warnings: what the user should know.
        verified: tensors proved by the way back, bit for bit or to one rounding (0 when not asked for).
        seconds: wall time.
        source_files: the files read, with SHA-256.
        rules: SHA-256 of the rules as they were applied, see `ConversionPlan.rules_digest`.
        resumed_spans: pieces of work that an interrupted run had finished.
    """

    config: dict[str, Any]
    field_table: tuple[FieldRow, ...]
    sources: tuple[SourceFate, ...]
    targets: tuple[TargetOrigin, ...]
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    verified: int
    seconds: float
    source_files: tuple[SourceFile, ...] = ()
    rules: str = ""
    resumed_spans: int = 0

    def receipt(self) -> dict[str, Any]:
        """JSON-ready account of both sides."""
        return {
            "files": [asdict(file) for file in self.source_files],
            "rules": self.rules,
            "versions": describe_environment(),
            "sources": [asdict(fate) for fate in self.sources],
            "targets": [asdict(origin) for origin in self.targets],
            "fields": [asdict(row) for row in self.field_table],
            "warnings": list(self.warnings),
            "verified": self.verified,
        }


def list_source_fates(plan: ConversionPlan, source: TensorSource, heads: HeadSet | None) -> tuple[SourceFate, ...]:
    """What becomes of every tensor of the base and of the head file."""
    targets: dict[str, list[str]] = {}
    head_targets: dict[str, list[str]] = {}
    for planned in plan.tensors:
        for name in planned.sources:
            if planned.origin == "heads" and heads is not None:
                origin = heads.origins[name]
                if origin is not None:
                    head_targets.setdefault(origin, []).append(planned.target)
            else:
                targets.setdefault(name, []).append(planned.target)
    fates = [
        SourceFate(name, source.file(name).name, tuple(targets.get(name, ())), plan.dropped.get(name, ""))
        for name in source.names()
        if not (heads is not None and name in head_targets and heads.where == source.where)
    ]
    if heads is not None:
        used = [SourceFate(n, heads.source.file(n).name, tuple(t)) for n, t in head_targets.items()]
        unused = [
            SourceFate(name, heads.source.file(name).name, (), "a head that is not used")
            for name in heads.ignored_names
            if heads.where != source.where
        ]
        fates += used + unused
    return tuple(fates)


def describe_target(planned: PlannedTensor) -> TargetOrigin:
    """Where a planned target comes from, for the receipt."""
    return TargetOrigin(
        name=planned.target,
        origin=planned.origin,
        sources=planned.sources,
        operations=tuple(type(operation).__name__ for operation in planned.operations),
        dtype=planned.dtype,
        shapes=tuple(piece.shape for piece in planned.pieces),
    )
