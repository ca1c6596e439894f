"""Runs of small operations: the same values, one compilation for like layers, order kept around in-place operations."""

from __future__ import annotations

import pytest
import torch

from porting_kit.emulator import fused_chains, product_passes
from porting_kit.emulator.program import write_program


@pytest.fixture(autouse=True)
def as_they_are(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """Runs are kept in a list in place of being compiled, which needs a compiler."""
    taken: list[torch.nn.Module] = []

    def take(module: torch.nn.Module, **options: object) -> torch.nn.Module:
        assert options == {"fullgraph": True, "dynamic": False}
        taken.append(module)
        return module

    monkeypatch.setattr(fused_chains, "_compiled", {})
    monkeypatch.setattr(torch, "compile", take)
    return taken


def layer(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    normed = rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
    first, second = (normed @ weight).chunk(2, -1)
    return rows + first * torch.sigmoid(second)


def test_like_layers_are_compiled_once(as_they_are: list[torch.nn.Module]):
    weights, scales = torch.randn(3, 8, 16), torch.randn(3, 8)

    def run(rows: torch.Tensor) -> torch.Tensor:
        for weight, scale in zip(weights, scales, strict=True):
            rows = layer(rows, weight, scale)
        return rows * 2 + 1

    program = write_program(run, (torch.zeros(4, 8),), compiles=True)
    given = torch.randn(4, 8)
    assert torch.allclose(program(given), run(given), atol=1e-6)
    # before the first product, between two, behind the last
    assert len(as_they_are) == 3
    assert sum(node.op == "call_module" for node in program.graph.nodes) == 4


def test_a_change_in_place_stays_between_the_runs():
    def run(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        before = state[0] * 2 + 1
        state[1:] = rows.exp() + 1
        return before + state[1] * 3

    program = write_program(run, (torch.zeros(3, 4), torch.zeros(2, 4)), compiles=True)
    ours, theirs, rows = torch.ones(3, 4), torch.ones(3, 4), torch.randn(2, 4)
    assert torch.equal(program(ours, rows), run(theirs, rows))
    assert torch.equal(ours, theirs)


def test_another_shape_is_another_run(as_they_are: list[torch.nn.Module]):
    for width in (4, 5, 4):
        write_program(lambda rows: rows * 2 + 1, (torch.zeros(2, width),), compiles=True)
    assert len(as_they_are) == 2


def test_what_is_worth_a_run():
    def run(rows: torch.Tensor) -> torch.Tensor:
        return (rows.view(-1, 2) + 1).t() @ rows.view(-1, 2)

    program = write_program(run, (torch.zeros(4, 4),), compiles=True)
    assert not [node for node in program.graph.nodes if node.op == "call_module"]
    rows = torch.randn(4, 4)
    assert torch.equal(program(rows), run(rows))


def test_a_product_moves_up_but_not_past_a_change_of_what_it_reads(as_they_are: list[torch.nn.Module]):
    weights = torch.randn(3, 4, 4)

    def run(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(rows @ weights[0]) * 2
        up = gate * (rows.exp() @ weights[1])
        state += 1
        return up + state @ weights[2] + 1

    program = write_program(run, (torch.zeros(2, 4), torch.zeros(2, 4)), compiles=True)
    ours, theirs, rows = torch.ones(2, 4), torch.ones(2, 4), torch.randn(2, 4)
    assert torch.allclose(program(ours, rows), run(theirs, rows), atol=1e-6)
    order = [str(node.target) for node in program.graph.nodes if node.op != "get_attr"]
    # both products before the run between them, the third behind the change
    assert order.index("aten.add_.Tensor") > max(i for i, name in enumerate(order[:-4]) if name == "aten.mm.default")
    assert [str(node.target) for node in as_they_are[0].graph.nodes if node.op == "call_function"][:2] == [
        "aten.sigmoid.default",
        "aten.mul.Tensor",
    ]


def test_equal_constants_and_what_is_made_of_them_are_there_once():
    def run(rows: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            slopes = torch.tensor([1.0, 2.0, 3.0, 4.0]) * torch.tensor(2.0)
            rows = rows + (rows.new_ones(4) * slopes).sin() * rows.sum() / torch.tensor(0.5)
        return rows

    plain = write_program(run, (torch.zeros(4),))
    rows = torch.randn(4)
    assert torch.allclose(plain(rows), run(rows))
    assert len([node for node in plain.graph.nodes if node.op == "get_attr"]) == 2


def test_a_value_read_before_and_after_a_change_is_read_twice():
    def run(state: torch.Tensor) -> torch.Tensor:
        before = state.sum()
        state += 1
        return before * state.sum()

    program = write_program(run, (torch.zeros(3),))
    assert float(program(torch.ones(3))) == 18.0


def test_a_bias_joins_its_product():
    weight, bias = torch.randn(4, 6), torch.randn(6)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return (rows @ weight).view(1, 2, 6) + bias

    module = write_program(run, (torch.zeros(2, 4),))
    product_passes.take_biases(module)
    module.recompile()
    rows = torch.randn(2, 4)
    assert torch.allclose(module(rows), run(rows), atol=1e-6)
    targets = [str(node.target) for node in module.graph.nodes]
    assert "aten.addmm.default" in targets
    assert "aten.add.Tensor" not in targets


def test_what_is_only_written_from_is_not_taken_as_changed():
    def run(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        first = (rows * 2).sin()
        state[1:] = rows
        return first + (rows * 2).sin() + state.sum()

    program = write_program(run, (torch.zeros(3, 4), torch.zeros(2, 4)))
    assert sum(str(node.target) == "aten.sin.default" for node in program.graph.nodes) == 1
    rows = torch.randn(2, 4)
    assert torch.allclose(program(torch.ones(3, 4), rows), run(torch.ones(3, 4), rows))


def test_products_of_equal_matrices_become_one():
    weight = torch.randn(6, 4)
    copies = [weight.clone() for _ in range(3)]

    def run(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.nn.functional.linear(rows + head, copy) for head, copy in enumerate(copies)])

    program = write_program(run, (torch.zeros(1, 4),))
    products = [
        name for name in map(str, (node.target for node in program.graph.nodes)) if ".mm." in name or "_linear" in name
    ]
    assert len(products) == 1
    rows = torch.randn(1, 4)
    assert torch.allclose(program(rows), run(rows), atol=1e-5)
    copies[2][0, 0] += 1
    assert torch.allclose(write_program(run, (torch.zeros(1, 4),))(rows), run(rows), atol=1e-5)
