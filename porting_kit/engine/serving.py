"""Server-side settings that go with a Medusa engine, and a check of settings someone wrote.

The parameters are those of the inflight_batcher_llm model in triton-inference-server/tensorrtllm_backend
(all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt): `decoding_mode` left empty lets the engine decide,
`medusa_choices` is written as "{0, 0, 0}, {0, 1}", and a tree of the server's own is used when it is left out.
`batching_strategy` and `gpt_model_type` are two names of one thing in two generations of that file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from porting_kit.engine.argument_check import RENAMED
from porting_kit.engine.engine_config import EngineConfig
from porting_kit.engine.server_files import FoundCommand, find_placeholders
from porting_kit.releases.build_flags import (
    SWITCHES,
    SWITCHES_OR_VALUES,
    known_build_choices,
    known_build_flags,
    known_run_flags,
)
from porting_kit.releases.facts import find_release_facts
from porting_kit.releases.kernels import GateResult
from porting_kit.releases.version import parse_release

SOURCE = "tensorrtllm_backend all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"
RUN_SOURCE = "commands/build.py and examples/run.py of the release"
BATCHING = ("inflight_fused_batching", "inflight_batching")
# Without a value these may stand: the server has defaults for them.
FREE_PLACEHOLDERS = ("decoding_mode", "lookahead_window_size", "eagle_choices")


def make_server_settings(engine: EngineConfig, choices: Sequence[Sequence[int]], engine_dir: str) -> dict[str, str]:
    """The parameters a server needs for this engine; all values are text, as in config.pbtxt."""
    return {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": engine_dir,
        "decoding_mode": "",
        "medusa_choices": _braces(choices),
        "max_beam_width": "1",
        "max_batch_size": str(engine.max_batch_size),
        "decoupled": "false",
    }


def write_pbtxt(settings: Mapping[str, str]) -> str:
    """The settings as they stand in config.pbtxt."""
    lines = [f"max_batch_size: {settings['max_batch_size']}"]
    lines.append("model_transaction_policy { decoupled: " + settings["decoupled"] + " }")
    for key, value in settings.items():
        if key not in ("max_batch_size", "decoupled"):
            lines.append(f'parameters: {{\n  key: "{key}"\n  value: {{ string_value: "{value}" }}\n}}')
    return "\n".join(lines) + "\n"


def write_llm_snippet(
    release: str,
    choices: Sequence[Sequence[int]],
    *,
    num_heads: int,
    max_draft_len: int,
    engine_dir: str,
    tokenizer_dir: str = "tokenizer",
) -> str | None:
    """A Python script that serves the engine through the LLM API; None for a release whose LLM takes no tree.

    MedusaDecodingConfig is there from 0.16.0.dev2024121000 on (llmapi/llm_utils.py); with `max_draft_len` from 0.17 on
    (llmapi/llm_args.py); the engine's LLM stands in `tensorrt_llm._tensorrt_engine` from 1.0 on (read in 1.0.0 and
    1.2.0). The entry point is guarded as GenerationExecutor.create (executor.py 0.16.0.dev2024121000) asks for.
    """
    number = parse_release(release)
    if number < parse_release("0.16.0.dev2024121000"):
        return None
    place = "tensorrt_llm._tensorrt_engine" if number >= parse_release("1.0.0") else "tensorrt_llm"
    limit = f"        max_draft_len={max_draft_len},\n" if number >= parse_release("0.17.0") else ""
    tree = "[" + ", ".join(str(list(path)) for path in choices) + "]"
    return (
        f"# for TensorRT-LLM {release}\n"
        f"from {place} import LLM\n"
        "from tensorrt_llm.llmapi import MedusaDecodingConfig, SamplingParams\n\n\n"
        "def main():\n"
        "    medusa = MedusaDecodingConfig(\n"
        f"        num_medusa_heads={num_heads},\n{limit}"
        f"        medusa_choices={tree},\n"
        "    )\n"
        "    # An engine folder brings no tokenizer: name the base's own folder.\n"
        f'    llm = LLM(model="{engine_dir}", tokenizer="{tokenizer_dir}", speculative_config=medusa)\n'
        "    # top_k 1 is greedy: Medusa verifies one greedy sequence.\n"
        "    params = SamplingParams(max_tokens=64, top_k=1)\n"
        '    for answer in llm.generate(["The sea"], params):\n'
        "        print(answer.outputs[0].text)\n\n\n"
        "# LLM starts worker processes, which import this file: without this line each would start its own.\n"
        'if __name__ == "__main__":\n'
        "    main()\n"
    )


def check_server_settings(
    settings: Mapping[str, str], engine: EngineConfig, choices: Sequence[Sequence[int]], end_ids: Sequence[int] = ()
) -> tuple[GateResult, ...]:
    """Gates on settings someone wrote, against the engine and the tree it was made for.

    Args:
        settings: from `server_files.read_pbtxt`.
        engine: the engine's own config.
        choices: the tree it was built for.
        end_ids: the base's; empty leaves the end token out.
    """
    unfilled = {key: name for key, name in find_placeholders(dict(settings)).items() if key not in FREE_PLACEHOLDERS}
    settings = {key: "" if key in find_placeholders(dict(settings)) else value for key, value in settings.items()}
    mode = settings.get("decoding_mode", "").strip()
    beams = settings.get("max_beam_width", "1").strip() or "1"
    batch = settings.get("max_batch_size", "").strip()
    tree = settings.get("medusa_choices", "").strip()
    batching = (settings.get("gpt_model_type") or settings.get("batching_strategy") or "").strip().lower()
    written = _parse_braces(tree)
    gates = [
        make_gate(
            "template filled in",
            ", ".join(f"{key}: ${{{name}}}" for key, name in unfilled.items()) or "yes",
            not unfilled,
            "no ${...} left",
            "the server reads the placeholder's text as a value, or refuses to start",
            "run fill_template.py of the backend on the file",
        ),
        make_gate(
            "decoding mode",
            mode or "left empty",
            mode in ("", "medusa"),
            "left empty, or medusa",
            "a sampling mode on a Medusa engine returns nothing but zeros",
            "leave decoding_mode empty: the engine decides",
        ),
        make_gate(
            "engine built for Medusa",
            f"{engine.mode or 'no mode'}, {engine.max_draft_len} draft tokens",
            engine.max_draft_len > 0 and engine.mode in (None, "medusa"),
            "the Medusa mode and a draft limit above 0",
            f"an assertion at the first request: {len(written or choices)} draft tokens against {engine.max_draft_len}",
            "build with the planned command: the engine was built without the Medusa mode",
        ),
        make_gate(
            "draft limit",
            f"{len(written)} nodes" if written is not None else (tree or "not set"),
            written is None or len(written) <= engine.max_draft_len,
            f"at most {engine.max_draft_len}",
            f"an assertion with two bare numbers: {len(written or ())} against {engine.max_draft_len}",
            "use the tree the engine was built for, or rebuild with a larger limit",
        ),
        make_gate(
            "server tree",
            tree or "not set",
            is_same_tree(choices, written),
            "the tree the engine's record holds",
            "the server uses its own default tree, or another one: other drafts, or an assertion at the first request",
            "set medusa_choices to the recorded tree",
        ),
        make_gate("beams", beams, beams == "1", "1", "Medusa verifies one greedy sequence", "set max_beam_width to 1"),
        make_gate(
            "batch",
            batch or "not set",
            batch == "" or (batch.isdigit() and int(batch) <= engine.max_batch_size),
            f"at most {engine.max_batch_size}",
            "the server refuses to start",
            f"set max_batch_size to {engine.max_batch_size} or less",
        ),
        make_gate(
            "batching",
            batching or "not set",
            batching in ("", *BATCHING),
            " or ".join(BATCHING),
            "V1 batching runs no tree: the server refuses the engine, or decodes without drafts",
            "set gpt_model_type (batching_strategy in older files) to inflight_fused_batching",
        ),
        *_window_gate(settings, engine),
        *_streaming_gate(settings, engine),
    ]
    if end_ids:
        gates.append(_end_gate(settings, end_ids))
    return tuple(gates)


def check_commands(commands: Sequence[FoundCommand], release: str) -> tuple[GateResult, ...]:
    """Gates on commands in someone's scripts, against the rules of one release.

    Args:
        commands: from `server_files.find_commands`.
        release: the release they will be run with.
    """
    gates = []
    for command in commands:
        known = known_build_flags(release) if command.program == "trtllm-build" else known_run_flags(release)
        given = _flags(command.arguments)
        where = f"{command.program}, line {command.line}"
        gates += check_flags(given, known, where, release)
        if command.program == "trtllm-build":
            choices = known_build_choices(release)
            gates += _choices_gates(given, {name: choices[name] for name in choices if name in known}, where)
        if command.program == "run.py" and "medusa_choices" in given:
            gates += _run_gates({name: " ".join(values) for name, values in given.items()}, release, where)
    return tuple(gates)


def check_flags(
    given: Mapping[str, Sequence[str]],
    known: frozenset[str],
    where: str,
    release: str,
    *,
    switches: frozenset[str] = SWITCHES,
    remedy: str = "",
    source: str = RUN_SOURCE,
) -> tuple[GateResult, GateResult]:
    """The release knows every flag; and every flag that takes a value has one, and no switch has any."""
    strangers = [name for name in given if name not in known]
    renamed = [f"--{name} (now --{RENAMED[name]})" if RENAMED.get(name) in known else f"--{name}" for name in strangers]
    lacking = [name for name, values in given.items() if not values and name not in switches | SWITCHES_OR_VALUES]
    surplus = [name for name, values in given.items() if values and name in switches]
    wrong = [f"--{name} lacks its value" for name in lacking if name in known]
    wrong += [f"--{name} takes no value" for name in surplus if name in known]
    return (
        make_gate(
            f"flags of {where}",
            ", ".join(renamed) or f"{len(given)} flags",
            not strangers,
            f"flags that {release} knows",
            "the command ends at once: unrecognized arguments",
            remedy or f"use the planned command for {release}",
            source,
        ),
        make_gate(
            f"values of {where}",
            ", ".join(wrong) or f"{len(given)} flags",
            not wrong,
            "a value behind every flag but switches",
            "the command ends at once, or takes the next word in another sense",
            "give the value, or leave the flag out",
            source,
        ),
    )


def _choices_gates(
    given: Mapping[str, Sequence[str]], choices: Mapping[str, Sequence[str]], where: str
) -> Iterator[GateResult]:
    """One gate for each flag that takes one of a few words."""
    for name, allowed in choices.items():
        values = [value for value in given.get(name, ()) if not value.startswith("$")]
        if values:
            yield make_gate(
                f"--{name} of {where}",
                " ".join(values),
                all(value in allowed for value in values),
                " or ".join(allowed),
                "the command ends at once: invalid choice",
                f"give one of these to --{name}, or leave it out",
                RUN_SOURCE,
            )


def _run_gates(given: Mapping[str, str], release: str, where: str) -> list[GateResult]:
    facts = find_release_facts(release).run
    temperature = given.get("temperature", "1.0")
    session = "use_py_session" in given
    return [
        make_gate(
            f"temperature of {where}",
            temperature,
            _is_number(temperature, float(facts.temperature)),
            facts.temperature,
            f"an assertion: Medusa takes temperature {facts.temperature} in this release",
            f"set --temperature {facts.temperature}",
            RUN_SOURCE,
        ),
        make_gate(
            f"session of {where}",
            "Python" if session else "C++",
            session or not facts.needs_py_session,
            "the Python session" if facts.needs_py_session else "either session",
            "an assertion: Medusa is only supported by py_session",
            "add --use_py_session",
            RUN_SOURCE,
        ),
    ]


def _window_gate(settings: Mapping[str, str], engine: EngineConfig) -> list[GateResult]:
    window = settings.get("max_attention_window_size", "").strip()
    if not window or engine.max_seq_len is None:
        return []
    sizes = [int(size) for size in window.split(",") if size.strip().isdigit()]
    return [
        make_gate(
            "attention window",
            window,
            bool(sizes) and min(sizes) >= engine.max_seq_len,
            f"at least max_seq_len, {engine.max_seq_len}",
            "past the window the tree kernel is not checked: text goes wrong without a message",
            "leave max_attention_window_size out",
        )
    ]


def _streaming_gate(settings: Mapping[str, str], engine: EngineConfig) -> list[GateResult]:
    if settings.get("decoupled") != "true":
        return []
    is_early = parse_release(engine.release) < parse_release("0.10.0.dev0")
    return [
        make_gate(
            "streaming",
            f"on, {engine.release}",
            not is_early,
            "off before 0.10",
            "several tokens arrive in one answer; early servers lose or repeat some",
            "set decoupled to false, or use a later release",
        )
    ]


def _end_gate(settings: Mapping[str, str], end_ids: Sequence[int]) -> GateResult:
    stated = settings.get("end_id", "").strip()
    return make_gate(
        "end token",
        stated or "left to the tokenizer",
        stated == "" or (stated.isdigit() and int(stated) in end_ids),
        " or ".join(map(str, end_ids)),
        "generation runs past its end inside an accepted group of tokens",
        f"set end_id to {end_ids[0]}, or leave it to the tokenizer",
    )


def make_gate(
    name: str, value: str, holds: bool, expected: str, effect: str, remedy: str, source: str = SOURCE
) -> GateResult:
    """A gate that passes or is refused; effect and remedy are told where it is refused."""
    if holds:
        return GateResult(name, value, "pass", expected, source=source)
    return GateResult(name, value, "refused", expected, effect=effect, remedy=remedy, source=source)


def _braces(choices: Sequence[Sequence[int]]) -> str:
    return ", ".join("{" + ", ".join(str(int(rank)) for rank in path) + "}" for path in choices)


def is_same_tree(choices: Iterable[object], written: object) -> bool:
    """Whether both are lists of the same paths, in any order: the runtime sorts them (medusaModule.cpp)."""
    try:
        one, two = ({tuple(path) for path in paths} for paths in (choices, written))
    except TypeError:
        return False
    return one == two


def _parse_braces(text: str) -> list[list[int]] | None:
    """The tree of a `medusa_choices` parameter, None when there is none or it is no tree."""
    try:
        found = ast.literal_eval("[" + text.replace("{", "[").replace("}", "]") + "]") if text else None
    except (SyntaxError, ValueError):
        return None
    return found if found and all(isinstance(path, list) for path in found) else None


def _flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Flag -> its values, none for a switch."""
    found: dict[str, list[str]] = {}
    name = None
    for word in arguments:
        # a word with a blank is a value whatever it begins with, as argparse reads it
        if word.startswith("--") and " " not in word.partition("=")[0]:
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif name is not None:
            found[name].append(word)
    return found


def _is_number(text: str, wanted: float) -> bool:
    try:
        return float(text) == wanted
    except ValueError:
        return False
