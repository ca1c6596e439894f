"""The negative control turns the verdict of a healthy port, and says so when it does not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from porting_kit.errors import VerdictFailed
from porting_kit.outcomes import Verdict
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.context import open_port_run
from porting_kit.steps.control import require_turned, run_control
from porting_kit.steps.prerequisites import require_steps

PORT = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini.yaml"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    run = open_port_run(PORT, run_folder=tmp_path_factory.mktemp("run"))
    require_steps(run, "patch", "convert")
    return AlignmentSession(run)


@pytest.mark.parametrize("gate", ["tokens", "heads"])
def test_a_planted_fault_turns_the_verdict(session, gate):
    control = run_control(session, gate)
    assert control.alignment.verdict is Verdict.FAIL
    assert gate in [found.name for found in control.alignment.gates if found.passed is False]
    assert control.fault in require_turned(control)
    kept = json.loads((session.run.folder.alignment / "control.json").read_text())
    assert (kept["fault"], kept["has_turned"]) == (control.fault, True)


def test_a_control_that_does_not_turn_raises(session):
    control = run_control(session)
    green = replace(control, alignment=replace(control.alignment, verdict=Verdict.PASS))
    with pytest.raises(VerdictFailed, match=control.fault):
        require_turned(green)
