"""Gemma and Gemma 2: norms stored as offsets from one, embeddings scaled in the graph and shared with the output.

Sources: tensorrt_llm/models/gemma/{model,config,convert}.py, 0.9.0.dev2024022700 to 0.16.0.dev2024121000. The class
takes its output matrix from the embedding (`share_embedding_table`), and splits the embedding over the ranks.
"""

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, key, switch
from porting_kit.architectures.fragments import LAYER, TARGET, dense, gated_mlp, recomputed_frequencies, separate_qkv
from porting_kit.architectures.operations import Add
from porting_kit.architectures.rules import COLUMN, Rule, embedding, transform

MODEL = "tensorrt_llm/models/gemma/model.py 0.13.0.dev2024090300"


def norm_from_one(source: str, target: str, **options: object) -> Rule:
    """An RMSNorm whose weight is stored minus one."""
    return transform(f"{source}.weight [E]", f"{target}.weight", Add(1.0), **options)


def derive_kind(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Gemma 2 has two more norms and its own scale of the attention logits."""
    second = raw.get("model_type") == "gemma2" or "Gemma2ForCausalLM" in (raw.get("architectures") or ())
    scalar = raw.get("query_pre_attn_scalar")
    derived = {"gemma2": (second, "the class name, or model_type")}
    if second and scalar:
        derived["q_scaling"] = ((scalar / values["head_size"]) ** 0.5, "sqrt(query_pre_attn_scalar / D)")
    return derived


FAMILY = Family(
    name="gemma",
    model_types=("gemma", "gemma2"),
    architectures={"GemmaForCausalLM": "GemmaForCausalLM", "Gemma2ForCausalLM": "Gemma2ForCausalLM"},
    model_folder="gemma",
    rules=(
        Rule(**{**embedding("model.embed_tokens.weight").__dict__, "shard": COLUMN}),
        *separate_qkv(f"{LAYER}.self_attn"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        *gated_mlp(f"{LAYER}.mlp"),
        norm_from_one(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        norm_from_one(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        norm_from_one(f"{LAYER}.pre_feedforward_layernorm", f"{TARGET}.pre_feedforward_layernorm", when="gemma2"),
        norm_from_one(f"{LAYER}.post_feedforward_layernorm", f"{TARGET}.post_feedforward_layernorm", when="gemma2"),
        norm_from_one("model.norm", "transformer.ln_f", pipeline="last"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    switches={"gemma2": Switch()},
    spellings={"activation": ("hidden_activation", "hidden_act")},
    defaults={"norm_eps": 1e-6, "activation": "gelu_pytorch_tanh", "tied": True},
    derive=derive_kind,
    fields=(
        *ROPE_FIELDS,
        constant("attn_bias", False, "Gemma has none"),
        constant("mlp_bias", False, "Gemma has none"),
        switch("inter_layernorms", "gemma2"),
        key("query_pre_attn_scalar", default=None),
        attribute("attn_logit_softcapping", "attention_softcap"),
        attribute("final_logit_softcapping", "final_softcap"),
    ),
    requirements=(
        Requirement("attention_bias", (False,), False, "no projection has a bias", MODEL),
        Requirement("@tied", (True,), True, "the output matrix is the embedding", MODEL),
    ),
    handled_keys=("sliding_window", "layer_types", "cache_implementation", "use_bidirectional_attention"),
    pipeline=False,
    head_size_since="0.9.0.dev2024022700",
    shared_output=True,
)
