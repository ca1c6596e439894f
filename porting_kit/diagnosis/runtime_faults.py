"""Faults of the run: cache rows, accepted paths and numbers handled wrongly. Wrappers around a built model."""

from __future__ import annotations

from typing import Any

import torch

from porting_kit.diagnosis.faulty_model import FaultyModel
from porting_kit.medusa.acceptance import PADDING, Acceptance, accept_greedy
from porting_kit.medusa.tree import MedusaTree

INT8_LARGEST = 127


def leave_rows_in_place(model: Any) -> FaultyModel:
    """Lengths grow, but the accepted nodes' keys and values are not moved behind the past."""

    def stay(rows: torch.Tensor) -> torch.Tensor:
        order = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
        return torch.where(rows >= 0, order, rows)

    return FaultyModel(model, rows=stay)


def use_rows_of_first_request(model: Any) -> FaultyModel:
    """Every request moves the rows that the first one accepted, with its own count."""

    def share(rows: torch.Tensor) -> torch.Tensor:
        known = rows[:1].clamp(min=0).expand_as(rows)
        return torch.where(rows >= 0, known, rows)

    return FaultyModel(model, rows=share)


class StaleModel(FaultyModel):
    """Right the first time; when the same prompts are decoded again with a tree, logits come from a buffer that was
    not cleared."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._prompts: tuple[tuple[int, ...], ...] = ()
        self._started = False
        self._seen: set[tuple[tuple[int, ...], ...]] = set()
        self._stale = False

    def prefill(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        """Context phase."""
        self._prompts = tuple(tuple(torch.as_tensor(prompt).tolist()) for prompt in prompts)
        self._started = False
        return super().prefill(prompts, *args, **kwargs)

    def decode(self, tokens: torch.Tensor, cache: Any, **tree: Any) -> Any:
        """Generation phase."""
        if tree.get("packed_mask") is not None and not self._started:
            self._started = True
            self._stale = self._prompts in self._seen
            self._seen.add(self._prompts)
        output = super().decode(tokens, cache, **tree)
        if self._started and self._stale:
            output.logits = output.logits.roll(1, dims=-1)
        return output


class WrongBonusModel(FaultyModel):
    """The token after an accepted path is read at another node: the root, or the node behind the last accepted one.

    Args:
        model: the model.
        tree: the tree of every step.
        node: where it is read: maps the last accepted nodes, int64 [B], and N to nodes.
    """

    def __init__(self, model: Any, tree: MedusaTree, node: Any) -> None:
        super().__init__(model)
        self._tree, self._node = tree, node
        self._confirmed: Acceptance | None = None

    def decode(self, tokens: torch.Tensor, cache: Any, **tree: Any) -> Any:
        """Generation phase; the accepted path is the one that the right logits confirm."""
        output = super().decode(tokens, cache, **tree)
        self._confirmed = None
        if tree.get("packed_mask") is not None:
            chosen = output.logits[..., : int(self.config["vocab_size"])].argmax(-1)
            self._confirmed = accept_greedy(tokens, chosen, self._tree)
            last = self._confirmed.last_rows
            requests = torch.arange(len(last))
            source = self._node(last, tokens.shape[1])
            logits = output.logits.clone()
            logits[requests, last] = output.logits[requests, source]
            output.logits = logits
        return output

    def accept_drafts(self, node_tokens: torch.Tensor, target_tokens: torch.Tensor, tree: MedusaTree) -> Acceptance:
        """That path, as far as the targets follow it: a wrong bonus token may equal a draft that was not confirmed.

        Arguments as for `accept_greedy`.
        """
        if self._confirmed is None:
            return accept_greedy(node_tokens, target_tokens, tree)
        rows = self._confirmed.rows
        nodes = rows.clamp(min=0)
        targets = target_tokens.gather(1, nodes)
        follows = (node_tokens.gather(1, nodes)[:, 1:] == targets[:, :-1]) & (rows[:, 1:] != PADDING)
        lengths = 1 + follows.cumprod(-1).sum(-1)
        kept = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        return Acceptance(rows.masked_fill(~kept, PADDING), targets.masked_fill(~kept, PADDING), lengths)


class ClippedCacheModel(FaultyModel):
    """The past is kept in int8 with scale 1: whole numbers from -127 to 127."""

    def decode(self, tokens: torch.Tensor, cache: Any, **tree: Any) -> Any:
        """Generation phase over the rounded past."""
        longest = int(cache.lengths.max())
        for tensor in cache._layers.values():
            past = tensor[..., :longest, :]
            past.copy_(past.round().clamp(-INT8_LARGEST, INT8_LARGEST))
        return super().decode(tokens, cache, **tree)


class OverflownModel(FaultyModel):
    """Every logit is undefined, of which the runtime makes token 0."""

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Context phase."""
        return self._spoil(super().prefill(*args, **kwargs))

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Generation phase."""
        return self._spoil(super().decode(*args, **kwargs))

    def _spoil(self, output: Any) -> Any:
        rows = output.logits if isinstance(output.logits, list) else [output.logits]
        spoilt = []
        for row in rows:
            zero = torch.zeros_like(row)
            zero[..., 0] = 1.0
            spoilt.append(zero)
        output.logits = spoilt if isinstance(output.logits, list) else spoilt[0]
        return output


def read_bonus_at_root(last: torch.Tensor, nodes: int) -> torch.Tensor:
    """The root, whatever was accepted."""
    return torch.zeros_like(last)


def read_bonus_behind(last: torch.Tensor, nodes: int) -> torch.Tensor:
    """One node too far, as if drafts were counted from the wrong end."""
    return (last + 1).clamp(max=nodes - 1)
