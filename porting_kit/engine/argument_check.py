"""A command line against a tree's own parser: every flag known, every value taken, every companion there.

Stricter than argparse in three points, each of which argparse lets pass in silence: an abbreviated flag, a flag given
twice (the last one wins), and a draft limit without the mode that makes it count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from porting_kit.engine.build_parser import BuildFlag
from porting_kit.engine.parser_guards import find_guard_fault
from porting_kit.errors import SourceTreeError, suggest_nearest
from porting_kit.releases.build_flags import known_build_flags, known_run_flags
from porting_kit.releases.facts import load_release_ranges

# One thing under two names (commands/build.py 0.8 to 1.2): nearness of letters would suggest something else.
RENAMED = {
    "max_output_len": "max_seq_len",
    "max_seq_len": "max_output_len",
    "paged_kv_cache": "kv_cache_type",
    "kv_cache_type": "paged_kv_cache",
    "max_medusa_token_len": "max_draft_len",
    "timing_cache": "input_timing_cache",
    "input_timing_cache": "timing_cache",
    "kv_cache_free_gpu_memory_fraction": "free_gpu_memory_fraction",
}
# A flag, and the one without which it means nothing; the second only where the release has it.
COMPANIONS = (
    ("speculative_decoding_mode", "max_draft_len", "without a draft limit the mode verifies nothing"),
    ("max_draft_len", "speculative_decoding_mode", "the runtime reads the mode from the engine, not from the limit"),
    ("model_cls_name", "model_cls_file", "the name is looked up in that file only"),
    ("model_cls_file", "model_cls_name", "the file may define several classes"),
)


def check_arguments(
    arguments: Sequence[str],
    flags: Mapping[str, BuildFlag],
    *,
    program: str,
    where: object,
    guards: tuple[Path, tuple[str, ...]] | None = None,
) -> None:
    """Refuse a command line that the program would refuse, or take in another sense than it was meant.

    Args:
        arguments: the words behind the program's name.
        flags: from `read_build_parser` or `read_run_parser`.
        program: its name, for the message.
        where: the parser's file.
        guards: the file and its functions whose `raise` and `assert` lines count too; None leaves them out.

    Raises:
        SourceTreeError: an unknown, renamed, doubled or missing flag; a missing, surplus or wrong value; a companion
            that is missing; a line of the source that refuses the combination.
    """
    given: dict[str, list[str]] = {}
    for name, values in _split_arguments(arguments):
        flag = flags.get(name)
        if flag is None:
            raise _unknown_flag(name, flags, program, where)
        if flag.dest in {flags[other].dest for other in given}:
            raise SourceTreeError(
                f"--{name} is given twice",
                expected="once: argparse would take the last one in silence",
                found="twice",
                where=where,
                next_step=f"leave one --{name} out",
            )
        _check_values(flag, values, program)
        given[name] = values
    for name, flag in flags.items():
        if flag.required and flag.dest not in {flags[other].dest for other in given}:
            raise SourceTreeError(
                f"{program} needs --{name}",
                expected=f"--{name} ...",
                found=f"no --{name}",
                where=flag.source,
                next_step=f"add --{name}",
            )
    _check_companions(given, flags, program, where)
    if guards is not None:
        fault = find_guard_fault(*guards, _parsed_values(given, flags))
        if fault is not None:
            raise SourceTreeError(
                f"{program} would refuse this combination of flags",
                expected="flags that go together",
                found=fault.message,
                where=fault.source,
                next_step="leave out one of the flags that line names",
            )


def _split_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    position = 0
    while position < len(arguments):
        token = arguments[position]
        if not token.startswith("--") or token == "--":
            raise SourceTreeError(
                "a value without a flag",
                expected="--flag value",
                found=token,
                next_step="write the flag before its value",
            )
        name, equals, value = token[2:].partition("=")
        position += 1
        values = [value] if equals else []
        while not equals and position < len(arguments) and not arguments[position].startswith("--"):
            values.append(arguments[position])
            position += 1
        yield name, values


def _unknown_flag(name: str, flags: Mapping[str, BuildFlag], program: str, where: object) -> SourceTreeError:
    renamed = RENAMED.get(name)
    near = renamed if renamed in flags else suggest_nearest(name, flags)
    elsewhere = _ranges_with(name, program)
    said = f"{program} has no --{name}"
    if elsewhere:
        said = f"{program} of this release has no --{name}: that flag belongs to {', '.join(elsewhere)}"
    return SourceTreeError(
        said,
        expected=f"--{near}" if near else f"one of {len(flags)} flags",
        found=f"--{name}",
        where=where,
        next_step="make the plan for the release this tree is",
    )


def _ranges_with(name: str, program: str) -> list[str]:
    """Names of the release ranges whose program has the flag."""
    known = known_run_flags if program.endswith("run.py") else known_build_flags
    return [facts.name for facts in load_release_ranges() if name in known(facts.since)]


def _check_values(flag: BuildFlag, values: list[str], program: str) -> None:
    if not flag.takes_value:
        if values:
            raise SourceTreeError(
                f"--{flag.name} is a switch and takes no value",
                expected=f"--{flag.name} alone",
                found=values[0],
                where=flag.source,
                next_step="leave the value out",
            )
        return
    if not values:
        raise SourceTreeError(
            f"--{flag.name} lacks its value",
            expected=f"--{flag.name} VALUE",
            found=f"--{flag.name} alone",
            where=flag.source,
            next_step="add the value",
        )
    if len(values) > 1 and not flag.takes_many:
        raise SourceTreeError(
            f"--{flag.name} takes one value",
            expected="one value",
            found=" ".join(values),
            where=flag.source,
            next_step="quote the value",
        )
    for value in values:
        if flag.choices is not None and value not in flag.choices:
            raise SourceTreeError(
                f"{program} does not take this value for --{flag.name}",
                expected=", ".join(flag.choices),
                found=value,
                where=flag.source,
                next_step="take one of these",
            )
        kind = {"int": (int, "whole number"), "float": (float, "number")}.get(flag.value_type)
        if kind is not None:
            try:
                kind[0](value)
            except ValueError:
                raise SourceTreeError(
                    f"--{flag.name} takes a {kind[1]}",
                    expected=f"a {kind[1]}",
                    found=value,
                    where=flag.source,
                    next_step="correct the value",
                ) from None


def _check_companions(
    given: Mapping[str, list[str]], flags: Mapping[str, BuildFlag], program: str, where: object
) -> None:
    for name, companion, why in COMPANIONS:
        if name in given and companion in flags and companion not in given:
            raise SourceTreeError(
                f"--{name} lacks its companion --{companion}",
                expected=f"--{companion} ...: {why}",
                found=f"{program} with --{name} alone",
                where=where,
                next_step=f"add --{companion}",
            )
    if {"paged_kv_cache", "kv_cache_type"} <= set(given):
        raise SourceTreeError(
            "the KV cache is stated twice",
            expected="--kv_cache_type alone: --paged_kv_cache is its old name",
            found=f"--paged_kv_cache {given['paged_kv_cache'][0]} --kv_cache_type {given['kv_cache_type'][0]}",
            where=where,
            next_step="leave --paged_kv_cache out",
        )


def _parsed_values(given: Mapping[str, list[str]], flags: Mapping[str, BuildFlag]) -> dict[str, object]:
    """What the parser would make of the command: attribute -> value."""
    values: dict[str, object] = {flag.dest: flag.default for flag in flags.values()}
    for name, words in given.items():
        flag = flags[name]
        convert = {"int": int, "float": float}.get(flag.value_type, str)
        if not flag.takes_value:
            values[flag.dest] = flag.default is not True
        else:
            values[flag.dest] = [convert(word) for word in words] if flag.takes_many else convert(words[0])
    return values
