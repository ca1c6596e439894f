"""The gates of an alignment: each turns figures into pass or fail, with the sentence that says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from porting_kit.alignment.comparison import DecodeRun, RunDifference, compare_runs
from porting_kit.alignment.head_oracle import PredictedAcceptance
from porting_kit.alignment.noise import LogitsNoise
from porting_kit.alignment.oracle import JudgedText, Status
from porting_kit.alignment.result import ApproximateFit, Gate
from porting_kit.outcomes import Verdict

ERROR_FACTOR = 4.0
"""Logit errors up to this many times the measured noise pass: kernels round at other points than the imitation does.
Healthy ports of four families, three dtypes and two seeds lie at 0.1 to 1.8 times the noise."""

GREEDY, REPEAT = "greedy", "repeat"
"""Names of the run without a tree and of the main run made once more."""

FITTED_AGREEMENT = 0.9
"""With an approximate fit the heads read states that differ from the base's, by more than rounding. Only for answers of
an engine, and on a pipeline rank that has no states: elsewhere the port's own are read, and every step must agree."""


def judge_tokens(texts: Sequence[JudgedText], judge: str = "the base") -> Gate:
    """No emitted token may be worse than a near-tie, and no text may stop without a reason.

    Args:
        texts: judged texts.
        judge: who judged them: "the base", or "the fitted base".
    """
    wrong = [(index, text.positions(Status.WRONG)) for index, text in enumerate(texts) if text.positions(Status.WRONG)]
    early = [index for index, text in enumerate(texts) if text.stopped_early]
    ties = sum(len(text.positions(Status.NEAR_TIE)) for text in texts)
    total = sum(len(text.tokens) for text in texts)
    if wrong:
        prompt, positions = wrong[0]
        found = texts[prompt].describe_position(positions[0])
        count = sum(len(row) for _, row in wrong)
        return Gate(
            "tokens",
            False,
            f"{count} of {total} tokens are wrong; first in prompt {prompt} at position {positions[0]}: emitted "
            f"{found['emitted']}, {judge} prefers {found['preferred']} by {-found['margin']:.4g} logits",
        )
    if early:
        return Gate(
            "tokens", False, f"prompt {early[0]} stopped after {len(texts[early[0]].tokens)} tokens without end"
        )
    return Gate("tokens", True, f"all {total} tokens are {judge}'s best, {ties} of them near-ties")


ROUTING = (
    " (or a token of the mixture of experts was routed otherwise by rounding alone: align with dtype: float32 to tell)"
)


def judge_logits(
    noise: LogitsNoise, context_error: float | None, tree_error: float | None, *, chooses_experts: bool = False
) -> Gate:
    """Logit errors beyond what the dtype explains are a fault even where no token changes yet.

    Args:
        noise: measured on the base.
        context_error: of the context phase, None when not measured.
        tree_error: of the generation phase, None when not measured.
        chooses_experts: the base is a mixture of experts. Which experts a token gets can hang on rounding, and noise
            is measured on one rounding only: a failure in half precision may be that.
    """
    bound = ERROR_FACTOR * noise.relative_error
    errors = {"context": context_error, "generation": tree_error}
    known = {name: error for name, error in errors.items() if error is not None}
    if not known:
        return Gate("logits", None, "no logits to compare")
    text = ", ".join(f"{name} {error:.2e}" for name, error in known.items())
    passed = all(error <= bound for error in known.values())
    may_be_routing = chooses_experts and not passed and noise.dtype != "float32"
    return Gate("logits", passed, f"{text} of the largest logit, bound {bound:.2e}{ROUTING if may_be_routing else ''}")


def judge_heads(
    predicted: PredictedAcceptance | None, accepted: Sequence[Sequence[int]], *, is_fitted: bool = False
) -> list[Gate]:
    """Steps must accept what the heads themselves predict, wherever that does not hang on a near-tie."""
    if predicted is None:
        return []
    equal, judged, total = predicted.compare(accepted)
    passed = equal >= (FITTED_AGREEMENT if is_fitted else 1.0) * judged
    left_out = f", {total - judged} more hang on near-ties" if total > judged else ""
    return [Gate("heads", passed, f"{equal} of {judged} steps accepted what the heads predict{left_out}")]


def judge_fit(fit: ApproximateFit | None) -> list[Gate]:
    """A fitted base must lie within its bounds of the original."""
    if fit is None:
        return []
    return [
        Gate(
            "fit",
            fit.passed,
            f"fitted base and original agree on {fit.near_tie_agreement:.1%} of positions, worst margin "
            f"{fit.largest_margin:.3g} logits, mean divergence {fit.mean_divergence:.2e} nats",
        )
    ]


def summarise(gates: Sequence[Gate], texts: Sequence[JudgedText], fit: ApproximateFit | None) -> str:
    """One sentence for the whole alignment."""
    failed = [gate for gate in gates if gate.passed is False]
    if failed:
        return f"fail at {', '.join(gate.name for gate in failed)}: {failed[0].detail}"
    total = sum(len(text.tokens) for text in texts)
    ties = sum(len(text.positions(Status.NEAR_TIE)) for text in texts)
    ends = f"{ties} of them near-ties within measured noise"
    if fit is None:
        return f"pass: all {total} tokens are the base's own, {ends}"
    return (
        f"pass, approximate fit: all {total} tokens are the fitted base's own, {ends}; fitted base and original agree "
        f"on {fit.near_tie_agreement:.1%} of positions"
    )


def compare_all(runs: Sequence[DecodeRun], judged: Mapping[str, Sequence[JudgedText]]) -> list[Gate]:
    """The main run (the first) against greedy and other batch sizes; the repeat against the run it repeats."""
    main = runs[0].name
    sizes = [run.name for run in runs if run.name not in (GREEDY, REPEAT)]
    names = [run.name for run in runs]
    kinds = {
        "medusa equals greedy": [(main, GREEDY)] if GREEDY in names else [],
        "batches": [(main, other) for other in sizes[1:]],
        "repeat": [(sizes[-1], REPEAT)] if REPEAT in names else [],
    }
    gates = []
    for kind, pairs in kinds.items():
        if pairs:
            differences = [found for pair in pairs for found in compare_runs(pair, judged[pair[0]], judged[pair[1]])]
            gates.append(_comparison_gate(kind, pairs, differences))
    return gates


def _comparison_gate(name: str, pairs: Sequence[tuple[str, str]], differences: Sequence[RunDifference]) -> Gate:
    real = [difference for difference in differences if not difference.is_near_tie]
    if not real:
        ties = f", {len(differences)} near-ties apart" if differences else ""
        return Gate(name, True, f"{pairs[0][0]}: same tokens as {', '.join(other for _, other in pairs)}{ties}")
    first = real[0]
    return Gate(
        name,
        False,
        f"{len(real)} texts differ; first {' against '.join(first.runs)}, prompt {first.prompt}, position "
        f"{first.position}: {first.tokens[0]} against {first.tokens[1]}",
    )


def decide_verdict(gates: Sequence[Gate]) -> Verdict:
    """Fail when any gate failed; a gate that could not be run does not count."""
    return Verdict.FAIL if any(gate.passed is False for gate in gates) else Verdict.PASS
