"""What the Medusa heads themselves would accept: the heads in float32 on the base's hidden states, without an engine.

This judges what the token oracle cannot see: a port whose text is right although its heads are shifted, have another
activation, or were converted wrongly only takes more steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear, silu

from porting_kit.alignment.reference import Reference
from porting_kit.medusa.tree import MedusaTree


class HeadTensors(Protocol):
    """`conversion.heads.HeadSet`, as far as it matters here."""

    num_heads: int
    num_layers: int

    @property
    def own_output(self) -> bool:
        """Whether the heads bring output matrices of their own."""

    def read(self, name: str) -> torch.Tensor:
        """Values of a `medusa_heads...` tensor."""


@dataclass(frozen=True)
class ReferenceHeads:
    """Medusa heads as they were trained: residual layers with SiLU, then an output matrix.

    Args:
        layers: per head, per layer, weight [E, E] and bias [E].
        outputs: per head, [V, E].
    """

    layers: tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], ...]
    outputs: tuple[torch.Tensor, ...]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, ..., V] from hidden states [..., E]."""
        found = []
        for layers, output in zip(self.layers, self.outputs, strict=True):
            states = hidden.to(output.dtype)
            for weight, bias in layers:
                states = states + silu(linear(states, weight, bias))
            found.append(linear(states, output))
        return torch.stack(found)


def read_reference_heads(heads: HeadTensors, reference: Reference) -> ReferenceHeads:
    """The heads in the reference's dtype; those without an output matrix of their own take the base's."""
    place = {"dtype": reference.dtype, "device": reference.device}
    layers, outputs = [], []
    for head in range(heads.num_heads):
        prefix = f"medusa_heads.{head}"
        names = [f"{prefix}.medusa_layers.{layer}.linear" for layer in range(heads.num_layers)]
        layers.append(
            tuple((heads.read(f"{name}.weight").to(**place), heads.read(f"{name}.bias").to(**place)) for name in names)
        )
        if heads.own_output:
            outputs.append(heads.read(f"{prefix}.lm_head.weight").to(**place))
        else:
            outputs.append(reference.model.get_output_embeddings().weight.detach())
    return ReferenceHeads(tuple(layers), tuple(outputs))


@dataclass(frozen=True)
class PredictedAcceptance:
    """What the heads accept on given texts, for a step that starts at any of their tokens.

    Args:
        lengths: per text int64 [n], tokens that a step would emit whose root is emitted token 0, 1, ...
        agreement: per head, share of positions where its best token is the one emitted.
    """

    lengths: list[torch.Tensor]
    agreement: list[float]

    def compare(self, accepted_lengths: Sequence[Sequence[int]]) -> tuple[int, int]:
        """(steps that accepted what the heads predict, all steps), from observed lengths per text."""
        equal = total = 0
        for predicted, observed in zip(self.lengths, accepted_lengths, strict=True):
            root = 0
            for length in observed:
                left = len(predicted) - root
                # The last step may confirm more than the text still had room for.
                equal += int(min(length, left) == min(int(predicted[root]), left))
                total += 1
                root += length
        return equal, total

    def tokens_per_step(self) -> float:
        """Tokens per step of an engine that accepts exactly what the heads predict."""
        tokens = steps = 0
        for predicted in self.lengths:
            root = 0
            while root < len(predicted):
                root += int(predicted[root])
                steps += 1
            tokens += len(predicted)
        return tokens / steps if steps else 0.0


@torch.inference_mode()
def predict_acceptance(
    reference: Reference,
    heads: ReferenceHeads,
    tree: MedusaTree,
    prompts: Sequence[Sequence[int]],
    emitted: Sequence[Sequence[int]],
) -> PredictedAcceptance:
    """Rank every emitted token under every head, and walk the tree by those ranks.

    Args:
        reference: the base.
        heads: its heads.
        tree: the tree of every step.
        prompts: token ids.
        emitted: tokens that followed.
    """
    nodes = set(tree.nodes)
    texts = [[*prompt, *row] for prompt, row in zip(prompts, emitted, strict=True)]
    lengths: list[torch.Tensor] = []
    best_counts = torch.zeros(tree.depth, dtype=torch.long)
    counts = torch.zeros(tree.depth, dtype=torch.long)
    for prompt, row, hidden in zip(prompts, emitted, reference.hidden_states(texts), strict=True):
        # The root that is emitted token r was drafted for at the token before it.
        states = hidden[len(prompt) - 1 : len(prompt) - 1 + len(row) - 1]
        ranks = _target_ranks(heads.logits(states), torch.tensor(row, device=states.device))  # [M, n - 1]
        for depth in range(tree.depth):
            known = ranks[depth, : max(len(row) - 1 - depth, 0)]
            best_counts[depth] += int((known == 0).sum())
            counts[depth] += len(known)
        lengths.append(torch.tensor([_walk(nodes, ranks[:, root].tolist()) for root in range(len(row) - 1)]))
    agreement = (best_counts / counts.clamp(min=1)).tolist()
    return PredictedAcceptance(lengths, agreement)


def _target_ranks(logits: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rank of emitted token r + 1 + h under head h at root r, int64 [M, n - 1]; a huge rank past the end."""
    heads, roots, vocab_size = logits.shape
    ranks = torch.full((heads, roots), 2 * vocab_size)
    for head in range(heads):
        targets = row[1 + head :]
        rows = logits[head, : len(targets)]
        ranks[head, : len(targets)] = (rows > rows.gather(-1, targets[:, None])).sum(-1).cpu()
    return ranks


def _walk(nodes: set[tuple[int, ...]], ranks: Sequence[int]) -> int:
    """Tokens emitted by a step: the root's own choice, and one more per confirmed draft."""
    depth = 0
    while depth < len(ranks) and tuple(ranks[: depth + 1]) in nodes:
        depth += 1
    return depth + 1
