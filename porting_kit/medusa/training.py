"""Train Medusa heads on a frozen base model by self-distillation, measure them, and save them.

    texts, or the base itself -> prompts -> the base's greedy continuations -> heads -> ranks on held-out rows

The base is never changed. Each head's parameters have a loss of their own, and Adam does not feel a loss's scale, so
there are no weights per head to tune; the learning rate is what matters, and several can be compared.
`python -m porting_kit.medusa.training --help` is the command line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.architectures import name_base
from porting_kit.base_tokenizer import read_tokenizer
from porting_kit.errors import HeadsError, TreeError
from porting_kit.medusa.head_ranks import HeadAccuracy, measure_accuracy, measure_ranks, replay_steps
from porting_kit.medusa.heads import HEADS_FILE, MedusaHeads, save_heads
from porting_kit.medusa.self_chat import SelfChat, sample_questions
from porting_kit.medusa.self_distillation import (
    Continuations,
    Frame,
    build_chat_frame,
    continue_greedily,
    cut_prompts,
)
from porting_kit.medusa.training_run import (
    Report,
    TrainingRun,
    TrainingSettings,
    held_out_loss,
    mean_of_processes,
)
from porting_kit.medusa.tree_choice import choose_paths
from porting_kit.whole_files import write_json, write_text

TRAINED_FILES = (HEADS_FILE, "config.json", "card.json", "tree.json")
"""What `write_trained_heads` writes."""


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
        self_chat: how the prompts were made that the base made itself, over all processes; None without any.
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
    self_chat: dict[str, float] | None = None

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
            **({} if self.self_chat is None else {"self_chat": self.self_chat}),
        }


def train_heads(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    settings: TrainingSettings,
    *,
    checkpoint: Path | None = None,
    report: Report = print,
    rank: int = 0,
    world_size: int = 1,
) -> TrainedHeads:
    """Train heads for `model` on its own greedy continuations of prompts cut from `texts`, sampled by itself, or both.

    Args:
        model: a Hugging Face causal language model, on its device, in the type it will be served in.
        tokenizer: its tokenizer.
        texts: documents of the kind that will be served; not read with `settings.prompts` 0.
        settings: see TrainingSettings.
        checkpoint: a file to continue from when it is there, and to save progress to.
        report: called with a line of progress.
        rank, world_size: of this process among those of a torch.distributed group; each continues its own prompts.

    Returns:
        the heads and their figures, on this process's held-out rows.

    Raises:
        HeadsError: no prompt in the texts, no chat template or hardly a question from the base where it is to ask
            itself, a loss that is not finite, a checkpoint of other settings.
        BaseModelError: the base's hidden states are not finite.
    """
    started = time.monotonic()
    model.eval().requires_grad_(False)
    prompts, chat = make_prompts(model, tokenizer, texts, settings, report=report, rank=rank, world_size=world_size)
    prepared = time.monotonic()
    continuations = continue_greedily(
        model, prompts, new_tokens=settings.new_tokens, batch_rows=settings.generation_rows, report=report
    )
    continued = time.monotonic()
    trained = train_on_continuations(
        continuations,
        model.get_output_embeddings(),
        settings,
        checkpoint=checkpoint,
        report=report,
        rank=rank,
        world_size=world_size,
    )
    trained.seconds.update(
        prompts=prepared - started, continuing=continued - prepared, training=time.monotonic() - continued
    )
    return trained if chat is None else replace(trained, self_chat=_describe_chat(chat, settings, world_size))


def make_prompts(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    settings: TrainingSettings,
    *,
    report: Report = print,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[list[Sequence[int]], SelfChat | None]:
    """This process's prompts: its share of those of the texts, then its share of those that the base makes itself.

    Each process samples from a seed of its own. Arguments and errors as of `train_heads`.
    """
    prompts: list[Sequence[int]] = []
    if settings.prompts:
        instructed = (build_chat_frame(tokenizer, instruction) for instruction in settings.instructions)
        prompts += cut_prompts(
            tokenizer,
            texts,
            lengths_tokens=settings.prompt_tokens,
            limit=settings.prompts,
            seed=settings.seed,
            frames=(Frame(), *instructed),
        )[rank::world_size]
    if not settings.self_chat:
        return prompts, None
    chat = sample_questions(
        model,
        tokenizer,
        len(range(rank, settings.self_chat, world_size)),
        seed=settings.seed * world_size + rank,
        max_tokens=settings.self_chat_tokens,
        temperature=settings.self_chat_temperature,
        top_p=settings.self_chat_top_p,
        batch_rows=settings.generation_rows,
        report=report,
    )
    return [*prompts, *chat.prompts], chat


def _describe_chat(chat: SelfChat, settings: TrainingSettings, world_size: int) -> dict[str, float]:
    """For the card: what was asked for, what was sampled, what was kept."""
    sampled, kept = (round(world_size * mean_of_processes(n, world_size)) for n in (chat.sampled, len(chat.prompts)))
    return {
        "asked": settings.self_chat,
        "sampled": sampled,
        "kept": kept,
        "temperature": settings.self_chat_temperature,
        "top_p": settings.self_chat_top_p,
    }


def train_on_continuations(
    continuations: Continuations,
    output_matrix: torch.nn.Module,
    settings: TrainingSettings,
    *,
    checkpoint: Path | None = None,
    report: Report = print,
    rank: int = 0,
    world_size: int = 1,
) -> TrainedHeads:
    """The second half of `train_heads`: from continuations to heads.

    Args:
        continuations: see self_distillation.
        output_matrix: the base's `lm_head`, a module [..., E] -> [..., V] with a `weight` [V, E].
        settings: as for `train_heads`.
        checkpoint: as for `train_heads`.
        report: as for `train_heads`.
        rank, world_size: as for `train_heads`.
    """
    held_out_rows = min(settings.held_out_rows, continuations.rows // 2)
    if held_out_rows < 2:
        raise HeadsError(
            "too few continuations to train on and to measure with",
            expected="at least 4 prompts",
            found=f"{continuations.rows} prompts",
            next_step="give more or longer texts, or ask for more prompts",
        )
    held_out, training = continuations.take(slice(held_out_rows)), continuations.take(slice(held_out_rows, None))
    rates, trials = settings.learning_rates, {}
    if len(rates) > 1:
        for rate in rates:
            place = {"rank": rank, "world_size": world_size}
            trial = TrainingRun(training, output_matrix, settings, rate, settings.trial_steps, **place)
            trial.train(report=lambda line: None)
            trials[rate] = mean_of_processes(held_out_loss(trial.heads, held_out, output_matrix), world_size)
            report(f"learning rate {rate:g}: held-out loss {trials[rate]:.4f} after {settings.trial_steps} steps")
    best_rate = min(trials, key=trials.__getitem__) if trials else rates[0]
    run = TrainingRun(
        training,
        output_matrix,
        settings,
        best_rate,
        settings.steps,
        held_out=held_out,
        rank=rank,
        world_size=world_size,
    )
    run.train(checkpoint=checkpoint, report=report)

    ranks = measure_ranks(run.heads, held_out, output_matrix)
    accuracy = measure_accuracy(ranks)
    for head in accuracy:
        report(f"head {head.head + 1}: top-1 {head.top1:.3f}, top-5 {head.top5:.3f} of {head.positions} positions")
    # the tree is chosen on one half and judged on the other, so that its figure is no fit to its own data
    half = len(ranks) // 2
    try:
        paths = choose_paths(ranks[:half], num_nodes=settings.tree_nodes)
    except TreeError as reason:
        # Trained heads are kept even where too little was held out, or they say too little, to choose a tree.
        report(f"no tree can be chosen ({reason.subject}); the first head's best token stands for one")
        paths = ((0,),)
    tokens_per_step = replay_steps(ranks[half:], paths)
    report(f"{tokens_per_step:.3f} tokens per step with {len(paths) + 1} tree nodes")
    return TrainedHeads(
        run.heads, accuracy, tuple(run.losses), best_rate, trials, paths, tokens_per_step, len(run.positions)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train Medusa heads for a Hugging Face model on its own greedy continuations."""
    from transformers import AutoModelForCausalLM

    from porting_kit.medusa.training_text import collect_text, read_text, split_held_out

    options, settings = _parse(arguments)
    file = {"gguf_file": options.base.name} if options.base.suffix == ".gguf" else {}
    folder = options.base.parent if file else options.base
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, **file).to(device, dtype)
    tokenizer = read_tokenizer(options.base)
    texts: list[str] = []
    if settings.prompts:
        texts, _ = split_held_out(read_text(options.texts) if options.texts else collect_text()[0])
    trained = train_heads(model, tokenizer, texts, settings, checkpoint=options.checkpoint)
    write_trained_heads(trained, settings, options.out, base_name=options.base_name or name_base(options.base))


def write_trained_heads(
    trained: TrainedHeads,
    settings: TrainingSettings,
    folder: Path,
    *,
    base_name: str,
    card: dict[str, Any] | None = None,
) -> None:
    """Write the heads in the original layout, with `card.json` (figures, and `card`) and `tree.json` (choices)."""
    save_heads(trained.heads, folder, base_name=base_name)
    figures = {"base": base_name, **(card or {}), "settings": asdict(settings), **trained.as_dict()}
    write_json(folder / "card.json", figures)
    write_text(folder / "tree.json", json.dumps([list(path) for path in trained.paths]) + "\n")


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, TrainingSettings]:
    epilog = "The options that show only a default are the fields of TrainingSettings; its docstring explains them."
    parser = argparse.ArgumentParser(
        prog="python -m porting_kit.medusa.training", description=main.__doc__, epilog=epilog
    )
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
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, default=default, help="default: %(default)s", **several)
    options = parser.parse_args(arguments)
    chosen = {name: getattr(options, name) for name in asdict(TrainingSettings())}
    try:
        return options, TrainingSettings(**{n: tuple(v) if isinstance(v, list) else v for n, v in chosen.items()})
    except HeadsError as error:
        parser.error(error.message)


if __name__ == "__main__":
    main()
