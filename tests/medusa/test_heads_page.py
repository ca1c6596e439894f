"""The page's measured tables are the kept figures, and nothing else."""

import json

from tests.benchmarks import heads_page


def test_the_committed_page_is_what_the_command_writes():
    page = heads_page.PAGE.read_text(encoding="utf-8")
    figures = json.loads(heads_page.FIGURES.read_text(encoding="utf-8"))
    assert heads_page.build_page(page, figures) == page, "run python -m tests.benchmarks.heads_page"
    figures["heads"]["trees"]["best 16"]["measured"] += 0.1
    assert heads_page.build_page(page, figures) != page


def test_a_run_replaces_its_own_parts_only(tmp_path, monkeypatch):
    monkeypatch.setattr(heads_page, "FIGURES", tmp_path / "figures.json")
    first = {"device": "card", "torch": "2", "bloom": {"floor_ms": {"greedy": 1.23456789}, "curve": [1]}}
    heads_page.keep_figures(first)
    heads_page.keep_figures({"device": "card", "torch": "2", "qwen2": {"x": 1}, "bloom": {"error": "out of memory"}})
    kept = json.loads((tmp_path / "figures.json").read_text())
    assert kept["bloom"] == {"device": "card", "torch": "2", "floor_ms": {"greedy": 1.235}}
    assert kept["qwen2"]["x"] == 1
