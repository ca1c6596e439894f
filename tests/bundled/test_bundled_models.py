"""The bundled definitions against Hugging Face, run by the emulator: context phase, tree, Medusa heads, load checks."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from porting_kit.emulator import open_emulator
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import BUNDLED_ROOT, open_source_tree
from tests.bundled.toy_models import MAKERS, PACKED_MASK, POSITION_OFFSETS, TREE_PATHS, E, V, make_toy_model

M = 2
# Float32 sums in another order; logits are of order 10.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def emulator():
    return open_emulator(open_source_tree("bundled"))


@pytest.fixture(scope="module")
def prompts():
    torch.manual_seed(7)
    return [torch.randint(0, V, (length,)) for length in (9, 5)]


def add_heads(toy):
    """Random heads, and the config that announces them."""
    torch.manual_seed(11)
    tensors = dict(toy.tensors)
    for head in range(M):
        tensors[f"medusa_heads.{head}.medusa_layers.0.linear.weight"] = torch.randn(E, E) * 0.2
        tensors[f"medusa_heads.{head}.medusa_layers.0.linear.bias"] = torch.randn(E) * 0.2
        tensors[f"medusa_heads.{head}.lm_head.weight"] = torch.randn(V, E)
    return {**toy.config, "num_medusa_heads": M, "num_medusa_layers": 1, "max_draft_len": 3}, tensors


@torch.no_grad()
def compare_tree(toy, model, tensors, prompts) -> float:
    """The largest difference over batch, nodes and heads between a tree pass and one pass per path."""
    cache = model.new_cache(len(prompts), 32)
    model.prefill(prompts, cache)
    torch.manual_seed(3)
    tokens = torch.randint(0, V, (len(prompts), len(TREE_PATHS)))
    output = model.decode(tokens, cache, position_offsets=POSITION_OFFSETS, packed_mask=PACKED_MASK)
    worst = 0.0
    for row, prompt in enumerate(prompts):
        for node, path in enumerate(TREE_PATHS):
            ids = torch.cat([prompt, tokens[row, list(path)]])[None]
            reference = toy.hf(ids, output_hidden_states=True)
            worst = max(worst, (reference.logits[0, -1] - output.logits[row, node]).abs().max().item())
            x = reference.hidden_states[-1][0, -1]
            for head in range(M):
                name = f"medusa_heads.{head}"
                inner = torch.nn.functional.linear(
                    x, tensors[f"{name}.medusa_layers.0.linear.weight"], tensors[f"{name}.medusa_layers.0.linear.bias"]
                )
                expected = (x + torch.nn.functional.silu(inner)) @ tensors[f"{name}.lm_head.weight"].T
                worst = max(worst, (expected - output.medusa_logits[head, row, node]).abs().max().item())
    return worst


@pytest.mark.parametrize("family", MAKERS)
@torch.no_grad()
def test_context_phase_equals_hugging_face(emulator, prompts, family):
    toy = make_toy_model(family)
    model = emulator.build_model(toy.config, toy.tensors)
    logits = model.prefill(prompts, model.new_cache(2, 32), all_logits=True).logits
    for prompt, found in zip(prompts, logits, strict=True):
        torch.testing.assert_close(found, toy.hf(prompt[None]).logits[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", MAKERS)
def test_patched_model_decodes_a_tree(emulator, prompts, family):
    toy = make_toy_model(family)
    config, tensors = add_heads(toy)
    module = build_medusa_module(emulator.tree, config["architecture"])
    model = emulator.build_model(config, tensors, module_source=module.source, class_name=module.class_name)
    assert compare_tree(toy, model, tensors, prompts) < TOLERANCE
    # Seeded fault: a weight that is off by little must show.
    name = "transformer.layers.1.attention.dense.weight"
    faulty = {**tensors, name: tensors[name] * 1.05}
    model = emulator.build_model(config, faulty, module_source=module.source, class_name=module.class_name)
    assert compare_tree(toy, model, tensors, prompts) > 100 * TOLERANCE


def test_the_bundled_medusa_class_is_the_same_model(emulator, prompts):
    toy = make_toy_model("llama")
    config, tensors = add_heads(toy)
    model = emulator.build_model({**config, "architecture": "MedusaForCausalLM"}, tensors)
    assert compare_tree(toy, model, tensors, prompts) < TOLERANCE


@pytest.mark.parametrize("family", ["bloom", "gptneox", "qwen"])
def test_unpatched_models_do_not_take_a_tree(emulator, prompts, family):
    toy = make_toy_model(family)
    model = emulator.build_model(toy.config, toy.tensors)
    cache = model.new_cache(2, 32)
    model.prefill(prompts, cache)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(TypeError, match="spec_decoding_params"):
        model.decode(tokens, cache, position_offsets=POSITION_OFFSETS, packed_mask=PACKED_MASK)


def test_missing_and_misshapen_tensors_are_the_librarys_runtime_error(emulator):
    toy = make_toy_model("bloom")
    less = {name: tensor for name, tensor in toy.tensors.items() if name != "transformer.ln_f.bias"}
    with pytest.raises(RuntimeError, match=r"Required but not provided tensors: \['transformer\.ln_f\.bias'\]"):
        emulator.build_model(toy.config, less)
    odd = {**toy.tensors, "transformer.ln_f.bias": torch.zeros(E + 1)}
    with pytest.raises(RuntimeError, match=r"transformer\.ln_f\.bias"):
        emulator.build_model(toy.config, odd)


def test_what_is_not_bundled_says_so(emulator):
    toy = make_toy_model("qwen")
    for change in (
        {"qwen_type": "qwen2_moe"},
        {"use_parallel_embedding": True},
        {"quantization": {"quant_algo": "FP8"}},
    ):
        with pytest.raises(NotImplementedError, match="bundled definitions"):
            emulator.build_model({**toy.config, **change}, toy.tensors)


@pytest.fixture
def plain_import(monkeypatch):
    """The bundled package imported as it is, without the emulator."""
    import sys

    monkeypatch.syspath_prepend(str(BUNDLED_ROOT))
    before = {name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"}
    assert not before
    yield importlib.import_module
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def test_without_the_emulator_the_primitives_say_what_to_do(plain_import):
    functional = plain_import("tensorrt_llm.functional")
    for call in (functional.matmul, functional.gelu, functional.Tensor):
        with pytest.raises(RuntimeError, match=r"run the model in porting_kit\.emulator"):
            call(1)
    common = plain_import("tensorrt_llm._common")
    with pytest.raises(RuntimeError, match="no network"):
        common.default_net()


@pytest.mark.parametrize("heads", [8, 12, 5])
def test_alibi_slopes_equal_hugging_faces(plain_import, heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    functional = plain_import("tensorrt_llm.functional")
    slopes = torch.from_numpy(functional.generate_alibi_slopes(heads)).flatten()
    reference = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slopes, reference)
    if heads % 2 == 0:
        half = torch.from_numpy(functional.generate_alibi_slopes(heads, tp_size=2, tp_rank=1)).flatten()
        assert torch.equal(half, slopes[heads // 2 :])


def test_mapping_numbers_ranks_stage_by_stage(plain_import):
    mapping = plain_import("tensorrt_llm.mapping").Mapping(world_size=6, rank=3, tp_size=2, pp_size=3)
    assert (mapping.pp_rank, mapping.tp_rank, mapping.tp_group, mapping.pp_group) == (1, 1, [2, 3], [1, 3, 5])
    assert (mapping.prev_pp_rank(), mapping.next_pp_rank(), mapping.pp_layers(12)) == (1, 5, [4, 5, 6, 7])
    with pytest.raises(ValueError, match="world_size 4"):
        plain_import("tensorrt_llm.mapping").Mapping(world_size=4, tp_size=3)


def test_shapes_follow_tensor_parallelism(plain_import):
    models = plain_import("tensorrt_llm.models")
    config = {**make_toy_model("llama").config, "mapping": {"world_size": 2, "tp_size": 2}}
    config = models.PretrainedConfig.from_dict(config)
    config.set_rank(1)
    shapes = {name: parameter.shape for name, parameter in models.LLaMAForCausalLM(config).named_parameters()}
    assert shapes["transformer.layers.0.attention.qkv.weight"] == ((4 + 2 * 2) * 8 // 2, E)
    assert shapes["transformer.layers.0.attention.dense.weight"] == (E, E // 2)
    assert shapes["lm_head.weight"] == (31, E), "61 rows, padded to 62, over two ranks"
    assert not [name for name in shapes if re.search(r"layers\.2\.", name)]
