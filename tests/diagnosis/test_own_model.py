"""A port that is another model than its base: the healthy port emits what was seen, and the alignment fails."""

from dataclasses import replace

import pytest

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.run import AlignmentOptions, align_port_outputs
from porting_kit.diagnosis import name_cause
from porting_kit.diagnosis.catalogue import find_fault
from porting_kit.diagnosis.own_model import INVERSES, find_correction
from porting_kit.outcomes import Verdict
from tests.alignment.tiny_ports import make_port

WINDOW = 24


def align(port, state, **options):
    options = AlignmentOptions(new_tokens=10, batch_sizes=(1,), differences=port.differences, **options)
    return align_port_outputs(
        port.reference, state.build(), port.prompts, state.tree, heads=port.heads, options=options
    )


def correct(port, state, result, window=None):
    texts = [[*prompt, *text.tokens] for prompt, text in zip(result.prompts, result.texts, strict=True)]
    bound = 4 * result.noise.relative_error
    return find_correction(state, port.reference.logits(texts), texts, bound, window)


@pytest.mark.parametrize("name", ["gate_and_up_swapped", "q_scale_twice", "rotary_style_swapped", "norms_swapped"])
def test_a_fault_in_the_port_itself_is_not_called_nothing_to_explain(name, port_of):
    port = port_of("llama")
    state = find_fault(name).apply(port.state)
    result = align(port, state)
    assert result.verdict is Verdict.FAIL
    diagnosis = name_cause(state, result)
    assert diagnosis.to_explain == 0
    assert "the port's own model differs from the base" in diagnosis.verdict
    correction = correct(port, state, result)
    assert correction.fault.name == name
    assert correction.error < 1e-4 < correction.before
    assert correct(port, port.state, result) is None


def test_a_window_that_texts_outgrow_is_named(tmp_path):
    """The base sees the last 24 tokens only; a checkpoint cannot say so."""
    port = make_port(tmp_path, "mistral", sliding_window=WINDOW)
    result = align(port, port.state)
    assert result.verdict is Verdict.FAIL
    diagnosis = name_cause(port.state, result)
    assert diagnosis.own_model is not None
    correction = correct(port, port.state, result, WINDOW)
    assert correction.fault.name == "sliding_window_ignored"
    assert "window of 24 tokens" in correction.describe()
    assert align(port, port.state.with_window(WINDOW)).verdict is Verdict.PASS


def test_a_fault_of_the_ports_own_generation_phase_is_said_to_be_there(port_of):
    port = port_of("llama")
    state = find_fault("mask_transposed").apply(port.state)
    diagnosis = name_cause(state, align(port, state))
    assert "generation phase differs from its context phase" in diagnosis.verdict
    assert diagnosis.as_dict()["own_model"] == diagnosis.verdict


def test_a_gate_beyond_the_main_run_says_where_to_look(port_of):
    port = port_of("llama")
    result = align(port, port.state)
    assert name_cause(port.state, result).own_model is None
    gates = tuple(replace(gate, passed=False) if gate.name == "repeat" else gate for gate in result.gates)
    failed = replace(result, gates=gates, verdict=Verdict.FAIL)
    assert "kept between calls" in name_cause(port.state, failed).verdict


@pytest.mark.parametrize("name", sorted(INVERSES))
def test_an_inverse_brings_the_port_back(name, port_of):
    """Read on the tensors, config and module attributes that the two change."""
    port = port_of("llama")
    fault, inverse = find_fault(name), find_fault(INVERSES[name])
    if fault.applies(port.state) is not None:
        pytest.skip(f"{name}: {fault.applies(port.state)}")
    back = inverse.apply(fault.apply(port.state))
    before, after = (ContextOracle(state.build()).logits(port.prompts[:2]) for state in (port.state, back))
    assert max((a - b).abs().max() for a, b in zip(before, after, strict=True)) < 1e-4
