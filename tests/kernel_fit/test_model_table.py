"""The page of public models: key cells, and that the committed page is what its command writes."""

from __future__ import annotations

import pytest

from porting_kit.architectures.base_config import read_base_config
from porting_kit.errors import BaseModelError
from porting_kit.kernel_fit import model_table
from porting_kit.kernel_fit.model_table import FOLDER, PAGE, RELEASES, judge_model, read_configurations, write_page

BUG_REPORT = "0.11.0.dev2024062500"


@pytest.fixture(scope="module")
def bases(root_folder):
    return read_configurations(root_folder / FOLDER)


@pytest.fixture(scope="module")
def root_folder():
    from pathlib import Path

    return Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("model", "release", "kind", "transforms", "growth"),
    [
        # The bug report's two models. Bloom's heads of 128 leave no room, so they are truncated first.
        ("bloom-7b1", BUG_REPORT, "fit", ("truncate_heads", "fold_alibi"), 1),
        ("bloom-560m", BUG_REPORT, "fit", ("fold_alibi",), 2),
        ("qwen2-7b", "0.10.0", "fit", ("pad_query_groups",), 1),
        ("qwen2-7b", BUG_REPORT, "works", (), 1),
        ("smollm2-135m", "0.9.0", "fit", ("pad_head_size", "pad_query_groups"), 2),
        ("smollm2-135m", "1.2.0", "works", (), 1),
        ("falcon-rw-1b", "1.2.0", "fit", ("write_positions",), 2),
        ("llama-2-70b", "0.9.0", "works", (), 1),
        ("opt-6.7b", "0.9.0", "works", (), 1),
        ("pythia-1b", "1.2.0", "refused", (), 1),
        ("gemma-2-27b", "0.14.0.dev2024100800", "silent", (), 1),
        ("llama-3.1-8b", BUG_REPORT, "refused", (), 1),
        ("phi-3-mini-128k", BUG_REPORT, "silent", (), 1),
        ("phi-3-mini-128k", "0.14.0.dev2024100800", "fit", ("pad_head_size",), 1.3333333333333333),
        ("phi-3-mini-4k", BUG_REPORT, "fit", ("pad_head_size",), 1.3333333333333333),
    ],
)
def test_key_cells(bases, model, release, kind, transforms, growth):
    cell = judge_model(bases[model], release)
    assert (cell.kind, cell.transforms, cell.cache_growth) == (kind, transforms, growth)
    assert bool(cell.reason) == (kind in ("refused", "silent"))


@pytest.mark.parametrize(
    ("model", "release", "words"),
    [
        ("pythia-1b", "1.2.0", "head size 256"),
        ("gemma-2-27b", "1.2.0", "soft-cap"),
        ("gemma-2-9b", BUG_REPORT, "0.12.0"),
        ("llama-3.1-8b", BUG_REPORT, "llama3"),
        ("phi-3-mini-128k", BUG_REPORT, "sqrt(1 + ln s / ln L)"),
    ],
)
def test_a_refusal_says_why(bases, model, release, words):
    assert words in judge_model(bases[model], release).reason


def test_the_committed_page_is_what_the_command_writes(bases, root_folder):
    assert len(bases) >= 60
    assert write_page(bases) == (root_folder / PAGE).read_text(encoding="utf-8"), (
        "run python -m porting_kit.kernel_fit.model_table"
    )
    assert {"0.9.0", BUG_REPORT, "0.14.0.dev2024100800", "1.2.0"} <= set(RELEASES)


@pytest.mark.parametrize(
    ("model", "release", "kind"),
    [
        ("llama-2-7b", "0.9.0", "silent"),
        ("llama-2-7b", BUG_REPORT, "works"),
        ("bloom-7b1", BUG_REPORT, "silent"),
        ("pythia-1b", "1.2.0", "works"),
        ("opt-6.7b", "1.2.0", "refused"),
    ],
)
def test_an_fp8_cache_has_limits_of_its_own(bases, model, release, kind):
    assert judge_model(bases[model], release, "fp8").kind == kind


def test_a_gate_that_is_left_out_changes_the_page(bases, root_folder, monkeypatch):
    profile = model_table.kernel_profile

    def without_alibi(name):
        from dataclasses import replace

        found = profile(name)
        return replace(found, gates=tuple(gate for gate in found.gates if gate.name != "ALiBi"))

    monkeypatch.setattr(model_table, "kernel_profile", without_alibi)
    assert judge_model(bases["bloom-7b1"], BUG_REPORT).kind == "works"
    assert write_page(bases) != (root_folder / PAGE).read_text(encoding="utf-8")


def test_an_empty_folder_and_a_file_that_is_no_config_are_refused(tmp_path):
    with pytest.raises(BaseModelError, match="no configurations"):
        read_configurations(tmp_path)
    (tmp_path / "x-7b.json").write_text("{")
    with pytest.raises(BaseModelError, match="not JSON"):
        read_configurations(tmp_path)


def test_what_a_class_cannot_follow_is_a_refusal(bases):
    raw = {**bases["pythia-1.4b"].raw, "use_parallel_residual": False}
    assert judge_model(read_base_config(raw), BUG_REPORT).kind == "refused"
