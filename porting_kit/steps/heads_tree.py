"""The choice of a tree for a port: the curve of nodes against tokens per step, what each is worth, and the best one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.streamed_reference import find_free_bytes
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.emulator import open_emulator
from porting_kit.errors import EmulatorError
from porting_kit.medusa.head_ranks import ReplayedSteps, replay_tree
from porting_kit.medusa.step_costs import StepCosts, TreeWorth, rate_tree, require_costs, word_worth
from porting_kit.medusa.tree import MedusaTree, read_tree
from porting_kit.medusa.tree_choice import TreeCurve, TreeLimits, count_paths, trace_curve
from porting_kit.medusa.tree_limits import trim_tree
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.patching import build_medusa_module
from porting_kit.steps.context import PortRun, Stopwatch
from porting_kit.steps.heads import FOLDER, Say, load_ranks
from porting_kit.steps.preflight import open_port_tree, read_port_base, read_port_heads
from porting_kit.whole_files import write_json

TREE_FILE, REPORT_FILE = "tree.json", "tree_choice.json"
STOCK = "mc_sim_7b_63"
SMALLEST_NODES = 2
ONE_PROMPT = "with one prompt the tree is judged on what it was chosen from, so its figures are too good: ask at more"
COST_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
COST_ROUNDS, STEPS_A_ROUND = 5, 3


@dataclass(frozen=True)
class TreeRow:
    """One tree of the table.

    Args:
        tree: the tree.
        replayed: its steps on the prompts that no tree was chosen from; of a single prompt, on that one.
        worth: predicted speed at the batch size.
    """

    tree: MedusaTree
    replayed: ReplayedSteps
    worth: TreeWorth

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.tree.name,
            "nodes": self.tree.num_nodes,
            "depth": self.tree.depth,
            "tokens_per_step": self.replayed.tokens_per_step,
            "accepted_by_depth": list(self.replayed.accepted_by_depth),
            "step_ms": self.worth.step_ms,
            "speed_up": self.worth.speed_up,
        }


@dataclass(frozen=True)
class TreeChoiceResult:
    """The chosen tree and what it was chosen from.

    Args:
        outcome: always `pass`; the sentence says whether Medusa is worth it.
        curve: the best tree of every size.
        rows: the curve's trees and the stock tree, replayed.
        chosen: the row that was chosen.
        batch: requests at a time.
    """

    outcome: StepOutcome
    curve: TreeCurve
    rows: tuple[TreeRow, ...]
    chosen: TreeRow
    batch: int

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {
            **self.outcome.as_dict(),
            "batch": self.batch,
            "chosen": {**self.chosen.as_dict(), "choices": self.chosen.tree.choices()},
            "node_shares": [
                {"path": list(path), "share": share} for path, share in self.chosen.replayed.node_shares.items()
            ],
            "rows": [row.as_dict() for row in self.rows],
            "curve": [{"nodes": point.nodes, "mean_tokens": point.mean_tokens} for point in self.curve.points],
        }


def choose_port_tree(
    run: PortRun,
    limits: TreeLimits,
    *,
    batch: int = 1,
    costs: StepCosts | None = None,
    data: Path | None = None,
    prompts: int = 64,
    new_tokens: int = 64,
    say: Say = lambda line: None,
) -> TreeChoiceResult:
    """Choose the tree from one half of the prompts' ranks and judge it on the other.

    A single prompt has no other half: the tree is judged on what it was chosen from, and a warning says so.

    With step costs the tree of the largest predicted speed-up is chosen, which is a smaller one the more requests run
    at a time; without, the largest tree within the limits.

    Args:
        run: the port.
        limits: nodes and depth at most.
        batch: requests at a time.
        costs: measured times of a step.
        data, prompts, new_tokens, say: as for `heads.check_port_heads`.

    Raises:
        TreeError: no position to choose from, heads that are never right, or costs that do not reach `batch`.
        HeadsError: see `heads.check_port_heads`.
    """
    watch = Stopwatch()
    if costs is not None:
        require_costs(costs, SMALLEST_NODES, batch)
    ranks = load_ranks(run, data=data, prompts=prompts, new_tokens=new_tokens, say=say)
    started = time.perf_counter()
    half = max(1, len(ranks) // 2)
    judged = ranks[half:] if len(ranks) > 1 else ranks
    curve = trace_curve(count_paths(ranks[:half], limits), limits)
    if costs is not None:
        # Heads whose best candidate is never right have no tree of 2 nodes.
        require_costs(costs, curve.points[0].nodes, batch)
    rows = [_rate(curve.tree(point.nodes), judged, costs, batch) for point in curve.points]
    stock = _rate(trim_tree(read_tree(STOCK), num_heads=ranks.shape[-1]), judged, costs, batch)
    chosen = max(rows, key=lambda row: (row.worth.speed_up or 0.0, row.tree.num_nodes))
    seconds = time.perf_counter() - started
    sentence = word_worth(chosen.worth, batch)
    outcome = StepOutcome(
        step="heads tree",
        verdict=Verdict.PASS,
        summary=f"{chosen.tree.describe()}; {sentence}",
        covered=(Coverage.TREE_AND_ACCEPTANCE,),
        figures={
            "nodes": chosen.tree.num_nodes,
            "tokens_per_step": chosen.replayed.tokens_per_step,
            "stock_tokens_per_step": stock.replayed.tokens_per_step,
            "speed_up": chosen.worth.speed_up,
            "judged_steps": chosen.replayed.steps,
            "warnings": [] if len(ranks) > 1 else [ONE_PROMPT],
            "choice_seconds": round(seconds, 3),
        },
        products=(TREE_FILE, REPORT_FILE),
        seconds=watch.seconds,
    )
    result = TreeChoiceResult(outcome, curve, (*rows, stock), chosen, batch)
    folder = run.folder.root / FOLDER
    write_json(folder / TREE_FILE, chosen.tree.choices())
    write_json(folder / REPORT_FILE, result.document())
    return result


def _rate(tree: MedusaTree, judged: torch.Tensor, costs: StepCosts | None, batch: int) -> TreeRow:
    replayed = replay_tree(judged, tree.nodes[1:])
    return TreeRow(tree, replayed, rate_tree(tree.num_nodes, replayed.tokens_per_step, costs, batch))


def measure_step_costs(run: PortRun, *, batch: int = 1, sizes: tuple[int, ...] | None = None) -> StepCosts:
    """Time the emulator's steps on this machine, for chains of each size; heads included, drafting and acceptance not.

    The sizes are timed in turn, a few rounds of a few steps each, so that a busy moment does not fall on one size
    alone. The fastest step of each size counts, and what is left of other work is taken out as
    `StepCosts.from_measured` says. That is this machine and this emulator: an engine elsewhere has other costs, which
    `--costs` takes.

    Args:
        run: the port.
        batch: requests at a time, B.
        sizes: nodes a request of each timed step, ascending; 1 is a greedy step; COST_SIZES when None.

    Returns:
        costs of B x N tokens for each size N.
    """
    sizes = sizes or COST_SIZES
    base = read_port_base(run.port, None)
    heads = read_port_heads(run.port, base)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = run.port.dtype if device == "cuda" else "float32"
    config, tensors = checkpoint_tensors(run.port.base_path, heads, dtype=dtype)
    source = open_port_tree(run.port)
    module = build_medusa_module(source, config["architecture"])
    model = open_emulator(source, device=device).build_model(
        config, tensors, module_source=module.source, class_name=module.class_name
    )
    # A decoder may hold its own copy of the weights: where they fit, none is made again in the next round.
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.named_parameters().values())
    if len(sizes) * weight_bytes < (find_free_bytes(device) or 0) / 2:
        model.decoders.keep = len(sizes)
    times: dict[int, float] = {}
    for _ in range(COST_ROUNDS):
        for nodes in sizes:
            times[nodes * batch] = min(_time_step(model, batch, nodes), times.get(nodes * batch, math.inf))
    return StepCosts.from_measured(times)


@torch.inference_mode()
def _time_step(model: Any, batch: int, nodes: int, past_tokens: int = 64) -> float:
    """Milliseconds of the fastest of a few steps, as the decode loop runs them."""
    tree = read_tree([[0] * depth for depth in range(1, nodes)]) if nodes > 1 else None
    inputs = (tree.position_offsets, tree.packed_mask) if tree else (None, None)
    decoder = model.open_decoder(batch, past_tokens + 2 * nodes, *inputs)
    cache = model.new_cache(batch, past_tokens + 2 * nodes) if decoder is None else decoder.cache
    model.prefill([torch.ones(past_tokens, dtype=torch.long, device=model.device)] * batch, cache)
    ids = torch.ones(batch, nodes, dtype=torch.long, device=model.device)
    pasts = torch.full((batch, 1), past_tokens, device=model.device)

    def step() -> None:
        if decoder is None:
            model.decode(ids, cache, position_offsets=inputs[0], packed_mask=inputs[1])
            return
        _, hidden, _ = decoder.step(ids, pasts, decoder.end_for(past_tokens))
        if tree is not None:
            decoder.heads(hidden[:, -1])

    try:
        step()
    except (RuntimeError, EmulatorError) as reason:
        if decoder is None:
            raise
        # The decode loop runs such a model's steps eagerly, too.
        model.decoders.give_up(decoder, reason)
        return _time_step(model, batch, nodes, past_tokens)
    times = []
    for _ in range(STEPS_A_ROUND):
        _wait(model.device)
        started = time.perf_counter()
        step()
        _wait(model.device)
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def format_tree_choice(result: TreeChoiceResult) -> str:
    """A table for a terminal: about a dozen sizes, the stock tree, the chosen one marked."""
    lines = [f"{'nodes':>5} {'depth':>5} {'tokens/step':>11} {'step ms':>8} {'speed-up':>8}"]
    shown = {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, result.chosen.tree.num_nodes}
    for row in result.rows:
        is_stock = row is result.rows[-1]
        if row.tree.num_nodes not in shown and not is_stock:
            continue
        step = "" if row.worth.step_ms is None else f"{row.worth.step_ms:.2f}"
        gain = "" if row.worth.speed_up is None else f"{row.worth.speed_up:.2f}"
        mark = "  stock tree" if is_stock else "  chosen" if row is result.chosen else ""
        size = f"{row.tree.num_nodes:5d} {row.tree.depth:5d}"
        lines.append(f"{size} {row.replayed.tokens_per_step:11.3f} {step:>8} {gain:>8}{mark}")
    lines += [f"note: {note}" for note in result.outcome.figures["warnings"]]
    lines.append(f"heads tree: {result.outcome.summary}")
    return "\n".join(lines)
