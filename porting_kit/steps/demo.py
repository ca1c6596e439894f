"""The demo: the embedded Bloom ported three times, side by side.

On the kernels of TensorRT-LLM 0.11.0.dev2024062500, which take its head size and drop its ALiBi bias in the generation
phase, the port builds, runs and is wrong; in exact arithmetic the same port says what its base says; and fitted to
those kernels it says so on them too. That is the public question this project starts from (NVIDIA/TensorRT-LLM #1946),
and a cause that is enough to explain it. The demo fails when one of the three does not come out so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.errors import RunFolderError
from porting_kit.outcomes import StepOutcome, Verdict, verdict_remark
from porting_kit.port import load_port
from porting_kit.steps.notebook_run import notebooks_folder
from porting_kit.whole_files import read_json, write_json, write_text

RELEASE = "release:0.11.0.dev2024062500"
CAUSE = "ALiBi"
SHOWN_TEXTS = 3


@dataclass(frozen=True)
class Side:
    """One run of the demo.

    Args:
        title: what the run shows.
        kernel: the kernel profile it ran on.
        fit: the port's kernel fit, `off` or `auto`.
        expected: the verdict that the demo is about.
        folder: its run folder.
        document: the `--json` document of its run.
        alignment: its alignment; empty when the run did not get there.
    """

    title: str
    kernel: str
    fit: str
    expected: Verdict
    folder: Path
    document: Mapping[str, Any]
    alignment: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """The verdict of the check on tokens, whatever preflight said before."""
        return str(self.alignment.get("verdict", self.document.get("verdict")))

    @property
    def words(self) -> str:
        """The verdict with what must be said with it."""
        remark = verdict_remark(self.verdict, self.alignment.get("approximate_fit"))
        return f"{self.verdict}, {remark}" if remark else self.verdict

    @property
    def meant(self) -> str:
        """The verdict the run must have, so that nobody takes the failing one for a defect."""
        return "fail: what the demo shows" if self.expected is Verdict.FAIL else self.expected.value

    @property
    def cause(self) -> str:
        """The named cause, empty for a pass."""
        return str((self.alignment.get("cause") or {}).get("name") or "")

    @property
    def as_expected(self) -> bool:
        """Whether this run came out the way the demo says; the failing one must name the dropped ALiBi bias."""
        if self.verdict != self.expected.value or not self.alignment:
            return False
        if self.expected is Verdict.FAIL:
            return CAUSE in self.cause
        if self.fit == "auto":
            return (self.alignment["approximate_fit"] or {}).get("passed") is True
        return self.alignment["tokens_equal"]


@dataclass(frozen=True)
class DemoResult:
    """The runs, and one page that shows them beside each other."""

    outcome: StepOutcome
    sides: tuple[Side, ...]
    page: Path

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {**self.outcome.as_dict(), "page": str(self.page)}


def run_demo(out: Path) -> DemoResult:
    """Run the workbook on the embedded port three times at once and lay the results side by side.

    Args:
        out: folder for the run folders and the page.

    Raises:
        RunFolderError: a run ended without leaving its results; its log is quoted.
    """
    started = time.perf_counter()
    port_file = notebooks_folder() / "ports" / "bloom-mini.yaml"
    wanted = (
        ("on the release's kernels", RELEASE, "off", Verdict.FAIL, out / "bloom-mini-release"),
        ("in exact arithmetic", "exact", "off", Verdict.PASS, out / "bloom-mini-exact"),
        ("fitted, on the release's kernels", RELEASE, "auto", Verdict.PASS, out / "bloom-mini-fitted"),
    )
    print(announce_runs(wanted), file=sys.stderr, flush=True)
    processes = [_start_run(port_file, kernel, fit, folder) for _, kernel, fit, _, folder in wanted]
    sides = tuple(
        Side(title, kernel, fit, expected, folder, *_collect(process, folder))
        for (title, kernel, fit, expected, folder), process in zip(wanted, processes, strict=True)
    )
    page = out / "demo.html"
    write_text(page, render_page(sides, _decode_texts(port_file, sides)))
    outcome = _judge(sides, time.perf_counter() - started)
    write_json(out / "demo.json", outcome.as_dict())
    return DemoResult(outcome, sides, page)


def announce_runs(wanted: Sequence[tuple[str, str, str, Verdict, Path]]) -> str:
    """What is going to happen, one line a run: its folder, what it is, and how it is meant to end."""
    lines = [f"demo: {len(wanted)} runs at once, some minutes; the failing one is meant to fail"]
    lines += [
        f"  {folder.name:<20} {title}: is meant to {'fail' if expected is Verdict.FAIL else 'pass'}"
        for title, _, _, expected, folder in wanted
    ]
    return "\n".join(lines)


def _start_run(port_file: Path, kernel: str, fit: str, folder: Path) -> subprocess.Popen[str]:
    """One workbook run in a process of its own; all run at a time, one thread each, and keep going past gates."""
    command = [sys.executable, "-m", "porting_kit.cli", "run", str(port_file), "--out", str(folder), "--keep-going"]
    return subprocess.Popen(
        [*command, "--json", "-p", f"kernel={kernel}", "-p", f"fit={fit}"],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )


def _collect(process: subprocess.Popen[str], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run's JSON document and its alignment."""
    output, _ = process.communicate()
    try:
        document = json.loads(output)
    except ValueError as error:
        raise RunFolderError(
            "a run of the demo ended without a result",
            expected="a JSON document on its standard output",
            found=output[-300:] or f"nothing, exit code {process.returncode}",
            where=folder,
            next_step="read what it printed above",
        ) from error
    file = folder / "alignment" / "alignment.json"
    return document, read_json(file) if file.is_file() else {}


def _judge(sides: tuple[Side, ...], seconds: float) -> StepOutcome:
    good = all(side.as_expected for side in sides)
    figures = {
        side.title: {
            "kernel": side.kernel,
            "fit": side.fit,
            "verdict": side.verdict,
            "expected": side.expected.value,
            "cause": side.cause,
            "tokens_equal": side.alignment.get("tokens_equal"),
            "wrong_tokens": side.alignment.get("wrong_tokens"),
            "tokens_per_step": side.alignment.get("tokens_per_step"),
        }
        for side in sides
    }
    summary = (
        f"as expected: on the release's kernels the port fails ({sides[0].cause}), in exact arithmetic it passes, and "
        "fitted to the kernels it passes on them, as an approximate fit"
        if good
        else "the demo did not come out as expected: "
        + "; ".join(f"{side.title}: {side.verdict} {side.cause}".strip() for side in sides)
    )
    return StepOutcome(
        "demo",
        Verdict.PASS if good else Verdict.FAIL,
        summary,
        figures=figures,
        seconds=round(seconds, 1),
        failing_gate=None if good else "demo",
    )


def _decode_texts(port_file: Path, sides: tuple[Side, ...]) -> list[tuple[str, list[str]]]:
    """(prompt, what each side said) for the first prompts."""
    from tokenizers import Tokenizer

    from porting_kit.steps.prompts import read_prompts

    port = load_port(port_file)
    tokenizer = Tokenizer.from_file(str(port.base_path / "tokenizer.json"))
    rows = [side.alignment.get("rows", []) for side in sides]
    return [
        (prompt, [tokenizer.decode(row[index]["tokens"]) for row in rows if index < len(row)])
        for index, prompt in enumerate(read_prompts(port)[:SHOWN_TEXTS])
    ]


def render_page(sides: tuple[Side, ...], texts: list[tuple[str, list[str]]]) -> str:
    """One offline page: verdicts, causes and texts beside each other, with links to the reports."""
    from porting_kit.display.comparison import render_comparison

    return render_comparison(sides, texts)


def format_demo(result: DemoResult) -> str:
    """The runs in a table, for a terminal."""
    rows = [("", *(side.title for side in result.sides))]
    rows += [
        ("kernel", *(side.kernel for side in result.sides)),
        ("fit", *(side.fit for side in result.sides)),
        ("verdict", *(side.words for side in result.sides)),
        ("meant to", *(side.meant for side in result.sides)),
        ("wrong tokens", *(str(side.alignment.get("wrong_tokens")) for side in result.sides)),
        ("tokens per step", *(f"{side.alignment.get('tokens_per_step') or 0:.2f}" for side in result.sides)),
        ("cause", *(side.cause or "-" for side in result.sides)),
        ("report", *(str(side.folder / "report.html") for side in result.sides)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", f"demo: {result.outcome.summary} ({result.outcome.seconds:.0f} s)", f"side by side: {result.page}"]
    return "\n".join(lines)
