"""The decode loop: plain greedy, and Medusa with a tree, over any model that keeps its own key/value cache.

Both are the same loop, plain greedy being the tree that has a root only, so that a difference between the two can only
come from the model; `replay` is that loop again, made to emit given tokens. Requests have unequal lengths and unequal
progress; those that have ended emit nothing more and, where the cache can be narrowed, leave the batch. Everything per
token is a tensor operation over the batch; the results are sorted out once, after the last step. Greedy only: sampling
is not offered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from porting_kit.errors import EmulatorError
from porting_kit.medusa.acceptance import PADDING, Acceptance, accept_greedy, cut_at_end, draft_tokens, top_tokens
from porting_kit.medusa.fused_loop import MAX_END_IDS, decode_fused
from porting_kit.medusa.generation import Generation, StepLog
from porting_kit.medusa.tree import MedusaTree
from porting_kit.medusa.tree_limits import MAX_DRAFT_NODES

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
    return _decode(model, ROOT_ONLY, prompts, _Greedy(max_new_tokens, tuple(end_ids)), keep_margins, keep_logits)


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
    _check_heads(model, tree)
    return _decode(model, tree, prompts, _Greedy(max_new_tokens, tuple(end_ids)), keep_margins, keep_logits)


def replay(
    model: DecodableModel,
    prompts: Sequence[torch.Tensor | Sequence[int]],
    tokens: Sequence[Sequence[int]],
    tree: MedusaTree | None = None,
) -> Generation:
    """Make the model emit given tokens, and keep what it thought at each: one wrong token does not spoil the next.

    Each step drafts as usual and accepts the longest path that follows `tokens`, so the phases are those of an engine
    that emitted them.

    Args:
        model: any model; heads are needed with a tree only.
        prompts: token ids of each request.
        tokens: at least one token per request.
        tree: None replays one token a step.

    Returns:
        A generation whose tokens are `tokens`, with `logits` kept.
    """
    if tree is not None and tree.num_drafts:
        _check_heads(model, tree)
    return _decode(model, tree or ROOT_ONLY, prompts, _Forced(tokens), keep_margins=False, keep_logits=True)


class _Greedy:
    """Take the base's best token, to a limit or an end token."""

    def __init__(self, max_new_tokens: int, end_ids: tuple[int, ...]) -> None:
        self.end_ids = end_ids
        self.longest = max_new_tokens

    def limits(self, batch_size: int) -> torch.Tensor:
        return torch.full((batch_size,), self.longest)

    def choose(self, logits: torch.Tensor, vocab_size: int, requests: Any, emitted: Any, depths: Any) -> torch.Tensor:
        return top_tokens(logits, vocab_size)


class _Forced:
    """Take the given tokens, whatever the logits say; past their end, a token that no draft equals."""

    end_ids = ()

    def __init__(self, tokens: Sequence[Sequence[int]]) -> None:
        self.lengths = [len(row) for row in tokens]
        self.longest = max(self.lengths) if all(self.lengths) else 0  # 0 is refused with the prompts
        self.tokens = torch.full((len(tokens), self.longest + MAX_DRAFT_NODES), 2 * PADDING)
        for index, row in enumerate(tokens):
            self.tokens[index, : len(row)] = torch.as_tensor(row)

    def limits(self, batch_size: int) -> torch.Tensor:
        return torch.tensor(self.lengths)

    def choose(
        self, logits: torch.Tensor, vocab_size: int, requests: torch.Tensor, emitted: torch.Tensor, depths: torch.Tensor
    ) -> torch.Tensor:
        return self.tokens.to(logits.device)[requests[:, None], emitted[:, None] + depths]


@torch.inference_mode()
def _decode(
    model: DecodableModel,
    tree: MedusaTree,
    prompts: Sequence[torch.Tensor | Sequence[int]],
    chooser: _Greedy | _Forced,
    keep_margins: bool,
    keep_logits: bool,
) -> Generation:
    started = time.perf_counter()
    prompts = _checked_prompts(prompts, chooser.longest, getattr(model, "device", None))
    vocab_size = model.config["vocab_size"]
    longest = max(len(prompt) for prompt in prompts) + chooser.longest
    if isinstance(chooser, _Greedy) and not keep_margins and not keep_logits:
        fused = _decode_fused(model, tree, prompts, longest, chooser)
        if fused is not None:
            return fused
    # A last step may confirm more than was wanted, and an idle request still takes part in the steps of the others.
    cache = model.new_cache(len(prompts), longest + tree.depth + tree.num_nodes)
    log = StepLog(len(prompts), tree.depth + 1, vocab_size, keep_margins=keep_margins, keep_logits=keep_logits)

    output = model.prefill(prompts, cache)
    logits, medusa_logits = output.logits[:, None], output.medusa_logits
    step_inputs, depths = _step_inputs(tree, logits.device), tree.position_offsets.to(logits.device).long()
    accept = getattr(model, "accept_drafts", accept_greedy)  # a model whose runtime accepts in another way says how
    requests = torch.arange(len(prompts), device=logits.device)
    emitted, wanted = torch.zeros_like(requests), chooser.limits(len(prompts)).to(logits.device)
    running = torch.ones_like(requests, dtype=torch.bool)
    # The context phase confirms one token, as a step whose tree is its root.
    first = chooser.choose(logits, vocab_size, requests, emitted, depths[:1])
    accepted = Acceptance(rows=torch.zeros_like(first), tokens=first, lengths=torch.ones_like(requests))
    context_seconds = 0.0
    while True:
        counts, ended = cut_at_end(accepted.tokens, accepted.lengths, chooser.end_ids, wanted - emitted)
        counts = counts * running
        log.add(requests, accepted, counts, logits)
        emitted = emitted + counts
        running = running & ~ended
        is_done = not running.any()  # waits for the device
        context_seconds = context_seconds or time.perf_counter() - started
        if is_done:
            seconds = time.perf_counter() - started
            return log.finish(chooser.end_ids, seconds=seconds, context_seconds=context_seconds)
        roots = accepted.last_tokens[:, None].clamp(min=0)  # an idle request may have run out of forced tokens
        drafts = [draft_tokens(medusa_logits, tree, vocab_size)] if tree.num_drafts else []
        nodes = torch.cat([roots, *drafts], dim=1)
        if hasattr(cache, "select") and not running.all():
            cache = cache.select(running.nonzero()[:, 0])
            requests, emitted, wanted, nodes, running = (
                x[running] for x in (requests, emitted, wanted, nodes, running)
            )
        output = model.decode(nodes, cache, **step_inputs)
        logits = output.logits
        accepted = accept(nodes, chooser.choose(logits, vocab_size, requests, emitted, depths), tree)
        cache.keep(accepted.rows.masked_fill(~running[:, None], PADDING))
        medusa_logits = _at_rows(output.medusa_logits, accepted.last_rows)


def _decode_fused(
    model: DecodableModel, tree: MedusaTree, prompts: list[torch.Tensor], longest: int, chooser: _Greedy
) -> Generation | None:
    """The same with whole steps, where the model has them; None where the plain loop has to run."""
    if not hasattr(model, "open_decoder") or len(chooser.end_ids) > MAX_END_IDS or chooser.longest == 1:
        return None
    inputs = (tree.position_offsets, tree.packed_mask) if tree.num_drafts else (None, None)
    decoder = model.open_decoder(len(prompts), longest + tree.depth + tree.num_nodes, *inputs)
    if decoder is None:
        return None
    try:
        return decode_fused(model, decoder, tree, prompts, chooser.longest, chooser.end_ids)
    except (RuntimeError, EmulatorError) as reason:
        # Rotation that depends on the length cannot be written down; any other error comes again from the plain loop.
        model.decoders.give_up(decoder, reason)
        return None


def _check_heads(model: DecodableModel, tree: MedusaTree) -> None:
    if model.num_medusa_heads == 0:
        raise EmulatorError(
            "Medusa decoding was asked of a model without heads",
            expected=f"a model with at least {tree.depth} heads",
            found="num_medusa_heads 0",
            next_step="Build the model from a checkpoint that holds medusa_heads.*, with the patched class.",
        )


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
            next_step="Give a prompt, and a number of new tokens.",
        )
    return tensors
