"""Which flags a tree's own `trtllm-build` takes, read from its source without running it.

Two places define them: the `add_argument` calls in commands/build.py, and the fields of PluginConfig in
plugin/plugin.py that `cli_plugin_args` names (the same in 0.8 to 1.2; the fields are plain in 0.8 to 0.10, carry a
leading underscore from 0.11, and are pydantic fields in the last releases).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from porting_kit.errors import SourceTreeError, suggest_nearest
from porting_kit.source_tree import SourceTree

SWITCH_ACTIONS = ("store_true", "store_false", "store_const")
ON_OFF = ("enable", "disable")
# How plugin/plugin.py names the types a plugin takes: to 0.11.0.dev2024052100, in 0.11.0.dev2024052800, and later.
PLUGIN_CHOICES = ("plugin_options", "PLUGIN_DTYPE_OPTIONS", "DEFAULT_PLUGIN_DTYPE_OPTIONS")


@dataclass(frozen=True)
class BuildFlag:
    """One flag of trtllm-build.

    Args:
        name: without the leading dashes; an alias has an entry of its own.
        takes_value: False for a switch.
        choices: the accepted values; None when any value goes, or when the list is computed at run time.
        value_type: the name of its `type=` function, None when there is none.
        source: file and line.
    """

    name: str
    takes_value: bool
    choices: tuple[str, ...] | None
    value_type: str | None
    source: str


def read_build_parser(tree: SourceTree) -> dict[str, BuildFlag]:
    """Every flag of the tree's trtllm-build, by name.

    Raises:
        SourceTreeError: the tree has no commands/build.py or no plugin/plugin.py, or they have an unknown form.
    """
    flags = _read_arguments(tree.package / "commands" / "build.py", ("parse_arguments",))
    flags |= _read_plugin_flags(tree.package / "plugin" / "plugin.py")
    for required in ("checkpoint_dir", "output_dir", "gpt_attention_plugin"):
        if required not in flags:
            raise SourceTreeError(
                "the build command's arguments are not where they are expected",
                expected=f"--{required} among them",
                found=f"{len(flags)} flags",
                where=tree.package / "commands" / "build.py",
                next_step="name a TensorRT-LLM tree of 0.8 to 1.2",
            )
    return flags


def read_run_parser(examples: Path) -> dict[str, BuildFlag]:
    """Every flag of `examples/run.py` (and of the shared part in `examples/utils.py`), by name.

    Raises:
        SourceTreeError: no run.py there.
    """
    flags = _read_arguments(examples / "run.py", ("parse_arguments",))
    utils = examples / "utils.py"
    if utils.is_file():
        flags |= _read_arguments(utils, ("add_common_args",), required=False)
    return flags


def check_arguments(arguments: list[str], flags: dict[str, BuildFlag], *, program: str, where: object) -> None:
    """Refuse a command line that the parser would refuse.

    Raises:
        SourceTreeError: an unknown or renamed flag, a missing or surplus value, a value outside the choices.
    """
    for name, value in _pair_arguments(arguments):
        flag = flags.get(name)
        if flag is None:
            near = suggest_nearest(name, flags)
            raise SourceTreeError(
                f"{program} has no --{name}",
                expected=f"--{near}" if near else f"one of {len(flags)} flags",
                found=f"--{name}",
                where=where,
                next_step="make the plan for the release this tree is",
            )
        if flag.takes_value and value is None:
            raise SourceTreeError(f"--{name} lacks its value", where=where)
        if not flag.takes_value and value is not None:
            raise SourceTreeError(f"--{name} is a switch and takes no value", found=value, where=where)
        if flag.choices is not None and value not in flag.choices:
            raise SourceTreeError(
                f"{program} does not take this value for --{name}",
                expected=", ".join(flag.choices),
                found=value,
                where=flag.source,
            )
        if flag.value_type == "int" and not value.lstrip("-").isdigit():
            raise SourceTreeError(f"--{name} takes a whole number", found=value, where=flag.source)


def _pair_arguments(arguments: list[str]) -> Iterator[tuple[str, str | None]]:
    position = 0
    while position < len(arguments):
        token = arguments[position]
        if not token.startswith("--"):
            raise SourceTreeError("a value without a flag", found=token)
        name, equals, value = token[2:].partition("=")
        if equals:
            yield name, value
            position += 1
        elif position + 1 < len(arguments) and not arguments[position + 1].startswith("--"):
            yield name, arguments[position + 1]
            position += 2
        else:
            yield name, None
            position += 1


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except FileNotFoundError:
        raise SourceTreeError("the source tree lacks a file", expected=file.name, where=file.parent) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise SourceTreeError("a file of the source tree cannot be parsed", found=error, where=file) from None


def _read_arguments(file: Path, functions: tuple[str, ...], required: bool = True) -> dict[str, BuildFlag]:
    module = _parse(file)
    bodies = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in functions]
    if not bodies and required:
        raise SourceTreeError(f"no function {functions[0]} here", where=file, next_step="name a TensorRT-LLM tree")
    flags: dict[str, BuildFlag] = {}
    for body in bodies:
        for call in ast.walk(body):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                flags |= _read_call(call, file)
    return flags


def _read_call(call: ast.Call, file: Path) -> dict[str, BuildFlag]:
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    action = _literal(keywords.get("action"))
    value_type = keywords.get("type")
    source = f"{file.parent.name}/{file.name} l.{call.lineno}"
    return {
        name.lstrip("-"): BuildFlag(
            name.lstrip("-"),
            action not in SWITCH_ACTIONS,
            _as_choices(_literal(keywords.get("choices"))),
            value_type.id if isinstance(value_type, ast.Name) else None,
            source,
        )
        for name in names
        if name.startswith("--")
    }


def _literal(node: ast.expr | None) -> object:
    """The value of a literal expression, None for one that is computed."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _as_choices(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list | tuple):
        return None
    return tuple("disable" if item is None else str(item) for item in value)


def _read_plugin_flags(file: Path) -> dict[str, BuildFlag]:
    module = _parse(file)
    constants = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    exposed = _literal(constants.get("cli_plugin_args"))
    fields = next(
        (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "PluginConfig"), None
    )
    if not isinstance(exposed, list) or fields is None:
        raise SourceTreeError("no cli_plugin_args and PluginConfig here", where=file)
    common = next((_literal(constants[name]) for name in PLUGIN_CHOICES if name in constants), None)
    special = _literal(constants.get("PLUGIN_DTYPE_OPTIONS_MAP")) or {}
    flags = {}
    for field in fields.body:
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        name = field.target.id.lstrip("_")
        if name not in exposed:
            continue
        kind, literal = _annotation_kind(field.annotation, constants)
        choices: object = None
        if kind == "bool":
            choices = list(ON_OFF)
        elif kind == "str":
            choices = literal or special.get(name, common)
        flags[name] = BuildFlag(
            name, True, _as_choices(choices), "int" if kind == "int" else None, f"plugin/plugin.py l.{field.lineno}"
        )
    return flags


def _annotation_kind(annotation: ast.expr, constants: dict[str, ast.expr]) -> tuple[str, list[object] | None]:
    """`bool`, `int` or `str`, and the values where the annotation lists them (`Optional[Literal[...]]`)."""
    if isinstance(annotation, ast.Name) and annotation.id in constants:
        return _annotation_kind(constants[annotation.id], constants)
    if isinstance(annotation, ast.Name):
        return annotation.id, None
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        if annotation.value.id == "Literal":
            inner = annotation.slice
            values = _literal(inner) if isinstance(inner, ast.Tuple) else (_literal(inner),)
            return "str", [value for value in values if value is not None] + ["disable"]
        return _annotation_kind(annotation.slice, constants)
    return "unknown", None
