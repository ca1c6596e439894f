"""Finds the file that holds Medusa heads, and the config beside it.

A folder may hold one head file, whole or in shards, two with the same content, or a whole model with merged heads.
Which file is meant is never guessed: two that differ are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from porting_kit.conversion.shards import list_other_shards, read_indexed, read_shards
from porting_kit.conversion.tensor_source import HEAD_STEM, TensorSource, open_tensor_source
from porting_kit.conversion.weight_files import read_header
from porting_kit.errors import BaseModelError, HeadsError
from porting_kit.whole_files import read_json

HEAD_SUFFIXES = (".safetensors", ".pt", ".bin")
COUNT_KEYS = ("medusa_num_heads", "num_medusa_heads", "num_heads")
LAYER_KEYS = ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers")
BASE_KEYS = ("num_heads", "num_hidden_layers", "vocab_size")  # mean the base's own sizes in a base model's config


def open_heads(path: Path) -> tuple[TensorSource, dict[str, Any]]:
    """The tensors of a head file, of a folder's one head file, or of a model with merged heads; and the config's keys.

    Raises:
        HeadsError: nothing there, a damaged file, a shard that is missing, or head files that differ.
    """
    if path.is_file():
        if shards := list_other_shards(path):
            raise HeadsError(
                f"{path.name} is one of {len(shards) + 1} shards",
                expected="all shards",
                found="one of them named",
                where=path,
                items=[shard.name for shard in shards],
                next_step=f"name the folder: {path.parent}",
            )
        return TensorSource(read_header(path, HeadsError), path, HeadsError), read_head_config(path.parent)
    if not path.is_dir():
        raise HeadsError(
            "the heads do not exist",
            expected="a file of heads, or a folder that holds one",
            found="no such file or folder",
            where=path,
            next_step="correct heads in the port file",
        )
    config = read_head_config(path)
    sources = _open_named(path)
    if not sources:
        return _open_unnamed(path), config
    for other in sources[1:]:
        if differing := _differences(sources[0], other):
            raise HeadsError(
                f"{sources[0].where.name} and {other.where.name} hold different heads",
                expected="one head file, or two with the same content",
                found=f"{len(differing)} tensors differ",
                where=path,
                items=differing,
                next_step="name the file to use instead of the folder, or delete the other",
            )
    return sources[0], config


def _open_named(folder: Path) -> list[TensorSource]:
    """The heads under the name that training gives them: by format, whole or in shards, with an index or without."""
    sources = []
    for suffix in HEAD_SUFFIXES:
        whole, index = folder / f"{HEAD_STEM}{suffix}", folder / f"{HEAD_STEM}{suffix}.index.json"
        if whole.exists():
            sources.append(TensorSource(read_header(whole, HeadsError), whole, HeadsError))
        if index.is_file():
            sources.append(TensorSource(read_indexed(index, HeadsError), index, HeadsError))
        elif shards := sorted(folder.glob(f"{HEAD_STEM}-*-of-*{suffix}")):
            sources.append(TensorSource(read_shards(shards, HeadsError), shards[0], HeadsError))
    return sources


def _open_unnamed(folder: Path) -> TensorSource:
    """The one weight file of a folder, its shards, or a model with merged heads."""
    indexes = list(folder.glob("*.index.json"))
    if len(indexes) == 1:
        return TensorSource(read_indexed(indexes[0], HeadsError), folder, HeadsError)
    files = sorted(file for file in folder.iterdir() if file.suffix in HEAD_SUFFIXES)
    if not indexes and files and (len(files) == 1 or set(list_other_shards(files[0])) == set(files[1:])):
        return TensorSource(read_shards(files, HeadsError), folder, HeadsError)
    try:
        return open_tensor_source(folder, HeadsError)
    except BaseModelError as problem:
        several = f"{len(files)} weight files and none named {HEAD_STEM}" if files else problem.subject
        raise HeadsError(
            "the folder holds no heads",
            expected=f"{HEAD_STEM}.safetensors or {HEAD_STEM}.pt, or a model with merged heads",
            found=several,
            where=folder,
            items=[file.name for file in files],
            next_step="name the folder or the file that training wrote",
        ) from None


def _differences(first: TensorSource, second: TensorSource) -> list[str]:
    import torch

    names = sorted(set(first.names()) ^ set(second.names()))
    for name in set(first.names()) & set(second.names()):
        same_kind = first.shape(name) == second.shape(name) and first.dtype(name) == second.dtype(name)
        if not same_kind or not torch.equal(first.read(name), second.read(name)):
            names.append(name)
    return names


def read_head_config(folder: Path) -> dict[str, Any]:
    """What a config.json beside the heads states: counts, sizes and the base's name; empty when there is none."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = read_json(file)
    except ValueError as error:
        raise HeadsError(
            "the heads' config.json is not JSON",
            expected="a JSON object",
            found=error,
            where=file,
            next_step="save the heads again, or remove the file: layouts are told by the tensors",
        ) from None
    if not isinstance(config, dict):
        raise HeadsError(
            "the heads' config.json is no mapping of names to values",
            expected='{"medusa_num_heads": 4, ...}, or no config.json at all',
            found=type(config).__name__,
            where=file,
            next_step="restore the file that came with the heads, or delete it: the tensors are counted",
        )
    config = {**config, **_nested_counts(config)}
    sizes = (*COUNT_KEYS, *LAYER_KEYS, "truncated_vocab_size", "vocab_size")
    wrong = [f"{key}: {config[key]!r}" for key in sizes if not _is_count(config.get(key))]
    if wrong:
        raise HeadsError(
            "the heads' config.json states sizes that are no whole numbers",
            expected="whole numbers",
            where=file,
            items=wrong,
            next_step="correct the values, or delete the keys: the tensors are counted",
        )
    keys = (*sizes, "base_model_name_or_path", "model_type", "original_lm_head")
    return {key: config[key] for key in keys if key in config}


def _nested_counts(config: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt keeps the counts in a section of the base's config (modelopt/torch/speculative/plugins, 0.29)."""
    section = config.get("medusa")
    return (
        {key: section[key] for key in (*COUNT_KEYS, *LAYER_KEYS) if key in section} if isinstance(section, dict) else {}
    )


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)
