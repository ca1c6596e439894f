"""What an alignment found: gates, first divergence, texts, acceptance, errors layer by layer, cause.

Every function takes `AlignmentResult.as_dict()`, the document the align step keeps in the run folder, so that notebook
and report show the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from porting_kit.display.plots import Picture, plot_accepted_lengths, plot_layer_errors, plot_margins
from porting_kit.display.tables import Code, Facts, Stack, Table, VerdictMark

Document = Mapping[str, Any]
LAYERS_SHOWN = 12


def alignment_facts(alignment: Document) -> Facts:
    """The figures a reader looks for first."""
    noise = alignment["noise"]
    pairs: list[tuple[str, Any]] = [
        ("verdict", VerdictMark(alignment["verdict"])),
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


def checks_table(alignment: Document) -> Table:
    """The gates of the alignment, each with what was found."""
    words = {True: "pass", False: "fail", None: "not_run"}
    rows = [(gate["name"], VerdictMark(words[gate["passed"]]), gate["detail"]) for gate in alignment["gates"]]
    return Table(("check", "verdict", "found"), rows, title="Checks")


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
        ("proposed by", first["proposed_by"]),
        ("emitted token", first["emitted"]),
        ("the base prefers", first["preferred"]),
        ("margin (logits)", first["margin"]),
    ]
    return Facts([(name, value) for name, value in pairs if value is not None], title="First divergence")


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


def margins_plot(alignment: Document, prompt: int | None = None) -> Picture | Facts:
    """Margins along one prompt's text: that of the first divergence unless another is asked for."""
    if prompt is None:
        prompt = alignment["first_divergence"]["prompt"] if alignment["first_divergence"] else 0
    if prompt >= len(alignment["rows"]):
        return Facts([], note="No text to draw.")
    row = alignment["rows"][prompt]
    tolerance = alignment["noise"]["near_tie_tolerance"]
    return plot_margins(row["margins"], tolerance=tolerance, near_ties=row["near_ties"], wrong=row["wrong"])


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
    return Stack((Facts([], note=layers["sentence"]), picture, table))


def cause_view(cause: Document | None) -> Stack | Facts:
    """What explains a failed alignment: cause, evidence, fix, the next best causes."""
    if not cause:
        return Facts([], note="No cause was looked for: nothing is wrong, or the step did not ask.")
    known = ("cause", "sentence", "evidence", "fix", "undecided", "extra_file")
    pairs = [(name.replace("_", " "), cause[name]) for name in known if cause.get(name)]
    others = cause.get("next_best") or cause.get("ranking") or []
    facts = Facts(pairs, title="Cause")
    if not others:
        return facts
    columns = tuple(dict.fromkeys(name for other in others for name in other))
    return Stack((facts, Table(columns, [tuple(other.get(name) for name in columns) for other in others])))


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


def runs_table(alignment: Document) -> Table:
    """The decode runs that were compared with each other."""
    rows = [(name, run.get("tokens_per_step"), run.get("seconds")) for name, run in alignment["runs"].items()]
    return Table(("run", "tokens per step", "seconds"), rows, title="Runs")


def _scientific(value: float | None) -> str | None:
    return None if value is None else f"{value:.2e}"
