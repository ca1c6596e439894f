"""Families whose code is not part of transformers, re-expressed from a relative that computes the same.

The reference runs the relative; the saved folder holds the relative's tensors under the family's own names and in its
own packing, so that the family's rules have to undo both.
"""

from __future__ import annotations

from typing import Any

from porting_kit.coverage.reference_models import ModelSize, Tensors

Named = tuple[Tensors, dict[str, Any]]


def move_names(tensors: Tensors, table: dict[str, str]) -> Tensors:
    """Rename by replacing parts of names, in the table's order."""
    moved = {}
    for name, tensor in tensors.items():
        for old, new in table.items():
            name = name.replace(old, new)
        moved[name] = tensor
    return moved


def join_parts(tensors: Tensors, parts: tuple[str, ...], target: str) -> Tensors:
    """Replace tensors that differ in one component of the name by their concatenation along dimension 0."""
    import torch

    joined = dict(tensors)
    for name in list(tensors):
        if f".{parts[0]}." in name:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            joined[name.replace(f".{parts[0]}.", f".{target}.")] = torch.cat([joined.pop(each) for each in names])
    return joined


QKV = ("q_proj", "k_proj", "v_proj")


def as_qwen(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """Qwen 1 from Qwen 2: queries, keys and values in one matrix, the gated branch named w2, half the stated width."""
    tensors = join_parts(tensors, QKV, "c_attn")
    table = {"model.layers.": "transformer.h.", "self_attn.o_proj": "attn.c_proj", "self_attn": "attn"}
    table |= {"mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1", "mlp.down_proj": "mlp.c_proj"}
    table |= {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    table |= {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    keys = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "rotary_emb_base": 50000.0, "no_bias": True}
    keys |= {"layer_norm_epsilon": raw["rms_norm_eps"], "intermediate_size": 2 * size.inner}
    keys |= {"kv_channels": size.hidden_size // raw["num_attention_heads"]}
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    return move_names(tensors, table), keys | {key: raw[key] for key in kept}


def as_internlm(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """InternLM 1 is a LLaMA with biases in attention."""
    return tensors, raw | {"architectures": ["InternLMForCausalLM"], "model_type": "internlm", "bias": True}


def as_internlm2(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """InternLM 2 from LLaMA: one matrix, for each key/value head its queries, its key and its value."""
    import torch

    K, D, E = raw["num_key_value_heads"], size.hidden_size // raw["num_attention_heads"], size.hidden_size
    for layer in range(size.layers):
        attention = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{attention}.{part}.weight").reshape(K, -1, D, E) for part in QKV]
        tensors[f"{attention}.wqkv.weight"] = torch.cat(parts, dim=1).reshape(-1, E)
    table = {"self_attn.o_proj": "attention.wo", "self_attn": "attention", "mlp.gate_proj": "feed_forward.w1"}
    table |= {"mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "lm_head": "output"}
    table |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    table |= {"model.embed_tokens": "model.tok_embeddings"}
    raw |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    return move_names(tensors, table), raw


def as_exaone(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """EXAONE 3 from LLaMA: the same under GPT-2's names."""
    table = {"model.layers.": "transformer.h.", "self_attn.o_proj": "attn.attention.out_proj"}
    table |= {"self_attn": "attn.attention", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1"}
    table |= {"mlp.down_proj": "mlp.c_proj", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    table |= {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    raw |= {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_layers": raw.pop("num_hidden_layers")}
    raw |= {"activation_function": raw.pop("hidden_act"), "layer_norm_epsilon": raw.pop("rms_norm_eps")}
    return move_names(tensors, table), raw


def as_baichuan(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """Baichuan from LLaMA: one packed matrix."""
    raw |= {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "vocab_size": size.vocab}
    return join_parts(tensors, QKV, "W_pack"), raw


def scale_output_rows_to_one(model: Any) -> None:
    """Baichuan 2 multiplies by the output matrix with its rows scaled to length one."""
    import torch

    with torch.no_grad():
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight))


def as_baichuan2(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """Baichuan 2: rows of other lengths, which normalising must take away again."""
    import torch

    lengths = 1 + torch.arange(size.vocab)[:, None] % 7
    return as_baichuan(tensors | {"lm_head.weight": tensors["lm_head.weight"] * lengths}, raw, size)


def as_baichuan_13b(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """The 13B models state `model_max_length` where the 7B ones state `max_position_embeddings`."""
    tensors, raw = as_baichuan2(tensors, raw, size)
    raw["model_max_length"] = raw.pop("max_position_embeddings")
    return tensors, {key: value for key, value in raw.items() if not key.startswith("rope")}


def make_alibi_llama(config: Any) -> Any:
    """LLaMA with ALiBi in place of rotation: frequencies of zero, and a bias of -slope x distance as attention mask.

    Slopes as Bloom's, which Baichuan-13B computes in the same way.
    """
    import torch
    import transformers
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    class AlibiLlama(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **options: Any) -> Any:
            H, S = self.config.num_attention_heads, input_ids.shape[1]
            slopes = build_alibi_tensor(torch.ones(1, 2, device=input_ids.device), H, torch.float32)[:, 0, 1]
            place = torch.arange(S, device=input_ids.device)
            distance = place[:, None] - place
            bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, torch.finfo(torch.float32).min)
            return super().forward(input_ids=input_ids, attention_mask=bias[None], **options)

    config._attn_implementation = "eager"
    model = AlibiLlama(config)
    model.model.rotary_emb.inv_freq.zero_()
    return model


def as_chatglm(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """ChatGLM 3 from GLM: one packed matrix with biases, rotary settings as a ratio to the base 10000."""
    tensors = join_parts(tensors, QKV, "query_key_value")
    table = {"model.layers.": "transformer.encoder.layers.", "self_attn.o_proj": "self_attention.dense"}
    table |= {"self_attn": "self_attention", "mlp.gate_up_proj": "mlp.dense_h_to_4h"}
    table |= {"mlp.down_proj": "mlp.dense_4h_to_h", "model.norm": "transformer.encoder.final_layernorm"}
    table |= {"model.embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer"}
    keys = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": size.layers}
    keys |= {"hidden_size": size.hidden_size, "ffn_hidden_size": size.inner, "num_attention_heads": size.heads}
    keys |= {"kv_channels": size.hidden_size // size.heads, "multi_query_attention": True}
    keys |= {"multi_query_group_num": size.kv_heads, "padded_vocab_size": size.vocab, "vocab_size": size.vocab}
    keys |= {"seq_length": size.positions, "layernorm_epsilon": raw["rms_norm_eps"], "rmsnorm": True}
    keys |= {"add_bias_linear": False, "add_qkv_bias": True, "rope_ratio": 50, "tie_word_embeddings": False}
    keys |= {"_name_or_path": "THUDM/chatglm3-6b-128k"}
    return move_names(tensors, table), keys


def plain_experts(model: Any) -> None:
    """Make Qwen 2 MoE compute what DeepSeek MoE does: no biases, the shared expert's gate at one half."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.bias") or "shared_expert_gate" in name:
                weight.zero_()


def as_deepseek(tensors: Tensors, raw: dict[str, Any], size: ModelSize) -> Named:
    """DeepSeek MoE from Qwen 2 MoE: the gate of one half goes into the shared expert's output matrix."""
    kept = {n: t for n, t in tensors.items() if not n.endswith("_proj.bias") and "shared_expert_gate" not in n}
    for name in kept:
        if "shared_expert.down_proj" in name:
            kept[name] = kept[name] / 2
    raw |= {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "n_shared_experts": 2}
    raw |= {"n_routed_experts": raw.pop("num_experts"), "first_k_dense_replace": 1, "moe_layer_freq": 1}
    for key in ("mlp_only_layers", "decoder_sparse_step", "shared_expert_intermediate_size"):
        raw.pop(key, None)
    return move_names(kept, {"shared_expert.": "shared_experts."}), raw
