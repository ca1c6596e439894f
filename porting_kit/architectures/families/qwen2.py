"""Qwen 1.5, 2 and 2.5: LLaMA's layout with biases on queries, keys and values and none on the output projection.

Sources: tensorrt_llm/models/qwen/{model,config,convert}.py, 0.9.0.dev2024031900 to 0.16.0.dev2024121000. Releases
before 0.12.0.dev2024072300 know the class as QWenForCausalLM; `qwen_type` chooses the layout.
"""

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, key, size
from porting_kit.architectures.fragments import LAYER, TARGET, dense, gated_mlp, recomputed_frequencies, separate_qkv
from porting_kit.architectures.rules import embedding, norm, output_matrix

MODEL = "tensorrt_llm/models/qwen/model.py 0.11.0.dev2024062500"
QWEN_FIELDS = (
    *ROPE_FIELDS,
    constant("attn_bias", True, "queries, keys and values have biases"),
    constant("mlp_bias", False, "the MLP has none"),
    key("seq_length", default=8192, note="read with use_logn_attn only"),
    key("use_logn_attn", default=False),
)
NO_WINDOW = Requirement("use_sliding_window", (False,), False, "the class has no per-layer sliding window", MODEL)

FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    architectures={"Qwen2ForCausalLM": "Qwen2ForCausalLM"},
    model_folder="qwen",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn", bias=True),
        *dense(f"{LAYER}.self_attn.o_proj"),
        *gated_mlp(f"{LAYER}.mlp"),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    switches={"halves_width": Switch(until="0.10.0.dev2024042300")},
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    fields=(
        *QWEN_FIELDS,
        attribute("intermediate_size", when="!halves_width"),
        size("intermediate_size", "2*I", "the class knows Qwen 1 only and takes half of it", when="halves_width"),
        constant("qwen_type", "qwen2", "the class chooses its layout by it"),
        constant("moe_intermediate_size", 0, "no experts"),
        constant("moe_shared_expert_intermediate_size", 0, "no experts"),
    ),
    requirements=(NO_WINDOW,),
    handled_keys=("qwen_type", "max_window_layers", "layer_types", "sliding_window"),
    pipeline=True,
    first_release="0.9.0.dev2024031900",
    head_size_since="0.11.0.dev2024060400",
    renamed=("0.12.0.dev2024072300", "QWenForCausalLM"),
)
