"""Layer by layer: healthy ports agree everywhere, and a fault shows first where it sits."""

import pytest
import torch

from porting_kit.alignment.inherent import matched_to_library
from porting_kit.alignment.layer_parts import explain_part, pair_modules
from porting_kit.alignment.layers import compare_layers
from porting_kit.conversion.planned import plan_scalars
from porting_kit.diagnosis.controls import seed_fault

FAMILIES = ["bloom", "llama", "qwen2", "gptneox"]


def compare(port, state=None, prompt=2, emitted=6):
    pairs = pair_modules(port.plan.tensors, port.reference)
    texts = port.reference.generate(port.prompts[prompt : prompt + 1], emitted)
    with matched_to_library(port.reference, port.differences):
        return pairs, compare_layers(
            (state or port.state).build(),
            port.reference,
            pairs,
            port.prompts[prompt],
            texts[0],
            dims=port.plan.dims,
            scalars=plan_scalars(port.plan),
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_of_a_healthy_port_agrees(family, port_of):
    pairs, report = compare(port_of(family))
    assert report.first is None, report.sentence
    compared = {(error.module, error.phase) for error in report.errors}
    for pair in pairs:
        assert (pair.module, "context") in compared
    names = {pair.module for pair in pairs}
    for layer in range(2):
        parts = ("input_layernorm", "attention.qkv", "attention.keys", "attention.context", "attention.dense")
        parts += ("mlp.fc", "mlp.proj", "residual")
        assert {f"transformer.layers.{layer}.{part}" for part in parts} <= names
    assert {phase for _, phase in compared} == {"context", "generation"}
    assert all(error.cosine > 0.999999 for error in report.errors)


def test_fused_projections_are_compared_in_the_ports_order(port_of):
    """BLOOM's rows are reordered, Qwen2's three projections joined: one pair each, of the fused width."""
    for family, width, count in (("bloom", 3 * 64, 1), ("qwen2", 64 + 2 * 32, 3)):
        pairs, report = compare(port_of(family))
        (pair,) = [pair for pair in pairs if pair.module == "transformer.layers.0.attention.qkv"]
        assert len(pair.sources) == count
        assert port_of(family).state.tensors["transformer.layers.0.attention.qkv.weight"].shape[0] == width
        assert report.first is None


@pytest.mark.parametrize(
    ("family", "fault", "module", "phase", "words"),
    [
        ("bloom", "alibi_dropped_in_generation", "layers.0.attention.context", "generation", "ALiBi"),
        ("bloom", "qkv_not_deinterleaved", "layers.0.attention.qkv", "context", "order of its rows"),
        ("qwen2", "qkv_bias_dropped", "layers.0.attention.qkv", "context", "its bias"),
        ("qwen2", "rope_base_lost", "layers.0.attention.keys", "context", "rotary base"),
        ("llama", "gate_and_up_swapped", "layers.0.mlp.fc", "context", "gate and up"),
        ("llama", "head_taken_from_embedding", "lm_head", "context", "output matrix"),
        ("llama", "position_offsets_ignored", "layers.0.attention.keys", "generation", "positions"),
        ("llama", "mask_transposed", "layers.0.attention.context", "generation", "its mask"),
    ],
)
def test_a_fault_shows_first_where_it_sits(family, fault, module, phase, words, port_of):
    port = port_of(family)
    _, faulty = seed_fault(fault, port.state)
    _, report = compare(port, faulty)
    assert report.first is not None
    assert report.first.module.endswith(module)
    assert report.first.phase == phase
    assert report.first.relative_error > 100 * report.bound
    assert words in report.sentence


def test_a_prompt_alone_compares_the_context_phase(port_of):
    port = port_of("llama")
    pairs = pair_modules(port.plan.tensors, port.reference)
    report = compare_layers(port.state.build(), port.reference, pairs, port.prompts[0], [], dims=port.plan.dims)
    assert {error.phase for error in report.errors} == {"context"}


def test_half_precision_errors_are_bounded_by_its_own_noise(port_of):
    port = port_of("llama", "float16")
    pairs = pair_modules(port.plan.tensors, port.reference)
    report = compare_layers(
        port.state.build(),
        port.reference,
        pairs,
        port.prompts[1],
        [5, 6, 7],
        dims=port.plan.dims,
        noise_dtype=torch.float16,
    )
    assert report.first is None, report.sentence
    assert 1e-5 < report.bound < 0.1


def test_what_no_weight_names_is_compared_too(port_of):
    """A factor on what the base's layer puts out leaves every matrix of that layer alone."""
    port = port_of("llama")
    layer = port.reference.model.model.layers[0]
    handle = layer.register_forward_hook(
        lambda module, inputs, output: (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5
    )
    try:
        _, report = compare(port)
    finally:
        handle.remove()
    assert report.first.module == "transformer.layers.0.residual"
    assert "each part agrees" in report.sentence


def test_keys_come_before_what_the_attention_makes_of_them(port_of):
    _, report = compare(port_of("qwen2"))
    order = [error.module for error in report.errors if error.phase == "context"]
    parts = (
        "attention.qkv",
        "attention.keys",
        "attention.context",
        "attention.dense",
        "mlp.fc",
        "mlp.proj",
        "residual",
    )
    places = [order.index(f"transformer.layers.1.{part}") for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("module", "attention_compared", "words"),
    [
        ("transformer.layers.0.attention.dense", True, "its weight or its bias"),
        ("transformer.layers.0.attention.dense", False, "rotary base and kind"),
        ("transformer.layers.3.mlp", True, "experts"),
        ("transformer.layers.3.residual", True, "adds up"),
    ],
)
def test_a_difference_is_put_down_to_no_more_than_was_compared(module, attention_compared, words):
    assert words in explain_part(module, attention_compared=attention_compared)


def test_a_scaled_embedding_is_compared_by_its_rows(port_of, monkeypatch):
    """Gemma's embedding module multiplies what it looks up; the library multiplies behind the table, or in it."""
    port = port_of("llama")
    table = port.reference.model.model.embed_tokens
    before = compare(port)[1].errors[0]
    monkeypatch.setattr(type(table), "forward", lambda self, ids: torch.nn.functional.embedding(ids, self.weight) * 8)
    _, report = compare(port)
    assert report.errors[0] == before
    assert report.first.module != "transformer.vocab_embedding"
