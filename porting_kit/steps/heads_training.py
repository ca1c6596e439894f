"""The training of heads for a port: a text or the base's own questions in, heads with a card and a tree out.

Started with torchrun, each process takes its share of the prompts and of every training step; the first one writes.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from porting_kit.alignment.gguf_settings import load_tokenizer
from porting_kit.alignment.reference import load_reference
from porting_kit.architectures import name_base
from porting_kit.errors import HeadsError, RunFolderError, format_count, placed
from porting_kit.medusa.heads import HEADS_FILE, HeadVariant
from porting_kit.medusa.self_distillation import build_chat_frame
from porting_kit.medusa.training import TRAINED_FILES, TrainedHeads, train_heads, write_trained_heads
from porting_kit.medusa.training_run import TrainingSettings
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.provenance import fingerprint_path, hash_value
from porting_kit.steps.context import PortRun, Stopwatch
from porting_kit.steps.heads import FOLDER, Say, read_data_for
from porting_kit.whole_files import replace_folder, require_writable

TRAINED_FOLDER = "trained"

CPU_SETTINGS = {"prompts": 64, "new_tokens": 32, "generation_rows": 16, "batch_positions": 256, "steps": 200}
"""Without a GPU: enough to see that it works, not to train well. Each can be given on the command line."""


@dataclass(frozen=True)
class HeadsTrainResult:
    """Heads that were trained and where they are."""

    outcome: StepOutcome
    trained: TrainedHeads
    folder: Path

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {**self.outcome.as_dict(), **self.trained.as_dict(), "folder": str(self.folder)}


def train_port_heads(
    run: PortRun,
    data: Path | None,
    *,
    out: Path | None = None,
    settings: dict[str, Any] | None = None,
    restart: bool = False,
    say: Say = print,
) -> HeadsTrainResult:
    """Train heads on the base's own continuations of prompts cut from a text, sampled by itself, or both.

    An interrupted run goes on where it was: progress is kept in the run folder under a name made from the base, the
    text and the settings. The folder of the heads appears when they are complete, or not at all.

    Args:
        run: the port; its heads are not read.
        data: the text; None cuts no prompts, so that `self_chat` of the settings says how many the base makes itself.
        out: where the heads go; `heads/trained` in the run folder when None.
        settings: fields of TrainingSettings by name; the rest have defaults, smaller ones without a GPU.
        restart: forget an earlier run's progress.
        say: called with lines of progress.

    Raises:
        HeadsError: neither a text nor prompts of the base's own, a text that is missing or shorter than one window,
            no chat template for the base to ask itself, unusable settings, a loss that is not finite.
        BaseModelError: the base cannot be loaded or computes what is not finite.
        RunFolderError: the output folder holds something else, or cannot be written.
    """
    watch = Stopwatch()
    has_gpu = torch.cuda.is_available()
    given = {name: value for name, value in (settings or {}).items() if value is not None}
    chosen = make_settings({**({} if has_gpu else CPU_SETTINGS), **({} if data else {"prompts": 0}), **given})
    if (data is None) != (chosen.prompts == 0):
        raise HeadsError(
            "a text and the number of its prompts belong together",
            expected="--data TEXT and --prompts above 0, or neither",
            found=f"{'no text' if data is None else data} and {chosen.prompts} prompts",
            next_step="give the text, or leave --prompts out",
        )
    texts = [] if data is None else read_data_for(run.port, data)
    if chosen.self_chat:
        # refuses a base without a template before its weights are read
        build_chat_frame(load_tokenizer(run.port.base_path))
    folder = run.folder.root / FOLDER / TRAINED_FOLDER if out is None else out
    own = run.folder.root / FOLDER
    _check_output(folder, own)
    require_writable(Path(os.path.realpath(folder)).parent)
    require_writable(own)
    identity = {
        "base": fingerprint_path(run.port.base_path),
        "text": None if data is None else hashlib.sha256(data.read_bytes()).hexdigest(),
        "settings": asdict(chosen),
    }
    progress = own / f"training-{hash_value(identity)[:16]}.pt"
    if restart:
        progress.unlink(missing_ok=True)
    with _processes() as (rank, world):
        device = f"cuda:{rank % torch.cuda.device_count()}" if has_gpu else "cpu"
        reference = load_reference(run.port.base_path, dtype=run.port.dtype if has_gpu else "float32", device=device)
        with placed(data or run.port.base_path):
            trained = train_heads(
                reference.model,
                reference.tokenizer,
                texts,
                chosen,
                checkpoint=progress,
                report=say if rank == 0 else _be_silent,
                rank=rank,
                world_size=world,
            )
        if rank == 0:
            card: dict[str, Any] = {"base_files": identity["base"]}
            card |= {} if data is None else {"data": {"file": data.name, "sha256": identity["text"]}}
            card |= {"processes": world, "device": torch.cuda.get_device_name() if has_gpu else "cpu"}
            _check_output(folder, own)  # training may have taken hours
            with replace_folder(folder) as partial:
                write_trained_heads(trained, chosen, partial, base_name=name_base(run.port.base_path), card=card)
            progress.unlink(missing_ok=True)
    first = trained.accuracy[0]
    outcome = StepOutcome(
        step="heads train",
        verdict=Verdict.PASS,
        summary=f"{format_count(chosen.num_heads, 'head')} ({chosen.variant}) trained in "
        f"{format_count(chosen.steps, 'step')}: the first agrees in "
        f"{first.top1:.1%} of held-out positions, {trained.tokens_per_step:.2f} tokens a step",
        covered=(Coverage.WEIGHTS,),
        figures={"learning_rate": trained.learning_rate, "positions": trained.positions},
        products=TRAINED_FILES,
        seconds=watch.seconds,
    )
    return HeadsTrainResult(outcome, trained, folder)


def make_settings(values: dict[str, Any]) -> TrainingSettings:
    """TrainingSettings from values by name; None keeps the default.

    Raises:
        HeadsError: a number that no training can have.
    """
    settings = replace(TrainingSettings(), **{name: value for name, value in values.items() if value is not None})
    least = dict.fromkeys(("num_heads", "num_layers", "new_tokens", "generation_rows", "batch_positions", "steps"), 1)
    least |= {"prompts": 0, "self_chat": 0, "self_chat_tokens": 1}
    wrong = [f"{name}: {getattr(settings, name)}" for name, count in least.items() if getattr(settings, name) < count]
    if not (math.isfinite(settings.self_chat_temperature) and settings.self_chat_temperature > 0):
        wrong.append(f"self_chat_temperature: {settings.self_chat_temperature}")
    if not 0 < settings.self_chat_top_p <= 1:
        wrong.append(f"self_chat_top_p: {settings.self_chat_top_p}, not above 0 and at most 1")
    if settings.new_tokens <= settings.num_heads:
        wrong.append(f"new_tokens: {settings.new_tokens}, not more than the {settings.num_heads} heads")
    if not settings.prompt_tokens or min(settings.prompt_tokens) < 1:
        wrong.append(f"prompt_tokens: {settings.prompt_tokens}")
    if settings.variant not in get_args(HeadVariant):
        wrong.append(f"variant: {settings.variant}, none of {', '.join(get_args(HeadVariant))}")
    if not 0 <= settings.seed < 2**63:
        wrong.append(f"seed: {settings.seed}")
    if not settings.learning_rates or not all(math.isfinite(rate) and rate > 0 for rate in settings.learning_rates):
        wrong.append(f"learning_rates: {settings.learning_rates}")
    if wrong:
        raise HeadsError(
            "the training settings cannot be used",
            expected="positive, finite numbers, a known variant",
            items=wrong,
            next_step="correct these options",
        )
    return settings


def _check_output(folder: Path, own: Path) -> None:
    """Earlier heads of ours may be replaced; anything else may not, and not `own`, where the run keeps its progress."""
    if os.path.realpath(folder) == os.path.realpath(own):
        raise RunFolderError(
            "the output folder is the one that the run keeps its own files in",
            expected="a folder of its own for the heads",
            found="the run folder's heads/",
            where=folder,
            next_step=f"name another folder with --out, or leave it out: the heads go into {TRAINED_FOLDER}/ there",
        )
    names = {item.name for item in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or (names and not {HEADS_FILE, "card.json"} <= names <= set(TRAINED_FILES)):
        raise RunFolderError(
            "the output folder holds something that training did not write",
            expected="a new or empty folder, or earlier heads of this command and nothing else",
            found=", ".join(sorted(names - set(TRAINED_FILES) or names)[:5]) or "a file",
            where=folder,
            next_step="name another folder with --out",
        )


@contextmanager
def _processes() -> Iterator[tuple[int, int]]:
    """(rank, world size) under torchrun, (0, 1) without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1
        return
    import torch.distributed as dist

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank(), world
    finally:
        dist.destroy_process_group()


def _be_silent(line: str) -> None:
    return None


def format_training(result: HeadsTrainResult) -> str:
    """Accuracy by head, and where the heads are."""
    lines = [f"{'head':>4} {'top-1':>7} {'top-5':>7} {'positions':>9}"]
    for head in result.trained.accuracy:
        lines.append(f"{head.head + 1:4d} {head.top1:7.1%} {head.top5:7.1%} {head.positions:9d}")
    lines.append(f"heads train: {result.outcome.summary}\n{result.folder}")
    return "\n".join(lines)
