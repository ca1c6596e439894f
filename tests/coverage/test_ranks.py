"""Rows on several ranks: what one rank gives, and faults of the cut that must not pass."""

from __future__ import annotations

import time

import pytest
import torch

from porting_kit.conversion import checkpoint_ranks, sharding
from porting_kit.coverage.cases import CASES
from porting_kit.coverage.matrix import cover_tree
from porting_kit.coverage.planned import plan_rows
from porting_kit.coverage.precision import BOUND
from porting_kit.coverage.rank_group import RankGroup, RankStopped, require_agreement
from porting_kit.coverage.reference_models import make_reference, save_reference
from porting_kit.coverage.row import count_sharded
from porting_kit.coverage.sharded import Sharding
from porting_kit.errors import EmulatorError, PortFileError
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree
from porting_kit.steps.coverage import check_coverage

LLAMA, BLOOM = "LlamaForCausalLM", "BloomForCausalLM"
TP2, TP4, PP2 = Sharding(tp_size=2), Sharding(tp_size=4), Sharding(pp_size=2)


def cover(arch: str, case: str, *shardings: Sharding, root="bundled"):
    tree = open_source_tree(root)
    cases = [each for each in CASES if each.name == case]
    (row,) = cover_tree(tree, plan_rows(tree, [arch], cases), shardings=shardings)
    return row


def test_two_ranks_give_what_hugging_face_gives():
    row = cover(LLAMA, "llama, biases, tied embeddings", TP2)
    (run,) = row.sharded
    assert (row.status, run.status, run.ranks, run.tokens_equal) == ("aligned", "aligned", "tp 2", True), run.reason
    assert 0 < max(run.context_error, run.tree_error, run.heads_error) <= BOUND
    assert count_sharded([row]) == {"tp 2": {"aligned": 1, "refused": 0, "failed": 0}}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "bloom"])
def test_four_ranks_and_two_stages(case):
    """LLaMA has two key/value heads here, so that four ranks repeat them; Bloom's ALiBi slopes differ by rank."""
    row = cover({"llama": LLAMA, "bloom": BLOOM}[case], case, TP4, PP2)
    assert [run.status for run in row.sharded] == (["aligned"] * 2 if case == "llama" else ["aligned", "refused"])
    if case == "bloom":
        assert "cannot be split over pipeline ranks" in row.sharded[1].reason


def test_a_wrong_cut_fails(monkeypatch):
    """Rows dealt to the ranks in the wrong order: the conversion's own way back would notice, this must too."""
    right = sharding.shard_slices

    def turned(shard, size, dims, tp_size, tp_rank):
        is_qkv = len(shard.blocks) == 3
        return right(shard, size, dims, tp_size, tp_size - 1 - tp_rank if is_qkv else tp_rank)

    monkeypatch.setattr(sharding, "shard_slices", turned)
    row = cover(LLAMA, "llama", TP2)
    (run,) = row.sharded
    assert row.status == "aligned", "one rank has nothing to cut"
    assert run.status == "failed"
    assert run.reason.startswith("context logits differ from Hugging Face by ")
    assert run.context_error > 100 * BOUND


def test_heads_that_do_not_divide_are_refused():
    row = cover(LLAMA, "llama", Sharding(tp_size=3))
    (run,) = row.sharded
    assert (run.status, run.reason) == ("refused", "query heads do not divide over the ranks (tp_size 3)")


@pytest.mark.slow
def test_a_rank_that_stops_does_not_leave_the_others_waiting(tmp_path):
    """One rank raises before a sum that the other already waits for; the next model has a fresh group."""
    tree, case = open_source_tree("bundled"), next(case for case in CASES if case.name == "llama")
    folder = save_reference(case, make_reference(case), tmp_path)
    config, ranks = checkpoint_ranks(folder, dtype="float32", tp_size=2)
    module = build_medusa_module(tree, LLAMA)
    heads = {"num_medusa_heads": 0, "num_medusa_layers": 0, "max_draft_len": 6}
    group = RankGroup(tree.root, 2)
    try:
        for _ in range(2):
            model = group.build_model(config | heads, ranks, module.source, tree.find_model(LLAMA).class_name)
            cache = model.new_cache(1, 16)
            assert model.prefill([[3, 4, 5]], cache).logits.shape == (1, 162)
            assert cache.lengths.tolist() == [3]
            good = {"phase": "prefill", "cache": cache.number, "arguments": ([torch.tensor([3, 4])],), "options": {}}
            bad = {**good, "arguments": ([torch.tensor([3, 10**6])],)}
            started = time.monotonic()
            with pytest.raises(RankStopped, match="operands of embedding"):
                group.ask_each("run", [good, bad])
            assert time.monotonic() - started < 30
    finally:
        group.close()


def test_ranks_that_disagree_are_told():
    logits = torch.randn(3, 10)
    answers = [([(logits, None, None)], None), ([(logits.clone(), None, None)], None)]
    require_agreement(answers)
    answers[1][0][0][0][1, 2] += 0.1
    with pytest.raises(EmulatorError, match="ranks do not agree"):
        require_agreement(answers)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "-1/2"])
def test_a_part_that_is_none(part):
    with pytest.raises(PortFileError, match="not a part of the rows"):
        check_coverage("bundled", part=part)


@pytest.mark.parametrize("size", [0, 1, 17])
def test_a_number_of_ranks_that_is_none(size):
    with pytest.raises(PortFileError, match="not a number of ranks"):
        check_coverage("bundled", tp_sizes=[size])
