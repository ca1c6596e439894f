"""Primitive operations: the points where TensorRT and PyTorch differ, and the MoE plugin against loops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from porting_kit.emulator import layout, primitives
from porting_kit.emulator.moe import mix_sparsely, moe_plugin
from porting_kit.emulator.tensor_type import Tensor, cast
from porting_kit.emulator.tensorrt_types import DataType
from porting_kit.errors import EmulatorError


def wrap(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return Tensor(torch.tensor(values, dtype=dtype))


def test_tensors_are_always_true() -> None:
    """Upstream writes `if tensor:` and the builtin max(tensor, number)."""
    zero = wrap(0.0)
    assert zero
    assert max(wrap(3, dtype=torch.int32), 7) == 7


def test_integers_divide_towards_zero_and_floats_do_not() -> None:
    number = wrap(7, -7, dtype=torch.int32)
    assert (number / 2).data.tolist() == [3, -3]
    assert (number // 2).data.tolist() == [3, -4]
    assert (number % 4).data.tolist() == [3, 1]
    assert (wrap(7.0) / 2).data.tolist() == [3.5]


def test_a_number_takes_the_type_of_the_tensor() -> None:
    assert (wrap(1.0, dtype=torch.float16) * 0.1).data.dtype is torch.float16
    assert (2.0 - wrap(1.0, dtype=torch.bfloat16)).data.dtype is torch.bfloat16
    assert (wrap(3, dtype=torch.int64) + 1).data.dtype is torch.int64


def test_float64_stays_when_float32_is_asked_for() -> None:
    double = wrap(1.0, dtype=torch.float64)
    assert cast(double, "float32").data.dtype is torch.float64
    assert double.dtype is DataType.FLOAT
    assert cast(double, DataType.HALF).data.dtype is torch.float16


def test_view_placeholder_slice_and_shape() -> None:
    rows = Tensor(torch.arange(24).view(2, 3, 4))
    assert layout.view(rows, [0, -1]).shape == (2, 12)
    assert layout.view(rows, layout.concat([layout.shape(rows, 0), 3, 4])).shape == (2, 3, 4)
    strided = layout.slice(rows, [0, 0, 1], [2, 3, 2], [1, 1, 2])
    assert torch.equal(strided.data, rows.data[:, :, 1::2])
    moved = layout.slice(rows, layout.concat([0, 1, 0]), layout.concat([2, 2, 4]))
    assert torch.equal(moved.data, rows.data[:, 1:])
    assert layout.expand(Tensor(torch.ones(1, 3)), layout.concat([5, 3])).shape == (5, 3)


def test_lookups() -> None:
    table = Tensor(torch.arange(12.0).view(4, 3))
    assert layout.gather(Tensor(torch.tensor([5, 6, 7])), 0, 1).data.tolist() == [6]
    assert layout.select(table, 0, 2).data.tolist() == [6, 7, 8]
    assert layout.index_select(table, 0, wrap(3, 0, dtype=torch.int32)).data.tolist() == [[9, 10, 11], [0, 1, 2]]
    values, indices = primitives.topk(table, 2, 1)
    assert values.data[1].tolist() == [5, 4]
    assert indices.data[1].tolist() == [2, 1]
    with pytest.raises(EmulatorError, match="embedding"):
        layout.embedding(wrap(4, dtype=torch.int32), table)


def test_constants_of_types_that_numpy_lacks() -> None:
    words = np.array([0x3F80, 0x4000], dtype=np.uint16).view(np.dtype("V2"))
    constant = layout.constant(words)
    assert constant.data.dtype is torch.bfloat16
    assert constant.data.tolist() == [1.0, 2.0]


def test_shapes_that_do_not_fit_name_the_line() -> None:
    with pytest.raises(EmulatorError, match="do not fit together") as caught:
        Tensor(torch.ones(2, 3)) + Tensor(torch.ones(4, 3))
    assert "(2, 3)" in caught.value.found
    assert "test_primitives.py" in caught.value.where


def test_layer_norm_with_neutral_constants() -> None:
    rows = Tensor(torch.randn(3, 8))
    expected = torch.nn.functional.layer_norm(rows.data, (8,))
    assert torch.allclose(primitives.layer_norm(rows, (8,), 1.0, 0.0).data, expected)


def test_layer_norm_with_one_weight_for_each_head() -> None:
    """layers/attention.py 0.15.0.dev2024101500 normalises [T, H, D] over D with weights of its own for every head."""
    generator = torch.Generator().manual_seed(3)
    rows, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, 2, 8), (2, 8), (2, 8)))
    expected = torch.nn.functional.layer_norm(rows, (8,)) * weight + bias
    found = primitives.layer_norm(Tensor(rows), 8, Tensor(weight), Tensor(bias)).data
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(primitives.layer_norm(Tensor(rows), 8, Tensor(weight), 0.0).data, expected - bias, atol=1e-6)


@pytest.mark.parametrize("mode", [0, 1])
def test_moe_plugin_against_loops(mode: int) -> None:
    """Gated experts: linear half first, activated half second; weights renormalised in mode 1."""
    T, E, F, experts, top_k = 5, 6, 4, 3, 2
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, routing = draw(T, E), draw(T, experts)
    first, second, first_bias, second_bias = (
        draw(experts, 2 * F, E), draw(experts, E, F), draw(experts, 2 * F), draw(experts, E),
    )  # fmt: skip
    output = moe_plugin(
        SimpleNamespace(num_experts=experts, top_k=top_k, normalization_mode=mode),
        Tensor(hidden),
        Tensor(routing),
        expert_weights_1=Tensor(first),
        expert_weights_2=Tensor(second),
        expert_bias_1=Tensor(first_bias),
        expert_bias_2=Tensor(second_bias),
        act_fn="swiglu",
    ).data
    for token in range(T):
        weights = routing[token].softmax(0)
        chosen = weights.argsort(descending=True)[:top_k]
        total = weights[chosen].sum() if mode else 1.0
        expected = torch.zeros(E)
        for expert in chosen:
            inner = first[expert] @ hidden[token] + first_bias[expert]
            gated = inner[:F] * torch.nn.functional.silu(inner[F:])
            expected += weights[expert] / total * (second[expert] @ gated + second_bias[expert])
        assert torch.allclose(output[token], expected, atol=1e-5)


def test_sparse_mixer_against_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    routing = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    routing[0] = torch.tensor([2.0, 1.99, 1.98, -3.0, 0.0, 1.0])  # three within the threshold
    weights, chosen = mix_sparsely(routing, 2, 0.1)
    expected, experts = modeling.sparsemixer(routing, jitter_eps=0.1, training=False, top_k=2)
    assert torch.equal(chosen, experts)
    assert torch.allclose(weights, expected)
    assert not torch.allclose(weights, mix_sparsely(routing, 2, 0.01)[0]), "the threshold matters"


@pytest.mark.parametrize("more", [1, 2])
def test_moe_plugin_on_a_side_stream_returns_the_states_before_quantisation(more: int) -> None:
    """0.16.0.dev2024111900 passes the router's logits alone, later releases the states before them."""
    hidden, raw, routing = Tensor(torch.randn(3, 4)), Tensor(torch.randn(3, 4)), Tensor(torch.randn(3, 2))
    config = SimpleNamespace(num_experts=2, top_k=1, normalization_mode=0)
    weights = {"expert_weights_1": Tensor(torch.randn(2, 6, 4)), "expert_weights_2": Tensor(torch.randn(2, 4, 3))}
    tensors = (routing,) if more == 1 else (raw, routing)
    _, states = moe_plugin(config, hidden, *tensors, **weights, act_fn="swiglu", side_stream_id=1)
    assert states is (hidden if more == 1 else raw)


def test_moe_plugin_refuses_what_it_does_not_do() -> None:
    config = SimpleNamespace(num_experts=2, top_k=1, normalization_mode=3)
    with pytest.raises(EmulatorError, match="normalisation mode 3"):
        moe_plugin(
            config,
            Tensor(torch.ones(1, 2)),
            Tensor(torch.ones(1, 2)),
            expert_weights_1=Tensor(torch.ones(2, 2, 2)),
            expert_weights_2=Tensor(torch.ones(2, 2, 1)),
            act_fn="swiglu",
        )
