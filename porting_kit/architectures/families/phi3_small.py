"""Phi-3 small: grouped projections, LayerNorms, gegelu, scaled embeddings, attention logits and output.

Sources: tensorrt_llm/models/phi3/{model,config,convert}.py, 0.11.0.dev2024062500 to 0.16.0.dev2024121000, and
modeling_phi3_small.py of microsoft/Phi-3-small-8k-instruct. The logits are divided by the width multiplier in
models/modeling_utils.py. The published models see blocks of the text in every second layer, which no kernel that takes
a tree of draft tokens does (decoderXQARunner.h 0.11.0.dev2024062500: causal masks).
"""

from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import attribute, constant, key
from porting_kit.architectures.fragments import GROUP_BY_GROUP, LAYER, TARGET, dense, fused_qkv, plain_mlp
from porting_kit.architectures.rules import COLUMN, embedding, linear, norm, output_matrix

MODEL = "tensorrt_llm/models/phi3/model.py 0.14.0.dev2024100800"


def derive_scales(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Attention logits are divided by D, not by its root."""
    derived = {"q_scaling": (values["head_size"] ** 0.5, "sqrt(D): maximal update parametrisation")}
    if values["rope_scaling"] is not None:
        derived["refuse:rope_scaling"] = (values["rope_scaling"]["type"], "only the 8k models' rotation is known")
    return derived


FAMILY = Family(
    name="phi3_small",
    model_types=("phi3small",),
    architectures={"Phi3SmallForCausalLM": "Phi3SmallForCausalLM"},
    model_folder="phi3",
    rules=(
        embedding("model.embed_tokens.weight"),
        *fused_qkv(f"{LAYER}.self_attn.query_key_value", GROUP_BY_GROUP, bias=True),
        *dense(f"{LAYER}.self_attn.dense", bias=True),
        *linear(f"{LAYER}.mlp.up_proj", f"{TARGET}.mlp.fc", "2*I,E", shard=COLUMN, bias=True),
        *plain_mlp(f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj", bias=True)[2:],
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm", bias=True),
        *norm("model.final_layernorm", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    position="rope_gpt_neox",
    norm="layer",
    mlp="plain",
    qkv="interleaved group by group",
    spellings={"intermediate_size": ("ff_intermediate_size", "intermediate_size")},
    defaults={"norm_eps": 1e-5, "activation": "gegelu", "tied": True, "rope_base": 1e6},
    derive=derive_scales,
    fields=(
        attribute("rotary_base", "rope_base"),
        attribute("rotary_pct", "rope_share"),
        constant("hidden_act", "gegelu", "the class's own"),
        key("gegelu_limit", default=None),
        key("mup_attn_multiplier", default=None),
        key("mup_embedding_multiplier", default=None),
        key("mup_use_scaling", default=None),
        key("mup_width_multiplier", default=None),
        key("blocksparse_block_size", default=64),
        key("blocksparse_homo_head_pattern", default=False),
        key("blocksparse_num_local_blocks", default=16),
        key("blocksparse_vertical_stride", "blocksparse_vert_stride", 8),
        key("dense_attention_every_n_layers", default=2),
    ),
    requirements=(
        Requirement(
            "dense_attention_every_n_layers",
            (1,),
            2,
            "layers that see blocks of the text only: the kernels that take a tree of draft tokens want a causal mask",
            "cpp/tensorrt_llm/kernels/decoderMaskedMultiheadAttention/decoderXQARunner.h 0.11.0.dev2024062500",
        ),
        Requirement("hidden_act", ("gegelu",), "gegelu", "the MLP is gegelu", MODEL),
        Requirement("mup_attn_multiplier", (1, 1.0), 1.0, "attention logits are divided by D", MODEL),
    ),
    handled_keys=("pad_sequence_to_multiple_of_64", "rope_position_scale", "dummy_token_indices"),
    first_release="0.11.0.dev2024062500",
)
