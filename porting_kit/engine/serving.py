"""Server-side settings that go with a Medusa engine, and a check of settings someone wrote.

The parameters are those of the inflight_batcher_llm model in triton-inference-server/tensorrtllm_backend
(all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt): `decoding_mode` left empty lets the engine decide,
`medusa_choices` is written as "{0, 0, 0}, {0, 1}", and a tree of the server's own is used when it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from porting_kit.engine.record import EngineConfig
from porting_kit.releases.kernels import GateResult

SOURCE = "tensorrtllm_backend all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"


def make_server_settings(engine: EngineConfig, choices: Sequence[Sequence[int]], engine_dir: str) -> dict[str, str]:
    """The parameters a server needs for this engine; all values are text, as in config.pbtxt."""
    return {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": engine_dir,
        "decoding_mode": "",
        "medusa_choices": _braces(choices),
        "max_beam_width": "1",
        "max_batch_size": str(engine.max_batch_size),
    }


def check_server_settings(
    settings: Mapping[str, str], engine: EngineConfig, choices: Sequence[Sequence[int]]
) -> tuple[GateResult, ...]:
    """Gates on settings someone wrote, against the engine and the tree it was made for."""
    mode = settings.get("decoding_mode", "").strip()
    beams = settings.get("max_beam_width", "1").strip() or "1"
    batch = settings.get("max_batch_size", "").strip()
    tree = settings.get("medusa_choices", "").strip()
    return (
        _gate(
            "decoding mode",
            mode or "left empty",
            mode in ("", "medusa"),
            "left empty, or medusa",
            "a sampling mode on a Medusa engine returns nothing but zeros",
            "leave decoding_mode empty: the engine decides",
        ),
        _gate(
            "beams",
            beams,
            beams == "1",
            "1",
            "Medusa verifies one greedy sequence",
            "set max_beam_width to 1",
        ),
        _gate(
            "batch",
            batch or "not set",
            batch == "" or (batch.isdigit() and int(batch) <= engine.max_batch_size),
            f"at most {engine.max_batch_size}",
            "the server refuses to start",
            f"set max_batch_size to {engine.max_batch_size} or less",
        ),
        _gate(
            "server tree",
            tree or "not set",
            "".join(tree.split()) == "".join(_braces(choices).split()),
            "the tree the engine's record holds",
            "the server uses its own default tree, or another one: other drafts, or an assertion at the first request",
            "set medusa_choices to the recorded tree",
        ),
    )


def _gate(name: str, value: str, holds: bool, expected: str, effect: str, remedy: str) -> GateResult:
    if holds:
        return GateResult(name, value, "pass", expected, source=SOURCE)
    return GateResult(name, value, "refused", expected, effect=effect, remedy=remedy, source=SOURCE)


def _braces(choices: Sequence[Sequence[int]]) -> str:
    return ", ".join("{" + ", ".join(str(int(rank)) for rank in path) + "}" for path in choices)
