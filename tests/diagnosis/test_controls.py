"""Planting faults by gate. That each gate fails with its fault is tested in tests/alignment/test_run.py."""

import pytest

from porting_kit.diagnosis.controls import GATE_FAULTS, choose_fault, seed_fault
from porting_kit.errors import PortFileError


def test_a_gate_takes_the_first_fault_the_port_can_have(port_of):
    assert choose_fault("tokens", port_of("bloom").state) == "alibi_dropped_in_generation"
    assert choose_fault("tokens", port_of("qwen2").state) == "qkv_bias_dropped"
    assert choose_fault("tokens", port_of("llama").state) == "rope_base_lost"


@pytest.mark.parametrize("gate", GATE_FAULTS)
@pytest.mark.parametrize("family", ["bloom", "llama", "qwen2", "gptneox"])
def test_every_gate_has_a_fault_for_every_family(gate, family, port_of):
    name, state = seed_fault(gate, port_of(family).state)
    assert state is not port_of(family).state
    assert name in GATE_FAULTS[gate]


def test_a_fault_the_port_cannot_have_is_refused(port_of):
    with pytest.raises(PortFileError, match="cannot have the fault") as raised:
        seed_fault("alibi_dropped_in_generation", port_of("llama").state)
    assert "rope" in str(raised.value)
    with pytest.raises(PortFileError, match="Did you mean 'tokens'"):
        seed_fault("tokns", port_of("llama").state)


def test_a_gate_without_a_fitting_fault_says_why(port_of, monkeypatch):
    monkeypatch.setitem(GATE_FAULTS, "tokens", ("alibi_dropped_in_generation",))
    with pytest.raises(PortFileError, match="No fault of the gate") as raised:
        seed_fault("tokens", port_of("llama").state)
    assert "positions are rope_gpt_neox" in str(raised.value)
