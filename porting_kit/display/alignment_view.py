"""What an alignment found: gates, first divergence, texts, acceptance, errors layer by layer, cause.

Every function takes the align step's document (`AlignResult.document()`, or `alignment.json` of the run folder), so
that notebook and report show the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from porting_kit.display.diagnosis_plots import plot_layer_map
from porting_kit.display.plots import Picture, plot_accepted_lengths, plot_layer_errors, plot_margins
from porting_kit.display.tables import Code, Facts, Stack, Table, VerdictMark
from porting_kit.outcomes import verdict_remark

Document = Mapping[str, Any]
View = TypeVar("View", bound=Callable[..., Any])
LAYERS_SHOWN = 12
HYPOTHESES_SHOWN = 6
NO_TOKENS = "There are no tokens to show: the release's kernels refused this model."


def _with_tokens(view: View) -> View:
    """A view of an alignment that was refused before its first token says so."""

    @wraps(view)
    def guarded(alignment: Document, *arguments: Any, **options: Any) -> Any:
        return view(alignment, *arguments, **options) if "rows" in alignment else Facts([], note=NO_TOKENS)

    return guarded  # type: ignore[return-value]


def alignment_mark(alignment: Document) -> VerdictMark:
    """The verdict, with what must be said with it."""
    verdict = alignment["verdict"]
    return VerdictMark(verdict, verdict_remark(verdict, alignment.get("approximate_fit")))


@_with_tokens
def alignment_facts(alignment: Document) -> Facts:
    """The figures a reader looks for first."""
    noise = alignment["noise"]
    pairs: list[tuple[str, Any]] = [
        ("verdict", alignment_mark(alignment)),
        ("result", alignment["summary"]),
        ("every token equal", alignment["tokens_equal"]),
        ("near-ties", alignment["near_ties"]),
        ("wrong tokens", alignment["wrong_tokens"]),
        ("tokens per step", alignment["tokens_per_step"]),
        ("tokens per step, as the heads predict", alignment["heads"]["predicted_tokens_per_step"]),
        ("error in the context phase", _scientific(alignment["context_error"])),
        ("error in the tree", _scientific(alignment["tree_error"])),
        (f"noise of {noise['dtype']}, measured", _scientific(noise["relative_error"])),
        ("near-tie tolerance (logits)", noise["near_tie_tolerance"]),
    ]
    note = "Errors are the largest difference of a logit over the largest logit of its position."
    return Facts([(name, value) for name, value in pairs if value is not None], note=note)


@_with_tokens
def checks_table(alignment: Document) -> Table:
    """The gates of the alignment, each with what was found."""
    words = {True: "pass", False: "fail", None: "not_run"}
    rows = [(gate["name"], VerdictMark(words[gate["passed"]]), gate["detail"]) for gate in alignment["gates"]]
    return Table(("check", "verdict", "found"), rows, title="Checks")


@_with_tokens
def divergence_facts(alignment: Document) -> Facts:
    """The first token that is not the base's own best: where, in which phase, by how much."""
    first = alignment["first_divergence"]
    if first is None:
        return Facts([], note="No divergence: every emitted token is the base's own best token.")
    kind = {"wrong": "wrong: beyond noise", "near_tie": "near-tie: within noise"}.get(first["kind"], first["kind"])
    pairs = [
        ("kind", kind),
        ("prompt", first["prompt"]),
        ("position", first["position"]),
        ("phase", first["phase"]),
        ("proposed by", _name_proposer(first["proposed_by"])),
        ("emitted token", first["emitted"]),
        ("the base prefers", first["preferred"]),
        ("margin (logits)", first["margin"]),
    ]
    return Facts([(name, value) for name, value in pairs if value is not None], title="First divergence")


@_with_tokens
def texts_table(alignment: Document, texts: Sequence[str] = (), *, limit: int | None = 12) -> Table:
    """One row a prompt.

    Args:
        alignment: the document.
        texts: decoded output per prompt, where there is a tokenizer; the ids are shown otherwise.
        limit: rows shown.
    """
    rows = []
    for row in alignment["rows"]:
        shown = texts[row["prompt"]] if texts else " ".join(map(str, row["tokens"]))
        margins = row["margins"]
        rows.append(
            (
                row["prompt"],
                row["prompt_tokens"],
                len(row["tokens"]),
                len(row["wrong"]),
                len(row["near_ties"]),
                min(margins) if margins else None,
                Code(shown if len(shown) <= 80 else f"{shown[:78]} …"),
            )
        )
    columns = ("prompt", "prompt tokens", "tokens", "wrong", "near-ties", "smallest margin", "text" if texts else "ids")
    return Table(columns, rows, title="Texts", note="Margins in logits, under the base model.", limit=limit)


@_with_tokens
def margins_plot(alignment: Document, prompt: int | None = None) -> Picture | Facts:
    """Margins along one prompt's text: that of the first divergence, else the longest, unless another is asked for."""
    rows, first = alignment["rows"], alignment["first_divergence"]
    if prompt is None:
        longest = max(range(len(rows)), key=lambda place: len(rows[place]["margins"]), default=0)
        prompt = first["prompt"] if first else longest
    if prompt >= len(rows):
        return Facts([], note="No text to draw.")
    row = rows[prompt]
    tolerance = alignment["noise"]["near_tie_tolerance"]
    return plot_margins(row["margins"], tolerance=tolerance, near_ties=row["near_ties"], wrong=row["wrong"])


@_with_tokens
def acceptance_view(alignment: Document) -> Stack:
    """How many drafts were confirmed, and how often each head was right."""
    by_depth = alignment["accepted_by_depth"]
    agreement = alignment["heads"]["agreement"]
    if not by_depth and not agreement:
        return Stack((Facts([], note="Acceptance was not measured: the output has no step counts."),))
    parts: list[Any] = [plot_accepted_lengths(by_depth, tokens_per_step=alignment["tokens_per_step"])]
    rows = [
        (
            f"head {depth + 1}",
            f"{100 * agreement[depth]:.1f} %" if depth < len(agreement) else None,
            f"{100 * by_depth[depth]:.1f} %" if depth < len(by_depth) else "0 %",
        )
        for depth in range(max(len(by_depth), len(agreement)))
    ]
    columns = ("head", "its best token was right", "steps that confirmed this depth")
    parts.append(Table(columns, rows, title="Heads"))
    return Stack(tuple(parts))


@_with_tokens
def layers_view(alignment: Document) -> Stack:
    """Error of every compared sub-module, and the first that parts from the base."""
    layers = alignment["layers"]
    if not layers:
        return Stack((Facts([], note="Layers were not compared."),))
    series: dict[str, list[float]] = {}
    names: dict[str, list[str]] = {}
    for error in layers["errors"]:
        series.setdefault(error["phase"], []).append(error["relative_error"])
        names.setdefault(error["phase"], []).append(error["module"])
    longest = max(names.values(), key=len, default=[])
    picture = plot_layer_errors(series, names=longest, noise=layers["bound"])
    worst = sorted(layers["errors"], key=lambda error: -error["relative_error"])
    rows = [
        (Code(error["module"]), error["phase"], _scientific(error["relative_error"]), round(error["cosine"], 6))
        for error in worst
    ]
    columns = ("module", "phase", "relative error", "cosine")
    table = Table(columns, rows, title="Largest errors", limit=LAYERS_SHOWN)
    heat = plot_layer_map(layers["errors"], layers["bound"])
    return Stack((Facts([], note=layers["sentence"]), picture, *([heat] if heat else []), table))


def cause_view(cause: Document | None) -> Stack | Facts:
    """What explains a failed alignment: `diagnosis.Diagnosis.as_dict()`, or None when no cause was looked for."""
    if not cause:
        return Facts([], note="No cause was looked for: nothing is wrong, or no token was made.")
    labels = {"verdict": "cause", "name": "name", "why": "why", "fix": "fix", "decided_by": "what would decide"}
    pairs = [(label, cause[name]) for name, label in labels.items() if cause.get(name)]
    pairs = [pair for place, pair in enumerate(pairs) if place == 0 or pair[1] != pairs[0][1]]
    pairs += [("evidence", sentence) for sentence in cause.get("evidence", ())]
    facts = Facts([*pairs, *([("read in", cause["source"])] if cause.get("source") else [])], title="Cause")
    title = "Hypotheses, best first"
    if cause.get("to_explain"):
        title += f": how many of {cause['to_explain']} tokens, steps and ends that the healthy port does not explain"
    rows = [
        (
            Code(item["name"]),
            f"{item['explained']} of {item['out_of']}",
            item["unexplained_tokens"],
            item["unexplained_steps"],
            item["error"],
        )
        for item in cause.get("ranking", ())
    ]
    columns = ("hypothesis", "explains", "tokens it does not", "steps it does not", "could not be tried")
    return Stack((facts, Table(columns, rows, title=title, limit=HYPOTHESES_SHOWN))) if rows else facts


def control_facts(control: Document | None) -> Facts:
    """The negative control: what was planted, and whether the check noticed."""
    if not control:
        return Facts([], note="No negative control was run.")
    failed = [gate["name"] for gate in control["gates"] if gate["passed"] is False]
    pairs = [
        ("planted fault", Code(control["fault"])),
        ("did the check notice", VerdictMark("pass" if control["has_turned"] else "fail")),
        ("gates that failed, as they must", failed),
    ]
    return Facts(pairs, title="Negative control", note=control["summary"])


@_with_tokens
def fit_table(alignment: Document) -> Table | Facts:
    """How far a fitted base lies from the original, against the bounds."""
    fit = alignment["approximate_fit"]
    if not fit:
        return Facts([], note="The port is exact: nothing was fitted.")
    rows = []
    for name, bound in fit["bounds"].items():
        holds = fit[name] >= bound if name.endswith("agreement") else fit[name] <= bound
        rows.append((name.replace("_", " "), fit[name], bound, VerdictMark("pass" if holds else "fail")))
    return Table(("figure", "measured", "bound", "verdict"), rows, title="Approximate fit", note=" ".join(fit["notes"]))


@_with_tokens
def inherent_table(alignment: Document) -> Table | Facts:
    """Differences that TensorRT-LLM makes whatever the port does: listed, and no faults."""
    rows = [
        (item["name"], item["effect"], _scientific(item["logit_error"]), "yes" if item["matched"] else "cannot be")
        for item in alignment.get("inherent", ())
        if item["applies"]
    ]
    if not rows:
        return Facts([], note="TensorRT-LLM computes what this base computes: no inherent difference is known.")
    columns = ("difference", "effect", "moves the base's logits by", "judged against the library's form")
    return Table(columns, rows, title="Inherent differences")


@_with_tokens
def runs_table(alignment: Document) -> Table:
    """The decode runs that were compared with each other."""
    rows = [(name, run.get("tokens_per_step"), run.get("seconds")) for name, run in alignment["runs"].items()]
    return Table(("run", "tokens per step", "seconds"), rows, title="Runs")


def _name_proposer(proposer: str | None) -> str | None:
    """The document counts heads from 0, as the tensors do; tables and plots from 1, as depths are counted."""
    head = (proposer or "").removeprefix("head ")
    return f"head {int(head) + 1} (tensors medusa_heads.{head})" if head.isdigit() else proposer


def _scientific(value: float | None) -> str | None:
    return None if value is None else f"{value:.2e}"
