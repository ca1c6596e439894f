"""How far a fitted base lies from the original: the second comparison that an approximate kernel fit needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from porting_kit.alignment.oracle import token_margins
from porting_kit.alignment.reference import LogitsSource
from porting_kit.alignment.result import ApproximateFit

FIT_BOUNDS: Mapping[str, float] = {
    "near_tie_agreement": 0.98,
    "largest_margin": 0.5,
    "mean_divergence": 0.01,
    "largest_divergence": 0.2,
}
"""Agreement at least; margins in logits and divergences in nats at most."""
MEAN_FACTOR, EXTREME_FACTOR, CHANCE_POSITIONS = 2.0, 8.0, 6
"""How much farther than one rounding another of the same width may lie: its mean divergence, its largest one, and how
many more positions than the factor may differ in their best token. SmolLM2 was rounded as FP8, int8, int4, smoothed
int8 and AWQ are, each to five or seven grids. Against the grid that `bound_by_rounding` is given, on every choice of
two, three, four or all of eight texts (60 positions and more), the mean was at most 1.56 times as large, the largest
4.3 times, and 5 more positions differed than twice as many."""


class ContextOracle:
    """A port's own context phase as the judge of its generation phase: a fitted base stands for itself.

    Args:
        model: a model with `config`, `new_cache` and `prefill(..., all_logits=True)`, kernels exact.
    """

    def __init__(self, model: object) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.model.config["vocab_size"])

    def logits(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[S, V] per text."""
        return [self.read(text)[0] for text in texts]

    @torch.inference_mode()
    def read(self, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [S, V] and what the output matrix and the heads see, [S, E], of one text from one pass; no states on
        a pipeline rank that has none."""
        cache = self.model.new_cache(1, len(text))
        found = self.model.prefill([torch.as_tensor(text, dtype=torch.long)], cache, all_logits=True)
        return found.logits[0][:, : self.vocab_size], found.hidden_states


def bound_by_rounding(rounded: ApproximateFit, positions: int) -> dict[str, float]:
    """How far a base rounded by one grid may lie from the original, from how far another grid takes it.

    Args:
        rounded: the distance of the base rounded by the other grid, on the same texts.
        positions: how many next-token distributions were compared.
    """
    disagreement = MEAN_FACTOR * (1 - rounded.near_tie_agreement) + CHANCE_POSITIONS / positions
    return {
        "near_tie_agreement": max(1 - disagreement, 0.0),
        "mean_divergence": MEAN_FACTOR * rounded.mean_divergence,
        "largest_divergence": EXTREME_FACTOR * rounded.largest_divergence,
    }


def measure_fit(
    original: LogitsSource,
    fitted: LogitsSource,
    texts: Sequence[Sequence[int]],
    notes: Sequence[str],
    tolerance: float,
    bounds: Mapping[str, float] = FIT_BOUNDS,
) -> ApproximateFit:
    """Compare the next-token distributions of a fitted base and the original at every position of texts.

    Args:
        original: the Hugging Face base.
        fitted: the fitted base.
        texts: token ids.
        notes: what the fit did.
        tolerance: near-tie tolerance in logits.
        bounds: figure -> what it may be at worst.
    """
    theirs = torch.cat([logits.double().cpu() for logits in original.logits(texts)])
    ours = torch.cat([logits.double().cpu() for logits in fitted.logits(texts)])
    margins, preferred = token_margins(theirs, ours.argmax(-1))
    same = ours.argmax(-1) == preferred
    divergence = torch.nn.functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    figures = {
        "token_agreement": same.double().mean().item(),
        "near_tie_agreement": (margins >= -tolerance).double().mean().item(),
        "largest_margin": max(-margins.min().item(), 0.0),
        "mean_divergence": divergence.mean().item(),
        "largest_divergence": divergence.max().item(),
    }
    at_least = {"token_agreement", "near_tie_agreement"}
    passed = all(
        figures[name] >= bound if name in at_least else figures[name] <= bound for name, bound in bounds.items()
    )
    return ApproximateFit(tuple(notes), **figures, bounds=dict(bounds), passed=passed)
