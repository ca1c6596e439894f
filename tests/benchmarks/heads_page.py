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
UNKEPT = ("curve", "chosen", "programs", "choice_seconds")


def keep_figures(document: Mapping[str, Any]) -> None:
    """Put the parts of a run into the kept figures; parts that the run did not have stay as they were."""
    kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {}
    for part in ("bloom", "qwen2", "heads", "smollm2"):
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
    parts = [write_shapes(figures), write_acceptance(figures["heads"]), write_smollm2(figures)]
    return "\n\n".join(parts) + "\n"


def write_shapes(figures: Mapping[str, Any]) -> str:
    """Steps of 7B shape against the bytes they read."""
    shapes = [name for name in ("bloom", "qwen2") if name in figures]
    lines = [
        "| 7B shape | greedy step | floor | over the floor | 64-node Medusa step | over greedy | Hugging Face token |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in shapes:
        row = figures[name]
        greedy, medusa = row["device_step_ms"]["1 nodes"], row["device_step_ms"]["64 nodes"]
        floor = row["floor_ms"]["greedy"]
        lines.append(
            f"| {NAMES[name]} | {greedy:.2f} ms | {floor:.2f} ms | {greedy / floor:.2f} | {medusa:.2f} ms "
            f"| {medusa / greedy:.2f} | {row['transformers_ms_per_token']:.1f} ms |"
        )
    return "\n".join(lines)


def write_acceptance(heads: Mapping[str, Any]) -> str:
    """Accuracy by head, and tokens a step predicted and measured."""
    lines = [
        "| SmolLM2's heads | "
        + " | ".join(f"head {row['head'] + 1}" for row in heads["accuracy_on_judged_rows"])
        + " |"
    ]
    lines.append("| --- |" + " --- |" * len(heads["accuracy_on_judged_rows"]))
    for key, title in (("top1", "top-1"), ("top5", "top-5")):
        shares = (f"{row[key]:.1%}" for row in heads["accuracy_on_judged_rows"])
        lines.append(f"| {title} | " + " | ".join(shares) + " |")
    lines += ["", "| tree | nodes | predicted tokens a step | measured | measured / predicted | texts |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, row in heads["trees"].items():
        title = NAMES.get(name, name.replace("best", "chosen,") + " nodes")
        lines.append(
            f"| {title} | {row['nodes']} | {row['predicted']:.3f} | {row['measured']:.3f} "
            f"| {row['measured_over_predicted']:.3f} | {row['texts']} |"
        )
    return "\n".join(lines)


def write_smollm2(figures: Mapping[str, Any]) -> str:
    """Step times of SmolLM2, what its tokens a step make of them, and what the clock says of whole texts."""
    row, trees = figures["smollm2"], figures["heads"]["trees"]
    steps, by_clock = row["device_step_ms"], row["speedup_over_greedy"]
    greedy = steps["1 nodes"]
    lines = [
        "| SmolLM2 | step | over greedy | tokens a step | faster than greedy | whole texts, by the clock |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| greedy | {greedy:.2f} ms | 1 | 1 | 1 | 1 |",
    ]
    for name, tree in trees.items():
        step = steps.get(f"{tree['nodes']} nodes")
        if step is None:
            continue
        title = NAMES.get(name, name.replace("best", "chosen,") + " nodes")
        lines.append(
            f"| {title} | {step:.2f} ms | {step / greedy:.2f} | {tree['measured']:.2f} "
            f"| {tree['measured'] * greedy / step:.2f} | {by_clock[name]:.2f} |"
        )
    theirs = row["step_ms"]["transformers generate"]
    against = 1 / row["speedup_over_transformers"]["greedy"]
    lines.append(f"| Hugging Face `generate`, {theirs:.1f} ms a token | | | 1 | | {against:.2f} |")
    return "\n".join(lines)


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
