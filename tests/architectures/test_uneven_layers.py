"""Families whose layers differ: sizes and parts by layer, entries that say nothing are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from porting_kit.architectures import read_base_config
from porting_kit.errors import BaseModelError, ConversionError
from porting_kit.kernel_fit.targets import TargetFit

MODEL = {
    "architectures": ["DeciLMForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "vocab_size": 100,
    "rope_theta": 500000.0,
}
BLOCKS = [
    {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 3.0}},
    {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"ffn_mult": 9.0}},
    {"attention": {"n_heads_in_group": 2, "sparsify": None}, "ffn": {"replace_with_linear": True, "ffn_mult": None}},
]


def read(**changes):
    return read_base_config({**MODEL, "block_configs": BLOCKS, **changes})


def test_each_layer_has_its_own_sizes_and_parts():
    base = read()
    assert (base.num_kv_heads, base.intermediate_size) == (4, 512), "the largest stand for the model"
    assert [base.layer_dims(layer)["K"] for layer in (0, 2)] == [1, 4]
    # 2/3 of 3 x 64 and of 9 x 64, rounded up to a multiple of 256
    assert [base.layer_dims(layer)["I"] for layer in (0, 1)] == [256, 512]
    assert [base.applies("attention", layer) for layer in range(3)] == [True, False, True]
    assert [base.applies("linear_mlp & normed_mlp", layer) for layer in range(3)] == [False, False, True]
    assert base.layer_dims(None) == base.dims
    assert base.written_layers[1] == {
        "attention": {"impl": "no_op", "num_key_value_heads": None},
        "ffn": {"impl": "mlp", "intermediate_size": 512},
    }
    base.require_supported()


def test_only_key_value_heads_differ():
    base = read(block_configs=None, num_key_value_heads_per_layer=[4, 2, 1], intermediate_size=96)
    assert [base.layer_dims(layer)["K"] for layer in range(3)] == [4, 2, 1]
    assert {base.layer_dims(layer)["I"] for layer in range(3)} == {96}


def test_a_family_with_like_layers_has_none_of_its_own():
    base = read_base_config({**MODEL, "architectures": ["LlamaForCausalLM"], "intermediate_size": 96})
    assert base.layers == ()
    assert base.layer_dims(2) == base.dims


@pytest.mark.parametrize(
    ("number", "block"),
    [
        (0, "attention"),
        (1, {"attention": {"n_heads_in_group": 2}}),
        (2, {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 3.0}}),
        (0, {"attention": {"n_heads_in_group": None}, "ffn": {"ffn_mult": 3.0}}),
        (1, {"attention": {"n_heads_in_group": 2}, "ffn": {}}),
        (2, {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": -1}}),
    ],
)
def test_an_entry_that_does_not_say_what_its_layer_is(number, block):
    blocks = [*BLOCKS[:number], block, *BLOCKS[number + 1 :]]
    with pytest.raises(BaseModelError, match=f"block_configs does not say what layer {number} is"):
        read(block_configs=blocks)


@pytest.mark.parametrize("heads", [[4, 2], [4, 3, 1], "many", [4, 0, 1]])
def test_wrong_heads_by_layer(heads):
    with pytest.raises(BaseModelError):
        read(block_configs=None, num_key_value_heads_per_layer=heads, intermediate_size=96).require_supported()


def test_what_the_class_lacks_is_refused():
    blocks = [{"attention": {"n_heads_in_group": 2, "window_length": 1024}, "ffn": {"ffn_mult": 3.0}}, *BLOCKS[1:]]
    with pytest.raises(BaseModelError, match="window_length = 1024"):
        read(block_configs=blocks).require_supported()
    with pytest.raises(BaseModelError, match="not as long as the model"):
        read(block_configs=BLOCKS[:2]).require_supported()


def test_a_kernel_fit_would_change_all_layers_alike(monkeypatch):
    monkeypatch.setattr(TargetFit, "_require_same_model", lambda self, plan: None)
    fit = TargetFit(SimpleNamespace(steps=("pad_heads",), names=("pad_heads",), needs_activations=False))
    with pytest.raises(ConversionError, match="the layers of this model differ"):
        fit.refit_plan(SimpleNamespace(base=read(), pp_size=1), {})
