"""Rows shared by processes: the same rows as one process gives, and a process that dies is told."""

from __future__ import annotations

import pytest

from porting_kit.coverage.planned import plan_rows
from porting_kit.coverage.processes import cover_in_processes
from porting_kit.errors import EmulatorError
from porting_kit.source_tree import open_source_tree
from porting_kit.steps.coverage import check_coverage

BLOOM, NEOX = "BloomForCausalLM", "GPTNeoXForCausalLM"


@pytest.mark.slow
def test_two_processes_give_the_rows_of_one():
    told = []
    shared = check_coverage("bundled", architectures=[BLOOM, NEOX], jobs=2, progress=told.append)
    alone = check_coverage("bundled", architectures=[BLOOM, NEOX])
    assert len(told) == len(shared.rows) == 2
    for ours, theirs in zip(shared.rows, alone.rows, strict=True):
        assert (ours.arch, ours.status, ours.tokens_equal) == (theirs.arch, "aligned", True)
        assert ours.tree_error == pytest.approx(theirs.tree_error, rel=0.5), "one thread or several add up differently"


@pytest.mark.slow
def test_a_process_that_dies_is_told(make_tree):
    first = "class GPTNeoXModel(Module):"
    root = make_tree(("models/gptneox/model.py", first, f"import os\n\nos._exit(3)\n\n\n{first}"))
    number = next(n for n, row in enumerate(plan_rows(open_source_tree(root))) if row.arch == NEOX)
    with pytest.raises(EmulatorError, match="a process that measured rows died"):
        cover_in_processes(root, [number], 2)
