"""Whether an engine fits the tree it will be run with, and the record that keeps the two together.

An engine's config.json states the draft limit, the mode, the batch and the lengths that were fixed when it was built;
the tree comes later, from another file, and the runtime only compares two bare numbers at the first request. The
record written beside the engine keeps them together: tree, versions, flags, hashes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from porting_kit.engine.capture_evidence import RECORD_NAME, digest_file
from porting_kit.engine.capture_kit import digest_checkpoint
from porting_kit.engine.command import CommandPlan
from porting_kit.engine.engine_config import EngineConfig
from porting_kit.errors import CheckpointError
from porting_kit.provenance import describe_environment
from porting_kit.releases.build_flags import compare_releases
from porting_kit.releases.kernels import GateResult
from porting_kit.releases.port_gates import max_num_tokens_gate, tree_gate
from porting_kit.whole_files import read_json


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
        mode_gate(engine),
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


def mode_gate(engine: EngineConfig) -> GateResult:
    """Whether the engine was built for Medusa at all: by its mode, in early releases by its draft limit."""
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
        CheckpointError: no record, not JSON, an engine file of 0 bytes, or engine files or config that changed since.
    """
    file = folder / RECORD_NAME
    if not file.is_file():
        raise CheckpointError(
            "the engine has no record beside it",
            expected=RECORD_NAME,
            found="no such file",
            where=folder,
            next_step="where it was built from this run folder: python3 engine/capture.py record --engine-dir ENGINE",
        )
    try:
        record = read_json(file)
    except ValueError as error:
        raise CheckpointError(
            "the engine's record is not JSON",
            expected="the JSON file that the build wrote",
            found=error,
            where=file,
            next_step="build again",
        ) from None
    engines = sorted(folder.glob("*.engine"))
    empty = [path.name for path in engines if path.stat().st_size == 0]
    if empty:
        raise CheckpointError(
            "an engine file is empty",
            expected="a built engine",
            found=f"{', '.join(empty)}: 0 bytes",
            where=folder,
            next_step="build again",
        )
    found = {path.name: digest_file(path) for path in engines}
    if not isinstance(record, dict) or found != record.get("engine"):
        recorded = record.get("engine", {}) if isinstance(record, dict) else {}
        raise CheckpointError(
            "the engine files are not the ones the record is about",
            expected=", ".join(recorded),
            found=", ".join(found) or "none",
            where=folder,
            next_step="build again",
        )
    if "config" in record and record["config"] != digest_file(folder / "config.json"):
        raise CheckpointError(
            "the engine's config.json was changed after its record was written",
            expected="the config that the record is about",
            found="another one",
            where=folder,
            next_step="build again",
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
    if card is not None and isinstance(recorded_card, dict):
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
