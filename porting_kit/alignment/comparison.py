"""The port's runs against each other: Medusa and plain greedy, batch 1, 2 and the largest, once more the same.

Each run is judged by the oracle; here runs are laid side by side. Two runs may part ways at a near-tie, after which
their histories differ and nothing more is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.alignment.oracle import JudgedText, Status
from porting_kit.medusa.decoding import DecodableModel, generate_greedy, generate_medusa
from porting_kit.medusa.generation import Generation, TokenOrigins
from porting_kit.medusa.tree import MedusaTree


@dataclass(frozen=True)
class DecodeRun:
    """One way of running all prompts.

    Args:
        name: `greedy`, `medusa batch 2`, `repeat`, ...
        batch_size: requests per call.
        generations: one per call.
        groups: which prompts each call had.
    """

    name: str
    batch_size: int
    generations: tuple[Generation, ...]
    groups: tuple[tuple[int, ...], ...]

    def _in_prompt_order(self, values: Any) -> list[Any]:
        found = {
            prompt: value
            for generation, group in zip(self.generations, self.groups, strict=True)
            for prompt, value in zip(group, values(generation), strict=True)
        }
        return [found[prompt] for prompt in sorted(found)]

    @property
    def tokens(self) -> list[list[int]]:
        """Emitted ids per prompt, in prompt order."""
        return self._in_prompt_order(lambda generation: generation.tokens)

    @property
    def origins(self) -> list[TokenOrigins]:
        """Origins per prompt, in prompt order."""
        return self._in_prompt_order(lambda generation: generation.origins)

    @property
    def accepted_lengths(self) -> list[list[int]]:
        """Accepted lengths per prompt, in prompt order."""
        return self._in_prompt_order(lambda generation: generation.accepted_lengths)

    @property
    def logits(self) -> list[torch.Tensor] | None:
        """[n, V] per prompt, in prompt order; None when they were not kept."""
        if any(generation.logits is None for generation in self.generations):
            return None
        return self._in_prompt_order(lambda generation: generation.logits)

    @property
    def tokens_per_step(self) -> float:
        """Over all requests of the run."""
        steps = sum(generation.num_steps for generation in self.generations)
        tokens = sum(generation.num_tokens - len(generation.tokens) for generation in self.generations)
        return tokens / steps if steps else 0.0

    @property
    def seconds(self) -> float:
        """Wall time of all calls."""
        return sum(generation.seconds for generation in self.generations)


@dataclass(frozen=True)
class RunDifference:
    """Where two runs of one prompt part ways.

    Args:
        runs: names of the two.
        prompt: which prompt.
        position: first position that differs.
        tokens: what each emitted there; None where a run had ended.
        is_near_tie: the base holds both tokens for equal within noise.
    """

    runs: tuple[str, str]
    prompt: int
    position: int
    tokens: tuple[int | None, int | None]
    is_near_tie: bool


def group_prompts(prompts: Sequence[Sequence[int]], batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Split prompts into calls so that each call mixes short and long ones: unequal lengths find indexing faults."""
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    mixed: list[int] = []
    while by_length:
        mixed.append(by_length.pop(0))
        if by_length:
            mixed.append(by_length.pop())
    return tuple(tuple(mixed[start : start + batch_size]) for start in range(0, len(mixed), batch_size))


def run_decoding(
    model: DecodableModel,
    tree: MedusaTree | None,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    end_ids: Sequence[int],
    batch_size: int,
    *,
    name: str,
    keep_logits: bool = False,
) -> DecodeRun:
    """Run all prompts in calls of `batch_size`; a tree of None is plain greedy decoding."""
    groups = group_prompts(prompts, batch_size)
    generations = []
    for group in groups:
        chosen = [prompts[index] for index in group]
        if tree is None:
            generation = generate_greedy(model, chosen, new_tokens, end_ids, keep_logits=keep_logits)
        else:
            generation = generate_medusa(model, tree, chosen, new_tokens, end_ids, keep_logits=keep_logits)
        generations.append(generation)
    return DecodeRun(name, batch_size, tuple(generations), groups)


def compare_runs(
    names: tuple[str, str], first: Sequence[JudgedText], second: Sequence[JudgedText]
) -> list[RunDifference]:
    """First difference of each prompt between two judged runs; empty when they emitted the same tokens."""
    found = []
    for prompt, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.tokens == other.tokens:
            continue
        shared = min(len(one.tokens), len(other.tokens))
        position = next((i for i in range(shared) if one.tokens[i] != other.tokens[i]), shared)
        sides = [text for text in (one, other) if position < len(text.tokens)]
        is_near_tie = len(sides) == 2 and all(text.status[position] != Status.WRONG for text in sides)
        tokens = tuple(text.tokens[position] if position < len(text.tokens) else None for text in (one, other))
        found.append(RunDifference(names, prompt, position, tokens, is_near_tie))
    return found
