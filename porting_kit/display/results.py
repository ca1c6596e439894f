"""The steps' results as tables: gates, config fields, the account of tensors, texts, the steps of a run.

Every function takes the result's own rows or their JSON form alike, so that a notebook shows the object in hand and
the report shows the same table read back from the run folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from porting_kit.display.tables import Code, Facts, Folded, Preformatted, Stack, Table, VerdictMark
from porting_kit.outcomes import Coverage, StepOutcome, Verdict, not_covered, verdict_remark
from porting_kit.steps.preflight import describe_pin

LONG_VALUE = 60


def outcome_mark(outcome: StepOutcome) -> VerdictMark:
    """The verdict, with what must be said with it."""
    verdict = outcome.verdict.value
    return VerdictMark(verdict, verdict_remark(verdict, outcome.figures.get("approximate_fit")))


def outcome_facts(outcome: StepOutcome) -> Facts:
    """One step's outcome: verdict, what it covered and what it did not."""
    pairs: list[tuple[str, Any]] = [("verdict", outcome_mark(outcome)), ("result", outcome.summary)]
    if outcome.failing_gate:
        pairs.append(("failing gate", outcome.failing_gate))
    if outcome.covered:
        pairs += [
            ("covered", [item.value for item in outcome.covered]),
            ("not covered", [item.value for item in not_covered(outcome.covered)]),
        ]
    return Facts([*pairs, ("seconds", round(outcome.seconds, 1))], title=f"Step {outcome.step}")


def coverage_table(covered: Sequence[Coverage], reasons: Mapping[str, str] | None = None) -> Table:
    """What the verdict covered, of everything it could."""
    reasons = reasons or {}
    rows = [(item.value, "covered" if item in covered else "not covered", reasons.get(item.value)) for item in Coverage]
    columns = ("part", "this verdict", "why") if reasons else ("part", "this verdict")
    return Table(columns, [row[: len(columns)] for row in rows])


def steps_table(outcomes: Mapping[str, StepOutcome], expected: Sequence[str] = ()) -> Table:
    """One row a step; those that have not run are listed as such."""
    rows = [(step, outcome_mark(item), item.summary, round(item.seconds, 1)) for step, item in outcomes.items()]
    rows += [(step, VerdictMark(Verdict.NOT_RUN.value), "", None) for step in expected if step not in outcomes]
    return Table(("step", "verdict", "result", "seconds"), rows)


def gates_table(gates: Iterable[Any], *, title: str = "Gates of the release and the card") -> Stack:
    """Preflight's gates: those that need something in full, those that pass folded up."""
    order = ("refused", "silent", "mended")
    rows = [_as_dict(gate) for gate in gates]
    open_rows = sorted((row for row in rows if row["verdict"] != "pass"), key=lambda row: order.index(row["verdict"]))
    passed = [row for row in rows if row["verdict"] == "pass"]
    cells = [
        (
            row["name"],
            _shorten(row["value"]),
            row.get("expected"),
            VerdictMark(row["verdict"]),
            row.get("remedy"),
            row.get("effect"),
            row.get("source"),
        )
        for row in open_rows
    ]
    columns = ("gate", "this model", "wanted", "verdict", "what to do", "otherwise", "read in")
    note = "" if cells else "Every gate passes."
    quiet = [(row["name"], _shorten(row["value"]), row.get("expected"), row.get("source")) for row in passed]
    folded = Folded(f"{len(passed)} gates pass", Table(("gate", "this model", "wanted", "read in"), quiet))
    return Stack((Table(columns, cells, title=title, note=note), folded))


def field_table(rows: Iterable[Any], *, title: str = "Config fields") -> Table:
    """Where each field of the checkpoint's config came from. Dropped ones come first, then the defaulted ones."""
    order = {"dropped": 0, "defaulted": 1, "derived": 2, "kept": 3}
    fields = sorted((_as_dict(row) for row in rows), key=lambda row: order.get(row["kind"], 0))
    cells = [
        (
            Code(str(row["source"])) if row["source"] else None,
            Code(str(row["target"])) if row["target"] else None,
            Code(_shorten(row["value"])),
            row["kind"],
            row.get("note") or "",
        )
        for row in fields
    ]
    counts = Counter(row["kind"] for row in fields)
    note = ", ".join(f"{counts[kind]} {kind}" for kind in order if counts[kind])
    return Table(("source field", "checkpoint field", "value", "how", "note"), cells, title=title, note=note)


def accounting_table(sources: Iterable[Any], targets: Iterable[Any]) -> Table:
    """Both sides of the account: how many tensors, and that none is left over."""
    sources, targets = [_as_dict(item) for item in sources], [_as_dict(item) for item in targets]
    dropped = [item for item in sources if not item["targets"]]
    origins = Counter(item["origin"] for item in targets)
    rows = [
        ("source tensors used", len(sources) - len(dropped), ""),
        ("source tensors dropped", len(dropped), "; ".join(sorted({item["reason"] for item in dropped}))),
        *((f"target tensors from {origin}", count, _ORIGINS.get(origin, "")) for origin, count in origins.items()),
    ]
    return Table(("tensors", "count", "why"), rows, title="Account of tensors", note="Every tensor is in one row.")


_ORIGINS = {
    "base": "rules of the model's family",
    "heads": "the heads' files",
    "tied": "the embedding stands in for the output matrix",
    "copied": "the base's output matrix, which these heads share",
    "zeros": "the base has no such tensor and the runtime wants one",
}


def tensor_table(targets: Iterable[Any], *, limit: int | None = 12) -> Table:
    """Where each target tensor came from."""
    rows = []
    for item in map(_as_dict, targets):
        shapes = [tuple(shape) for shape in item["shapes"]]
        ranks = f" on each of {len(shapes)} ranks" if len(shapes) > 1 else ""
        rows.append(
            (
                Code(item["name"]),
                ", ".join(item["operations"]) or "copied",
                f"{' × '.join(map(str, shapes[0]))}{ranks}" if shapes else None,
                item["dtype"],
                Code(", ".join(item["sources"]) or "none"),
            )
        )
    return Table(("target", "operations", "shape", "dtype", "from"), rows, title="Tensors", limit=limit)


def base_facts(base: Any, heads: Any) -> Facts:
    """Base and heads as their headers describe them.

    Args:
        base: `architectures.BaseConfig`.
        heads: `conversion.HeadSet`.
    """
    group = base.num_heads // base.num_kv_heads
    own = "own output matrices" if heads.own_output else "the base's output matrix"
    pairs = [
        ("family", base.family),
        ("TensorRT-LLM architecture", Code(base.architecture)),
        ("layers, hidden size", f"{base.num_layers}, {base.hidden_size}"),
        ("query heads / key-value heads / head size", f"{base.num_heads} / {base.num_kv_heads} / {base.head_size}"),
        ("query heads per key-value head", group),
        ("positions", base.position_kind),
        ("vocabulary", base.vocab_size),
        ("heads", f"{heads.num_heads} of {heads.found_heads} found, {heads.num_layers} residual layers each, {own}"),
        ("heads' layout", heads.layout),
    ]
    return Facts([*pairs, *(("warning", warning) for warning in heads.warnings)], title="Base and heads")


def fit_plan_table(fit: Any | None) -> Table:
    """The transforms that will make the model fit the kernels, and which gates each is there for.

    Args:
        fit: `kernel_fit.FitPlan`; None when no combination passes every gate.
    """
    if fit is None:
        return Table(("transform",), [], title="Kernel fit", note="no combination of transforms passes every gate")
    rows = [(Code(str(step)), fit.mends.get(step.name, ())) for step in fit.steps]
    if not rows:
        return Table(("transform",), [], title="Kernel fit", note="none: the model stays as it is")
    before, after = fit.cache_bytes_per_token
    note = f"{'Exact' if fit.exact else 'Approximate'}; KV cache of one token: {before:,} bytes before, {after:,} after"
    note += f"; right for up to {fit.length_tokens} tokens." if fit.length_tokens else "."
    return Table(("transform", "mends"), rows, title="Kernel fit", note=note)


def drops_table(drops: Iterable[Any], file: str) -> Table:
    """Where a model definition loses the speculative-decoding arguments."""
    rows = [
        (drop.line, Code(f"{drop.class_name}.{drop.method}"), Code(drop.argument), drop.kind, f"the {drop.level}")
        for drop in drops
    ]
    note = "Nothing is dropped: every argument reaches every attention call." if not rows else ""
    columns = ("line", "method", "argument", "fault", "does not reach")
    return Table(columns, rows, title=f"Dropped on the way down in {file}", note=note)


def edits_table(edits: Iterable[Any]) -> Table:
    """What the patch adds, in the order of the text."""
    rows = [
        (edit.line, Code(f"{edit.class_name}.{edit.method}"), Code(edit.site), Code(", ".join(edit.added)))
        for edit in edits
    ]
    note = "" if rows else "The model already passes the arguments; only the Medusa class is added."
    return Table(("line", "method", "at", "added"), rows, title="Edits", note=note)


def module_view(module: Any | None) -> Stack:
    """The module for `--model_cls_file`, folded up; None when the model was refused."""
    if module is None:
        return Stack((Facts([], note="The model was refused, so there is no module."),))
    lines = module.source.count("\n")
    facts = [
        ("file", Code(module.file_name)),
        ("class", Code(module.class_name)),
        ("base", Code(module.base_class_name)),
    ]
    return Stack((Facts(facts), Folded(f"The module, {lines} lines", Preformatted(module.source))))


def flags_table(flags: Iterable[Any]) -> Table:
    """A planned command's flags, each with the reason it is there."""
    rows = [(Code(f"--{flag['name']}"), Code(flag["value"] or ""), flag["reason"]) for flag in map(_as_dict, flags)]
    return Table(("flag", "value", "why"), rows, title="Flags")


def pin_facts(pin: Any) -> Facts:
    """Which release range to build with, and the others; says so when none takes the model as it is."""
    others = [f"{item.facts.name}: {len(item.refused)} refused, {len(item.silent)} silent" for item in pin.others[:4]]
    release = pin.candidate.facts.name if pin.usable else "none takes the model as it is"
    return Facts([("release", release), ("why", describe_pin(pin)), ("others", others)], title="Release")


def _as_dict(row: Any) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    return asdict(row) if is_dataclass(row) else row.as_dict()


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONG_VALUE else f"{text[: LONG_VALUE - 2]} …"
