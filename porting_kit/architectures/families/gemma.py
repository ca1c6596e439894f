"""Gemma: norms stored as offsets from one, embeddings scaled in the graph and shared with the output.

Sources: tensorrt_llm/models/gemma/{model,config,convert}.py and examples/gemma/convert_checkpoint.py,
0.9.0.dev2024022700 to 0.16.0.dev2024121000. Until 0.10.0.dev2024042300 the class does not scale its embeddings, so the
scale goes into them; then, until 0.16.0.dev2024121000, it shares its embedding with the output matrix and splits it
over the ranks; the matrix itself is left out of the checkpoint from 0.11.0.dev2024062500 on.
"""

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, constant, switch
from porting_kit.architectures.fragments import LAYER, TARGET, dense, gated_mlp, recomputed_frequencies, separate_qkv
from porting_kit.architectures.operations import Add, Scale
from porting_kit.architectures.rules import COLUMN, Rule, embedding, only_when, output_matrix, transform

MODEL = "tensorrt_llm/models/gemma/model.py 0.13.0.dev2024090300"


def norm_from_one(source: str, target: str, **options: object) -> Rule:
    """An RMSNorm whose weight is stored minus one."""
    return transform(f"{source}.weight [E]", f"{target}.weight", Add(1.0), **options)


GEMMA_RULES = (
    *only_when([embedding("model.embed_tokens.weight")], "shares_embedding", shard=COLUMN),
    *only_when([embedding("model.embed_tokens.weight")], "!shares_embedding & !scales_embedding"),
    *only_when([embedding("model.embed_tokens.weight")], "scales_embedding", operations=(Scale("sqrt_hidden_size"),)),
    *only_when([output_matrix("lm_head.weight", "model.embed_tokens.weight")], "!leaves_output_out"),
    *separate_qkv(f"{LAYER}.self_attn"),
    *dense(f"{LAYER}.self_attn.o_proj"),
    *gated_mlp(f"{LAYER}.mlp"),
    norm_from_one(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
    norm_from_one(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
    norm_from_one("model.norm", "transformer.ln_f", pipeline="last"),
)
GEMMA_SWITCHES = {
    "scales_embedding": Switch(until="0.10.0.dev2024042300"),
    "shares_embedding": Switch(since="0.10.0.dev2024042300", until="0.16.0.dev2024121000", default=True),
    "leaves_output_out": Switch(since="0.11.0.dev2024062500", until="0.16.0.dev2024121000", default=True),
}
GEMMA_FIELDS = (
    *ROPE_FIELDS,
    constant("attn_bias", False, "Gemma has none"),
    constant("mlp_bias", False, "Gemma has none"),
    switch("share_embedding_table", "shares_embedding"),
)
GEMMA_REQUIREMENTS = (
    Requirement("attention_bias", (False,), False, "no projection has a bias", MODEL),
    Requirement("@tied", (True,), True, "the output matrix is the embedding", MODEL),
)
HANDLED = ("sliding_window", "layer_types", "cache_implementation", "use_bidirectional_attention", "hidden_act")

FAMILY = Family(
    name="gemma",
    model_types=("gemma",),
    architectures={"GemmaForCausalLM": "GemmaForCausalLM"},
    model_folder="gemma",
    rules=GEMMA_RULES,
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    switches=GEMMA_SWITCHES,
    spellings={"activation": ("hidden_activation", "hidden_act")},
    defaults={"norm_eps": 1e-6, "activation": "gelu_pytorch_tanh", "tied": True},
    fields=GEMMA_FIELDS,
    requirements=GEMMA_REQUIREMENTS,
    handled_keys=HANDLED,
    pipeline=True,
    first_release="0.9.0.dev2024022700",
    head_size_since="0.9.0.dev2024022700",
)
