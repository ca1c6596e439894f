"""Imports inside the package point one way, also those inside functions; heavy packages have one importer each.

Modules that import each other at the top are found as well: whether they load depends on which comes first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# Each layer may import from itself and from the layers before it. A new component must be given its place here.
LAYERS = (
    {"errors", "outcomes", "provenance", "port", "port_problems", "products", "run_folder", "whole_files"},
    {"releases", "architectures", "bundled"},
    {"source_tree", "config_defaults", "base_tokenizer"}
    | {"patching", "conversion", "kernel_fit", "emulator", "medusa", "engine"},
    {"alignment", "diagnosis", "coverage"},
    {"steps"},
    {"cli", "cli_heads", "display", "__main__"},
)
# Inside these layers a component knows only the neighbours named here; the words and the data know each other freely.
NEIGHBOURS = {
    "source_tree": set(),
    "config_defaults": {"source_tree"},
    "base_tokenizer": set(),
    "patching": {"source_tree"},
    "conversion": set(),
    "kernel_fit": {"conversion", "patching"},
    "emulator": {"source_tree"},
    "medusa": {"base_tokenizer"},
    "engine": {"source_tree", "conversion", "medusa"},
    "alignment": set(),
    "diagnosis": {"alignment"},
    "coverage": {"alignment"},
    "cli": {"cli_heads"},
    "cli_heads": set(),
    "display": set(),
    "__main__": {"cli"},
}
# Single imports against the direction, each with its reason. One that is no longer there must go from this list.
EXCEPTIONS = {
    (
        "porting_kit/steps/report.py",
        "display",
    ): "the report is a page; it is drawn inside the one function that writes it",
    (
        "porting_kit/steps/demo.py",
        "display",
    ): "the demo's side-by-side page, the same",
    (
        "porting_kit/steps/diagnose.py",
        "display",
    ): "the page of a diagnosis, the same",
}
# Who may import a heavy package, and then only inside a function.
EDGES = {"tensorrt_llm": ("engine",), "tensorrt": ("engine",), "flashinfer": ("emulator",), "playwright": ()}


@dataclass(frozen=True)
class Import:
    """One import statement's target, seen from one module. Deferred: in a function, or for type checkers only."""

    file: str
    line: int
    target: str
    deferred: bool


def read_imports(file: Path, root: Path) -> Iterator[Import]:
    """Every import of a module, absolute and relative ones alike, as absolute dotted names."""
    relative = file.relative_to(root)
    package = list(relative.with_suffix("").parts[:-1])

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = deferred or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            inner = inner or (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"))
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                prefix = ".".join([*base, *([child.module] if child.module else [])])
                targets = [f"{prefix}.{alias.name}" for alias in child.names]
            for target in targets:
                yield Import(relative.as_posix(), child.lineno, target, inner)
            yield from walk(child, inner)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), False)


def layer_of(component: str) -> int | None:
    """The index of a component's layer, None when it has no place yet."""
    return next((index for index, names in enumerate(LAYERS) if component in names), None)


def find_wrong_imports(root: Path, exceptions: Iterable[tuple[str, str]] = ()) -> list[str]:
    """One line for each wrong import, each component without a layer, and each exception that nothing needs."""
    package = "porting_kit"
    problems = []
    unused = set(exceptions)
    for file in sorted((root / package).rglob("*.py")):
        parts = file.relative_to(root / package).with_suffix("").parts
        component = parts[0]
        if parts[:2] == ("bundled", "tree") or component == "__init__":
            continue  # the tree imitates another package; the package's own __init__ is checked by the import tests
        own = layer_of(component)
        if own is None:
            problems.append(f"{component}: has no layer")
            continue
        for found in read_imports(file, root):
            where = f"{found.file}:{found.line}"
            names = found.target.split(".")
            if names[0] in EDGES and (component not in EDGES[names[0]] or not found.deferred):
                problems.append(f"{where}: {names[0]} is imported here, or not inside a function")
            if names[0] != package or len(names) < 2 or names[1] == component:
                continue
            other = layer_of(names[1])
            if other is None:
                continue  # a name of the package's own __init__, or a component that is reported by itself
            allowed = NEIGHBOURS.get(component)
            if other > own or (other == own and allowed is not None and names[1] not in allowed):
                if (found.file, names[1]) in exceptions and found.deferred:
                    unused.discard((found.file, names[1]))
                else:
                    problems.append(f"{where}: {component} imports {names[1]}")
    return problems + [f"{file}: no longer imports {name}, the exception can go" for file, name in sorted(unused)]


def find_cycles(root: Path, package: str = "porting_kit") -> list[str]:
    """Modules that reach themselves through imports at the top of modules, one line for each way round."""
    modules = {}
    for file in (root / package).rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[1:3] != ("bundled", "tree"):
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    imports = {}
    for name, file in modules.items():
        targets = [found.target for found in read_imports(file, root) if not found.deferred]
        # `from package.module import name`: the module is what is loaded, unless the name is a module itself.
        loaded = [target if target in modules else target.rpartition(".")[0] for target in targets]
        imports[name] = sorted({target for target in loaded if target in modules and target != name})
    cycles: list[str] = []
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> None:
        if name in path:
            cycles.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in imports[name]:
                follow(target, [*path, name])
            done.add(name)

    for name in sorted(modules):
        follow(name, [])
    return cycles


def test_imports_point_one_way(root):
    problems = find_wrong_imports(root, EXCEPTIONS)
    assert not problems, "\n".join(problems)


def test_the_layers_name_only_what_is_there(root):
    present = {path.stem for path in (root / "porting_kit").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set().union(*LAYERS) - {"__main__"} <= present


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("errors.py", "from porting_kit.medusa import tree\n", "errors.py:1: errors imports medusa"),
        ("port.py", "def f():\n    from porting_kit import steps\n", "port.py:2: port imports steps"),
        ("medusa/tree.py", "from ..emulator.model import M\n", "medusa/tree.py:1: medusa imports emulator"),
        ("medusa/__init__.py", "from .. import cli\n", "medusa/__init__.py:1: medusa imports cli"),
        ("patching/a.py", "import porting_kit.conversion.rules as r\n", "patching/a.py:1: patching imports conversion"),
        ("steps/a.py", "import porting_kit.display\n", "steps/a.py:1: steps imports display"),
        ("utils/a.py", "", "utils: has no layer"),
        (
            "emulator/a.py",
            "import flashinfer\n",
            "emulator/a.py:1: flashinfer is imported here",
        ),
        ("medusa/a.py", "def f():\n    import flashinfer\n", "medusa/a.py:2: flashinfer is imported here"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, source, expected):
    target = tmp_path / "porting_kit" / file
    target.parent.mkdir(parents=True)
    target.write_text(source)
    problems = find_wrong_imports(tmp_path)
    assert len(problems) == 1
    assert expected in problems[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("medusa/tree.py", "from porting_kit.errors import TreeError\nfrom . import choices\n"),
        ("patching/a.py", "from ..source_tree import SourceTree\n"),
        ("releases/a.py", "from porting_kit.architectures import families\n"),
        ("steps/a.py", "from porting_kit import __version__\nfrom porting_kit.alignment import oracle\n"),
        ("engine/run.py", "def f():\n    import tensorrt_llm\n"),
        ("bundled/tree/tensorrt_llm/module.py", "import tensorrt\n"),
    ],
)
def test_a_right_import_is_left_alone(tmp_path, file, source):
    target = tmp_path / "porting_kit" / file
    target.parent.mkdir(parents=True)
    target.write_text(source)
    assert find_wrong_imports(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f():\n    from porting_kit.display import page\n", None),
        ("from porting_kit.display import page\n", "steps/report.py:1: steps imports display"),
        ("", "steps/report.py: no longer imports display, the exception can go"),
    ],
)
def test_an_exception_holds_inside_a_function_and_only_while_it_is_needed(tmp_path, source, problem):
    target = tmp_path / "porting_kit" / "steps" / "report.py"
    target.parent.mkdir(parents=True)
    target.write_text(source)
    problems = find_wrong_imports(tmp_path, [("porting_kit/steps/report.py", "display")])
    found = [line.removeprefix("porting_kit/") for line in problems]
    assert found[:1] == ([problem] if problem else [])


def write_modules(root: Path, **modules: str) -> None:
    (root / "porting_kit" / "medusa").mkdir(parents=True)
    (root / "porting_kit" / "medusa" / "__init__.py").write_text("from porting_kit.medusa.tree import Tree\n")
    for name, source in modules.items():
        (root / "porting_kit" / "medusa" / f"{name}.py").write_text(source)


def test_no_modules_import_each_other(root):
    problems = find_cycles(root)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "modules",
    [
        {"tree": "from porting_kit.medusa import choices\n", "choices": "from porting_kit.medusa.tree import Tree\n"},
        {"tree": "from . import choices\n", "choices": "from . import limits\n", "limits": "from .tree import Tree\n"},
        {"tree": "from porting_kit.medusa import Tree\n"},
    ],
)
def test_modules_that_import_each_other_are_found(tmp_path, modules):
    write_modules(tmp_path, **modules)
    assert len(find_cycles(tmp_path)) == 1


@pytest.mark.parametrize("head", ["def f():", "if TYPE_CHECKING:", "if typing.TYPE_CHECKING:"])
def test_a_deferred_import_closes_no_cycle(tmp_path, head):
    late = f"{head}\n    from porting_kit.medusa.tree import Tree\n"
    write_modules(tmp_path, tree="from porting_kit.medusa import choices\n", choices=late)
    assert find_cycles(tmp_path) == []
