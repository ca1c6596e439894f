"""The pages of measured figures are what their command writes from the committed figures; the pictures show the fit."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from porting_kit.display import fit_pages
from porting_kit.display.fit_pages import draw_pictures, write_fit_page, write_kernel_page

HOWTO = Path(__file__).parents[2] / "notebooks" / "howto"
LARGEST_PICTURE = 60_000


@pytest.fixture(scope="module")
def figures():
    return {name: json.loads((HOWTO / "figures" / f"{name}.json").read_text()) for name in ("xqa", "alibi_fit")}


@pytest.mark.parametrize(
    ("name", "page", "write"),
    [("xqa", "real_kernel.md", write_kernel_page), ("alibi_fit", "fit_figures.md", write_fit_page)],
)
def test_committed_pages_are_what_the_command_writes(figures, name, page, write):
    assert write(figures[name]) == (HOWTO / page).read_text(encoding="utf-8"), (
        "run python -m porting_kit.display.fit_pages"
    )


def test_another_figure_makes_another_page(figures):
    changed = copy.deepcopy(figures["xqa"])
    changed["geometry"][-1]["relative_error"] = 0.5
    assert "0.5" in write_kernel_page(changed)
    assert write_kernel_page(changed) != write_kernel_page(figures["xqa"])


def test_the_figures_hold_what_the_pages_claim(figures):
    kernel, fit = figures["xqa"], figures["alibi_fit"]
    half = [row for row in kernel["geometry"] if row["dtype"] == "float16"]
    assert {(row["head_size"], row["group"], row["nodes"]) for row in half} == {
        (size, group, nodes) for size in (64, 128) for group in (1, 3, 4, 7, 8) for nodes in (16, 64)
    }
    assert max(row["relative_error"] for row in half) < 1e-3
    assert min(row["causal_instead_of_tree"] for row in half) > 0.05
    assert min(row["dropped_relative_error"] for row in kernel["alibi"]) > 0.9
    assert max(row["relative_error"] for row in kernel["alibi"] if row["dtype"] == "float16") < 5e-3
    shapes = {row["shape"] for row in fit["attention"]}
    assert {"bloom 64", "bloom 80", "bloom 96", "falcon-rw 64"} <= shapes
    small = [row for row in fit["attention"] if row["shape"].split()[-1] in ("64", "80", "96")]
    assert max(row["logit_error_nats"] for row in small if row["dtype"] != "bfloat16") <= 0.025


def test_the_pictures_say_in_words_what_they_show(figures):
    pictures = draw_pictures(figures["alibi_fit"])
    assert set(pictures) == {"alibi_line.png", "attention_change.png"}
    for name, picture in pictures.items():
        assert picture.png.startswith(b"\x89PNG")
        assert (HOWTO / "figures" / name).stat().st_size < LARGEST_PICTURE
    assert "-21 nats" in pictures["alibi_line.png"].alt
    profile = figures["alibi_fit"]["profile"]["total_variation"]
    assert profile["fitted"] < 0.1 * profile["dropped"]
    assert f"fitted {profile['fitted']:.2g}" in pictures["attention_change.png"].alt


def test_the_command_writes_pages_and_pictures(figures, tmp_path):
    (tmp_path / "figures").mkdir()
    for name, document in figures.items():
        (tmp_path / "figures" / f"{name}.json").write_text(json.dumps(document))
    fit_pages.main(tmp_path)
    assert {path.name for path in tmp_path.rglob("*.md")} == {"real_kernel.md", "fit_figures.md"}
    assert {path.name for path in tmp_path.rglob("*.png")} == {"alibi_line.png", "attention_change.png"}
