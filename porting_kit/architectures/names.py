"""Tensor names and shape expressions: the two small languages that weight rules are written in.

Names are matched component by component (split on dots), never by a regular expression over the whole name: Medusa
keys such as `1.0.linear.weight` hold numbers that are not layer numbers. Shapes are arithmetic on letters.

Letters in shape expressions: E hidden size, D head size, H query heads, K key/value heads, L layers, I width of the
MLP, J width of one expert, G width of the shared expert, X experts, V vocabulary, S learned positions, Q rotary dims
of one head, P width of the embeddings where it is not E.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

LETTERS = frozenset("EDHKLIJGXVSQP")
INDICES = {"i": "L", "e": "X"}  # placeholder in a tensor name -> the letter that counts it

Shape = tuple[int, ...]
Dims = Mapping[str, int]

_COMPONENT = re.compile(r"^(\{[a-z]\}|[^{}]+)$")


@lru_cache(maxsize=4096)
def _compile_expression(expression: str) -> tuple[object, frozenset[str]]:
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"shape expression {expression!r} is not arithmetic: {error.msg}") from None
    letters = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            letters.add(node.id)
        elif not isinstance(
            node,
            (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Constant, ast.Load),
        ):
            raise ValueError(f"shape expression {expression!r} uses {type(node).__name__}: only + - * // are known")
    unknown = sorted(letters - LETTERS)
    if unknown:
        raise ValueError(f"shape expression {expression!r} uses unknown letters {unknown}")
    return compile(tree, "<shape>", "eval"), frozenset(letters)


def evaluate_dim(expression: str, dims: Dims) -> int:
    """The value of a shape expression such as `H*D+2*K*D`; ValueError when it is no arithmetic on known letters."""
    code, letters = _compile_expression(expression)
    missing = sorted(letters - dims.keys())
    if missing:
        raise ValueError(f"shape expression {expression!r} needs {missing}, which this model's config does not give")
    return int(eval(code, {"__builtins__": {}}, dict(dims)))  # whitelisted arithmetic only, see _compile_expression


def check_expression(expression: str) -> None:
    """Raise ValueError when `expression` is not arithmetic on the known letters."""
    _compile_expression(expression)


def check_pattern(pattern: str) -> None:
    """Raise ValueError unless every dotted component is plain text or one placeholder such as `{i}`."""
    for component in pattern.split("."):
        if not _COMPONENT.match(component):
            raise ValueError(f"tensor name {pattern!r}: component {component!r} is neither text nor a placeholder")
        if component.startswith("{") and component[1:-1] not in INDICES:
            raise ValueError(f"tensor name {pattern!r}: unknown placeholder {component}, known: {sorted(INDICES)}")


def match_name(pattern: str, name: str) -> dict[str, int] | None:
    """Match component by component: the numbers of the placeholders, or None.

    `1.0.linear.weight` is not the layer number 1 or 0 of anything unless a component says so.
    """
    parts, wanted = name.split("."), pattern.split(".")
    if len(parts) != len(wanted):
        return None
    numbers: dict[str, int] = {}
    for part, want in zip(parts, wanted, strict=True):
        if want.startswith("{"):
            if not part.isdecimal() or numbers.setdefault(want[1:-1], int(part)) != int(part):
                return None
        elif part != want:
            return None
    return numbers


def placeholders(pattern: str) -> tuple[str, ...]:
    """The placeholders of a name, in order of appearance."""
    return tuple(dict.fromkeys(c[1:-1] for c in pattern.split(".") if c.startswith("{")))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor name with its shape as expressions: `model.norm.weight [E]`."""

    name: str
    shape: tuple[str, ...]

    def __post_init__(self) -> None:
        check_pattern(self.name)
        if not self.shape:
            raise ValueError(f"tensor {self.name!r} needs a shape")
        for expression in self.shape:
            check_expression(expression)

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Read `name [dim, dim]`."""
        match = re.fullmatch(r"(\S+)\s*\[([^\]]+)\]", text.strip())
        if match is None:
            raise ValueError(f"tensor {text!r} is not written as 'name [dim, dim]'")
        return cls(match.group(1), tuple(part.strip() for part in match.group(2).split(",")))

    def resolve(self, dims: Dims) -> Shape:
        """The shape in numbers."""
        return tuple(evaluate_dim(expression, dims) for expression in self.shape)
