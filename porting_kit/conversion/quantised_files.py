"""What a quantised checkpoint states and holds: its config, validated, and the headers of its rank files.

A config that is of another shape than TensorRT-LLM writes is refused by the field that is wrong, before a weight is
looked at. Whether the statements agree with each other is `quantised`'s question. Nothing here reads values.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from porting_kit.conversion.checkpoint import DTYPE_CODES
from porting_kit.conversion.config_fields import MAX_DRAFT_TOKENS
from porting_kit.conversion.plan import CHECKPOINT_DTYPES
from porting_kit.conversion.weight_files import read_header
from porting_kit.errors import CheckpointError
from porting_kit.whole_files import explain_problem, read_json

# What upstream leaves alone when the config has no list (quantization/quantize.py 0.13.0.dev2024090300).
DEFAULT_EXCLUDED = (
    "*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate",
)  # fmt: skip
LINEAR_MODULES = ("qkv", "dense", "fc", "gate", "proj", "linear", "lm_head", "fused_fc", "router")
CACHE_ALGORITHMS = ("FP8", "INT8")
MAX_RANKS = 1024
"""More ranks than any machine has: a larger number is damage, not a mapping."""


@dataclass(frozen=True)
class Algorithm:
    """What a quantised layer of one algorithm has.

    Args:
        name: quant_algo of the config.
        weight_types: safetensors types of its weights.
        bits: of a weight.
        needs: suffixes beside the weight scale.
        per_group: the weight scale has a column for each group of inputs.
    """

    name: str
    weight_types: tuple[str, ...]
    bits: int
    needs: tuple[str, ...] = ()
    per_group: bool = False


GROUP_SIZE = 128
"""Inputs a scale is for where the config does not say (QuantConfig, models/modeling_utils.py 0.13.0.dev2024090300)."""
ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("FP8", ("F8_E4M3",), 8, ("activation_scaling_factor",)),
        Algorithm("W8A16", ("I8",), 8),
        Algorithm("W8A8_SQ_PER_CHANNEL", ("I8",), 8, ("activation_scaling_factor", "prequant_scaling_factor")),
        Algorithm("W4A16", ("I8", "U8"), 4),
        Algorithm("W4A16_AWQ", ("I8", "U8"), 4, ("prequant_scaling_factor",), per_group=True),
        Algorithm(
            "W4A8_AWQ",
            ("I8", "U8"),
            4,
            ("prequant_scaling_factor", "activation_scaling_factor", "weights_scaling_factor_2"),
            per_group=True,
        ),
    )
}


@dataclass(frozen=True)
class QuantisedCheckpoint:
    """A checkpoint's config and the headers of its tensors.

    Args:
        folder: where it is.
        config: content of config.json.
        ranks: per rank, tensor name -> (safetensors type, shape).
    """

    folder: Path
    config: Mapping[str, Any]
    ranks: tuple[Mapping[str, tuple[str, tuple[int, ...]]], ...]

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The config's section, empty for none."""
        return self.config.get("quantization") or {}

    @cached_property
    def algorithm(self) -> Algorithm | None:
        """The algorithm, None for a checkpoint that is not quantised."""
        name = self.quantization.get("quant_algo")
        return None if name is None else ALGORITHMS[name]

    @property
    def group_size(self) -> int:
        """Inputs that share a scale, in algorithms with groups."""
        return self.quantization.get("group_size") or GROUP_SIZE

    @property
    def dtype(self) -> str:
        """What is not quantised is in this type."""
        return self.config["dtype"]

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return _read_size(self.config, "tp_size", self.folder)

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return _read_size(self.config, "pp_size", self.folder)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Patterns of modules that are left alone."""
        stated = self.quantization.get("exclude_modules")
        return DEFAULT_EXCLUDED if stated is None else tuple(stated)

    def is_excluded(self, module: str) -> bool:
        """Whether the config leaves a module alone, in either of upstream's two readings."""
        return any(fnmatch.fnmatchcase(module, pattern) or pattern in module.split(".") for pattern in self.excluded)

    def modules(self, rank: int) -> list[str]:
        """Modules with a matrix that quantisation is about."""
        names = self.ranks[rank]
        return sorted(
            name.removesuffix(".weight")
            for name, (_, shape) in names.items()
            if name.endswith(".weight") and len(shape) == 2 and name.split(".")[-2] in LINEAR_MODULES
        )

    def file(self, rank: int) -> Path:
        """The rank's weights."""
        return self.folder / f"rank{rank}.safetensors"


def read_quantised(folder: str | Path) -> QuantisedCheckpoint:
    """Read a checkpoint's config and headers.

    Raises:
        CheckpointError: a file is missing, left over, empty or damaged; a field of the config is of another type than
            TensorRT-LLM writes; an unknown algorithm; context parallelism; or a rank holds no tensor.
    """
    folder = Path(folder)
    config = read_checkpoint_config(folder)
    count = _read_size(config, "tp_size", folder) * _read_size(config, "pp_size", folder)
    names = [f"rank{rank}.safetensors" for rank in range(count)]
    if surplus := sorted({file.name for file in folder.glob("rank*.safetensors")} - set(names)):
        raise CheckpointError(
            "the checkpoint holds more rank files than its mapping says",
            expected=f"{count} files, from rank0.safetensors on",
            found=", ".join(surplus[:5]),
            where=folder,
            next_step="correct mapping in config.json, or quantise again",
        )
    ranks = []
    for name in names:
        entries = read_header(folder / name, CheckpointError)
        if not entries:
            raise CheckpointError(
                f"{name} holds no tensors",
                expected="at least one tensor",
                found="none",
                where=folder / name,
                next_step="quantise again: nothing was exported",
            )
        ranks.append({entry.name: (DTYPE_CODES[entry.dtype], entry.shape) for entry in entries.values()})
    return QuantisedCheckpoint(folder, config, tuple(ranks))


def read_checkpoint_config(folder: Path) -> dict[str, Any]:
    """A TensorRT-LLM checkpoint's config.json, its fields of the types and ranges that the library reads.

    Raises:
        CheckpointError: no such folder or file, no JSON object, an unusable field, or context parallelism.
    """
    if not folder.is_dir():
        raise CheckpointError(
            "there is no such checkpoint folder",
            expected="a folder with config.json and rank*.safetensors",
            found="a file" if folder.exists() else "nothing",
            where=folder,
            next_step="name the checkpoint's folder",
        )
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        found = explain_problem(error)
        raise CheckpointError(
            "the checkpoint has no readable config.json",
            expected="a JSON file",
            found=found,
            where=folder,
            next_step="name the checkpoint's folder, or write the checkpoint again",
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(
            "the checkpoint's config.json is no JSON object",
            expected="an object with architecture, dtype, hidden_size and more",
            found=type(config).__name__,
            where=folder / "config.json",
            next_step="write the checkpoint again",
        )
    _check_config(config, folder)
    return config


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    """Every field that is read here, by its type and range."""
    if "architecture" not in config:
        raise CheckpointError(
            "this folder holds no TensorRT-LLM checkpoint",
            expected="a config.json that names an architecture",
            found="a Hugging Face config" if "architectures" in config else "no architecture",
            where=folder,
            next_step="name the checkpoint's folder; a Hugging Face model is named as base",
        )
    if config.get("dtype") not in CHECKPOINT_DTYPES:
        _refuse_field(folder, "dtype", f"one of {list(CHECKPOINT_DTYPES)}", config.get("dtype"))
    for name in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"):
        if not _is_count(config.get(name)):
            _refuse_field(folder, name, "a whole number above 0", config.get(name))
    if not isinstance(config.get("architecture"), str):
        _refuse_field(folder, "architecture", "a name", config.get("architecture"))
    for name, (is_right, expected) in OPTIONAL_FIELDS.items():
        if config.get(name) is not None and not is_right(config[name]):
            _refuse_field(folder, name, f"{expected}, or left out", config[name])
    mapping = config.get("mapping")
    if mapping is not None and not isinstance(mapping, dict):
        _refuse_field(folder, "mapping", "an object with tp_size and pp_size", mapping)
    if _read_size(config, "cp_size", folder) > 1:  # ranks that share a sequence (mapping.py, from 0.12 on)
        raise CheckpointError(
            "the checkpoint is for context parallelism, and its ranks are joined here by tensor and pipeline alone",
            expected="mapping.cp_size: 1, or left out",
            found=f"mapping.cp_size: {mapping['cp_size']}",
            where=folder / "config.json",
            next_step="write the checkpoint again for tensor and pipeline ranks alone",
        )
    world = (mapping or {}).get("world_size")
    ranks = _read_size(config, "tp_size", folder) * _read_size(config, "pp_size", folder)
    if world is not None and (not _is_count(world) or world != ranks):
        _refuse_field(folder, "mapping.world_size", f"{ranks}, which is tp_size times pp_size", world)
    if ranks > MAX_RANKS:
        _refuse_field(folder, "mapping", f"at most {MAX_RANKS} ranks", f"{ranks} ranks")
    quantization = config.get("quantization")
    if quantization is not None and not isinstance(quantization, dict):
        _refuse_field(folder, "quantization", "an object with quant_algo, or null", quantization)
    _check_quantization(quantization or {}, folder)


def _check_quantization(section: Mapping[str, Any], folder: Path) -> None:
    algorithm, cache = section.get("quant_algo"), section.get("kv_cache_quant_algo")
    if algorithm is not None and (not isinstance(algorithm, str) or algorithm not in ALGORITHMS):
        raise CheckpointError(
            "the checkpoint's quantisation is not one this project can judge",
            expected=f"quantization.quant_algo: {', '.join(ALGORITHMS)}, or null",
            found=repr(algorithm)[:120],
            where=folder / "config.json",
            next_step="quantise again with one of these algorithms",
        )
    if cache is not None and (not isinstance(cache, str) or cache not in CACHE_ALGORITHMS):
        _refuse_field(folder, "quantization.kv_cache_quant_algo", f"{' or '.join(CACHE_ALGORITHMS)}, or null", cache)
    group = section.get("group_size")
    if group is not None and not _is_count(group):
        _refuse_field(folder, "quantization.group_size", "a whole number above 0, or null", group)
    for name in ("pre_quant_scale", "has_zero_point"):
        if not isinstance(section.get(name), (bool, type(None))):
            _refuse_field(folder, f"quantization.{name}", "true, false or null", section.get(name))
    excluded = section.get("exclude_modules")
    if excluded is not None and not (isinstance(excluded, list) and all(isinstance(item, str) for item in excluded)):
        _refuse_field(folder, "quantization.exclude_modules", "a list of module names or patterns, or null", excluded)


def _is_size(value: object) -> bool:
    return _is_count(value) or (value == 0 and isinstance(value, int) and not isinstance(value, bool))


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _read_size(config: Mapping[str, Any], name: str, folder: Path) -> int:
    size = (config.get("mapping") or {}).get(name, 1)
    if not _is_count(size):
        _refuse_field(folder, f"mapping.{name}", "a whole number above 0", size)
    return size


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


COUNT = (_is_count, "a whole number above 0")
SIZE = (_is_size, "a whole number, 0 or more")
POSITIVE = (_is_positive, "a finite number above 0")
NAME = (lambda value: isinstance(value, str), "a name")
TRUTH = (lambda value: isinstance(value, bool), "true or false")
OPTIONAL_FIELDS = {
    "num_key_value_heads": COUNT,
    "head_size": COUNT,
    "intermediate_size": SIZE,
    "max_position_embeddings": SIZE,
    "norm_epsilon": POSITIVE,
    "rotary_base": POSITIVE,
    "rotary_scaling": (lambda value: isinstance(value, dict), "an object"),
    "position_embedding_type": NAME,
    "hidden_act": NAME,
    "logits_dtype": NAME,
    "use_parallel_embedding": TRUTH,
    "share_embedding_table": TRUTH,
    "embedding_sharding_dim": (lambda value: value in (0, 1) and not isinstance(value, bool), "0 or 1"),
    "num_medusa_heads": SIZE,
    "num_medusa_layers": SIZE,
    "max_draft_len": (lambda value: _is_size(value) and value <= MAX_DRAFT_TOKENS, f"at most {MAX_DRAFT_TOKENS}"),
}
"""Field -> whether a value is of the type and range that the library reads, and what it should be."""


def _refuse_field(folder: Path, name: str, expected: str, found: object) -> NoReturn:
    raise CheckpointError(
        f"the checkpoint's config.json has an unusable {name}",
        expected=expected,
        found=repr(found)[:120],
        where=folder / "config.json",
        next_step="correct the file, or write the checkpoint again",
    )
