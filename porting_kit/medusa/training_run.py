"""One training run of Medusa heads over stored continuations: settings, steps, loss, checkpoint.

This module knows neither texts nor a base model, only hidden states, what must be said there, and an output matrix.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from porting_kit.errors import HeadsError
from porting_kit.medusa.head_ranks import measure_accuracy, measure_ranks
from porting_kit.medusa.heads import STORED_DTYPE, HeadVariant, MedusaHeads
from porting_kit.medusa.self_distillation import IGNORED, Continuations
from porting_kit.whole_files import write_pickle

Report = Callable[[str], None]

WATCHED_ROWS = 16
"""Held-out continuations on which each head's accuracy is shown while training runs."""


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides the result, with the texts and the base.

    Args:
        variant: "v2" uses the base's output matrix, "v1" gives each head its own, started from the base's.
        num_heads: M.
        num_layers: R.
        prompt_tokens: lengths of the prompts cut from the texts.
        instructions: for chat models: each makes one more kind of prompt beside the bare text, a chat turn.
        prompts: how many prompts to cut from the texts; 0 reads no text.
        self_chat: how many prompts the base makes itself, see `self_chat.sample_questions`; they come beside those of
            the texts.
        self_chat_tokens: tokens of such a user's turn at most; a turn that has not ended then is dropped.
        self_chat_temperature, self_chat_top_p: of the sampling of such turns.
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
    self_chat: int = 0
    self_chat_tokens: int = 128
    self_chat_temperature: float = 0.9
    self_chat_top_p: float = 0.95
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

    def __post_init__(self) -> None:
        if not self.prompts and not self.self_chat:
            raise HeadsError(
                "there is nothing to train on",
                expected="prompts of a text, prompts that a chat model makes itself, or both",
                found="neither",
                next_step="give a text (--data TEXT), or let the base ask itself (--self-chat N)",
            )


@torch.no_grad()
def held_out_loss(heads: MedusaHeads, held_out: Continuations, output_matrix: torch.nn.Module) -> float:
    """Mean loss over the positions and heads of held-out rows."""
    targets = held_out.targets(heads.num_heads).flatten(0, 1)
    total, chunks = 0.0, 0
    for hidden, target in zip(held_out.hidden.flatten(0, 1).split(4096), targets.split(4096), strict=True):
        total += mean_loss(heads, hidden, target, output_matrix).nan_to_num().item()
        chunks += 1
    return total / chunks


class TrainingRun:
    """One training run: heads, optimizer and order of positions; it can be left and taken up again.

    Args:
        training: continuations to train on, this process's share.
        output_matrix: the base's `lm_head`.
        settings: see TrainingSettings.
        learning_rate: the peak rate.
        steps: steps of the run.
        held_out: continuations whose first rows say how each head is doing; None says only the loss.
        rank, world_size: of this process; gradients are averaged over all, so that every one holds the same heads.
    """

    def __init__(
        self,
        training: Continuations,
        output_matrix: torch.nn.Module,
        settings: TrainingSettings,
        learning_rate: float,
        steps: int,
        *,
        held_out: Continuations | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.settings, self.steps, self.output_matrix = settings, steps, output_matrix
        self.rank, self.world_size = rank, world_size
        self.watched = None if held_out is None else held_out.take(slice(WATCHED_ROWS))
        self.hidden = training.hidden.flatten(0, 1)
        self.targets = training.targets(settings.num_heads).flatten(0, 1)
        # the first head's target is the last one to run out, so a position without it teaches nothing
        self.positions = (self.targets[:, 0] != IGNORED).nonzero().flatten()
        if not len(self.positions):
            raise HeadsError(
                "the base's continuations leave nothing to learn from",
                expected="continuations of two tokens or more",
                found=f"{training.rows} that end at once",
                next_step="ask for more prompts, or for others",
            )
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
        self.shuffle = torch.Generator(device=device).manual_seed(settings.seed * world_size + rank)
        self.losses: list[tuple[int, float]] = []
        self.step = 0
        self.started = time.monotonic()

    def train(self, *, checkpoint: Path | None = None, report: Report) -> None:
        """Run the steps that are left; save every tenth of them to `checkpoint`."""
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
            report(f"continuing from step {self.step}")
        every = max(1, self.steps // 10)
        try:
            while self.step < self.steps:
                with whole_step() if self.world_size == 1 else nullcontext():
                    loss = self._take_step()
                if self.step % every == 0 or self.step in (1, self.steps):
                    self._record(loss.item(), report)
                    if checkpoint is not None and self.rank == 0:
                        self._save(checkpoint)
        except KeyboardInterrupt:
            # The shuffle's state in a file of several processes is the first one's: those go back to the last tenth.
            if checkpoint is not None and self.world_size == 1:
                self._save(checkpoint)
                report(f"interrupted at step {self.step}; the same command goes on from there")
            raise
        except HeadsError:
            # Going on from before the loss left the numbers would leave them again.
            if checkpoint is not None and self.rank == 0:
                checkpoint.unlink(missing_ok=True)
            raise

    def _take_step(self) -> torch.Tensor:
        """One step of the optimizer; returns the loss before it."""
        batch = min(self.settings.batch_positions, len(self.positions))
        picks = torch.randint(len(self.positions), (batch,), generator=self.shuffle, device=self.hidden.device)
        chosen = self.positions[picks]
        with torch.autocast(self.hidden.device.type, torch.bfloat16, enabled=self.hidden.device.type == "cuda"):
            loss = mean_loss(self.heads, self.hidden[chosen], self.targets[chosen], self.output_matrix)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.detach()

    def _average_gradients(self) -> None:
        if self.world_size == 1:
            return
        import torch.distributed as dist

        for parameter in self.heads.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size

    def _record(self, loss: float, report: Report) -> None:
        if not math.isfinite(loss):
            raise HeadsError(
                "training of the Medusa heads diverged",
                expected="a finite loss",
                found=f"{loss} at step {self.step}",
                next_step="use a lower learning rate (--learning-rate)",
            )
        self.losses.append((self.step, loss))
        line = f"step {self.step}/{self.steps}: loss {loss:.4f}, {time.monotonic() - self.started:.0f} s"
        if self.watched is not None:
            self._require_storable()
            shares = measure_accuracy(measure_ranks(self.heads, self.watched, self.output_matrix))
            line += ", top-1 by head " + " ".join(f"{head.top1:.3f}" for head in shares)
        report(line)

    def _require_storable(self) -> None:
        """Refuse weights that the file cannot hold as soon as there are some; those of a trial are not stored."""
        largest = max(float(parameter.detach().abs().max()) for parameter in self.heads.parameters())
        if not largest <= torch.finfo(STORED_DTYPE).max:
            raise HeadsError(
                "training of the Medusa heads diverged",
                expected=f"weights that {str(STORED_DTYPE).removeprefix('torch.')} can hold",
                found=f"one of {largest:.3g} at step {self.step}",
                next_step="use a lower learning rate (--learning-rate)",
            )

    def _rate_share(self, step: int) -> float:
        warm = min(self.settings.warmup_steps, max(1, self.steps // 10))
        return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps))))

    def _save(self, file: Path) -> None:
        state = {
            "settings": repr(self.settings),
            "step": self.step,
            "losses": self.losses,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "shuffle": self.shuffle.get_state(),
        }
        write_pickle(file, state)

    def _load(self, file: Path) -> None:
        try:
            state = torch.load(file, map_location=self.hidden.device, weights_only=True)
            has_own_settings = state["settings"] == repr(self.settings)
        except Exception as error:  # a damaged file fails in any way
            raise HeadsError(
                "the progress of an earlier training cannot be read",
                expected="the whole file that an interrupted training wrote",
                found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'an empty file'}",
                where=file,
                next_step="start again with --restart, or delete the file",
            ) from error
        if not has_own_settings:
            raise HeadsError(
                "the checkpoint belongs to other settings",
                expected=repr(self.settings),
                found=state["settings"],
                where=file,
                next_step="use the settings it was made with, or start again with --restart, or delete the file",
            )
        self.step, self.losses = state["step"], state["losses"]
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.shuffle.set_state(state["shuffle"].cpu())
        if self.rank:
            # The file has the first process's order; another one must not draw the same positions.
            self.shuffle.manual_seed((self.settings.seed + self.step) * self.world_size + self.rank)


@contextmanager
def whole_step() -> Iterator[None]:
    """An interrupt (SIGINT) takes effect at the end; what is saved then is what an uninterrupted run had there.

    Signals reach the main thread alone, so in another one there is nothing to do.
    """
    earlier = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or earlier is None:
        yield
        return
    came = False

    def wait(number: int, frame: object) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
    if came:
        signal.raise_signal(signal.SIGINT)


def mean_loss(
    heads: MedusaHeads, hidden: torch.Tensor, targets: torch.Tensor, output_matrix: torch.nn.Module
) -> torch.Tensor:
    """Mean cross-entropy over heads and positions; hidden [B, E], targets int64 [B, M].

    The base's bias, where it has one, is left out, see `apply_output_matrix`.
    """
    # the base's type may be fp16, whose gradients underflow; under autocast `float` costs only this copy
    weight = output_matrix.weight.float() if not torch.is_autocast_enabled(hidden.device.type) else output_matrix.weight
    logits = heads(hidden.float(), lambda states: torch.nn.functional.linear(states, weight))
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.T.flatten(), ignore_index=IGNORED)


def mean_of_processes(value: float, world_size: int) -> float:
    """The mean over all processes, so that every one decides alike."""
    if world_size == 1:
        return value
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / world_size
