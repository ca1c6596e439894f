"""Falcon 7B, 40B, 180B and RW: grouped heads, parallel attention with one norm or two, rotary or ALiBi.

Sources: tensorrt_llm/models/falcon/{model,config,convert}.py, 0.9.0.dev2024022700 to 0.15.0.dev2024111200. With
parallel attention the sums over ranks are made once for attention and MLP, so their output biases live on the first
rank alone (upstream's converter repeats them on every rank, which counts them once per rank).
"""

from porting_kit.architectures.family import (
    ALIBI_SLOPES_CAST,
    GELU_IS_TANH,
    NORM_EPS_FIXED,
    ByKey,
    Family,
    SettingSince,
    Switch,
)
from porting_kit.architectures.fields import ROPE_FIELDS, constant, key, switch
from porting_kit.architectures.fragments import (
    GROUP_BY_GROUP,
    TARGET,
    fused_qkv,
    recomputed_frequencies,
)
from porting_kit.architectures.rules import (
    COLUMN,
    FIRST_RANK,
    ROW,
    Rule,
    embedding,
    linear,
    norm,
    only_when,
    output_matrix,
    rename,
)

SOURCE = "transformer.h.{i}"


def derive_sizes(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Key/value heads and norms follow from the generation of the model."""
    new = bool(raw.get("new_decoder_architecture", raw.get("model_type") == "RefinedWeb"))
    if new:
        heads = (values["num_kv_heads"], "the config's own count")
    elif raw.get("multi_query", True):
        heads = (1, "multi_query without the new architecture")
    else:
        heads = (values["num_heads"], "H")
    parallel = new or bool(raw.get("parallel_attn", True))
    two = new and raw.get("num_ln_in_parallel_attn") in (None, 2)
    return {
        "num_kv_heads": heads,
        "new_decoder_architecture": (new, "the config's flag, or model_type RefinedWeb"),
        "parallel_attention": (parallel, "parallel_attn, or the new architecture"),
        "two_norms": (two, "new architecture, num_ln_in_parallel_attn"),
    }


def row_linear(source: str, target: str, shape: str) -> list[Rule]:
    """A row-split layer: its bias is on the first rank alone where the sum over ranks is shared."""
    weight = linear(source, target, shape, shard=ROW)
    return [
        *weight,
        rename(f"{source}.bias [E]", f"{target}.bias", shard=FIRST_RANK, when="bias & parallel_attention"),
        rename(f"{source}.bias [E]", f"{target}.bias", when="bias & !parallel_attention"),
    ]


FAMILY = Family(
    name="falcon",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    architectures={"FalconForCausalLM": "FalconForCausalLM", "RWForCausalLM": "FalconForCausalLM"},
    model_folder="falcon",
    rules=(
        embedding("transformer.word_embeddings.weight"),
        *fused_qkv(f"{SOURCE}.self_attention.query_key_value", GROUP_BY_GROUP, bias="bias"),
        *row_linear(f"{SOURCE}.self_attention.dense", f"{TARGET}.attention.dense", "E,H*D"),
        *linear(f"{SOURCE}.mlp.dense_h_to_4h", f"{TARGET}.mlp.fc", "I,E", shard=COLUMN, bias="bias"),
        *row_linear(f"{SOURCE}.mlp.dense_4h_to_h", f"{TARGET}.mlp.proj", "E,I"),
        *only_when(norm(f"{SOURCE}.ln_attn", f"{TARGET}.input_layernorm", bias=True), "two_norms"),
        *only_when(norm(f"{SOURCE}.ln_mlp", f"{TARGET}.mlp_layernorm", bias=True), "two_norms"),
        *only_when(norm(f"{SOURCE}.input_layernorm", f"{TARGET}.input_layernorm", bias=True), "!two_norms"),
        *only_when(
            norm(f"{SOURCE}.post_attention_layernorm", f"{TARGET}.post_layernorm", bias=True), "!parallel_attention"
        ),
        *norm("transformer.ln_f", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="transformer.word_embeddings.weight"),
    ),
    drops=(recomputed_frequencies(f"{SOURCE}.self_attention"),),
    position=ByKey("alibi", {True: "alibi_with_scale", False: "rope_gpt_neox"}, False),
    norm="layer",
    mlp="plain",
    qkv="interleaved group by group",
    switches={
        "bias": Switch(("bias",), default=False),
        "new_decoder_architecture": Switch(),
        "parallel_attention": Switch(),
        "two_norms": Switch(),
    },
    defaults={"intermediate_size": "4*E", "tied": True, "activation": "gelu", "max_positions": 2048},
    derive=derive_sizes,
    fields=(
        *ROPE_FIELDS,
        constant("hidden_act", "gelu", "the class's own"),
        switch("bias"),
        switch("new_decoder_architecture"),
        switch("parallel_attention"),
        key("num_ln_in_parallel_attn", default=None, optional=True),
    ),
    differences=(GELU_IS_TANH, NORM_EPS_FIXED, ALIBI_SLOPES_CAST),
    handled_keys=(
        *("multi_query", "parallel_attn", "new_decoder_architecture", "num_ln_in_parallel_attn"),
        *("num_kv_heads", "n_head_kv"),
    ),
    pipeline=True,
    # falcon/model.py: absent in 0.14.0.dev2024100800, there in 0.15.0.dev2024111200
    settings_since=(
        SettingSince(
            "num_ln_in_parallel_attn", (1,), "one norm before attention and MLP (Falcon 2)", "0.15.0.dev2024101500"
        ),
    ),
)
