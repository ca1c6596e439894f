"""Adds Medusa heads to a TensorRT-LLM checkpoint of the base that another converter has written.

The base's rank files are copied tensor by tensor, whatever is in them; the heads are cut for the same ranks and join
them. So upstream's own converter, or a quantiser that leaves the weights in floating point, can make the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.names import Shape
from porting_kit.architectures.rules import COLUMN, REPLICATED, VOCABULARY
from porting_kit.conversion.config_fields import FieldRow, list_head_rows
from porting_kit.conversion.planned import ConversionPlan, Piece, PlannedTensor
from porting_kit.conversion.quantised_files import read_checkpoint_config
from porting_kit.conversion.sharding import cut_head_pieces
from porting_kit.conversion.tensor_entry import TensorEntry
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.conversion.weight_files import read_header
from porting_kit.errors import CheckpointError
from porting_kit.whole_files import read_json

if TYPE_CHECKING:
    from porting_kit.conversion.heads import HeadSet

OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class CheckpointBase:
    """What joining heads needs to know of the base, from its config.json; stands in a plan for a `BaseConfig`.

    Args:
        raw: the config.
        where: its file.
    """

    raw: Mapping[str, Any] = field(repr=False)
    where: str

    @property
    def architecture(self) -> str:
        """TensorRT-LLM's name."""
        return str(self.raw["architecture"])

    @property
    def hidden_size(self) -> int:
        """E."""
        return int(self.raw["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """V, not padded."""
        return int(self.raw["vocab_size"])

    @property
    def dtype(self) -> str:
        """Type of the weights."""
        return str(self.raw["dtype"])

    @property
    def ranks(self) -> tuple[int, int]:
        """(tp_size, pp_size)."""
        mapping = self.raw.get("mapping") or {}
        return int(mapping.get("tp_size", 1)), int(mapping.get("pp_size", 1))

    # nothing is tied, scaled or reshaped on the way: tensors are copied
    tied = False
    q_scaling = output_scale = 1.0
    head_size = 0
    layers = ()  # each tensor stands for itself, so layers may differ


def is_base_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a TensorRT-LLM checkpoint rather than a Hugging Face model."""
    file = folder / "config.json"
    if not file.is_file() or not any(folder.glob("rank*.safetensors")):
        return False
    try:
        return "architecture" in read_json(file)
    except (ValueError, OSError):
        return False


def open_base_checkpoint(folder: Path) -> tuple[CheckpointBase, TensorSource]:
    """The settings of a base checkpoint, and its tensors as `rank0/NAME`.

    Raises:
        CheckpointError: not a complete checkpoint, quantised, with heads already, or rank files are missing.
    """
    raw, file = read_checkpoint_config(folder), folder / "config.json"
    base = CheckpointBase(raw, str(file))
    tp_size, pp_size = base.ranks
    if raw.get("num_medusa_heads"):
        raise CheckpointError(
            "the base checkpoint holds Medusa heads already",
            expected="a checkpoint of the base alone",
            found=f"num_medusa_heads {raw['num_medusa_heads']}",
            where=file,
            next_step="convert the base again without heads, or use this checkpoint as it is",
        )
    if (raw.get("quantization") or {}).get("quant_algo"):
        raise CheckpointError(
            "heads can only join a base checkpoint in floating point",
            expected="a checkpoint that is not quantised",
            found=f"quantization {raw['quantization']}",
            where=file,
            next_step="let `porting-kit quantised CHECKPOINT --heads DIR --out DIR` add the heads in 16 bit",
        )
    entries: dict[str, TensorEntry] = {}
    for rank in range(tp_size * pp_size):
        for name, entry in read_header(folder / f"rank{rank}.safetensors", CheckpointError).items():
            entries[f"rank{rank}/{name}"] = entry
    return base, TensorSource(entries, folder, CheckpointError)


def plan_joining(base: CheckpointBase, source: TensorSource, heads: HeadSet) -> ConversionPlan:
    """The plan that copies a base checkpoint and adds heads, cut for the base's ranks.

    Raises:
        HeadsError: the heads do not fit the base.
        CheckpointError: the output matrix is missing or of another size than the config says.
    """
    heads.check_against(base)
    tp_size, pp_size = base.ranks
    padded = -(-base.vocab_size // tp_size) * tp_size
    last = range((pp_size - 1) * tp_size, pp_size * tp_size)
    _check_output(base, source, last, padded // tp_size)
    tensors = []
    for name in source.names():
        rank, _, own = name.partition("/")
        tensors.append(_copy(name, own, source, name, "base", int(rank.removeprefix("rank"))))
    for name in heads.origins:
        is_output = name.endswith(OUTPUT)
        shard, shape = (VOCABULARY if is_output else COLUMN), heads.shape(name)
        rows = padded - shape[0] if is_output else 0
        whole: Shape = (shape[0] + rows, *shape[1:])
        pieces = cut_head_pieces(name, whole, shard, tp_size, pp_size)
        tensors.append(PlannedTensor(name, (name,), "heads", (), 1, whole, shard, base.dtype, pieces, rows))
    if not heads.own_output:
        for head in range(heads.num_heads):
            name = f"medusa_heads.{head}.{OUTPUT}"
            for rank in range(tp_size * pp_size):
                output = f"rank{last[rank % tp_size]}/{OUTPUT}"
                tensors.append(_copy(f"rank{rank}/{name}", name, source, output, "copied", rank))
    return ConversionPlan(base, tuple(tensors), {}, {}, padded, tp_size, pp_size, base.dtype)


def _copy(target: str, name: str, source: TensorSource, origin: str, kind: str, rank: int) -> PlannedTensor:
    """A tensor of a rank file as it is, under its own name or another, for one rank."""
    shape, dtype = source.shape(origin), source.dtype(origin)
    return PlannedTensor(target, (origin,), kind, (), 1, shape, REPLICATED, dtype, (Piece(rank, name, shape),))


def _check_output(base: CheckpointBase, source: TensorSource, ranks: range, rows: int) -> None:
    for rank in ranks:
        name, expected = f"rank{rank}/{OUTPUT}", (rows, base.hidden_size)
        if name not in source or source.shape(name) != expected:
            raise CheckpointError(
                "the base checkpoint's output matrix does not fit its config",
                expected=f"{OUTPUT} {list(expected)} in rank{rank}.safetensors",
                found=list(source.shape(name)) if name in source else "no such tensor",
                where=source.where,
                next_step="convert the base again for these ranks",
            )


def join_config(
    base: CheckpointBase, heads: HeadSet, max_draft_len: int | None, release: str | None
) -> tuple[dict[str, Any], tuple[FieldRow, ...]]:
    """The base checkpoint's config with the heads' keys, and its table."""
    rows = [FieldRow(key, value, key, "kept", "as in the base checkpoint") for key, value in base.raw.items()]
    added = list_head_rows(heads, max_draft_len, release)
    names = {row.target for row in added}
    rows = [row for row in rows if row.target not in names] + added
    return {row.target: row.value for row in rows if row.target is not None}, tuple(rows)
