"""What hand-porters get wrong, seeded into patched models of three families: the static check names class and line.

The bundled definitions serve as families; with TRTLLM_SOURCE the same mistakes go into the real ones.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from porting_kit.patching import find_dropped_arguments, patch_architecture
from porting_kit.source_tree import open_source_tree

BUNDLED = ("BloomForCausalLM", "QWenForCausalLM", "GPTNeoXForCausalLM")
REAL = ("BloomForCausalLM", "FalconForCausalLM", "PhiForCausalLM", "OPTForCausalLM")
ROOTS = [Path(each) for each in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if each]
MODELS = [("bundled", name) for name in BUNDLED if name in open_source_tree("bundled").model_names()]
MODELS += [pytest.param(root, name, marks=pytest.mark.upstream) for root in ROOTS for name in REAL]


def patched(root, architecture: str) -> tuple[str, tuple[str, ...]]:
    tree = open_source_tree(root)
    outcome = patch_architecture(tree, architecture)
    assert outcome.status == "patched"
    assert find_dropped_arguments(outcome.source, tree.spec_arguments) == ()
    return outcome.source, tree.spec_arguments


def find(source: str, arguments: tuple[str, ...]) -> list[tuple[str, int, str, str, str | None]]:
    drops = find_dropped_arguments(source, arguments)
    return [(drop.class_name, drop.line, drop.level, drop.kind, drop.call) for drop in drops]


def line_of(source: str, offset: int) -> int:
    return source.count("\n", 0, offset) + 1


def class_at(source: str, offset: int) -> str:
    return re.findall(r"^class (\w+)", source[:offset], re.MULTILINE)[-1]


def calls_of(source: str, argument: str) -> list[re.Match]:
    """Every `, argument=argument` of a call."""
    return list(re.finditer(rf",\s*{argument}={argument}", source))


def call_start(source: str, offset: int) -> int:
    """Where the call begins whose arguments stand at an offset."""
    depth = 0
    while depth <= 0:
        offset -= 1
        depth += {"(": 1, ")": -1}.get(source[offset], 0)
    return source.rfind("self.", 0, offset)


def drop(source: str, match: re.Match) -> str:
    return source[: match.start()] + source[match.end() :]


@pytest.mark.parametrize(("root", "architecture"), MODELS)
def test_one_call_site_not_passed(root, architecture):
    """Each call of each model, one after the other."""
    source, arguments = patched(root, architecture)
    for match in calls_of(source, arguments[-1]):
        start = call_start(source, match.start())
        expected = (class_at(source, start), line_of(source, start))
        found = find(drop(source, match), arguments)
        assert [(name, line) for name, line, _, kind, _ in found if kind == "not passed"] == [expected]


@pytest.mark.parametrize(("root", "architecture"), MODELS)
def test_argument_swallowed_by_kwargs(root, architecture):
    """`**kwargs` in a signature, and a call that does not hand it on: nothing fails at build."""
    source, arguments = patched(root, architecture)
    signatures = list(re.finditer(rf"{arguments[-1]}=None", source))
    assert len(signatures) >= 2
    for signature in signatures:
        call = next(match for match in calls_of(source, arguments[-1]) if match.start() > signature.end())
        swallowed = source[: signature.start()] + "**kwargs" + source[signature.end() : call.start()]
        swallowed += source[call.end() :]
        found = find(swallowed, arguments)
        start = swallowed.rfind("def ", 0, signature.start())
        expected = (class_at(source, start), line_of(swallowed, start), "swallowed by **kwargs")
        assert expected in [(name, line, kind) for name, line, _, kind, _ in found]


@pytest.mark.parametrize(("root", "architecture"), MODELS)
def test_keyword_of_another_era(root, architecture):
    """LLaMA's edits of another release, copied."""
    source, arguments = patched(root, architecture)
    other = "medusa_packed_mask" if arguments[-1].startswith("spec") else "spec_decoding_params"
    wrong = source
    for argument in arguments:
        wrong = re.sub(rf"\b{argument}\b", other, wrong)
    found = find(wrong, arguments)
    named = {(name, kind) for name, _, _, kind, _ in found}
    layers = {class_at(source, match.start()) for match in calls_of(source, arguments[-1])}
    assert {(name, "another release's name") for name in layers} <= named
    for name, line, _, kind, call in found:
        assert class_at(wrong, sum(len(row) + 1 for row in wrong.split("\n")[: line - 1]) + 1) == name
        assert kind != "not passed" or call is not None


@pytest.mark.parametrize(("root", "architecture"), MODELS)
def test_attention_called_in_one_branch_only(root, architecture):
    """A second call of attention, for a case that the porter did not think of, without the argument."""
    source, arguments = patched(root, architecture)
    match = next(each for each in calls_of(source, arguments[-1]) if "attention(" in source[: each.start()])
    start = call_start(source, match.start())
    line_start = source.rfind("\n", 0, start) + 1
    indent = re.match(r" *", source[line_start:])[0]
    other = f"{indent}if self.config is None:\n{indent}    x = self.{source[start + 5 : source.index('(', start)]}("
    other += "use_cache=use_cache, kv_cache_params=kv_cache_params, attention_params=attention_params)\n"
    branched = source[:line_start] + other + source[line_start:]
    expected = (class_at(source, start), line_of(branched, line_start) + 1, "not passed")
    assert [(name, line, kind) for name, line, _, kind, _ in find(branched, arguments)][:1] == [expected]
