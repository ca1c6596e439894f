"""Runs side by side, and inherent differences kept apart from faults."""

from dataclasses import replace

import pytest
import torch

from porting_kit.alignment.comparison import compare_runs, group_prompts, run_decoding
from porting_kit.alignment.inherent import matched_to_library, measure_inherent
from porting_kit.alignment.oracle import JudgedText, Status
from porting_kit.alignment.run import AlignmentOptions, align_port_outputs
from porting_kit.architectures.family import GELU_IS_TANH, NORM_EPS_FIXED
from tests.alignment.tiny_ports import make_port


def judged(tokens, wrong=(), ties=()):
    status = torch.full((len(tokens),), Status.TOP)
    status[list(wrong)] = Status.WRONG
    status[list(ties)] = Status.NEAR_TIE
    return JudgedText(tuple(tokens), torch.zeros(len(tokens)), status, torch.zeros(len(tokens)))


def test_groups_mix_short_and_long_prompts():
    prompts = [[0] * length for length in (3, 17, 64, 130, 5)]
    assert group_prompts(prompts, 2) == ((0, 3), (4, 2), (1,))
    assert group_prompts(prompts, 9) == ((0, 3, 4, 2, 1),)
    assert sorted(index for group in group_prompts(prompts, 3) for index in group) == list(range(5))


def test_runs_differ_by_a_near_tie_or_for_real():
    same, tie, real = judged([1, 2, 3]), judged([1, 4, 5], ties=[1]), judged([1, 6, 7], wrong=[1])
    assert compare_runs(("a", "b"), [same], [same]) == []
    (difference,) = compare_runs(("a", "b"), [same], [tie])
    assert (difference.position, difference.tokens, difference.is_near_tie) == (1, (2, 4), True)
    (difference,) = compare_runs(("a", "b"), [same, same], [same, real])
    assert (difference.prompt, difference.is_near_tie) == (1, False)
    (difference,) = compare_runs(("a", "b"), [same], [judged([1, 2])])
    assert (difference.position, difference.tokens, difference.is_near_tie) == (2, (3, None), False)


def test_results_come_back_in_prompt_order(port_of):
    port = port_of("llama")
    run = run_decoding(port.state.build(), port.state.tree, port.prompts, 8, [], 3, name="x", keep_logits=True)
    assert [len(group) for group in run.groups] == [3, 1]
    for prompt, tokens, logits in zip(port.prompts, run.tokens, run.logits, strict=True):
        assert tokens == port.reference.generate([prompt], 8)[0][: len(tokens)]
        assert logits.argmax(-1).tolist() == tokens
    assert len(run.origins) == len(run.accepted_lengths) == 4


class _WithoutModules:
    """A model that computes the same and shows nothing of what it is made of."""

    def __init__(self, model):
        self.config, self.parameters, self._model = model.config, model.parameters, model

    def modules(self):
        return iter(())

    def __call__(self, **inputs):
        return self._model(**inputs)


class TestInherent:
    """GPT-NeoX with the erf GELU, and with another norm epsilon: the library computes neither."""

    @pytest.fixture(scope="class")
    @classmethod
    def port(cls, tmp_path_factory):
        return make_port(tmp_path_factory.mktemp("gptneox"), "gptneox", layer_norm_eps=1e-3)

    def test_each_difference_is_measured_and_undone(self, port):
        before = port.reference.logits(port.prompts)
        found = measure_inherent(port.reference, (GELU_IS_TANH, NORM_EPS_FIXED), port.prompts)
        assert [difference.matched for difference in found] == [True, True]
        assert all(1e-6 < difference.logit_error < 0.2 for difference in found)
        for logits, again in zip(before, port.reference.logits(port.prompts), strict=True):
            assert torch.equal(logits, again)

    def test_what_the_base_computes_as_the_library_does_is_not_listed(self, tmp_path):
        """One norm of another epsilon, or one erf GELU, makes it a difference again."""
        same = make_port(tmp_path, "gptneox", layer_norm_eps=1e-5, hidden_act="gelu_new")
        names = (GELU_IS_TANH, NORM_EPS_FIXED)
        assert measure_inherent(same.reference, names, same.prompts[:1]) == []
        model = same.reference.model
        model.gpt_neox.final_layer_norm.eps = 1e-3
        (found,) = measure_inherent(same.reference, names, same.prompts[:1])
        assert (found.name, found.matched, found.applies) == (NORM_EPS_FIXED.name, True, True)
        model.gpt_neox.final_layer_norm.eps = 1e-5
        model.gpt_neox.layers[0].mlp.act = torch.nn.GELU()
        assert [one.name for one in measure_inherent(same.reference, names, same.prompts[:1])] == [GELU_IS_TANH.name]

    def test_a_base_whose_modules_are_not_known_is_not_taken_for_the_same(self, port):
        """Nothing was found to compare: the difference stays listed, as one that cannot be matched."""
        unknown = replace(port.reference, model=_WithoutModules(port.reference.model))
        found = measure_inherent(unknown, (GELU_IS_TANH, NORM_EPS_FIXED), port.prompts[:1])
        assert [(one.matched, one.applies) for one in found] == [(False, True)] * 2

    def test_the_port_is_judged_against_the_matched_reference(self, port):
        options = AlignmentOptions(new_tokens=8, batch_sizes=(1,), differences=port.differences)
        result = align_port_outputs(port.reference, port.state.build(), port.prompts, port.state.tree, options=options)
        assert result.verdict.value == "pass", result.summary
        assert result.context_error < 1e-5
        found = {difference["name"]: difference for difference in result.as_dict()["inherent"]}
        assert found["gelu is tanh"]["applies"]
        assert not found["norm epsilon is 1e-5"]["applies"], "the bundled definitions read the epsilon"

    def test_without_matching_the_difference_shows(self, port):
        options = AlignmentOptions(new_tokens=8, batch_sizes=(1,))
        result = align_port_outputs(port.reference, port.state.build(), port.prompts, port.state.tree, options=options)
        assert "logits" in [gate.name for gate in result.gates if gate.passed is False]

    def test_matching_is_undone_after_an_error(self, port):
        before = port.reference.logits(port.prompts[:1])[0]
        with pytest.raises(KeyError), matched_to_library(port.reference, (GELU_IS_TANH,)):
            raise KeyError
        assert torch.equal(port.reference.logits(port.prompts[:1])[0], before)

    def test_a_difference_that_cannot_be_matched_is_listed_as_such(self, port_of):
        port = port_of("bloom")
        unmatched = [difference for difference in port.differences if not difference.reference]
        found = measure_inherent(port.reference, unmatched, port.prompts[:1])
        assert [difference.matched for difference in found] == [False] * len(unmatched)
        assert all(difference.logit_error is None for difference in found)
