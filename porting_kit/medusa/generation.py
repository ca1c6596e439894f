"""What a decode loop leaves behind: the tokens, where each came from, and how many each step accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from porting_kit.medusa.acceptance import PADDING, Acceptance

CONTEXT_DEPTH = -1
NO_HEAD = -1


@dataclass(frozen=True)
class TokenOrigins:
    """Where the emitted tokens of one request came from; tensors of one length.

    Args:
        step: int64, 0 for the context phase, then 1, 2, ...
        depth: int64, the depth of the tree node whose logits chose the token: -1 context, 0 root.
        head: int64, the head that had proposed the token, counted from 0; -1 for the context's token and for the bonus
            token, the base's own choice after the last confirmed draft.
        node: int64, the tree node whose logits chose the token: the nodes of one step are its accepted path.
    """

    step: torch.Tensor
    depth: torch.Tensor
    head: torch.Tensor
    node: torch.Tensor

    def phase(self, position: int) -> str:
        """`context`, `root` or `depth d`: which computation chose the token."""
        depth = int(self.depth[position])
        return {CONTEXT_DEPTH: "context", 0: "root"}.get(depth, f"depth {depth}")

    def accepted_paths(self) -> list[list[int]]:
        """Node indices of each generation step's accepted path, the root first, cut where the text ends."""
        steps = self.step[-1].item() if len(self.step) else 0
        return [self.node[self.step == step].tolist() for step in range(1, int(steps) + 1)]

    def proposer(self, position: int) -> str:
        """`head h`, or `base` for a token that no head had proposed (context and bonus)."""
        head = int(self.head[position])
        return "base" if head == NO_HEAD else f"head {head}"


@dataclass(frozen=True)
class Generation:
    """Result of a decode loop over B requests.

    Args:
        tokens: emitted token ids of each request, up to and with the first end token.
        origins: one per request, entries parallel to `tokens`.
        accepted_lengths: per request, tokens confirmed in each generation step, before any cut at the end.
        ended_by: per request, the end id that ended it, None when it ran to its limit.
        seconds: wall time of the loop.
        context_seconds: of that, until the first token was known.
        margins: per request float32, best minus second-best logit at each token; None unless asked for.
        logits: per request [tokens, V] in the model's dtype; None unless asked for.
    """

    tokens: list[list[int]]
    origins: list[TokenOrigins]
    accepted_lengths: list[list[int]]
    ended_by: list[int | None]
    seconds: float
    context_seconds: float
    margins: list[torch.Tensor] | None = None
    logits: list[torch.Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens emitted by all requests, the context phase's included."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def num_steps(self) -> int:
        """Generation steps, summed over the requests."""
        return sum(len(lengths) for lengths in self.accepted_lengths)

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per request and generation step, the context phase left out; 0 without a step."""
        return (self.num_tokens - len(self.tokens)) / self.num_steps if self.num_steps else 0.0

    @property
    def accepted_by_depth(self) -> list[float]:
        """Share of steps in which at least 1, 2, ... drafts were confirmed."""
        lengths = torch.tensor([length for row in self.accepted_lengths for length in row])
        if not len(lengths):
            return []
        return [float((lengths > depth).double().mean()) for depth in range(1, int(lengths.max()))]


class StepLog:
    """Collects the tensors of each step on the device; `finish` sorts them into requests once.

    Args:
        batch_size: B, requests at the start.
        width: A, most tokens a step can emit.
        vocab_size: V, columns of the logits that count.
        keep_margins: gather the two best logits of each emitted token.
        keep_logits: gather the whole logits of each emitted token.
    """

    def __init__(self, batch_size: int, width: int, vocab_size: int, *, keep_margins: bool, keep_logits: bool) -> None:
        self.batch_size = batch_size
        self.width = width
        self.vocab_size = vocab_size
        self.keep_margins = keep_margins
        self.keep_logits = keep_logits
        self.steps: list[tuple[torch.Tensor, Acceptance, torch.Tensor]] = []
        self.margins: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def add(self, requests: torch.Tensor, accepted: Acceptance, emitted: torch.Tensor, logits: torch.Tensor) -> None:
        """One step.

        Args:
            requests: int64 [b], which requests the rows of this step are.
            accepted: what the step confirmed, [b, A].
            emitted: int64 [b], how many of those tokens count; 0 for a request that had ended.
            logits: [b, N, Vp].
        """
        self.steps.append((requests, accepted, emitted))
        if self.keep_margins or self.keep_logits:
            rows = accepted.rows.clamp(min=0)
            chosen = logits[torch.arange(len(rows), device=rows.device)[:, None], rows, : self.vocab_size]
            if self.keep_margins:
                best = chosen.float().topk(2, dim=-1).values
                self.margins.append(best[..., 0] - best[..., 1])
            if self.keep_logits:
                self.logits.append(chosen)

    def finish(self, end_ids: Sequence[int], *, seconds: float, context_seconds: float) -> Generation:
        """Sort everything by request; called once."""
        shape = (len(self.steps), self.batch_size)
        tokens, nodes = torch.full((*shape, self.width), PADDING), torch.full((*shape, self.width), PADDING)
        emitted, accepted = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        row_of = torch.zeros(shape, dtype=torch.long)
        for step, (requests, confirmed, counts) in enumerate(self.steps):
            requests = requests.cpu()
            tokens[step, requests, : confirmed.tokens.shape[1]] = confirmed.tokens.cpu()
            nodes[step, requests, : confirmed.rows.shape[1]] = confirmed.rows.cpu()
            accepted[step, requests], emitted[step, requests] = confirmed.lengths.cpu(), counts.cpu()
            row_of[step, requests] = torch.arange(len(requests))
        slot = torch.arange(self.width)
        valid = slot < emitted[..., None]  # [steps, B, A]
        request_tokens = [tokens[:, b][valid[:, b]].tolist() for b in range(self.batch_size)]
        return Generation(
            tokens=request_tokens,
            origins=[_origins(valid[:, b], accepted[:, b], nodes[:, b]) for b in range(self.batch_size)],
            accepted_lengths=[accepted[1:, b][emitted[1:, b] > 0].tolist() for b in range(self.batch_size)],
            ended_by=[row[-1] if row[-1] in end_ids else None for row in request_tokens],
            seconds=seconds,
            context_seconds=context_seconds,
            margins=self._by_request(self.margins, row_of, emitted) if self.keep_margins else None,
            logits=self._by_request(self.logits, row_of, emitted) if self.keep_logits else None,
        )

    def _by_request(self, kept: list[torch.Tensor], row_of: torch.Tensor, emitted: torch.Tensor) -> list[torch.Tensor]:
        """Concatenate, for each request, the first `emitted` entries of its row in every step."""
        counts = emitted.tolist()
        rows = row_of.tolist()
        return [
            torch.cat([kept[step][rows[step][b], : counts[step][b]] for step in range(len(kept)) if counts[step][b]])
            for b in range(self.batch_size)
        ]


def _origins(valid: torch.Tensor, accepted: torch.Tensor, nodes: torch.Tensor) -> TokenOrigins:
    """Origins of one request's tokens from bool [steps, A], int64 [steps] and int64 [steps, A]."""
    step, slot = valid.nonzero(as_tuple=True)
    in_context = step == 0
    depth = torch.where(in_context, CONTEXT_DEPTH, slot)
    proposed = ~in_context & (slot < accepted[step] - 1)
    return TokenOrigins(step=step, depth=depth, head=torch.where(proposed, slot, NO_HEAD), node=nodes[valid])
