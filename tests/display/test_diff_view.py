"""A unified diff is split where its hunk headers say, and shown without losing a line."""

import difflib

from porting_kit.display.diff_view import split_hunks, view_diff

OLD = [f"line {number}\n" for number in range(60)]
NEW = [*OLD[:5], "added <here>\n", *OLD[5:40], "changed\n", *OLD[41:]]
DIFF = "".join(difflib.unified_diff(OLD, NEW, "a/models/bloom.py", "b/models/bloom.py"))


def test_hunks_know_their_file_and_size():
    first, second = split_hunks(DIFF.splitlines())
    assert (first.file, first.added, first.removed) == ("models/bloom.py", 1, 0)
    assert (second.added, second.removed) == (1, 1)
    assert second.title == "models/bloom.py  -38,7 +39,7  +1 -1"


def test_no_line_is_lost_and_html_is_escaped():
    view = view_diff(DIFF)
    assert sum(len(hunk.lines) for hunk in view.hunks) == len(DIFF.splitlines()) - 4
    assert "+added &lt;here&gt;" in view.to_html()
    assert "2 hunks in 1 file, +2 -1 lines" in view.to_html()
    assert "+changed" in str(view)


def test_a_removed_line_that_looks_like_a_header_stays_in_its_hunk():
    old, new = ["-- a/file\n", "x\n"], ["x\n"]
    diff = "".join(difflib.unified_diff(old, new, "a/f", "b/f")) + "".join(difflib.unified_diff(new, old, "a/g", "b/g"))
    hunks = split_hunks(diff.splitlines())
    assert [hunk.file for hunk in hunks] == ["f", "g"]
    assert hunks[0].lines[0] == "--- a/file"


def test_long_diffs_fold_without_a_script():
    html = view_diff(DIFF, open_hunks=1).to_html()
    assert html.count("<details>") == 1
    assert "<script" not in html


def test_an_empty_diff_says_so():
    assert "No change was necessary" in view_diff("").to_html()
    assert str(view_diff("")) == "No change was necessary."
