"""Every fault of the catalogue is real: it can be planted, it changes the port, and its words are complete."""

from dataclasses import replace

import pytest
import torch

from porting_kit.diagnosis import name_cause
from porting_kit.diagnosis.catalogue import CATALOGUE, NAMES, find_fault
from porting_kit.diagnosis.fault import DRAFTS, GENERATION, READING, Fault
from porting_kit.diagnosis.faulty_model import FaultyModel
from porting_kit.diagnosis.port_state import PortState
from porting_kit.diagnosis.weight_faults import interleave_qkv, is_tied
from porting_kit.errors import PortFileError
from porting_kit.medusa.decoding import generate_medusa, replay
from tests.diagnosis.planted_faults import NOT_PLANTED, find_carrier, observe_planted

FAMILIES = ("bloom", "llama", "qwen2", "gptneox")
PORT_FAULTS = [fault for fault in CATALOGUE if fault.phase != READING]
FORMS = [(fault, form) for fault in PORT_FAULTS for form in range(len(fault.forms))]


def carrier(fault, port_of):
    """The first tiny port that can have a fault."""
    for family in FAMILIES:
        port = port_of(family)
        if fault.name.startswith("rope_scaling"):
            if family == "llama":
                scaling = {"type": "linear", "factor": 4.0}
                return port, port.state.with_config(rotary_scaling=scaling, max_position_embeddings=16)
            continue
        found = find_carrier(fault, port)
        if found is not None:
            return port, found[1]
    return None


@pytest.mark.parametrize(("fault", "form"), FORMS, ids=lambda item: getattr(item, "name", item))
def test_a_planted_fault_changes_what_the_port_computes(fault, form, port_of):
    found = carrier(fault, port_of)
    if fault.name in NOT_PLANTED:
        assert found is None, "this fault has a carrier now: take it off the list"
        return
    port, state = found
    emitted = [row[:12] for row in port.reference.generate(port.prompts[1:3], 12)]
    healthy = replay(state.build(), port.prompts[1:3], emitted, state.tree)
    faulty = replay(fault.forms[form](state).build(), port.prompts[1:3], emitted, state.tree)
    error = max((a - b).abs().max() for a, b in zip(healthy.logits, faulty.logits, strict=True))
    if fault.phase == DRAFTS:
        assert error < 1e-5
        emitted = port.reference.generate(port.prompts, 40)
        steps = [
            replay(model.build(), port.prompts, emitted, state.tree) for model in (state, fault.forms[form](state))
        ]
        assert steps[0].accepted_lengths != steps[1].accepted_lengths
    else:
        assert error > 1e-4
    if fault.phase == GENERATION:
        first = [(a[0] - b[0]).abs().max() for a, b in zip(healthy.logits, faulty.logits, strict=True)]
        assert max(first) < 1e-5


@pytest.mark.parametrize("fault", [fault for fault in CATALOGUE if fault.phase == READING], ids=lambda f: f.name)
def test_a_fault_of_the_comparison_is_named_and_the_healthy_run_is_not(fault, port_of):
    port = port_of("llama")
    observed = replace(observe_planted(fault, port.state, port.prompts, port.state, seed=0), accepted_lengths=None)
    diagnosis = name_cause(port.state, observed, pair_seconds=0)
    assert (diagnosis.cause, diagnosis.ties) == (fault, ()), diagnosis.verdict
    model = port.state.build()
    tokens = generate_medusa(model, port.state.tree, port.prompts, 24).tokens
    healthy = replace(observed, tokens=tokens, logits=None, logits_noise=None)
    assert name_cause(port.state, healthy, (fault,)).to_explain == 0


def test_learned_positions_are_read_two_rows_too_early():
    name = "transformer.position_embedding.weight"
    state = PortState({}, {name: torch.arange(5).float()[:, None]}, emulator=None)
    assert find_fault("learned_position_offset").applies(state) is None
    assert find_fault("learned_position_offset").apply(state).tensors[name][:, 0].tolist() == [3, 4, 0, 1, 2]


def test_planting_leaves_the_healthy_port_as_it_was(port_of):
    port = port_of("llama")
    before = {name: tensor.clone() for name, tensor in port.state.tensors.items()}
    for fault in CATALOGUE:
        if fault.applies(port.state) is None:
            fault.apply(port.state).build()
    assert all(torch.equal(tensor, before[name]) for name, tensor in port.state.tensors.items())


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_every_entry_has_its_words_and_its_source(fault):
    for text in (fault.title, fault.symptom, fault.cause, fault.fix, fault.releases, fault.source):
        assert len(text) > 2
    assert fault.name == fault.name.lower().replace(" ", "_")
    assert NAMES[fault.name] is fault


def test_the_list_holds_what_porters_have_met():
    assert {
        "alibi_dropped_in_generation",
        "qkv_bias_dropped",
        "rope_base_lost",
        "qkv_not_deinterleaved",
        "position_offsets_ignored",
        "accepted_kv_not_moved",
        "mask_bits_reversed",
        "heads_shifted_by_one",
        "head_taken_from_embedding",
        "tied_head_left_empty",
    } <= set(NAMES)


def test_unknown_names_and_kinds_are_refused():
    with pytest.raises(PortFileError, match="qkv_bias_dropped"):
        find_fault("qkv_bias_droped")
    with pytest.raises(ValueError, match="kind 'magic'"):
        Fault("x", "magic", "", "", "", "", "", "", apply=lambda state: state)


def test_interleaving_is_the_stored_order_on_labelled_rows(port_of):
    """Rows numbered by what they are: 100 q, 200 k, 300 v, plus the head."""
    state = port_of("bloom").state.with_config(num_attention_heads=2, num_key_value_heads=2, head_size=1, hidden_size=2)
    rows = torch.tensor([100, 101, 200, 201, 300, 301])
    state = replace(state, tensors={"transformer.layers.0.attention.qkv.bias": rows})
    assert interleave_qkv(state).tensors["transformer.layers.0.attention.qkv.bias"].tolist() == [
        100,
        200,
        300,
        101,
        201,
        301,
    ]
    grouped = state.with_config(num_attention_heads=4, num_key_value_heads=2)
    rows = torch.tensor([100, 101, 102, 103, 200, 201, 300, 301])
    grouped = replace(grouped, tensors={"transformer.layers.0.attention.qkv.bias": rows})
    assert interleave_qkv(grouped).tensors["transformer.layers.0.attention.qkv.bias"].tolist() == [
        100,
        101,
        200,
        300,
        102,
        103,
        201,
        301,
    ]


def test_ties_are_told_by_the_tensors(port_of):
    state = port_of("llama").state
    assert not is_tied(state)
    embedding = state.tensors["transformer.vocab_embedding.weight"]
    assert is_tied(replace(state, tensors={**state.tensors, "lm_head.weight": embedding.clone()}))


def test_wrappers_compose(port_of):
    state = port_of("llama").state
    both = find_fault("mask_transposed").apply(find_fault("position_offsets_ignored").apply(state)).build()
    assert isinstance(both, FaultyModel)
    assert isinstance(both._model, FaultyModel)
    assert both.num_medusa_heads == 3
