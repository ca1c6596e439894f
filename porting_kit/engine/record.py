"""What an engine folder says of itself, and whether that fits the tree it will be run with.

An engine's config.json states the draft limit, the mode, the batch and the lengths that were fixed when it was built;
the tree comes later, from another file, and the runtime only compares two bare numbers at the first request. The
record written beside the engine keeps them together: tree, versions, flags, hashes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.engine.capture_evidence import RECORD_NAME, digest_file
from porting_kit.engine.capture_kit import digest_checkpoint
from porting_kit.engine.command import CommandPlan
from porting_kit.errors import CheckpointError
from porting_kit.provenance import describe_environment
from porting_kit.releases.build_flags import compare_releases
from porting_kit.releases.kernels import GateResult
from porting_kit.releases.port_gates import max_num_tokens_gate, tree_gate
from porting_kit.run_folder import read_json

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


def read_engine_config(folder: str | Path) -> EngineConfig:
    """Read an engine folder's config.json.

    Raises:
        CheckpointError: no config.json, not JSON, or not an engine's (a checkpoint's, or one of the old builder).
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise CheckpointError("the engine folder has no config.json", where=folder, next_step="build the engine first")
    try:
        document = read_json(file)
    except ValueError as error:
        raise CheckpointError("the engine's config.json is not JSON", found=error, where=file) from None
    missing = [key for key in ("version", "pretrained_config", "build_config") if key not in document]
    if missing:
        raise CheckpointError(
            "this config.json is not an engine's",
            expected="version, pretrained_config and build_config",
            found=f"without {', '.join(missing)}" + (": a checkpoint's" if "architecture" in document else ""),
            where=file,
            next_step="name the folder that trtllm-build wrote",
        )
    model, build = document["pretrained_config"], document["build_config"]
    mapping, plugins = model.get("mapping") or {}, build.get("plugin_config") or {}
    output = build.get("max_output_len")
    return EngineConfig(
        release=str(document["version"]),
        architecture=str(model.get("architecture")),
        mode=_mode_name(build.get("speculative_decoding_mode")),
        max_draft_len=build.get("max_draft_len", model.get("max_draft_len", model.get("max_medusa_token_len", 0))),
        num_medusa_heads=model.get("num_medusa_heads", 0),
        max_batch_size=build.get("max_batch_size", 1),
        max_input_len=build.get("max_input_len"),
        max_seq_len=build.get("max_seq_len") or (build["max_input_len"] + output if output else None),
        max_num_tokens=build.get("max_num_tokens"),
        tokens_per_block=plugins.get("tokens_per_block"),
        tp_size=mapping.get("tp_size", 1),
        pp_size=mapping.get("pp_size", 1),
        gather_generation_logits=bool(build.get("gather_generation_logits", False)),
        where=str(file),
    )


def _mode_name(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, int):
        return MODES.get(value, f"mode {value}")
    return str(value).rsplit(".", maxsplit=1)[-1].lower()


def check_engine(
    engine: EngineConfig, *, num_drafts: int, depth: int, planned_release: str | None = None
) -> tuple[GateResult, ...]:
    """Whether an engine fits the tree, its own limits, and the release it was planned for.

    Args:
        engine: from `read_engine_config`.
        num_drafts: N - 1 of the tree that will be used.
        depth: its deepest level.
        planned_release: the release of the plan, None to leave it out.
    """
    gates = [
        _mode_gate(engine),
        tree_gate(
            num_drafts=num_drafts, depth=depth, num_heads=engine.num_medusa_heads, max_draft_len=engine.max_draft_len
        ),
        max_num_tokens_gate(
            max_batch_size=engine.max_batch_size, num_nodes=num_drafts + 1, max_num_tokens=engine.max_num_tokens
        ),
    ]
    if planned_release is not None:
        gates.append(_release_gate(engine.release, planned_release))
    return tuple(gates)


def _mode_gate(engine: EngineConfig) -> GateResult:
    source = "cpp/tensorrt_llm/runtime/gptJsonConfig.cpp 0.14.0.dev2024100800 l.227"
    if engine.mode in (None, "medusa") and engine.max_draft_len > 0:
        value = engine.mode or f"by the draft limit, {engine.max_draft_len}"
        return GateResult("engine mode", value, "pass", "medusa", source=source)
    return GateResult(
        "engine mode",
        f"{engine.mode or 'none'}, max_draft_len {engine.max_draft_len}",
        "refused",
        "medusa",
        effect=f"the engine allows {engine.max_draft_len} draft tokens in the mode {engine.mode or 'none'}: it was not "
        "built for Medusa",
        remedy="build with the planned command",
        source=source,
    )


def _release_gate(built: str, planned: str) -> GateResult:
    if built == planned:
        return GateResult("engine release", built, "pass", planned, source="the engine's config.json")
    differences = compare_releases(planned, built)
    return GateResult(
        "engine release",
        built,
        "refused" if differences else "pass",
        planned,
        effect=f"{len(differences)} known differences, such as "
        + "; ".join(f"{item.subject}: {item.first} -> {item.second}" for item in differences[-3:])
        if differences
        else None,
        remedy="run with the release that built it, and plan for that release" if differences else None,
        source="the engine's config.json",
    )


def write_record(
    folder: Path,
    *,
    plan: CommandPlan,
    choices: Sequence[Sequence[int]],
    checkpoint_dir: Path,
    seconds: float,
    card: Mapping[str, str] | None = None,
) -> Path:
    """Write tree, plan, versions and hashes beside the engine, so that they cannot be lost from each other.

    Args:
        folder: the engine's folder.
        plan: the command that built it.
        choices: the tree, every node listed.
        checkpoint_dir: what it was built from.
        seconds: of the build.
        card: name and compute_capability of the card it was built on.
    """
    record = {
        "release": plan.release,
        "command": list(plan.command),
        "medusa_choices": [list(path) for path in choices],
        "checkpoint": digest_checkpoint(checkpoint_dir),
        "engine": {file.name: digest_file(file) for file in sorted(folder.glob("*.engine"))},
        "config": digest_file(folder / "config.json"),
        "environment": describe_environment(),
        "card": None if card is None else dict(card),
        "seconds": round(seconds, 1),
    }
    file = folder / RECORD_NAME
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(file)
    return file


def read_record(folder: Path) -> dict[str, Any]:
    """The record beside an engine; its engine files must be the ones recorded, whole or copied.

    Raises:
        CheckpointError: no record, not JSON, an engine file of 0 bytes, or engine files that changed since.
    """
    file = folder / RECORD_NAME
    if not file.is_file():
        raise CheckpointError("the engine has no record beside it", expected=RECORD_NAME, where=folder)
    try:
        record = read_json(file)
    except ValueError as error:
        raise CheckpointError("the engine's record is not JSON", found=error, where=file) from None
    engines = sorted(folder.glob("*.engine"))
    empty = [path.name for path in engines if path.stat().st_size == 0]
    if empty:
        raise CheckpointError(
            "an engine file is empty", found=f"{', '.join(empty)}: 0 bytes", where=folder, next_step="build again"
        )
    found = {path.name: digest_file(path) for path in engines}
    if not isinstance(record, dict) or found != record.get("engine"):
        recorded = record.get("engine", {}) if isinstance(record, dict) else {}
        raise CheckpointError(
            "the engine files are not the ones the record is about",
            expected=", ".join(recorded),
            found=", ".join(found) or "none",
            where=folder,
            next_step="build again, or remove the record",
        )
    return record


def require_same_port(
    record: Mapping[str, Any],
    *,
    choices: Sequence[Sequence[int]],
    checkpoint_dir: Path,
    release: str | None = None,
    card: Mapping[str, str] | None = None,
    where: Path | None = None,
) -> None:
    """Refuse to use an engine with another tree, checkpoint, release or card than it was built for.

    Args:
        record: from `read_record`.
        choices: the tree that will be used.
        checkpoint_dir: the run's checkpoint.
        release: the release that will run it; None leaves it out.
        card: name and compute_capability of this machine's card; None leaves it out.
        where: the engine's folder, for the message.

    Raises:
        CheckpointError: names what differs.
    """
    pairs = {
        "tree": ([list(path) for path in choices], record.get("medusa_choices")),
        "checkpoint": (digest_checkpoint(checkpoint_dir), record.get("checkpoint")),
    }
    if release is not None:
        pairs["release of TensorRT-LLM"] = (release, record.get("release"))
    recorded_card = record.get("card")
    if card is not None and recorded_card is not None:
        pairs["card"] = (card["compute_capability"], recorded_card.get("compute_capability"))
    for name, (expected, found) in pairs.items():
        if expected != found:
            raise CheckpointError(
                f"the engine was built for another {name}",
                expected=str(expected)[:120],
                found=str(found)[:120],
                where=where,
                next_step="build again for this port: porting-kit build",
            )
