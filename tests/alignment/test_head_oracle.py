"""Acceptance predicted from the heads alone equals what the port accepts; wrong heads are noticed."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.head_oracle import (
    PredictedAcceptance,
    ReferenceHeads,
    _target_ranks,
    _walk,
    predict_acceptance,
)
from porting_kit.diagnosis.controls import seed_fault
from porting_kit.medusa.decoding import generate_medusa
from porting_kit.medusa.tree import read_tree

NEW_TOKENS = 24


@pytest.mark.parametrize("spec", ["small_3", "chain:2", "cartesian:3,2,1", "mc_sim_7b_63"])
def test_predicted_lengths_are_the_accepted_lengths(spec, port_of):
    port = port_of("llama")
    tree = read_tree(spec if spec != "mc_sim_7b_63" else [list(n) for n in read_tree(spec).nodes[1:] if len(n) < 4])
    generation = generate_medusa(port.state.build(), tree, port.prompts, NEW_TOKENS)
    predicted = predict_acceptance(port.reference, port.heads, tree, port.prompts, generation.tokens)
    equal, judged, total = predicted.compare(generation.accepted_lengths)
    assert equal == judged == total == generation.num_steps
    assert len(predicted.agreement) == tree.depth
    assert generation.tokens_per_step > 1.3


def test_shifted_heads_do_not_accept_what_the_heads_predict(port_of):
    port = port_of("llama")
    _, faulty = seed_fault("heads_shifted_by_one", port.state)
    generation = generate_medusa(faulty.build(), port.state.tree, port.prompts, NEW_TOKENS)
    predicted = predict_acceptance(port.reference, port.heads, port.state.tree, port.prompts, generation.tokens)
    equal, judged, _ = predicted.compare(generation.accepted_lengths)
    assert equal < 0.9 * judged


def test_an_approximate_port_is_judged_by_its_own_states(port_of):
    """A rounded port's states move what its heads accept; the base's states predict another port's steps."""
    port = port_of("llama")
    state = port.state
    generator = torch.Generator().manual_seed(1)
    tensors = dict(state.tensors)
    for name in [name for name in tensors if ".mlp." in name]:
        noise = torch.randn(tensors[name].shape, generator=generator)
        tensors[name] = tensors[name] + 0.3 * tensors[name].std() * noise
    model = replace(state, tensors=tensors).build()
    generation = generate_medusa(model, state.tree, port.prompts, NEW_TOKENS)
    texts = [[*prompt, *row] for prompt, row in zip(port.prompts, generation.tokens, strict=True)]
    asked = (port.reference, port.heads, state.tree, port.prompts, generation.tokens)
    states = [ContextOracle(model).read(text)[1] for text in texts]
    equal, judged, total = predict_acceptance(*asked, states=states).compare(generation.accepted_lengths)
    assert equal == judged == total
    noisy = predict_acceptance(*asked, torch.float32, states)
    assert noisy.tolerance == predict_acceptance(*asked, torch.float32).tolerance  # noise, not the port's distance
    equal, judged, _ = predict_acceptance(*asked).compare(generation.accepted_lengths)
    assert equal < judged


def test_heads_are_silu_layers_and_a_matrix():
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 4, generator=generator), torch.randn(4, generator=generator)
    output = torch.randn(7, 4, generator=generator)
    hidden = torch.randn(3, 4, generator=generator)
    heads = ReferenceHeads(layers=(((weight, bias), (weight, bias)),), outputs=(output,))
    states = hidden
    for _ in range(2):
        inner = states @ weight.T + bias
        states = states + inner * inner.sigmoid()
    torch.testing.assert_close(heads.logits(hidden), (states @ output.T)[None])


def test_compare_walks_the_steps_and_forgives_the_end():
    lengths = torch.tensor([3, 1, 1, 2, 4])
    predicted = PredictedAcceptance([lengths], [torch.ones(5, dtype=torch.bool)], agreement=[], tolerance=0.0)
    assert predicted.compare([[3, 2]]) == (2, 2, 2)
    assert predicted.compare([[3, 4]]) == (2, 2, 2), "two tokens were left, more cannot be told"
    assert predicted.compare([[2, 1, 2]]) == (2, 3, 3)
    assert predicted.tokens_per_step() == pytest.approx(5 / 2)
    unsure = PredictedAcceptance([lengths], [torch.tensor([False, True, True, True, True])], [], 0.1)
    assert unsure.compare([[2, 1, 2]]) == (2, 2, 3)


class TestCertainty:
    """One head over four tokens; the emitted token 1 has logit 2.0, its rival 1.95 or 2.05."""

    NODES: ClassVar[set] = set(read_tree([[0], [0, 0]]).nodes)

    @staticmethod
    def ranks(rival, tolerance):
        logits = torch.tensor([[[0.0, 2.0, rival, -1.0]]])
        return [ranks[0, 0].item() for ranks in _target_ranks(logits, torch.tensor([0, 1]), tolerance)]

    def test_ranks_within_the_noise_are_an_interval(self):
        assert self.ranks(2.05, 0.0) == [1, 1]
        assert self.ranks(1.95, 0.0) == [0, 0]
        assert self.ranks(2.05, 0.1) == [0, 1]
        assert self.ranks(1.95, 0.1) == [0, 1]
        assert self.ranks(1.5, 0.1) == [0, 0]

    def test_a_step_is_certain_when_no_such_rank_matters(self):
        assert _walk(self.NODES, [0, 0], [0, 0]) == (3, True)
        assert _walk(self.NODES, [0, 4], [0, 9]) == (2, True), "not in the tree, whichever rank it is"
        assert _walk(self.NODES, [0, 0], [0, 1]) == (3, False)
        assert _walk(self.NODES, [0, 0], [1, 0]) == (3, False)
        assert _walk(self.NODES, [1, 0], [1, 0]) == (1, True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_ports_accept_what_is_certain(dtype, port_of):
    port = port_of("gptneox", dtype)
    generation = generate_medusa(port.state.build(), port.state.tree, port.prompts, NEW_TOKENS)
    predicted = predict_acceptance(
        port.reference, port.heads, port.state.tree, port.prompts, generation.tokens, getattr(torch, dtype)
    )
    equal, judged, total = predicted.compare(generation.accepted_lengths)
    assert equal == judged
    assert judged > 0.5 * total
    assert predicted.tolerance > 0
