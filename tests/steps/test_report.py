"""The report is one file that needs no network, says what was not covered, and is written for broken-off runs too."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
import yaml

from porting_kit.alignment.generation_settings import GREEDY_SETTINGS, GenerationSettings
from porting_kit.alignment.noise import LogitsNoise
from porting_kit.alignment.oracle import JudgedText
from porting_kit.alignment.result import AlignmentResult, Gate, LayerError, LayerReport
from porting_kit.medusa.generation import TokenOrigins
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.steps.context import finish_step, open_port_run, running_step
from porting_kit.steps.report import combine_outcomes, write_report
from porting_kit.whole_files import write_json, write_text

ALL = tuple(Coverage)
EMULATED = ALL[:3]


@pytest.fixture
def run(tmp_path):
    file = tmp_path / "port.yaml"
    file.write_text(yaml.safe_dump({"name": "tiny", "base": "base", "heads": "heads"}))
    return open_port_run(file, run_folder=tmp_path / "run")


def finish(run, step, verdict=Verdict.PASS, **fields):
    fields = {"inputs": run.inputs(step), **fields}
    outcome = StepOutcome(step, verdict, fields.pop("summary", f"{step} is done"), **fields)
    run.folder.finish(outcome)
    return outcome


def make_alignment(verdict=Verdict.FAIL) -> AlignmentResult:
    """A small alignment of one text of four tokens, the third wrong in the tree."""
    origins = TokenOrigins(
        torch.tensor([0, 1, 1, 2]),
        torch.tensor([-1, 0, 1, 0]),
        torch.tensor([-1, 0, -1, -1]),
        torch.tensor([0, 0, 1, 0]),
    )
    status = torch.tensor([0, 0, 2, 0]) if verdict is Verdict.FAIL else torch.zeros(4, dtype=torch.long)
    margins = torch.tensor([3.0, 2.0, -1.5, 2.0], dtype=torch.float64)
    text = JudgedText((5, 6, 7, 8), margins, status, torch.tensor([5, 6, 9, 8]), origins)
    error = LayerError("transformer.layers.0.attention.dense", "h.0.self_attention.dense", "generation", 0.4, 0.7)
    return AlignmentResult(
        verdict=verdict,
        summary="1 of 4 tokens is wrong",
        covered=EMULATED,
        gates=(Gate("tokens", verdict is Verdict.PASS, "1 wrong"), Gate("repeat", True, "the same again")),
        texts=(text,),
        prompts=((1, 2, 3),),
        settings=GenerationSettings(GREEDY_SETTINGS, {}, (0,), {0: ("config",)}),
        noise=LogitsNoise("float16", 4, 1e-3, 1e-4, 1e-3, 1e-4, 0, 0.002, 1.0),
        tokens_per_step=1.5,
        accepted_by_depth=(0.5,),
        head_agreement=(0.6,),
        predicted_tokens_per_step=1.6,
        context_error=1e-4,
        tree_error=0.3,
        layers=LayerReport((error,), 1e-3, error, "the attention of layer 0 parts first"),
        runs={"greedy": {"tokens_per_step": 1.0, "seconds": 0.1}},
    )


def fill_run(run, verdict=Verdict.FAIL):
    """A whole run whose alignment has the given verdict."""
    finish(run, "preflight")
    finish(run, "patch")
    write_text(run.folder.patched / "port.patch", "--- a/m.py\n+++ b/m.py\n@@ -1 +1,2 @@\n one\n+two <x>\n")
    finish(run, "convert", covered=(Coverage.WEIGHTS,))
    receipt = {
        "sources": [{"name": "wte", "file": "m", "targets": ["vocab"], "reason": ""}],
        "targets": [
            {
                "name": "vocab",
                "origin": "base",
                "sources": ["wte"],
                "operations": ["Pad"],
                "dtype": "float16",
                "shapes": [[8, 4]],
            }
        ],
        "fields": [{"target": None, "value": 7, "source": "odd_key", "kind": "dropped", "note": "not known"}],
        "warnings": ["digits are lost"],
    }
    write_json(run.folder.checkpoint / "receipt.json", receipt)
    write_json(run.folder.checkpoint / "medusa_choices.json", [[0], [0, 0]])
    finish(run, "build", Verdict.NOT_RUN)
    write_text(run.folder.engine / "build.sh", "trtllm-build --max_beam_width 1\n")
    flag = {"name": "max_beam_width", "value": "1", "reason": "one greedy sequence"}
    write_json(run.folder.engine / "build_plan.json", {"flags": [flag], "remarks": ["no context logits"]})
    cause = {"name": "alibi_dropped", "verdict": "ALiBi is dropped in generation", "fix": "fit: [fold_alibi]"}
    figures = {"cause": cause} if verdict is Verdict.FAIL else {}
    gate = "tokens" if verdict is Verdict.FAIL else None
    alignment = {**make_alignment(verdict).as_dict(), "cause": figures.get("cause")}
    write_json(run.folder.alignment / "alignment.json", alignment)
    control = {
        "fault": "rope_base_lost",
        "has_turned": True,
        "gates": [{"name": "tokens", "passed": False}],
        "summary": "s",
    }
    write_json(run.folder.alignment / "control.json", control)
    return finish(run, "align", verdict, covered=EMULATED, figures=figures, failing_gate=gate, summary="1 token wrong")


class Resources(HTMLParser):
    """Collects every address the page would load or link, and the tags it uses."""

    def __init__(self):
        super().__init__()
        self.addresses, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attrs if name in ("src", "href", "srcset", "data", "poster", "action")
        ]


def read_page(run) -> tuple[str, Resources]:
    page = run.folder.report.read_text(encoding="utf-8")
    resources = Resources()
    resources.feed(page)
    return page, resources


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL])
def test_the_page_loads_nothing_and_runs_no_script(run, verdict):
    fill_run(run, verdict)
    write_report(run)
    page, resources = read_page(run)
    assert {
        address for address in resources.addresses if not address.startswith(("#", "data:image/png;base64,"))
    } == set()
    assert "data:image/png;base64," in page
    assert not {"script", "link", "iframe", "object"} & set(resources.tags)
    assert not re.search(r"url\(|@import", page)
    assert 'name="viewport"' in page


def test_a_failed_run_names_gate_cause_and_fix_first(run):
    fill_run(run)
    result = write_report(run)
    page, _ = read_page(run)
    head = page[: page.index("<main>")]
    for text in ("✗ fail", "1 token wrong", "tokens", "ALiBi is dropped in generation", "fit: [fold_alibi]"):
        assert text in head
    assert "Not covered:</b> kernel arithmetic, engine" in head
    assert (result.outcome.verdict, result.outcome.failing_gate) == (Verdict.FAIL, "tokens")


def test_every_step_has_its_section(run):
    fill_run(run)
    write_report(run)
    page, _ = read_page(run)
    expected = (
        "+two &lt;x&gt;",
        "odd_key",
        "digits are lost",
        "trtllm-build --max_beam_width 1",
        "one greedy sequence",
        "rope_base_lost",
        "depth 1",
        "the attention of layer 0 parts first",
        "SHA-256",
        "Draft tree: 2 draft nodes",
    )
    for text in expected:
        assert text in page


def test_a_pass_says_pass(run):
    fill_run(run, Verdict.PASS)
    assert write_report(run).outcome.verdict is Verdict.PASS
    assert "✓ pass" in read_page(run)[0]


def test_an_approximate_fit_is_never_just_a_pass(run):
    outcome = fill_run(run, Verdict.PASS)
    run.folder.finish(replace(outcome, figures={"approximate_fit": {"passed": True}}))
    write_report(run)
    page, _ = read_page(run)
    assert "✓ pass, approximate fit" in page[: page.index("<main>")]


@pytest.mark.parametrize("steps", [(), ("preflight",), ("preflight", "patch", "convert")])
def test_a_broken_off_run_has_a_report_too(run, steps):
    for step in steps:
        finish(run, step)
    result = write_report(run)
    assert result.outcome.verdict is Verdict.NOT_RUN
    assert "not run yet" in result.outcome.summary
    assert "– not run" in read_page(run)[0]


def test_a_stale_step_is_named_and_is_no_pass(run):
    fill_run(run, Verdict.PASS)
    changed = replace(run, port=run.port.model_copy(update={"kernel": "release:0.11.0.dev2024062500"}))
    result = write_report(changed)
    assert result.outcome.verdict is Verdict.NOT_RUN
    assert "stale, rerun it: port.kernel changed since" in result.outcome.summary
    assert "stale" in read_page(run)[0]


def test_a_step_that_says_the_same_again_leaves_the_reports_outcome(run):
    """Figures may differ, free disk for one; a step that dies, or says something else, makes the report one of old."""
    fill_run(run, Verdict.PASS)
    report = write_report(run).outcome
    earlier = run.folder.outcome("preflight")
    with running_step(run, "preflight") as watch:
        assert run.folder.outcome("report") is None
        finish_step(run, replace(earlier, figures={"disk": "5 GiB free"}), watch)
    assert run.folder.outcome("report") == report
    with pytest.raises(ValueError, match="died"), running_step(run, "preflight"):
        raise ValueError("died")
    assert run.folder.outcome("report") is None
    run.folder.finish(earlier)
    for change in ({"summary": "other"}, {"verdict": Verdict.FAIL}, {"failing_gate": "disk"}):
        report = write_report(run).outcome
        with running_step(run, "preflight") as watch:
            finish_step(run, replace(earlier, **change), watch)
        assert run.folder.outcome("report") is None


def test_text_of_the_run_cannot_become_markup(run):
    finish(run, "preflight", Verdict.FAIL, summary="<script>alert(1)</script>", failing_gate="<b>gate</b>")
    write_report(run)
    page, resources = read_page(run)
    assert "script" not in resources.tags
    assert "&lt;b&gt;gate&lt;/b&gt;" in page


def outcomes_of(**verdicts: str) -> dict[str, StepOutcome]:
    return {
        step: StepOutcome(step, Verdict(verdict), step, failing_gate="g" if verdict in ("fail", "refused") else None)
        for step, verdict in verdicts.items()
    }


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"preflight": "pass", "patch": "pass", "convert": "pass", "build": "not_run", "align": "pass"}, "pass"),
        ({"preflight": "pass", "patch": "pass", "convert": "pass", "build": "pass", "align": "fail"}, "fail"),
        ({"preflight": "refused", "patch": "pass", "convert": "pass", "build": "not_run", "align": "fail"}, "fail"),
        ({"preflight": "refused", "patch": "pass", "convert": "pass", "build": "not_run", "align": "pass"}, "refused"),
        ({"preflight": "pass", "patch": "pass", "convert": "pass", "build": "pass", "align": "not_run"}, "not_run"),
        ({"preflight": "pass", "align": "pass"}, "not_run"),
        ({"preflight": "fail"}, "fail"),
        ({}, "not_run"),
    ],
)
def test_the_run_has_the_worst_verdict_and_passes_only_when_all_is_there(verdicts, expected):
    assert combine_outcomes(outcomes_of(**verdicts)).verdict.value == expected


@pytest.mark.parametrize(("verdict", "count"), [(Verdict.FAIL, 3), (Verdict.REFUSED, 1), (Verdict.NOT_RUN, 1)])
def test_only_a_step_that_judged_something_covers_it(verdict, count):
    outcomes = {
        "convert": StepOutcome("convert", Verdict.PASS, "", covered=(Coverage.WEIGHTS,)),
        "align": StepOutcome("align", verdict, "", covered=EMULATED, failing_gate="tokens"),
    }
    assert combine_outcomes(outcomes).covered == ALL[:count]
