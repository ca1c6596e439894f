"""MPT: ALiBi, LayerNorms without biases, no biases anywhere, queries and keys clipped where asked for.

Sources: tensorrt_llm/models/mpt/model.py and examples/mpt/convert_checkpoint.py, 0.9.0.dev2024022700 to
0.13.0.dev2024090300.
"""

from porting_kit.architectures.family import (
    ALIBI_SLOPES_CAST,
    GELU_IS_TANH,
    NORM_EPS_FIXED,
    Difference,
    Family,
    Requirement,
    Switch,
)
from porting_kit.architectures.fields import constant, key
from porting_kit.architectures.fragments import TARGET, dense, fused_qkv, plain_mlp
from porting_kit.architectures.names import TensorSpec
from porting_kit.architectures.rules import Rule, embedding, norm, output_matrix

SOURCE = "transformer.blocks.{i}"
MODEL = "tensorrt_llm/models/mpt/model.py 0.11.0.dev2024062500"


def derive_sizes(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """The MLP is `expansion_ratio` times as wide as the hidden size."""
    attention = raw.get("attn_config") or {}
    kind = attention.get("attn_type", "multihead_attention")
    heads = {"multiquery_attention": 1, "grouped_query_attention": attention.get("kv_n_heads")}.get(kind)
    return {
        "intermediate_size": (int(raw.get("expansion_ratio", 4) * values["hidden_size"]), "expansion_ratio * E"),
        "num_kv_heads": (heads or values["num_heads"], "attn_config.attn_type"),
    }


def norm_without_bias(source: str, target: str, **options: str) -> list[Rule]:
    """A norm's weight, and the zero bias that releases before 0.11.0.dev2024061100 want beside it."""
    placed = {"pipeline": "layer", **options}
    bias = Rule(
        f"{target}.bias",
        (TensorSpec(f"{source}.bias", ("E",)),),
        when="norms_have_bias",
        zeros_when_absent=("E",),
        **placed,
    )
    return [*norm(source, target, **options), bias]


FAMILY = Family(
    name="mpt",
    model_types=("mpt",),
    architectures={"MptForCausalLM": "MPTForCausalLM", "MPTForCausalLM": "MPTForCausalLM"},
    model_folder="mpt",
    rules=(
        embedding("transformer.wte.weight"),
        *fused_qkv(f"{SOURCE}.attn.Wqkv"),
        *dense(f"{SOURCE}.attn.out_proj"),
        *plain_mlp(f"{SOURCE}.ffn.up_proj", f"{SOURCE}.ffn.down_proj"),
        *norm_without_bias(f"{SOURCE}.norm_1", f"{TARGET}.input_layernorm"),
        *norm_without_bias(f"{SOURCE}.norm_2", f"{TARGET}.post_layernorm"),
        *norm_without_bias("transformer.norm_f", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="transformer.wte.weight"),
    ),
    position="alibi",
    norm="layer",
    mlp="plain",
    qkv="one matrix, Q; K; V",
    switches={"norms_have_bias": Switch(until="0.11.0.dev2024061100")},
    defaults={"intermediate_size": "4*E", "tied": True, "activation": "gelu"},
    derive=derive_sizes,
    fields=(
        constant("hidden_act", "gelu", "MPT's own"),
        constant("bias", False, "no biases"),
        key("clip_qkv", "attn_config.clip_qkv", None),
        key("alibi_bias_max", "attn_config.alibi_bias_max", 8),
    ),
    requirements=(
        Requirement("no_bias", (True,), True, "the norms have no biases", MODEL),
        Requirement("attn_config.softmax_scale", (None,), None, "logits are always divided by sqrt(D)", MODEL),
        Requirement("attn_config.alibi", (True,), True, "positions are always ALiBi", MODEL),
        Requirement("attn_config.qk_ln", (False,), False, "queries and keys are not normalised", MODEL),
        Requirement("attn_config.prefix_lm", (False,), False, "attention is always causal", MODEL),
        Requirement("logit_scale", (None,), None, "logits are not scaled", MODEL),
    ),
    differences=(
        GELU_IS_TANH,
        NORM_EPS_FIXED,
        ALIBI_SLOPES_CAST,
        Difference(
            "alibi_bias_max",
            "TensorRT-LLM follows the config's alibi_bias_max; transformers' own MPT always uses 8",
            "transformers/models/mpt/modeling_mpt.py 5.24, build_mpt_alibi_tensor",
        ),
    ),
    handled_keys=("expansion_ratio", "learned_pos_emb", "embedding_fraction", "norm_type", "verbose", "init_config"),
)
