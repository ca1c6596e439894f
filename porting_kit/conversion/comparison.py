"""Compares two checkpoint folders: config field by field, tensors rank by rank, bit by bit, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from porting_kit.conversion.tensor_entry import ITEM_BYTES
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.conversion.weight_files import read_header
from porting_kit.errors import CheckpointError
from porting_kit.whole_files import explain_problem, read_json

BLOCK_BYTES = 4 << 20
BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same in both checkpoints.

    Args:
        file: the rank's file.
        name: tensor name.
        kind: "only in the first", "only in the second", "shape", "dtype" or "values".
        detail: both sides, or how many values differ.
        count: values that differ in their bits.
        largest: largest absolute difference of the values; None where there is none to take.
        first: index of the first value that differs, in the tensor's shape.
    """

    file: str
    name: str
    kind: str
    detail: str
    count: int = 0
    largest: float | None = None
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckpointComparison:
    """What two checkpoints have in common and what not.

    Args:
        compared: tensors found in both.
        equal: those with the same bits.
        differences: all others.
        fields: config keys whose values differ -> (first, second); None where absent.
    """

    compared: int
    equal: int
    differences: tuple[TensorDifference, ...]
    fields: Mapping[str, tuple[Any, Any]]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and not self.fields


def _find_ranks(folder: Path, config: dict[str, Any]) -> list[Path]:
    """The rank files that the config's mapping asks for, all of them and no other.

    Raises:
        CheckpointError: a file is missing or left over.
    """
    mapping = config.get("mapping")
    world = mapping.get("world_size", 1) if isinstance(mapping, dict) else 1
    expected = {f"rank{rank}.safetensors" for rank in range(world)} if type(world) is int and world < 10_000 else set()
    found = {file.name for file in folder.glob("rank*.safetensors")}
    if found != expected or not expected:
        raise CheckpointError(
            "the checkpoint is not complete",
            expected=f"a file for each of {world} ranks, from rank0.safetensors on",
            found=", ".join(sorted(found)) or "no rank file",
            where=folder,
            next_step="convert it again",
        )
    return [folder / f"rank{rank}.safetensors" for rank in range(world)]


def compare_checkpoints(first: Path, second: Path) -> CheckpointComparison:
    """Compare two folders of config.json and rank*.safetensors.

    Raises:
        CheckpointError: a folder is no complete checkpoint, a file is damaged, or the two have unlike ranks.
    """
    configs = [_read_config(folder) for folder in (first, second)]
    ranks = [_find_ranks(folder, config) for folder, config in zip((first, second), configs, strict=True)]
    if len(ranks[0]) != len(ranks[1]) or not ranks[0]:
        raise CheckpointError(
            "the checkpoints are of unlike ranks and cannot be compared file by file",
            expected=f"{len(ranks[0])} rank files",
            found=f"{len(ranks[1])} rank files",
            where=second,
            next_step="convert one of them for the ranks of the other",
        )
    differences: list[TensorDifference] = []
    compared = equal = 0
    for pair in zip(*ranks, strict=True):
        left, right = (_open_rank(file) for file in pair)
        for name in dict.fromkeys((*left.names(), *right.names())):
            difference = _compare_tensor(left, right, name, pair[0].name)
            compared += name in left and name in right
            equal += difference is None
            differences += [difference] if difference is not None else []
    keys = sorted({*configs[0], *configs[1]})
    fields = {
        key: (configs[0].get(key), configs[1].get(key)) for key in keys if configs[0].get(key) != configs[1].get(key)
    }
    return CheckpointComparison(compared, equal, tuple(differences), fields)


def _open_rank(file: Path) -> TensorSource:
    """A rank's tensors. Raises CheckpointError: it has none, which compares equal to anything as empty."""
    entries = read_header(file, CheckpointError)
    if not entries:
        raise CheckpointError(
            f"{file.name} holds no tensors",
            expected="at least one tensor",
            found="none",
            where=file,
            next_step="convert again",
        )
    return TensorSource(entries, file, CheckpointError)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError:
        raise CheckpointError(
            "this is no complete checkpoint",
            expected="config.json and rank*.safetensors",
            found=", ".join(sorted(item.name for item in folder.glob("*"))[:5]) or "nothing",
            where=folder,
            next_step="name a folder that a conversion has finished",
        ) from None
    except (OSError, ValueError) as problem:
        raise CheckpointError(
            "config.json cannot be read",
            expected="a JSON object",
            found=explain_problem(problem),
            where=file,
            next_step="convert again",
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(
            "config.json is not a JSON object",
            expected="a JSON object",
            found=type(config).__name__,
            where=file,
            next_step="convert again",
        )
    return config


def _compare_tensor(left: TensorSource, right: TensorSource, name: str, file: str) -> TensorDifference | None:
    for source, kind in ((right, "only in the first"), (left, "only in the second")):
        if name not in source:
            other = left if source is right else right
            return TensorDifference(file, name, kind, f"{other.dtype(name)} {list(other.shape(name))}")
    for kind, both in (
        ("shape", (list(left.shape(name)), list(right.shape(name)))),
        ("dtype", (left.dtype(name), right.dtype(name))),
    ):
        if both[0] != both[1]:
            return TensorDifference(file, name, kind, f"{both[0]} and {both[1]}")
    return _compare_values(left, right, name, file)


def _compare_values(left: TensorSource, right: TensorSource, name: str, file: str) -> TensorDifference | None:
    shape, count, first, largest = left.shape(name), 0, -1, 0.0
    for start, one, two in _read_blocks(left, right, name):
        view = BIT_VIEWS[one.element_size()]
        unlike = one.view(view) != two.view(view)
        if bool(unlike.any()):
            places = unlike.nonzero().reshape(-1)
            first = start + int(places[0]) if first < 0 else first
            count += len(places)
            largest = max(largest, float((one[places].double() - two[places].double()).abs().max()))
    if not count:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), shape)) if shape else ()
    detail = f"{count} of {math.prod(shape)} values differ, the first at {list(index)}, by at most {largest:g}"
    return TensorDifference(file, name, "values", detail, count, largest, index)


def _read_blocks(
    left: TensorSource, right: TensorSource, name: str
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first element, both sides' values, flat), a few MiB at a time."""
    total, item = math.prod(left.shape(name)), ITEM_BYTES[left.dtype(name)]
    step = BLOCK_BYTES // item
    for start in range(0, total, step):
        stop = min(start + step, total)
        yield start, *(source.read_rows(name, start, stop, 1).reshape(-1) for source in (left, right))
