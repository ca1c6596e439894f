"""Find a TensorRT-LLM source tree and say what it is: its release, its era, its model classes.

Everything is read by parsing; nothing of the tree is imported or executed here, and nothing is written to it.
The era (the names of the speculative-decoding arguments) is always read from the tree's own attention layer, because
release numbers do not decide it: 0.10.0.dev2024043000 still says `medusa_*` where v0.10.0 says `spec_decoding_*`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from .errors import EnvironmentMissing, SourceTreeError

PACKAGE_NAME = "tensorrt_llm"
BUNDLED_ROOT = Path(__file__).parent / "bundled" / "tree"

# Prefixes of the arguments through which a release passes the tree of draft tokens to `Attention.forward`
# (layers/attention.py: v0.8.0 and v0.9.0 `medusa_*`, v0.10.0 and later `spec_decoding_*`).
SPEC_ARGUMENT_PREFIXES = ("spec_decoding_", "medusa_")

TreeKind = Literal["checkout", "installed", "bundled"]


@dataclass(frozen=True)
class ModelClass:
    """One entry of a tree's MODEL_MAP: the architecture's name, its class, and the file that defines the class."""

    architecture: str
    class_name: str
    file: Path


@dataclass(frozen=True)
class SourceTree:
    """A TensorRT-LLM source tree.

    Args:
        root: the folder that contains the package folder `tensorrt_llm`.
        release: what the tree's version.py says, such as "0.11.0.dev2024062500".
        kind: a checkout, an installed package, or this package's own small tree.
        spec_arguments: the era: the names by which `Attention.forward` takes the speculative-decoding input.
    """

    root: Path
    release: str
    kind: TreeKind
    spec_arguments: tuple[str, ...]

    @property
    def package(self) -> Path:
        """The package folder."""
        return self.root / PACKAGE_NAME

    def model_names(self) -> tuple[str, ...]:
        """Every architecture name in MODEL_MAP, also those whose class statement is not in the tree."""
        return tuple(self._model_map())

    def model_classes(self) -> dict[str, ModelClass]:
        """Architecture name -> its class, for every MODEL_MAP entry whose class statement is in the tree."""
        found = {}
        for architecture, class_name in self._model_map().items():
            file = follow_class(self.package / "models" / "__init__.py", class_name)
            if file is not None:
                found[architecture] = ModelClass(architecture, *file)
        return found

    def find_model(self, architecture: str) -> ModelClass:
        """The class that serves an architecture.

        Raises:
            SourceTreeError: MODEL_MAP has no such entry (the nearest names are listed), or its class is nowhere.
        """
        models = self.package / "models" / "__init__.py"
        names = self._model_map()
        if architecture not in names:
            near = get_close_matches(architecture, names, n=5, cutoff=0.5)
            raise SourceTreeError(
                f"TensorRT-LLM {self.release} has no architecture {architecture!r}",
                expected="one of the names in MODEL_MAP" + (f", such as {', '.join(near)}" if near else ""),
                found=f"{len(names)} names, not this one",
                where=models,
                items=() if near else sorted(names),
                next_step="check `architectures` in the model's config.json, or name a release that has this model",
            )
        located = follow_class(models, names[architecture])
        if located is None:
            raise SourceTreeError(
                f"the class {names[architecture]!r} of architecture {architecture!r} cannot be found",
                expected=f"`class {names[architecture]}`, reachable through the imports of models/__init__.py",
                found="none",
                where=models,
                next_step="check that the tree is complete",
            )
        return ModelClass(architecture, *located)

    def _model_map(self) -> dict[str, str]:
        """Architecture name -> class name as models/__init__.py knows it."""
        models = self.package / "models" / "__init__.py"
        entries: dict[str, str] = {}
        for node in parse_file(models).body:
            target = _assigned_name(node)
            if target == "MODEL_MAP" and isinstance(node.value, ast.Dict):
                pairs = zip(node.value.keys, node.value.values, strict=True)
            elif target == "MODEL_MAP[]":
                pairs = ((node.targets[0].slice, node.value),)
            else:
                continue
            for key, value in pairs:
                architecture = read_constant(models, key)
                if architecture is not None and isinstance(value, ast.Name):
                    entries[architecture] = value.id
        if not entries:
            raise SourceTreeError(
                "the tree registers no models",
                expected="a dict MODEL_MAP of architecture names to classes",
                found="none",
                where=models,
                next_step="name the root of a complete TensorRT-LLM checkout or package",
            )
        return entries


def open_source_tree(source: str | Path) -> SourceTree:
    """Open a tree.

    Args:
        source: "bundled" for the small tree of this package, "installed" for the package tensorrt_llm of this
            interpreter (found, not imported), or a path: a checkout, a site-packages folder, or the package folder.

    Raises:
        SourceTreeError: no tree there, no readable version, or no speculative-decoding input in its attention layer.
        EnvironmentMissing: "installed" was asked for and tensorrt_llm is not installed.
    """
    root, kind = _locate_root(source)
    package = root / PACKAGE_NAME
    return SourceTree(
        root=root,
        release=_read_release(package / "version.py"),
        kind=kind,
        spec_arguments=_read_spec_arguments(package / "layers" / "attention.py"),
    )


def _locate_root(source: str | Path) -> tuple[Path, TreeKind]:
    if str(source) == "bundled":
        return BUNDLED_ROOT, "bundled"
    if str(source) == "installed":
        return _find_installed(), "installed"
    path = Path(source).expanduser().resolve()
    candidates = (path, path.parent) if path.name == PACKAGE_NAME else (path,)
    for root in candidates:
        if (root / PACKAGE_NAME / "models").is_dir():
            installed = root.name in ("site-packages", "dist-packages")
            return root, "installed" if installed else "checkout"
    if not path.exists():
        found = "no such folder"
    elif path.is_dir():
        found = "a folder without it"
    else:
        found = "a file"
    raise SourceTreeError(
        f"no TensorRT-LLM source tree at {str(source)!r}",
        expected=f"a folder that contains {PACKAGE_NAME}/models, or that package folder itself",
        found=found,
        where=path,
        next_step="set trtllm.source to a checkout, a site-packages folder, `installed` or `bundled`",
    )


def _find_installed() -> Path:
    spec = importlib.util.find_spec(PACKAGE_NAME)
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentMissing(
            "tensorrt_llm is not installed",
            expected="the package tensorrt_llm in this Python environment",
            found="none",
            next_step="install tensorrt_llm, or set trtllm.source to a checkout or to `bundled`",
        )
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


def _read_release(version_file: Path) -> str:
    if version_file.is_file():
        for node in parse_file(version_file).body:
            if _assigned_name(node) == "__version__" and isinstance(node.value, ast.Constant):
                return str(node.value.value)
    raise SourceTreeError(
        "the release of the source tree cannot be read",
        expected='a line `__version__ = "..."`',
        found="a file without it" if version_file.is_file() else "no such file",
        where=version_file,
        next_step="name a complete checkout or package of TensorRT-LLM 0.8 to 1.2",
    )


def _read_spec_arguments(attention_file: Path) -> tuple[str, ...]:
    """The speculative-decoding arguments of `Attention.forward`, in the order of its signature."""
    forward = None
    if attention_file.is_file():
        forward = find_method(parse_file(attention_file), "Attention", "forward")
    names = [] if forward is None else [argument.arg for argument in all_arguments(forward)]
    spec_arguments = tuple(name for name in names if name.startswith(SPEC_ARGUMENT_PREFIXES))
    if spec_arguments:
        return spec_arguments
    raise SourceTreeError(
        "this release has no speculative-decoding input that a model could be patched for",
        expected="an argument medusa_* or spec_decoding_* of Attention.forward (TensorRT-LLM 0.8 to 1.2)",
        found=f"Attention.forward({', '.join(names)})" if names else "no Attention.forward",
        where=attention_file,
        next_step="name a release from 0.8 to 1.2 that still contains the TensorRT backend",
    )


def find_method(tree: ast.Module, class_name: str, method: str) -> ast.FunctionDef | None:
    """The named method of the named class of a module, None when there is none."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == method:
                    return member
    return None


def all_arguments(function: ast.FunctionDef) -> list[ast.arg]:
    """Every named argument of a function, positional and keyword-only, in order."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def parse_file(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise SourceTreeError(
            "a file of the source tree cannot be read",
            expected="Python source",
            found=f"{type(error).__name__}: {error}",
            where=file,
            next_step="check that the tree is complete and unmodified",
        ) from error


def _assigned_name(node: ast.stmt) -> str | None:
    """`X` for `X = ...` and `X: T = ...`, `X[]` for `X[key] = ...`, else None."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if isinstance(target, ast.Name):
            return target.id
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            return f"{target.value.id}[]"
    return None


def read_constant(file: Path, key: ast.expr | None) -> str | None:
    """A dict key's text: a literal, or a constant that another module of the tree defines (gemma/config.py does)."""
    if isinstance(key, ast.Constant):
        return str(key.value)
    if not isinstance(key, ast.Name):
        return None
    for module_file in _chain_of_imports(file, key.id):
        for node in parse_file(module_file[0]).body:
            if _assigned_name(node) == module_file[1] and isinstance(node.value, ast.Constant):
                return str(node.value.value)
    return None


def follow_class(file: Path, name: str) -> tuple[str, Path] | None:
    """The class's own name and the file with its `class` statement, found by following imports from `file`.

    A second name given by assignment is followed too: RobertaModel = BertModel (models/bert/model.py,
    0.16.0.dev2024111900).
    """
    for module_file, known_as in _chain_of_imports(file, name):
        text, named = module_file.read_text(encoding="utf-8"), re.escape(known_as)
        if re.search(rf"^class {named}\b", text, re.MULTILINE):
            return known_as, module_file
        other = re.search(rf"^{named} = (\w+)$", text, re.MULTILINE)
        if other is not None and other[1] != known_as:
            return follow_class(module_file, other[1])
    return None


def _chain_of_imports(file: Path, name: str, depth: int = 8) -> list[tuple[Path, str]]:
    """The files through which a name is imported, with the name it has in each, starting at `file` itself."""
    chain = [(file, name)]
    for node in ast.walk(parse_file(file)):
        if not isinstance(node, ast.ImportFrom) or depth == 0:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                target = _imported_file(file, node)
                if target is not None:
                    return chain + _chain_of_imports(target, alias.name, depth - 1)
    return chain


def _imported_file(file: Path, node: ast.ImportFrom) -> Path | None:
    """The file that `from X import ...` in `file` reads, None when it lies outside the tree."""
    parts = node.module.split(".") if node.module else []
    if node.level:
        base = file.parent
        for _ in range(node.level - 1):
            base = base.parent
    elif parts[:1] == [PACKAGE_NAME]:
        packages = [folder for folder in file.parents if folder.name == PACKAGE_NAME]
        if not packages:
            return None
        base, parts = packages[-1], parts[1:]
    else:
        return None
    path = base.joinpath(*parts)
    for candidate in (path.with_suffix(".py") if parts else path / "__init__.py", path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None
