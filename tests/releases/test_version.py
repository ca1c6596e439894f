"""Release numbers and their order."""

import pytest

from porting_kit.errors import PortFileError
from porting_kit.releases.version import parse_release

IN_ORDER = (
    "0.8.0.dev2024013000",
    "0.8.0",
    "0.9.0.dev2024022700",
    "0.9.0",
    "0.10.0.dev2024043000",
    "0.10.0",
    "0.11.0.dev2024061800",
    "0.11.0.dev2024062500",
    "0.11.0rc1",
    "0.11.0",
    "0.17.0",
    "0.17.0.post1",
    "0.18.0.dev2025031100",
    "1.0.0rc2.dev5",
    "1.0.0rc2",
    "1.0.0rc10",
    "1.0.0",
    "1.2.1",
)


def test_releases_sort_as_python_packaging_sorts_them():
    packaging = pytest.importorskip("packaging.version")
    shuffled = sorted(IN_ORDER, key=hash)
    assert sorted(shuffled, key=parse_release) == list(IN_ORDER)
    assert sorted(shuffled, key=packaging.Version) == list(IN_ORDER)


def test_a_leading_v_and_a_local_part_do_not_matter():
    assert parse_release("v0.9.0").key == parse_release("0.9.0").key == parse_release("0.9.0+cu12").key


@pytest.mark.parametrize("text", ["bundled-1", "", "latest", "0.11.x", "License", "0.11.0\n", " 0.11.0", "0.1١.0"])
def test_text_that_is_no_release_is_refused(text):
    with pytest.raises(PortFileError, match="release number"):
        parse_release(text)
