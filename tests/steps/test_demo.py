"""What the demo says in a terminal: which run is which, how each is meant to end, and how it ended."""

from pathlib import Path

from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.steps.demo import DemoResult, Side, announce_runs, format_demo

ALIGNMENT = {"wrong_tokens": 0, "tokens_per_step": 2.5, "approximate_fit": None, "cause": None}


def make_side(name: str, expected: Verdict, verdict: str, **changes) -> Side:
    return Side(name, "exact", "off", expected, Path(name), {}, {**ALIGNMENT, "verdict": verdict, **changes})


def test_the_failing_run_is_announced_as_meant_to_fail():
    wanted = [("dropped", "release:0.11.0", "off", Verdict.FAIL, Path("runs/one"))]
    wanted += [("exact", "exact", "off", Verdict.PASS, Path("runs/two"))]
    lines = announce_runs(wanted).splitlines()
    assert "one" in lines[1]
    assert "meant to fail" in lines[1]
    assert "two" in lines[2]
    assert "meant to pass" in lines[2]


def test_a_fitted_run_is_never_just_a_pass_and_the_failing_one_is_said_to_be_meant():
    sides = (
        make_side("dropped", Verdict.FAIL, "fail", wrong_tokens=82),
        make_side("exact", Verdict.PASS, "pass"),
        make_side("fitted", Verdict.PASS, "pass", approximate_fit={"passed": True}),
    )
    result = DemoResult(StepOutcome("demo", Verdict.PASS, "as expected"), sides, Path("demo.html"))
    rows = {line.split("  ")[0].strip(): line for line in format_demo(result).splitlines() if line}
    assert rows["verdict"].split("  ")[-1].strip() == "pass, approximate fit"
    assert rows["verdict"].count("approximate") == 1
    assert "fail: what the demo shows" in rows["meant to"]
