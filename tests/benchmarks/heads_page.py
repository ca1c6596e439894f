"""Write the measured tables of the page "Heads and trees" from the figures that the GPU benchmark kept.

Run `python -m tests.benchmarks.heads_page` after `python -m tests.benchmarks.gpu_decode --write`. The figures are in
`notebooks/howto/figures/heads_speed.json`; what the page says between the two marks is made of them alone, and a test
compares the two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOWTO = Path(__file__).resolve().parents[2] / "notebooks" / "howto"
PAGE, FIGURES = HOWTO / "heads_and_trees.md", HOWTO / "figures" / "heads_speed.json"
START, END = "<!-- measured -->\n", "<!-- end measured -->\n"
NAMES = {"bloom": "Bloom", "qwen2": "Qwen2", "mc_sim_7b_63": "stock, 64 nodes"}
KINDS = {"heads": "documentation", "questions": "questions"}
UNKEPT = ("curve", "chosen", "programs", "choice_seconds")


def keep_figures(document: Mapping[str, Any]) -> None:
    """Put the parts of a run into the kept figures; parts that the run did not have stay as they were."""
    kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {}
    for part in ("bloom", "qwen2", "heads", "questions", "smollm2"):
        if part in document and "error" not in document[part]:
            row = {name: value for name, value in document[part].items() if name not in UNKEPT}
            kept[part] = {"device": document["device"], "torch": document["torch"], **round_numbers(row)}
    FIGURES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def round_numbers(value: Any) -> Any:
    """The same document with four digits a number."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: round_numbers(item) for name, item in value.items()}
    return [round_numbers(item) for item in value] if isinstance(value, list) else value


def write_section(figures: Mapping[str, Any]) -> str:
    """What the page says between its marks."""
    parts = [write_shapes(figures), write_acceptance(figures), write_smollm2(figures)]
    return "\n\n".join(parts) + "\n"


def write_shapes(figures: Mapping[str, Any]) -> str:
    """Steps of 7B shape against the bytes they read; the mean step where heads end as SmolLM2's do."""
    shapes = [name for name in ("bloom", "qwen2") if name in figures]
    share = figures["heads"]["trees"]["mc_sim_7b_63"]["ends_foreseen"]
    lines = [
        "| 7B shape | greedy step | floor | over the floor | 64-node Medusa step: end foreseen | not foreseen "
        f"| mean, {share:.0%} foreseen | Hugging Face token |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in shapes:
        row = figures[name]
        steps, floor = row["device_step_ms"], row["floor_ms"]["greedy"]
        greedy, foreseen, other = (steps[key] for key in ("1 nodes", "64 nodes", "64 nodes, not foreseen"))
        mean = share * foreseen + (1 - share) * other
        medusa = " | ".join(f"{step:.2f} ms, {step / greedy:.2f} greedy" for step in (foreseen, other, mean))
        lines.append(
            f"| {NAMES[name]} | {greedy:.2f} ms | {floor:.2f} ms | {greedy / floor:.2f} | {medusa} "
            f"| {row['transformers_ms_per_token']:.1f} ms |"
        )
    return "\n".join(lines)


def write_acceptance(figures: Mapping[str, Any]) -> str:
    """Accuracy by head, and tokens a step predicted and measured, of each kind of prompts."""
    heads = [f"head {row['head'] + 1}" for row in figures["heads"]["accuracy_on_judged_rows"]]
    lines = ["| SmolLM2's heads: top-1, top-5 | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for part, kind in KINDS.items():
        shares = (f"{row['top1']:.1%}, {row['top5']:.1%}" for row in figures[part]["accuracy_on_judged_rows"])
        lines.append(f"| {kind} | " + " | ".join(shares) + " |")
    lines += ["", "| prompts | tree | nodes | predicted tokens a step | measured | measured / predicted | texts |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for part, kind in KINDS.items():
        for name, row in figures[part]["trees"].items():
            lines.append(
                f"| {kind} | {_title(name)} | {row['nodes']} | {row['predicted']:.3f} | {row['measured']:.3f} "
                f"| {row['measured_over_predicted']:.3f} | {row['texts']} |"
            )
    return "\n".join(lines)


def write_smollm2(figures: Mapping[str, Any]) -> str:
    """Step times of SmolLM2, and what the tokens a step of each kind of prompts make of them.

    What the clock says of whole texts follows where the run that timed the steps decoded with these heads.
    """
    row = figures["smollm2"]
    steps, decode = row["device_step_ms"], row.get("decode_ms_per_token")
    greedy = steps["1 nodes"]
    heads = ["SmolLM2", "step", "over greedy", *(f"faster than greedy: {kind}" for kind in KINDS.values())]
    heads += ["by the clock, after the context phase", "whole texts"] if decode else []
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " --- |" * (len(heads) - 1)]
    lines.append(f"| greedy | {greedy:.2f} ms |{' 1 |' * (len(heads) - 2)}")
    for name, tree in figures["heads"]["trees"].items():
        step = steps.get(f"{tree['nodes']} nodes")
        if step is None:
            continue
        gains = [figures[part]["trees"][name]["measured"] * greedy / step for part in KINDS]
        if decode:
            gains += [decode["greedy"] / decode[name], row["speedup_over_greedy"][name]]
        cells = " | ".join(f"{gain:.2f}" for gain in (step / greedy, *gains))
        lines.append(f"| {_title(name)} | {step:.2f} ms | {cells} |")
    return "\n".join(lines)


def _title(name: str) -> str:
    return NAMES.get(name, name.replace("best", "chosen,") + " nodes")


def build_page(page: str, figures: Mapping[str, Any]) -> str:
    """The page with its measured section written anew."""
    before, rest = page.split(START)
    return before + START + write_section(figures) + END + rest.split(END)[1]


def main() -> int:
    """Write the page."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    PAGE.write_text(build_page(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
