"""One normalised form from every spelling; contradictions, gaps and unknown families refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from porting_kit.architectures import find_family, load_families, name_base, read_base_config
from porting_kit.architectures.release_needs import find_differences, find_unmet_needs
from porting_kit.architectures.releases import release_key
from porting_kit.errors import BaseModelError

T = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}
POST_NORM_RESIDUAL = "apply_residual_connection_post_layernorm"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def test_the_plain_case_keeps_everything() -> None:
    base = read_base_config(T)
    assert (base.family, base.architecture, base.dtype) == ("llama", "LlamaForCausalLM", "float16")
    assert base.dims == {
        **{"E": 64, "L": 2, "H": 4, "K": 2, "D": 16, "I": 128, "J": 128, "V": 160, "S": 512, "Q": 16, "P": 64},
    }
    assert (base.rope_base, base.rope_scaling, base.norm_eps, base.tied) == (10000.0, None, 1e-6, False)
    assert base.unread_keys == ()
    assert base.origins["rope_base"].kind == "kept"
    assert base.origins["head_size"].kind == "derived"


@pytest.mark.parametrize(
    ("changes", "theta", "kind"),
    [
        ({"rope_theta": 1e6}, 1e6, None),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_theta": None, "rotary_emb_base": 1e6}, 1e6, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, "linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1e4, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 1e4, "llama3"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}, 5e5, "llama3"),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}, 1e4, "linear"),
        ({"rope_scaling": {"type": "default"}}, 1e4, None),
        ({"rope_scaling": None}, 1e4, None),
    ],
)
def test_rope_settings_of_every_spelling(changes: dict, theta: float, kind: str | None) -> None:
    base = read_base_config({**T, **changes})
    assert base.rope_base == theta
    found = base.rope_scaling
    assert (found and found["type"]) == kind
    assert found is None or (found["type"] == found["rope_type"] and "rope_theta" not in found)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}}, "names its kind twice"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "states the rotary base twice"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}},
            "states the rope scaling twice",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks keys"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 8.0}}, "'spiral' has no counterpart"),
        ({"rope_scaling": "linear"}, "is not a mapping"),
        ({"n_head": 8}, "states num_heads twice"),
        ({"dtype": "bfloat16"}, "states dtype twice"),
        ({"hidden_size": None}, "the config lacks hidden_size"),
        ({"vocab_size": "160"}, "vocab_size is not a positive whole number"),
        ({"num_hidden_layers": 0}, "num_layers is not a positive whole number"),
        ({"rope_theta": "1e6"}, "rope_theta is not a positive number"),
        ({"rope_theta": 0}, "rope_theta is not a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor is not a positive number"),
        ({"rope_local_base_freq": "x"}, "local layers is not a positive number"),
        ({"rms_norm_eps": "1e-6"}, "norm epsilon"),
        ({"rms_norm_eps": -1.0}, "norm epsilon"),
        ({"rms_norm_eps": float("nan")}, "norm epsilon"),
        ({"num_key_value_heads": 3}, "query heads do not divide"),
        ({"num_attention_heads": 3}, "no multiple of the number of heads"),
        ({"architectures": ["LlamaForCausalLM", "BloomForCausalLM"]}, None),
    ],
)
def test_contradictions_and_gaps_are_refused(changes: dict, text: str | None) -> None:
    raw = {key: value for key, value in {**T, **changes}.items() if value is not None}
    if text is None:  # two classes of two families: model_type decides
        assert read_base_config(raw).family == "llama"
        return
    with pytest.raises(BaseModelError, match=text):
        read_base_config(raw)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_act": "zzz"}, "knows no activation 'zzz'"),
        ({"hidden_act": "sillu"}, "the nearest known name is silu"),
        ({"hidden_act": 3}, "knows no activation 3"),
        ({"hidden_act": None}, "states no activation"),
        ({"torch_dtype": "zz"}, "unknown dtype 'zz'"),
        ({"torch_dtype": "bfloat61"}, "the nearest is bfloat16"),
        ({"torch_dtype": None, "dtype": "float8_e4m3fn"}, "unknown dtype"),
    ],
)
def test_unknown_activations_and_dtypes_are_refused(changes: dict, text: str) -> None:
    with pytest.raises(BaseModelError, match=text):
        read_base_config({**T, **changes})


def test_a_class_with_an_activation_of_its_own_asks_for_none() -> None:
    raw = {**T, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu"}
    assert read_base_config(raw).activation == "silu"
    assert read_base_config({**T, "hidden_act": "gelu_pytorch_tanh"}).activation == "gelu_pytorch_tanh"


@pytest.mark.parametrize(
    ("raw", "family"),
    [
        ({**T, "model_type": "mycorp_chat", "architectures": ["Qwen2ForCausalLM"]}, "qwen2"),
        ({**T, "model_type": "qwen2", "architectures": ["MyCorpForCausalLM"]}, "qwen2"),
        ({**T, "model_type": "llama", "architectures": ["Qwen2ForCausalLM"]}, "qwen2"),
        ({**T, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "llama"),
        ({key: value for key, value in T.items() if key != "architectures"}, "llama"),
    ],
)
def test_the_class_decides_before_the_type(raw: dict, family: str) -> None:
    assert read_base_config(raw).family == family


def test_tensors_decide_when_no_name_is_known() -> None:
    raw = {**T, "model_type": "mycorp", "architectures": ["MyCorpForCausalLM"]}
    falcon = ["transformer.h.0.self_attention.query_key_value.weight", "transformer.h.0.ln_attn.weight"]
    assert find_family(raw, falcon).name == "falcon"
    with pytest.raises(BaseModelError, match="no known model family fits") as caught:
        find_family(raw, ["model.layers.0.strange.weight"])
    assert caught.value.items == tuple(sorted(load_families()))
    assert "new family is one file" in caught.value.next_step


def test_a_silent_config_is_settled_by_the_tensors() -> None:
    raw = {key: value for key, value in T.items() if key != "attention_bias"}
    assert read_base_config(raw).switches["attention_bias"] is None
    with_bias = read_base_config(raw, ["model.layers.0.self_attn.q_proj.bias"])
    assert with_bias.switch("attention_bias") is True
    assert with_bias.origins["switch:attention_bias"].note.endswith("is present")
    assert read_base_config(raw, ["model.norm.weight"]).switch("attention_bias") is False


@pytest.mark.parametrize(
    ("architecture", "changes", "key"),
    [
        ("GPTNeoXForCausalLM", {"use_parallel_residual": False}, "use_parallel_residual"),
        (
            "BloomForCausalLM",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm",
        ),
        ("MptForCausalLM", {"attn_config": {"softmax_scale": 0.1}}, "attn_config.softmax_scale"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("GPTNeoXForCausalLM", {"intermediate_size": 200}, "intermediate_size"),
        ("OPTForCausalLM", {"enable_bias": False}, "enable_bias"),
        ("Qwen2MoeForCausalLM", {"norm_topk_prob": True, "num_experts": 4}, "norm_topk_prob"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window"),
        ("MptForCausalLM", {"no_bias": False}, "no_bias"),
        ("BaichuanForCausalLM", {"rope_theta": 5e5}, "rope_base"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_settings_without_counterpart_are_refused_by_name(architecture: str, changes: dict, key: str) -> None:
    sizes = {name: T[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    sizes |= {"max_position_embeddings": 512}
    ordinary = read_base_config({"architectures": [architecture], "intermediate_size": 256, **sizes})
    ordinary.require_supported()
    base = read_base_config({"architectures": [architecture], "intermediate_size": 256, **sizes, **changes})
    assert [refusal.key for refusal in base.refusals] == [key]
    with pytest.raises(BaseModelError, match=f"no counterpart for {key}"):
        base.require_supported()


def test_unknown_keys_are_kept_in_sight() -> None:
    base = read_base_config({**T, "attention_multiplier": 0.5, "use_cache": True, "bos_token_id": 1})
    assert base.unread_keys == ("attention_multiplier",)


def test_a_nested_text_config_is_the_decoder() -> None:
    raw = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": dict(T)}
    base = read_base_config(raw)
    assert (base.family, base.hidden_size) == ("llama", 64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"base_model_name_or_path": "x"}', "holds Medusa heads only"),
    ],
)
def test_files_that_are_no_config_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BaseModelError, match=said):
        read_base_config(tmp_path)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"no config\.json"):
        read_base_config(tmp_path)
    with pytest.raises(BaseModelError, match=r"no config\.json"):
        read_base_config(tmp_path / "nowhere")


def test_a_folder_and_its_file_read_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(T))
    assert read_base_config(tmp_path) == read_base_config(tmp_path / "config.json")


def test_the_release_decides_names_and_layouts() -> None:
    base = read_base_config({**T, "architectures": ["Qwen2ForCausalLM"]})
    assert base.architecture == "Qwen2ForCausalLM"
    assert base.for_release("0.11.0.dev2024062500").architecture == "QWenForCausalLM"
    assert base.for_release("0.13.0.dev2024090300").architecture == "Qwen2ForCausalLM"
    assert base.for_release("bundled-1").architecture == "Qwen2ForCausalLM"
    gemma = read_base_config({**T, "architectures": ["GemmaForCausalLM"], "tie_word_embeddings": True, "head_dim": 16})
    assert [gemma.for_release(r).switch("leaves_output_out") for r in ("0.10.0", "0.13.0", "0.16.0", None)] == [
        *(False, True, False, True)
    ]


def test_a_head_size_no_release_takes_is_told() -> None:
    phi = read_base_config({**T, "architectures": ["PhiForCausalLM"], "num_key_value_heads": 4, "head_dim": 32})
    (need,) = find_unmet_needs(phi, "0.16.0")
    assert (need.what, need.since) == ("a head size of 32 at 4 heads on 64", None)


def test_a_release_whose_class_is_broken_is_told() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    grok = read_base_config({**T, **experts, "architectures": ["Grok1ModelForCausalLM"]})
    (need,) = find_unmet_needs(grok, "0.14.0.dev2024100800")
    assert (need.since, "wrong order" in need.what) == ("0.15.0.dev2024101500", True)
    assert find_unmet_needs(grok, "0.13.0") == find_unmet_needs(grok, "0.16.0") == ()


def test_a_setting_worked_out_from_others_is_refused() -> None:
    raw = {**T, "architectures": ["Grok1ModelForCausalLM"], "attn_output_multiplier": 0.1}
    (refusal,) = read_base_config(raw).refusals
    assert (refusal.key, refusal.value) == ("attn_output_multiplier", 0.1)
    assert not read_base_config({**raw, "attn_output_multiplier": 0.25}).refusals


def test_releases_are_ordered() -> None:
    ordered = ["0.9.0.dev2024022700", "0.9.0", "0.10.0.dev1", "0.10.0", "0.16.0", "1.0.0rc2", "1.0.0", "1.2.1"]
    assert sorted(ordered, key=release_key) == ordered
    assert release_key("bundled-1") is None


def test_a_release_without_the_class_is_told() -> None:
    base = read_base_config({**T, "architectures": ["Qwen2ForCausalLM"]})
    (need,) = find_unmet_needs(base, "0.9.0.dev2024022700")
    assert need.since == "0.9.0.dev2024031900"
    assert find_unmet_needs(base, "0.11.0") == find_unmet_needs(base, None) == find_unmet_needs(base, "bundled-1") == ()
    phi = read_base_config({**T, "architectures": ["PhiForCausalLM"], "num_key_value_heads": 4})
    assert find_unmet_needs(phi, "0.11.0", tp_size=1) == ()
    assert "several ranks" in find_unmet_needs(phi, "0.11.0", tp_size=2)[0].what


def test_a_setting_that_an_older_class_ignores_is_told() -> None:
    raw = {
        "model_type": "falcon",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 99,
    }
    raw |= {"new_decoder_architecture": True, "num_kv_heads": 2}
    one, two = (read_base_config(raw | {"num_ln_in_parallel_attn": count}) for count in (1, 2))
    (need,) = find_unmet_needs(one, "0.14.0.dev2024100800")
    assert "one norm" in need.what
    assert find_unmet_needs(one, "0.15.0") == find_unmet_needs(two, "0.14.0.dev2024100800") == ()


def test_a_class_that_scales_rotation_later_than_its_release_is_told() -> None:
    raw = {"model_type": "chatglm", "hidden_size": 64, "num_layers": 2, "num_attention_heads": 8, "seq_length": 128}
    raw |= {"padded_vocab_size": 99, "ffn_hidden_size": 96, "rope_ratio": 4, "_name_or_path": "chatglm2-6b-32k"}
    base = read_base_config(raw)
    (need,) = find_unmet_needs(base, "0.9.0.dev2024022700")
    assert "rope scaling of kind 'linear'" in need.what
    assert find_unmet_needs(base, "0.9.0") == ()


def test_a_layout_follows_the_release() -> None:
    """The names of experts, and keys that only some releases read."""
    raw = {**T, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    base = read_base_config({**raw, "num_experts_per_tok": 2})
    names = {}
    for release in ("0.9.0.dev2024030500", "0.10.0.dev2024041600", "0.10.0.dev2024042300", None):
        settled = base.for_release(release)
        rules = [rule for rule in base.definition.rules if settled.applies(rule.when) and ".mlp." in rule.target]
        router = next(rule for rule in rules if "router" in rule.target)
        names[release] = sorted(rule.target.rpartition("mlp.")[2] for rule in rules), router.shard.dim
    old, new = ["experts_weight_1", "experts_weight_2", "router.weight"], ["fc.weight", "proj.weight", "router.weight"]
    assert list(names.values()) == [(old, 1), (old, None), (new, None), (new, None)]


@pytest.mark.parametrize(
    ("family", "positions", "release", "dtype", "named"),
    [
        ("falcon", "alibi_with_scale", None, "float16", {"gelu is tanh", "norm epsilon is 1e-5", "ALiBi slopes in"}),
        ("falcon", "alibi_with_scale", None, "float32", {"gelu is tanh", "norm epsilon is 1e-5"}),
        ("falcon", "rope_gpt_neox", None, "bfloat16", {"gelu is tanh", "norm epsilon is 1e-5"}),
        ("phi3", "long_rope", "0.11.0.dev2024062500", "float16", {"long-rope attention factor"}),
        ("phi3", "long_rope", "0.12.0.dev2024080600", "float16", set()),
        ("phi3", "rope_gpt_neox", "0.11.0.dev2024062500", "float16", set()),
    ],
)
def test_only_differences_that_the_port_can_show_are_found(family, positions, release, dtype, named):
    base = SimpleNamespace(definition=load_families()[family], position_kind=positions)
    found = [difference.name for difference in find_differences(base, release, dtype)]
    assert len(found) == len(named)
    assert all(any(name.startswith(start) for start in named) for name in found)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/Llama-3.1-8B/", "Llama-3.1-8B"),
        ("models/Llama-3.1-8B.Q4_1.gguf", "Llama-3.1-8B.Q4_1"),
        (".", Path.cwd().name),
    ],
)
def test_the_name_of_a_base_is_whole(path, name):
    assert name_base(Path(path)) == name
