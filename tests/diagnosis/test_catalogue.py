"""Every fault of the catalogue is real: it can be planted, it changes the port, and its words are complete."""

from dataclasses import replace

import pytest
import torch

from porting_kit.diagnosis.catalogue import CATALOGUE, NAMES, find_fault
from porting_kit.diagnosis.fault import Fault
from porting_kit.diagnosis.runtime_faults import FaultyModel
from porting_kit.diagnosis.weight_faults import interleave_qkv, is_tied
from porting_kit.errors import PortFileError
from porting_kit.medusa.decoding import replay

FAMILIES = ("bloom", "llama", "qwen2", "gptneox")
# Faults that no bundled family can have; their attribute of the kernel profile is tested with the emulator.
ELSEWHERE = {"softcap_dropped_in_generation", "one_position_id_per_request"}


def carrier(fault, port_of):
    """The first tiny port that can have a fault."""
    for family in FAMILIES:
        port = port_of(family)
        state = port.state
        if fault.name == "rope_scaling_lost":
            scaling = {"type": "linear", "factor": 4.0}
            state = state.with_config(rotary_scaling=scaling) if family == "llama" else state
        if fault.name == "tied_head_left_empty" and family == "llama":
            embedding = state.tensors["transformer.vocab_embedding.weight"]
            state = replace(state, tensors={**state.tensors, "lm_head.weight": embedding.clone()})
        if fault.applies(state) is None:
            return port, state
    return None


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_what_the_port_computes(fault, port_of):
    found = carrier(fault, port_of)
    if fault.name in ELSEWHERE:
        assert found is None, "this fault has a carrier now: take it off the list"
        return
    port, state = found
    emitted = [row[:12] for row in port.reference.generate(port.prompts[1:3], 12)]
    healthy = replay(state.build(), port.prompts[1:3], emitted, state.tree)
    faulty = replay(fault.apply(state).build(), port.prompts[1:3], emitted, state.tree)
    error = max((a - b).abs().max() for a, b in zip(healthy.logits, faulty.logits, strict=True))
    changed_steps = healthy.accepted_lengths != faulty.accepted_lengths
    assert error > 1e-3 or changed_steps
    assert state.tensors is not fault.apply(state).tensors or fault.kind not in ("weights", "heads")


def test_planting_leaves_the_healthy_port_as_it_was(port_of):
    port = port_of("llama")
    before = {name: tensor.clone() for name, tensor in port.state.tensors.items()}
    for fault in CATALOGUE:
        if fault.applies(port.state) is None:
            fault.apply(port.state).build()
    assert all(torch.equal(tensor, before[name]) for name, tensor in port.state.tensors.items())


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_every_entry_has_its_words_and_its_source(fault):
    for text in (fault.title, fault.symptom, fault.cause, fault.fix, fault.releases, fault.source, fault.decided_by):
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
