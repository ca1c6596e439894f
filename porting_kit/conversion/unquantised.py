"""A checkpoint's floating-point tensors against the base's: embedding, norms, biases, output matrix, heads.

The library loads what a file holds under the names it asks for; of a tensor with other values it says nothing. Each
must be there, none may be left over, and the values must be the base's own, as the conversion rules make them. Names,
dtypes and shapes come from headers alone; values are compared where the base is converted too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from porting_kit.architectures.operations import Add, NormalizeRows, Product, Scale
from porting_kit.architectures.rules import COLUMN, VOCABULARY
from porting_kit.conversion.dequantised import SCALES
from porting_kit.conversion.plan import EMBEDDING, OUTPUT
from porting_kit.conversion.planned import ConversionPlan, Piece, PlannedTensor
from porting_kit.conversion.quantised import CACHE_SCALE, QUANTISED_TYPES, QuantisedFault
from porting_kit.conversion.quantised_base import ConvertedBase
from porting_kit.conversion.quantised_files import QuantisedCheckpoint
from porting_kit.conversion.sharding import cut_head_pieces
from porting_kit.conversion.weight_files import SAFETENSORS_DTYPES

if TYPE_CHECKING:
    import torch

HEADS = "medusa_heads."
COMPUTING = (Add, Scale, NormalizeRows, Product)
"""Operations that change values; all others move them."""


@dataclass(frozen=True)
class Expected:
    """What one rank's file must hold under a name.

    Args:
        shape: of the part.
        dtype: torch's name.
        planned, piece: what it is in the base's conversion; None for heads that are not at hand.
        rows: [start, stop) of the whole vocabulary that the part begins with, padding follows; None elsewhere.
        column: [start, stop) of an embedding that is cut along its width; None elsewhere.
    """

    shape: tuple[int, ...]
    dtype: str
    planned: PlannedTensor | None = None
    piece: Piece | None = None
    rows: tuple[int, int] | None = None
    column: tuple[int, int] | None = None


@dataclass(frozen=True)
class ValueComparison:
    """What the values say.

    Args:
        differences: of kind `value`.
        equal: tensors that are the base's own.
        unknown: tensors of heads that were not at hand: finite, and no more is known.
    """

    differences: tuple[QuantisedFault, ...]
    equal: int
    unknown: int


def compare_headers(checkpoint: QuantisedCheckpoint, plan: ConversionPlan) -> tuple[QuantisedFault, ...]:
    """Tensors that are missing, left over, or of another shape or dtype than the base's.

    Args:
        checkpoint: quantised matrices in it are looked at only as to whether the base has them.
        plan: of the base's conversion for the same ranks and dtype.

    Returns:
        differences of kind `missing`, `surplus`, `shape` or `dtype`.
    """
    found = []
    for rank, names in enumerate(checkpoint.ranks):
        expected = dict(list_expected(checkpoint, plan, rank))
        for name in expected:
            if name not in names and not _may_be_absent(checkpoint, plan, rank, name):
                found.append(QuantisedFault("missing", f"rank{rank}: {name}", f"there is no {name}"))
        for name, (code, shape) in names.items():
            dtype, label = SAFETENSORS_DTYPES[code], f"rank{rank}: {name}"
            if name not in expected:
                if not _belongs_to_quantisation(checkpoint, rank, name):
                    text = f"{name} {list(shape)} has no place in this base's checkpoint"
                    found.append(QuantisedFault("surplus", label, text))
            elif code in QUANTISED_TYPES:
                continue
            elif shape != expected[name].shape:
                text = f"{name} is {list(shape)}, expected {list(expected[name].shape)}"
                found.append(QuantisedFault("shape", label, text))
            elif dtype != expected[name].dtype:
                found.append(QuantisedFault("dtype", label, f"{name} is {dtype}, expected {expected[name].dtype}"))
    return tuple(found)


def compare_values(checkpoint: QuantisedCheckpoint, base: ConvertedBase) -> ValueComparison:
    """Compare what has the base's name, shape and dtype with the base's values, in all ranks."""
    from safetensors import safe_open

    found: list[QuantisedFault] = []
    equal = unknown = 0
    for rank, names in enumerate(checkpoint.ranks):
        with safe_open(checkpoint.file(rank), "pt") as opened:
            for name, expected in list_expected(checkpoint, base.plan, rank):
                code, shape = names.get(name, ("", ()))
                if SAFETENSORS_DTYPES.get(code) != expected.dtype or shape != expected.shape:
                    continue
                text = _find_difference(opened.get_tensor(name), expected, base)
                if text is not None:
                    found.append(QuantisedFault("value", f"rank{rank}: {name}", f"{name} {text}"))
                elif expected.planned is None:
                    unknown += 1
                else:
                    equal += 1
    return ValueComparison(tuple(found), equal, unknown)


def list_expected(checkpoint: QuantisedCheckpoint, plan: ConversionPlan, rank: int) -> Iterator[tuple[str, Expected]]:
    """Name -> what one rank's file must hold, cut and padded as the checkpoint's own config says."""
    knows_heads = False
    for planned in plan.tensors:
        knows_heads |= planned.target.startswith(HEADS)
        for piece in planned.pieces:
            if piece.rank == rank:
                yield piece.name, _expect(checkpoint, planned, piece)
                if planned.target == EMBEDDING and _repeats_embedding(checkpoint, plan, rank):
                    yield OUTPUT, _expect_rows(checkpoint, planned, piece)
    if not knows_heads:
        yield from _list_head_shapes(checkpoint, rank)


def _expect(checkpoint: QuantisedCheckpoint, planned: PlannedTensor, piece: Piece) -> Expected:
    config, tp_size = checkpoint.config, checkpoint.tp_size
    if planned.target == EMBEDDING and not planned.shard.vocabulary:
        is_cut = tp_size > 1 and config.get("use_parallel_embedding")
        if is_cut and config.get("embedding_sharding_dim", 0) == 0:
            return _expect_rows(checkpoint, planned, piece)
        if is_cut:
            width = piece.shape[1] // tp_size
            column = (piece.rank % tp_size * width, (piece.rank % tp_size + 1) * width)
            return Expected((piece.shape[0], width), planned.dtype, planned, piece, column=column)
        rows = (0, min(piece.shape[0], config["vocab_size"]))
        return Expected((config["vocab_size"], *piece.shape[1:]), planned.dtype, planned, piece, rows)
    if planned.shard.vocabulary:
        return _expect_rows(checkpoint, planned, piece)
    return Expected(piece.shape, planned.dtype, planned, piece)


def _expect_rows(checkpoint: QuantisedCheckpoint, planned: PlannedTensor, piece: Piece) -> Expected:
    """One rank's rows of a vocabulary that is as large as the checkpoint's config says, and padded to its ranks."""
    tp_size = checkpoint.tp_size
    count, whole = -(-checkpoint.config["vocab_size"] // tp_size), planned.shape[0] - planned.padded_rows
    start = min(piece.rank % tp_size * count, whole)
    rows = (start, min(start + count, whole))
    return Expected((count, *piece.shape[1:]), planned.dtype, planned, piece, rows)


def _list_head_shapes(checkpoint: QuantisedCheckpoint, rank: int) -> Iterator[tuple[str, Expected]]:
    """What the config says of heads that are not at hand."""
    config, tp_size = checkpoint.config, checkpoint.tp_size
    size, padded = config["hidden_size"], -(-config["vocab_size"] // tp_size) * tp_size
    for head in range(config.get("num_medusa_heads") or 0):
        shapes: dict[str, tuple[int, ...]] = {f"{HEADS}{head}.{OUTPUT}": (padded, size)}
        for layer in range(config.get("num_medusa_layers") or 0):
            linear = f"{HEADS}{head}.medusa_layers.{layer}.linear"
            shapes |= {f"{linear}.weight": (size, size), f"{linear}.bias": (size,)}
        for name, shape in shapes.items():
            shard = VOCABULARY if name.endswith(OUTPUT) else COLUMN
            pieces = cut_head_pieces(name, shape, shard, tp_size, 1)
            yield name, Expected(pieces[rank % tp_size].shape, checkpoint.dtype)


def _repeats_embedding(checkpoint: QuantisedCheckpoint, plan: ConversionPlan, rank: int) -> bool:
    """A class that shares its embedding with the output has no matrix of its own; some quantisers write one too."""
    return OUTPUT in checkpoint.ranks[rank] and all(planned.target != OUTPUT for planned in plan.tensors)


def _may_be_absent(checkpoint: QuantisedCheckpoint, plan: ConversionPlan, rank: int, name: str) -> bool:
    """A shared output matrix, and heads on a pipeline stage that does not compute with them."""
    if name == OUTPUT:
        return bool(checkpoint.config.get("share_embedding_table")) and plan.base.tied
    is_last = rank >= len(checkpoint.ranks) - checkpoint.tp_size
    return name.startswith(HEADS) and not is_last and not any(key.startswith(HEADS) for key in checkpoint.ranks[rank])


def _belongs_to_quantisation(checkpoint: QuantisedCheckpoint, rank: int, name: str) -> bool:
    """Scales of quantised matrices and of a quantised cache; `find_faults` judges them."""
    module, _, suffix = name.rpartition(".")
    if suffix == CACHE_SCALE:
        return checkpoint.quantization.get("kv_cache_quant_algo") is not None
    code = checkpoint.ranks[rank].get(f"{module}.weight", ("", ()))[0]
    return suffix in SCALES and code in QUANTISED_TYPES


def _find_difference(tensor: torch.Tensor, expected: Expected, base: ConvertedBase) -> str | None:
    """What is wrong with the values of one tensor, None when nothing is."""
    import torch

    if not bool(tensor.isfinite().all()):
        return f"holds {int((~tensor.isfinite()).sum())} values that are not finite"
    if expected.planned is None:
        return None
    wanted = _read_value(expected, base)
    padding = tensor[len(wanted) :]
    if len(padding) and not _is_padding(padding, wanted):
        return f"holds other rows than padding behind the vocabulary, from row {len(wanted)} of this rank on"
    ours, wanted = tensor[: len(wanted)].float(), wanted.float()
    wrong = (ours - wanted).abs() > _allowed_rounding(expected.planned, tensor.dtype, wanted)
    if not bool(wrong.any()):
        return None
    text = f"differs from the base's in {int(wrong.sum())} of {wrong.numel()} values"
    if tensor.dtype != torch.bfloat16 and torch.equal(ours, wanted.to(torch.bfloat16).to(tensor.dtype).float()):
        return f"{text}: it was rounded to bfloat16 on the way"
    return f"{text}, by up to {float((ours - wanted).abs().max()):.3g}"


def _read_value(expected: Expected, base: ConvertedBase) -> torch.Tensor:
    """The base's own part, without padding."""
    import torch

    planned, piece, tp_size = expected.planned, expected.piece, base.plan.tp_size
    value = base.ranks[piece.rank][piece.name]
    if expected.column is not None:
        return value[:, expected.column[0] : expected.column[1]]
    if expected.rows is None:
        return value
    if piece.slices:
        stage = [one for one in planned.pieces if one.rank // tp_size == piece.rank // tp_size]
        value = torch.cat([base.ranks[one.rank][one.name] for one in stage])
    return value[expected.rows[0] : expected.rows[1]]


def _is_padding(rows: torch.Tensor, real: torch.Tensor) -> bool:
    """Zeros, or copies of the last real row; of a rank that holds padding alone, anything."""
    return not bool(rows.any()) or len(real) == 0 or bool((rows == real[-1]).all())


def _allowed_rounding(planned: PlannedTensor, dtype: torch.dtype, wanted: torch.Tensor) -> float:
    """Values that were only moved are the same bits; one addition or product costs one rounding."""
    import torch

    if not wanted.numel() or not any(isinstance(operation, COMPUTING) for operation in planned.operations):
        return 0.0
    return torch.finfo(dtype).eps * max(1.0, float(wanted.abs().max()))
