"""An isolated import namespace in which a source tree's own Python runs over the emulator's bottom layer.

Every module of the tree is compiled and executed here with its own `__import__`: `tensorrt_llm` and `tensorrt` mean
this namespace's modules, third-party packages are loaded on first use, and sys.modules keeps what the user has. Two
namespaces never share a module, so two releases can run side by side in one process. Nothing is written to the tree.

The code of the tree is executed: open only trees that you trust.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from porting_kit.emulator.bottom_layer import BOTTOM_MODULES, replace_moe_plugin, replace_primitives
from porting_kit.emulator.lazy_package import LazyPackage
from porting_kit.emulator.network import Network
from porting_kit.emulator.symbols import SymbolModule
from porting_kit.emulator.tensorrt_types import build_tensorrt_module
from porting_kit.errors import EmulatorError, PortingKitError

PACKAGE = "tensorrt_llm"
# Names that mean a namespace's own modules inside it.
OWN_ROOTS = frozenset({PACKAGE, "tensorrt", "strenum"})
# Imported as they are. Every other package is loaded when one of its names is used, so that a model definition imports
# without it.
PLAIN_PACKAGES = frozenset({"torch", "numpy", "safetensors", "packaging"}) | sys.stdlib_module_names
# Parts of TensorRT-LLM that build, serve or call the C++ runtime: nothing a model's forward needs.
OUTSIDE_PARTS = frozenset(
    {"_ipc_utils", "auto_parallel", "bindings", "builder", "commands", "executor", "graph_rewriting", "hlapi"}
    | {
        "libs",
        "llmapi",
        "profiler",
        "runtime",
        "tools",
        "quantization.quantize_by_ammo",
        "quantization.quantize_by_modelopt",
    }
)
# A small module of its own inside such a part; models of 0.9 make its LoraConfig a default argument.
INSIDE_PARTS = frozenset({"runtime.lora_manager"})
_CODE: dict[tuple[str, int, int], CodeType] = {}
_LOG = logging.getLogger(__name__)


class Namespace:
    """The modules of one source tree.

    Args:
        root: folder that contains the package folder `tensorrt_llm`.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.network = Network()
        self.modules: dict[str, ModuleType] = {"tensorrt": build_tensorrt_module(), "strenum": _build_strenum()}
        self._builtins = {**vars(builtins), "__import__": self._import}
        for part, build in BOTTOM_MODULES.items():
            self.modules[f"{PACKAGE}.{part}"] = build(f"{PACKAGE}.{part}")

    # -- for users -----------------------------------------------------------------------------------------------

    def import_module(self, name: str) -> ModuleType:
        """Import a module of the tree, such as "tensorrt_llm.models.falcon.convert".

        Raises:
            EmulatorError: the tree has no such module.
            Exception: whatever the module itself raises.
        """
        for end in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:end])
            if part not in self.modules:
                self._load(part)
        return self.modules[name]

    def load_file(self, file: Path, name: str = "models") -> ModuleType:
        """Execute a file as a module of this namespace, as trtllm-build does with --model_cls_file.

        The module is called `models`, so that relative imports in it fail here as they fail there
        (commands/build.py, 0.11.0.dev2024062500).

        Raises:
            EmulatorError: the file cannot be read or executed; a file that leaves Python (`sys.exit`) is one of them.
        """
        try:
            return self._execute(name, Path(file), package="")
        except PortingKitError:
            raise
        except (Exception, SystemExit) as error:
            raise EmulatorError(
                "the model's module file cannot be executed",
                expected="a Python module that trtllm-build takes as --model_cls_file",
                found=f"{type(error).__name__}: {error}",
                where=file,
                next_step="run `porting-kit patch` again, or correct the file",
            ) from error

    def load_source(self, source: str, name: str = "models") -> ModuleType:
        """Execute source text as a module of this namespace (a patched model that is not on disk)."""
        module = self._new_module(name, Path(f"<{name}>"), package="")
        with _registered(module):
            exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
        return module

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Let code outside the namespace import its modules by name (scripts that call upstream's converters)."""
        own = {name: module for name, module in sys.modules.items() if is_own(name)}
        for name in own:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in self.modules.items() if is_own(name)})
        finder = NamespaceFinder(self)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if is_own(name)]:
                del sys.modules[name]
            sys.modules.update(own)

    # -- import --------------------------------------------------------------------------------------------------

    def _import(
        self, name: str, globals: dict | None = None, locals: dict | None = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        """What `import` means inside the namespace."""
        if level:
            package = (globals or {}).get("__package__") or ""
            name = importlib.util.resolve_name("." * level + name, package)
        root = name.partition(".")[0]
        if root in OWN_ROOTS:
            return self._import_own(name, fromlist)
        if root in PLAIN_PACKAGES:
            return builtins.__import__(name, globals, locals, fromlist, 0)
        leaf = self._outside_module(name)
        return leaf if fromlist else self._outside_module(root)

    def _import_own(self, name: str, fromlist: Any) -> ModuleType:
        for end in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:end])
            if part in self.modules:
                continue
            try:
                self._load(part)
            except EmulatorError:
                raise
            except Exception as error:
                # Unused imports never matter: the error is told when a name of the module is used.
                _LOG.debug("%s could not be imported: %s", part, error)
                self._register(part, SymbolModule(part, cause=error))
        module = self.modules[name]
        for item in fromlist or ():
            if item != "*" and not hasattr(module, item) and self._find_file(f"{name}.{item}"):
                self._import_own(f"{name}.{item}", ())
        return module if fromlist else self.modules[name.partition(".")[0]]

    def _outside_module(self, name: str) -> ModuleType:
        """A third-party module, loaded on first use."""
        if name not in self.modules:
            parent, _, child = name.rpartition(".")
            module = SymbolModule(name, real=name)
            self.modules[name] = module
            if parent:
                setattr(self._outside_module(parent), child, module)
        return self.modules[name]

    def _find_file(self, name: str) -> Path | None:
        base = self.root.joinpath(*name.split("."))
        for file in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if file.is_file():
                return file
        return None

    def _load(self, name: str) -> None:
        part = name.removeprefix(PACKAGE).lstrip(".")
        file = self._find_file(name)
        if part not in INSIDE_PARTS and any(f"{part}.".startswith(f"{outside}.") for outside in OUTSIDE_PARTS):
            self._register(name, SymbolModule(name))
            return
        if file is None:
            raise EmulatorError(
                f"the source tree has no module {name}",
                expected=f"{name.replace('.', '/')}.py",
                found="no such file",
                where=self.root,
                next_step="name a complete checkout or package of TensorRT-LLM",
            )
        if part in ("", "models"):
            self._register(name, self._build_lazy_package(name, file))
            return
        self._execute(name, file, package=name if file.name == "__init__.py" else name.rpartition(".")[0])
        if part == "_common":
            self.modules[name].set_network(self.network)
        if part == "functional":
            replace_primitives(self.modules[name])
        if part == "layers.moe":
            replace_moe_plugin(self.modules[name])

    def _build_lazy_package(self, name: str, file: Path) -> ModuleType:
        """`tensorrt_llm` and `tensorrt_llm.models`, whose __init__ imports every model: read, and loaded by name."""
        module = LazyPackage(self, name, file)
        module.__package__, module.__path__, module.__file__ = name, [str(file.parent)], str(file)
        return module

    def _new_module(self, name: str, file: Path, package: str) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(__file__=str(file), __package__=package, __builtins__=self._builtins)
        if file.name == "__init__.py":
            module.__path__ = [str(file.parent)]
        return module

    def _execute(self, name: str, file: Path, package: str) -> ModuleType:
        module = self._new_module(name, file, package)
        self._register(name, module)
        try:
            with _registered(module):
                exec(compile_file(file), module.__dict__)
        except BaseException:
            self._forget(name)
            raise
        return module

    def _register(self, name: str, module: ModuleType) -> None:
        self.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in self.modules:
            setattr(self.modules[parent], child, module)

    def _forget(self, name: str) -> None:
        self.modules.pop(name, None)
        parent, _, child = name.rpartition(".")
        if parent in self.modules:
            self.modules[parent].__dict__.pop(child, None)


def is_own(name: str) -> bool:
    """Whether a module name belongs to namespaces."""
    return name.partition(".")[0] in OWN_ROOTS


class NamespaceFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves a namespace's modules to ordinary imports while the namespace is active."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if is_own(name) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._namespace.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The namespace has executed it."""


def compile_file(file: Path) -> CodeType:
    """A file's code, compiled once per process and state of the file; no bytecode is written."""
    state = file.stat()
    key = (str(file), state.st_mtime_ns, state.st_size)
    if key not in _CODE:
        with warnings.catch_warnings():
            # The tree's docstrings hold backslashes that Python warns about.
            warnings.simplefilter("ignore")
            _CODE[key] = compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True)
    return _CODE[key]


@contextlib.contextmanager
def _registered(module: ModuleType) -> Iterator[None]:
    """Have a module in sys.modules while it is executed: dataclasses look their module up there."""
    previous = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if previous is None:
            sys.modules.pop(module.__name__, None)
        else:
            sys.modules[module.__name__] = previous


def _build_strenum() -> ModuleType:
    """The package strenum, which TensorRT-LLM's enumerations inherit from and this interpreter may lack."""

    class StrEnum(str, enum.Enum):
        def __str__(self) -> str:
            return self.value

    return SymbolModule("strenum", attributes={"StrEnum": StrEnum})
