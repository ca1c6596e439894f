"""Rows of the config table: which key of the checkpoint's config.json is made from what.

A row takes its value from a normalised `BaseConfig` attribute, from a key of the Hugging Face config, from a switch, or
from a constant. `conversion.config_fields` turns the rows into the written config and the table that is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from porting_kit.architectures.names import check_expression

REQUIRED = "<required>"


@dataclass(frozen=True)
class Field:
    """One key of the checkpoint's config.json.

    Args:
        target: the key written, dotted for one inside a mapping.
        kind: "attribute" (of BaseConfig, dotted into a mapping), "key" (dotted, of the Hugging Face config), "switch",
            "size" or "constant".
        source: name of the attribute, key or switch, or a shape expression ("2*I"); None for a constant.
        default: value when the source has no such key; `REQUIRED` refuses instead.
        value: the constant.
        mapping: rewrites the value, key by key ({"relu2": "squared-relu"}); values not listed stay.
        optional: leave the key out of config.json when the value is None.
        when: switches of the family that must hold, as in a weight rule: keys that only some releases read.
        note: why, shown in the table; a constant must say why.
    """

    target: str
    kind: str
    source: str | None = None
    default: object = REQUIRED
    value: object = None
    mapping: Mapping[object, object] | None = None
    optional: bool = False
    when: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("attribute", "key", "switch", "size", "constant"):
            raise ValueError(f"field {self.target!r}: {self.kind!r} is not attribute, key, switch, size or constant")
        if self.kind == "size":
            check_expression(self.source)
        if (self.kind == "constant") != (self.source is None):
            raise ValueError(f"field {self.target!r}: a constant has no source, everything else has one")
        if self.kind == "constant" and not self.note:
            raise ValueError(f"field {self.target!r}: a constant needs a note that says why")


def attribute(target: str, source: str | None = None, **options: object) -> Field:
    """From a normalised BaseConfig attribute, by default the one of the same name."""
    return Field(target, "attribute", source or target, **options)


def key(target: str, source: str | None = None, default: object = REQUIRED, **options: object) -> Field:
    """From a key of the Hugging Face config, by default the one of the same name."""
    return Field(target, "key", source or target, default, **options)


def switch(target: str, source: str | None = None, **options: object) -> Field:
    """From a switch of the family (true or false), by default the one of the same name."""
    return Field(target, "switch", source or target, **options)


def size(target: str, expression: str, note: str, when: str | None = None) -> Field:
    """A number worked out from the model's sizes."""
    return Field(target, "size", expression, note=note, when=when)


def constant(target: str, value: object, note: str, when: str | None = None) -> Field:
    """The same for every model of the family."""
    return Field(target, "constant", value=value, note=note, when=when)


def fields_when(rows: Sequence[Field], when: str) -> tuple[Field, ...]:
    """The same rows under a condition."""
    return tuple(replace(row, when=when) for row in rows)


ACTIVATIONS = {
    "relu2": "squared-relu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_accurate": "gelu",
    "swish": "silu",
}

# Names that TensorRT-LLM's table of activations holds (ACT2FN and GATED_ACT_2_ACT in functional.py, 0.8.0 to
# 0.16.0.dev2024121000).
KNOWN_ACTIVATIONS = frozenset(
    """
    relu tanh gelu gelu_new gelu_fast openai-gelu geglu gegelu identity silu softplus squared-relu swiglu fast-swiglu
    """.split()  # noqa: SIM905 - a list of one word a line is longer
)

COMMON_FIELDS = (
    attribute("architecture"),
    attribute("num_hidden_layers", "num_layers"),
    attribute("hidden_size"),
    attribute("num_attention_heads", "num_heads"),
    attribute("num_key_value_heads", "num_kv_heads"),
    attribute("head_size"),
    attribute("intermediate_size"),
    attribute("vocab_size"),
    attribute("max_position_embeddings", "max_positions"),
    attribute("position_embedding_type", "position_kind"),
    attribute("hidden_act", "activation", mapping=ACTIVATIONS),
    attribute("norm_epsilon", "norm_eps"),
)

ROPE_FIELDS = (
    attribute("rotary_base", "rope_base"),
    attribute("rotary_scaling", "rope_scaling"),
)

# Keys of a Hugging Face config that do not change what a decoder computes when it runs.
IGNORED_KEYS = frozenset(
    """
    _attn_implementation _name_or_path activation_dropout add_cross_attention architectures attention_dropout
    attention_probs_dropout_prob attention_softmax_in_fp32 attn_dropout_prob attn_pdrop auto_map bf16 bos_token
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout cls_token_id
    decoder_start_token_id dropout dtype emb_dropout_prob emb_pdrop embd_pdrop embedding_dropout eos_token
    eos_token_id ffn_dropout finetuning_task flash_attn fp16 fp32 gradient_checkpointing hidden_dropout
    hidden_dropout_prob id2label inference_runner init_device init_method_std init_std initializer_factor
    initializer_range intermediate_dropout is_decoder is_encoder_decoder label2id layerdrop mlp_dropout
    model_type num_labels onnx_safe output_attentions output_hidden_states output_past output_router_logits
    pad_token_id pre_allocate_kv_cache prefix pretraining_tp problem_type resid_pdrop residual_dropout
    return_dict router_aux_loss_coef router_jitter_noise runner_max_sequence_length
    scale_attention_softmax_in_fp32 sep_token_id slow_but_exact softmax_in_fp32 summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
    tokenizer_class tokenizer_type torch_dtype transformers_version unk_token_id use_cache use_cache_kernel
    use_cache_quantization use_flash_attention_2 use_flash_attn
    """.split()  # noqa: SIM905 - a list of one word a line is longer than the module
)
