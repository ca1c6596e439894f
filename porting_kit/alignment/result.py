"""What an alignment says: verdict, gates, figures, and what it covered; JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from porting_kit.alignment.generation_settings import GenerationSettings
from porting_kit.alignment.inherent import InherentDifference
from porting_kit.alignment.noise import LogitsNoise
from porting_kit.alignment.oracle import JudgedText, Status
from porting_kit.outcomes import Coverage, Verdict, not_covered


@dataclass(frozen=True)
class Gate:
    """One check.

    Args:
        name: short name, also what `diagnosis.seed_fault` calls it.
        passed: None when it could not be run.
        detail: what was found, one sentence.
    """

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class ApproximateFit:
    """How far a fitted base lies from the original, when the port's kernel fit is not exact.

    Args:
        notes: what was fitted, from the transforms.
        token_agreement: share of positions of the texts where both have the same best token.
        near_tie_agreement: the same with near-ties of the original counted as equal.
        largest_margin: the original's margin at the worst differing position, 0 when none differs.
        mean_divergence: mean KL divergence of the next-token distribution, original to fitted, in nats.
        largest_divergence: its largest.
        bounds: name of a figure -> what it may be at worst (`token_agreement` at least, the others at most).
        passed: every bound holds.
    """

    notes: tuple[str, ...]
    token_agreement: float
    near_tie_agreement: float
    largest_margin: float
    mean_divergence: float
    largest_divergence: float
    bounds: Mapping[str, float]
    passed: bool


@dataclass(frozen=True)
class LayerError:
    """One sub-module's output against the base's.

    Args:
        module: dotted name in the port.
        source: dotted name in the base.
        phase: `context` or `generation`.
        relative_error: norm of the difference over the norm of the base's output.
        cosine: of the two outputs as one vector each.
    """

    module: str
    source: str
    phase: str
    relative_error: float
    cosine: float


@dataclass(frozen=True)
class LayerReport:
    """Every compared sub-module in forward order, and the first that parts from the base.

    Args:
        errors: context phase first, then generation.
        bound: relative errors up to this are numerical noise.
        first: the first error beyond it, None when there is none.
        sentence: what that means, in words.
    """

    errors: tuple[LayerError, ...]
    bound: float
    first: LayerError | None
    sentence: str


@dataclass(frozen=True)
class AlignmentResult:
    """Does the port say what its base says?

    Args:
        verdict: pass, or fail.
        summary: one sentence.
        covered: what the verdict covers.
        gates: every check, in order.
        texts: the main run, judged; one per prompt.
        prompts: token ids.
        settings: the generation settings of both sides.
        noise: measured noise and the near-tie tolerance.
        tokens_per_step: of the main run; None for captured output without step counts.
        accepted_by_depth: share of steps that confirmed at least 1, 2, ... drafts.
        head_agreement: per head, share of positions where its best token was emitted; empty when not measured.
        predicted_tokens_per_step: what the heads would reach; None when not measured.
        context_error: worst error of the context phase's logits over the largest logit; None without logits.
        tree_error: the same in the generation phase.
        inherent: differences that no port removes.
        approximate_fit: None for an exact port.
        layers: layer by layer; None when not asked for.
        runs: name of each run -> its tokens per step and seconds.
        cause: what `diagnosis.name_cause` found, JSON-ready; None when not asked.
        accepted_lengths: per prompt, tokens each generation step confirmed; None when not known.
        logits: per prompt [n, V], the logits behind each emitted token; None when not known. Not part of `as_dict`.
    """

    verdict: Verdict
    summary: str
    covered: tuple[Coverage, ...]
    gates: tuple[Gate, ...]
    texts: tuple[JudgedText, ...]
    prompts: tuple[tuple[int, ...], ...]
    settings: GenerationSettings
    noise: LogitsNoise
    tokens_per_step: float | None = None
    accepted_by_depth: tuple[float, ...] = ()
    head_agreement: tuple[float, ...] = ()
    predicted_tokens_per_step: float | None = None
    context_error: float | None = None
    tree_error: float | None = None
    inherent: tuple[InherentDifference, ...] = ()
    approximate_fit: ApproximateFit | None = None
    layers: LayerReport | None = None
    runs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cause: Mapping[str, Any] | None = None
    accepted_lengths: tuple[tuple[int, ...], ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def failing_gate(self) -> str | None:
        """Name of the first gate that failed."""
        return next((gate.name for gate in self.gates if gate.passed is False), None)

    @property
    def near_ties(self) -> int:
        """Emitted tokens that are not the base's best, within noise."""
        return sum(len(text.positions(Status.NEAR_TIE)) for text in self.texts)

    @property
    def wrong_tokens(self) -> int:
        """Emitted tokens that the base rejects beyond noise."""
        return sum(len(text.positions(Status.WRONG)) for text in self.texts)

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of the main run."""
        return sum(len(text.tokens) for text in self.texts)

    @property
    def tokens_equal(self) -> bool:
        """Every emitted token is the base's own best token, so the texts are the base's greedy texts, id by id."""
        return self.near_ties == 0 and self.wrong_tokens == 0 and not any(text.stopped_early for text in self.texts)

    @property
    def first_divergence(self) -> dict[str, Any] | None:
        """The first wrong token, else the first near-tie, in prompt order; None when there is neither."""
        found = [
            {"prompt": index, **text.describe_position(text.first_divergence)}
            for index, text in enumerate(self.texts)
            if text.first_divergence is not None
        ]
        wrong = [row for row in found if row["kind"] == "wrong"]
        return (wrong or found or [None])[0]

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-ready row per prompt."""
        return [
            {
                "prompt": index,
                "prompt_tokens": len(prompt),
                "tokens": list(text.tokens),
                "accepted_lengths": None if self.accepted_lengths is None else list(self.accepted_lengths[index]),
                "margins": [round(margin, 6) for margin in text.margins.tolist()],
                "near_ties": text.positions(Status.NEAR_TIE),
                "wrong": text.positions(Status.WRONG),
                "ended_by": text.ended_by,
                "discarded": text.discarded,
                "stopped_early": text.stopped_early,
            }
            for index, (prompt, text) in enumerate(zip(self.prompts, self.texts, strict=True))
        ]

    def as_dict(self) -> dict[str, Any]:
        """The `--json` document of `porting-kit align`."""
        return {
            "verdict": self.verdict.value,
            "summary": self.summary,
            "covered": [item.value for item in self.covered],
            "not_covered": [item.value for item in not_covered(self.covered)],
            "failing_gate": self.failing_gate,
            "tokens_equal": self.tokens_equal,
            "near_ties": self.near_ties,
            "wrong_tokens": self.wrong_tokens,
            "first_divergence": self.first_divergence,
            "tokens_per_step": self.tokens_per_step,
            "accepted_by_depth": list(self.accepted_by_depth),
            "approximate_fit": None if self.approximate_fit is None else _plain(self.approximate_fit),
            "context_error": self.context_error,
            "tree_error": self.tree_error,
            "noise": self.noise.as_dict(),
            "settings": self.settings.as_dict(),
            "inherent": [_plain(difference) for difference in self.inherent],
            "heads": {
                "agreement": list(self.head_agreement),
                "predicted_tokens_per_step": self.predicted_tokens_per_step,
            },
            "gates": [_plain(gate) for gate in self.gates],
            "runs": {name: dict(figures) for name, figures in self.runs.items()},
            "layers": None if self.layers is None else _plain(self.layers),
            "cause": None if self.cause is None else dict(self.cause),
            "rows": self.rows(),
        }


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings to what JSON knows."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
