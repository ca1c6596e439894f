"""Measure NVIDIA's XQA kernel with a Medusa tree: error against float32, fitted and dropped ALiBi, time against bytes.

Run `python -m tests.benchmarks.xqa [--quick] [--json]` on a machine with a GPU of compute capability 9, 10 or 12, the
CUDA compiler and flashinfer-python (the extra `gpu`), whose build every figure is from. Elsewhere it says what is
missing and ends with code 3.

- geometry: head size, query heads per key/value head, nodes of the tree, past; the largest and the relative error of
  the attention output, against float32 attention on the same half-precision tensors; and what a causal mask in place
  of the tree gives, which must be far off.
- alibi: 32 heads with ALiBi folded into rotary pairs against exact ALiBi, and the error of dropping it; content logits
  as a random model's and three times sharper.
- ports: whole ports aligned with `kernel: xqa`: the demo's Bloom unfitted and fitted, random models with the heads of
  Qwen2-7B (28 / 4 / 128) and of SmolLM2 (9 / 3 / 64), and a random Bloom of head size 64 fitted.
- time: one call at batch 1, median over CUDA graphs that walk through more cache than the card's L2 holds, the bytes it
  must read and write over that time, and the same for PyTorch's attention and for a plain copy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.reference import load_reference
from porting_kit.emulator.xqa import XqaKernel, open_xqa_kernel
from porting_kit.errors import EnvironmentMissing
from porting_kit.kernel_fit.alibi import wave_biases
from porting_kit.kernel_fit.alibi_line import AlibiFit, alibi_slopes, fit_alibi, frequencies
from porting_kit.medusa.tree import MedusaTree, read_tree
from porting_kit.steps.align import align_port
from porting_kit.steps.context import open_port_run
from tests.alignment.tiny_ports import make_base, make_heads, make_prompts

HEAD_SIZES, GROUPS, PASTS = (64, 128), (1, 3, 4, 7, 8), (41, 1500)
TREES = {16: "small_4", 64: "mc_sim_7b_63"}
KV_HEADS = 4
# content dims, head size of the kernel, longest sequence: what fold_alibi does for each head size of the model
ALIBI_CASES = ((64, 128, 2048), (80, 128, 2048), (96, 128, 2048), (112, 128, 2048), (116, 128, 1024))
ALIBI_HEADS = 32
# query heads, key/value heads, head size, past
TIMED = ((32, 32, 128, 1000), (32, 32, 128, 2000), (28, 4, 128, 1000), (9, 3, 64, 1000), (32, 32, 64, 1000))
# Real head counts and sizes; where the config allows it, on a narrow model.
GEOMETRIES = {
    "qwen2": {"hidden_size": 256, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128},
    "llama": {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "bloom": {"hidden_size": 256, "n_head": 4},
}
BLOOM_MINI = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini.yaml"
RELEASE = "0.11.0.dev2024062500"
CACHE_SETS, CALLS = 24, 20
NODES = 64


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
    kernel: XqaKernel, size: int, group: int, nodes: int, past: int, dtype: torch.dtype
) -> dict[str, Any]:
    """One row: a batch of two requests with unequal pasts."""
    device = kernel.device
    generator = torch.Generator(device).manual_seed(size * 1000 + group * 100 + nodes)
    tree, _ = tree_tensors(read_tree(TREES[nodes]), 2, device)
    pasts = torch.tensor([[past], [past // 2 + 3]], device=device)
    rows = past + nodes
    query, keys, values = (
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape in ((2, nodes, KV_HEADS * group, size), *[(2, KV_HEADS, rows, size)] * 2)
    )
    causal = torch.ones_like(tree).tril()
    wanted, ignoring = (
        reference_attention(query.float(), keys.float(), values.float(), visible_rows(mask, pasts, rows), None)
        for mask in (tree, causal)
    )
    found = kernel(query, keys, values, pasts, tree, 1 / math.sqrt(size))
    return {
        "head_size": size,
        "group": group,
        "nodes": nodes,
        "past": past,
        "dtype": str(dtype).removeprefix("torch."),
        **errors(found, wanted),
        "rounding_only": errors(wanted.to(dtype), wanted)["relative_error"],
        "causal_instead_of_tree": errors(ignoring, wanted)["relative_error"],
    }


def rotate_waves(wave: torch.Tensor, positions: torch.Tensor, fit: AlibiFit) -> torch.Tensor:
    """Constant wave dims [H, 2P] after the rotation of each position [...], [..., H, 2P] (pair t with t + P)."""
    angle = positions[..., None].double() * torch.from_numpy(frequencies(fit.base, fit.pairs)).to(positions.device)
    cosine, sine = angle.cos()[..., None, :].float(), angle.sin()[..., None, :].float()
    first, second = wave.to(positions.device).chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def measure_alibi(
    kernel: XqaKernel, content: int, size: int, length: int, sharpness: float, dtype: torch.dtype
) -> dict[str, Any]:
    """ALiBi folded beside `content` dims, through the kernel, against exact ALiBi in float64; and dropped."""
    device, H = kernel.device, ALIBI_HEADS
    name = str(dtype).removeprefix("torch.")
    slopes = alibi_slopes(H)
    fit = fit_alibi(slopes, min((size - content) // 2, 32), length, name)
    query_wave, key_wave = wave_biases(fit, size, H, name)
    generator = torch.Generator(device).manual_seed(content)
    tree, depths = tree_tensors(read_tree(TREES[NODES]), 1, device)
    past = length - NODES
    rows = length
    pasts = torch.tensor([[past]], device=device)
    positions = torch.cat((torch.arange(past, device=device)[None], past + depths), 1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # Logits of standard deviation `sharpness` once divided by the square root of the content's size.
    query, keys = draw(1, NODES, H, content) * sharpness, draw(1, H, rows, content)
    values = draw(1, H, rows, size).to(dtype)
    query, keys = query.to(dtype).float(), keys.to(dtype).float()
    factor = math.sqrt(size / content)
    waves_q = rotate_waves(query_wave, past + depths, fit)
    waves_k = rotate_waves(key_wave, positions, fit).transpose(1, 2)
    pad_q, pad_k = (part.new_zeros(*part.shape[:-1], size - content - 2 * fit.pairs) for part in (query, keys))
    folded_q = torch.cat((waves_q, query * factor, pad_q), -1).to(dtype)
    folded_k = torch.cat((waves_k, keys, pad_k), -1).to(dtype)
    plain_q = torch.cat((torch.zeros_like(waves_q), query * factor, pad_q), -1).to(dtype)
    plain_k = torch.cat((torch.zeros_like(waves_k), keys, pad_k), -1).to(dtype)
    scale = 1 / math.sqrt(size)
    distance = (positions[:, None] - (past + depths)[:, :, None]).double()
    bias = torch.from_numpy(slopes).to(device)[None, :, None, None] * distance[:, None]
    allowed = visible_rows(tree, pasts, rows)
    wanted = reference_attention(query.double(), keys.double(), values.double(), allowed, bias)
    folded = kernel(folded_q, folded_k, values, pasts, tree, scale)
    dropped = kernel(plain_q, plain_k, values, pasts, tree, scale)
    gap, whole = ((part * part).sum((0, 1, 3)) for part in (folded.double() - wanted, wanted))
    same = reference_attention(folded_q.double(), folded_k.double(), values.double(), allowed, None)
    return {
        "content_dims": content,
        "head_size": size,
        "pairs": fit.pairs,
        "length": length,
        "logit_std": sharpness,
        "dtype": name,
        **errors(folded, wanted),
        "relative_error_worst_head": float((gap / whole).max().sqrt()),
        "kernel_alone": errors(folded, same)["relative_error"],
        "dropped_relative_error": errors(dropped, wanted)["relative_error"],
        "dropped_max_error": errors(dropped, wanted)["max_error"],
    }


def time_graph(call: Callable[[int], Any], sets: int) -> float:
    """Median seconds of one call; a graph makes `sets` calls on as many tensors, so that L2 does not hold them."""
    for index in range(sets):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            call(index)
    samples = []
    for _ in range(CALLS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / sets)
    return statistics.median(samples)


@lru_cache
def measure_copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of the better of two copies of 4 GB: the driver's, and a kernel's."""
    source = torch.zeros(1 << 30, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copies = (lambda index: target.copy_(source), lambda index: torch.add(source, 1, out=target))
    return 2 * source.numel() * source.element_size() / min(time_graph(copy, 1) for copy in copies)


def measure_time(kernel: XqaKernel, H: int, K: int, D: int, past: int) -> dict[str, Any]:
    """Time of one call of the kernel and of PyTorch's attention, batch 1, 64 nodes, float16."""
    device, rows = kernel.device, past + NODES
    tree, _ = tree_tensors(read_tree(TREES[NODES]), 1, device)
    pasts = torch.tensor([[past]], device=device)
    query = torch.randn(1, NODES, H, D, device=device, dtype=torch.float16)
    caches = [torch.randn(2, 1, K, rows, D, device=device, dtype=torch.float16) for _ in range(CACHE_SETS)]
    calls = [kernel.prepare(query, cache[0], cache[1], pasts, tree, 1 / math.sqrt(D)) for cache in caches]
    mask = visible_rows(tree, pasts, rows)[:, None]
    seen, heads = query.transpose(1, 2).contiguous(), H // K
    grouped = seen.reshape(1, K, heads * NODES, D)
    grouped_mask = mask.expand(1, K, NODES, rows).repeat(1, 1, heads, 1)

    def torch_attention(index: int) -> None:
        torch.nn.functional.scaled_dot_product_attention(grouped, *caches[index], attn_mask=grouped_mask)

    copy_rate = measure_copy_rate(device)
    seconds = time_graph(lambda index: calls[index].launch(), CACHE_SETS)
    theirs = time_graph(torch_attention, CACHE_SETS)
    size = 2 * K * rows * D * 2 + 2 * query.numel() * 2
    return {
        "query_heads": H,
        "kv_heads": K,
        "head_size": D,
        "past": past,
        "microseconds": seconds * 1e6,
        "torch_microseconds": theirs * 1e6,
        "bytes": size,
        "bytes_per_second": size / seconds,
        "share_of_copy_rate": size / seconds / copy_rate,
        "copy_bytes_per_second": copy_rate,
    }


def measure_ports(folder: Path) -> list[dict[str, Any]]:
    """Align whole ports, every tree step of every layer on the kernel; one row each."""
    made = {"qwen2 28/4/128": "qwen2", "llama 9/3/64": "llama", "bloom head size 64": "bloom"}
    files = {name: write_port(folder / family, family) for name, family in made.items()}
    files["bloom-mini"] = BLOOM_MINI
    fitted = {"trtllm.release": RELEASE, "fit": "auto"}
    cases = [(name, file, {}) for name, file in files.items()]
    cases += [(f"{name}, fitted", file, fitted) for name, file in files.items() if "bloom" in name]
    rows = []
    for name, file, overrides in cases:
        run = open_port_run(file, run_folder=folder / "runs" / str(len(rows)), overrides={"kernel": "xqa", **overrides})
        result = align_port(run)
        document = result.document()
        keys = ("verdict", "tokens_equal", "near_ties", "wrong_tokens", "tree_error", "tokens_per_step", "covered")
        rows.append({"port": name, **{key: document.get(key) for key in keys}, "summary": result.outcome.summary})
    return rows


def write_port(folder: Path, family: str) -> Path:
    """A random base with a real model's heads, Medusa heads fitted to it, and its port file."""
    base = make_base(folder / "base", family, **GEOMETRIES[family])
    make_heads(folder / "heads", load_reference(base), make_prompts())
    port = {
        "name": family,
        "base": "base",
        "dtype": "float16",
        "heads": "heads",
        "trtllm": "bundled",
        "tree": "small_3",
        "target": {"compute_capability": 9.0, "max_seq_len": 512, "max_input_len": 256},
        "alignment": {"new_tokens": 24},
    }
    file = folder / "port.yaml"
    file.write_text(json.dumps(port))
    return file


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 3 when the machine lacks something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few geometries")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    options = parser.parse_args(arguments)
    try:
        kernel = open_xqa_kernel()
    except EnvironmentMissing as missing:
        print(missing.message, file=sys.stderr)
        return missing.exit_code
    torch.set_grad_enabled(False)
    sizes, groups = ((128,), (1, 7)) if options.quick else (HEAD_SIZES, GROUPS)
    cases = [(size, group, nodes) for size in sizes for group in groups for nodes in TREES]
    half, brain = torch.float16, torch.bfloat16
    alibi = ALIBI_CASES[:1] if options.quick else ALIBI_CASES
    # Variants compile in parallel, each on its first call; what they give here is not used.
    first = [(kernel, *case, PASTS[0], half) for case in cases]
    first += [(kernel, *case, PASTS[0], brain) for case in cases if case[1] in (1, 7) and case[2] == NODES]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda case: measure_geometry(*case), first))
    geometry = [measure_geometry(kernel, *case, past, half) for case in cases for past in PASTS]
    geometry += [measure_geometry(*case[:4], past, brain) for case in first if case[-1] is brain for past in PASTS]
    with tempfile.TemporaryDirectory() as folder:
        ports = measure_ports(Path(folder))
    document = {
        "build": vars(kernel.build),
        "torch": torch.__version__,
        "geometry": geometry,
        "alibi": [
            measure_alibi(kernel, *case, sharpness, dtype)
            for dtype in ((half,) if options.quick else (half, brain))
            for case in alibi
            for sharpness in (1.0, 3.0)
        ],
        "ports": ports,
        "time": [measure_time(kernel, *case) for case in (TIMED[:1] if options.quick else TIMED)],
    }
    if options.json:
        print(json.dumps(document, indent=1))
        return 0
    print(kernel.build)
    for name in ("geometry", "alibi", "ports", "time"):
        rows = document[name]
        print("", "  ".join(f"{key:>24}" for key in rows[0]), sep="\n")
        for row in rows:
            print("  ".join(f"{v:>24.4g}" if isinstance(v, float) else f"{v:>24}" for v in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
