"""How right the real kernel is: its output against float32 attention on the same half-precision tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.emulator.xqa import XqaKernel
from porting_kit.medusa.tree import MedusaTree, read_tree

TREES = {16: "small_4", 64: "mc_sim_7b_63"}
KV_HEADS, NODES = 4, 64
SMOLLM2 = Path(__file__).parents[2] / "notebooks" / "ports" / "smollm2.yaml"
RECORDED_TOKENS = 256


def reference_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q.k / sqrt(D) + bias) v in the type of the arguments.

    Args:
        query: [B, N, H, D].
        keys, values: [B, K, rows, D].
        allowed: bool [B, N, rows].
        bias: [B, H, N, rows], None for none.
    """
    group = query.shape[2] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    logits = torch.einsum("bnhd,bhrd->bhnr", query, keys) / math.sqrt(query.shape[-1])
    logits = logits if bias is None else logits + bias
    return torch.einsum("bhnr,bhrd->bnhd", logits.masked_fill(~allowed[:, None], -math.inf).softmax(-1), values)


def visible_rows(tree: torch.Tensor, pasts: torch.Tensor, rows: int) -> torch.Tensor:
    """Which cache rows each node sees, bool [B, N, rows]: its past, its ancestors, itself."""
    B, N, _ = tree.shape
    column = torch.arange(rows, device=tree.device)
    offset = column - pasts
    is_node = (offset >= 0) & (offset < N)
    seen = tree.gather(2, offset.clamp(0, N - 1)[:, None].expand(B, N, rows))
    return (column < pasts)[:, None] | (is_node[:, None] & seen)


def tree_tensors(tree: MedusaTree, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(visibility bool [B, N, N], depth of each node int64 [B, N])."""
    mask = torch.as_tensor(tree.mask, dtype=torch.bool, device=device).expand(batch, -1, -1).contiguous()
    depths = torch.as_tensor(tree.position_offsets, device=device).long().reshape(1, -1).expand(batch, -1)
    return mask, depths


def errors(found: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Largest absolute error, and the norm of the error over the norm of what was wanted."""
    gap = found.double() - wanted.double()
    return {"max_error": float(gap.abs().max()), "relative_error": float(gap.norm() / wanted.double().norm())}


def measure_geometry(
    kernel: XqaKernel,
    size: int,
    group: int,
    nodes: int,
    past: int,
    dtype: torch.dtype,
    *,
    kv_heads: int = KV_HEADS,
    cache_scale: float | None = None,
) -> dict[str, Any]:
    """One row: a batch of two requests with unequal pasts."""
    device = kernel.device
    generator = torch.Generator(device).manual_seed(size * 1000 + group * 100 + nodes)
    tree, _ = tree_tensors(read_tree(TREES[nodes]), 2, device)
    pasts = torch.tensor([[past], [past // 2 + 3]], device=device)
    rows = past + nodes
    query, keys, values = (
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape in ((2, nodes, kv_heads * group, size), *[(2, kv_heads, rows, size)] * 2)
    )
    causal = torch.ones_like(tree).tril()
    stored = (keys.float(), values.float())
    if cache_scale is not None:
        stored = tuple((part / cache_scale).to(torch.float8_e4m3fn).float() * cache_scale for part in stored)
    wanted, ignoring = (
        reference_attention(query.float(), *stored, visible_rows(mask, pasts, rows), None) for mask in (tree, causal)
    )
    call = kernel.prepare(query, keys, values, pasts, tree, 1 / math.sqrt(size), cache_scale=cache_scale)
    call.launch()
    found = call.output[:, 0]
    row = {
        "head_size": size,
        "group": group,
        "nodes": nodes,
        "past": past,
        "dtype": str(dtype).removeprefix("torch."),
        **errors(found, wanted),
        "rounding_only": errors(wanted.to(dtype), wanted)["relative_error"],
        "causal_instead_of_tree": errors(ignoring, wanted)["relative_error"],
    }
    if cache_scale is not None:
        row["error_against_causal"] = errors(found, ignoring)["relative_error"]
    return row


def record_smollm2(file: Path) -> None:
    """Run SmolLM2's real weights on its port's prompts and a tree; write what each layer's attention is given."""
    from porting_kit.alignment.gguf_settings import load_tokenizer
    from porting_kit.conversion.convert import checkpoint_tensors
    from porting_kit.emulator import open_emulator
    from porting_kit.port import load_port
    from porting_kit.releases.kernels import kernel_profile
    from porting_kit.source_tree import open_source_tree
    from porting_kit.steps.prompts import read_prompts

    port = load_port(SMOLLM2)
    seen: list[dict[str, Any]] = []

    def attend(query: torch.Tensor, keys: Any, values: Any, pasts: Any, tree: Any, scale: float) -> torch.Tensor:
        half = [part.half() for part in (query, keys, values)]
        seen.append({"tensors": half, "pasts": pasts, "scale": scale})
        allowed = visible_rows(tree, pasts, keys.shape[2])
        scaled = query.float() * scale * math.sqrt(query.shape[-1])
        return reference_attention(scaled, keys.float(), values.float(), allowed, None).to(query.dtype)

    profile = replace(kernel_profile("xqa"), attend_tree=attend)
    config, tensors = checkpoint_tensors(port.base_path, dtype="float32")
    model = open_emulator(open_source_tree("bundled"), kernel=profile).build_model(config, tensors)
    tokens = torch.tensor(load_tokenizer(port.base_path).encode("\n".join(read_prompts(port)))[:RECORDED_TOKENS])
    tree = read_tree(TREES[NODES])
    cache = model.new_cache(1, len(tokens) + NODES)
    model.prefill([tokens], cache)
    model.decode(tokens[None, :NODES], cache, position_offsets=tree.position_offsets, packed_mask=tree.packed_mask)
    torch.save(seen, file)


def measure_recorded(kernel: XqaKernel, file: Path) -> dict[str, Any]:
    """The recorded layers through the kernel: the worst one's figures."""
    layers = torch.load(file, weights_only=True)
    tree, _ = tree_tensors(read_tree(TREES[NODES]), 1, kernel.device)
    rows = []
    for layer in layers:
        query, keys, values = (part.to(kernel.device) for part in layer["tensors"])
        pasts, factor = layer["pasts"].to(kernel.device), layer["scale"] * math.sqrt(query.shape[-1])
        allowed = visible_rows(tree, pasts, keys.shape[2])
        wanted = reference_attention(query.float() * factor, keys.float(), values.float(), allowed, None)
        rows.append(errors(kernel(query, keys, values, pasts, tree, layer["scale"]), wanted))
    heads = {"query_heads": query.shape[2], "kv_heads": keys.shape[1], "head_size": query.shape[3]}
    worst = {name: max(row[name] for row in rows) for name in rows[0]}
    return {"layers": len(rows), **heads, "past": int(pasts[0, 0]), **worst}
