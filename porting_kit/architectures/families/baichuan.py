"""Baichuan 1 and 2: LLaMA with one fused projection; 7B rotates, 13B uses ALiBi; 2 normalises its output matrix.

Sources: tensorrt_llm/models/baichuan/{model,config,convert}.py, 0.9.0.dev2024022700 to 0.13.0.dev2024090300. The rotary
base has no field in the class before 0.12; Baichuan 2 is told by its vocabulary (not 64,000), as upstream does.
"""

from porting_kit.architectures.family import ALIBI_SLOPES_CAST, Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS
from porting_kit.architectures.fragments import LAYER, TARGET, dense, fused_qkv, gated_mlp, recomputed_frequencies
from porting_kit.architectures.operations import NormalizeRows
from porting_kit.architectures.rules import embedding, norm, only_when, output_matrix

MODEL = "tensorrt_llm/models/baichuan/model.py 0.13.0.dev2024090300"


def derive_kind(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """13B states `model_max_length` where 7B states `max_position_embeddings`."""
    rotates = raw.get("max_position_embeddings") is not None
    return {
        "position_kind": (
            "rope_gpt_neox" if rotates else "alibi",
            "max_position_embeddings is stated" if rotates else "model_max_length in its place",
        ),
        "normalised_output": (raw.get("vocab_size") != 64000, "Baichuan 2, by its vocabulary"),
    }


FAMILY = Family(
    name="baichuan",
    model_types=("baichuan",),
    architectures={"BaichuanForCausalLM": "BaichuanForCausalLM", "BaiChuanForCausalLM": "BaichuanForCausalLM"},
    model_folder="baichuan",
    rules=(
        embedding("model.embed_tokens.weight"),
        *fused_qkv(f"{LAYER}.self_attn.W_pack"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        *gated_mlp(f"{LAYER}.mlp"),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        *only_when([output_matrix("lm_head.weight", "model.embed_tokens.weight")], "!normalised_output"),
        *only_when(
            [output_matrix("lm_head.weight", "model.embed_tokens.weight", NormalizeRows())], "normalised_output"
        ),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="one matrix, Q; K; V",
    switches={"normalised_output": Switch()},
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    spellings={"max_positions": ("max_position_embeddings", "model_max_length")},
    derive=derive_kind,
    fields=ROPE_FIELDS,
    requirements=(
        Requirement("@rope_base", (10000.0,), 10000.0, "the class has no field for the rotary base", MODEL),
        Requirement("@rope_scaling", (None,), None, "the class takes no rotary scaling", MODEL),
    ),
    differences=(ALIBI_SLOPES_CAST,),
    handled_keys=("z_loss_weight", "gradient_checkpointing", "rope_theta"),
)
