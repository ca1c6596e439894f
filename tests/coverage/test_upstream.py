"""Real TensorRT-LLM trees: three families of each kind, one with learned positions.

TRTLLM_SOURCE names one or more trees (separated by colons). The whole matrix of a tree is `porting-kit coverage`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from porting_kit.coverage.matrix import BOUND, cover_tree
from porting_kit.coverage.planned import plan_rows
from porting_kit.source_tree import open_source_tree

pytestmark = pytest.mark.upstream
SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(":") if source]
FAMILIES = ("LlamaForCausalLM", "BloomForCausalLM", "OPTForCausalLM")


@pytest.mark.parametrize("source", SOURCES or [None], ids=lambda source: Path(source or "unset").name)
def test_three_families_of_a_real_tree(source):
    if source is None:
        pytest.skip("TRTLLM_SOURCE is unset: it names a folder that holds tensorrt_llm/, or several")
    tree = open_source_tree(source)
    rows = cover_tree(tree, plan_rows(tree, FAMILIES))
    assert not [f"{row.arch}, {row.case}: {row.reason}" for row in rows if row.status == "failed"]
    aligned = {row.case: row for row in rows if row.status == "aligned"}
    assert {row.arch for row in aligned.values()} == set(FAMILIES)
    assert all(max(row.context_error, row.tree_error) <= BOUND and row.tokens_equal for row in aligned.values())
    for batch in (1, 3):
        row = aligned[f"opt, norms before, one position id per request, batch {batch}"]
        assert row.note.startswith("without computed positions it")


@pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE is unset")
def test_what_no_patch_can_help_is_refused_with_its_reason():
    tree = open_source_tree(SOURCES[0])
    mambas = [name for name in tree.model_names() if name.startswith("Mamba")]
    (row,) = cover_tree(tree, plan_rows(tree, mambas))
    assert (row.status, row.patched) == ("refused", "refused")
    assert "recurrent state" in row.reason
