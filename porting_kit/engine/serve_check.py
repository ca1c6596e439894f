"""A check of `trtllm-serve` commands and of their files of LLM options, against a Medusa engine and its tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from porting_kit.engine.engine_config import EngineConfig
from porting_kit.engine.server_files import FoundCommand
from porting_kit.engine.serving import check_flags, is_same_tree, make_gate
from porting_kit.medusa.tree import read_tree
from porting_kit.releases.kernels import GateResult
from porting_kit.releases.serve_facts import (
    DEFAULT_LIMITS,
    OPTION_FILES,
    PROGRAM,
    SAME_OPTION,
    SERVE_SWITCHES,
    ServeFacts,
    find_serve_facts,
)

RUNTIME_TREE = "mc_sim_7b_63"
"""What the runtime decodes with where it is given no tree (see `medusa.named_trees`)."""


def check_serve_command(
    command: FoundCommand, engine: EngineConfig, choices: Sequence[Sequence[int]]
) -> tuple[GateResult, ...]:
    """Gates on one command, by the rules of the engine's release.

    Args:
        command: from `server_files`, of the program `trtllm-serve`.
        engine: the engine's own config, or the planned one.
        choices: the tree it was built for.
    """
    where, facts = f"{PROGRAM}, line {command.line}", find_serve_facts(engine.release)
    if facts is None:
        return (_absent_gate(where, engine.release),)
    given = read_options(command.arguments)
    values = _name_alike({name: " ".join(words) for name, words in given.items()})
    defaults = DEFAULT_LIMITS if facts.stops_above_limit else {}
    file = next((values[name] for name in OPTION_FILES if name in values), None)
    return (
        *check_flags(
            given,
            facts.known,
            where,
            engine.release,
            switches=SERVE_SWITCHES,
            remedy=f"leave the flag out for {engine.release}",
            source=facts.source,
        ),
        *_backend_gates(values.get("backend"), engine.release, facts, where),
        *_value_gates(values, engine, facts, f"{where}: --", defaults),
        _tree_gate(choices, file, facts, where, engine.release),
    )


def check_llm_options(
    options: Mapping[str, Any], engine: EngineConfig, choices: Sequence[Sequence[int]]
) -> tuple[GateResult, ...]:
    """Gates on a YAML file for --extra_llm_api_options, whose values go before those of the command.

    Args:
        options: the file's mapping.
        engine: the engine's own config, or the planned one.
        choices: the tree it was built for.
    """
    where, facts = "the LLM options", find_serve_facts(engine.release)
    if facts is None:
        return (_absent_gate(where, engine.release),)
    values = _name_alike({name: str(value) for name, value in options.items() if not isinstance(value, dict | list)})
    cache = options.get("kv_cache_config")
    if isinstance(cache, dict) and "free_gpu_memory_fraction" in cache:
        values["kv_cache_free_gpu_memory_fraction"] = str(cache["free_gpu_memory_fraction"])
    backend = _backend_gates(values["backend"], engine.release, facts, where) if "backend" in values else ()
    return (
        make_gate(
            f"use of {where}",
            engine.release,
            facts.takes_tree,
            f"a release whose {PROGRAM} takes such a file",
            "no option names the file: it is not read",
            f"serve through Triton, or through LLM: {PROGRAM} takes none before 0.19",
            facts.source,
        ),
        *backend,
        *_value_gates(values, engine, facts, f"{where}: ", {}),
        *_speculative_gates(options.get("speculative_config"), engine, choices, facts, where),
    )


def read_options(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Option -> its value, none for a switch. One word each, and what is left over is the model and the subcommand."""
    found: dict[str, list[str]] = {}
    waiting = None
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
            waiting = None if equals or name in SERVE_SWITCHES else name
        elif waiting is not None:
            found[waiting] = [word]
            waiting = None
    return found


def _name_alike(values: Mapping[str, str]) -> dict[str, str]:
    return {SAME_OPTION.get(name, name): value for name, value in values.items()}


def _absent_gate(where: str, release: str) -> GateResult:
    return make_gate(
        f"release of {where}",
        release,
        False,
        "0.15 to 1.2",
        f"there is no {PROGRAM}: the command is not found",
        "serve through Triton, or use a later release",
        "0.14.0.dev2024100800 has no commands/serve.py",
    )


def _backend_gates(backend: str | None, release: str, facts: ServeFacts, where: str) -> Iterator[GateResult]:
    if backend is None or not _is_open(backend):
        engine_backend = facts.backends[0]
        yield make_gate(
            f"backend of {where}",
            backend or "left out",
            backend in facts.backends,
            " or ".join(name or "left out" for name in facts.backends),
            "the other backends read a Hugging Face folder instead of an engine, and have no Medusa",
            f"give --backend {engine_backend}: {release} takes pytorch without it"
            if engine_backend
            else "leave it out",
            facts.source,
        )


def _value_gates(
    values: Mapping[str, str], engine: EngineConfig, facts: ServeFacts, prefix: str, defaults: Mapping[str, int]
) -> Iterator[GateResult]:
    """Gates on numbers, each where it is given; on limits also where what is left out stands for a number."""

    def gate(name: str, holds: bool, expected: str, effect: str, remedy: str) -> GateResult:
        value = values[name] if name in values else f"left out, which is {defaults[name]}"
        return make_gate(f"{prefix}{name}", value, holds, expected, effect, remedy, facts.source)

    stops = "the server stops before it loads the engine"
    kept = "the engine keeps its own limit: the option is dropped, or the server stops"
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        limit, is_given = getattr(engine, name), name in values
        if limit is not None and (_is_stated(values, name) if is_given else name in defaults):
            number = _read_number(values[name]) if is_given else defaults[name]
            holds = number is not None and 0 < number <= limit
            effect = stops if facts.stops_above_limit and name in DEFAULT_LIMITS else kept
            yield gate(name, holds, f"at most the engine's {limit}", effect, f"set it to {limit}")
    if _is_stated(values, "max_beam_width"):
        holds = _read_number(values["max_beam_width"]) == 1
        yield gate("max_beam_width", holds, "1", "Medusa verifies one greedy sequence", "set it to 1, or leave it out")
    for name in ("tp_size", "pp_size"):
        if _is_stated(values, name):
            built = getattr(engine, name)
            holds = _read_number(values[name]) in (1, built)
            yield gate(name, holds, f"the engine's {built}", stops, "leave it out: the engine says it")
    name = "kv_cache_free_gpu_memory_fraction"
    if _is_stated(values, name):
        number = _read_number(values[name])
        holds = number is not None and 0 < number <= 1
        yield gate(name, holds, "above 0, at most 1", "there is no such share of the memory", "give 0.9 or less")


def _tree_gate(
    choices: Sequence[Sequence[int]], file: str | None, facts: ServeFacts, where: str, release: str
) -> GateResult:
    remedy = f"write the tree into a YAML file as speculative_config, and name it with --{OPTION_FILES[0]}"
    if not facts.takes_tree:
        remedy = f"serve through Triton, or through LLM: {PROGRAM} of {release} takes no tree"
    return make_gate(
        f"tree of {where}",
        f"in {file}, if it is there" if file else f"none given, which is {RUNTIME_TREE}",
        bool(file) or is_same_tree(choices, read_tree(RUNTIME_TREE).choices()),
        "the tree the engine's record holds",
        "the runtime drafts with a tree of its own: fewer tokens are accepted, or an assertion at the first request",
        remedy,
        facts.source,
    )


def _speculative_gates(
    config: object, engine: EngineConfig, choices: Sequence[Sequence[int]], facts: ServeFacts, where: str
) -> Iterator[GateResult]:
    if not isinstance(config, dict):
        yield _tree_gate(choices, None, facts, where, engine.release)
        return
    limits = {"num_medusa_heads": engine.num_medusa_heads, "max_draft_len": engine.max_draft_len}
    for name, wanted in {"decoding_type": "Medusa", **limits}.items():
        yield make_gate(
            f"{name} of {where}",
            str(config.get(name, "not set")),
            config.get(name) == wanted,
            str(wanted),
            "the server stops, or decodes in another mode than the engine was built for",
            f"set speculative_config.{name} to {wanted}",
            facts.source,
        )
    tree = config.get("medusa_choices")
    yield make_gate(
        f"tree of {where}",
        str(tree) if tree else f"not set, which is {RUNTIME_TREE}",
        is_same_tree(choices, tree or read_tree(RUNTIME_TREE).choices()),
        "the tree the engine's record holds",
        "the runtime drafts with another tree: fewer tokens are accepted, or an assertion at the first request",
        f"set speculative_config.medusa_choices to {[list(path) for path in choices]}",
        facts.source,
    )


def _is_stated(values: Mapping[str, str], name: str) -> bool:
    return bool(values.get(name)) and not _is_open(values[name])


def _is_open(value: str) -> bool:
    """Whether the value is known only to the shell, or to what fills in a template."""
    return "$" in value or "{{" in value


def _read_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
