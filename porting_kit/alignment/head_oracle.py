"""What the Medusa heads themselves would accept: the heads in float32 on the base's hidden states, without an engine.

This judges what the token oracle cannot see: a port whose text is right although its heads are shifted, have another
activation, or were converted wrongly only takes more steps. Ranks of candidates that lie within the noise of the port's
dtype may swap; a step whose length hangs on such a rank is left out of the judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear, silu

from porting_kit.alignment.noise import compare_logits
from porting_kit.alignment.reference import Reference, dtype_name
from porting_kit.alignment.rounding import HALF, read_rounded
from porting_kit.medusa.tree import MedusaTree
from porting_kit.medusa.tree_limits import MAX_RANK


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
    def logits(self, hidden: torch.Tensor, rounding: torch.dtype | None = None) -> torch.Tensor:
        """[M, ..., V] from hidden states [..., E]; with `rounding`, weights and every result rounded to that dtype."""
        own = self.outputs[0].dtype

        def rounded(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(own) if rounding is None else tensor.to(rounding).to(own)

        found = []
        for layers, output in zip(self.layers, self.outputs, strict=True):
            states = rounded(hidden)
            for weight, bias in layers:
                inner = rounded(linear(states, rounded(weight), rounded(bias)))
                states = rounded(states + rounded(silu(inner)))
            found.append(rounded(linear(states, rounded(output))))
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
            outputs.append(reference.output_matrix)
    return ReferenceHeads(tuple(layers), tuple(outputs))


@dataclass(frozen=True)
class PredictedAcceptance:
    """What the heads accept on given texts, for a step that starts at any of their tokens.

    Args:
        lengths: per text int64 [n - 1], tokens that a step would emit whose root is emitted token 0, 1, ...
        certain: per text bool [n - 1], the length does not hang on a rank within the noise.
        agreement: per head, share of positions where its best token is the one emitted.
        tolerance: head logits nearer than this may swap ranks.
    """

    lengths: list[torch.Tensor]
    certain: list[torch.Tensor]
    agreement: list[float]
    tolerance: float

    def compare(self, accepted_lengths: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        """Steps that accepted what the heads predict, steps that can be judged, and all steps.

        Args:
            accepted_lengths: observed, per text.
        """
        equal = judged = total = 0
        for predicted, certain, observed in zip(self.lengths, self.certain, accepted_lengths, strict=True):
            root = 0
            for length in observed:
                left = len(predicted) - root
                total += 1
                if certain[root]:
                    judged += 1
                    # The last step may confirm more than the text still had room for.
                    equal += int(min(length, left) == min(int(predicted[root]), left))
                root += length
        return equal, judged, total

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
    dtype: torch.dtype | None = None,
    states: Sequence[torch.Tensor] | None = None,
    base_states: Sequence[torch.Tensor] | None = None,
    rounded_states: Sequence[torch.Tensor] | None = None,
) -> PredictedAcceptance:
    """Rank every emitted token under every head, and walk the tree by those ranks.

    Args:
        reference: the base.
        heads: its heads.
        tree: the tree of every step.
        prompts: token ids.
        emitted: tokens that followed.
        dtype: what the port computes in; ranks within its noise, measured on the base and these heads, are uncertain.
        states: [S, E] per text, prompt and emitted tokens, for a port whose states are not the base's; the base's when
            None.
        base_states: the base's own where they are known; None computes them.
        rounded_states: the same as `dtype` rounds them (`rounding.read_rounded`).
    """
    texts = [[*prompt, *row] for prompt, row in zip(prompts, emitted, strict=True)]
    # The root that is emitted token r was drafted for at the token before it.
    spans = [slice(len(p) - 1, len(p) + len(row) - 2) for p, row in zip(prompts, emitted, strict=True)]
    base_states = reference.hidden_states(texts) if base_states is None else base_states
    own = [heads.logits(h[span]) for h, span in zip(base_states, spans, strict=True)]
    tolerance = 0.0
    if dtype is not None:
        rounded_states = read_rounded(reference, texts, dtype)[1] if rounded_states is None else rounded_states
        tolerance = _measure_tolerance(heads, own, rounded_states, spans, dtype)
    exact = own
    if states is not None:
        exact = [heads.logits(h[span].to(heads.outputs[0])) for h, span in zip(states, spans, strict=True)]
    nodes = set(tree.nodes)
    lengths, certain = [], []
    best_counts, counts = torch.zeros(tree.depth), torch.zeros(tree.depth)
    for row, logits in zip(emitted, exact, strict=True):
        lowest, highest = _target_ranks(logits[: tree.depth], torch.tensor(row, device=logits.device), tolerance)
        walks = [_walk(nodes, lowest[:, root].tolist(), highest[:, root].tolist()) for root in range(len(row) - 1)]
        lengths.append(torch.tensor([length for length, _ in walks], dtype=torch.long))
        certain.append(torch.tensor([is_certain for _, is_certain in walks], dtype=torch.bool))
        for depth in range(tree.depth):
            known = logits[depth, : max(len(row) - 1 - depth, 0)].argmax(-1).tolist()
            best_counts[depth] += sum(token == target for token, target in zip(known, row[1 + depth :], strict=True))
            counts[depth] += len(known)
    return PredictedAcceptance(lengths, certain, (best_counts / counts.clamp(min=1)).tolist(), tolerance)


def _measure_tolerance(
    heads: ReferenceHeads,
    exact: Sequence[torch.Tensor],
    rounded_states: Sequence[torch.Tensor],
    spans: Sequence[slice],
    dtype: torch.dtype,
) -> float:
    """Near-tie tolerance of the heads' logits: exact against rounded, as `noise` does for the base's."""
    rounding = dtype if dtype in HALF else None
    pairs = zip(rounded_states, spans, strict=True)
    rounded = [heads.logits(states[span], rounding).flatten(0, 1) for states, span in pairs]
    flat = [logits.flatten(0, 1) for logits in exact]
    if not sum(map(len, flat)):
        return 0.0
    return compare_logits(flat, rounded, dtype_name(dtype)).near_tie_tolerance


def _target_ranks(logits: torch.Tensor, row: torch.Tensor, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest rank that emitted token r + 1 + h may have under head h at root r, int64 [M, n - 1].

    Without a tolerance the two are the rank itself, equal logits counting as lower ones. Past the end of the text the
    ranks are beyond every tree.
    """
    heads, roots, vocab_size = logits.shape
    lowest, highest = (torch.full((heads, roots), 2 * vocab_size) for _ in range(2))
    for head in range(heads):
        targets = row[1 + head :]
        rows = logits[head, : len(targets)]
        own = rows.gather(-1, targets[:, None])
        lowest[head, : len(targets)] = (rows > own + tolerance).sum(-1).cpu()
        above = (rows >= own - tolerance).sum(-1) - 1 if tolerance else (rows > own).sum(-1)
        highest[head, : len(targets)] = above.cpu()
    return lowest, highest


def _walk(nodes: set[tuple[int, ...]], lowest: Sequence[int], highest: Sequence[int]) -> tuple[int, bool]:
    """Tokens emitted by a step (the root's own choice, and one more per confirmed draft), and whether that is certain.

    A step is certain when no rank on its way could be another one that changes whether, or where, the tree goes on.
    """
    path: tuple[int, ...] = ()
    for low, high in zip(lowest, highest, strict=True):
        inside = [rank for rank in range(low, min(high, MAX_RANK) + 1) if (*path, rank) in nodes]
        if not inside:
            return len(path) + 1, True
        if low != high:
            return _likely_length(nodes, path, lowest), False
        path = (*path, low)
    return len(path) + 1, True


def _likely_length(nodes: set[tuple[int, ...]], path: tuple[int, ...], lowest: Sequence[int]) -> int:
    """The length when every uncertain rank is its lowest."""
    for rank in lowest[len(path) :]:
        if (*path, rank) not in nodes:
            break
        path = (*path, rank)
    return len(path) + 1
