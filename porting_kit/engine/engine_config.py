"""What an engine folder's config.json says the engine was built for.

Releases differ in which fields they write; a field of another type than any of them writes is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from porting_kit.errors import CheckpointError
from porting_kit.whole_files import read_json

# SpeculativeDecodingMode, models/modeling_utils.py 0.10.0.dev2024050700 and later (an IntFlag, written as a number).
MODES = {
    1: "none",
    2: "draft_tokens_external",
    4: "medusa",
    8: "lookahead_decoding",
    16: "explicit_draft_tokens",
    32: "eagle",
}


@dataclass(frozen=True)
class EngineConfig:
    """What an engine was built for, from its config.json.

    Args:
        release: the TensorRT-LLM that built it.
        architecture: of the base.
        mode: speculative decoding mode; None in releases that have no such field (before 0.10.0.dev2024050700).
        max_draft_len: draft tokens a step.
        num_medusa_heads: M.
        max_batch_size, max_input_len, max_seq_len, max_num_tokens: limits; None where the release has no such field.
        tokens_per_block: of the paged cache.
        tp_size, pp_size: ranks.
        gather_generation_logits: logits of accepted tokens are kept.
        where: the file.
        model: the checkpoint's config that the engine was built from, as it stands in the file.
    """

    release: str
    architecture: str
    mode: str | None
    max_draft_len: int
    num_medusa_heads: int
    max_batch_size: int
    max_input_len: int | None
    max_seq_len: int | None
    max_num_tokens: int | None
    tokens_per_block: int | None
    tp_size: int
    pp_size: int
    gather_generation_logits: bool
    where: str
    model: Mapping[str, Any] = field(default_factory=dict, repr=False)


def read_engine_config(folder: str | Path) -> EngineConfig:
    """Read an engine folder's config.json.

    Raises:
        CheckpointError: no config.json, not JSON, or not an engine's (a checkpoint's, or one of the old builder).
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise CheckpointError(
            "the engine folder has no config.json",
            expected="config.json beside the engine files",
            found="none",
            where=folder,
            next_step="build the engine first",
        )
    try:
        document = read_json(file)
    except ValueError as error:
        raise CheckpointError(
            "the engine's config.json is not JSON",
            expected="the JSON file that trtllm-build writes",
            found=error,
            where=file,
            next_step="build again, or copy the folder again",
        ) from None
    if not isinstance(document, dict):
        raise CheckpointError(
            "this config.json is not an engine's",
            expected="a JSON object",
            found=type(document).__name__,
            where=file,
            next_step="name the folder that trtllm-build wrote",
        )
    missing = [key for key in ("version", "pretrained_config", "build_config") if key not in document]
    if missing:
        raise CheckpointError(
            "this config.json is not an engine's",
            expected="version, pretrained_config and build_config",
            found=f"without {', '.join(missing)}" + (": a checkpoint's" if "architecture" in document else ""),
            where=file,
            next_step="name the folder that trtllm-build wrote",
        )
    fields = _Fields(file)
    model, build = (fields.read_object(document, name) for name in ("pretrained_config", "build_config"))
    mapping, plugins = fields.read_object(model, "mapping"), fields.read_object(build, "plugin_config")
    inputs, outputs = (fields.read_count(build, name) for name in ("max_input_len", "max_output_len"))
    limits = [fields.read_count(build, "max_draft_len")]
    limits += [fields.read_count(model, name) for name in ("max_draft_len", "max_medusa_token_len")]
    return EngineConfig(
        release=str(document["version"]),
        architecture=str(model.get("architecture")),
        mode=name_mode(build.get("speculative_decoding_mode")),
        max_draft_len=next((limit for limit in limits if limit is not None), 0),
        num_medusa_heads=fields.read_count(model, "num_medusa_heads") or 0,
        max_batch_size=fields.read_count(build, "max_batch_size") or 1,
        max_input_len=inputs,
        max_seq_len=fields.read_count(build, "max_seq_len") or (inputs + outputs if inputs and outputs else None),
        max_num_tokens=fields.read_count(build, "max_num_tokens"),
        tokens_per_block=fields.read_count(plugins, "tokens_per_block"),
        tp_size=fields.read_count(mapping, "tp_size") or 1,
        pp_size=fields.read_count(mapping, "pp_size") or 1,
        gather_generation_logits=bool(build.get("gather_generation_logits", False)),
        where=str(file),
        model=model,
    )


@dataclass(frozen=True)
class _Fields:
    """Reads fields of one config.json, each by its type."""

    file: Path

    def read_object(self, section: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = section.get(name)
        if value is not None and not isinstance(value, dict):
            self._refuse(name, "an object", value)
        return value or {}

    def read_count(self, section: Mapping[str, Any], name: str) -> int | None:
        value = section.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            self._refuse(name, "a whole number", value)
        return value

    def _refuse(self, name: str, expected: str, value: object) -> None:
        raise CheckpointError(
            f"the engine's config.json has an unusable {name}",
            expected=expected,
            found=repr(value)[:120],
            where=self.file,
            next_step="name the folder that trtllm-build wrote",
        )


def name_mode(value: object) -> str | None:
    """The speculative decoding mode as a word, from a config's number or text; None where it has none."""
    if value is None:
        return None
    if isinstance(value, int):
        return MODES.get(value, f"mode {value}")
    return str(value).rsplit(".", maxsplit=1)[-1].lower()
