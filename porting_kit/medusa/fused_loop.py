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
NOT_FORESEEN = -1


class Decoder(Protocol):
    """Whole steps of one batch size and tree; the emulator's `decoder.Decoder` says what each does."""

    cache: Any
    memo: dict[str, Any]
    foreseen: tuple[int, ...]

    def end_for(self, past_tokens: int) -> int: ...
    def foresee(self, nodes: Sequence[int]) -> None: ...
    def check(self, ids: torch.Tensor) -> None: ...
    def step(self, ids: torch.Tensor, pasts: torch.Tensor, end: int) -> tuple[Any, Any, torch.Tensor | None]: ...
    def heads(self, hidden: torch.Tensor, is_known: torch.Tensor | None = None) -> torch.Tensor: ...
    def keep(self, rows: torch.Tensor, pasts: torch.Tensor) -> None: ...
    def capture(self, function: Callable[[], None]) -> Callable[[], None]: ...
    def write_down(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]: ...


class PlacedTree:
    """The tensors of a tree on a device, under the names that `acceptance` reads."""

    def __init__(self, tree: MedusaTree, device: torch.device) -> None:
        self.depth, self.num_drafts = tree.depth, tree.num_drafts
        self.top_k_per_level = tree.top_k_per_level if tree.num_drafts else ()
        self.paths, self.tree_ids = tree.paths.to(device), tree.tree_ids.to(device)


class FusedLoop:
    """The state of a loop, in tensors that stay where they are, and the steps over it.

    All of it is int64: the `nodes` of the next step [B, N], and the `progress`, which the host reads: `pasts` [B, 1],
    tokens `emitted` [B], whether a request is `running` [B], and the `step_number` [1].

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

        # What a step leaves to the next one lies together, so that one copy keeps it. Kernels are compiled for inputs
        # that start at 16 bytes: a gap follows an odd number of nodes.
        self._gap = B * N % 2
        self.state = zeros(B * N + self._gap + 3 * B + 1)
        self.nodes, self.progress = self.state[: B * N].view(B, N), self.state[B * N + self._gap :]
        pasts, self.emitted, self.running, self.step_number = self.progress.split((B, B, B, 1))
        self.pasts = pasts.view(B, 1)
        self.wanted = zeros(B)
        self.end_ids = torch.full((MAX_END_IDS,), NO_TOKEN, device=device)
        # Place of each node among the foreseen ones, -1 for others.
        places = {node: place for place, node in enumerate(decoder.foreseen)}
        self.places = torch.tensor([places.get(node, NOT_FORESEEN) for node in range(N)], device=device)
        # Rows and tokens of the accepted nodes, their count, and how many of them are emitted.
        self.logged = zeros(steps, B, 2 * A + 2)
        self._judge: Callable[..., Any] | None = None
        self._draft: Callable[..., Any] | None = None
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
        self.running.fill_(1)
        self.end_ids.fill_(NO_TOKEN)
        self.end_ids[: len(end_ids)] = torch.tensor(list(end_ids), dtype=torch.int64)
        self.step_number.zero_()

    def run(self) -> None:
        """Steps until every request has ended."""
        B = self._decoder.cache.batch_size
        progress = self.progress.tolist()
        while any(progress[2 * B : 3 * B]):
            end = self._decoder.end_for(max(progress[:B]))
            if end not in self._captured:
                self._captured[end] = self._capture(end)
            self._captured[end]()
            progress = self.progress.tolist()

    def _capture(self, end: int) -> Callable[[], None]:
        """Recording runs the step, so the state is put back afterwards; rows behind the past do not count."""
        before = self.state.clone()
        captured = self._decoder.capture(lambda: self._step(end))
        self.state.copy_(before)
        return captured

    def _step(self, end: int) -> None:
        decoder = self._decoder
        logits, hidden, foreseen = decoder.step(self.nodes, self.pasts, end)
        state = (self.nodes, self.progress, self.wanted, self.end_ids, self.places)
        if self._judge is None:
            self._judge = decoder.write_down(self.judge, (logits, hidden, *state))
        kept, last, place, is_known, entry, *after = self._judge(logits, hidden, *state)
        self.logged.index_copy_(0, self.step_number, entry.unsqueeze(0))
        if self._tree.num_drafts:
            decoder.keep(kept, self.pasts)
            if foreseen is None:
                given = (decoder.heads(last), *after)
            else:
                given = (decoder.heads(last, is_known), *after, foreseen, place, is_known)
            if self._draft is None:
                self._draft = decoder.write_down(self.draft, given)
            after = [self._draft(*given)]
        torch.cat(after, out=self.state)

    def judge(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        nodes: torch.Tensor,
        progress: torch.Tensor,
        wanted: torch.Tensor,
        end_ids: torch.Tensor,
        places: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """What a step confirms and where it leaves the requests; changes nothing.

        Returns:
            Rows to keep [B, A], hidden states at the last accepted nodes [B, E], the places of these among the foreseen
            nodes [B], whether all are (int32 [1]), the log's entry, and what the next step starts with: roots [B] and
            the progress, behind its gap.
        """
        B = len(nodes)
        accepted = accept_greedy(nodes, top_tokens(logits, self._vocab_size), self._tree)
        pasts, emitted, running, step_number = progress.split((B, B, B, 1))
        counts, ended = cut_at_end(accepted.tokens, accepted.lengths, end_ids, (wanted - emitted).clamp(min=1))
        counts = counts * running
        numbers = torch.stack((accepted.lengths, counts), dim=1)
        entry = torch.cat((accepted.rows, accepted.tokens, numbers), dim=1)
        kept = accepted.rows.masked_fill((running == 0).unsqueeze(1), PADDING)
        last = hidden[torch.arange(B, device=hidden.device), accepted.last_rows]
        place = places[accepted.last_rows]
        is_known = (place != NOT_FORESEEN).all(0, keepdim=True).to(torch.int32)
        gap = (torch.zeros_like(step_number),) * self._gap
        pasts, running = pasts + accepted.lengths * running, running * ~ended
        after = torch.cat((*gap, pasts, emitted + counts, running, step_number + 1))
        return kept, last, place, is_known, entry, accepted.last_tokens, after

    def draft(
        self,
        guesses: torch.Tensor,
        roots: torch.Tensor,
        progress: torch.Tensor,
        foreseen: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
        is_known: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The state that the next step starts with, from the heads' logits [M, B, Vp] and what `judge` gives of it.

        Where every request ended at a foreseen node (place [B], is_known int32 [1] not 0), the foreseen logits
        [M, B, F, Vp] count in their stead.
        """
        if foreseen is not None:
            chosen = foreseen[:, torch.arange(len(roots), device=roots.device), place.clamp(min=0)]
            guesses = torch.where(is_known != 0, chosen, guesses)
        drafts = draft_tokens(guesses, self._tree, self._vocab_size)
        return torch.cat((torch.cat((roots.unsqueeze(1), drafts), dim=1).flatten(), progress))

    def log(self, log: StepLog) -> None:
        """Hand over the steps that were taken."""
        requests, width = torch.arange(len(self.running)), self._tree.depth + 1
        for entry in self.logged[: int(self.step_number)].cpu():
            rows, tokens, lengths, counts = entry.split((width, width, 1, 1), dim=1)
            accepted = Acceptance(rows=rows, tokens=tokens, lengths=lengths[:, 0])
            log.add(requests, accepted, counts[:, 0], rows)


def likely_last(tree: MedusaTree) -> list[int]:
    """Nodes in the order of how likely a step's accepted path ends there: by their candidates' ranks along the path."""
    return sorted(range(tree.num_nodes), key=lambda node: sum(rank + 1 for rank in tree.nodes[node]))


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
        max_new_tokens: at least 2.
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
    if bool(torch.isin(first.cpu(), torch.tensor(list(end_ids), dtype=first.dtype)).any()):
        return None
    context_seconds = time.perf_counter() - started
    drafts = draft_tokens(output.medusa_logits, tree, vocab_size) if tree.num_drafts else None
    if tree.num_drafts:
        decoder.foresee(likely_last(tree))
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
    return log.finish(end_ids, seconds=time.perf_counter() - started, context_seconds=context_seconds)
