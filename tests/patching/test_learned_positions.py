"""Learned positions of a tree: the function alone on torch stand-ins; OPT and GPT-2 of real trees in the emulator."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from porting_kit.emulator import open_emulator
from porting_kit.patching import build_medusa_module
from porting_kit.patching.learned_positions import FUNCTION, FUNCTION_NAME
from porting_kit.releases.kernels import kernel_profile
from porting_kit.source_tree import open_source_tree
from tests.bundled.toy_models import PACKED_MASK, POSITION_OFFSETS, TREE_PATHS, E, F, H, L, V

SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if source]
TIED = ("lm_head", "transformer.vocab_embedding")
OFFSETS = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]])


@pytest.fixture
def spread(monkeypatch):
    """The function as the patch writes it, over torch tensors."""
    functional = ModuleType("tensorrt_llm.functional")
    functional.cast = lambda tensor, dtype: tensor.to(dtype)
    functional.concat = lambda parts, dim=0: torch.cat([torch.as_tensor(part).reshape(-1) for part in parts], dim)
    functional.maximum = lambda left, right: torch.clamp(left, min=right)
    functional.shape = lambda tensor, dim: torch.tensor(tensor.shape[dim])
    functional.unsqueeze = lambda tensor, dim: tensor.unsqueeze(dim)

    def cut(tensor, starts, sizes):
        for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            tensor = tensor.narrow(dim, int(start), int(size))
        return tensor

    functional.slice = cut
    common = ModuleType("tensorrt_llm._common")
    common.default_net = lambda: SimpleNamespace(plugin_config=SimpleNamespace(remove_input_padding=True))
    for module in (ModuleType("tensorrt_llm"), functional, common):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    text = FUNCTION.format(tree="tree", offsets="tree")
    # Integer division of int32 tensors, as TensorRT's DIV does, and a view by a tensor of sizes.
    text = text.replace("surplus / maximum(nodes - 1, 1)", "surplus // maximum(nodes - 1, 1)")
    text = re.sub(r"\.view\(concat\(\[(.*?)\]\)\)", r".reshape(\1)", text)
    names: dict = {}
    exec(compile(text, "spread", "exec"), names)

    def call(position_ids, tokens, sequence_length, tree):
        lengths = SimpleNamespace(sequence_length=torch.tensor(sequence_length))
        return names[FUNCTION_NAME](torch.tensor(position_ids), torch.zeros(tokens), lengths, tree).tolist()

    return call


@pytest.mark.parametrize(
    ("position_ids", "tokens", "sequence_length", "expected"),
    [
        pytest.param([0, 1, 2, 0, 1], 5, [3, 2], [0, 1, 2, 0, 1], id="context phase"),
        pytest.param([99, 99], 8, [14, 9], [10, 11, 11, 12, 5, 6, 7, 8], id="generation phase"),
        pytest.param([0, 1, 2, 99], 7, [3, 14], [0, 1, 2, 10, 11, 11, 12], id="both in one call"),
        pytest.param([10, 11, 11, 12], 4, [14], [10, 11, 11, 12], id="one id per token already"),
    ],
)
def test_ids_of_every_phase(spread, position_ids, tokens, sequence_length, expected):
    assert spread(position_ids, tokens, sequence_length, OFFSETS) == expected


def test_without_a_tree_the_ids_are_the_runtimes(spread):
    assert spread([7, 8], 2, [8, 9], None) == [7, 8]


def _make_opt():
    from transformers import OPTConfig, OPTForCausalLM

    settings = dict(vocab_size=V, hidden_size=E, word_embed_proj_dim=E, ffn_dim=F, max_position_embeddings=64)
    hf = OPTForCausalLM(OPTConfig(num_hidden_layers=L, num_attention_heads=H, **settings))
    _randomise(hf)
    weights, old = hf.state_dict(), "model.decoder"
    names = {
        "self_attn.out_proj": "attention.dense",
        "self_attn_layer_norm": "input_layernorm",
        "final_layer_norm": "post_layernorm",
        "fc1": "mlp.fc",
        "fc2": "mlp.proj",
    }
    tensors = {
        f"{name}.weight": weights[f"{old}.embed_tokens.weight"] for name in ("lm_head", "transformer.vocab_embedding")
    }
    tensors["transformer.position_embedding.weight"] = weights[f"{old}.embed_positions.weight"][2:]
    for kind in ("weight", "bias"):
        tensors[f"transformer.ln_f.{kind}"] = weights[f"{old}.final_layer_norm.{kind}"]
        for layer in range(L):
            source, target = f"{old}.layers.{layer}", f"transformer.layers.{layer}"
            parts = [weights[f"{source}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
            tensors[f"{target}.attention.qkv.{kind}"] = torch.cat(parts)
            for before, after in names.items():
                tensors[f"{target}.{after}.{kind}"] = weights[f"{source}.{before}.{kind}"]
    return hf, {"architecture": "OPTForCausalLM", "hidden_act": "relu", "do_layer_norm_before": True}, tensors


def _make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = dict(vocab_size=V, n_embd=E, n_layer=L, n_head=H, n_positions=64, n_inner=F)
    hf = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **settings))
    _randomise(hf)
    weights = hf.state_dict()
    names = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.dense",
        "mlp.c_fc": "mlp.fc",
        "mlp.c_proj": "mlp.proj",
        "ln_1": "input_layernorm",
        "ln_2": "post_layernorm",
    }
    tensors = {
        f"{name}.weight": weights["transformer.wte.weight"] for name in ("lm_head", "transformer.vocab_embedding")
    }
    tensors["transformer.position_embedding.weight"] = weights["transformer.wpe.weight"]
    for kind in ("weight", "bias"):
        tensors[f"transformer.ln_f.{kind}"] = weights[f"transformer.ln_f.{kind}"]
        for layer in range(L):
            for before, after in names.items():
                tensor = weights[f"transformer.h.{layer}.{before}.{kind}"]
                tensors[f"transformer.layers.{layer}.{after}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
    extra = {"gpt_variant": "gpt2", "bias": True, "q_scaling": 1.0, "embedding_scale": None, "rotary_pct": 1.0}
    extra |= {"rotary_base": 10000.0, "rotary_scaling": None, "inner_layernorm": False, "norm_before_bmm1": False}
    extra |= {"apply_query_key_layer_scaling": False, "apply_residual_connection_post_layernorm": False}
    return hf, {"architecture": "GPTForCausalLM", "hidden_act": "gelu", **extra}, tensors


@torch.no_grad()
def _randomise(hf) -> None:
    torch.manual_seed(0)
    for parameter in hf.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    hf.eval()


def _complete(extra: dict, tensors: dict) -> tuple[dict, dict]:
    config = {
        "dtype": "float32",
        "logits_dtype": "float32",
        "hidden_size": E,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "num_key_value_heads": H,
        "vocab_size": V,
        "intermediate_size": F,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 64,
        "position_embedding_type": "learned_absolute",
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        **extra,
        "num_medusa_heads": 1,
        "num_medusa_layers": 1,
        "max_draft_len": 3,
    }
    heads = {
        "medusa_heads.0.medusa_layers.0.linear.weight": torch.zeros(E, E),
        "medusa_heads.0.medusa_layers.0.linear.bias": torch.zeros(E),
        "medusa_heads.0.lm_head.weight": torch.zeros(V, E),
    }
    return config, {name: tensor.contiguous().clone() for name, tensor in {**tensors, **heads}.items()}


@torch.no_grad()
def _compare(hf, model) -> float:
    """The largest difference over three steps of a tree with unequal accepted lengths.

    Two requests generate from the start; the third joins in the first step, so that one call has both phases.
    """
    torch.manual_seed(5)
    sequences = [torch.randint(0, V, (length,)) for length in (9, 5, 6)]
    accepted = [[0, 1, 3], [0, 2, -1], [-1, -1, -1]]
    tree = {"position_offsets": POSITION_OFFSETS, "packed_mask": PACKED_MASK}
    cache = model.new_cache(3, 40)
    model.prefill(sequences[:2], cache)
    worst = 0.0
    for step in range(3):
        tokens = torch.randint(0, V, (3, len(TREE_PATHS)))
        if step == 0:
            late, output = model.mixed(sequences[2:], tokens[:2], cache, **tree)
            worst = (hf(sequences[2][None]).logits[0, -1] - late.logits[0]).abs().max().item()
        else:
            output = model.decode(tokens, cache, **tree)
        for row, logits in enumerate(output.logits):
            for node, path in enumerate(TREE_PATHS):
                reference = hf(torch.cat([sequences[row], tokens[row, list(path)]])[None]).logits[0, -1]
                worst = max(worst, (reference - logits[node]).abs().max().item())
        cache.keep(torch.tensor(accepted))
        kept = [[node for node in nodes if node >= 0] for nodes in accepted]
        sequences = [torch.cat([each, tokens[row, kept[row]]]) for row, each in enumerate(sequences)]
    return worst


@pytest.mark.upstream
@pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE names no TensorRT-LLM tree")
@pytest.mark.parametrize("make", [_make_opt, _make_gpt2], ids=["opt", "gpt2"])
@pytest.mark.parametrize("source", SOURCES or [None])
def test_learned_positions_in_real_models(source, make):
    tree = open_source_tree(source)
    hf, extra, tensors = make()
    if extra["architecture"] not in tree.model_classes():
        pytest.skip(f"{tree.release} has no {extra['architecture']} built on DecoderModelForCausalLM")
    config, tensors = _complete(extra, tensors)
    module = build_medusa_module(tree, extra["architecture"])
    for one_id in (False, True):
        exact = kernel_profile("exact")
        name = "exact arithmetic, the runtime's position ids" if one_id else exact.name
        kernel = dataclasses.replace(exact, name=name, one_position_id_per_request=one_id)
        emulator = open_emulator(tree, kernel=kernel)
        model = emulator.build_model(config, tensors, module_source=module.source, class_name=module.class_name)
        assert _compare(hf, model) < 1e-4

    # Without it: shape errors, or wrong positions where one id broadcasts.
    plain = re.sub(
        rf"{FUNCTION_NAME}\(position_ids,[^)]*\)",
        "position_ids",
        module.source.replace(f"def {FUNCTION_NAME}", "def unused"),
    )
    assert plain.count(FUNCTION_NAME) == 0
    model = emulator.build_model(config, tensors, module_source=plain, class_name=module.class_name)
    with pytest.raises(Exception, match=r"size|shape|broadcast"):
        _compare(hf, model)
