"""Measure heads and decode speed on a GPU: SmolLM2 with its trained heads, and 7B-shaped models with random weights.

Run `python -m tests.benchmarks.gpu_decode --base BASE --data TEXT [--only PART ...] [--json]` on a machine with a CUDA
GPU. Parts:

    heads    accuracy by head and tokens per step on continuations of held-out text, and of questions that the base
             asks itself: stock tree and trees chosen on other prompts; predicted (replayed ranks of the other
             prompts) against measured (decoding)
    smollm2  time per step of plain greedy and of Medusa in the same loop, and Hugging Face's `generate`
    bloom, qwen2   the same for random weights of 7B shape; no accept lengths, which random heads do not have

Speed is measured one request at a time. The floor of a step is the bytes of all weights it reads, divided by the
bandwidth of a large copy on the same card (bytes read and written).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.reference import Reference, load_reference
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.conversion.heads import read_head_set
from porting_kit.emulator import gpu_products, open_emulator
from porting_kit.emulator.decoder import FORESIGHT
from porting_kit.medusa.decoding import generate_greedy, generate_medusa
from porting_kit.medusa.fused_loop import NOT_FORESEEN, likely_last
from porting_kit.medusa.head_ranks import ReplayedSteps, measure_accuracy, measure_ranks, replay_tree
from porting_kit.medusa.heads import load_heads
from porting_kit.medusa.self_chat import sample_questions
from porting_kit.medusa.self_distillation import Frame, build_chat_frame, continue_greedily, cut_prompts
from porting_kit.medusa.training_text import read_text, split_held_out
from porting_kit.medusa.tree import MedusaTree, read_tree
from porting_kit.medusa.tree_choice import TreeLimits, count_paths, trace_curve
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree
from tests.benchmarks.heads_page import keep_figures
from tests.benchmarks.random_shapes import random_port, random_reference

HEADS = Path(__file__).resolve().parents[2] / "notebooks" / "ports" / "smollm2" / "heads"
CONTEXT_TOKENS, QUESTION_SEED = 128, 10_007
SHORT_PROMPT_TOKENS = 88
REFERENCE_PROMPTS, COMPARED_TEXTS = 3, 4
PROFILES: list[bool] = []


def measure_bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times[2:])


def read_bytes(tensors: dict[str, torch.Tensor], *, heads: bool) -> int:
    """Bytes of weights that one step reads: each storage once; of a separate embedding table only rows are read."""
    seen: dict[int, int] = {}
    for name, tensor in tensors.items():
        if "vocab_embedding" in name or (name.startswith("medusa_heads") and not heads):
            continue
        seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def time_calls(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Median milliseconds per unit, where each side returns how many units it did; sides in turn, order alternating."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for function in sides.values():
        function()
        function()
    for index in range(rounds):
        for name in list(sides) if index % 2 else reversed(list(sides)):
            torch.cuda.synchronize()
            started = time.perf_counter()
            units = sides[name]()
            torch.cuda.synchronize()
            samples[name].append(1e3 * (time.perf_counter() - started) / units)
    return {name: statistics.median(values) for name, values in samples.items()}


def measure_speed(
    reference: Reference | None,
    model: Any,
    prompts: Sequence[Sequence[int]],
    trees: dict[str, MedusaTree],
    tensors: dict[str, torch.Tensor],
    *,
    new_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Time per step of each side, ratios, and the floor.

    `step_ms` is wall time with the context phase, over the steps; `decode_ms_per_token` is wall time after it, over the
    tokens that follow the first.
    """
    bandwidth = measure_bandwidth()
    end_ids = () if reference is None else reference.settings.end_ids
    found: dict[str, list[list[int]]] = {}
    tokens_per_step: dict[str, float] = {}
    decode_ms: dict[str, list[float]] = {}

    def emulated(name: str, tree: MedusaTree | None) -> int:
        runs = [
            generate_greedy(model, [prompt], new_tokens, end_ids)
            if tree is None
            else generate_medusa(model, tree, [prompt], new_tokens, end_ids)
            for prompt in prompts
        ]
        found[name] = [run.tokens[0] for run in runs]
        after_first = sum(run.num_tokens - 1 for run in runs)
        steps = sum(run.num_steps for run in runs)
        tokens_per_step[name] = after_first / steps
        decode_s = sum(run.seconds - run.context_seconds for run in runs)
        decode_ms.setdefault(name, []).append(1e3 * decode_s / after_first)
        return steps

    def hugging_face() -> int:
        found["transformers generate"] = reference.generate(prompts[:REFERENCE_PROMPTS], new_tokens)
        return sum(map(len, found["transformers generate"]))

    sides: dict[str, Callable[[], int]] = {"greedy": lambda: emulated("greedy", None)}
    sides |= {name: partial(emulated, name, tree) for name, tree in trees.items()}
    if reference is not None:
        sides["transformers generate"] = hugging_face
    step_ms = time_calls(sides, rounds)
    kept = [key for key in model.decoders._kept]
    device_ms = time_steps(model)
    if PROFILES:
        print(json.dumps(profile_steps(model), indent=1), file=sys.stderr, flush=True)
        print(json.dumps([[*map(str, item)] for item in gpu_products._plans.items()], indent=1), file=sys.stderr)
    greedy_floor = 1e3 * read_bytes(tensors, heads=False) / bandwidth
    medusa_floor = 1e3 * read_bytes(tensors, heads=True) / bandwidth
    per_token = {name: ms / tokens_per_step.get(name, 1.0) for name, ms in step_ms.items()}
    return {
        "bandwidth_TB_s": bandwidth / 1e12,
        "decode_ms_per_token": {name: statistics.median(times[-rounds:]) for name, times in decode_ms.items()},
        "step_ms": step_ms,
        "device_step_ms": device_ms,
        "floor_ms": {"greedy": greedy_floor, "medusa": medusa_floor},
        "greedy_step_over_floor": step_ms["greedy"] / greedy_floor,
        "medusa_step_over_greedy_step": {name: step_ms[name] / step_ms["greedy"] for name in trees},
        "tokens_per_step": tokens_per_step,
        "speedup_over_greedy": {name: per_token["greedy"] / per_token[name] for name in trees},
        "speedup_over_transformers": {
            name: per_token["transformers generate"] / per_token[name] for name in step_ms if reference is not None
        },
        "against_greedy": {
            name: compare_texts(model, prompts, found["greedy"], rows)
            for name, rows in found.items()
            if name != "greedy"
        },
        "programs": len(kept),
    }


def compare_texts(
    model: Any, prompts: Sequence[Sequence[int]], ours: list[list[int]], theirs: list[list[int]]
) -> dict[str, Any]:
    """How many texts are equal, and how far apart the two best logits were where others first differ."""
    margins = []
    for prompt, left, right in zip(prompts, ours, theirs, strict=False):
        first = next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
        if first is not None and len(margins) < COMPARED_TEXTS:
            run = generate_greedy(model, [prompt], first + 1, keep_margins=True)
            margins.append(float(run.margins[0][first]))
    equal = sum(left == right for left, right in zip(ours, theirs, strict=False))
    return {"equal_texts": equal, "texts": len(theirs), "margins_where_others_part": margins}


def captured_steps(model: Any) -> Iterator[tuple[int, Any, Callable[[], Any]]]:
    """(nodes, loop, replay) of each captured whole step, put back to the start of a text."""
    for decoder in model.decoders._kept.values():
        for loop in decoder.memo.values():
            replay = next(iter(loop._captured.values()), None)
            if replay is not None:
                loop.pasts.fill_(CONTEXT_TOKENS)
                loop.step_number.zero_()
                yield decoder.nodes, loop, replay


@torch.inference_mode()
def time_steps(model: Any) -> dict[str, float]:
    """GPU milliseconds of the captured whole steps alone, by nodes: launched back to back, timed by events.

    Where steps foresee at which nodes heads are needed, a step that ends at one and a step that does not are two rows.
    """
    times = {}
    for nodes, loop, replay in captured_steps(model):
        name, places = f"{nodes} nodes", loop.places.clone()
        foreseen = {name: 0, f"{name}, not foreseen": NOT_FORESEEN}
        for row, place in foreseen.items() if bool((places >= 0).any()) else [(name, None)]:
            if place is not None:
                loop.places.fill_(place)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(20):
                loop.pasts.fill_(CONTEXT_TOKENS)
                replay()
            end.record()
            torch.cuda.synchronize()
            times[row] = start.elapsed_time(end) / 20
        loop.places.copy_(places)
    return times


def share_foreseen(replayed: ReplayedSteps, tree: MedusaTree) -> float:
    """The share of steps whose accepted path ends at one of the nodes that a step foresees."""
    shares = replayed.node_shares | {(): 1.0}
    likely = {tuple(tree.nodes[node]) for node in likely_last(tree)[: FORESIGHT["cuda"].nodes]}
    children = (share for path, share in shares.items() if path and path[:-1] in likely)
    return sum(shares[path] for path in likely) - sum(children)


@torch.inference_mode()
def profile_steps(model: Any, kernels: int = 14) -> dict[str, Any]:
    """The kernels of one captured step by name, those that take longest: [name, launches, microseconds]."""
    found = {}
    for nodes, loop, replay in captured_steps(model):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                loop.pasts.fill_(CONTEXT_TOKENS)
                replay()
            torch.cuda.synchronize()
        order = sorted((e for e in profile.events() if e.device_time), key=lambda e: e.time_range.start)
        order = [[e.name[:60], round(e.device_time, 1)] for e in order[: len(order) // 4]]
        rows = [(e.key, e.count, e.self_device_time_total) for e in profile.key_averages()]
        rows.sort(key=lambda row: -row[2])
        found[f"{nodes} nodes"] = {
            "kernels": sum(row[1] for row in rows) / 4,
            "busy_ms": sum(row[2] for row in rows) / 4e3,
            "in_order": order[len(order) // 3 : len(order) // 3 + 16] + order[-50:],
            "longest": [[name[:80], count / 4, round(time / 4, 1)] for name, count, time in rows[:kernels]],
        }
    return found


def time_reference(family: str, prompts: list[list[int]]) -> float:
    """Milliseconds a token of Hugging Face's generate at 7B shape."""
    reference = random_reference(family)
    return time_calls({"generate": lambda: len(reference.generate(prompts, 48)[0])}, 3)["generate"]


def measure_random(family: str, *, compiles: bool) -> dict[str, Any]:
    """Time per step at 7B shape: greedy, the stock tree, and Hugging Face."""
    prompts = [torch.randint(0, 1000, (CONTEXT_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()]
    theirs = time_reference(family, prompts)
    torch.cuda.empty_cache()
    model, tensors = random_port(family)
    model.decoders.compiles = compiles
    trees = {"mc_sim_7b_63": read_tree("mc_sim_7b_63")}
    row = measure_speed(None, model, prompts, trees, tensors, new_tokens=64, rounds=3)
    row["transformers_ms_per_token"] = theirs
    row["greedy_over_transformers"] = theirs / row["step_ms"]["greedy"]
    del row["tokens_per_step"], row["speedup_over_greedy"], row["speedup_over_transformers"]
    return row


def cut_text(tokenizer: Any, text: Path, count: int, seed: int) -> list[list[int]]:
    """Prompts of text that was held out from training, half of them in a chat frame."""
    frames = (Frame(), build_chat_frame(tokenizer, "Explain this in simple words: "))
    held_out = split_held_out(read_text(text))[1]
    return cut_prompts(tokenizer, held_out, lengths_tokens=(32,), limit=count, seed=seed, frames=frames)


def ask_base(reference: Reference, count: int) -> list[list[int]]:
    """Questions that the base writes itself, from a seed that no training used; as in training some are asked twice."""
    asked = sample_questions(
        reference.model,
        reference.tokenizer,
        count,
        seed=QUESTION_SEED,
        max_tokens=96,
        temperature=0.9,
        top_p=0.95,
        batch_rows=1024,
        report=lambda line: None,
    )
    return [list(prompt) for prompt in asked.prompts]


def measure_heads(
    reference: Reference,
    model: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sizes: Sequence[int],
    *,
    has_stock: bool,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Accuracy and tokens per step: trees are chosen on the first half of the prompts and judged on the other.

    Returns:
        the figures, and the ranks that trees are chosen from.
    """
    heads, matrix = load_heads(HEADS).to(reference.device), reference.model.get_output_embeddings()

    def rank(chosen: list[list[int]]) -> torch.Tensor:
        said = continue_greedily(
            reference.model, chosen, new_tokens=new_tokens, batch_rows=512, report=lambda line: None
        )
        return measure_ranks(heads, said, matrix)

    asked = prompts[len(prompts) // 2 :]
    calibration, judged = rank(prompts[: len(prompts) // 2]), rank(asked)
    limits = TreeLimits()
    started = time.perf_counter()
    curve = trace_curve(count_paths(calibration, limits), limits)
    trees = {f"best {n}": curve.tree(n) for n in sizes}
    trees |= {"mc_sim_7b_63": read_tree("mc_sim_7b_63")} if has_stock else {}
    chosen_s = time.perf_counter() - started
    asked = sorted(asked, key=len)
    out = {}
    for name, tree in trees.items():
        predicted = replay_tree(calibration, tree.nodes[1:]).tokens_per_step
        replayed = replay_tree(judged, tree.nodes[1:])
        tokens = steps = texts = 0
        for start in range(0, len(asked), 64):
            run = generate_medusa(model, tree, asked[start : start + 64], new_tokens, reference.settings.end_ids)
            tokens += run.num_tokens - len(run.tokens)
            steps, texts = steps + run.num_steps, texts + len(run.tokens)
        out[name] = {
            "nodes": tree.num_nodes,
            "predicted": predicted,
            "replayed_on_the_judged_rows": replayed.tokens_per_step,
            "ends_foreseen": share_foreseen(replayed, tree),
            "measured": tokens / max(1, steps),
            "measured_over_predicted": tokens / max(1, steps) / predicted,
            "texts": texts,
        }
    figures = {
        "prompts": len(prompts),
        "accuracy_on_judged_rows": [vars(head) for head in measure_accuracy(judged)],
        "trees": out,
        "stock_replayed_on_the_judged_rows": replay_tree(judged, read_tree("mc_sim_7b_63").nodes[1:]).tokens_per_step,
        "choice_seconds": chosen_s,
        "curve": [[point.nodes, round(point.mean_tokens, 4)] for point in curve.points],
        "chosen": {str(n): curve.tree(n).choices() for n in sizes},
    }
    return figures, calibration


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON document; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="SmolLM2: a GGUF file or a Hugging Face folder")
    parser.add_argument("--data", type=Path, help="text of `python -m porting_kit.medusa.training_text`")
    parser.add_argument("--only", nargs="*", default=["heads", "smollm2", "bloom", "qwen2"])
    parser.add_argument("--rows", type=int, default=256, help="held-out prompts to judge on")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each continuation of the part heads")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[16, 32, 64], help="nodes of the trees of the part heads"
    )
    parser.add_argument("--chosen", type=Path, help="output of a former run: its chosen trees, without the part heads")
    parser.add_argument("--no-stock", action="store_true", help="leave the stock tree of 64 nodes out: slow on a CPU")
    parser.add_argument("--device", default="cuda", help="cpu runs the part heads alone, in float32")
    parser.add_argument("--compile", action="store_true", help="kernels of few rows and fused runs")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step and the products' plans")
    parser.add_argument("--write", action="store_true", help="keep the figures for the page; see heads_page")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is JSON always")
    options = parser.parse_args(arguments)
    PROFILES[:] = [True] if options.profile else []
    torch.set_grad_enabled(False)
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "compiled": options.compile,
    }

    def keep(name: str, value: Any) -> None:
        document[name] = value
        print(json.dumps({name: value}), file=sys.stderr, flush=True)

    dtype = "float16" if options.device == "cuda" else "float32"
    if {"heads", "smollm2"} & set(options.only):
        reference = load_reference(options.base, dtype=dtype, device=options.device, attention="sdpa")
        config, tensors = checkpoint_tensors(options.base, read_head_set(HEADS), dtype=dtype)
        source = open_source_tree("bundled")
        module = build_medusa_module(source, config["architecture"])
        tensors = share_placed(tensors, options.device)
        model = open_emulator(source, device=options.device).build_model(
            config, tensors, module_source=module.source, class_name=module.class_name
        )
        trees = {"shipped": read_tree(str(HEADS / "tree.json"))}
        if "heads" in options.only:
            measured, chosen_from = (options.new_tokens, options.sizes), []
            for name, prompts in (
                ("heads", cut_text(reference.tokenizer, options.data, 2 * options.rows, seed=7)),
                ("questions", ask_base(reference, 2 * options.rows)),
            ):
                figures, ranks = measure_heads(reference, model, prompts, *measured, has_stock=not options.no_stock)
                keep(name, figures)
                chosen_from.append(ranks)
            curve = trace_curve(count_paths(torch.cat(chosen_from), TreeLimits()), TreeLimits())
            trees = {f"best {n}": curve.tree(n) for n in options.sizes}
        elif options.chosen:
            chosen = json.loads(options.chosen.read_text(encoding="utf-8"))["heads"]["chosen"]
            trees = {f"best {n}": read_tree(choices) for n, choices in chosen.items()}
        if "smollm2" in options.only:
            model.decoders.compiles = options.compile
            # All of one size of cache, so that each tree keeps one decoder.
            asked = [prompt for prompt in ask_base(reference, 112) if len(prompt) <= SHORT_PROMPT_TOKENS][:28]
            prompts = [*cut_text(reference.tokenizer, options.data, 28, seed=11), *asked]
            trees |= {"mc_sim_7b_63": read_tree("mc_sim_7b_63")}
            model.decoders.keep = 1 + len(trees)
            keep(
                "smollm2",
                measure_speed(reference, model, prompts, trees, tensors, new_tokens=96, rounds=2),
            )
        del reference, model, tensors
    for family in ("bloom", "qwen2"):
        if family in options.only:
            torch.cuda.empty_cache()
            try:
                keep(family, measure_random(family, compiles=options.compile))
            except Exception as error:
                keep(family, {"error": f"{type(error).__name__}: {error}"})
    if options.write:
        keep_figures(document)
    print(json.dumps(document, indent=2))
    return 0


def share_placed(tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """The tensors on the device, equal matrices once: heads without an output matrix hold copies of the base's."""
    placed: dict[str, torch.Tensor] = {}
    matrix = tensors["lm_head.weight"].to(device)
    for name, tensor in tensors.items():
        same = tensor.shape == matrix.shape and torch.equal(tensor.to(device), matrix)
        placed[name] = matrix if same else tensor.to(device)
    return placed


if __name__ == "__main__":
    sys.exit(main())
