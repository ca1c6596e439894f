"""Plans for tests: a small fixed port, and ten with the shapes of known models (their Hugging Face configs)."""

from pathlib import Path
from types import SimpleNamespace

from porting_kit.architectures.base_config import read_base_config
from porting_kit.conversion.config_fields import build_config
from porting_kit.engine.plan import plan_build
from porting_kit.engine.run_script import plan_inference
from porting_kit.releases.build_flags import draft_limit_key

CHOICES = [[0], [0, 0], [1]]


def config(release="0.11.0", **changes):
    limit = draft_limit_key(release or "0.11.0")
    settings = {
        "architecture": "BloomForCausalLM",
        "dtype": "float16",
        "num_medusa_heads": 4,
        "num_medusa_layers": 1,
        limit: 63,
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
    }
    return settings | changes


def target(**changes):
    settings = {
        "tokens_per_block": 64,
        "max_batch_size": 8,
        "max_input_len": 1024,
        "max_seq_len": 2048,
        "tp_size": 2,
        "pp_size": 1,
    }
    return SimpleNamespace(**settings | changes)


def build(release="0.11.0", **changes):
    arguments = {
        "config": config(release),
        "checkpoint_dir": Path("checkpoint"),
        "output_dir": Path("engine"),
        "target": target(),
        "num_nodes": 64,
        "release": release,
        "module_file": Path("patched/medusa_bloom.py"),
        "class_name": "MedusaBloomForCausalLM",
    } | changes
    return plan_build(arguments.pop("config"), **arguments)


def inference(release="0.11.0", **changes):
    arguments = {
        "engine_dir": Path("engine"),
        "tokenizer_dir": Path("base"),
        "prompt_file": Path("prompts.csv"),
        "longest_prompt": 130,
        "new_tokens": 64,
        "choices": CHOICES,
        "output_npy": Path("output.npy"),
        "release": release,
        "world_size": 2,
        "end_id": 2,
    } | changes
    return plan_inference(**arguments)


def _llama_like(model_type, layers, hidden, heads, kv_heads, inner, vocab, **more):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | more


# name -> (Hugging Face config, dtype, tensor parallel, pipeline parallel, nodes, heads, changes of the target)
PORTS = {
    "bloom-7b1": (
        {"model_type": "bloom", "n_layer": 30, "n_head": 32, "hidden_size": 4096, "vocab_size": 250880},
        "float16", 1, 1, 64, 4, {},
    ),
    "vicuna-7b": (_llama_like("llama", 32, 4096, 32, 32, 11008, 32000), "float16", 1, 1, 64, 4, {"max_batch_size": 4}),
    "vicuna-33b": (_llama_like("llama", 60, 6656, 52, 52, 17920, 32000), "float16", 4, 1, 64, 5, {}),
    "qwen2-7b": (
        _llama_like("qwen2", 28, 3584, 28, 4, 18944, 152064, rope_theta=1e6), "bfloat16", 2, 1, 16, 3, {},
    ),
    "mixtral-8x7b": (
        _llama_like("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        "bfloat16", 4, 2, 8, 3, {"max_batch_size": 2},
    ),
    "gpt-neox-20b": (
        {"model_type": "gpt_neox", "num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
         "intermediate_size": 24576, "vocab_size": 50432, "max_position_embeddings": 2048, "rotary_pct": 0.25,
         "rotary_emb_base": 10000, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-5},
        "float16", 2, 1, 32, 2, {"max_seq_len": 2048},
    ),
    "gpt-j-6b": (
        {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "vocab_size": 50400, "n_positions": 2048,
         "rotary_dim": 64, "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
        "float16", 1, 1, 64, 4, {"tokens_per_block": None},
    ),
    "mpt-7b": (
        {"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432, "max_seq_len": 2048,
         "expansion_ratio": 4, "attn_config": {"alibi": True, "alibi_bias_max": 8}, "no_bias": True},
        "float16", 1, 1, 64, 4, {"max_batch_size": 64, "max_input_len": 512},
    ),
    "opt-6.7b": (
        {"model_type": "opt", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_dim": 16384,
         "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 4096,
         "do_layer_norm_before": True, "activation_function": "relu"},
        "float16", 8, 1, 64, 4, {"max_batch_size": 1},
    ),
    "phi-2": (
        {"model_type": "phi", "num_hidden_layers": 32, "hidden_size": 2560, "num_attention_heads": 32,
         "intermediate_size": 10240, "vocab_size": 51200, "max_position_embeddings": 2048, "hidden_act": "gelu_new",
         "partial_rotary_factor": 0.4, "layer_norm_eps": 1e-5, "rope_theta": 10000.0},
        "float16", 1, 1, 4, 1, {"tokens_per_block": 128},
    ),
}  # fmt: skip


def build_port_plan(name, tree=None, release=None):
    """The plan of one of the ten, for a tree or for a release."""
    base, dtype, tp, pp, nodes, heads, changes = PORTS[name]
    release = release or tree.release
    head_set = SimpleNamespace(num_heads=heads, num_layers=1)
    document, _ = build_config(
        read_base_config(base), dtype=dtype, tp_size=tp, pp_size=pp, heads=head_set, max_draft_len=63, release=release
    )
    return build(
        release, config=document, tree=tree, num_nodes=nodes, target=target(tp_size=tp, pp_size=pp, **changes),
        gather_generation_logits=True,
    )  # fmt: skip
