"""Loading the base: greedy settings stated, every end id found, nothing fetched, nothing left changed."""

import json

import pytest
import torch
import transformers

from porting_kit.alignment.activations import check_activations, measure_activations
from porting_kit.alignment.reference import choose_attention, load_reference, reference_from_model, resolve_dtype
from porting_kit.alignment.rounding import computing_as
from porting_kit.errors import BaseModelError
from tests.alignment.tiny_ports import make_base, make_prompts


@pytest.fixture
def folder(tmp_path):
    return make_base(tmp_path, "llama", eos_token_id=[3, 7])


def write_generation_config(folder, **settings):
    (folder / "generation_config.json").write_text(json.dumps(settings))


def greedy_by_hand(reference, prompt, count):
    text = list(prompt)
    for _ in range(count):
        text.append(int(reference.logits([text])[0][-1].argmax()))
    return text[len(prompt) :]


def test_generation_settings_of_the_folder_are_overridden_and_listed(folder):
    """Case 38."""
    write_generation_config(folder, do_sample=True, temperature=0.7, repetition_penalty=1.8, top_k=20, eos_token_id=159)
    reference = load_reference(folder)
    assert reference.settings.overridden == {
        "do_sample": True,
        "temperature": 0.7,
        "repetition_penalty": 1.8,
        "top_k": 20,
    }
    assert reference.settings.effective["do_sample"] is False
    prompt = make_prompts()[1]
    expected = greedy_by_hand(reference, prompt, 12)
    ends = [index for index, token in enumerate(expected) if token in reference.settings.end_ids]
    assert reference.generate([prompt], 12)[0] == (expected[: ends[0] + 1] if ends else expected)
    assert reference.model.generation_config.repetition_penalty == 1.8, "the model's own config is put back"


def test_end_ids_come_from_every_file(folder):
    """Case 42: the config says 3 and 7, the generation config 9."""
    write_generation_config(folder, eos_token_id=9)
    settings = load_reference(folder).settings
    assert settings.end_ids == (3, 7, 9)
    assert settings.end_id_sources == {3: ("config",), 7: ("config",), 9: ("generation config",)}
    assert json.loads(json.dumps(settings.as_dict()))["end_id_sources"]["9"] == ["generation config"]


def test_a_folder_without_a_tokenizer_names_no_end_id_of_its_own(tmp_path):
    """transformers 5 makes an empty tokenizer for some families, whose end id is 0."""
    reference = load_reference(make_base(tmp_path, "qwen2"))
    assert reference.tokenizer is None
    assert reference.settings.end_ids == (2,)


def test_a_plain_generation_config_overrides_nothing(folder):
    write_generation_config(folder, eos_token_id=3, top_k=50, temperature=1.0)
    assert load_reference(folder).settings.overridden == {}


def test_missing_and_broken_bases_are_refused(tmp_path):
    with pytest.raises(BaseModelError, match="not there"):
        load_reference(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(BaseModelError, match="cannot load the base"):
        load_reference(tmp_path)
    with pytest.raises(BaseModelError, match="Unknown dtype"):
        resolve_dtype("int8")


def test_the_attention_that_is_known_to_be_wrong_is_avoided():
    assert choose_attention("falcon")[0] == "sdpa"
    assert "twice" in choose_attention("falcon")[1]
    assert choose_attention("bloom")[0] == "eager"
    assert choose_attention("falcon", "eager") == ("eager", "asked for")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_computing_as_another_dtype_rounds_and_leaves_no_trace(dtype, folder):
    reference = load_reference(folder)
    before = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    prompt = make_prompts()[:1]
    exact = reference.logits(prompt)[0]
    with computing_as(reference, dtype):
        other = reference.logits(prompt)[0]
    error = ((other - exact).abs().max() / exact.abs().max()).item()
    eps = torch.finfo(min(dtype, torch.float32, key=lambda kind: torch.finfo(kind).bits)).eps
    assert 0.01 * eps < error < 200 * eps
    if dtype is not torch.float64:
        assert torch.equal(other, other.to(dtype).to(torch.float32)), "logits are rounded like everything else"
    assert torch.equal(reference.logits(prompt)[0], exact)
    assert all(torch.equal(tensor, before[name]) for name, tensor in reference.model.state_dict().items())


def test_imitated_half_precision_is_near_the_real_one(folder):
    """The imitation must not be quieter than half precision by much: within a factor of four of transformers' own."""
    reference, prompts = load_reference(folder), make_prompts()
    exact = torch.cat(reference.logits(prompts))
    with computing_as(reference, torch.float16):
        imitated = torch.cat(reference.logits(prompts))
    real = torch.cat(load_reference(folder, dtype="float16").logits(prompts)).float()
    ratio = ((imitated - exact).norm() / (real - exact).norm()).item()
    assert 0.25 < ratio < 4


def test_hidden_states_are_what_the_output_matrix_reads(folder):
    reference = load_reference(folder)
    texts = make_prompts()[:2]
    for hidden, logits in zip(reference.hidden_states(texts), reference.logits(texts), strict=True):
        torch.testing.assert_close(hidden @ reference.model.lm_head.weight.T, logits)


class TestActivations:
    """Case 41: a base trained in bfloat16 whose activations do not fit float16."""

    @pytest.fixture
    def overflowing(self, folder):
        reference = load_reference(folder)
        reference.model.model.layers[0].mlp.down_proj.weight.data.mul_(3e5)
        return reference

    def test_an_overflowing_reference_is_refused_in_float16(self, overflowing):
        with pytest.raises(BaseModelError, match="broken in float16") as raised:
            check_activations(overflowing, make_prompts(), torch.float16)
        assert "bfloat16" in str(raised.value)
        assert "mlp" in str(raised.value)

    def test_it_is_fine_in_bfloat16_and_in_float32(self, overflowing):
        assert check_activations(overflowing, make_prompts(), torch.bfloat16).survives(torch.bfloat16)
        found = measure_activations(overflowing, make_prompts())
        assert found.largest > 65504
        assert not found.survives(torch.float16)

    def test_a_healthy_reference_passes_in_every_dtype(self, folder):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert not check_activations(load_reference(folder), make_prompts(), dtype).broken_modules


def test_a_near_tie_is_benign_and_a_dropped_bias_is_not(tmp_path):
    """Case 37: two nearly equal vocabulary rows against layers whose biases are gone, on prompts of 40 tokens."""
    from porting_kit.alignment.noise import measure_noise
    from porting_kit.alignment.oracle import Status, judge_texts

    reference = load_reference(make_base(tmp_path, "qwen2"))
    prompts = make_prompts((40, 40, 40))
    texts = [[*prompt, *row] for prompt, row in zip(prompts, reference.generate(prompts, 30), strict=True)]
    tolerance = measure_noise(reference, texts, torch.bfloat16).near_tie_tolerance
    head = reference.model.lm_head.weight.data
    emitted = reference.generate(prompts, 30)
    winner = emitted[0][5]
    twin = next(token for token in range(3, 160) if all(token not in row for row in emitted))
    head[twin] = head[winner] * (1 - 1e-4)
    swapped = [[twin if token == winner else token for token in row[:6]] for row in emitted]
    judged = judge_texts(reference, prompts, swapped, tolerance)
    assert judged[0].status[5] == Status.NEAR_TIE
    assert sum(len(text.positions(Status.WRONG)) for text in judged) == 0
    for layer in reference.model.model.layers:
        layer.self_attn.q_proj.bias.data.zero_()
        layer.self_attn.k_proj.bias.data.zero_()
        layer.self_attn.v_proj.bias.data.zero_()
    faulty = reference.generate(prompts, 30)
    healthy = load_reference(tmp_path)
    judged = judge_texts(healthy, prompts, faulty, tolerance, end_ids=healthy.settings.end_ids)
    assert sum(len(text.positions(Status.WRONG)) for text in judged) > 5


def test_a_house_name_as_model_type_is_loaded_by_its_class(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "model_type": "mycorp_chat"}))
    found = load_reference(tmp_path).logits([[1, 2, 3]])[0]
    assert torch.allclose(found, model(torch.tensor([[1, 2, 3]])).logits[0], atol=1e-5)
    file.write_text(json.dumps({**config, "model_type": "mycorp_chat", "architectures": ["MyCorpLM"]}))
    with pytest.raises(BaseModelError):
        load_reference(tmp_path)


def test_experts_are_computed_in_every_dtype_that_noise_is_measured_in():
    """transformers' grouped product of experts refuses float64."""
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = reference_from_model(transformers.MixtralForCausalLM(config))
    (oracle,) = reference.logits([[5, 6, 7, 8]])
    with computing_as(reference, torch.float64):
        (exact,) = reference.logits([[5, 6, 7, 8]])
    assert exact.dtype is torch.float64
    assert 0 < (exact - oracle).abs().max() < 1e-4
    assert reference.chooses_experts


def test_a_dense_base_chooses_no_experts(folder):
    assert not load_reference(folder).chooses_experts
