"""Placeholders for what the emulator does not provide, and the search for the line that used it.

TensorRT-LLM's modules import far more than a model needs. An import therefore never fails: what is missing becomes a
`Symbol`, which may be named in annotations, unions, defaults, tables and base classes, and raises EmulatorError as soon
as a program calls it, iterates it or computes with it. A Symbol of an installed package stands for the real object and
loads it on first use, so that importing a model definition does not import transformers.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from porting_kit.errors import EmulatorError

_MISSING = object()


def find_use_site(tree_root: Path | None = None) -> tuple[str, str]:
    """Find who used a symbol: the innermost frame outside the emulator, and the first one outside functional.py.

    Args:
        tree_root: folder of the source tree; None accepts any file outside the emulator.

    Returns:
        ("file:line in function", the same for the caller outside functional.py, or "" when it is the same frame).
    """
    own_folder = str(Path(__file__).parent)
    frame = sys._getframe(1)
    sites: list[str] = []
    while frame is not None and len(sites) < 2:
        file = frame.f_code.co_filename
        in_tree = not file.startswith(own_folder) and "importlib" not in file
        if in_tree and (tree_root is None or file.startswith(str(tree_root))):
            site = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            if not sites or not file.endswith("functional.py"):
                sites.append(site)
            if not file.endswith("functional.py"):
                break
        frame = frame.f_back
    inner = sites[0] if sites else "unknown"
    return inner, sites[1] if len(sites) > 1 else ""


def raise_not_emulated(name: str, *, cause: BaseException | None = None) -> None:
    """Raise EmulatorError that names the symbol and the line that used it."""
    inner, outer = find_use_site()
    raise EmulatorError(
        f"the emulator does not provide {name}",
        expected="a decoder's forward pass: functional primitives, gpt_attention, the MoE plugin, collectives",
        found=name if cause is None else f"{type(cause).__name__}: {cause}",
        where=inner if not outer else f"{inner}, used by {outer}",
        next_step="use a configuration that avoids it, or report the line above so that it can be added",
    ) from cause


class Symbol:
    """A name that was imported: usable as a word, not as a thing, unless the real object can be loaded.

    Args:
        path: dotted name used in messages.
        module: importable module that may hold the real object, None when there is none to look for.
        attribute: attribute of that module, None for a name that only exists as a word.
        cause: the error that made it unavailable, quoted when it is used.
    """

    def __init__(
        self, path: str, module: str | None = None, attribute: str | None = None, cause: BaseException | None = None
    ) -> None:
        self.__dict__.update(
            _path=path, _module=module, _attribute=attribute, _cause=cause, _children={}, _real=_MISSING
        )

    def _resolve(self) -> Any:
        """The real object, or `_MISSING`."""
        if self._real is _MISSING and self._module is not None:
            real: Any = _MISSING
            try:
                holder = importlib.import_module(self._module)
                real = getattr(holder, self._attribute, _MISSING)
                if real is _MISSING:
                    real = importlib.import_module(f"{self._module}.{self._attribute}")
            except Exception as error:
                self.__dict__["_cause"] = error
            self.__dict__["_real"] = real
        return self._real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        real = self._resolve()
        if real is not _MISSING:
            return getattr(real, name)
        child = self._children.get(name)
        if child is None:
            child = self._children[name] = Symbol(f"{self._path}.{name}", cause=self._cause)
        return child

    def __setattr__(self, name: str, value: Any) -> None:
        self._children[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        real = self._resolve()
        if real is not _MISSING:
            return real(*args, **kwargs)
        raise_not_emulated(self._path, cause=self._cause)

    def __mro_entries__(self, bases: tuple) -> tuple:
        real = self._resolve()
        return (real,) if isinstance(real, type) else (AbsentBase,)

    def __instancecheck__(self, instance: Any) -> bool:
        real = self._resolve()
        return real is not _MISSING and isinstance(instance, real)

    def __subclasscheck__(self, subclass: type) -> bool:
        real = self._resolve()
        return real is not _MISSING and issubclass(subclass, real)

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __getitem__(self, key: Any) -> Any:
        real = self._resolve()
        return self if real is _MISSING else real[key]

    def _refuse(self, *args: Any) -> Any:
        raise_not_emulated(self._path, cause=self._cause)

    __bool__ = __iter__ = __len__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __lt__ = __gt__ = _refuse

    def __repr__(self) -> str:
        return f"<symbol {self._path}>"


class AbsentBase:
    """Base class of classes whose real base is not available: the class statement works, nothing more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise_not_emulated(f"a base class of {type(self).__name__}")


class SymbolModule(ModuleType):
    """A module all of whose attributes are Symbols (or the given ones).

    Args:
        name: the module's name.
        real: name of the installed module to load from on first use; None when there is none.
        cause: why the module is not available.
        attributes: attributes that do exist.
    """

    def __init__(
        self,
        name: str,
        *,
        real: str | None = None,
        cause: BaseException | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__dict__["_real_name"] = real
        self.__dict__["_cause"] = cause
        self.__dict__.update(attributes or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        symbol = Symbol(f"{self.__name__}.{name}", self._real_name, name, self._cause)
        self.__dict__[name] = symbol
        return symbol
