"""Checkpoints that nvidia-modelopt makes of a small LLaMA: consistent, the base's own, and aligned?

Run `python -m tests.benchmarks.modelopt [--quick] [--json] [--folder DIR]` where nvidia-modelopt is installed (an
environment of its own: `pip install nvidia-modelopt`; version 0.47.0 was used, a CPU is enough). A random LLaMA with
heads fitted to it is quantised after calibration on its own prompts, exported for one and for two tensor-parallel
ranks, and taken through `porting-kit quantised`: contradictions, every matrix and every scale against the base, Medusa
on the 16-bit twin with the port's heads added in 16 bit. Then one scale is put off by 2 percent, which must fail by
the weights. (0.47.0 exports no Bloom, so the demo's own base cannot be taken.)

A random model has flat logits, so rounding moves its text further than a trained one's: the distances are printed, and
bounds as wide as the tests' are set for them. All other gates are the port's own.
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
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
"""The narrowest that INT4 in groups of 128 can be cut over two ranks."""
NEW_TOKENS = 24
WIDE = {"near_tie_agreement": 0.3, "largest_margin": 8.0, "mean_divergence": 1.0, "largest_divergence": 8.0}


def make_port(folder: Path) -> Path:
    """A port file with its base and heads; random token ids are its prompts."""
    import yaml

    from porting_kit.alignment.reference import load_reference
    from porting_kit.port import load_port
    from porting_kit.steps.prompts import tokenize_prompts
    from tests.alignment.tiny_ports import V, make_base, make_heads

    make_base(folder / "base", "llama", **SIZES)
    file = folder / "port.yaml"
    document = {
        "name": "modelopt",
        "base": "base",
        "heads": "heads",
        "dtype": "float32",
        "trtllm": {"source": "bundled"},
    }
    document |= {"tree": [[0], [1], [0, 0], [0, 0, 0]], "fit": "off", "alignment": {"new_tokens": NEW_TOKENS}}
    file.write_text(yaml.safe_dump(document))
    prompts, _ = tokenize_prompts(load_port(file), None, V)
    make_heads(folder / "heads", load_reference(folder / "base"), prompts, 40)
    return file


def quantise_base(name: str, port_file: Path, out: Path, tp_size: int) -> None:
    """Calibrate on the port's prompts and export one format.

    Args:
        name: of ModelOpt's configuration.
        out: the checkpoint's folder.
        tp_size: ranks of the exported checkpoint.
    """
    import modelopt.torch.quantization as quantization
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from transformers import AutoModelForCausalLM

    from porting_kit.port import load_port
    from porting_kit.steps.prompts import tokenize_prompts

    port = load_port(port_file)
    model = AutoModelForCausalLM.from_pretrained(port.base_path, dtype=torch.float32).eval()
    prompts, _ = tokenize_prompts(port, None, model.config.vocab_size)

    def calibrate(chosen: Any) -> None:
        for prompt in prompts:
            chosen(torch.tensor([prompt]))

    model = quantization.quantize(model, getattr(quantization, name), calibrate)
    export_tensorrt_llm_checkpoint(
        model,
        "llama",
        dtype=torch.float16,
        export_dir=out,
        inference_tensor_parallel=tp_size,
        inference_pipeline_parallel=1,
    )


def judge(port_file: Path, checkpoint: Path, work: Path, *, align: bool) -> dict[str, Any]:
    """Check, compare and align one checkpoint; then put a scale off."""
    from porting_kit.port import load_port
    from porting_kit.steps import quantised_alignment
    from porting_kit.steps.context import open_port_run
    from porting_kit.steps.quantised import check_quantised

    base = load_port(port_file).base_path
    found = check_quantised(checkpoint, base=base)
    row: dict[str, Any] = {
        "checked": found.outcome.verdict.value,
        "summary": found.outcome.summary,
        "matrices": len(found.errors),
        "worst_weight_error": found.outcome.figures.get("worst_weight_error"),
    }
    if align:
        quantised_alignment.DISTANCE_BOUNDS = {8: WIDE, 4: WIDE}
        started = time.perf_counter()
        result = quantised_alignment.align_quantised(open_port_run(port_file, run_folder=work / "run"), checkpoint)
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
    port_file = make_port(folder)
    for name, algorithm in list(FORMATS.items())[: 1 if quick else None]:
        for tp_size in (1,) if quick else (1, 2):
            place = folder / f"{algorithm}-tp{tp_size}"
            row: dict[str, Any] = {"algorithm": algorithm, "tp_size": tp_size}
            try:
                quantise_base(name, port_file, place / "checkpoint", tp_size)
                row |= judge(port_file, place / "checkpoint", place, align=not quick)
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
    if importlib.util.find_spec("modelopt") is None:
        print(json.dumps({"left_out": "nvidia-modelopt is not installed"}))
        return 0
    from importlib.metadata import version

    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = arguments.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        for row in measure(folder, quick=arguments.quick):
            rows.append(row)
            print(json.dumps(row, default=str), file=sys.stderr)
    document = {"modelopt": version("nvidia-modelopt"), "base": f"LLaMA {SIZES}", "rows": rows}
    print(json.dumps(document, indent=2, default=str) if arguments.json else "\n".join(map(str, rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
