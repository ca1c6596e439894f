"""Messages keep one order, list at most ten items, and exit codes follow the kind."""

import pytest

from porting_kit import errors
from porting_kit.outcomes import Verdict


def test_message_order():
    error = errors.HeadsError("s", expected="e", found="f", where="w", next_step="n", items=range(12))
    lines = error.message.splitlines()
    assert lines[0] == "s"
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["expected", "found", "where"]
    assert lines[4].endswith("9 ... (12 in all)")
    assert lines[5].endswith("n")


def test_an_error_gets_its_place_from_whoever_knows_it():
    error = errors.HeadsError("s", expected="e", found="f", next_step="n", items=["i"])
    assert error.at("w").as_dict() == {**error.as_dict(), "where": "w"}
    assert isinstance(error.at("w"), errors.HeadsError)
    assert error.at("w").at("other").where == "w"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.PortFileError, 2),
        (errors.TreeError, 2),
        (errors.KernelRefusal, 1),
        (errors.VerdictFailed, 1),
        (errors.EnvironmentMissing, 3),
    ],
)
def test_exit_codes(kind, code):
    assert kind("x").exit_code == code


def test_verdict_exit_codes():
    assert [Verdict(name).exit_code for name in ("pass", "fail", "refused", "not_run")] == [0, 1, 1, 3]


def test_nearest_name():
    assert errors.suggest_nearest("tp_sise", ["tp_size", "pp_size"]) == "tp_size"
    assert errors.suggest_nearest("zzz", ["tp_size"]) is None
