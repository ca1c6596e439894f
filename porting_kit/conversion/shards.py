"""A model in several files: the shards that an index names, or that number themselves.

Every shard is checked before anything is converted, from headers alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from porting_kit.conversion.tensor_entry import TensorEntry
from porting_kit.conversion.weight_files import check_file, read_header
from porting_kit.errors import PortingKitError
from porting_kit.whole_files import explain_problem, read_json

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,5})-of-(?P<total>\d{1,5})(?P<suffix>\.\w+)")


def list_other_shards(file: Path) -> list[Path]:
    """The files that a shard's own name says lie beside it; none for a file that is whole."""
    name = SHARD_NAME.fullmatch(file.name)
    if name is None:
        return []
    width, total = len(name["number"]), name["total"]
    numbers = (f"{number:0{width}}" for number in range(1, int(total) + 1))
    all_shards = (file.with_name(f"{name['stem']}-{number}-of-{total}{name['suffix']}") for number in numbers)
    return [shard for shard in all_shards if shard != file]


def read_shards(files: Collection[Path], error: type[PortingKitError]) -> dict[str, TensorEntry]:
    """The tensors of the files of one model that has no index, by name.

    Raises:
        error: a shard is missing that the names of the others count, one is damaged, or one tensor lies in two files.
    """
    absent = sorted({shard for file in files for shard in list_other_shards(file)} - set(files))
    if absent:
        raise error(
            f"{len(absent)} of the {len(absent) + len(files)} shards are missing",
            expected="every shard that the names of the others count",
            found=", ".join(file.name for file in files),
            where=absent[0].parent,
            items=[file.name for file in absent],
            next_step="fetch the missing files",
        )
    return _merge_files(files, error)


def _merge_files(files: Collection[Path], error: type[PortingKitError]) -> dict[str, TensorEntry]:
    merged: dict[str, TensorEntry] = {}
    doubled: list[str] = []
    pairs: set[tuple[str, str]] = set()
    for file in files:
        for name, entry in read_header(file, error).items():
            if name in merged:
                doubled.append(name)
                pairs.add((merged[name].file.name, file.name))
            merged.setdefault(name, entry)
    if doubled:
        raise error(
            f"{len(doubled)} tensors lie in two files",
            expected="each tensor once",
            found=", ".join(f"{a} and {b}" for a, b in sorted(pairs)),
            where=merged[doubled[0]].file.parent,
            items=doubled,
            next_step="remove the file that does not belong to this model",
        )
    return merged


def _read_weight_map(index: Path, error: type[PortingKitError]) -> dict[str, str]:
    """Tensor name -> file name, as a shard index says. Raises `error` when it says something else."""
    try:
        document = read_json(index)
    except (OSError, ValueError) as problem:
        raise error(
            "the shard index cannot be read",
            expected="a JSON object with weight_map",
            found=explain_problem(problem),
            where=index,
            next_step="fetch the index again",
        ) from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values()):
        return weight_map
    if not isinstance(document, dict) or "weight_map" not in document:
        found = "no weight_map"
    else:
        found = f"weight_map: {weight_map!r}"[:120]
    raise error(
        "the shard index names no files",
        expected="weight_map, an object of tensor name and file name",
        found=found,
        where=index,
        next_step="fetch the index again",
    )


def read_indexed(index: Path, error: type[PortingKitError]) -> dict[str, TensorEntry]:
    """The tensors of the files that a shard index names, by name.

    Raises:
        error: the index cannot be read, a shard is missing, a pointer or damaged, or it holds other tensors than the
            index says.
    """
    weight_map = _read_weight_map(index, error)
    files = sorted({index.parent / name for name in weight_map.values()})
    if absent := [file.name for file in files if not file.exists()]:
        raise error(
            f"{len(absent)} of the {len(files)} shards that the index names are missing",
            expected="every shard of the index",
            where=index,
            items=absent,
            next_step="fetch the missing files",
        )
    for file in files:  # all of them first: a pointer in the last shard is found before the first is parsed
        check_file(file, error)
    entries = _merge_files(files, error)
    misplaced = [name for name, file in weight_map.items() if name not in entries or entries[name].file.name != file]
    unlisted = [name for name in entries if name not in weight_map]
    if misplaced or unlisted:
        raise error(
            "the shard index and the shards disagree",
            expected="each tensor in the file the index names",
            found=f"{len(misplaced)} tensors not where the index says, {len(unlisted)} that it does not name",
            where=index,
            items=misplaced or unlisted,
            next_step="fetch index and shards of the same revision",
        )
    return entries
