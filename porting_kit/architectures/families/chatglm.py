"""ChatGLM 2, ChatGLM 3 and GLM-4: half of each head rotated in neighbouring pairs, a fused projection, a fused MLP.

Sources: tensorrt_llm/models/chatglm/{model,config,convert}.py, 0.9.0.dev2024022700 to 0.13.0.dev2024090300. The MLP's
halves are swapped. `rope_ratio` stretches positions in ChatGLM 2 and multiplies the base in ChatGLM 3 and GLM-4; up to
0.11 the class works that out from `chatglm_version` and `rope_ratio`, later it reads base and scaling; all are written.
"""

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, key, switch
from porting_kit.architectures.fragments import TARGET, dense, fused_qkv
from porting_kit.architectures.operations import ReorderBlocks
from porting_kit.architectures.rules import (
    GATED,
    ROW,
    Drop,
    embedding,
    linear,
    norm,
    output_matrix,
    rename,
    transform,
)
from porting_kit.errors import BaseModelError

SOURCE = "transformer.encoder.layers.{i}"
MODEL = "tensorrt_llm/models/chatglm/model.py 0.13.0.dev2024090300"


def derive_settings(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Key/value heads and what `rope_ratio` means."""
    grouped = raw.get("multi_query_attention", False)
    heads = raw.get("multi_query_group_num") if grouped else values["num_heads"]
    derived = {"num_kv_heads": (heads, "multi_query_group_num" if grouped else "H")}
    ratio = raw.get("rope_ratio", 1) or 1
    if ratio == 1:
        return derived
    name = str(raw.get("chatglm_version") or raw.get("_name_or_path") or "").lower().replace("-", "_")
    if "chatglm2" in name:
        scaling = {"type": "linear", "rope_type": "linear", "factor": float(ratio)}
        return {**derived, "rope_scaling": (scaling, "rope_ratio of ChatGLM 2"), "version2": (True, "its name")}
    if "chatglm3" in name or "glm4" in name or "glm_4" in name:
        return {**derived, "rope_base": (values["rope_base"] * ratio, "10000 * rope_ratio")}
    raise BaseModelError(
        "rope_ratio means one thing in ChatGLM 2 and another in ChatGLM 3 and GLM-4",
        expected="`chatglm_version` or `_name_or_path` that names the model",
        found=f"rope_ratio {ratio} and name {name!r}",
        next_step='add "chatglm_version": "chatglm2", "chatglm3" or "glm4" to config.json',
    )


FAMILY = Family(
    name="chatglm",
    model_types=("chatglm",),
    architectures={
        "ChatGLMModel": "ChatGLMForCausalLM",
        "ChatGLMForConditionalGeneration": "ChatGLMForCausalLM",
        "ChatGLMForCausalLM": "ChatGLMForCausalLM",
    },
    model_folder="chatglm",
    rules=(
        embedding("transformer.embedding.word_embeddings.weight"),
        *fused_qkv(f"{SOURCE}.self_attention.query_key_value", bias="add_qkv_bias"),
        *dense(f"{SOURCE}.self_attention.dense", bias="add_bias_linear"),
        transform(
            f"{SOURCE}.mlp.dense_h_to_4h.weight [2*I,E]", f"{TARGET}.mlp.fc.weight", ReorderBlocks((1, 0)), shard=GATED
        ),
        transform(
            f"{SOURCE}.mlp.dense_h_to_4h.bias [2*I]",
            f"{TARGET}.mlp.fc.bias",
            ReorderBlocks((1, 0)),
            shard=GATED,
            when="add_bias_linear",
        ),
        *linear(f"{SOURCE}.mlp.dense_4h_to_h", f"{TARGET}.mlp.proj", "E,I", shard=ROW),
        rename(f"{SOURCE}.mlp.dense_4h_to_h.bias [E]", f"{TARGET}.mlp.proj.bias", when="add_bias_linear"),
        *norm(f"{SOURCE}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{SOURCE}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("transformer.encoder.final_layernorm", "transformer.ln_f", pipeline="last"),
        output_matrix("transformer.output_layer.weight", "transformer.embedding.word_embeddings.weight"),
    ),
    drops=(Drop("transformer.rotary_pos_emb.inv_freq", "rotary frequencies are computed again from the base"),),
    position="rope_gptj",
    norm="rms",
    mlp="gated",
    qkv="one matrix, Q; K; V",
    switches={
        "add_qkv_bias": Switch(("add_qkv_bias",), default=True),
        "add_bias_linear": Switch(("add_bias_linear",), default=False),
        "version2": Switch(),
    },
    spellings={
        "vocab_size": ("padded_vocab_size", "vocab_size"),
        "intermediate_size": ("ffn_hidden_size",),
        "max_positions": ("seq_length",),
    },
    defaults={"norm_eps": 1e-5, "activation": "swiglu", "tied": False, "rope_share": 0.5},
    derive=derive_settings,
    fields=(
        *ROPE_FIELDS,
        constant("hidden_act", "swiglu", "the MLP is fused: the class wants the gated name of silu"),
        switch("chatglm_version", "version2", mapping={True: "chatglm2", False: "chatglm3"}),
        key("rope_ratio", default=1.0),
        attribute("rotary_pct", "rope_share"),
        switch("add_qkv_bias"),
        switch("add_bias_linear"),
        constant("apply_query_key_layer_scaling", False, "it cancels out in the source"),
        constant("apply_residual_connection_post_layernorm", False, "see the requirement"),
        constant("rmsnorm", True, "see the requirement"),
    ),
    requirements=(
        Requirement("rmsnorm", (True,), True, "the norms are written as RMSNorms", MODEL),
        Requirement("apply_residual_connection_post_layernorm", (False,), False, "not carried over", MODEL),
        Requirement("post_layer_norm", (True,), True, "the class always ends with a norm", MODEL),
        Requirement("position_encoding_2d", (False,), False, "ChatGLM-6B looks ahead and cannot verify a tree", MODEL),
    ),
    handled_keys=(
        *("multi_query_attention", "multi_query_group_num", "apply_query_key_layer_scaling", "vocab_size"),
        *(
            "original_rope",
            "bias_dropout_fusion",
            "fp32_residual_connection",
            "attention_softmax_in_fp32",
            "pre_seq_len",
        ),
        *("prefix_projection", "quantization_bit", "interleaved_qkv", "chatglm_version"),
    ),
    # chatglm/model.py: before, rope_ratio always multiplies the base (0.9.0.dev2024031900)
    rope_scaling_since="0.9.0.dev2024032600",
)
