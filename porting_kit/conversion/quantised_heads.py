"""Medusa heads in 16 bit beside a quantised base, and an exclude list that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.rules import COLUMN, VOCABULARY
from porting_kit.conversion.apply import cast_tensor, pad_vocabulary
from porting_kit.conversion.quantised import HEADS_EXCLUDED, require_consistent
from porting_kit.conversion.quantised_files import QuantisedCheckpoint, read_quantised
from porting_kit.conversion.sharding import cut_head_pieces
from porting_kit.errors import CheckpointError
from porting_kit.whole_files import replace_folder, write_json, write_tensors

if TYPE_CHECKING:
    import torch

    from porting_kit.conversion.heads import HeadSet


def add_heads(source: str | Path, heads: HeadSet, target: Path, *, max_draft_len: int) -> Path:
    """Add Medusa heads in 16 bit to a quantised base, and say in the exclude list that they are.

    Args:
        source: the quantised base's folder.
        heads: the heads; they must have output matrices of their own, or the base's must be in 16 bit.
        target: where the joined checkpoint goes; what is there is replaced when it is complete.
        max_draft_len: draft tokens of the largest tree.

    Raises:
        CheckpointError: the base contradicts itself, has heads already, or its output matrix is quantised and shared.
        ConversionError: a value of the heads does not fit the base's dtype.
    """
    from safetensors.torch import load_file

    checkpoint = read_quantised(source)
    require_consistent(checkpoint)
    _require_fit(checkpoint, heads)
    config = _config_with_heads(checkpoint.config, checkpoint, heads, max_draft_len)
    tp_size, count = checkpoint.tp_size, len(checkpoint.ranks)
    with replace_folder(target) as folder:
        for rank in range(count):
            tensors = load_file(checkpoint.file(rank))
            tensors |= _cut_heads(checkpoint, heads, rank)
            if not heads.own_output:
                last = load_file(checkpoint.file(count - tp_size + rank % tp_size))["lm_head.weight"]
                for head in range(heads.num_heads):
                    tensors[f"medusa_heads.{head}.lm_head.weight"] = last.clone()
            write_tensors(folder / f"rank{rank}.safetensors", tensors)
        write_json(folder / "config.json", config)
    require_consistent(read_quantised(target))
    return target


def _cut_heads(checkpoint: QuantisedCheckpoint, heads: HeadSet, rank: int) -> dict[str, torch.Tensor]:
    """One rank's part of the heads; every pipeline stage has them, see `cut_head_pieces`."""
    import torch

    parts, tp_size = {}, checkpoint.tp_size
    for name in heads.origins:
        is_output = name.endswith("lm_head.weight")
        whole = cast_tensor(heads.read(name), getattr(torch, checkpoint.dtype), name)
        if is_output:
            whole = pad_vocabulary(whole, -len(whole) % tp_size)
        shard = VOCABULARY if is_output else COLUMN
        piece = cut_head_pieces(name, tuple(whole.shape), shard, tp_size, checkpoint.pp_size)[rank]
        parts[name] = whole[piece.slices[0][0] : piece.slices[0][1]].clone() if piece.slices else whole.clone()
    return parts


def _require_fit(checkpoint: QuantisedCheckpoint, heads: HeadSet) -> None:
    config, where = checkpoint.config, checkpoint.folder
    if config.get("num_medusa_heads"):
        raise CheckpointError(
            "the checkpoint has Medusa heads already",
            expected="a base without heads",
            found=f"num_medusa_heads {config['num_medusa_heads']}",
            where=where,
            next_step="name the quantised base alone, or use this checkpoint as it is",
        )
    if heads.hidden_size != config.get("hidden_size"):
        raise CheckpointError(
            "heads and quantised base differ in hidden size",
            expected=config.get("hidden_size"),
            found=heads.hidden_size,
            where=heads.where,
            next_step="name heads that were trained on this base",
        )
    kind, shape = checkpoint.ranks[-1].get("lm_head.weight", ("none", (0,)))
    rows = -(-config["vocab_size"] // checkpoint.tp_size)
    if shape[0] != rows:
        raise CheckpointError(
            "the quantised base's output matrix is not of its config's vocabulary",
            expected=f"lm_head.weight with {rows} rows a rank",
            found=list(shape),
            where=where,
            next_step="quantise again",
        )
    if heads.own_output and heads.vocab_size != config["vocab_size"]:
        raise CheckpointError(
            "heads and quantised base differ in output rows",
            expected=config["vocab_size"],
            found=heads.vocab_size,
            where=heads.where,
            next_step="name heads that were trained on this base",
        )
    if not heads.own_output and kind not in ("F16", "BF16", "F32"):
        raise CheckpointError(
            "the heads share the base's output matrix, and that is quantised",
            expected="an output matrix in 16 bit, or heads with their own",
            found=f"lm_head.weight in {kind}",
            where=where,
            next_step="leave lm_head out of the quantisation, or train heads with output matrices of their own",
        )


def _config_with_heads(
    config: Mapping[str, Any], checkpoint: QuantisedCheckpoint, heads: HeadSet, max_draft_len: int
) -> dict[str, Any]:
    joined = json.loads(json.dumps(config))
    joined |= {
        "num_medusa_heads": heads.num_heads,
        "num_medusa_layers": heads.num_layers,
        "medusa_hidden_act": "silu",
        "max_draft_len": max_draft_len,
    }
    if checkpoint.algorithm is not None:
        # A list of one's own takes the place of upstream's, so its entries are kept.
        joined["quantization"]["exclude_modules"] = list(dict.fromkeys((*checkpoint.excluded, *HEADS_EXCLUDED)))
    return joined
