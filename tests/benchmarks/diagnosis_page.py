"""Write the pages of the diagnosis: what the catalogue holds, and how often the diagnosis is right.

Run `python -m tests.benchmarks.diagnosis_page` after `python -m tests.benchmarks.diagnosis --write`. "My output is
different" is made of the catalogue alone, so that symptom, cause and fix are said in one place; the rates come from
`notebooks/howto/diagnosis_rates.json`. A test compares the pages with what this writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.diagnosis.fault import DRAFTS, EVERY, GENERATION, READING, Fault
from tests.diagnosis.missed_faults import FOUND, MISSED, WITHOUT_EFFECT
from tests.diagnosis.planted_faults import NOT_PLANTED

HOWTO = Path(__file__).resolve().parents[2] / "notebooks" / "howto"
RATES_FILE = HOWTO / "diagnosis_rates.json"
PHASES = (
    (READING, "It may not be the port", "The run, or the way it was read, differs; weights and code are right."),
    (EVERY, "Wrong from the first token on", "The context phase is wrong already: weights, config or model code."),
    (
        GENERATION,
        "The first token is right, later ones are not",
        "The context phase is right. Look at what the generation phase alone does: kernels, tree, cache.",
    ),
    (DRAFTS, "The text is right, but steps accept little", "Only the Medusa heads can be wrong."),
)
LOGITS, TOKENS = "tokens and logits", "tokens alone"

SYMPTOM_INTRO = """# My output is different

Start with the first wrong token. It says which part of this page is yours.

1. Compare token ids, not text, with the same prompt ids on both sides, greedy on both sides, and cut both at the first
   of *all* end ids. `porting-kit align` does all of this and prints the settings in force.
2. Run `porting-kit diagnose PORT.yaml --observed FILE [--logits FILE]` on what the engine wrote (`--output_npy`,
   `--output_logits_npy` of `run.py`). It tries every fault below on your port, in the emulator, and says which one
   explains what was seen, with the figures, the fix and the next best causes. It writes `diagnosis.json` and
   `diagnosis.html`.
3. Read its first sentence:
   - *a cause*: do what "fix" says, convert or patch again, and align once more;
   - *a cause, or, explaining it equally well, another*: bring the one file that it names;
   - *two causes at once*: both fixes are needed;
   - *the checkpoint is not what the rules make of its base*: the fields of `config.json` and the tensors that are not,
     each with what was expected and what was found; convert again, or set them right where another converter made them.
     NaN in a Medusa head is named too, though every token is right;
   - *the port's own model differs from the base*: engine and port agree, the port itself is wrong. The layer that parts
     first is named; where one known change brings the base back, so is that;
   - *none of the faults tried explains it*: not in the list below. Start from the layer comparison
     (`porting-kit align`);
   - *nothing to explain*: the port emits exactly this.
4. Its figures count tokens, steps and ends of texts. *Next best is X, which explains 5 of the 12*: the healthy port
   does not explain 12 of what was observed; with X it would explain 5 of those, and 7 stay. A fault that explains less
   than half of the beginning of one prompt is given up there, and its figures are of that beginning.

A token whose two best logits are closer than the measured noise is a near-tie, and no fault. Differences that
TensorRT-LLM itself makes (its tanh GELU, its fixed epsilons) are listed as inherent, and no fault either: see
[Read the verdict](reading_the_verdict.md#inherent-differences).@RATES@

"""
RATES_LINK = " How often the diagnosis is right is [measured](diagnosis_rates.md)."


def write_symptoms() -> str:
    """The page "My output is different"."""
    parts = [SYMPTOM_INTRO.replace("@RATES@", RATES_LINK if RATES_FILE.is_file() else "")]
    for phase, title, lead in PHASES:
        parts.append(f"## {title}\n\n{lead}\n")
        parts += [describe_fault(fault) for fault in CATALOGUE if fault.phase == phase]
    return "\n".join(parts).rstrip() + "\n"


def describe_fault(fault: Fault) -> str:
    """One entry: title, then a list that reads in one glance."""
    rows = (
        ("you see", fault.symptom),
        ("because", fault.cause),
        ("fix", fault.fix),
        ("releases", fault.releases),
        ("read in", fault.source),
    )
    lines = "\n".join(f"- **{name}**: {_escape(text)}" for name, text in rows)
    return f"### {_escape(_capital(fault.title))}\n\n`{fault.name}` ({fault.kind})\n\n{lines}\n"


def write_rates(rates: Mapping[str, Any]) -> str:
    """The page of measured rates."""
    with_logits, alone = rates[LOGITS], rates[TOKENS]
    processes = "1 process" if rates["workers"] == 1 else f"{rates['workers']} processes"
    parts = [
        "# How often the diagnosis is right\n",
        f"Faults of the catalogue planted in small random ports of {len(rates['families'])} families "
        f"({', '.join(rates['families'])}), {rates['seeds']} seeds, each looked for among all others. Measured on "
        f"{rates['made']} ({processes}, {rates['seconds']:.0f} s) by "
        "`python -m tests.benchmarks.diagnosis --write`; the page is written by "
        "`python -m tests.benchmarks.diagnosis_page`.\n",
        "| from | cases | kinds | first cause right | among the first three | ties | none named | without effect |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        _rate_row(LOGITS, with_logits),
        _rate_row(TOKENS, alone),
        "",
        "A tie does not count as right. A fault *without effect* changed nothing that was observed (no token, or no "
        "logit beyond noise), so there was nothing to explain. Heads change no token: their faults are looked for with "
        "the accepted lengths too, and are always without effect in tokens alone.\n",
        f"**False alarms**: {rates['false_alarms']} of {rates['clean_ports']} clean ports (families, dtypes, trees, "
        "seeds) were blamed.\n",
        "## Where it was wrong\n",
        *([_failure_row(row) for row in rates["failures"]] or ["Nowhere."]),
        "",
        *write_not_planted(rates["confusion"][LOGITS]),
        *(write_foreign(rates["foreign"]) if "foreign" in rates else []),
        *write_alignment(rates["alignment"]),
        "## Near-ties\n",
        "Clean ports: tokens called wrong though only noise chose them. Faulty ports: tokens that a fault changed and "
        "that the tolerance excuses as near-ties; a text is excused when every token that was changed in it is.\n",
        "| dtype | ports | tokens | near-ties | blamed | tolerance (mean, logits) | largest noise of a gap | "
        "wrong tokens of faults | of them excused | texts excused |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_near_tie_row(dtype, row) for dtype, row in rates["near_ties"].items()),
        "",
        "## What was named\n",
        *_confusion(rates["confusion"][LOGITS], LOGITS),
        *_confusion(rates["confusion"][TOKENS], TOKENS),
    ]
    return "\n".join(parts).rstrip() + "\n"


def write_not_planted(planted: Mapping[str, Any]) -> list[str]:
    """The section on kinds of the catalogue that were not planted, each with the reason, as lines."""
    missing = [fault.name for fault in CATALOGUE if fault.name not in planted]
    if not missing:
        return []
    lines = [f"## Not planted\n\nOf the catalogue's {len(CATALOGUE)} kinds {len(missing)} were not planted:\n"]
    lines += [f"- `{name}`: {NOT_PLANTED.get(name, 'not in the catalogue when this was measured')}" for name in missing]
    return [*lines, ""]


def write_alignment(counts: Mapping[str, Any]) -> list[str]:
    """The section on what an alignment in half precision says of the planted faults, as lines."""
    total = sum(counts[outcome] for outcome in (FOUND, MISSED, WITHOUT_EFFECT))
    lines = [
        "## Faults that an alignment fails on\n",
        f"A fault must be noticed before its cause is asked for. In {counts['dtype']}, where rounding can hide one, "
        f"the alignment failed on {counts[FOUND]} of {total} faults planted in one port of each family; "
        f"{counts[WITHOUT_EFFECT]} changed no token and no step, and {counts[MISSED]} passed though they changed some"
        f"{':' if counts['names'] else '.'}\n",
    ]
    return [*lines, *(f"- {name}" for name in counts["names"]), *([""] if counts["names"] else [])]


FOREIGN_WORDS = {
    "right": "right",
    "tied": "among equals",
    "missed": "none named",
    "wrong": "wrong name",
    "doubtful": "wrong, said to be uncertain",
    "blamed": "blamed",
    "excused": "taken for rounding",
    "no effect": "without effect",
}


def write_foreign(foreign: Mapping[str, Any]) -> list[str]:
    """The section on engines that were made without the catalogue, as lines."""
    lines = [
        "## Engines made without the catalogue\n",
        "The figures above are circular: what is planted is what is looked for. So plain Hugging Face models were "
        "spoilt by hand, as a converter, a model file or a run spoils them, decoded by another loop, written to files "
        "as `run.py` writes them, and diagnosed as `porting-kit diagnose` does. Some have a fault that the "
        'catalogue does not hold, where "none of these" is right; some are clean, in other dtypes, kernels, batches. '
        f"{foreign['cases']} diagnoses over {', '.join(foreign['bases'])}, by "
        "`python -m tests.benchmarks.diagnosis --foreign --write`.\n",
        f"| from | engines | {' | '.join(FOREIGN_WORDS.values())} |",
        f"| --- | --- | {' | '.join('---' for _ in FOREIGN_WORDS)} |",
    ]
    for source, questions in foreign["outcomes"].items():
        for question, counts in questions.items():
            cells = " | ".join(str(counts.get(outcome, 0)) for outcome in FOREIGN_WORDS)
            lines.append(f"| {source} | {question} | {cells} |")
    lines += ["", "All that was not right:\n"]
    lines += [
        f"- {row['from']}, {row['base']}: {row['engine']}: {FOREIGN_WORDS[row['outcome']]} (`{row['said']}`; "
        f"{row['to_explain']} of {row['observed']} to explain)"
        for row in foreign["not_right"]
    ] or ["Nothing."]
    return [*lines, ""]


def _rate_row(name: str, row: Mapping[str, Any]) -> str:
    cells = (row["cases"], row["kinds"], f"{row['top1']:.1%}", f"{row['top3']:.1%}", row["tied"], row["not_named"])
    return f"| {name} | {' | '.join(map(str, cells))} | {row['without_effect']} |"


def _failure_row(row: Mapping[str, Any]) -> str:
    named = "none of these" if row["named"] is None else f"`{row['named']}`"
    ties = f", tied with {', '.join(f'`{name}`' for name in row['ties'])}" if row["ties"] else ""
    return f"- {row['from']}, {row['family']}, seed {row['seed']}: `{row['fault']}` was called {named}{ties}"


def _near_tie_row(dtype: str, row: Mapping[str, Any]) -> str:
    excused = "" if row["excused_rate"] is None else f" ({row['excused_rate']:.1%})"
    cells = (
        row["ports"],
        row["tokens"],
        row["near_ties"],
        f"{row['blamed_tokens']} ({row['blamed_rate']:.2%})",
        f"{row['tolerance_mean']:.2g}",
        f"{row['gap_error_largest']:.2g}",
        row["faulty_tokens"],
        f"{row['excused_tokens']}{excused}",
        f"{row['excused_texts']} of {row['faulty_texts']}",
    )
    return f"| {dtype} | {' | '.join(map(str, cells))} |"


def _confusion(table: Mapping[str, Mapping[str, int]], source: str) -> list[str]:
    lines = [f"From {source}:\n", "| planted | named | cases |", "| --- | --- | --- |"]
    for planted, cells in table.items():
        lines += [f"| `{planted}` | {'itself' if named == planted else named} | {n} |" for named, n in cells.items()]
    return [*lines, ""]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _escape(text: str) -> str:
    """Placeholders in angle brackets and underscores at word edges are text, not markup."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")


def build_pages() -> dict[str, str]:
    """File name -> text, of the pages that can be written from what is there."""
    pages = {"my_output_is_different.md": write_symptoms()}
    if RATES_FILE.is_file():
        pages["diagnosis_rates.md"] = write_rates(json.loads(RATES_FILE.read_text(encoding="utf-8")))
    return pages


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with --check say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    parser.add_argument("--quick", action="store_true", help="no effect: the pages take no time")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    pages = build_pages()
    files = {name: HOWTO / name for name in pages}
    stale = [name for name, file in files.items() if not file.is_file() or file.read_text("utf-8") != pages[name]]
    if not options.check:
        for name in stale:
            files[name].write_text(pages[name], encoding="utf-8")
    found = {"pages": sorted(pages), "stale" if options.check else "written": stale}
    print(json.dumps(found) if options.json else found)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
