"""The Triton kernels against plain PyTorch: odd sizes, strided inputs, every kind of mask.

On a GPU as they are; without one in Triton's interpreter, `TRITON_INTERPRET=1`, where Triton is installed.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from porting_kit.emulator import decoder as decoder_module
from porting_kit.emulator import fused_chains, gpu_operations, gpu_products
from porting_kit.emulator.decoder import Decoder, Foresight
from porting_kit.emulator.gpu_operations import (
    attend_rows,
    can_search,
    find_largest,
    move_rows,
    store_rows,
)
from porting_kit.emulator.gpu_products import ProductPlan, multiply
from porting_kit.emulator.triton_import import HAS_TRITON
from porting_kit.medusa import fused_loop
from porting_kit.medusa.decoding import generate_medusa
from tests.medusa.test_fused_loop import TREE, build

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or (DEVICE == "cpu" and not IS_INTERPRETED),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1",
)


ROW, ROWS = ProductPlan("row", 8, 64), ProductPlan("rows", 32, 64)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half().to(DEVICE)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "fan_in", "fan_out", "plan"),
    [
        (1, 200, 70, ProductPlan("row", 8, 64)),
        (1, 64, 33, ProductPlan("row", 1, 128)),
        (5, 200, 70, ProductPlan("rows", 32, 64)),
        (64, 256, 96, ProductPlan("rows", 32, 64, 2)),
        (20, 130, 65, ProductPlan("rows", 64, 64, 2)),
        (40, 130, 65, ProductPlan("rows", 64, 64, 2, block_rows=16)),
        (20, 136, 650, ProductPlan("stream", 64, 64)),
        (64, 264, 70, ProductPlan("stream", 32, 64, 2)),
    ],
)
def test_a_product_of_few_rows(rows: int, fan_in: int, fan_out: int, plan: ProductPlan, has_bias: bool):
    given, weight, bias = draw(rows, fan_in), draw(fan_out, fan_in), draw(fan_out) if has_bias else None
    product = multiply(given, weight.T, bias, plan)
    expected = given.double() @ weight.double().T
    if plan.parts > 1:
        assert product.shape == (plan.parts, rows, fan_out)
        product = product.sum(0)
    elif has_bias:
        expected = expected + bias.double()
    assert float((product.double() - expected).abs().max()) <= 2e-3 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("rows", "plan"),
    [
        (1, ProductPlan("row", 8, 64)),
        (5, ProductPlan("rows", 32, 64)),
        (40, ProductPlan("rows", 64, 64, 2, block_rows=16)),
    ],
)
def test_two_products_of_the_same_rows_side_by_side(rows: int, plan: ProductPlan):
    given, first, second = draw(rows, 130), draw(70, 130), draw(70, 130) + 1
    product = multiply(given, first.T, None, plan, second.T)
    product = product.sum(0) if plan.parts > 1 else product
    expected = given.double() @ torch.cat([first, second]).double().T
    assert product.shape == expected.shape
    assert float((product.double() - expected).abs().max()) <= 2e-3 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("rows", "plan"),
    [
        (1, ProductPlan("row", 8, 64)),
        (5, ProductPlan("rows", 32, 64)),
        (64, ProductPlan("rows", 32, 64, 2)),
        (20, ProductPlan("stream", 64, 64)),
    ],
)
def test_a_product_that_is_not_needed_is_left_out(rows: int, plan: ProductPlan, monkeypatch: pytest.MonkeyPatch):
    given, weight, expected = draw(rows, 136), draw(70, 136), None
    monkeypatch.setattr(torch, "empty", torch.zeros)
    for value in (0, 1, -1):
        skip = torch.tensor([value], dtype=torch.int32, device=DEVICE)
        product = multiply(given, weight.T, None, plan, None, skip)
        product = product.sum(0) if plan.parts > 1 else product
        expected = given.double() @ weight.double().T if value == 0 else torch.zeros_like(expected)
        assert float((product.double() - expected).abs().max()) <= 2e-3 * 136**0.5


@pytest.mark.parametrize(
    ("B", "H", "K", "N", "D", "end", "kind", "softcap"),
    [
        (2, 4, 2, 1, 64, 130, "seen", 0.0),
        (1, 6, 2, 7, 80, 200, "seen", 0.0),
        (1, 4, 4, 20, 64, 256, "bias", 0.0),
        (1, 4, 4, 3, 64, 70, "none", 5.0),
        (1, 2, 1, 70, 32, 90, "bias", 5.0),
        (1, 32, 32, 64, 64, 200, "bias", 0.0),
    ],
)
def test_attention_of_few_queries(B: int, H: int, K: int, N: int, D: int, end: int, kind: str, softcap: float):
    layer, projected = draw(B, 2, K, 300, D), draw(B, N, H + 2 * K, D)
    query = projected[:, :, :H].transpose(1, 2)
    seen = torch.rand(B, 1, N, end, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.3
    bias = torch.randn(B, H, N, end, device=DEVICE).masked_fill(~seen, -math.inf)
    mask = {"none": None, "seen": seen, "bias": bias}[kind]
    found = attend_rows(query, layer, mask, end, 0.3, softcap)
    keys, values = (layer[:, kind, :, :end].double().repeat_interleave(H // K, 1) for kind in (0, 1))
    logits = query.double() @ keys.transpose(-1, -2) * 0.3
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    if mask is not None:
        logits = logits.masked_fill(~seen, -math.inf) if kind == "seen" else logits + bias
    expected = (logits.softmax(-1) @ values).transpose(1, 2)
    assert found.dtype is torch.float16
    assert float((found.double() - expected).abs().max()) <= 1e-3


def test_new_rows_go_behind_each_past_and_nowhere_else():
    layer, projected, pasts = draw(2, 2, 3, 50, 24), draw(2, 4, 9, 24), torch.tensor([[5], [46]], device=DEVICE)
    keys, values = projected[:, :, 3:6], projected[:, :, 6:]
    expected = layer.clone()
    for request, past in enumerate((5, 46)):
        expected[request, 0, :, past : past + 4] = keys[request].transpose(0, 1)
        expected[request, 1, :, past : past + 4] = values[request].transpose(0, 1)
    store_rows(layer, pasts, keys, values)
    assert torch.equal(layer, expected)


def test_accepted_rows_move_together_in_every_layer():
    joined, pasts = draw(3, 2, 2, 2, 40, 24), torch.tensor([[5], [30]], device=DEVICE)
    rows = torch.tensor([[0, 2, 3, 7], [0, 1, -1, -1]], device=DEVICE)
    expected = joined.clone()
    expected[:, 0, :, :, 5:9] = joined[:, 0][:, :, :, [5, 7, 8, 12]]
    move_rows(joined, rows, pasts)
    assert torch.equal(joined, expected)


@pytest.mark.parametrize(("length", "count"), [(100, 3), (4096, 10), (10_000, 16)])
def test_the_largest_elements_in_order(length: int, count: int):
    rows = (draw(2, 3, length) * 4).round()  # many equals
    values, places = find_largest(rows, count)
    assert can_search(length, count)
    assert torch.equal(values, rows.topk(count, dim=-1).values)
    ordered = rows.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    assert torch.equal(places, ordered)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zeros_of_both_signs_are_equal_and_nothing_behind_the_end_is_found(dtype: torch.dtype):
    rows = torch.full((1, 40), -math.inf, dtype=dtype, device=DEVICE)
    rows[0, [7, 3, 30]] = torch.tensor([0.0, -0.0, 2.5], dtype=dtype, device=DEVICE)
    values, places = find_largest(rows, 5)
    assert places[0, :3].tolist() == [30, 3, 7]
    assert values[0].tolist() == [2.5, 0.0, 0.0, -math.inf, -math.inf]
    assert int(places.max()) < 40


def test_what_is_not_searched():
    assert not can_search(1000, 33)
    assert not can_search(2_000_000, 32)


@pytest.mark.skipif(DEVICE == "cpu", reason="measures on a GPU")
def test_the_plan_is_measured_once_a_shape():
    weight = draw(256, 128).T
    plan = gpu_products.find_plan(1, [weight], None)
    assert gpu_products.find_plan(1, [weight], None) is plan
    assert plan in (gpu_products.LIBRARY, *gpu_products.ROW_PLANS)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_whole_step_with_the_kernels_is_the_eager_step(family: str, monkeypatch: pytest.MonkeyPatch):
    """Half precision, tree and cache through the kernels; `check` compares with the eager step and raises."""
    monkeypatch.setattr(gpu_operations, "has_kernels", lambda device, dtype: True)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch, "compile", lambda module, **options: module)
        monkeypatch.setattr(fused_chains, "_compiled", {})
    model = build(family, DEVICE, "float16")
    model.decoders.compiles = True
    decoder = Decoder(model, 2, 60, TREE.position_offsets, TREE.packed_mask)
    with torch.inference_mode():
        model.prefill([torch.arange(9).to(DEVICE), torch.arange(14).to(DEVICE)], decoder.cache)
        ids = torch.arange(2 * TREE.num_nodes, device=DEVICE).view(2, -1) + 3
        decoder.check(ids)
        program = next(iter(decoder._programs.values()))._call
        called = {str(node.target) for node in program.graph.nodes}
        assert {"porting_kit.attend_rows.default", "porting_kit.store_rows.default"} <= called
        before = decoder.cache.joined.clone()
        rows = torch.tensor([[0, 2, 5], [0, 1, -1]], device=DEVICE)
        decoder.keep(rows, decoder.cache.lengths.to(DEVICE).unsqueeze(1))
        assert torch.equal(decoder.cache.joined[:, 0, :, :, 10:12], before[:, 0, :, :, [11, 14]])


@pytest.mark.parametrize("order", [[0, 1, 2], [5, 6, 7]])
def test_heads_at_foreseen_nodes_give_the_same_texts(order: list[int], monkeypatch: pytest.MonkeyPatch):
    """Random heads are not accepted: steps end at the root, which takes the logits from there or reads them again."""
    monkeypatch.setattr(gpu_operations, "has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(gpu_products, "find_plan", lambda rows, *given, **named: ROW if rows == 1 else ROWS)
    monkeypatch.setattr(gpu_products, "find_pair_plan", lambda *given: None)
    monkeypatch.setattr(decoder_module, "can_write_down", lambda model: True)
    monkeypatch.setattr(fused_loop, "likely_last", lambda tree: order)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch, "compile", lambda module, **options: module)
        monkeypatch.setattr(fused_chains, "_compiled", {})
    model = build("llama", DEVICE, "float16")
    model.decoders.compiles, found = True, []
    for nodes in (0, 3):
        monkeypatch.setitem(decoder_module.FORESIGHT, DEVICE, Foresight(nodes, 128, 0))
        model.decoders._kept.clear()
        found.append(generate_medusa(model, TREE, [torch.arange(9).to(DEVICE)], 4))
        assert list(next(iter(model.decoders._kept.values())).foreseen) == order[:nodes]
    assert found[0].tokens == found[1].tokens
    assert found[0].accepted_lengths == found[1].accepted_lengths


def test_a_step_that_stores_rows_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch):
    """Seeded fault: new rows go one place too far, and the comparison with the eager step says so."""
    monkeypatch.setattr(gpu_operations, "has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(fused_chains, "_compiled", {})
    right = gpu_operations.store_rows
    monkeypatch.setattr(gpu_operations, "store_rows", lambda layer, pasts, *new: right(layer, pasts + 1, *new))
    model = build("llama", DEVICE, "float16")
    model.decoders.compiles = True
    decoder = Decoder(model, 1, 60, TREE.position_offsets, TREE.packed_mask)
    with torch.inference_mode():
        model.prefill([torch.arange(9).to(DEVICE)], decoder.cache)
        with pytest.raises(RuntimeError, match="differs from the eager step"):
            decoder.check(torch.arange(TREE.num_nodes, device=DEVICE).unsqueeze(0) + 3)
