"""The decode loop: plain greedy, and Medusa with a tree, over any model that keeps its own key/value cache.

Both are the same loop, plain greedy being the tree that has a root only, so that a difference between the two can only
come from the model. Requests have unequal lengths and unequal progress; those that have ended emit nothing more and,
where the cache can be narrowed, leave the batch. Everything per token is a tensor operation over the batch; the results
are sorted out once, after the last step. Greedy only: sampling is not offered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from porting_kit.errors import EmulatorError
from porting_kit.medusa.acceptance import PADDING, Acceptance, accept_greedy, cut_at_end, draft_tokens, top_tokens
from porting_kit.medusa.generation import Generation, StepLog
from porting_kit.medusa.tree import MedusaTree

ROOT_ONLY = MedusaTree(nodes=((),), listed=(), name="root only")


class Cache(Protocol):
    """Keys and values of a batch. An optional `select(requests)`, the cache of some requests only, is used if there."""

    lengths: torch.Tensor

    def keep(self, rows: torch.Tensor) -> None:
        """Move rows past + rows[b, i] to past + i, -1 being none, and advance `lengths` by their count."""


class Output(Protocol):
    """Logits [B, Vp] (prefill) or [B, N, Vp] (decode); Medusa logits with a leading M, None without heads."""

    logits: torch.Tensor
    medusa_logits: torch.Tensor | None


class DecodableModel(Protocol):
    """What the loop asks of a model; the emulator's models satisfy it, and so does a plain PyTorch model in a test."""

    config: Mapping[str, Any]
    num_medusa_heads: int

    def new_cache(self, batch_size: int, capacity_tokens: int) -> Cache:
        """An empty cache for `batch_size` requests of at most `capacity_tokens`."""

    def prefill(self, prompts: Sequence[torch.Tensor], cache: Cache) -> Output:
        """Context phase; logits at the last token of each prompt."""

    def decode(
        self,
        tokens: torch.Tensor,
        cache: Cache,
        *,
        position_offsets: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
    ) -> Output:
        """Generation phase over [B, N] tokens; without offsets and mask N is 1."""


def generate_greedy(
    model: DecodableModel,
    prompts: Sequence[torch.Tensor | Sequence[int]],
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    *,
    keep_margins: bool = False,
    keep_logits: bool = False,
) -> Generation:
    """One token a step, no tree, no heads. Arguments and result as for `generate_medusa`."""
    return _generate(model, ROOT_ONLY, prompts, max_new_tokens, end_ids, keep_margins, keep_logits)


def generate_medusa(
    model: DecodableModel,
    tree: MedusaTree,
    prompts: Sequence[torch.Tensor | Sequence[int]],
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    *,
    keep_margins: bool = False,
    keep_logits: bool = False,
) -> Generation:
    """Medusa decoding: draft a tree, verify it in one step, keep the longest confirmed path.

    Args:
        model: a model with at least `tree.depth` heads.
        tree: the tree of every step.
        prompts: token ids of each request, any lengths.
        max_new_tokens: tokens each request may emit.
        end_ids: every id that ends a text; the text is cut after the first one, wherever in an accepted run it stands.
        keep_margins: keep the logit gap between the best and the second token at each emitted token.
        keep_logits: keep the logits [V] that decided each emitted token, in the model's dtype.

    Raises:
        EmulatorError: no prompt, an empty prompt, or `max_new_tokens` below 1.
        TreeError: more levels than heads.
    """
    if model.num_medusa_heads == 0:
        raise EmulatorError(
            "Medusa decoding was asked of a model without heads",
            expected=f"a model with at least {tree.depth} heads",
            found="num_medusa_heads 0",
            next_step="Build the model from a checkpoint that holds medusa_heads.*, with the patched class.",
        )
    return _generate(model, tree, prompts, max_new_tokens, end_ids, keep_margins, keep_logits)


@torch.inference_mode()
def _generate(
    model: DecodableModel,
    tree: MedusaTree,
    prompts: Sequence[torch.Tensor | Sequence[int]],
    max_new_tokens: int,
    end_ids: Sequence[int],
    keep_margins: bool,
    keep_logits: bool,
) -> Generation:
    started = time.perf_counter()
    prompts = _checked_prompts(prompts, max_new_tokens, getattr(model, "device", None))
    vocab_size = model.config["vocab_size"]
    cache = model.new_cache(len(prompts), max(len(prompt) for prompt in prompts) + max_new_tokens + tree.num_nodes)
    log = StepLog(len(prompts), tree.depth + 1, vocab_size, keep_margins=keep_margins, keep_logits=keep_logits)

    output = model.prefill(prompts, cache)
    accepted = _accept_context(output.logits, vocab_size)
    step_inputs = _step_inputs(tree, output.logits.device)
    requests = torch.arange(len(prompts), device=output.logits.device)
    wanted = torch.full_like(requests, max_new_tokens)
    running = torch.ones_like(requests, dtype=torch.bool)
    logits, medusa_logits = output.logits[:, None], output.medusa_logits
    while True:
        emitted, ended = cut_at_end(accepted.tokens, accepted.lengths, end_ids, wanted)
        log.add(requests, accepted, emitted * running, logits)
        wanted = wanted - emitted * running
        running = running & ~ended
        if not running.any():
            return log.finish(end_ids, seconds=time.perf_counter() - started)
        roots = accepted.last_tokens[:, None]
        drafts = [draft_tokens(medusa_logits, tree, vocab_size)] if tree.num_drafts else []
        nodes = torch.cat([roots, *drafts], dim=1)
        if hasattr(cache, "select") and not running.all():
            cache = cache.select(running.nonzero()[:, 0])
            requests, wanted, nodes, running = (x[running] for x in (requests, wanted, nodes, running))
        output = model.decode(nodes, cache, **step_inputs)
        logits = output.logits
        accepted = accept_greedy(nodes, top_tokens(logits, vocab_size), tree)
        cache.keep(accepted.rows.masked_fill(~running[:, None], PADDING))
        medusa_logits = _at_rows(output.medusa_logits, accepted.last_rows)


def _accept_context(logits: torch.Tensor, vocab_size: int) -> Acceptance:
    """The context phase confirms one token, without a tree."""
    tokens = top_tokens(logits, vocab_size)[:, None]
    return Acceptance(rows=torch.zeros_like(tokens), tokens=tokens, lengths=torch.ones_like(tokens[:, 0]))


def _step_inputs(tree: MedusaTree, device: torch.device) -> dict[str, torch.Tensor | None]:
    """Without drafts a step is ordinary generation, which takes neither offsets nor mask."""
    if not tree.num_drafts:
        return {"position_offsets": None, "packed_mask": None}
    return {"position_offsets": tree.position_offsets.to(device), "packed_mask": tree.packed_mask.to(device)}


def _at_rows(medusa_logits: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """[M, B, N, Vp] to [M, B, Vp] at one node per request."""
    if medusa_logits is None:
        return None
    return medusa_logits[:, torch.arange(len(rows), device=rows.device), rows]


def _checked_prompts(
    prompts: Sequence[torch.Tensor | Sequence[int]], max_new_tokens: int, device: torch.device | None
) -> list[torch.Tensor]:
    tensors = [torch.as_tensor(prompt, dtype=torch.long, device=device) for prompt in prompts]
    empty = [index for index, prompt in enumerate(tensors) if prompt.ndim != 1 or not len(prompt)]
    if not tensors or empty or max_new_tokens < 1:
        raise EmulatorError(
            "There is nothing to generate",
            expected="at least one prompt, each a row of token ids, and max_new_tokens of 1 or more",
            found=f"{len(tensors)} prompts, {len(empty)} unusable, max_new_tokens {max_new_tokens}",
            items=[f"prompt {index}" for index in empty],
        )
    return tensors
