"""The decode loop with no Python of a model in a step: draft, verify, accept, keep and log are one run of operations.

For models that offer whole steps as such (`open_decoder`). On a GPU the run is a CUDA graph; the host launches it and
reads two numbers back. Emits what the plain loop of `decoding` emits; margins and logits are that loop's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from porting_kit.medusa.acceptance import PADDING, Acceptance, accept_greedy, cut_at_end, draft_tokens, top_tokens
from porting_kit.medusa.generation import Generation, StepLog
from porting_kit.medusa.tree import MedusaTree

MAX_END_IDS = 16
NO_TOKEN = -2
"""Equals no token and no padding."""


class Decoder(Protocol):
    """Whole steps of one batch size and tree; the emulator's `decoder.Decoder` says what each does."""

    cache: Any
    memo: dict[str, Any]

    def end_for(self, past_tokens: int) -> int: ...
    def check(self, ids: torch.Tensor) -> None: ...
    def step(self, ids: torch.Tensor, pasts: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]: ...
    def heads(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def keep(self, rows: torch.Tensor, pasts: torch.Tensor) -> None: ...
    def capture(self, function: Callable[[], None]) -> Callable[[], None]: ...


class PlacedTree:
    """The tensors of a tree on a device, under the names that `acceptance` reads."""

    def __init__(self, tree: MedusaTree, device: torch.device) -> None:
        self.depth, self.num_drafts = tree.depth, tree.num_drafts
        self.top_k_per_level = tree.top_k_per_level if tree.num_drafts else ()
        self.paths, self.tree_ids = tree.paths.to(device), tree.tree_ids.to(device)


class FusedLoop:
    """The state of a loop, in tensors that stay where they are, and the steps over it.

    Args:
        decoder: of the model.
        tree: the tree of every step; the root alone is plain greedy.
        vocab_size: V.
        device: the model's.
    """

    def __init__(self, decoder: Decoder, tree: MedusaTree, vocab_size: int, device: torch.device) -> None:
        self._decoder, self._vocab_size = decoder, vocab_size
        self._tree = PlacedTree(tree, device)
        B, N, A = decoder.cache.batch_size, tree.num_nodes, tree.depth + 1
        steps = decoder.cache.capacity

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.nodes, self.pasts, self.emitted, self.wanted = zeros(B, N), zeros(B, 1), zeros(B), zeros(B)
        self.running = torch.ones(B, dtype=torch.bool, device=device)
        self.end_ids = torch.full((MAX_END_IDS,), NO_TOKEN, device=device)
        self.step_number = zeros(1)
        # [running requests, longest past]: all that the host reads in a step.
        self.progress = zeros(2)
        self.log_rows, self.log_tokens = zeros(steps, B, A), zeros(steps, B, A)
        self.log_lengths, self.log_counts = zeros(steps, B), zeros(steps, B)
        self._captured: dict[int, Callable[[], None]] = {}

    def start(self, first: torch.Tensor, drafts: torch.Tensor | None, limit: int, end_ids: Sequence[int]) -> None:
        """Take up the requests after their context phase.

        Args:
            first: int64 [B], the token that the context phase chose.
            drafts: int64 [B, N - 1]; None without a tree.
            limit: tokens each request may still emit after the first, at least 1.
            end_ids: ids that end a text; no request may have ended with `first`.
        """
        self.nodes.copy_(first.unsqueeze(1) if drafts is None else torch.cat([first.unsqueeze(1), drafts], dim=1))
        self.pasts.copy_(self._decoder.cache.lengths.unsqueeze(1))
        self.emitted.zero_()
        self.wanted.fill_(limit)
        self.running.fill_(True)
        self.end_ids.fill_(NO_TOKEN)
        self.end_ids[: len(end_ids)] = torch.tensor(list(end_ids), dtype=torch.int64)
        self.step_number.zero_()

    def run(self) -> None:
        """Steps until every request has ended."""
        longest, running = int(self._decoder.cache.lengths.max()), 1
        while running:
            end = self._decoder.end_for(longest)
            if end not in self._captured:
                self._captured[end] = self._capture(end)
            self._captured[end]()
            running, longest = self.progress.tolist()

    def _capture(self, end: int) -> Callable[[], None]:
        """Recording runs the step, so the state is put back afterwards; rows behind the past do not count."""
        state = (self.nodes, self.pasts, self.emitted, self.running, self.step_number)
        before = [tensor.clone() for tensor in state]
        captured = self._decoder.capture(lambda: self._step(end))
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        return captured

    def _step(self, end: int) -> None:
        tree, decoder = self._tree, self._decoder
        logits, hidden = decoder.step(self.nodes, self.pasts, end)
        accepted = accept_greedy(self.nodes, top_tokens(logits, self._vocab_size), tree)
        left = (self.wanted - self.emitted).clamp(min=1)
        counts, ended = cut_at_end(accepted.tokens, accepted.lengths, self.end_ids, left)
        counts = counts * self.running
        for log, value in (
            (self.log_rows, accepted.rows),
            (self.log_tokens, accepted.tokens),
            (self.log_lengths, accepted.lengths),
            (self.log_counts, counts),
        ):
            log.index_copy_(0, self.step_number, value.unsqueeze(0))
        if tree.num_drafts:
            decoder.keep(accepted.rows.masked_fill(~self.running.unsqueeze(1), PADDING), self.pasts)
        self.pasts += (accepted.lengths * self.running).unsqueeze(1)
        self.emitted += counts
        self.running &= ~ended
        self.step_number += 1
        nodes = [accepted.last_tokens.unsqueeze(1)]
        if tree.num_drafts:
            requests = torch.arange(len(hidden), device=hidden.device)
            nodes.append(draft_tokens(decoder.heads(hidden[requests, accepted.last_rows]), tree, self._vocab_size))
        self.nodes.copy_(torch.cat(nodes, dim=1))
        self.progress.copy_(torch.stack([self.running.sum(), self.pasts.max()]))

    def log(self, log: StepLog) -> None:
        """Hand over the steps that were taken."""
        steps, requests = int(self.step_number), torch.arange(len(self.running))
        logged = (self.log_rows, self.log_tokens, self.log_lengths, self.log_counts)
        for rows, tokens, lengths, counts in zip(*(tensor[:steps].cpu() for tensor in logged), strict=True):
            log.add(requests, Acceptance(rows=rows, tokens=tokens, lengths=lengths), counts, rows)


@torch.inference_mode()
def decode_fused(
    model: Any,
    decoder: Decoder,
    tree: MedusaTree,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    end_ids: Sequence[int],
) -> Generation | None:
    """Decode with whole steps.

    Args:
        model: the model that opened `decoder`.
        decoder: for this batch size and tree.
        tree: the tree.
        prompts: token ids of each request on the model's device.
        max_new_tokens: at least 1.
        end_ids: at most MAX_END_IDS.

    Returns:
        The generation; None when a request ends in the context phase, which leaves the rest to the plain loop.

    Raises:
        RuntimeError: the decoder's program cannot be used.
    """
    started = time.perf_counter()
    vocab_size = model.config["vocab_size"]
    output = model.prefill(prompts, decoder.cache)
    first = top_tokens(output.logits, vocab_size)
    if max_new_tokens == 1 or bool(torch.isin(first.cpu(), torch.tensor(list(end_ids), dtype=first.dtype)).any()):
        return None
    drafts = draft_tokens(output.medusa_logits, tree, vocab_size) if tree.num_drafts else None
    decoder.check(first.unsqueeze(1) if drafts is None else torch.cat([first.unsqueeze(1), drafts], dim=1))
    loop = decoder.memo.get(tree.nodes)
    if loop is None:
        loop = decoder.memo[tree.nodes] = FusedLoop(decoder, tree, vocab_size, first.device)
    loop.start(first, drafts, max_new_tokens - 1, end_ids)
    loop.run()
    log = StepLog(len(prompts), tree.depth + 1, vocab_size, keep_margins=False, keep_logits=False)
    context = Acceptance(
        rows=torch.zeros(len(prompts), 1, dtype=torch.int64),
        tokens=first.cpu().unsqueeze(1),
        lengths=torch.ones(len(prompts), dtype=torch.int64),
    )
    log.add(torch.arange(len(prompts)), context, context.lengths, context.rows)
    loop.log(log)
    return log.finish(end_ids, seconds=time.perf_counter() - started)
