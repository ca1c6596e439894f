"""EmulatedModel on the bundled tree: phases, cache, recording, types, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from porting_kit.emulator import EmulatedModel, Emulator
from porting_kit.errors import CheckpointError, EmulatorError
from tests.emulator.differential import DEPTHS, TREE, compare_model, relative
from tests.emulator.naive_attention import pack_mask
from tests.emulator.patched import patch_model
from tests.emulator.toy_models import VOCAB, build_case

FAMILIES = ("bloom", "llama", "qwen2", "gptneox")
Build = Callable[..., EmulatedModel]
Cases = Callable[[str], tuple[Any, dict, dict]]
PROMPT = torch.tensor([5, 17, 3, 88, 41, 2])


def decode_tree(model: EmulatedModel, cache: Any, drafts: torch.Tensor, **changes: Any) -> torch.Tensor:
    """Logits [B, N, Vp] of the test tree."""
    tree = {"position_offsets": torch.tensor(DEPTHS), "packed_mask": pack_mask(TREE)} | changes
    return model.decode(drafts, cache, **tree).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_family_matches_transformers(family: str, build: Build, cases: Cases) -> None:
    assert compare_model(build(family), cases(family)[0], VOCAB).worst() < 1e-5


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_float64_differs_only_by_the_float32_tables(family: str, build: Build, cases: Cases) -> None:
    """What is left in float64 comes from the rotary table, which both sides keep in float32."""
    reference = cases(family)[0]
    with torch.no_grad():
        expected = reference.double()(PROMPT[None]).logits[0]
        reference.float()
    model = build(family, dtype="float64")
    logits = model.prefill([PROMPT], model.new_cache(1, 16), all_logits=True).logits[0]
    assert model.dtype is logits.dtype is torch.float64
    assert relative(logits, expected) < 1e-6


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 6e-3), ("bfloat16", 5e-2)])
def test_half_types_match_within_their_rounding(dtype: str, bound: float, build: Build, cases: Cases) -> None:
    model = build("llama", dtype=dtype)
    assert str(model.dtype) == f"torch.{dtype}"
    assert compare_model(model, cases("llama")[0], VOCAB).worst() < bound


@pytest.mark.parametrize(
    "fault",
    [
        {"packed_mask": pack_mask(torch.ones(6, 6, dtype=torch.bool).tril())},
        {"position_offsets": torch.zeros(6, dtype=torch.int32)},
    ],
    ids=["causal mask", "offsets dropped"],
)
def test_a_wrong_tree_shows(fault: dict, build: Build) -> None:
    model = build("llama")
    cache = model.new_cache(1, 32)
    model.prefill([PROMPT], cache)
    drafts = torch.arange(6)[None]
    right = decode_tree(model, cache, drafts)
    assert relative(decode_tree(model, cache, drafts, **fault), right) > 1e-3
    assert torch.equal(decode_tree(model, cache, drafts), right)


def test_unpatched_model_raises_the_library_error(emulator: Emulator, cases: Cases) -> None:
    _, config, tensors = cases("bloom")
    model = emulator.build_model(config, tensors)
    cache = model.new_cache(1, 32)
    model.prefill([PROMPT], cache)
    with pytest.raises(TypeError, match="spec_decoding_params"):
        decode_tree(model, cache, torch.arange(6)[None])
    assert model.decode(torch.tensor([[1]]), cache).logits.shape == (1, 1, model.vocab_size_padded)


def test_tensors_missing_surplus_misshapen_and_of_another_type(emulator: Emulator, cases: Cases) -> None:
    _, config, tensors = cases("llama")
    name = "transformer.layers.0.mlp.fc.weight"
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(RuntimeError, match="Required but not provided"):
        emulator.build_model(config, without)
    with pytest.raises(CheckpointError, match="does not take"):
        emulator.build_model(config, {**tensors, "transformer.layers.0.mlp.extra": tensors[name]})
    with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
        emulator.build_model(config, {**tensors, name: tensors[name][:-1]})
    with pytest.raises(CheckpointError, match="another type"):
        emulator.build_model(config, {**tensors, name: tensors[name].half()})


def test_weights_are_used_without_a_copy(emulator: Emulator, cases: Cases) -> None:
    _, config, tensors = cases("llama")
    model = emulator.build_model(config, tensors)
    name = "transformer.layers.1.attention.qkv.weight"
    assert model.named_parameters()[name].data_ptr() == tensors[name].data_ptr()


def test_config_is_copied_and_dtype_is_checked(emulator: Emulator, cases: Cases) -> None:
    _, config, tensors = cases("llama")
    before = json.dumps(config, sort_keys=True, default=str)
    emulator.build_model(config, tensors)
    assert json.dumps(config, sort_keys=True, default=str) == before
    with pytest.raises(EmulatorError, match="int8"):
        emulator.build_model(config, tensors, dtype="int8")
    with pytest.raises(EmulatorError, match="NoSuchForCausalLM"):
        emulator.build_model({**config, "architecture": "NoSuchForCausalLM"}, tensors)


def test_checkpoint_folder_with_a_model_file(emulator: Emulator, bundled: Any, cases: Cases, tmp_path: Path) -> None:
    """The folder and the file are read the way trtllm-build reads them."""
    _, config, tensors = cases("bloom")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="missing"):
        emulator.load_checkpoint(tmp_path)
    save_file(tensors, tmp_path / "rank0.safetensors")
    patched = patch_model(bundled, config["architecture"])
    file = tmp_path / "patched.py"
    file.write_text(patched["module_source"])
    model = emulator.load_checkpoint(tmp_path, module_file=file, class_name=patched["class_name"])
    assert compare_model(model, cases("bloom")[0], VOCAB).worst() < 1e-5
    with pytest.raises(EmulatorError, match="no such class"):
        emulator.load_checkpoint(tmp_path, module_file=file, class_name="NoSuchClass")
    file.write_text("from .sibling import Model\n")
    with pytest.raises(EmulatorError):
        emulator.load_checkpoint(tmp_path, module_file=file, class_name="Model")


def test_medusa_heads_are_an_output_of_every_phase(emulator: Emulator, cases: Cases) -> None:
    """The tree's own Medusa class: head i is residual SiLU layers and a matrix on the last hidden state."""
    _, config, tensors = cases("llama")
    E, M = config["hidden_size"], 2
    generator = torch.Generator().manual_seed(0)
    heads = {}
    for head in range(M):
        heads[f"medusa_heads.{head}.medusa_layers.0.linear.weight"] = torch.randn(E, E, generator=generator) / E**0.5
        heads[f"medusa_heads.{head}.medusa_layers.0.linear.bias"] = torch.randn(E, generator=generator)
        heads[f"medusa_heads.{head}.lm_head.weight"] = torch.randn(config["vocab_size"], E, generator=generator)
    config = {
        **config,
        "architecture": "MedusaForCausalLM",
        "num_medusa_heads": M,
        "num_medusa_layers": 1,
        "max_draft_len": 5,
    }
    model = emulator.build_model(config, {**tensors, **heads})
    assert model.num_medusa_heads == M
    cache = model.new_cache(1, 32)
    first = model.prefill([PROMPT], cache)
    tree = model.decode(
        torch.arange(6)[None], cache, position_offsets=torch.tensor(DEPTHS), packed_mask=pack_mask(TREE)
    )
    for output, logits in ((first, first.medusa_logits), (tree, tree.medusa_logits[:, 0])):
        hidden = output.hidden_states
        for head in range(M):
            prefix = f"medusa_heads.{head}"
            linear = torch.nn.functional.linear(
                hidden,
                heads[f"{prefix}.medusa_layers.0.linear.weight"],
                heads[f"{prefix}.medusa_layers.0.linear.bias"],
            )
            expected = (hidden + torch.nn.functional.silu(linear)) @ heads[f"{prefix}.lm_head.weight"].T
            assert relative(logits[head], expected) < 1e-6


def test_trees_of_unequal_sizes_come_back_packed(build: Build, cases: Cases) -> None:
    model, reference = build("llama"), cases("llama")[0]
    cache = model.new_cache(2, 32)
    prompts = [PROMPT, PROMPT[:4]]
    model.prefill(prompts, cache)
    drafts = [torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([7, 8, 9])]
    logits = decode_tree(model, cache, drafts)
    assert logits.shape[0] == 9
    row = 0
    with torch.no_grad():
        for prompt, draft in zip(prompts, drafts, strict=True):
            for node in range(len(draft)):
                path = TREE[node].nonzero().flatten()
                expected = reference(torch.cat([prompt, draft[path]])[None]).logits[0, -1]
                assert relative(logits[row], expected) < 1e-5
                row += 1


def test_attention_window_is_transformers_sliding_window(emulator: Emulator) -> None:
    reference, config, tensors = build_case("mistral")
    reference.config.sliding_window = reference.model.config.sliding_window = 4
    for layer in reference.model.layers:
        layer.self_attn.sliding_window = 4
    model = emulator.build_model({**config, "architecture": "LlamaForCausalLM"}, tensors)
    cache = model.new_cache(1, 32, attention_window=4)
    text = torch.arange(10) * 7 % VOCAB
    logits = model.prefill([text], cache, all_logits=True).logits[0]
    with torch.no_grad():
        expected = reference(text[None]).logits[0]
        whole = model.prefill([text], model.new_cache(1, 32), all_logits=True).logits[0]
        assert relative(logits, expected) < 1e-5
        assert relative(whole, expected) > 1e-3
        step = model.decode(torch.tensor([[50]]), cache).logits[0, 0]
        assert relative(step, reference(torch.cat([text, torch.tensor([50])])[None]).logits[0, -1]) < 1e-5


def test_record_by_module_name(build: Build) -> None:
    model = build("bloom")
    cache = model.new_cache(2, 32)
    with model.record("transformer.layers.*") as records:
        model.prefill([PROMPT, PROMPT[:2]], cache)
        model.decode(torch.tensor([[1], [2]]), cache)
    for part in ("attention.qkv", "attention", "attention.dense", "mlp", "mlp.fc", "input_layernorm", "post_layernorm"):
        first, second = records[f"transformer.layers.1.{part}"]
        assert (first.shape[0], second.shape[0]) == (8, 2), part
    assert "transformer.ln_f" not in records
    kept = len(records["transformer.layers.0.mlp"])
    model.decode(torch.tensor([[1], [2]]), cache)
    assert len(records["transformer.layers.0.mlp"]) == kept
    with pytest.raises(EmulatorError, match="recorded name"), model.record("transformer.h.*"):
        pass


def test_a_full_cache_and_half_a_tree_are_refused(build: Build) -> None:
    model = build("llama")
    cache = model.new_cache(1, 8)
    model.prefill([PROMPT], cache)
    with pytest.raises(EmulatorError, match="cache is full"):
        decode_tree(model, cache, torch.arange(6)[None])
    with pytest.raises(EmulatorError, match="both"):
        model.decode(torch.tensor([[1]]), cache, packed_mask=pack_mask(TREE))
    with pytest.raises(EmulatorError, match="embedding"):
        model.prefill([torch.tensor([VOCAB + 100])], cache)
