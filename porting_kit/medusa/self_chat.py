"""Prompts for nothing: a chat model writes the user's turns itself.

Given its chat template up to where the user's words begin, an aligned model goes on as a user would (Magpie: Xu et al.,
2024, arXiv 2406.08464). Such a turn, closed with the rest of the template, is a prompt of the kind that is served.
This module knows nothing of heads or of what is done with the prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.errors import HeadsError
from porting_kit.medusa.self_distillation import (
    build_chat_frame,
    check_vocabulary,
    check_window,
    find_end_ids,
    find_origin,
)

LEAST_ROWS = 32
"""Turns of one batch at least, so that a batch says whether the base gives any."""
JUDGED_BATCHES = 3
LEAST_KEPT_SHARE = 0.05
"""Sampling is given up when of the last JUDGED_BATCHES batches a smaller share was new and whole."""


@dataclass(frozen=True)
class SelfChat:
    """Prompts that a base made itself.

    Args:
        prompts: token ids: template, sampled turn, template up to where the answer begins; no two equal.
        sampled: turns sampled for them.
        dropped: reason -> turns that were not used for it; those beyond the count are in none.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampled: int
    dropped: dict[str, int]


def sample_questions(
    model: Any,
    tokenizer: Any,
    count: int,
    *,
    seed: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    batch_rows: int,
    report: Callable[[str], None] = print,
) -> SelfChat:
    """Sample user's turns from a chat model and make prompts of them.

    A turn ends at a stop token of the model or where the template ends it. Turns that are empty, hold a special token,
    repeat an earlier one, or have not ended after `max_tokens` are dropped: nobody asks half a question.

    Args:
        model: a Hugging Face causal language model, on its device.
        tokenizer: its tokenizer, with a chat template.
        count: how many prompts.
        seed: the same one gives the same prompts; the generator of the process is left as it was.
        max_tokens: of a turn, its end included.
        temperature: of the sampling.
        top_p: share of the probability that is sampled from.
        batch_rows: turns sampled at a time, at most.
        report: called with a line of progress.

    Raises:
        HeadsError: the tokenizer has no chat template, a turn does not fit the base's positions, or the base gives
            hardly any whole turn that is new.
    """
    frame = build_chat_frame(tokenizer)
    if not frame.before:
        raise HeadsError(
            "the chat template has nothing before the user's words, so the base cannot be asked for them",
            expected="a template that marks the beginning of a user's turn",
            found="a template that begins with them",
            where=find_origin(model),
            next_step="train on a text (--data)",
        )
    check_vocabulary(model, [frame.before, frame.after])
    check_window(model, len(frame.before) + len(frame.after), max_tokens, "ask for fewer (--self-chat-tokens)")
    special = find_special_ids(tokenizer)
    ends = {*find_end_ids(model), *(special & set(frame.after[:1]))}
    prompts: dict[tuple[int, ...], None] = {}
    dropped: Counter[str] = Counter()
    gains: list[tuple[int, int]] = []  # of each batch: turns sampled, prompts won
    # `generate` draws from the generator of the process.
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        while len(prompts) < count:
            _require_gain(gains, dropped, find_origin(model))
            had, rows = len(prompts), min(batch_rows, max(LEAST_ROWS, 2 * (count - len(prompts))))
            for row in _sample(model, frame.before, rows, max_tokens, temperature, top_p, ends):
                turn = cut_turn(row, ends, frame.after)
                prompt = (*frame.before, *(turn or ()), *frame.after)
                if reason := _find_fault(turn, tokenizer, special) or ("repeated" if prompt in prompts else None):
                    dropped[reason] += 1
                else:
                    prompts[prompt] = None
            gains.append((rows, len(prompts) - had))
            report(f"sampled {sum(rows for rows, _ in gains)} questions, {min(len(prompts), count)}/{count} kept")
    return SelfChat(tuple(prompts)[:count], sum(rows for rows, _ in gains), dict(dropped))


def find_special_ids(tokenizer: Any) -> set[int]:
    """Tokens that no text stands for: ends, roles and the like."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}


def cut_turn(row: Sequence[int], ends: set[int], after: Sequence[int]) -> tuple[int, ...] | None:
    """A sampled turn without what ends it, an end token or the template's next words; None when nothing does."""
    row, after = tuple(row), tuple(after)
    for place, token in enumerate(row):
        if token in ends or (after and row[place : place + len(after)] == after):
            return row[:place]
    return None


def _find_fault(turn: tuple[int, ...] | None, tokenizer: Any, special: set[int]) -> str | None:
    """Why a turn is no question, or None."""
    if turn is None:
        return "without an end"
    if not special.isdisjoint(turn):
        return "with a special token"
    return None if tokenizer.decode(turn).strip() else "empty"


@torch.no_grad()
def _sample(
    model: Any, before: Sequence[int], rows: int, max_tokens: int, temperature: float, top_p: float, ends: set[int]
) -> list[list[int]]:
    """What follows the template's beginning, `rows` times, every generation setting stated."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_p=top_p,
        top_k=0,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
        use_cache=True,
    )
    batch = torch.tensor([before], device=model.device).expand(rows, -1)
    sequences = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)
    return sequences[:, len(before) :].tolist()


def _require_gain(gains: Sequence[tuple[int, int]], dropped: Counter[str], where: str) -> None:
    """Refuse to go on where the last batches gave nearly nothing."""
    sampled, won = (sum(column) for column in zip(*gains[-JUDGED_BATCHES:], strict=True)) if gains else (0, 0)
    if len(gains) >= JUDGED_BATCHES and won < LEAST_KEPT_SHARE * sampled:
        reasons = ", ".join(f"{turns} {reason}" for reason, turns in dropped.most_common())
        raise HeadsError(
            "the base writes hardly any user's turn that is whole and new",
            expected=f"at least {LEAST_KEPT_SHARE:.0%} of the turns sampled",
            found=f"{won} of the last {sampled}; of all {sum(rows for rows, _ in gains)}: {reasons}",
            where=where,
            next_step="self-made prompts need a chat model: train on a text (--data) if it is none, else ask for fewer "
            "(--self-chat), hotter (--self-chat-temperature) or longer ones (--self-chat-tokens)",
        )
