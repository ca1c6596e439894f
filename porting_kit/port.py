"""The port file: one YAML document that describes one port, validated strictly.

A misspelt key is an error that suggests the nearest name. Command-line options and papermill parameters override
fields by the same (dotted) names. Relative paths start at the port file's folder.

This module reads no weights, opens no model and knows no release: it says only what the user asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from porting_kit.errors import PortFileError, suggest_nearest
from porting_kit.port_problems import word_problem

PACKAGE_PREFIX = "package:"
MAX_NAME_BYTES = 200
"""A name becomes a folder name, which file systems limit to 255 bytes; temporary names add a few."""

MAX_SIZE = 2**31 - 1
"""TensorRT's dimensions are 32-bit integers."""

Dtype = Literal["float16", "bfloat16", "float32"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML reads on, off, yes and no as truth values; taken for a number, `use: yes` would mean one head."""
        if isinstance(value, bool) and info.field_name != "fit":
            raise ValueError("no truth value; YAML reads on, off, yes and no as one, so quote a text")
        return value


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML forbids it, and PyYAML would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice in one section", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


class Heads(_Section):
    """Which Medusa heads: `path` to a folder or file, `use` how many of them (all when None)."""

    path: str
    use: int | None = Field(default=None, ge=1)


class TensorRTLLM(_Section):
    """Which TensorRT-LLM: `source` is a checkout, `installed` or `bundled`; `release` is read from it when `auto`."""

    source: str = "bundled"
    release: str = "auto"


class Target(_Section):
    """The engine that is wanted and the card it is for. Lengths in tokens."""

    compute_capability: str = Field(default="9.0", validation_alias=AliasChoices("compute_capability", "sm"))
    kv_cache_type: Literal["auto", "float16", "bfloat16", "int8", "fp8"] = "auto"
    tokens_per_block: int = Field(default=64, ge=1, le=MAX_SIZE)
    max_batch_size: int = Field(default=4, ge=1, le=MAX_SIZE)
    max_input_len: int = Field(default=1024, ge=1, le=MAX_SIZE)
    max_seq_len: int = Field(default=2048, ge=2, le=MAX_SIZE)
    tp_size: int = Field(default=1, ge=1, validation_alias=AliasChoices("tp_size", "tp"))
    pp_size: int = Field(default=1, ge=1, validation_alias=AliasChoices("pp_size", "pp"))

    @field_validator("compute_capability", mode="before")
    @classmethod
    def _normalise_capability(cls, value: object) -> str:
        """Accept 9.0, '9.0', 90 and 'sm90'; keep 'major.minor'."""
        text = str(value).lower().removeprefix("sm").lstrip("_")
        if text.isdigit() and len(text) >= 2:
            text = f"{text[:-1]}.{text[-1]}"
        major, _, minor = text.partition(".")
        if not (text.isascii() and major.isdigit() and minor.isdigit()):
            raise ValueError("a compute capability is written like 9.0, 90 or sm90")
        return f"{int(major)}.{int(minor)}"


class Alignment(_Section):
    """What the check runs on. `prompts`: a text file (prompts separated by a line of ---) or a list of texts."""

    prompts: str | Annotated[list[str], Field(min_length=1)] = "default"
    new_tokens: int = Field(default=64, ge=1)
    batch_sizes: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    near_tie_tolerance: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    captured: str | None = None


class Port(_Section):
    """One port, as the user wrote it. `folder` is where relative paths start."""

    name: str
    base: str
    dtype: Dtype = "float16"
    base_checkpoint: str | None = None
    architecture_file: str | None = None
    heads: Heads
    trtllm: TensorRTLLM = TensorRTLLM()
    tree: str | list[list[StrictInt]] | list[StrictInt] = "auto"  # a flat list: the reader of trees says what it is
    target: Target = Target()
    fit: Literal["auto", "off"] | list[str] = "off"
    kernel: str = "exact"
    engine: Literal["emulator", "tensorrt_llm", "captured"] = "emulator"
    alignment: Alignment = Alignment()
    folder: Path = Field(default=Path(), exclude=True)

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, value: str) -> str:
        if not value or value in {".", ".."} or any(char in value for char in "/\\\0"):
            raise ValueError("the name becomes a folder name: no slashes, not empty")
        if value != value.strip() or not value.isprintable() or len(value.encode()) > MAX_NAME_BYTES:
            raise ValueError(
                f"the name becomes a folder name: printable, no spaces around it, at most {MAX_NAME_BYTES} bytes"
            )
        return value

    @field_validator("kernel")
    @classmethod
    def _kernel_is_known(cls, value: str) -> str:
        if value in {"exact", "xqa"} or (value.startswith("release:") and value.isprintable() and " " not in value):
            return value
        raise ValueError("one of 'exact', 'xqa', 'release:<release>'")

    @field_validator("fit", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: object) -> object:
        return {False: "off", True: "auto"}.get(value, value) if isinstance(value, bool) else value

    @field_validator("heads", mode="before")
    @classmethod
    def _heads_may_be_a_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("trtllm", mode="before")
    @classmethod
    def _source_may_be_a_path(cls, value: object) -> object:
        return {"source": value} if isinstance(value, str) else value

    @property
    def base_path(self) -> Path:
        """The base model: a folder, or a GGUF file."""
        return self.resolve_path(self.base)

    @property
    def base_checkpoint_path(self) -> Path | None:
        """A TensorRT-LLM checkpoint of the base that heads are added to; None converts the base here."""
        return None if self.base_checkpoint is None else self.resolve_path(self.base_checkpoint)

    @property
    def architecture_path(self) -> Path | None:
        """A Python file with the rules of a family that this package does not have; None: it has the base's."""
        return None if self.architecture_file is None else self.resolve_path(self.architecture_file)

    @property
    def heads_path(self) -> Path:
        """The heads' folder or file."""
        return self.resolve_path(self.heads.path)

    @property
    def source(self) -> str:
        """The TensorRT-LLM source: `bundled`, `installed`, or an absolute path."""
        if self.trtllm.source in {"bundled", "installed"}:
            return self.trtllm.source
        return str(self.resolve_path(self.trtllm.source))

    def resolve_path(self, text: str) -> Path:
        """An absolute path. `package:NAME/FILE` names a file that an installed PyPI package ships.

        Raises:
            PortFileError: the package is not installed, or no file can have such a path.
        """
        if text.startswith(PACKAGE_PREFIX):
            package, _, inside = text.removeprefix(PACKAGE_PREFIX).partition("/")
            spec = importlib.util.find_spec(package) if package.isidentifier() else None
            if spec is None or not spec.submodule_search_locations:
                raise PortFileError(
                    f"port {self.name!r} names a file of the package {package!r}, which is not installed",
                    expected="a file of an installed package",
                    found=text,
                    next_step=f"pip install {package.replace('_', '-')}" if package else "write package:NAME/FILE",
                )
            return Path(spec.submodule_search_locations[0]) / inside
        try:
            path = Path(text).expanduser()
            path = path if path.is_absolute() else (self.folder / path).resolve()
            path.exists()
        except (OSError, ValueError, RuntimeError) as error:
            # A NUL character, a name longer than the file system takes, a folder without permission, ~nobody.
            raise PortFileError(
                f"port {self.name!r} names a path that cannot be opened",
                expected="a path that this machine can have",
                found=error,
                where=repr(text)[:120],
                next_step="correct the path",
            ) from error
        return path

    def fields(self, *names: str) -> dict[str, Any]:
        """The named top-level fields, JSON-ready: what a step's result depends on."""
        return self.model_dump(mode="json", include=set(names))


def load_port(
    path: str | Path, overrides: Mapping[str, Any] | None = None, *, defaults: Mapping[str, Any] | None = None
) -> Port:
    """Read and validate a port file.

    Args:
        path: the YAML file.
        overrides: values by field name, dotted for fields of a section (`target.tp_size`); None values are ignored.
        defaults: fields that the file may lack, by name.

    Raises:
        PortFileError: no such file, not YAML, an unknown key, or a value of the wrong kind.
    """
    file = Path(path)
    if not file.is_file():
        raise PortFileError(
            "the port file does not exist",
            expected="a YAML file",
            found="a folder" if file.is_dir() else "no such file",
            where=file,
            next_step="name a YAML port file",
        )
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        # ValueError: bytes that are not UTF-8, or a date such as 2026-13-45.
        raise PortFileError(
            "the port file is not valid YAML",
            expected="YAML",
            found=error,
            where=file,
            next_step="correct the line that the error names",
        ) from error
    if not isinstance(document, dict):
        raise PortFileError(
            "the port file is not a mapping",
            expected="keys with values, from name and base on",
            found=type(document).__name__,
            where=file,
            next_step="write it as key: value",
        )
    return make_port({**(defaults or {}), **document}, overrides, folder=file.resolve().parent, where=file)


def make_port(
    document: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, folder: Path, where: object = None
) -> Port:
    """Validate a port given as a dict. Raises PortFileError, see `load_port`."""
    wrong = [key for key in document if not isinstance(key, str)]
    if wrong:
        raise PortFileError(
            "port file has a key that is no text",
            expected="text",
            found=repr(wrong[0]),
            where=where,
            next_step="YAML reads on, off, yes, no and numbers as values: correct or quote the key",
        )
    merged = merge_overrides(dict(document), overrides or {})
    if "folder" in merged:
        raise PortFileError(
            "port file has an unknown key 'folder'",
            expected="keys of a port",
            found="folder",
            where=where,
            next_step="take the key out: paths start from the port file's own folder",
        )
    try:
        return Port(**merged, folder=folder)
    except ValidationError as error:
        raise word_problem(error, where, suggest_field_name) from error


def merge_overrides(document: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lay overrides over a port document. A dotted name reaches into a section; the names are checked here.

    Raises:
        PortFileError: no field of that name.
    """
    merged = dict(document)
    for dotted, value in overrides.items():
        if value is None:
            continue
        check_field_name(dotted)
        head, _, rest = dotted.partition(".")
        if not rest:
            both = isinstance(value, Mapping) and isinstance(merged.get(head), Mapping)
            merged[head] = {**merged[head], **value} if both else value
            continue
        section = merged.get(head, {})
        short = {"heads": "path", "trtllm": "source"}.get(head)
        section = {short: section} if short and isinstance(section, str) else section
        if not isinstance(section, Mapping):
            raise PortFileError(
                f"{dotted!r} cannot be set: {head!r} is no section",
                expected="a mapping of fields",
                found=repr(section),
                next_step=f"set {head} itself, or name a field of a section",
            )
        section = dict(section)
        for spelling in next((field for field in _field_spellings(head) if rest in field), ()):
            section.pop(spelling, None)  # an override replaces the field however the file spells it
        section[rest] = value
        merged[head] = section
    return merged


def _field_spellings(section: str) -> list[list[str]]:
    """For each field of a section its name, then its short forms; nothing where there is no such section."""
    sections = {"heads": Heads, "trtllm": TensorRTLLM, "target": Target, "alignment": Alignment}
    fields = sections[section].model_fields.items() if section in sections else ()
    return [
        [name, *(str(alias) for alias in getattr(info.validation_alias, "choices", ()) if alias != name)]
        for name, info in fields
    ]


def check_field_name(dotted: str) -> None:
    """Raise PortFileError, with the nearest name, when the port file has no such field."""
    known = known_field_names()
    if dotted not in known:
        near = suggest_field_name(dotted)
        raise PortFileError(
            f"the port file has no field {dotted!r}",
            expected=f"did you mean {near!r}?" if near else "a field of the port file",
            found=repr(dotted),
            next_step="name one of: " + ", ".join(sorted(name for name in known if "." not in name)),
        )


def suggest_field_name(dotted: str) -> str | None:
    """The nearest field: of the whole dotted name, or of its last part alone."""
    known = known_field_names()
    near = suggest_nearest(dotted, known)
    if near is None:
        leaves = {name.rpartition(".")[2]: name for name in known}
        leaf = suggest_nearest(dotted.rpartition(".")[2], leaves)
        near = leaves[leaf] if leaf else None
    return near


def known_field_names() -> list[str]:
    """Every field of the port file, sections as dotted names, aliases included."""
    names = []
    for name in Port.model_fields:
        if name == "folder":
            continue
        names.append(name)
        names += [f"{name}.{spelling}" for field in _field_spellings(name) for spelling in field]
    return names
