"""What a release takes for a field that a checkpoint's config leaves out, read from the tree's own classes.

A field has its default in one of three places: an argument of the config class, `kwargs.pop` or `config.pop` beside it,
and `config.set_if_not_exist` in the model class. They are read by parsing; nothing of the tree runs. A default that is
no literal, or a None that the code replaces by something worked out, is left out: this module guesses nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from porting_kit.source_tree import SourceTree, all_arguments, follow_class, parse_file

COMMON_CONFIG = "PretrainedConfig"
TAKES_FIELDS = ("kwargs", "config")
"""Names under which __init__ and from_dict hold the fields of a config."""


def read_config_defaults(tree: SourceTree, architecture: str) -> dict[str, Any]:
    """Field -> the value that the release takes where it is absent, for the fields of which the source says it.

    Args:
        tree: the release.
        architecture: a name of its MODEL_MAP.

    Raises:
        SourceTreeError: the tree has no such model, or a file of it cannot be read.
    """
    model = tree.find_model(architecture)
    found: dict[str, Any] = {}
    config = (COMMON_CONFIG, tree.package / "models" / "modeling_utils.py")
    for node, file in _list_classes(model.class_name, model.file):
        for name, value in _read_calls(node, "set_if_not_exist", TAKES_FIELDS):
            found.setdefault(name, value)
        named = _find_config_class(node)
        if named is not None and config[0] == COMMON_CONFIG:
            config = (named, file)
    for node, _ in _list_classes(*config):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "from_dict"):
                for name, value in (*_read_arguments(method), *_read_pops(method)):
                    found.setdefault(name, value)
    return found


def _list_classes(name: str, file: Path, depth: int = 8) -> Iterator[tuple[ast.ClassDef, Path]]:
    """A class of the tree and its bases, nearest first."""
    located = follow_class(file, name) if depth else None
    if located is None:
        return
    name, file = located
    for node in parse_file(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node, file
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from _list_classes(base.id, file, depth - 1)


def _find_config_class(node: ast.ClassDef) -> str | None:
    assigned = [one for one in node.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name)]
    named = [one.value.id for one in assigned if ast.unparse(one.targets[0]) == "config_class"]
    return named[-1] if named else None


def _read_arguments(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Arguments with a literal default; a None that the function asks for stands for something it works out."""
    places, named = [*function.args.posonlyargs, *function.args.args], function.args
    defaults = dict(zip((one.arg for one in places[len(places) - len(named.defaults) :]), named.defaults, strict=True))
    defaults |= {one.arg: value for one, value in zip(named.kwonlyargs, named.kw_defaults, strict=True) if value}
    asked = {
        node.left.id
        for node in ast.walk(function)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and isinstance(node.ops[0], ast.Is)
    }
    for argument in all_arguments(function):
        if argument.arg in defaults:
            for value in _read_literal(defaults[argument.arg]):
                if value is not None or argument.arg not in asked:
                    yield argument.arg, value


def _read_pops(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Fields that are taken out of the config with a default; None stands for something worked out later."""
    for method in ("pop", "get"):
        yield from (pair for pair in _read_calls(function, method, TAKES_FIELDS) if pair[1] is not None)


def _read_calls(node: ast.AST, method: str, owners: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """(name, literal) of every call such as `config.pop("name", literal)`."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or len(call.args) != 2:
            continue
        owner, (key, default) = call.func.value, call.args
        is_ours = isinstance(owner, ast.Name) and owner.id in owners and call.func.attr == method
        if is_ours and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield from ((key.value, value) for value in _read_literal(default))


def _read_literal(node: ast.expr) -> list[Any]:
    """The value of a literal in a list; empty where it is none."""
    try:
        return [ast.literal_eval(node)]
    except (ValueError, TypeError):
        return []
