"""Tensor-parallel ranks against one rank on a random LLaMA: equal logits within bounds, and how long each takes.

Run `python -m tests.benchmarks.ranks [--quick] [--json] [--device cuda] [--tp N ...] [--layers L]`. The model is
converted once for one rank and once for each N; the sharded checkpoints run as N processes through torch.distributed
(gloo on a CPU, NCCL on GPUs), through the source tree's own layers. Context and tree phase are compared.

Bounds: two computations in half precision that differ only in the order of sums each stay within the rounding noise of
the exact result, so they differ by at most the sum of both; that noise is measured as the distance of one rank in half
precision from one rank in float32 with the same weights, and four times it is allowed. In float32 the same with its own
unit: 1e-5 of the logits' norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from porting_kit.conversion import convert_checkpoint
from porting_kit.emulator import open_emulator
from porting_kit.source_tree import open_source_tree
from tests.conversion.large_model import write_large_model
from tests.emulator.differential import DEPTHS, TREE
from tests.emulator.naive_attention import pack_mask

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
ALLOWED = 4.0
FLOAT32_BOUND = 1e-5


def run_phases(folder: Path, rank: int, device: str, dtype: str | None, rounds: int, prompt_tokens: int) -> dict:
    """Logits of a prefill and of a tree step on the CPU, with the seconds of the fastest round."""
    emulator = open_emulator(open_source_tree("bundled"), device=device)
    model = emulator.load_checkpoint(folder, rank=rank, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.config["vocab_size"])
    prompts = [torch.randint(0, vocab_size, (prompt_tokens,), generator=generator) for _ in range(2)]
    drafts = torch.randint(0, vocab_size, (2, len(DEPTHS)), generator=generator)
    seconds: dict[str, list[float]] = {"prefill": [], "tree": []}
    for _ in range(rounds):
        cache = model.new_cache(2, prompt_tokens + 16)
        started = _clock(device)
        first = model.prefill(prompts, cache)
        seconds["prefill"].append(_clock(device) - started)
        started = _clock(device)
        tree = model.decode(drafts, cache, position_offsets=torch.tensor(DEPTHS), packed_mask=pack_mask(TREE))
        seconds["tree"].append(_clock(device) - started)
    logits = {"prefill": first.logits.float().cpu(), "tree": tree.logits.float().cpu()}
    return {"logits": logits, "seconds": {name: min(times) for name, times in seconds.items()}}


def _clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def work(folder: str, result: str, device: str, dtype: str, rounds: str, prompt_tokens: str) -> None:
    """One rank under torchrun; the first one leaves its logits."""
    rank = int(os.environ["RANK"])
    if device == "cuda":
        index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        device = f"cuda:{index}"
    found = run_phases(Path(folder), rank, device, dtype or None, int(rounds), int(prompt_tokens))
    if rank == 0:
        torch.save(found, result)
    dist.barrier()  # a rank that leaves while another still sends ends it
    dist.destroy_process_group()


def run_ranks(folder: Path, ranks: int, device: str, dtype: str | None, rounds: int, prompt_tokens: int) -> dict:
    """The same through `ranks` processes; what the first one found."""
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "found.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "tests.benchmarks.ranks", "--worker", str(folder), str(result), device, dtype or ""]
        command += [str(rounds), str(prompt_tokens)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return torch.load(result, weights_only=True)


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, by phase."""
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


def compare(one: dict, many: dict, exact: dict, *, is_half: bool) -> dict[str, Any]:
    """Errors, their bound, and the positions whose best token is another although both margins exceed the noise."""
    error, noise = relative(many["logits"], one["logits"]), relative(one["logits"], exact["logits"])
    bound = {name: ALLOWED * noise[name] if is_half else FLOAT32_BOUND for name in noise}
    other = {}
    for name, logits in one["logits"].items():
        best = logits.topk(2, -1).values
        spread = (many["logits"][name] - logits).abs().amax(-1)
        decided = best[..., 0] - best[..., 1] > 2 * spread
        other[name] = int((decided & (many["logits"][name].argmax(-1) != logits.argmax(-1))).sum())
    return {
        "error": error,
        "noise_of_one_rank": noise if is_half else None,
        "bound": bound,
        "within": all(error[name] <= bound[name] for name in error),
        "decided_tokens_that_differ": other,
        "seconds_one_rank": one["seconds"],
        "seconds": many["seconds"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model on two ranks")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tp", type=int, nargs="+", default=None, help="ranks to compare with one")
    parser.add_argument("--layers", type=int, default=None, help="of a LLaMA 7B; a small model without it")
    parser.add_argument("--folder", type=Path, help="where to write the model")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(*options.worker)
        return 0
    changes = {**SMALL, "num_hidden_layers": 4} if options.layers is None else {"num_hidden_layers": options.layers}
    rounds, prompt_tokens = (2, 32) if options.device == "cpu" else (5, 512)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        base, one_folder = Path(name) / "base", Path(name) / "one"
        started = time.perf_counter()
        num_bytes = write_large_model(base, **changes)
        made = time.perf_counter() - started
        conversions = {1: convert_checkpoint(base, one_folder, dtype="float16", verify=False).seconds}
        exact = run_phases(one_folder, 0, options.device, "float32", 1, prompt_tokens)
        half = run_phases(one_folder, 0, options.device, None, rounds, prompt_tokens)
        for ranks in options.tp or ([2] if options.quick else [2, 4]):
            folder = Path(name) / f"tp{ranks}"
            outcome = convert_checkpoint(base, folder, dtype="float16", tp_size=ranks, verify=False)
            conversions[ranks] = outcome.seconds
            for dtype, one in ((None, half), ("float32", exact)):
                many = run_ranks(folder, ranks, options.device, dtype, rounds, prompt_tokens)
                found = compare(one, many, exact, is_half=dtype is None)
                own_gpu = options.device == "cuda" and torch.cuda.device_count() >= ranks
                backend = "nccl" if own_gpu else "gloo"
                rows.append({"tp_size": ranks, "dtype": dtype or "float16", "backend": backend, **found})
    document = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "gpus": torch.cuda.device_count(),
        "bytes": num_bytes,
        "prompt_tokens": prompt_tokens,
        "seconds_to_make": made,
        "seconds_to_convert": conversions,
        "rows": rows,
    }
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    for row in rows:
        errors = ", ".join(
            f"{phase} {row['error'][phase]:.1e} (bound {row['bound'][phase]:.1e})" for phase in row["error"]
        )
        print(f"tp {row['tp_size']} {row['dtype']}: {errors}; {'within' if row['within'] else 'BEYOND'} the bounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
