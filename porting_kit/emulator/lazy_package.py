"""Packages whose __init__ imports everything: read instead of executed, each name imported when it is asked for."""

from __future__ import annotations

import ast
import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from porting_kit.emulator.namespace import Namespace


class LazyPackage(ModuleType):
    """A package whose __init__ is parsed, not executed: each name it imports is imported when it is asked for."""

    def __init__(self, namespace: Namespace, name: str, file: Path) -> None:
        super().__init__(name)
        imports: dict[str, tuple[str, str]] = {}
        constants: dict[str, ast.expr] = {}
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), name)
                imports.update({alias.asname or alias.name: (source, alias.name) for alias in node.names})
            elif isinstance(node, ast.Import):
                imports.update({a.asname: a.name.rpartition(".")[::2] for a in node.names if a.asname})
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = node.value
        self.__dict__.update(_namespace=namespace, _imports=imports, _constants=constants)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name != "__version__":
            raise AttributeError(name)
        if name in self._imports:
            source, attribute = self._imports[name]
            value = self._namespace._import(source, {}, {}, (attribute,), 0)
            value = getattr(value, attribute)
        elif name in self._constants:
            value = self._evaluate(self._constants[name])
        elif self._namespace._find_file(f"{self.__name__}.{name}"):
            value = self._namespace.import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__[name] = value
        return value

    def _evaluate(self, node: ast.expr) -> Any:
        """A constant of the __init__; a table's values are looked up when they are asked for."""
        if isinstance(node, ast.Dict):
            keys = [self._evaluate(key) for key in node.keys]
            return LazyTable({key: partial(self._evaluate, item) for key, item in zip(keys, node.values, strict=True)})
        if isinstance(node, ast.Name):
            return getattr(self, node.id)
        return ast.literal_eval(node)


class LazyTable(dict):
    """A dict (MODEL_MAP) whose values are computed on first access."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, partial):
            value = value()
            self[key] = value
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]
