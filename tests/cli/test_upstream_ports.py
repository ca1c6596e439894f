"""The whole port, base to verdict, on real TensorRT-LLM trees: four classes, 8 prompts x 64 tokens each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from porting_kit.emulator import open_emulator
from porting_kit.source_tree import open_source_tree
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.context import open_port_run
from tests.cli.conftest import make_heads
from tests.cli.test_commands import call
from tests.steps import sharded_port

TREES = [path for path in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if path]
BOUND = 1e-5
HIDDEN = 64

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not TREES, reason="TRTLLM_SOURCE names no TensorRT-LLM checkout"),
]


def make_bloom():
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=160, hidden_size=HIDDEN, n_layer=2, n_head=4))


def make_gptneox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 160, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    # The tanh form: TensorRT-LLM knows no other GELU.
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(**sizes, intermediate_size=4 * HIDDEN, hidden_act="gelu_new", rotary_pct=0.5)
    )


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**gated_sizes()))


def make_qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**gated_sizes(), rope_theta=1e6))


@pytest.mark.parametrize("source", TREES)
def test_a_window_that_only_some_layers_have_is_the_cause_beyond_it(source, tmp_path):
    """Hugging Face's Gemma 2 has it in every second layer, the library's class in none."""
    if "Gemma2ForCausalLM" not in open_source_tree(source).model_names():
        pytest.skip("the tree has no Gemma 2")
    port = sharded_port.write_port(tmp_path, "gemma2", head_dim=8, query_pre_attn_scalar=8, sliding_window=24)
    document = yaml.safe_load(port.read_text()) | {"trtllm": {"source": source}, "kernel": "exact"}
    port.write_text(yaml.safe_dump(document))
    code, found, _ = call("align", port, "--out", tmp_path / "run")
    assert (code, found["cause"]["fault"]) == (1, "sliding_window_ignored"), found["summary"]
    assert "every layer" in found["cause"]["why"]


def gated_sizes() -> dict:
    return {
        "vocab_size": 160,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }


def write_port(folder: Path, model, source: str) -> Path:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif not parameter.any():
            torch.nn.init.normal_(parameter, std=0.15)  # biases start at zero
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(folder / "base")
    (folder / "heads").mkdir()
    save_file(make_heads(HIDDEN, 3), folder / "heads" / "medusa_lm_head.safetensors")
    port = {
        "name": "tiny",
        "base": "base",
        "heads": "heads",
        "dtype": "float32",
        "trtllm": {"source": source},
        "tree": "cartesian:3,2,2",
        "alignment": {"new_tokens": 64},
    }
    (folder / "port.yaml").write_text(yaml.safe_dump(port))
    return folder / "port.yaml"


@pytest.mark.parametrize("source", TREES)
@pytest.mark.parametrize("make", [make_bloom, make_gptneox, make_llama, make_qwen2], ids=lambda make: make.__name__)
def test_port_says_what_its_base_says(make, source, tmp_path, record_property):
    torch.manual_seed(0)
    file = write_port(tmp_path, make(), source)
    out = tmp_path / "run"
    code, document, stderr = call("align", file, "--out", out)
    assert code == 0, json.dumps(document.get("gates") or document, indent=1) + stderr
    record_property("context_error", document["context_error"])
    record_property("tree_error", document["tree_error"])
    print(f"{make.__name__} {source}: context {document['context_error']:.1e}, tree {document['tree_error']:.1e}")
    assert document["tokens_equal"]
    assert sum(len(row["tokens"]) for row in document["rows"]) == 8 * 64
    assert max(document["context_error"], document["tree_error"]) <= BOUND


@pytest.mark.parametrize("source", TREES)
@pytest.mark.parametrize("make", [make_bloom, make_gptneox, make_qwen2], ids=lambda make: make.__name__)
def test_unpatched_class_fails_with_the_library_s_own_type_error(make, source, tmp_path):
    tree = open_source_tree(source)
    file = write_port(tmp_path, make(), source)
    for command in ("patch", "convert"):
        assert call(command, file, "--out", tmp_path / "run")[0] == 0
    session = AlignmentSession(open_port_run(file, run_folder=tmp_path / "run"))
    config, tensors = session.port_state.config, session.port_state.tensors
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith("medusa_heads")}
    model = open_emulator(tree).build_model(dict(config), plain)
    cache = model.new_cache(1, 64)
    model.prefill([torch.arange(3, 9)], cache)
    medusa = session.tree
    nodes = torch.zeros(1, medusa.num_nodes, dtype=torch.long)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        model.decode(nodes, cache, position_offsets=medusa.position_offsets, packed_mask=medusa.packed_mask)
