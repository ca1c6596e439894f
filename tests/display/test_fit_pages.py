"""The pages of measured figures are what their command writes from the committed figures; the pictures show the fit."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from porting_kit.display import fit_pages
from porting_kit.display.fit_pages import NAMES, draw_pictures, write_fit_page
from porting_kit.display.kernel_page import write_kernel_page
from porting_kit.kernel_fit.alibi import ERROR_BOUND_NATS

HOWTO = Path(__file__).parents[2] / "notebooks" / "howto"
LARGEST_PICTURE = 60_000


@pytest.fixture(scope="module")
def figures():
    return {name: json.loads((HOWTO / "figures" / f"{name}.json").read_text()) for name in NAMES}


def test_committed_pages_are_what_the_command_writes(figures):
    pages = {
        "real_kernel.md": write_kernel_page(figures["xqa"]),
        "fit_figures.md": write_fit_page(figures["alibi_fit"], figures["alibi_models"]),
    }
    for page, text in pages.items():
        assert text == (HOWTO / page).read_text(encoding="utf-8"), "run python -m porting_kit.display.fit_pages"


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
    waves = [row for row in small if row["transform"] == "fold_alibi" and row["dtype"] != "bfloat16"]
    written = [row for row in fit["attention"] if row["transform"] == "write_positions"]
    assert max(row["logit_error_nats"] for row in waves) <= ERROR_BOUND_NATS
    assert max(row["logit_error_nats"] for row in written) <= 1e-4
    assert {row["dtype"] for row in written} == {"bfloat16"}


def test_whole_models_and_the_kernels_further_cases_are_there(figures):
    kernel, models = figures["xqa"], figures["alibi_models"]
    heads = {(row["family"], row["heads"], row["head_size"]) for row in models["families"]}
    assert heads >= {("bloom", 16, 64), ("bloom", 32, 80), ("bloom", 16, 96), ("bloom", 32, 128), ("mpt", 32, 128)}
    assert heads >= {("baichuan", 40, 128), ("falcon-rw", 32, 64)}
    exact = [row for row in models["families"] if row["dtype"] == "float32" and row["transform"] == "write_positions"]
    assert max(row["fitted_relative_logit_error"] for row in exact) < 1e-4
    assert {row["fitted_greedy_agreement"] for row in exact} == {1.0}
    assert {row["base"] for row in models["trained"]} == {"bloom-mini", "trained here", "random weights"}
    assert {row["kept_dims"] for row in models["trained"]} == {96, 112, 116, 124}
    assert max(row["relative_error"] for row in kernel["ranks"]) < 1e-3
    assert all(row["relative_error"] < 0.05 < row["error_against_causal"] for row in kernel["fp8"])
    assert kernel["recorded"][0]["layers"] == 30
    verdicts = {row["port"]: (row["verdict"], row["fit"]) for row in kernel["ports"]}
    assert verdicts["bloom-mini"] == ("fail", "")
    assert verdicts["bloom-mini, fitted"] == ("pass", "truncate_heads 116, fold_alibi")
    assert verdicts["bloom-mini, fitted, bfloat16"] == ("pass", "truncate_heads 124, write_positions")


def test_the_pictures_say_in_words_what_they_show(figures):
    pictures = draw_pictures(figures["alibi_models"])
    assert set(pictures) == {"alibi_line.png", "attention_change.png"}
    for name, picture in pictures.items():
        assert picture.png.startswith(b"\x89PNG")
        assert (HOWTO / "figures" / name).stat().st_size < LARGEST_PICTURE
    assert "-21 nats" in pictures["alibi_line.png"].alt
    profile = figures["alibi_models"]["profile"]["total_variation"]
    assert profile["fitted"] < 0.1 * profile["dropped"]
    assert f"fitted {profile['fitted']:.2g}" in pictures["attention_change.png"].alt


def test_the_command_writes_pages_and_pictures(figures, tmp_path):
    (tmp_path / "figures").mkdir()
    for name, document in figures.items():
        (tmp_path / "figures" / f"{name}.json").write_text(json.dumps(document))
    fit_pages.main(tmp_path)
    assert {path.name for path in tmp_path.rglob("*.md")} == {"real_kernel.md", "fit_figures.md"}
    assert {path.name for path in tmp_path.rglob("*.png")} == {"alibi_line.png", "attention_change.png"}
