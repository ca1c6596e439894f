"""Whether an engine folder may be used for a port at all: its files, its config, and the record beside it.

An engine belongs to one release, card, checkpoint and tree. Its config tells the release and the model; only
the record tells tree, checkpoint and card, so an engine without one is refused rather than trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from porting_kit.engine.capture_evidence import RECORD_NAME, check_engine_folder
from porting_kit.engine.engine_config import EngineConfig, read_engine_config
from porting_kit.engine.record import check_engine, mode_gate, read_record, require_same_port
from porting_kit.errors import CheckpointError
from porting_kit.releases.kernels import GateResult

MODEL_FIELDS = ("architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""What an engine's config repeats of its checkpoint's model."""
RUN_FIELDS = {
    "num_medusa_heads": "number of Medusa heads",
    "max_draft_len": "draft limit",
    "mapping": "number of ranks",
}
"""What it repeats of how the model is run. An engine of the same model may differ in these, and is told so first."""
RANKS = ("tp_size", "pp_size")


def open_engine_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    choices: Sequence[Sequence[int]],
    checkpoint_dir: Path,
    release: str,
    compute_capability: str,
) -> EngineConfig:
    """The engine's config, when the folder holds a whole engine of this port.

    Args:
        folder: the engine's folder.
        config: the config.json of the port's checkpoint.
        choices: the port's tree, every node listed.
        checkpoint_dir: the port's checkpoint.
        release: the release the port is planned for.
        compute_capability: of the card the port is for ("9.0").

    Raises:
        CheckpointError: a file is missing or empty; or the engine is of another release, mode, draft limit, number of
            heads or ranks, model, tree, checkpoint or card, or has no record to tell.
    """
    engine = read_engine_config(folder)
    if problem := check_engine_folder(folder, engine.tp_size * engine.pp_size):
        raise CheckpointError(
            "the engine folder holds no whole engine",
            expected="config.json and an engine file for every rank",
            found=problem,
            where=folder,
            next_step="build again, or copy the folder again",
        )
    _require_release(engine, release)
    _require_run(engine, config)
    _require_model(engine, config)
    _require_tree(engine, choices)
    if not (folder / RECORD_NAME).is_file():
        raise CheckpointError(
            "the engine has no record beside it, so nobody can tell its tree, checkpoint and card",
            expected=RECORD_NAME,
            found="none",
            where=folder,
            next_step="where it was built from this run folder: python3 engine/capture.py record --engine-dir ENGINE",
        )
    card = {"compute_capability": compute_capability}
    require_same_port(
        read_record(folder), choices=choices, checkpoint_dir=checkpoint_dir, release=release, card=card, where=folder
    )
    return engine


def _require_release(engine: EngineConfig, release: str) -> None:
    if engine.release != release:
        raise CheckpointError(
            "the engine was built by another release of TensorRT-LLM",
            expected=release,
            found=engine.release,
            where=engine.where,
            next_step="build again, or name the engine's release: -p trtllm.release=...",
        )


def _require_run(engine: EngineConfig, config: Mapping[str, Any]) -> None:
    """The mode, then each limit by its name."""
    gate = mode_gate(engine)
    if gate.verdict == "refused":
        _refuse_gate(engine, gate)
    for name, words in RUN_FIELDS.items():
        wanted, found = _read_field(config, name), _read_field(engine.model, name)
        if wanted is not None and wanted != found:
            raise CheckpointError(
                f"the engine was built for another {words}",
                expected=f"{name}: {wanted}, as the port's checkpoint says",
                found=found,
                where=engine.where,
                next_step="build again from this port's checkpoint",
            )


def _read_field(config: Mapping[str, Any], name: str) -> Any:
    if name != "mapping":
        return config.get(name)
    mapping = config.get(name) or {}
    return ", ".join(f"{size} {mapping.get(size, 1)}" for size in RANKS)


def _require_model(engine: EngineConfig, config: Mapping[str, Any]) -> None:
    pairs = {name: (config.get(name), engine.model.get(name)) for name in MODEL_FIELDS}
    unlike = [
        f"{name}: {found} instead of {wanted}"
        for name, (wanted, found) in pairs.items()
        if wanted is not None and wanted != found
    ]
    if unlike:
        raise CheckpointError(
            "the engine was built from another model",
            expected="the checkpoint of this port",
            found=f"{len(unlike)} settings differ",
            where=engine.where,
            items=unlike,
            next_step="build again from this port's checkpoint",
        )


def _require_tree(engine: EngineConfig, choices: Sequence[Sequence[int]]) -> None:
    depth = max(map(len, choices))
    for gate in check_engine(engine, num_drafts=len(choices), depth=depth):
        if gate.verdict == "refused":
            _refuse_gate(engine, gate)


def _refuse_gate(engine: EngineConfig, gate: GateResult) -> NoReturn:
    raise CheckpointError(
        f"the engine cannot run this tree: {gate.name}",
        expected=gate.expected,
        found=gate.value,
        where=engine.where,
        next_step=gate.remedy,
    )
