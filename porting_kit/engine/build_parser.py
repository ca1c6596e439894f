"""Which flags a tree's own `trtllm-build` takes, read from its source without running it.

Two places define them: the `add_argument` calls in commands/build.py, and the fields of PluginConfig in
plugin/plugin.py that `cli_plugin_args` names (the same in 0.8 to 1.2; the fields are plain in 0.8 to 0.10, carry a
leading underscore from 0.11, and are pydantic fields in the last releases).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from porting_kit.errors import SourceTreeError
from porting_kit.source_tree import SourceTree

# One call, two switches: --name and --no-name (examples/utils.py of 1.0 or later: kv_cache_enable_block_reuse).
ON_AND_OFF_ACTION = "BooleanOptionalAction"
SWITCH_ACTIONS = ("store_true", "store_false", "store_const", ON_AND_OFF_ACTION)
ON_OFF = ("enable", "disable")
# How plugin/plugin.py names the types a plugin takes: to 0.11.0.dev2024052100, in 0.11.0.dev2024052800, and later.
PLUGIN_CHOICES = ("plugin_options", "PLUGIN_DTYPE_OPTIONS", "DEFAULT_PLUGIN_DTYPE_OPTIONS")
# `type=` functions that live in the compiled library: what they take (cpp/tensorrt_llm/pybind/bindings.cpp and
# cpp/include/tensorrt_llm/runtime/modelConfig.h l.76, 0.16.0.dev2024121000; the text is upper-cased first).
COMPILED_TYPES = {"KVCacheType": ("continuous", "paged", "disabled")}


class Computed:
    """The value of an expression that is known only at run time."""

    def __repr__(self) -> str:
        return "computed at run time"


COMPUTED = Computed()
ABSENT = "==SUPPRESS=="
"""`default=argparse.SUPPRESS`: without the flag the parsed arguments have no such attribute."""


@dataclass(frozen=True)
class BuildFlag:
    """One flag of trtllm-build.

    Args:
        name: without the leading dashes; an alias has an entry of its own.
        takes_value: False for a switch.
        choices: the accepted values; None when any value goes, or when the list is computed at run time.
        value_type: the name of its `type=` function, None when there is none.
        source: file and line.
        dest: the attribute of the parsed arguments.
        default: its value without the flag; COMPUTED when only the run knows it, ABSENT when there is no attribute.
        required: the parser refuses a command without it.
        takes_many: several values may follow (`nargs` "+" or "*").
    """

    name: str
    takes_value: bool
    choices: tuple[str, ...] | None
    value_type: str | None
    source: str
    dest: str = ""
    default: object = COMPUTED
    required: bool = False
    takes_many: bool = False


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


def parse_source(file: Path) -> ast.Module:
    """The syntax tree of a file of the source tree. Raises SourceTreeError."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except FileNotFoundError:
        raise SourceTreeError(
            "the source tree lacks a file",
            expected=file.name,
            found="no such file",
            where=file.parent,
            next_step="name a complete checkout or package of TensorRT-LLM",
        ) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise SourceTreeError(
            "a file of the source tree cannot be parsed",
            expected="Python source",
            found=error,
            where=file,
            next_step="check that the tree is complete and unmodified",
        ) from None


def _read_arguments(file: Path, functions: tuple[str, ...], required: bool = True) -> dict[str, BuildFlag]:
    module = parse_source(file)
    bodies = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in functions]
    if not bodies and required:
        raise SourceTreeError(
            f"no function {functions[0]} here",
            expected=f"def {functions[0]}",
            found="none",
            where=file,
            next_step="name a TensorRT-LLM tree",
        )
    flags: dict[str, BuildFlag] = {}
    for body in bodies:
        for call in ast.walk(body):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                flags |= _read_call(call, file)
    return flags


def _read_call(call: ast.Call, file: Path) -> dict[str, BuildFlag]:
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    names = [name.lstrip("-") for name in names if name.startswith("--")]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    action = _literal(keywords.get("action"))
    dest = _literal(keywords.get("dest")) or (names[0] if names else "")
    if keywords.get("action") is not None and ast.unparse(keywords["action"]).endswith(ON_AND_OFF_ACTION):
        action, names = ON_AND_OFF_ACTION, [*names, *(f"no-{name}" for name in names)]
    value_type = keywords["type"].id if isinstance(keywords.get("type"), ast.Name) else None
    choices = _as_choices(_literal(keywords.get("choices"))) or COMPILED_TYPES.get(value_type)
    return {
        name: BuildFlag(
            name,
            action not in SWITCH_ACTIONS,
            choices,
            value_type,
            f"{file.parent.name}/{file.name} l.{call.lineno}",
            dest=dest,
            default=_default(keywords.get("default"), action),
            required=_literal(keywords.get("required")) is True,
            takes_many=_literal(keywords.get("nargs")) in ("+", "*"),
        )
        for name in names
    }


def _default(node: ast.expr | None, action: object) -> object:
    """What argparse puts in when the flag is not given."""
    if node is None:
        return {"store_true": False, "store_false": True}.get(action)
    if isinstance(node, ast.Attribute) and node.attr == "SUPPRESS":
        return ABSENT
    try:
        return ast.literal_eval(node)
    except ValueError:
        return COMPUTED


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
    module = parse_source(file)
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
        raise SourceTreeError(
            "no cli_plugin_args and PluginConfig here",
            expected="a list cli_plugin_args and a class PluginConfig",
            found="one of them or neither",
            where=file,
            next_step="name a complete checkout or package of TensorRT-LLM 0.8 to 1.2",
        )
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
            name,
            True,
            _as_choices(choices),
            "int" if kind == "int" else None,
            f"plugin/plugin.py l.{field.lineno}",
            dest=name,
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
