"""Nemotron-NAS and DeciLM: a LLaMA whose layers differ: key/value heads, MLP widths, parts left out or made linear.

Sources: tensorrt_llm/models/deci/{model,config,convert,layer_config}.py 0.13.0.dev2024082000 to 0.13.0.dev2024090300,
tensorrt_llm/models/nemotron_nas/ 0.14.0.dev2024100800 to 0.16.0.dev2024121000. `block_configs` states each layer
(Llama-3_1-Nemotron-51B and later), `num_key_value_heads_per_layer` only the key/value heads (DeciLM-7B).
"""

from dataclasses import replace

from porting_kit.architectures.family import Family, LayerTraits, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, attribute
from porting_kit.architectures.fragments import LAYER, TARGET, dense, gated_mlp, recomputed_frequencies, separate_qkv
from porting_kit.architectures.rules import COLUMN, embedding, norm, only_when, output_matrix, rename
from porting_kit.errors import BaseModelError

MULTIPLE = 256  # MLP widths are rounded up to it: _find_multiple in deci/convert.py
WHOLE = {"no_op": False, "replace_with_linear": False}
NEVER = {"sparsify": None, "window_length": None, "num_sink_tokens": 0, "unshifted_sink": False}


def mlp_width(factor: float, hidden_size: int) -> int:
    """I of a layer from its `ffn_mult`: _ffn_mult_to_intermediate_size in deci/convert.py 0.13.0.dev2024090300."""
    return -(-int(2 * factor * hidden_size / 3) // MULTIPLE) * MULTIPLE


def kind_of(part: dict, whole: str) -> str:
    """What stands in a part's place, in the words of layer_config.py: the part itself, "linear" or "no_op"."""
    settings = WHOLE | part
    return "no_op" if settings["no_op"] else "linear" if settings["replace_with_linear"] else whole


def describe_layer(block: dict, num_heads: int, hidden_size: int, width: int | None) -> LayerTraits:
    """One entry of `block_configs`."""
    attention, ffn = block["attention"], block["ffn"]
    attention_kind, ffn_kind = kind_of(attention, "attention"), kind_of(ffn, "mlp")
    sizes = {}
    if attention_kind == "attention":
        sizes["K"] = num_heads // attention["n_heads_in_group"]
    if ffn_kind == "mlp":
        sizes["I"] = width if ffn.get("ffn_mult") is None else mlp_width(ffn["ffn_mult"], hidden_size)
    return LayerTraits(
        sizes=sizes,
        switches={
            "attention": attention_kind == "attention",
            "linear_attention": attention_kind == "linear",
            "normed_attention": attention_kind != "no_op",
            "mlp": ffn_kind == "mlp",
            "linear_mlp": ffn_kind == "linear",
            "normed_mlp": ffn_kind != "no_op",
        },
        written={
            "attention": {"impl": attention_kind, "num_key_value_heads": sizes.get("K")},
            "ffn": {"impl": ffn_kind, "intermediate_size": sizes.get("I")},
        },
    )


def read_blocks(raw: dict, values: dict) -> tuple[list[dict], str]:
    """The layers' entries in the words of `block_configs`, and the key that states them.

    Raises:
        BaseModelError: an entry does not say what its layer is.
    """
    H, blocks, key = values["num_heads"], raw.get("block_configs"), "block_configs"
    if blocks is None:
        key = "num_key_value_heads_per_layer"
        heads = raw.get(key) or [values["num_kv_heads"]] * values["num_layers"]
        is_whole = isinstance(heads, list) and all(isinstance(K, int) and K > 0 and H % K == 0 for K in heads)
        blocks = [{"attention": {"n_heads_in_group": H // K}, "ffn": {}} for K in heads] if is_whole else None
    for number, block in enumerate(blocks) if isinstance(blocks, list) else [(0, None)]:
        parts = [block.get(part) for part in ("attention", "ffn")] if isinstance(block, dict) else [None]
        wrong = not all(isinstance(part, dict) for part in parts)
        if not wrong and kind_of(parts[0], "attention") == "attention":
            group = parts[0].get("n_heads_in_group")
            wrong = not isinstance(group, int) or group < 1 or H % group != 0
        if not wrong and kind_of(parts[1], "mlp") == "mlp":
            width = parts[1].get("ffn_mult", values["intermediate_size"])
            wrong = not isinstance(width, int | float) or width <= 0
        if wrong:
            raise BaseModelError(
                f"{key} does not say what layer {number} is",
                expected=f"attention with a group that divides {H} heads, ffn with a width, or what stands for them",
                found=repr(block)[:200] if block is not None else repr(raw.get(key))[:200],
                next_step="complete config.json; nothing is guessed",
            )
    if len(blocks) != values["num_layers"]:
        what = f"{key} is not as long as the model"
        raise BaseModelError(
            what,
            expected=f"{values['num_layers']} entries",
            found=len(blocks),
            next_step="complete config.json; nothing is guessed",
        )
    return blocks, key


def derive_layers(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Each layer's traits, and for the model as a whole the largest of its sizes."""
    H, E, width = values["num_heads"], values["hidden_size"], values["intermediate_size"]
    blocks, key = read_blocks(raw, values)
    derived: dict[str, tuple[object, str]] = {}
    for part in ("attention", "ffn"):
        for name, plain in NEVER.items():
            found = [block[part].get(name) for block in blocks]
            if asked := [value for value in found if value not in (None, plain)]:
                derived[f"refuse:block_configs.{part}.{name}"] = (asked[0], "the class has no counterpart")
    layers = tuple(describe_layer(block, H, E, width) for block in blocks)
    for attribute_name, letter in (("num_kv_heads", "K"), ("intermediate_size", "I")):
        sizes = [layer.sizes[letter] for layer in layers if layer.sizes.get(letter)]
        if sizes:
            derived[attribute_name] = (max(sizes), f"the largest of {key}")
    return derived | {"layers": (layers, key)}


def _as_ffn(rules: list) -> list:
    """The class calls its MLP ffn."""
    return [replace(rule, target=rule.target.replace(".mlp.", ".ffn.")) for rule in rules]


FAMILY = Family(
    name="nemotron_nas",
    model_types=("deci", "nemotron-nas"),
    architectures={"DeciLMForCausalLM": "DeciLMForCausalLM"},
    model_folder="nemotron_nas",
    rules=(
        embedding("model.embed_tokens.weight"),
        *only_when([*separate_qkv(f"{LAYER}.self_attn"), *dense(f"{LAYER}.self_attn.o_proj")], "attention"),
        rename(
            f"{LAYER}.self_attn.linear_attn.weight [E,E]",
            f"{TARGET}.attention.weight",
            shard=COLUMN,
            when="linear_attention",
        ),
        *only_when(_as_ffn(gated_mlp(f"{LAYER}.mlp")), "mlp"),
        rename(f"{LAYER}.mlp.linear_mlp.weight [E,E]", f"{TARGET}.ffn.weight", shard=COLUMN, when="linear_mlp"),
        *only_when(norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"), "normed_attention"),
        *only_when(norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"), "normed_mlp"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    switches={
        **dict.fromkeys(("attention", "normed_attention", "mlp", "normed_mlp"), Switch(default=True)),
        **dict.fromkeys(("linear_attention", "linear_mlp"), Switch()),
    },
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    derive=derive_layers,
    fields=(*ROPE_FIELDS, attribute("layer_configs", "written_layers")),
    handled_keys=("block_configs", "num_key_value_heads_per_layer"),
    pipeline=True,
    first_release="0.13.0.dev2024082000",
    head_size_since="0.13.0.dev2024082000",
)
