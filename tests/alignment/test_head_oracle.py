"""Acceptance predicted from the heads alone equals what the port accepts; wrong heads are noticed."""

import pytest
import torch

from porting_kit.alignment.head_oracle import PredictedAcceptance, ReferenceHeads, predict_acceptance
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
    equal, total = predicted.compare(generation.accepted_lengths)
    assert equal == total == generation.num_steps
    assert len(predicted.agreement) == tree.depth
    assert generation.tokens_per_step > 1.3


def test_shifted_heads_do_not_accept_what_the_heads_predict(port_of):
    port = port_of("llama")
    _, faulty = seed_fault("heads_shifted_by_one", port.state)
    generation = generate_medusa(faulty.build(), port.state.tree, port.prompts, NEW_TOKENS)
    predicted = predict_acceptance(port.reference, port.heads, port.state.tree, port.prompts, generation.tokens)
    equal, total = predicted.compare(generation.accepted_lengths)
    assert equal < 0.9 * total


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
    predicted = PredictedAcceptance(lengths=[torch.tensor([3, 1, 1, 2, 4])], agreement=[])
    assert predicted.compare([[3, 2]]) == (2, 2)
    assert predicted.compare([[3, 4]]) == (2, 2), "two tokens were left, more cannot be told"
    assert predicted.compare([[2, 1, 2]]) == (2, 3)
    assert predicted.tokens_per_step() == pytest.approx(5 / 2)
