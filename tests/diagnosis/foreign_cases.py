"""Which foreign engines are tried on which bases, and what may rightly be said of each."""

from __future__ import annotations

from typing import Any

from tests.diagnosis import foreign_faults as by_hand
from tests.diagnosis.foreign_engines import Engine
from tests.diagnosis.foreign_faults import ALL, LLAMAS

NONE = None

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "max_position_embeddings": 128},
    "qwen2": {},
    "bloom": {},
    "gptneox": {"rotary_emb_base": 500.0, "embedding_scale": 0.3},
}
"""Base -> what its config has beside the tiny ports' own."""


def _engines() -> list[Engine]:
    e, h = Engine, by_hand
    return [
        # ------------------------------------------------------------------------------ weights of a faulty converter
        e("q, k, v biases lost", ("qwen2",), ("qkv_bias_dropped",), h.drop_biases("q", "k", "v")),
        e("bias of v lost", ("qwen2",), (NONE, "qkv_bias_dropped"), h.drop_biases("v")),
        e("bias of q lost", ("qwen2",), (NONE, "qkv_bias_dropped"), h.drop_biases("q")),
        e("biases joined k, v, q", ("qwen2",), (NONE,), h.each_layer(h.rotate_biases)),
        e(
            "read as LLaMA: no biases, base 10,000",
            ("qwen2",),
            ("qkv_bias_dropped + rope_base_lost",),
            lambda model: (h.drop_biases("q", "k", "v")(model), h.with_theta(1e4)(model))[:0] or None,
        ),
        e(
            "k and v exchanged",
            LLAMAS,
            ("key_and_value_swapped",),
            h.each_layer(lambda layer: _swap_projections(layer.self_attn, "k_proj", "v_proj")),
        ),
        e("k and v exchanged", ("bloom", "gptneox"), ("key_and_value_swapped",), h.swap_fused(1, 2)),
        e("q and k exchanged", ("bloom", "gptneox"), (NONE,), h.swap_fused(0, 1)),
        e(
            "gate and up exchanged",
            LLAMAS,
            ("gate_and_up_swapped",),
            h.each_layer(lambda layer: _swap_projections(layer.mlp, "gate_proj", "up_proj")),
        ),
        e(
            "q, k, v rows read as blocks",
            ("bloom", "gptneox"),
            ("qkv_not_deinterleaved",),
            h.misread_fused("weight", "bias"),
        ),
        e("bias rows read as blocks, weight right", ("bloom", "gptneox"), (NONE,), h.misread_fused("bias")),
        e(
            "output projection transposed",
            ALL,
            ("conv1d_not_transposed",),
            h.each_layer(lambda layer: _transpose(h.attention_of(layer))),
        ),
        e(
            "output matrix is the embedding",
            ALL,
            ("head_taken_from_embedding",),
            lambda model: _set(model.get_output_embeddings().weight, model.get_input_embeddings().weight),
        ),
        e(
            "output bias of attention lost",
            ("bloom", "gptneox"),
            ("output_bias_dropped",),
            h.each_layer(lambda layer: h.zero(h.attention_of(layer).dense.bias)),
        ),
        e(
            "MLP biases lost",
            ("bloom", "gptneox"),
            ("mlp_bias_dropped",),
            h.each_layer(lambda layer: h.zero(layer.mlp.dense_h_to_4h.bias, layer.mlp.dense_4h_to_h.bias)),
        ),
        e(
            "norm biases lost",
            ("bloom", "gptneox"),
            ("norm_bias_dropped",),
            lambda model: h.zero(*(norm.bias for norm in h.norms_of(model))),
        ),
        e(
            "norms exchanged",
            LLAMAS,
            ("norms_swapped",),
            h.swap_modules("input_layernorm", "post_attention_layernorm"),
        ),
        e("norm weights plus one", ("llama",), ("norm_offset_wrong",), lambda model: _add(h.norms_of(model), 1.0)),
        e(
            "embedding times sqrt(E)",
            ("llama", "gptneox"),
            ("embedding_scale_wrong",),
            lambda model: _scale(model.get_input_embeddings().weight, 8.0),
        ),
        e("embedding norm left out", ("bloom",), (NONE,), lambda model: _plain_norm(model.transformer)),
        e("layers in the other order", ALL, ("pipeline_stages_exchanged",), h.exchange_layers),
        e(
            "vocabulary halves exchanged",
            ("llama", "bloom"),
            ("tensor_ranks_exchanged",),
            lambda model: _set(
                model.get_output_embeddings().weight, model.get_output_embeddings().weight.data.roll(80, 0)
            ),
        ),
        # ------------------------------------------------------------------------------------------- config and code
        e("rotary base 10,000", ("qwen2", "gptneox"), ("rope_base_lost",), h.with_theta(1e4)),
        e("rotary base 10,000", ("llama",), ("rope_base_lost",), h.with_theta(1e4, 4.0)),
        e("rotary base 500,000 in place of 500", ("llama",), (NONE, "rope_base_other"), h.with_theta(5e5, 4.0)),
        e("rotary base 100,000 in place of a million", ("qwen2",), (NONE, "rope_base_other"), h.with_theta(1e5)),
        e("rotary scaling lost", ("llama",), ("rope_scaling_lost",), h.set_rotary(lambda own: own * 4.0)),
        e(
            "scaling of Llama 3.1",
            ("llama",),
            (NONE, "rope_scaling_misread"),
            h.set_rotary(lambda own: h.smooth_llama3(own * 4.0)),
        ),
        e("factor 2 in place of 4", ("llama",), (NONE, "rope_scaling_misread"), h.set_rotary(lambda own: own * 2.0)),
        e(
            "neighbours rotated",
            ("llama", "qwen2", "gptneox"),
            ("rotary_style_swapped",),
            h.replace_function("apply_rotary_pos_emb", h.rotate_neighbours),
        ),
        e("whole heads rotated", ("gptneox",), ("rotary_share_ignored",), h.with_theta_of_share(16)),
        e("half of each head rotated", ("gptneox",), (NONE, "rotary_share_ignored"), h.with_theta_of_share(8)),
        e(
            "key heads repeated as a block",
            LLAMAS,
            ("grouped_qkv_split_as_equal",),
            h.replace_function("repeat_kv", h.repeat_as_block),
        ),
        e("logits of attention not scaled", ("llama",), ("q_scale_missing",), h.scale_queries(4.0)),
        e("logits of attention scaled twice", ("llama",), ("q_scale_twice",), h.scale_queries(0.25)),
        e("logits of attention times 1.3", ("llama",), (NONE,), h.scale_queries(1.3)),
        e(
            "erf gelu, which the library has not, in place of silu",
            LLAMAS,
            (NONE, "activation_variant"),
            h.set_activation("gelu"),
        ),
        e("tanh gelu in place of silu", LLAMAS, ("activation_variant",), h.set_activation("gelu_pytorch_tanh")),
        e("relu in place of silu", LLAMAS, ("activation_variant",), h.set_activation("relu")),
        e("relu in place of gelu", ("bloom", "gptneox"), ("activation_variant",), h.set_activation("relu")),
        e("silu in place of gelu", ("bloom", "gptneox"), ("activation_variant",), h.set_activation("silu")),
        e("quick gelu in place of gelu", ("gptneox",), ("activation_variant", NONE), h.set_activation("quick_gelu")),
        e("epsilon 1e-3", ALL, (NONE, "norm_epsilon_wrong"), h.set_epsilon(1e-3)),
        e("epsilon 1e-5 in place of 1e-6", ("llama",), ("norm_epsilon_wrong",), h.set_epsilon(1e-5)),
        e("ALiBi left out in every phase", ("bloom",), ("alibi_dropped_everywhere",), h.scale_alibi(0.0)),
        e("ALiBi slopes of twice the size", ("bloom",), (NONE,), h.scale_alibi(2.0)),
        e(
            "attention before MLP, not beside it",
            ("gptneox",),
            (NONE,),
            h.set_attribute("use_parallel_residual", False),
        ),
        # ------------------------------------------------------------------------------------------- not in the list
        e("last layer missing", LLAMAS, (NONE,), h.skip_last_layer),
        e(
            "MLP of one layer zero",
            ALL,
            (NONE,),
            lambda model: h.zero(h.modules_named(h.layers_of(model)[1], "down_proj", "dense_4h_to_h")[0].weight),
        ),
        e("MLP columns of one layer permuted", ALL, (NONE,), h.permute_rows),
        e("int4 without calibration", ALL, (NONE,), h.quantise(4)),
        e("int3 in groups of 16", ("llama",), (NONE,), h.quantise(3, 16)),
        e("another fine-tune, 5 % away", ALL, (NONE,), h.tune_further(0.05)),
        e("another fine-tune, 50 % away", ALL, (NONE,), h.tune_further(0.5)),
        e("last norm left out", ("llama",), (NONE,), lambda model: _ones(model.model.norm)),
        # ------------------------------------------------------------------------------------------------ comparison
        e("start token doubled", ALL, ("doubled_start_token",), reads=h.double_start),
        e("start token lost", ALL, ("start_token_lost",), reads=h.drop_start),
        e("padding read as text", ("llama", "bloom"), ("padding_read_as_text",), reads=h.read_padding),
        e("another prompt template", ALL, (NONE,), reads=h.wrap_in_template),
        e("texts kept between calls", ALL, ("state_left_from_previous_call",), reads=h.keep_texts),
        e("repetition penalty 1.1", ALL, ("repetition_penalty_applied",), choose=h.penalise(1.1)),
        e("repetition penalty 1.15", ALL, ("repetition_penalty_applied",), choose=h.penalise(1.15)),
        e("repetition penalty 1.5", ALL, ("repetition_penalty_applied",), choose=h.penalise(1.5)),
        e("no bigram twice", LLAMAS, ("ngrams_forbidden",), choose=h.forbid_ngrams(2)),
        e("presence penalty 1", LLAMAS, ("repetition_penalty_applied",), choose=h.subtract_presence(1.0)),
        e("frequency penalty 0.7", LLAMAS, ("repetition_penalty_applied",), choose=h.subtract_presence(0.7, True)),
        e("sampled at temperature 1", ALL, ("tokens_sampled",), choose=h.draw(1.0)),
        e("sampled: top-p 0.9, temperature 0.7", ALL, ("tokens_sampled",), choose=h.draw(0.7, 0, 0.9)),
        e("sampled: top-k 50", ALL, ("tokens_sampled",), choose=h.draw(1.0, 50)),
        # ----------------------------------------------------------------------------------------------------- clean
        e("float32", ALL, ()),
        e("float32, sdpa", ("llama", "qwen2", "gptneox"), (), attention="sdpa"),
        e("float16", ALL, (), dtype="float16"),
        e("bfloat16", ALL, (), dtype="bfloat16"),
        e("float16, sdpa", LLAMAS, (), dtype="float16", attention="sdpa"),
        e("bfloat16, sdpa", LLAMAS, (), dtype="bfloat16", attention="sdpa"),
        e("float16 in a padded batch", LLAMAS, (), h.pad_left, dtype="float16"),
        e("bfloat16 in a padded batch", ALL, (), h.pad_left, dtype="bfloat16"),
        e("float32 as TF32 rounds", ALL, (), h.round_inputs(10)),
        e("positions count from 1", LLAMAS, (), h.shift_positions),
    ]


def _swap_projections(holder: Any, first: str, second: str) -> None:
    one, two = getattr(holder, first), getattr(holder, second)
    by_hand.swap_data(one.weight, two.weight)
    if one.bias is not None:
        by_hand.swap_data(one.bias, two.bias)


def _transpose(attention: Any) -> None:
    module = attention.o_proj if hasattr(attention, "o_proj") else attention.dense
    module.weight.data = module.weight.data.T.contiguous()


def _set(parameter: Any, value: Any) -> None:
    parameter.data = value.data.clone()


def _scale(parameter: Any, factor: float) -> None:
    parameter.data = parameter.data * factor


def _add(modules: list[Any], amount: float) -> None:
    for module in modules:
        module.weight.data = module.weight.data + amount


def _ones(norm: Any) -> None:
    norm.weight.data = norm.weight.data * 0 + 1


def _plain_norm(holder: Any) -> None:
    import torch

    holder.word_embeddings_layernorm = torch.nn.Identity()


ENGINES = _engines()
