"""Which kernel a product gets: pairs of the same rows in one launch, parts added up, what is cut paid for."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from porting_kit.emulator import gpu_operations, gpu_products, product_passes, program_passes
from porting_kit.emulator.gpu_products import LIBRARY, ProductPlan

PLAN = ProductPlan("rows", 32, 64)
SPLIT = ProductPlan("rows", 32, 64, parts=2)


def multiply(rows, weight, bias, plan, second=None, skip=None):
    """What the kernels return, by PyTorch."""
    product = rows @ (weight if second is None else torch.cat([weight, second], 1))
    product = product if bias is None or plan.parts > 1 else product + bias
    if plan.parts == 1:
        return product
    first = product.float() / 4
    return torch.stack([first, product.float() - first])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The plans that were asked for: (rows, how many weights, is_taken_in), pairs as (rows, how many)."""
    found: list[tuple] = []

    def find_plan(rows, weights, bias, *, is_taken_in, has_library):
        found.append((rows, len(weights), is_taken_in))
        return SPLIT if is_taken_in else PLAN

    def find_pair_plan(rows, pairs):
        found.append((rows, len(pairs)))
        return SPLIT

    monkeypatch.setattr(gpu_operations, "has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(gpu_products, "multiply", multiply)
    monkeypatch.setattr(gpu_products, "find_plan", find_plan)
    monkeypatch.setattr(gpu_products, "find_pair_plan", find_pair_plan)
    return found


def place(function, rows: torch.Tensor) -> torch.fx.GraphModule:
    module = make_fx(function)(rows)
    program_passes.fold_constants(module)
    product_passes.place_products(module)
    program_passes.remove_dead(module)
    module.graph.lint()
    module.recompile()
    return module


def count_products(module: torch.fx.GraphModule) -> int:
    return sum(node.target is multiply for node in module.graph.nodes)


GATE, UP, DOWN = (torch.randn(n, m, generator=torch.Generator().manual_seed(n)) for n, m in ((24, 8), (25, 8), (8, 26)))


def run_mlp(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows @ GATE.T, rows @ UP[:24].T
    return torch.nn.functional.silu(gate) * up @ DOWN[:, :24].contiguous().T


def test_a_gate_and_what_it_gates_are_one_product(asked: list[tuple]):
    rows = torch.randn(5, 8)
    module = place(run_mlp, rows)
    assert asked == [(5, 1), (5, 1, True)]
    assert count_products(module) == 2
    assert torch.allclose(module(rows), run_mlp(rows), atol=1e-4)


def test_they_stay_two_where_that_is_faster(asked: list[tuple], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_products, "find_pair_plan", lambda rows, pairs: None)
    rows = torch.randn(5, 8)
    module = place(run_mlp, rows)
    assert asked == [(5, 2, True), (5, 1, True)]
    assert count_products(module) == 3
    assert torch.allclose(module(rows), run_mlp(rows), atol=1e-4)


def write_shared(function, rows: torch.Tensor) -> torch.fx.GraphModule:
    module = make_fx(function)(rows)
    program_passes.fold_constants(module)
    program_passes.share_results(module)
    product_passes.share_products(module)
    product_passes.join_slices(module)
    program_passes.remove_dead(module)
    module.graph.lint()
    module.recompile()
    return module


def count(module: torch.fx.GraphModule, name: str) -> int:
    return sum(str(node.target) == name for node in module.graph.nodes)


def test_a_matrix_is_read_once_where_its_first_product_is_used_before_the_second_can_run():
    def run(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = (rows @ GATE.T).to(torch.float64)  # used at once, as a base's logits are
        heads = [torch.tanh(rows[:2] + shift) @ GATE.T for shift in (1, 2)]
        return logits, torch.stack(heads)

    rows = torch.randn(5, 8)
    module = write_shared(run, rows)
    assert count(module, "aten.mm.default") == 1
    assert count(module, "aten.stack.default") == 0
    for ours, theirs in zip(module(rows), run(rows), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_product_that_needs_the_first_ones_result_stays_apart():
    def run(rows: torch.Tensor) -> torch.Tensor:
        first = rows @ GATE.T
        return torch.tanh(first[:, :8]) @ GATE.T + first

    rows = torch.randn(5, 8)
    module = write_shared(run, rows)
    assert count(module, "aten.mm.default") == 2
    assert torch.allclose(module(rows), run(rows), atol=1e-6)


def test_what_is_changed_later_is_read_before_the_change():
    """The first product's reader reads a state that changes before the second product can run: nothing may move."""
    state = torch.ones(5, 24)

    def run(rows: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = rows @ GATE.T + state
        state += 1
        return first, (rows + state[:, :8]) @ GATE.T

    rows = torch.randn(5, 8)
    module = make_fx(run)(rows, state.clone())
    program_passes.fold_constants(module)
    product_passes.share_products(module)
    module.recompile()
    for ours, theirs in zip(module(rows, state.clone()), run(rows, state.clone()), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("pieces", [((0, 2), (3, 5)), ((2, 4), (0, 2)), ((0, 2), (1, 3))])
def test_pieces_that_are_no_neighbours_stay_a_stack(pieces: tuple[tuple[int, int], ...]):
    def run(rows: torch.Tensor) -> torch.Tensor:
        product = rows @ GATE.T
        return torch.stack([product[start:end] for start, end in pieces])

    rows = torch.randn(5, 8)
    module = write_shared(run, rows)
    assert count(module, "aten.stack.default") == 1
    assert torch.equal(module(rows), run(rows))


def test_an_odd_product_of_the_same_rows_stays_alone(asked: list[tuple]):
    weights = torch.randn(3, 24, 8)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return rows @ weights[0].T + rows @ weights[1].T * (rows @ weights[2].T)

    rows = torch.randn(5, 8)
    module = place(run, rows)
    assert asked == [(5, 1), (5, 1, True)]
    assert torch.allclose(module(rows), run(rows), atol=1e-4)


def test_other_rows_are_no_pair(asked: list[tuple]):
    def run(rows: torch.Tensor) -> torch.Tensor:
        return (rows @ GATE.T) + (rows * 2) @ UP[:24].T

    rows = torch.randn(5, 8)
    module = place(run, rows)
    assert asked == [(5, 2, True)]
    assert torch.allclose(module(rows), run(rows), atol=1e-4)


def test_a_product_that_is_cut_pays_for_adding_its_parts(asked: list[tuple]):
    def run(rows: torch.Tensor) -> torch.Tensor:
        query, key, value = (rows @ GATE.T).view(1, 5, 24).split([8, 8, 8], -1)
        return query + key * value

    rows = torch.randn(5, 8)
    module = place(run, rows)
    assert asked == [(5, 1, False)]
    assert torch.allclose(module(rows), run(rows), atol=1e-4)


@pytest.mark.parametrize(("pair_ms", "expected"), [(1.9, PLAN), (2.0, None), (float("inf"), None)])
def test_a_pair_must_be_faster_than_two(pair_ms: float, expected: ProductPlan | None, monkeypatch: pytest.MonkeyPatch):
    times = {LIBRARY: 3.0, PLAN: 1.0}
    monkeypatch.setattr(gpu_products, "_plans", {})
    monkeypatch.setattr(gpu_products, "ROWS_PLANS", (PLAN, SPLIT))
    monkeypatch.setattr(gpu_products, "SMALL_PLANS", ())

    def time_plan(rows, weights, bias, plan):
        return (pair_ms if plan == PLAN else 9.0) if len(weights[0]) == 2 else times.get(plan, 5.0)

    monkeypatch.setattr(gpu_products, "time_plan", time_plan)
    weights = torch.randn(2, 200, 16)
    assert gpu_products.find_pair_plan(4, [(weights[0], weights[1])]) == expected
    assert gpu_products.find_plan(4, list(weights), None) == PLAN


def test_the_launch_that_adds_parts_up_is_counted(monkeypatch: pytest.MonkeyPatch):
    times = {LIBRARY: 9.0, PLAN: 1.0, SPLIT: 1.0 - gpu_products.LAUNCH_MS / 2}
    monkeypatch.setattr(gpu_products, "_plans", {})
    monkeypatch.setattr(gpu_products, "ROWS_PLANS", (PLAN, SPLIT))
    monkeypatch.setattr(gpu_products, "SMALL_PLANS", ())
    monkeypatch.setattr(gpu_products, "time_plan", lambda rows, weights, bias, plan: times[plan])
    weight = torch.randn(200, 16)
    assert gpu_products.find_plan(4, [weight], None) == SPLIT
    assert gpu_products.find_plan(4, [weight], None, is_taken_in=False) == PLAN


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_the_same_rows_are_one_with_a_joined_weight(has_bias: bool):
    weights = [GATE + shift for shift in range(4)]
    biases = [torch.arange(24.0) * shift for shift in range(4)]

    def run(rows: torch.Tensor) -> torch.Tensor:
        given = torch.tanh(rows)
        products = [
            given @ weight.T + bias if has_bias else given @ weight.T
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return torch.stack([torch.sigmoid(product) + rows.sum() for product in products])

    rows = torch.randn(5, 8)
    module = make_fx(run)(rows)
    program_passes.fold_constants(module)
    product_passes.take_biases(module)
    product_passes.join_weights(module)
    program_passes.remove_dead(module)
    module.graph.lint()
    module.recompile()
    assert count(module, "aten.mm.default") + count(module, "aten.addmm.default") == 1
    assert torch.allclose(module(rows), run(rows), atol=1e-5)


@pytest.mark.parametrize(("products", "left"), [(2, 1 << 20), (4, 1000)])
def test_two_products_and_large_weights_stay_as_they_are(products: int, left: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(product_passes, "JOINED_BYTES", left)
    weights = [GATE + shift for shift in range(products)]
    module = make_fx(lambda rows: [rows @ weight.T for weight in weights])(torch.randn(5, 8))
    program_passes.fold_constants(module)
    product_passes.join_weights(module)
    assert count(module, "aten.mm.default") == products


def test_a_joined_product_that_may_be_left_out(asked: list[tuple]):
    def run(rows: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.stack([rows @ (GATE + shift).T for shift in range(3)]) + 0 * skip

    rows, skip = torch.randn(5, 8), torch.zeros(1)
    module = make_fx(run)(rows, skip)
    program_passes.fold_constants(module)
    product_passes.join_weights(module)
    program_passes.remove_dead(module)
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    product_passes.place_products(module, skip=given[-1])
    module.graph.lint()
    module.recompile()
    assert count_products(module) == 1
    assert torch.allclose(module(rows, skip), run(rows, skip), atol=1e-4)
