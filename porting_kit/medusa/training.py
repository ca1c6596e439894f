"""Train Medusa heads on a frozen base model by self-distillation, measure them, and save them.

    texts -> prompts -> the base's greedy continuations -> heads -> ranks on held-out rows

The base is never changed. Each head's parameters have a loss of their own, and Adam does not feel a loss's scale, so
there are no weights per head to tune; the learning rate is what matters, and several can be compared.
`python -m porting_kit.medusa.training --help` is the command line.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from porting_kit.errors import HeadsError
from porting_kit.medusa.head_ranks import HeadAccuracy, choose_paths, measure_accuracy, measure_ranks, replay_steps
from porting_kit.medusa.heads import HeadVariant, MedusaHeads, save_heads
from porting_kit.medusa.self_distillation import (
    IGNORED,
    Continuations,
    Frame,
    build_chat_frame,
    continue_greedily,
    cut_prompts,
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides the result, with the texts and the base.

    Args:
        variant: "v2" uses the base's output matrix, "v1" gives each head its own, started from the base's.
        num_heads: M.
        num_layers: R.
        prompt_tokens: lengths of the prompts cut from the texts.
        instructions: for chat models: each makes one more kind of prompt beside the bare text, a chat turn.
        prompts: how many prompts to continue.
        new_tokens: tokens of each continuation.
        generation_rows: prompts continued in one call.
        batch_positions: positions of one training step.
        steps: training steps.
        learning_rates: peak rates; of several, each is tried for `trial_steps` and the best one is used.
        trial_steps: steps of one trial.
        warmup_steps: steps of linear warm-up; a cosine to zero follows.
        held_out_rows: continuations kept out of training, on which accuracy is measured.
        tree_nodes: nodes, the root included, of the tree chosen from the held-out ranks.
        seed: for the prompts and the order of training.
    """

    variant: HeadVariant = "v2"
    num_heads: int = 4
    num_layers: int = 1
    prompt_tokens: tuple[int, ...] = (16, 32, 64)
    instructions: tuple[str, ...] = ()
    prompts: int = 20_000
    new_tokens: int = 96
    generation_rows: int = 512
    batch_positions: int = 4096
    steps: int = 4000
    learning_rates: tuple[float, ...] = (1e-3,)
    trial_steps: int = 300
    warmup_steps: int = 50
    held_out_rows: int = 256
    tree_nodes: int = 32
    seed: int = 0


@dataclass(frozen=True)
class TrainedHeads:
    """What training gives.

    Args:
        heads: the module, fp32, on the base's device.
        accuracy: per head, on the held-out continuations.
        losses: (step, mean loss over the heads), from the start to the end of training.
        learning_rate: the one used.
        trials: learning rate -> held-out loss after `trial_steps`; empty when only one was given.
        paths: a tree of `tree_nodes` nodes fitted to the held-out ranks, as Medusa choices.
        tokens_per_step: with that tree, on the held-out continuations, the token the base itself gives included.
        positions: training positions there were.
        seconds: wall time of each stage.
    """

    heads: MedusaHeads
    accuracy: tuple[HeadAccuracy, ...]
    losses: tuple[tuple[int, float], ...]
    learning_rate: float
    trials: dict[float, float]
    paths: tuple[tuple[int, ...], ...]
    tokens_per_step: float
    positions: int
    seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The figures for a card, without the weights and the tree."""
        return {
            "accuracy": [asdict(head) for head in self.accuracy],
            "losses": [[step, round(loss, 4)] for step, loss in self.losses],
            "learning_rate": self.learning_rate,
            "trials": {f"{rate:g}": round(loss, 4) for rate, loss in self.trials.items()},
            "tokens_per_step": round(self.tokens_per_step, 4),
            "tree_nodes": len(self.paths) + 1,
            "positions": self.positions,
            "seconds": {stage: round(seconds, 1) for stage, seconds in self.seconds.items()},
        }


def train_heads(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    settings: TrainingSettings,
    *,
    checkpoint: Path | None = None,
    report: Report = print,
) -> TrainedHeads:
    """Train heads for `model` on its own greedy continuations of prompts cut from `texts`.

    Args:
        model: a Hugging Face causal language model, on its device, in the type it will be served in.
        tokenizer: its tokenizer.
        texts: documents of the kind that will be served.
        settings: see TrainingSettings.
        checkpoint: a file to continue from when it is there, and to save progress to.
        report: called with a line of progress.

    Returns:
        the heads and their figures.

    Raises:
        HeadsError: no prompt in the texts, a loss that is not finite, a checkpoint of other settings.
        BaseModelError: the base's hidden states are not finite.
    """
    started = time.monotonic()
    model.eval().requires_grad_(False)
    prompts = cut_prompts(
        tokenizer,
        texts,
        lengths_tokens=settings.prompt_tokens,
        limit=settings.prompts,
        seed=settings.seed,
        frames=(Frame(), *(build_chat_frame(tokenizer, instruction) for instruction in settings.instructions)),
    )
    continuations = continue_greedily(
        model, prompts, new_tokens=settings.new_tokens, batch_rows=settings.generation_rows, report=report
    )
    continued = time.monotonic()
    trained = train_on_continuations(
        continuations, model.get_output_embeddings(), settings, checkpoint=checkpoint, report=report
    )
    trained.seconds.update(continuing=continued - started, training=time.monotonic() - continued)
    return trained


def train_on_continuations(
    continuations: Continuations,
    output_matrix: torch.nn.Module,
    settings: TrainingSettings,
    *,
    checkpoint: Path | None = None,
    report: Report = print,
) -> TrainedHeads:
    """The second half of `train_heads`: from continuations to heads.

    Args:
        continuations: see self_distillation.
        output_matrix: the base's `lm_head`, a module [..., E] -> [..., V] with a `weight` [V, E].
        settings: as for `train_heads`.
        checkpoint: as for `train_heads`.
        report: as for `train_heads`.
    """
    held_out_rows = min(settings.held_out_rows, continuations.rows // 2)
    if held_out_rows < 2:
        raise HeadsError(
            "too few continuations to train on and to measure with",
            expected="at least 4 prompts",
            found=f"{continuations.rows} prompts",
            next_step="give more or longer texts",
        )
    held_out, training = continuations.take(slice(held_out_rows)), continuations.take(slice(held_out_rows, None))
    rates, trials = settings.learning_rates, {}
    if len(rates) > 1:
        for rate in rates:
            trial = _Run(training, output_matrix, settings, rate, settings.trial_steps)
            trial.train(report=lambda line: None)
            trials[rate] = held_out_loss(trial.heads, held_out, output_matrix)
            report(f"learning rate {rate:g}: held-out loss {trials[rate]:.4f} after {settings.trial_steps} steps")
    best_rate = min(trials, key=trials.__getitem__) if trials else rates[0]
    run = _Run(training, output_matrix, settings, best_rate, settings.steps)
    run.train(checkpoint=checkpoint, report=report)

    ranks = measure_ranks(run.heads, held_out, output_matrix)
    accuracy = measure_accuracy(ranks)
    for head in accuracy:
        report(f"head {head.head}: top-1 {head.top1:.3f}, top-5 {head.top5:.3f} of {head.positions} positions")
    # the tree is chosen on one half and judged on the other, so that its figure is no fit to its own data
    half = len(ranks) // 2
    paths = choose_paths(ranks[:half], num_nodes=settings.tree_nodes)
    tokens_per_step = replay_steps(ranks[half:], paths)
    report(f"{tokens_per_step:.3f} tokens per step with {len(paths) + 1} tree nodes")
    return TrainedHeads(
        run.heads, accuracy, tuple(run.losses), best_rate, trials, paths, tokens_per_step, len(run.positions)
    )


@torch.no_grad()
def held_out_loss(heads: MedusaHeads, held_out: Continuations, output_matrix: torch.nn.Module) -> float:
    """Mean loss over the positions and heads of held-out rows."""
    targets = held_out.targets(heads.num_heads).flatten(0, 1)
    total, chunks = 0.0, 0
    for hidden, target in zip(held_out.hidden.flatten(0, 1).split(4096), targets.split(4096), strict=True):
        total += _loss(heads, hidden, target, output_matrix).nan_to_num().item()
        chunks += 1
    return total / chunks


class _Run:
    """One training run: heads, optimizer and order of positions; it can be left and taken up again."""

    def __init__(
        self,
        training: Continuations,
        output_matrix: torch.nn.Module,
        settings: TrainingSettings,
        learning_rate: float,
        steps: int,
    ) -> None:
        self.settings, self.steps, self.output_matrix = settings, steps, output_matrix
        self.hidden = training.hidden.flatten(0, 1)
        self.targets = training.targets(settings.num_heads).flatten(0, 1)
        # the first head's target is the last one to run out, so a position without it teaches nothing
        self.positions = (self.targets[:, 0] != IGNORED).nonzero().flatten()
        device = self.hidden.device
        vocab_size, hidden_size = output_matrix.weight.shape
        self.heads = MedusaHeads(
            hidden_size,
            vocab_size,
            num_heads=settings.num_heads,
            num_layers=settings.num_layers,
            variant=settings.variant,
        )
        self.heads.copy_output_matrix(output_matrix.weight)
        self.heads.to(device)
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate_share)
        self.shuffle = torch.Generator(device=device).manual_seed(settings.seed)
        self.losses: list[tuple[int, float]] = []
        self.step = 0
        self.started = time.monotonic()

    def train(self, *, checkpoint: Path | None = None, report: Report) -> None:
        """Run the steps that are left; save every tenth of them to `checkpoint`."""
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
            report(f"continuing from step {self.step}")
        every = max(1, self.steps // 10)
        batch = min(self.settings.batch_positions, len(self.positions))
        while self.step < self.steps:
            picks = torch.randint(len(self.positions), (batch,), generator=self.shuffle, device=self.hidden.device)
            chosen = self.positions[picks]
            with torch.autocast(self.hidden.device.type, torch.bfloat16, enabled=self.hidden.device.type == "cuda"):
                loss = _loss(self.heads, self.hidden[chosen], self.targets[chosen], self.output_matrix)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            if self.step % every == 0 or self.step in (1, self.steps):
                self._record(loss.item(), report)
                if checkpoint is not None:
                    self._save(checkpoint)

    def _record(self, loss: float, report: Report) -> None:
        if not math.isfinite(loss):
            raise HeadsError(
                "training of the Medusa heads diverged",
                expected="a finite loss",
                found=f"{loss} at step {self.step}",
                next_step="use a lower learning rate",
            )
        self.losses.append((self.step, loss))
        report(f"step {self.step}/{self.steps}: loss {loss:.4f}, {time.monotonic() - self.started:.0f} s")

    def _rate_share(self, step: int) -> float:
        warm = min(self.settings.warmup_steps, max(1, self.steps // 10))
        return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps))))

    def _save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        state = {
            "settings": repr(self.settings),
            "step": self.step,
            "losses": self.losses,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "shuffle": self.shuffle.get_state(),
        }
        torch.save(state, partial)
        partial.replace(file)

    def _load(self, file: Path) -> None:
        state = torch.load(file, map_location=self.hidden.device, weights_only=True)
        if state["settings"] != repr(self.settings):
            raise HeadsError(
                "the checkpoint belongs to other settings",
                expected=repr(self.settings),
                found=state["settings"],
                where=file,
                next_step="use the settings it was made with, or delete it to start again",
            )
        self.step, self.losses = state["step"], state["losses"]
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.shuffle.set_state(state["shuffle"].cpu())


def _loss(
    heads: MedusaHeads, hidden: torch.Tensor, targets: torch.Tensor, output_matrix: torch.nn.Module
) -> torch.Tensor:
    """Mean cross-entropy over heads and positions; hidden [B, E], targets int64 [B, M]."""
    # the base's type may be fp16, whose gradients underflow; under autocast `float` costs only this copy
    weight = output_matrix.weight.float() if not torch.is_autocast_enabled(hidden.device.type) else output_matrix.weight
    bias = getattr(output_matrix, "bias", None)
    bias = None if bias is None else bias.to(weight.dtype)
    logits = heads(hidden.float(), lambda states: torch.nn.functional.linear(states, weight, bias))
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.T.flatten(), ignore_index=IGNORED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train Medusa heads for a Hugging Face model on its own greedy continuations."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from porting_kit.medusa.training_text import collect_text, read_text, split_held_out

    options = _parse(arguments)
    file = {"gguf_file": options.base.name} if options.base.suffix == ".gguf" else {}
    folder = options.base.parent if file else options.base
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, **file).to(device, dtype)
    # a tokenizer beside a GGUF file spares the slow rebuilding of one from the file's merges
    tokenizer = AutoTokenizer.from_pretrained(folder, **({} if (folder / "tokenizer.json").exists() else file))
    texts, _ = split_held_out(read_text(options.texts) if options.texts else collect_text()[0])
    defaults = TrainingSettings()
    chosen = {name: getattr(options, name) for name in asdict(defaults)}
    settings = TrainingSettings(**{name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()})

    trained = train_heads(model, tokenizer, texts, settings, checkpoint=options.checkpoint)
    write_trained_heads(trained, settings, options.out, base_name=options.base_name or options.base.stem)


def write_trained_heads(trained: TrainedHeads, settings: TrainingSettings, folder: Path, *, base_name: str) -> None:
    """Write the heads in the original project's layout, with `card.json` (figures) and `tree.json` (choices)."""
    save_heads(trained.heads, folder, base_name=base_name)
    card = {"base": base_name, "settings": asdict(settings), **trained.as_dict()}
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (folder / "tree.json").write_text(json.dumps([list(path) for path in trained.paths]) + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m porting_kit.medusa.training", description=main.__doc__)
    parser.add_argument("base", type=Path, help="a Hugging Face folder or a GGUF file")
    parser.add_argument("out", type=Path, help="folder for the heads")
    parser.add_argument("--texts", type=Path, help="text file, or .xz of training_text; default: collected anew")
    parser.add_argument("--base-name", help="name of the base in config.json; default: the folder's or file's")
    parser.add_argument("--checkpoint", type=Path, help="file to continue from and to save progress to")
    parser.add_argument("--device", help="torch device; default: cuda when there is one")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    for name, default in asdict(TrainingSettings()).items():
        kind = type((*default, "")[0]) if isinstance(default, tuple) else type(default)
        several = {"nargs": "*"} if isinstance(default, tuple) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, **several)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
