"""Time and memory of a conversion against a plain write of the same bytes, a memcpy, and upstream's own converter.

Run `python -m tests.benchmarks.conversion [--quick] [--json] [--source TREE] [--folder DIR]`. A LLaMA of random
bfloat16 weights is written into DIR and converted to float16, each conversion in a process of its own; plain writes
alternate with conversions, so that a busy machine slows both. The source lies in the page cache, as after a download;
that of a 7B may not fit there, so its `copy_ratio` has both sides read it from the disk.
Digests of the source files are taken in every run, as a user's run takes them; the proof by the inverse rules is not.

`write_ratio`: conversion over writing as many bytes from memory in order, both until they are on the disk.
`copy_ratio`: conversion over reading the source and writing it again in order, with nothing in the page cache.
`memcpy_ratio`: conversion over memcpy between two mapped files, source and output on tmpfs.
`peak_over_largest_mib`: largest VmHWM of all runs (mapped file pages that are resident count) less the largest tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TMPFS = Path("/dev/shm")
LAYERS = {"full": 9, "7b": 32}
QUICK = {"num_hidden_layers": 3, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
QUICK |= {"num_key_value_heads": 16}
BLOCK_BYTES = 4 << 20


def convert(base: str, out: str, dtype: str, tp_size: int, workers: int) -> dict[str, Any]:
    """One conversion in this process. Times leave out Python's own start."""
    import porting_kit.conversion.proof
    import porting_kit.conversion.stream  # noqa: F401 - loads torch, which is Python's start and not the conversion's
    from porting_kit.conversion import convert_checkpoint

    started, before = time.perf_counter(), os.times()
    outcome = convert_checkpoint(base, out, dtype=dtype, tp_size=tp_size, workers=workers, verify=False)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": sum(os.times()[:2]) - sum(before[:2]),
        "tensors": len(outcome.targets),
    }


def convert_upstream(base: str, out: str, tree: str) -> dict[str, Any]:
    """The tree's own LLaMA converter on the stand-in, one rank, float16, as its examples/llama call it.

    transformers 5 spells rope settings in a way the tree does not know, so the config is read as it lies in the file.
    """
    import transformers

    from porting_kit.emulator.namespace import Namespace
    from porting_kit.source_tree import open_source_tree

    def read_config(folder: str, **_: Any) -> Any:
        config = transformers.PretrainedConfig()
        for key, value in json.loads((Path(folder) / "config.json").read_text()).items():
            setattr(config, key, value)
        return config

    transformers.AutoConfig.from_pretrained = read_config
    space = Namespace(open_source_tree(tree).root)
    models = space.import_module("tensorrt_llm.models")
    mapping = space.import_module("tensorrt_llm.mapping").Mapping(world_size=1, rank=0, tp_size=1, pp_size=1)
    Path(out).mkdir()
    with space.activate():
        started = time.perf_counter()
        model = models.LLaMAForCausalLM.from_hugging_face(base, dtype="float16", mapping=mapping)
        model.save_checkpoint(out, save_config=True)
        for file in Path(out).iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    return {"seconds": time.perf_counter() - started}


def measure_process(*arguments: str) -> dict[str, Any]:
    """Run one conversion in a process of its own and watch its memory: VmHWM at its end, the largest RssAnon seen."""
    command = [sys.executable, "-m", "tests.benchmarks.conversion", "--worker", *arguments]
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    anonymous = total = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal anonymous, total
        while not ended.wait(0.02):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            found = {key: int(value) for key, value in re.findall(r"(VmHWM|RssAnon):\s+(\d+)", status)}
            total, anonymous = max(total, found.get("VmHWM", 0)), max(anonymous, found.get("RssAnon", 0))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    ended.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    result = json.loads(output.splitlines()[-1])
    return {
        **result,
        "process_seconds": time.perf_counter() - started,
        "peak_mib": total / 1024,
        "peak_anonymous_mib": anonymous / 1024,
    }


def time_write(file: Path, size: int) -> float:
    """Seconds to write `size` bytes in order from memory and flush them."""
    block = os.urandom(BLOCK_BYTES)
    started = time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        for left in range(size, 0, -BLOCK_BYTES):
            stream.write(block[:left])
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    file.unlink()
    return seconds


def time_memcpy(base: Path, folder: Path) -> float:
    """Seconds to copy all shards between mapped files, into fresh ones."""
    import numpy as np

    started = time.perf_counter()
    for shard in sorted(base.glob("*.safetensors")):
        source = np.memmap(shard, np.uint8, "r")
        target = np.memmap(folder / shard.name, np.uint8, "w+", shape=source.shape)
        target[:] = source
        del source, target
    seconds = time.perf_counter() - started
    for shard in base.glob("*.safetensors"):
        (folder / shard.name).unlink()
    return seconds


def time_copy(base: Path, folder: Path) -> float:
    """Seconds to read all shards from the disk and write them again, in order, flushed."""
    forget_pages(base)
    started = time.perf_counter()
    for shard in sorted(base.glob("*.safetensors")):
        with shard.open("rb", buffering=0) as source, (folder / shard.name).open("wb", buffering=0) as target:
            while block := source.read(BLOCK_BYTES):
                target.write(block)
            os.fsync(target.fileno())
    seconds = time.perf_counter() - started
    for shard in base.glob("*.safetensors"):
        (folder / shard.name).unlink()
    return seconds


def convert_uncached(base: Path, folder: Path) -> dict[str, Any]:
    """A conversion whose source has to be read from the disk."""
    forget_pages(base)
    return run_conversion(base, folder)


def forget_pages(base: Path) -> None:
    """Take the source out of the page cache, as a model larger than the memory is."""
    for shard in base.glob("*.safetensors"):
        with shard.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def alternate(rounds: int, baseline: Callable[[], float], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Baseline and conversion in turn; the ratio is the median of the rounds' ratios."""
    times, runs = [], []
    for _ in range(rounds):
        times.append(baseline())
        runs.append(run())
    ratios = [one["seconds"] / time for one, time in zip(runs, times, strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "baseline_seconds": times, "runs": runs}


def run_conversion(base: Path, folder: Path, *, dtype: str = "float16", tp_size: int = 1, workers: int = 2) -> dict:
    """One measured conversion; its output is removed."""
    out = folder / "checkpoint"
    result = measure_process("convert", str(base), str(out), dtype, str(tp_size), str(workers))
    result |= {"dtype": dtype, "tp_size": tp_size, "workers": workers}
    result["bytes"] = sum(file.stat().st_size for file in out.glob("rank*"))
    shutil.rmtree(out)
    return result


def measure(folder: Path, *, size: str, source: str | None, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    from porting_kit.conversion import open_tensor_source
    from tests.conversion.large_model import write_large_model

    base = folder / "base"
    changes = QUICK if size == "quick" else {"num_hidden_layers": LAYERS[size]}
    num_bytes = write_large_model(base, **changes)
    entries = open_tensor_source(base).entries.values()
    largest = max(entry.num_bytes for entry in entries)
    if rounds > 2:
        run_conversion(base, folder)  # the first one warms caches and the disk
    disk = alternate(rounds, lambda: time_write(folder / "plain", num_bytes), lambda: run_conversion(base, folder))
    document: dict[str, Any] = {
        "bytes": num_bytes,
        "largest_tensor_mib": largest / 2**20,
        "write_ratio": disk["ratio"],
        "disk": disk,
    }
    if size == "7b":
        document["copy"] = alternate(rounds, lambda: time_copy(base, folder), lambda: convert_uncached(base, folder))
        document["copy_ratio"] = document["copy"]["ratio"]
    if rounds > 2:
        document["same_dtype"] = alternate(
            rounds,
            lambda: time_write(folder / "plain", num_bytes),
            lambda: run_conversion(base, folder, dtype="bfloat16"),
        )
    grid = [(1, 1), (1, 4), (2, 2), (4, 2)] if rounds > 2 else [(4, 4)]
    document["grid"] = [run_conversion(base, folder, tp_size=tp, workers=workers) for tp, workers in grid]
    runs = [*disk["runs"], *document["grid"]]
    document["peak_over_largest_mib"] = max(run["peak_mib"] for run in runs) - largest / 2**20
    document["anonymous_over_largest_mib"] = max(run["peak_anonymous_mib"] for run in runs) - largest / 2**20
    document["upstream"] = compare_upstream(base, folder, source) if source else "left out: no --source TREE"
    document |= measure_tmpfs(base, num_bytes, 1 if size == "quick" else rounds)
    return document


def compare_upstream(base: Path, folder: Path, source: str) -> dict[str, Any]:
    """Upstream's converter and ours on the same source, and whether they wrote the same tensors."""
    from safetensors.torch import load_file

    theirs_folder, ours_folder = folder / "theirs", folder / "ours"
    theirs = measure_process("upstream", str(base), str(theirs_folder), source)
    ours = measure_process("convert", str(base), str(ours_folder), "float16", "1", "2")
    one, two = (load_file(path / "rank0.safetensors") for path in (theirs_folder, ours_folder))
    same = set(two) <= set(one) and all(bool((one[name] == two[name]).all()) for name in two)
    for path in (theirs_folder, ours_folder):
        shutil.rmtree(path)
    return {
        "theirs": theirs,
        "ours": ours,
        "same_tensors": same,
        "tensors_only_theirs": sorted(set(one) - set(two)),  # rotary tables, which the class computes itself
        "time_ratio": theirs["seconds"] / ours["seconds"],
        "peak_ratio": theirs["peak_mib"] / ours["peak_mib"],
    }


def measure_tmpfs(base: Path, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Conversion against memcpy with everything in memory; left out where tmpfs is too small."""
    if not TMPFS.is_dir() or shutil.disk_usage(TMPFS).free < 2.2 * num_bytes:
        return {"memcpy_ratio": None, "memory": f"left out: {TMPFS} has no room for two copies"}
    with tempfile.TemporaryDirectory(dir=TMPFS) as name:
        folder = Path(name)
        shutil.copytree(base, folder / "base")
        found = alternate(
            rounds, lambda: time_memcpy(folder / "base", folder), lambda: run_conversion(folder / "base", folder)
        )
    return {"memcpy_ratio": found["ratio"], "memory": found}


def measure_kills(count: int) -> dict[str, Any]:
    """Kill conversions of a small model at random moments, go on, compare; raises when a byte differs."""
    import torch

    from porting_kit.conversion import convert_checkpoint
    from tests.conversion.kills import LARGER, digest, kill_and_resume
    from tests.conversion.rule_models import raw_config, write_model

    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        write_model(base, raw_config("llama", **LARGER), dtype=torch.bfloat16)
        convert_checkpoint(base, base.parent / "whole", dtype="float16", tp_size=2, verify=False)
        expected = digest(base.parent / "whole")
        resumed = [
            kill_and_resume(base, base.parent / f"out{seed}", expected, kills=min(count - seed, 4), seed=seed)
            for seed in range(0, count, 4)
        ]
    return {"kills": count, "byte_identical": True, "looked_complete": 0, "spans_not_redone": resumed}


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a GB, few rounds")
    parser.add_argument("--size", choices=["full", "7b"], default="full", help="4 GB, or the 13 GB of a LLaMA 7B")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--source", help="TensorRT-LLM tree whose own converter runs on the same source")
    parser.add_argument("--rounds", type=int, help="baselines and conversions in turn; 3, or 2 if quick")
    parser.add_argument("--kills", type=int, help="how many conversions to kill and go on with; 20, or 1 if quick")
    parser.add_argument("--folder", type=Path, help="where to work: on the disk to be measured")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        kind, *rest = options.worker
        if kind == "upstream":
            print(json.dumps(convert_upstream(*rest)))
        else:
            base, out, dtype, tp_size, workers = rest
            print(json.dumps(convert(base, out, dtype, int(tp_size), int(workers))))
        return 0
    size = "quick" if options.quick else options.size
    rounds = options.rounds or {"quick": 2, "7b": 1}.get(size, 3)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        document = measure(Path(folder), size=size, source=options.source, rounds=rounds)
    kills = options.kills if options.kills is not None else (1 if options.quick else 20)
    document["interruption"] = measure_kills(kills)
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    print(f"{document['bytes'] / 2**30:.2f} GiB, largest tensor {document['largest_tensor_mib']:.0f} MiB")
    print(f"over a plain write: {document['write_ratio']:.2f}")
    print("over memcpy: " + ("left out" if document["memcpy_ratio"] is None else f"{document['memcpy_ratio']:.2f}"))
    print(f"peak over the largest tensor: {document['peak_over_largest_mib']:.0f} MiB")
    for run in document["grid"]:
        rate = run["bytes"] / run["seconds"] / 2**20
        print(f"  tp {run['tp_size']} workers {run['workers']}: {rate:.0f} MiB/s, peak {run['peak_mib']:.0f} MiB")
    if isinstance(document["upstream"], dict):
        found = document["upstream"]
        print(f"upstream: {found['time_ratio']:.1f} times the time, {found['peak_ratio']:.1f} times the memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
