"""Build what a user takes away from patching: a module for `trtllm-build --model_cls_file`, and a diff for the tree.

The module is loaded by path under a foreign module name, so its imports are absolute. The checkpoint's `architecture`
stays the base's own name: trtllm-build takes the class from the command line and the config class from MODEL_MAP
(commands/build.py and models/modeling_utils.py, 0.11.0.dev2024062500 to 0.14). The diff is for those who carry the
model in the tree instead: it patches model.py, adds a file with the Medusa class and registers that class.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..errors import PatchError
from ..source_tree import SourceTree, all_arguments, find_method, read_constant
from . import medusa_template
from .diff import unified_diff
from .model_source import PatchOutcome, patch_model_source


class ReleaseTooOld(PatchError):
    """The classes that all models of a release share do not know a tree of draft tokens: no model can be patched."""


class SourceFit(Protocol):
    """A kernel fit that wants a model's source to follow its config."""

    def follow(self, source: str, file: str) -> tuple[str, tuple[Any, ...]]:
        """The text with the fit's edits, and the edits; no edits when it follows already."""


@dataclass(frozen=True)
class MedusaModule:
    """A base model with Medusa heads, as text.

    Args:
        source: the module for --model_cls_file.
        class_name: the class for --model_cls_name.
        base_class_name: the base's top class.
        diff: a unified diff against the tree's root.
        outcome: what was patched in the base.
        architecture: the base's name in config.json.
        file_name: the module's file name, "medusa_<folder of the base>.py".
    """

    source: str
    class_name: str
    base_class_name: str
    diff: str
    outcome: PatchOutcome
    architecture: str
    file_name: str


def patch_architecture(tree: SourceTree, architecture: str) -> PatchOutcome:
    """Patch the model.py that serves an architecture; the tree itself stays as it is.

    Raises:
        SourceTreeError: the tree has no such architecture.
        PatchError: the file's shape is unknown.
    """
    file = tree.find_model(architecture).file
    return patch_model_source(read_source(file), spec_arguments=tree.spec_arguments, file=str(file))


def build_medusa_module(tree: SourceTree, architecture: str, *, fit: SourceFit | None = None) -> MedusaModule:
    """Patch a base model and put a Medusa class on it.

    Args:
        tree: the source tree of the release to build with.
        architecture: the base's architecture name, as in its config.json.
        fit: makes the attention take its settings from a fitted config (a `FitPlan`); None leaves them.

    Raises:
        SourceTreeError: the tree has no such architecture.
        PatchError: the model is refused (the message gives the reason), or its shape is unknown.
    """
    model = tree.find_model(architecture)
    outcome = patch_architecture(tree, architecture)
    if outcome.status == "refused":
        raise PatchError(
            f"{architecture} cannot carry Medusa heads in TensorRT-LLM {tree.release}",
            expected="a decoder whose layers call tensorrt_llm.layers.Attention",
            found=outcome.reason,
            where=model.file,
            next_step="choose another base model or another release",
        )
    if fit is not None:
        outcome = _follow_fit(outcome, fit, model.file)
    _require_shared_classes(tree)
    class_name = f"Medusa{model.class_name}"
    inputs = _input_style(tree)
    classes = medusa_template.render_classes(class_name, model.class_name, **inputs)
    imports = medusa_template.render_imports(own_inputs=inputs["own_inputs"])

    if outcome.status == "patched":
        base = make_imports_absolute(outcome.source, _module_name(tree, model.file).rpartition(".")[0])
        source = f"{base.rstrip()}\n\n\n{imports}\n\n{classes}"
    else:
        base_import = f"from {_module_name(tree, model.file)} import {model.class_name}\n"
        source = f"{imports}{base_import}\n\n{classes}"
    _require_absolute_imports(source, model.file)

    in_tree = _write_for_tree(model.file, model.class_name, f"{imports}\n\n{classes}")
    medusa_file = model.file.with_name("medusa.py")
    models_init = tree.package / "models" / "__init__.py"
    folder = model.file.parent.name
    package = ".".join(model.file.parent.relative_to(models_init.parent).parts)
    registered = _register_class(read_source(models_init), architecture, class_name, package, models_init)
    changes = (
        (model.file, read_source(model.file), outcome.source),
        (medusa_file, read_source(medusa_file) if medusa_file.exists() else None, in_tree),
        (models_init, read_source(models_init), registered),
    )
    diff = "".join(
        unified_diff(file.relative_to(tree.root).as_posix(), before, after) for file, before, after in changes
    )
    return MedusaModule(
        source=source,
        class_name=class_name,
        base_class_name=model.class_name,
        diff=diff,
        outcome=outcome,
        architecture=architecture,
        file_name=f"medusa_{folder}.py",
    )


def _follow_fit(outcome: PatchOutcome, fit: SourceFit, file: Path) -> PatchOutcome:
    """The outcome with the fit's edits made on top of it."""
    source, edits = fit.follow(outcome.source, str(file))
    if not edits:
        return outcome
    return replace(outcome, status="patched", source=source, edits=(*outcome.edits, *edits))


def write_patch(module: MedusaModule, folder: Path) -> tuple[Path, Path]:
    """Write the module and `port.patch` into a folder, each under a temporary name first.

    Returns:
        The paths of the module and of the diff.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / module.file_name, folder / "port.patch")
    for path, text in zip(paths, (module.source, module.diff), strict=True):
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_bytes(text.encode("utf-8"))
        os.replace(unfinished, path)
    return paths


def read_source(file: Path) -> str:
    """A file's text with its line endings as they are."""
    return file.read_bytes().decode("utf-8")


def make_imports_absolute(source: str, package: str) -> str:
    """Rewrite relative imports for a module that is loaded outside its package.

    Args:
        source: a module's text.
        package: the dotted package it belongs to ("tensorrt_llm.models.bloom").
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", source)
    parts = package.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            origin = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            line = lines[node.lineno - 1]
            written = r"\bfrom\s+\.+" + (rf"\s*{re.escape(node.module)}" if node.module else "")
            lines[node.lineno - 1] = re.sub(written, f"from {origin}", line, count=1)
    return "".join(lines)


def _module_name(tree: SourceTree, file: Path) -> str:
    return ".".join(file.relative_to(tree.root).with_suffix("").parts)


def _shared_method(tree: SourceTree, class_name: str, method: str) -> list[str]:
    file = tree.package / "models" / "modeling_utils.py"
    found = find_method(ast.parse(read_source(file)), class_name, method)
    return [] if found is None else [argument.arg for argument in all_arguments(found)]


def _require_shared_classes(tree: SourceTree) -> None:
    """The classes that every model shares must hand the arguments on, or patching a model is not enough."""
    for class_name in ("DecoderModelForCausalLM", "DecoderLayerList"):
        parameters = _shared_method(tree, class_name, "forward")
        missing = [name for name in tree.spec_arguments if name not in parameters]
        if missing:
            raise ReleaseTooOld(
                f"TensorRT-LLM {tree.release} does not pass the tree of draft tokens through {class_name}",
                expected=f"{class_name}.forward(..., {', '.join(missing)})",
                found=f"({', '.join(parameters)})" if parameters else "no such class",
                where=tree.package / "models" / "modeling_utils.py",
                next_step="use 0.8.0.dev2024013000 or later",
            )


def _input_style(tree: SourceTree) -> dict[str, bool]:
    """Who makes the inputs of the tree in this release: read from PretrainedModel.prepare_inputs."""
    known = _shared_method(tree, "PretrainedModel", "prepare_inputs")
    # Without a GenerationMixin, as in the bundled definitions, a tree makes no engine inputs at all.
    makes_inputs = (tree.package / "models" / "generation_mixin.py").is_file()
    return {
        "own_inputs": makes_inputs and "speculative_decoding_draft_tokens_external" not in known,
        "pass_draft_len": "max_draft_len" in known,
    }


def _require_absolute_imports(source: str, file: Path) -> None:
    left = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level]
    if left:
        raise PatchError(
            "a relative import of the base model could not be rewritten",
            expected="from <dots><module> import ... on one line",
            found=ast.unparse(left[0]),
            where=f"{file}:{left[0].lineno}",
            next_step="report this file's shape; nothing was written",
        )


def _write_for_tree(file: Path, base_class_name: str, text: str) -> str:
    """The Medusa class as a file of its own beside the base's model.py."""
    imports, _, classes = text.partition("\n\n\n")
    return f"{imports}\n\nfrom .{file.stem} import {base_class_name}\n\n\n{classes}"


def _register_class(source: str, architecture: str, class_name: str, package: str, file: Path) -> str:
    """Import the class beside the base's import and enter it before the base's entry of MODEL_MAP.

    Args:
        package: the base's package, dotted and relative to models ("bloom", "phi3.phi3small").
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", source)
    tree = ast.parse(source)
    if any(isinstance(node, ast.ImportFrom) and node.module == f"{package}.medusa" for node in tree.body):
        return source
    imports = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package + ".")
    ]
    keys = [
        key
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if read_constant(file, key) == architecture
    ]
    if len(keys) != 1 or not imports:
        raise PatchError(
            f"{class_name} cannot be registered",
            expected=f"one import from .{package} and one entry {architecture!r} in MODEL_MAP",
            found=f"{len(imports)} imports and {len(keys)} entries",
            where=file,
            next_step="use the module with --model_cls_file, or register the class by hand",
        )
    indent = " " * keys[0].col_offset
    quote = "'" if source.count("'") > source.count('"') else '"'
    lines.insert(keys[0].lineno - 1, f"{indent}{quote}{class_name}{quote}: {class_name},\n")
    lines.insert(imports[0].lineno - 1, f"from .{package}.medusa import {class_name}\n")
    return "".join(lines)
