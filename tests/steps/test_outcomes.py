"""What a step's outcome says of itself."""

from __future__ import annotations

import pytest

from porting_kit.outcomes import StepOutcome, Verdict


@pytest.mark.parametrize(
    ("verdict", "summary", "said"),
    [
        (Verdict.PASS, "8 tensors", "pass - 8 tensors"),
        (Verdict.PASS, "pass, approximate fit: all 8 tokens", "pass, approximate fit: all 8 tokens"),
        (Verdict.FAIL, "fail at logits: 1e-3", "fail at logits: 1e-3"),
        (Verdict.REFUSED, "pass is not asked", "refused - pass is not asked"),
    ],
)
def test_a_verdict_is_said_once(verdict: Verdict, summary: str, said: str):
    assert StepOutcome(step="align", verdict=verdict, summary=summary).said == said
