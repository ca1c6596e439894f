"""Training data for Medusa heads: the base model's own greedy continuations and the hidden states behind them.

Heads are accepted when they say what the base will say, so they learn from what the base says, not from human text.
Prompts of several lengths are continued together without padding: the pass starts at the end of the shortest one, and
a longer one gives its own next tokens until it ends. What follows an end token is masked out. This module calls the
base through Hugging Face's `generate` and knows nothing of heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.errors import BaseModelError, HeadsError

IGNORED = -100

WINDOW_TOKENS = 8192
"""Positions of a base whose config names none."""


@dataclass(frozen=True)
class Continuations:
    """Greedy continuations, C tokens each, of many prompts.

    Args:
        hidden: [rows, C - 1, E]; entry c is the base's last hidden state (after the final norm) from which it chose
            token c. The last token's is left out: nothing that follows it is known.
        tokens: int64 [rows, C]; IGNORED after the first end token.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor

    @property
    def rows(self) -> int:
        """How many prompts were continued."""
        return self.tokens.shape[0]

    def targets(self, num_heads: int) -> torch.Tensor:
        """What each head must say: int64 [rows, C - 1, M], IGNORED where the base said nothing any more.

        Head m reads hidden entry c, from which the base chose token c, and must name token c + 1 + m.
        """
        rows, count = self.tokens.shape
        targets = self.tokens.new_full((rows, count - 1, num_heads), IGNORED)
        for head in range(num_heads):
            known = self.tokens[:, 1 + head :]
            targets[:, : known.shape[1], head] = known
        return targets

    def take(self, rows: slice) -> Continuations:
        """A part of the rows."""
        return Continuations(self.hidden[rows], self.tokens[rows])


@dataclass(frozen=True)
class Frame:
    """Token ids put before and after a piece of text to make a prompt; the bare frame adds none."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def build_chat_frame(tokenizer: Any, instruction: str = "") -> Frame:
    """The frame that makes `instruction` followed by a piece of text a chat prompt of this tokenizer.

    Raises:
        HeadsError: the tokenizer has no chat template, or one that fails or does not hold the user's words once, as
            they are.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise HeadsError(
            "chat prompts need a chat template, and the tokenizer has none",
            expected="a tokenizer with a chat template",
            found="no tokenizer" if tokenizer is None else type(tokenizer).__name__,
            next_step="train on a text alone, without instructions and without --self-chat",
        )
    message = [{"role": "user", "content": f"{instruction}\x00"}]
    where = tokenizer.name_or_path or type(tokenizer).__name__
    try:
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, and fails in any way
        raise HeadsError(
            "the chat template fails on one user's turn",
            expected="a template that makes a text of a list of messages",
            found=f"{type(error).__name__}: {error}",
            where=where,
            next_step="correct the base's chat template, or train on a text alone (--data)",
        ) from error
    parts = text.split("\x00")
    if len(parts) != 2:
        raise HeadsError(
            "the chat template does not hold the user's words once, as they are",
            expected="the words in one place, with nothing done to them",
            found=f"the words {len(parts) - 1} times in {text[:200]!r}",
            where=where,
            next_step="correct the base's chat template, or train on a text alone (--data)",
        )
    return Frame(*(tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts))


def cut_prompts(
    tokenizer: Any,
    texts: Sequence[str],
    *,
    lengths_tokens: Sequence[int],
    limit: int,
    seed: int,
    frames: Sequence[Frame] = (Frame(),),
) -> list[list[int]]:
    """Cut prompts of the given lengths out of texts: beginnings and, from long texts, later places too.

    Args:
        tokenizer: a Hugging Face tokenizer.
        texts: documents.
        lengths_tokens: lengths of the pieces, used in turn.
        limit: how many prompts at most.
        seed: for the choice and its order.
        frames: put around the pieces, used in turn.

    Returns:
        token ids, `limit` of them or fewer, no two equal.

    Raises:
        HeadsError: the texts give no prompt at all.
    """
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    shapes = itertools.cycle(itertools.product(frames, lengths_tokens))
    prompts: dict[tuple[int, ...], None] = {}
    for index in order:
        ids = tokenizer(texts[index])["input_ids"]
        frame, length = next(shapes)
        for start in range(0, len(ids) - length + 1, length):
            prompts[(*frame.before, *ids[start : start + length], *frame.after)] = None
        if len(prompts) >= limit:
            break
    if not prompts:
        raise HeadsError(
            "the texts give no training prompt: each is shorter than one window",
            expected=f"a text of at least {min(lengths_tokens)} tokens",
            found=f"{len(texts)} texts, all shorter",
            next_step="give longer texts, or, to train, ask for shorter prompts (--prompt-tokens)",
        )
    return [list(prompt) for prompt in prompts][:limit]


@torch.no_grad()
def continue_greedily(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    batch_rows: int,
    report: Callable[[str], None] = print,
) -> Continuations:
    """Let the base continue every prompt greedily and keep the hidden states it did it with.

    Args:
        model: a Hugging Face causal language model, on its device, in the type it will be served in.
        prompts: token ids of any lengths; the rows come back in another order.
        new_tokens: C.
        batch_rows: rows of one `generate` call at most.
        report: called with a line of progress.

    Returns:
        the continuations, hidden states in the model's own type on its own device.

    Raises:
        HeadsError: a prompt and its continuation do not fit the base's positions.
        BaseModelError: a token is beyond the base's vocabulary, or a hidden state is not finite.
    """
    check_vocabulary(model, prompts)
    check_window(model, max(map(len, prompts)), new_tokens)
    end_ids = find_end_ids(model)
    hidden, tokens, done = [], [], 0
    for batch in _batch_by_length(prompts, new_tokens, batch_rows):
        starts = torch.tensor([[len(prompt)] for prompt in batch], device=model.device)  # [rows, 1]
        sequences = _generate(model, batch, new_tokens, end_ids)
        steps = torch.arange(new_tokens, device=model.device)
        # one pass over the whole rows is cheaper than keeping every step's states in the loop above
        states = _last_hidden(model, sequences[:, :-1])
        states = states[torch.arange(len(batch), device=model.device)[:, None], starts - 1 + steps[:-1]]
        if not states.isfinite().all():
            raise BaseModelError(
                "the base model's hidden states are not finite",
                expected="finite numbers",
                found=f"NaN or infinity in {str(states.dtype).removeprefix('torch.')}",
                where=find_origin(model),
                next_step="check the base's weights, or run it in bfloat16 or float32",
            )
        hidden.append(states)
        tokens.append(_mask_after_end(sequences.gather(1, starts + steps), end_ids))
        done += len(batch)
        report(f"continued {done}/{len(prompts)} prompts")
    mix = torch.randperm(done, generator=torch.Generator().manual_seed(done)).to(model.device)
    return Continuations(torch.cat(hidden)[mix], torch.cat(tokens)[mix])


def check_window(
    model: Any,
    prompt_tokens: int,
    new_tokens: int,
    advice: str = "ask for fewer (--new-tokens), or for shorter prompts",
) -> None:
    """Refuse a continuation that is longer than the positions the base was made for, with advice what to do.

    Raises:
        HeadsError: it is.
    """
    known = (getattr(model.config, name, None) for name in ("max_position_embeddings", "seq_length", "max_seq_len"))
    window = next((value for value in known if isinstance(value, int) and value > 0), WINDOW_TOKENS)
    if prompt_tokens + new_tokens > window:
        raise HeadsError(
            "a prompt and its continuation do not fit the base's positions",
            expected=f"at most {window} tokens together",
            found=f"a prompt of {prompt_tokens} and {new_tokens} new tokens",
            where=find_origin(model),
            next_step=advice,
        )


def find_origin(model: Any) -> str:
    """The place that a model was loaded from, or its kind where it comes from none."""
    return model.config.name_or_path or type(model).__name__


def check_vocabulary(model: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse tokens that the base does not have.

    Raises:
        BaseModelError: there are some.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    largest = max(max(prompt, default=0) for prompt in prompts)
    if largest >= vocab_size:
        raise BaseModelError(
            "the tokenizer does not belong to the base model",
            expected=f"token ids below {vocab_size}, the base's vocabulary",
            found=f"token id {largest}",
            where=find_origin(model),
            next_step="put the base's own tokenizer beside the weights",
        )


def _batch_by_length(
    prompts: Sequence[Sequence[int]], new_tokens: int, batch_rows: int
) -> Iterator[list[Sequence[int]]]:
    """The prompts, short ones first, in batches that cost the fewest steps.

    A batch takes new_tokens steps and one more for each token its longest prompt has over its shortest, so lengths that
    lie further apart than new_tokens are cheaper in two batches.
    """
    batch: list[Sequence[int]] = []
    for prompt in sorted(prompts, key=len):
        if batch and (len(batch) == batch_rows or len(prompt) - len(batch[0]) > new_tokens):
            yield batch
            batch = []
        batch.append(prompt)
    yield batch


def _generate(model: Any, batch: Sequence[Sequence[int]], new_tokens: int, end_ids: list[int]) -> torch.Tensor:
    """Greedy tokens with every generation setting stated: prompts, shortest first -> [rows, S + C], S of the longest.

    Each row holds its prompt, its C tokens, and behind them what it would have said next. The base's own generation
    config could hold penalties or sampling; the served engine has neither.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    shortest, longest = len(batch[0]), len(batch[-1])
    prompts = torch.tensor([[*prompt, *[IGNORED] * (longest - len(prompt))] for prompt in batch], device=model.device)
    starts = torch.tensor([len(prompt) for prompt in batch], device=model.device)
    ends = torch.tensor(end_ids, device=model.device, dtype=torch.long)
    ended = torch.zeros_like(starts, dtype=torch.bool)

    def keep_to_prompt(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A row whose prompt is not over says the prompt's next token."""
        position = input_ids.shape[1]
        if position >= longest:
            return scores
        known = prompts[:, position, None]
        forced = torch.full_like(scores, -torch.inf).scatter(1, known.clamp(min=0), 0.0)
        return torch.where(known == IGNORED, scores, forced)

    def has_ended(input_ids: torch.Tensor, scores: torch.Tensor, **options: object) -> torch.Tensor:
        """Rows whose continuation is over, for `generate` to stop when all are."""
        ended.logical_or_((input_ids.shape[1] > starts) & torch.isin(input_ids[:, -1], ends))
        return ended

    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=longest - shortest + new_tokens,
        # No token of the vocabulary: a prompt may hold end tokens, so `has_ended` is who looks for them.
        eos_token_id=model.get_output_embeddings().weight.shape[0],
        pad_token_id=0,
        repetition_penalty=1.0,
        use_cache=True,
    )
    first = prompts[:, :shortest]
    sequences = model.generate(
        first,
        attention_mask=torch.ones_like(first),
        generation_config=settings,
        logits_processor=LogitsProcessorList([keep_to_prompt]),
        stopping_criteria=StoppingCriteriaList([has_ended]),
    )
    return torch.nn.functional.pad(sequences, (0, longest + new_tokens - sequences.shape[1]))


def _last_hidden(model: Any, sequences: torch.Tensor, chunk_tokens: int = 65536) -> torch.Tensor:
    """Hidden states after the final norm, [rows, S, E], a few rows at a time."""
    rows = max(1, chunk_tokens // sequences.shape[1])
    parts = [model.base_model(input_ids=part, use_cache=False).last_hidden_state for part in sequences.split(rows)]
    return torch.cat(parts)


def _mask_after_end(tokens: torch.Tensor, end_ids: list[int]) -> torch.Tensor:
    """IGNORED behind the first end token of each row; the end token itself is kept."""
    ended = torch.isin(tokens, torch.tensor(end_ids, device=tokens.device, dtype=tokens.dtype))
    after = ended.cumsum(1) - ended.long() > 0
    return tokens.masked_fill(after, IGNORED)


def find_end_ids(model: Any) -> list[int]:
    """Every token that ends a text, by the model's generation config, else by its config."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = model.config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)
