"""Rules check themselves when they are declared, and know shapes without values."""

from __future__ import annotations

import re

import pytest

from porting_kit.architectures import load_families
from porting_kit.architectures import operations as ops
from porting_kit.architectures.fields import size
from porting_kit.architectures.names import TensorSpec, evaluate_dim, match_name
from porting_kit.architectures.rules import COLUMN, Drop, Rule, Shard, condition_terms, fuse, only_when, rename

A = TensorSpec.parse("a [E]")
DIMS = {"E": 8, "H": 4, "K": 2, "D": 2, "L": 3, "I": 6, "X": 2, "J": 3, "V": 11}


@pytest.mark.parametrize(("expression", "value"), [("H*D", 8), ("H*D+2*K*D", 16), ("H//K", 2), ("4*E-I", 26), ("3", 3)])
def test_shape_expressions(expression: str, value: int) -> None:
    assert evaluate_dim(expression, DIMS) == value


@pytest.mark.parametrize("expression", ["Z", "H**2", "__import__('os')", "H*", "H/2", "[H]", "H if K else D"])
def test_anything_but_arithmetic_on_letters_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="shape expression"):
        evaluate_dim(expression, DIMS)


def test_a_size_the_model_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"needs \['G'\]"):
        evaluate_dim("G", DIMS)


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("model.layers.{i}.mlp.weight", "model.layers.12.mlp.weight", {"i": 12}),
        ("model.layers.{i}.mlp.weight", "model.layers.x.mlp.weight", None),
        ("model.layers.{i}.mlp.weight", "model.layers.1.2.mlp.weight", None),
        ("layers.{i}.experts.{e}.w1", "layers.3.experts.0.w1", {"i": 3, "e": 0}),
        ("{i}.{i}.weight", "1.2.weight", None),
        ("{i}.{i}.weight", "2.2.weight", {"i": 2}),
        ("lm_head.weight", "model.lm_head.weight", None),
        ("linear1.weight", "linear2.weight", None),
    ],
)
def test_names_match_component_by_component(pattern: str, name: str, found: dict | None) -> None:
    assert match_name(pattern, name) == found


def test_a_rule_expands_over_layers_and_experts() -> None:
    rule = Rule(
        "t.layers.{i}.fc",
        (TensorSpec.parse("s.{i}.e.{e}.up [J,E]"), TensorSpec.parse("s.{i}.e.{e}.gate [J,E]")),
        (ops.Concatenate(0), ops.Stack()),
    )
    expanded = list(rule.expand(DIMS))
    assert [target for _, target, _ in expanded] == ["t.layers.0.fc", "t.layers.1.fc", "t.layers.2.fc"]
    assert [name for name, _ in expanded[1][2]] == ["s.1.e.0.up", "s.1.e.0.gate", "s.1.e.1.up", "s.1.e.1.gate"]
    assert rule.target_shape([shape for _, shape in expanded[1][2]], DIMS) == (2, 6, 8)


def test_a_rule_can_be_for_some_layers() -> None:
    rule = Rule("t.{i}.w", (TensorSpec.parse("s.{i}.w [E]"),), layers=("1", "L"))
    assert [target for _, target, _ in rule.expand(DIMS)] == ["t.1.w", "t.2.w"]


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: TensorSpec.parse("model.norm.weight"), "is not written as"),
        (lambda: TensorSpec.parse("model.{z}.weight [E]"), "unknown placeholder"),
        (lambda: TensorSpec.parse("model.l{i}.weight [E]"), "neither text nor a placeholder"),
        (lambda: TensorSpec.parse("model.norm.weight [W]"), "unknown letters"),
        (lambda: rename("a.weight [E]", "t.{i}.weight"), "lacks"),
        (lambda: Rule("t.w", (), pipeline="last"), "has no source"),
        (
            lambda: Rule("t.w", (TensorSpec.parse("a [E]"), TensorSpec.parse("b [E]")), pipeline="last"),
            "nothing that joins",
        ),
        (lambda: Rule("t.w", (TensorSpec.parse("a.{e} [E]"),), pipeline="last"), "nothing that joins"),
        (lambda: rename("a [E]", "t.w", pipeline="layer"), "carry the layer number"),
        (lambda: rename("a.{i} [E]", "t.{i}", pipeline="first"), "carry the layer number"),
        (lambda: rename("a [E]", "t.w", pipeline="middle"), "is not layer, first or last"),
        (lambda: Shard(None, vocabulary=True), "replicated tensor"),
        (lambda: Shard(0, blocks=("H",), heads=("H", "K")), "names the heads of every block"),
        (lambda: Shard(0, first_rank_only=True), "is not split"),
        (lambda: ops.ReorderBlocks((0, 2)), "is no permutation"),
        (lambda: ops.Take(("I", "I"), 2), "does not exist"),
        (lambda: ops.Scale(0), "cannot be undone"),
        (lambda: ops.Ungroup("W", ("1",)), "unknown letters"),
        (lambda: Drop("a.weight", ""), "needs a reason"),
        (lambda: size("width", "2*W", "why"), "unknown letters"),
        (lambda: Rule("t.w", (TensorSpec.parse("a [V,P]"),), (ops.Product(),), pipeline="last"), "not two"),
    ],
)
def test_rules_refuse_to_be_declared_wrong(declare, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        declare()


@pytest.mark.parametrize(
    ("operation", "shapes", "text"),
    [
        (ops.Concatenate(0), [(2, 3), (2, 4)], "cannot concatenate"),
        (ops.Stack(), [(2, 3), (2, 4)], "cannot stack"),
        (ops.Product(), [(2, 3), (4, 5)], "cannot multiply"),
        (ops.Product(), [(2, 3)], "two matrices"),
        (ops.Ungroup("H", ("1", "1", "1")), [(23, 8)], "are not 4 groups"),
        (ops.ReorderBlocks((1, 0)), [(3, 2)], "does not divide into 2"),
        (ops.Reshape(("X", "J", "E")), [(5, 8)], "does not hold"),
        (ops.Take(("I", "I"), 0), [(11, 8)], "blocks"),
        (ops.SkipRows(3), [(3, 8)], "cannot skip"),
        (ops.PadRows("V"), [(12, 8)], "do not fit"),
    ],
)
def test_operations_refuse_shapes_that_do_not_fit(operation, shapes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        operation.output_shapes(shapes, DIMS)


def test_conditions_are_joined() -> None:
    (rule,) = only_when([fuse(["a.{i} [E]", "b.{i} [E]"], "t.{i}", shard=COLUMN, when="bias")], "!parallel")
    assert condition_terms(rule.when) == [("bias", True), ("parallel", False)]


def test_rules_that_only_move_values_say_so() -> None:
    assert fuse(["a.{i} [E]", "b.{i} [E]"], "t.{i}", ops.ReorderBlocks((1, 0))).invertible
    assert not fuse(["a.{i} [E]", "b.{i} [E]"], "t.{i}", ops.Add(1.0)).invertible


@pytest.mark.parametrize("family", load_families().values(), ids=lambda family: family.name)
def test_every_family_cites_its_sources_and_writes_each_target_once(family) -> None:
    module = __import__(f"porting_kit.architectures.families.{family.name}", fromlist=["FAMILY"])
    assert "tensorrt_llm/models/" in module.__doc__
    targets = [row.target for row in family.all_fields]
    rows = [(row.target, row.when) for row in family.all_fields]
    assert len(rows) == len(set(rows)), "two rows under the same condition"
    assert {"architecture", "hidden_size", "num_key_value_heads", "head_size", "norm_epsilon"} <= set(targets)
    for requirement in family.requirements:
        assert requirement.effect
        assert re.search(r" [01]\.\d", requirement.source), "a source names its release"
