"""Whole decode steps written down: the same generation as the plain loop, on every device; faults make them differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porting_kit.emulator import EmulatedModel, decoder, open_emulator
from porting_kit.emulator.program import StepProgram
from porting_kit.medusa import fused_loop
from porting_kit.medusa.decoding import generate_greedy, generate_medusa
from porting_kit.medusa.tree import read_tree
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree
from tests.emulator.random_checkpoint import make_checkpoint

TREE = read_tree("small_3")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PROMPTS = [torch.arange(9), torch.arange(5), torch.arange(20) + 7]


def build(family: str, device: str = "cpu", dtype: str = "float32") -> EmulatedModel:
    """A random model with three heads that share the base's output matrix."""
    source = open_source_tree("bundled")
    emulator = open_emulator(source, device=device)
    config, tensors = make_checkpoint(emulator, family)
    config |= {"num_medusa_heads": 3, "num_medusa_layers": 1, "max_draft_len": 63}
    generator = torch.Generator().manual_seed(3)
    for head in range(3):
        prefix = f"medusa_heads.{head}"
        tensors[f"{prefix}.medusa_layers.0.linear.weight"] = torch.randn(128, 128, generator=generator) / 10
        tensors[f"{prefix}.medusa_layers.0.linear.bias"] = torch.randn(128, generator=generator) / 10
        tensors[f"{prefix}.lm_head.weight"] = tensors["lm_head.weight"]
    module = build_medusa_module(source, config["architecture"])
    arguments: dict[str, Any] = {"module_source": module.source, "class_name": module.class_name}
    return emulator.build_model(config, tensors, dtype=dtype, **arguments)


@pytest.fixture(scope="module")
def model() -> EmulatedModel:
    return build("bloom")


def count_programs(model: EmulatedModel) -> int:
    return sum(len(decoder._programs) for decoder in model.decoders._kept.values())


def plainly(model: EmulatedModel, run, *arguments):
    model.decoders.is_enabled = False
    try:
        return run(model, *arguments)
    finally:
        model.decoders.is_enabled = True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "bloom", "gptneox"])
def test_a_fused_generation_is_the_plain_one(family: str, device: str):
    model = build(family, device)
    prompts = [prompt.to(device) for prompt in PROMPTS]
    free = plainly(model, generate_greedy, prompts, 40)
    ends = (free.tokens[0][11], free.tokens[1][24])
    for end_ids in ((), ends):
        fused = generate_medusa(model, TREE, prompts, 40, end_ids)
        plain = plainly(model, generate_medusa, TREE, prompts, 40, end_ids)
        assert count_programs(model)
        assert fused.tokens == plain.tokens == generate_greedy(model, prompts, 40, end_ids).tokens
        assert fused.accepted_lengths == plain.accepted_lengths
        assert fused.ended_by == plain.ended_by
        assert 0 < fused.context_seconds < fused.seconds
        for ours, theirs in zip(fused.origins, plain.origins, strict=True):
            assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in vars(ours))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [7, 6, 5]])
def test_heads_at_foreseen_nodes_give_the_same_texts(order: list[int], monkeypatch: pytest.MonkeyPatch):
    """Steps end at foreseen nodes, at others, or at both; the logits of a wrong node would draft other tokens."""
    model = build("llama")
    prompts = [PROMPTS[0]]
    plain = plainly(model, generate_medusa, TREE, prompts, 40)
    monkeypatch.setattr(fused_loop, "likely_last", lambda tree: order)
    monkeypatch.setitem(decoder.FORESIGHT, "cpu", decoder.Foresight(3, 64, 0))
    fused = generate_medusa(model, TREE, prompts, 40)
    assert list(next(iter(model.decoders._kept.values())).foreseen) == order
    assert fused.tokens == plain.tokens
    assert fused.accepted_lengths == plain.accepted_lengths


def test_foreseen_logits_of_a_wrong_node_are_found(monkeypatch: pytest.MonkeyPatch):
    """Seeded fault: a step gives its foreseen logits in another order; the comparison with the eager step says so."""
    monkeypatch.setitem(decoder.FORESIGHT, "cpu", decoder.Foresight(3, 64, 0))
    step = StepProgram.__call__
    monkeypatch.setattr(
        StepProgram, "__call__", lambda *given: (*(found := step(*given))[:2], *(g.flip(2) for g in found[2:]))
    )
    model = build("llama")
    assert generate_medusa(model, TREE, [PROMPTS[0]], 12).tokens
    assert count_programs(model) == 0


def test_a_matrix_is_foreseen_only_where_it_is_shared_and_large(model: EmulatedModel, monkeypatch: pytest.MonkeyPatch):
    def foresee(limit: decoder.Foresight, nodes: int = TREE.num_nodes) -> tuple[int, ...]:
        monkeypatch.setitem(decoder.FORESIGHT, "cpu", limit)
        found = decoder.Decoder(model, 1, 60, TREE.position_offsets, TREE.packed_mask)
        found.nodes = nodes
        found.foresee([0, 1, 2, 3])
        return found.foreseen

    size = decoder.measure_shared_matrix(model)
    assert size > 0
    assert foresee(decoder.Foresight(3, 100, size)) == (0, 1, 2)
    assert foresee(decoder.Foresight(3, 100, size + 1)) == ()
    assert foresee(decoder.Foresight(3, TREE.num_nodes + 7, size)) == (0, 1)
    assert foresee(decoder.Foresight(3, TREE.num_nodes + 2, size)) == ()
    own = dict(model.named_parameters())
    own["medusa_heads.1.lm_head.weight"] = own["medusa_heads.1.lm_head.weight"] + 1
    monkeypatch.setattr(model, "named_parameters", lambda: own)
    assert decoder.measure_shared_matrix(model) == 0


def test_one_token_is_one_context_phase(model: EmulatedModel, monkeypatch: pytest.MonkeyPatch):
    calls = []
    prefill = EmulatedModel.prefill
    monkeypatch.setattr(EmulatedModel, "prefill", lambda *given, **named: calls.append(1) or prefill(*given, **named))
    assert generate_greedy(model, PROMPTS, 1).tokens == [row[:1] for row in generate_greedy(model, PROMPTS, 3).tokens]
    assert len(calls) == 2


def test_lengths_across_a_bucket_and_a_second_generation(model: EmulatedModel):
    prompts = [torch.arange(246) % 90, torch.arange(200) % 90]
    for _ in range(2):  # the second time the kept decoder is used, with what the first left in its cache
        fused = generate_medusa(model, TREE, prompts, 24)
        assert fused.tokens == plainly(model, generate_greedy, prompts, 24).tokens


def test_a_weight_changed_in_place_counts(model: EmulatedModel):
    before = generate_medusa(model, TREE, PROMPTS, 20).tokens
    weight = next(tensor for name, tensor in model.named_parameters().items() if name.endswith("lm_head.weight"))
    kept = weight.clone()
    with torch.no_grad():
        weight.mul_(-1)
        changed = generate_medusa(model, TREE, PROMPTS, 20).tokens
        assert changed == plainly(model, generate_greedy, PROMPTS, 20).tokens != before
        weight.copy_(kept)


def test_a_program_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch):
    """Seeded fault: the program attends to its drafts one row off. The eager step finds it, and decoding is right."""
    model = build("llama")
    call = StepProgram.__call__
    monkeypatch.setattr(StepProgram, "__call__", lambda self, ids, pasts, layers: call(self, ids, pasts + 1, layers))
    fused = generate_medusa(model, TREE, PROMPTS, 20)
    assert count_programs(model) == 0
    assert fused.tokens == plainly(model, generate_greedy, PROMPTS, 20).tokens


def test_what_must_run_eagerly_does(model: EmulatedModel):
    inputs = (TREE.position_offsets, TREE.packed_mask)
    assert model.open_decoder(1, 50, *inputs) is not None
    with model.record("*"):
        assert model.open_decoder(1, 50, *inputs) is None
    half = build("llama", dtype="float16")
    assert half.open_decoder(1, 50, *inputs) is None


def test_one_token_and_an_end_in_the_context_phase(model: EmulatedModel):
    free = plainly(model, generate_greedy, PROMPTS, 8)
    assert generate_medusa(model, TREE, PROMPTS, 1).tokens == [row[:1] for row in free.tokens]
    ended = generate_medusa(model, TREE, PROMPTS, 8, (free.tokens[0][0],))
    assert ended.tokens[0] == free.tokens[0][:1]
