"""How ranks share a target: index ranges for tensor parallelism, layer numbers for pipeline parallelism.

Integers only. Source: tensorrt_llm/mapping.py 0.13.0.dev2024090300 (pp_layers: equal runs of layers, counted from 0 on
every rank) and layers/attention.py 0.11.0.dev2024062500 (key/value heads per rank are rounded up).
"""

from __future__ import annotations

from porting_kit.architectures.names import Dims, Shape, evaluate_dim
from porting_kit.architectures.rules import Shard
from porting_kit.conversion.planned import Piece
from porting_kit.errors import ConversionError


class UnevenRanks(ConversionError):
    """The model, or the class that runs it, does not divide over the ranks that were asked for."""


def shard_slices(shard: Shard, size: int, dims: Dims, tp_size: int, tp_rank: int) -> tuple[tuple[int, int], ...]:
    """The [start, stop) ranges along the shard's dim that one rank holds; empty when it holds everything.

    A block of K heads on more than K ranks is repeated: rank r holds head r*K//tp_size
    (tensorrt_llm/layers/attention.py 0.11.0.dev2024062500: kv heads per rank are rounded up).

    Raises:
        ValueError: a block does not divide by the ranks.
    """
    if shard.dim is None or tp_size == 1:
        return ()
    sizes = [evaluate_dim(block, dims) for block in shard.blocks] or [size]
    heads = [evaluate_dim(head, dims) for head in shard.heads] or [0] * len(sizes)
    if sum(sizes) != size:
        raise ValueError(f"blocks of {sizes} do not make up {size}")
    slices, start = [], 0
    for block, count in zip(sizes, heads, strict=True):
        if count and count < tp_size:
            if tp_size % count:
                raise ValueError(f"{count} heads neither divide by {tp_size} ranks nor the other way round")
            unit = block // count
            first = start + (tp_rank * count // tp_size) * unit
            slices.append((first, first + unit))
        else:
            if (count or block) % tp_size:
                raise ValueError(f"{count or block} does not divide by {tp_size} ranks")
            part = block // tp_size
            slices.append((start + tp_rank * part, start + (tp_rank + 1) * part))
        start += block
    return tuple(slices)


def locate_target(target: str, layer: int | None, pipeline: str, num_layers: int, pp_size: int) -> tuple[int, str]:
    """The pipeline rank that holds a target, and its name there.

    Args:
        layer: the layer's number in the whole model; None outside the layers.
        pipeline: "first" or "last" for targets outside the layers.
    """
    if layer is None:
        return (0 if pipeline == "first" else pp_size - 1), target
    per_stage, parts = num_layers // pp_size, target.split(".")
    parts[parts.index(str(layer))] = str(layer % per_stage)
    return layer // per_stage, ".".join(parts)


def cut_pieces(name: str, stage: int, shape: Shape, shard: Shard, dims: Dims, tp_size: int) -> tuple[Piece, ...]:
    """Every tensor-parallel rank's part of one target.

    Args:
        name: the target's name on its pipeline rank.
        stage: that pipeline rank.
        shape: of the whole target, vocabulary padding included.

    Raises:
        ConversionError: the ranks do not divide it.
    """
    pieces = []
    for tp_rank in range(tp_size):
        try:
            size = shape[shard.dim] if shard.dim is not None else 0
            slices = shard_slices(shard, size, dims, tp_size, tp_rank)
        except ValueError as problem:
            raise UnevenRanks(
                f"{name} cannot be split over {tp_size} ranks",
                expected="a dimension that the ranks divide",
                found=problem,
                where=f"shape {list(shape)}",
                next_step="choose another target.tp_size",
            ) from None
        part = list(shape)
        if slices:
            part[shard.dim] = sum(stop - start for start, stop in slices)
        zero = shard.first_rank_only and tp_rank > 0
        pieces.append(Piece(stage * tp_size + tp_rank, name, tuple(part), slices, zero))
    return tuple(pieces)


def cut_head_pieces(name: str, shape: Shape, shard: Shard, tp_size: int, pp_size: int) -> tuple[Piece, ...]:
    """Every rank's part of a Medusa head's tensor, on every pipeline stage.

    Only the last stage computes with the heads, but the runtime's class makes them on all, and loading asks for all of
    its parameters (tensorrt_llm/models/medusa/model.py, 0.13.0.dev2024090300).
    """
    return tuple(piece for stage in range(pp_size) for piece in cut_pieces(name, stage, shape, shard, {}, tp_size))
