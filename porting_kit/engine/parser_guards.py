"""What a tree's command refuses after parsing: the `raise` and `assert` lines on its arguments, read from its source.

argparse knows nothing of flags that need or exclude each other; upstream tests that by hand, behind the parser. Those
lines are walked in order, with the values a command line would give. Only tests that rest on the arguments alone are
judged; one that needs the machine, a file or a computed default counts as unknown and refuses nothing.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from porting_kit.engine.build_parser import ABSENT, COMPUTED, parse_source

COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}


@dataclass(frozen=True)
class GuardFault:
    """A line of the source that would stop this command: what it says, and where it stands."""

    message: str
    source: str


def find_guard_fault(file: Path, functions: tuple[str, ...], values: Mapping[str, object]) -> GuardFault | None:
    """The first `raise` or `assert` that these arguments run into, None when there is none.

    Args:
        file: commands/build.py or examples/run.py.
        functions: names of functions to walk, in order.
        values: attribute of the parsed arguments -> value, `COMPUTED` where only the run knows it.

    Raises:
        SourceTreeError: the file is missing or cannot be parsed.
    """
    module = parse_source(file)
    bodies = {node.name: node.body for node in module.body if isinstance(node, ast.FunctionDef)}
    walk = _Walk(dict(values))
    for name in functions:
        try:
            walk.run(bodies.get(name, []))
        except _Stopped as stopped:
            return GuardFault(stopped.message, f"{file.parent.name}/{file.name} l.{stopped.line}")
    return None


class _Stopped(Exception):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message, self.line = message, line


class _Walk:
    """Runs the statements that the arguments decide, in order."""

    def __init__(self, values: dict[str, object]) -> None:
        self.values = values

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.If):
                test = self.evaluate(statement.test)
                if test is not COMPUTED:
                    self.run(statement.body if test else statement.orelse)
            elif isinstance(statement, ast.With | ast.Try):
                self.run(statement.body)
            elif isinstance(statement, ast.Assign):
                self.assign(statement)
            elif isinstance(statement, ast.Raise):
                raise _Stopped(_exception_text(statement.exc), statement.lineno)
            elif isinstance(statement, ast.Assert) and self.evaluate(statement.test) in (False, None, 0):
                said = statement.msg
                text = said.value if isinstance(said, ast.Constant) else ast.unparse(statement.test)
                raise _Stopped(str(text), statement.lineno)

    def assign(self, statement: ast.Assign) -> None:
        for target in statement.targets:
            if _argument_name(target) is not None:
                self.values[target.attr] = self.evaluate(statement.value)

    def evaluate(self, node: ast.expr) -> object:
        """The value of an expression, COMPUTED when the arguments alone do not decide it."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items = [self.evaluate(item) for item in node.elts]
            return COMPUTED if COMPUTED in items else items
        if _argument_name(node) is not None:
            value = self.values.get(node.attr, COMPUTED)
            return COMPUTED if value == ABSENT else value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.evaluate(node.operand)
            return COMPUTED if value is COMPUTED else not value
        if isinstance(node, ast.BoolOp):
            return self._evaluate_chain(node)
        if isinstance(node, ast.Compare):
            return self._evaluate_comparison(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr" and len(node.args) == 2:
            name = node.args[1]
            if ast.unparse(node.args[0]) == "args" and isinstance(name, ast.Constant):
                return self.values.get(name.value, ABSENT) != ABSENT
        return COMPUTED

    def _evaluate_chain(self, node: ast.BoolOp) -> object:
        """`and` is false as soon as one part is, `or` true; otherwise one unknown part makes all unknown."""
        values = [self.evaluate(part) for part in node.values]
        decisive = isinstance(node.op, ast.Or)
        if any(value is not COMPUTED and bool(value) is decisive for value in values):
            return decisive
        return COMPUTED if COMPUTED in values else not decisive

    def _evaluate_comparison(self, node: ast.Compare) -> object:
        values = [self.evaluate(part) for part in (node.left, *node.comparators)]
        if COMPUTED in values:
            return COMPUTED
        try:
            pairs = zip(values[:-1], node.ops, values[1:], strict=True)
            return all(COMPARISONS[type(op)](one, two) for one, op, two in pairs)
        except TypeError:  # such as None > 0, where the real command would end in a TypeError of its own
            return COMPUTED


def _argument_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
        return node.attr
    return None


def _exception_text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return "raised without a text" if node is None else ast.unparse(node)
