"""Tables say the same in HTML, Markdown and a terminal, and a verdict never by colour alone."""

import re

import pytest

from porting_kit.display.tables import Code, Facts, Stack, Table, VerdictMark

ROWS = [("head size", VerdictMark("refused")), ("a <b> & c", None)]
TABLE = Table(("gate", "verdict"), ROWS, title="Gates", note="n.")


def test_html_escapes_what_it_shows():
    html = TABLE.to_html()
    assert "a &lt;b&gt; &amp; c" in html
    assert "<b>" not in html
    assert Code("<x>").to_html().count("&lt;x&gt;") == 1


def test_a_verdict_is_a_sign_and_a_word_everywhere():
    for text in (TABLE.to_html(), TABLE.to_markdown(), str(TABLE)):
        assert "✗ refused" in text
    assert "– not run" in str(VerdictMark("not_run"))


def test_markdown_is_a_pipe_table():
    lines = Table(("a", "b"), [("x|y", 1.23456)]).to_markdown().splitlines()
    assert lines == ["| a | b |", "| --- | --- |", "| x\\|y | 1.235 |"]


def test_a_terminal_line_fits_and_loses_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = str(Table(("name", "remedy"), [("head size", "pad the heads with zeros " * 6)]))
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("zeros") == 6


def test_hidden_rows_are_counted():
    table = Table(("n",), [(number,) for number in range(30)], limit=10)
    assert "20 more of 30 rows not shown." in table.to_html()
    assert table.to_html().count("<tr>") == 11
    assert str(table).count("\n") == 12


def test_an_empty_table_is_a_sentence():
    assert str(Table(("gate",), [], title="Gates", note="Every gate passes.")) == "Gates: Every gate passes."
    assert "<table" not in Table(("gate",), []).to_html()
    assert "none" in Table(("gate",), []).to_html()


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Table(("a",), [(1, 2)])


def test_everything_shows_itself_as_html_and_text():
    for item in (TABLE, Facts([("a", 1)]), Stack((TABLE, Facts([("a", 1)], title="F")))):
        bundle = item._repr_mimebundle_()
        assert set(bundle) == {"text/html", "text/plain"}
        assert re.search(r"<t[dr]", bundle["text/html"])
        assert bundle["text/plain"]
