"""The static check: each mistake of a hand-made patch is found, with class, line, level and kind."""

from __future__ import annotations

import pytest

from porting_kit.patching import find_dropped_arguments
from tests.patching.golden_cases import FOLDER, NAMES, patch_case

ERA = ("spec_decoding_params",)
PATCHED = (FOLDER / "plain_decoder" / "after.py").read_text(encoding="utf-8")
BRANCHES = (FOLDER / "branches_and_inner_method" / "after.py").read_text(encoding="utf-8")
OWN_TOP = (FOLDER / "own_list_and_top" / "after.py").read_text(encoding="utf-8")


def _change(source: str, old: str, new: str, occurrence: int = 1) -> str:
    """Replace one occurrence, counted from one; the text must be there."""
    parts = source.split(old)
    assert len(parts) > occurrence, f"{old!r} is not there {occurrence} times"
    return old.join(parts[:occurrence]) + new + old.join(parts[occurrence:])


def _find(source: str) -> list[tuple[str, str, str, str | None]]:
    return [(drop.class_name, drop.level, drop.kind, drop.call) for drop in find_dropped_arguments(source, ERA)]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("refused_")])
def test_patched_files_are_clean(name):
    outcome, said = patch_case(name)
    assert find_dropped_arguments(outcome.source, tuple(said["spec_arguments"])) == ()


PASS = "spec_decoding_params=spec_decoding_params"
SIGNATURE = ",\n                spec_decoding_params=None"
SEEDED = {
    "attention call does not pass it": (
        _change(PATCHED, f",\n                                {PASS}", ""),
        [("PlainDecoderLayer", "attention", "not passed", "self.attention")],
    ),
    "attention call passes None": (
        _change(PATCHED, PASS, "spec_decoding_params=None"),
        [("PlainDecoderLayer", "attention", "not passed", "self.attention")],
    ),
    "layers call does not pass it": (
        _change(PATCHED, f",\n                           {PASS}", ""),
        [("PlainModel", "layer", "not passed", "self.layers")],
    ),
    "layer has no parameter": (
        _change(PATCHED, SIGNATURE, ""),
        [("PlainDecoderLayer", "layer", "missing parameter", None)],
    ),
    "model has no parameter": (
        _change(PATCHED, SIGNATURE, "", 2),
        [("PlainModel", "model", "missing parameter", None)],
    ),
    "model swallows it": (
        _change(_change(PATCHED, SIGNATURE, ", **kwargs", 2), f",\n                           {PASS}", ""),
        [
            ("PlainModel", "model", "swallowed by **kwargs", None),
            ("PlainModel", "layer", "not passed", "self.layers"),
        ],
    ),
    "names of another release": (
        PATCHED.replace("spec_decoding_params", "medusa_packed_mask"),
        [
            ("PlainDecoderLayer", "layer", "another release's name", None),
            ("PlainDecoderLayer", "layer", "missing parameter", None),
            ("PlainDecoderLayer", "attention", "another release's name", "self.attention"),
            ("PlainDecoderLayer", "attention", "not passed", "self.attention"),
            ("PlainModel", "model", "another release's name", None),
            ("PlainModel", "model", "missing parameter", None),
            ("PlainModel", "layer", "another release's name", "self.layers"),
            ("PlainModel", "layer", "not passed", "self.layers"),
        ],
    ),
    "attention call of one branch only": (
        _change(BRANCHES, f",\n                                  {PASS}", ""),
        [("BranchingDecoderLayer", "attention", "not passed", "self.attention")],
    ),
    "inner method is not given it": (
        _change(BRANCHES, f",\n                                                       {PASS}", ""),
        [("BranchingDecoderLayer", "layer", "not passed", "self._run_attention")],
    ),
    "top class has no parameter": (
        _change(OWN_TOP, SIGNATURE, "", 3),
        [("OwnForCausalLM", "top", "missing parameter", None)],
    ),
    "top class does not pass it": (
        _change(OWN_TOP, f",\n                                        {PASS}", ""),
        [("OwnForCausalLM", "model", "not passed", "self.transformer.forward")],
    ),
    "own list does not pass it": (
        _change(OWN_TOP, f",\n                                  {PASS}", ""),
        [("OwnLayerList", "layer", "not passed", "layer")],
    ),
}


@pytest.mark.parametrize("fault", SEEDED)
def test_each_seeded_mistake_is_found(fault):
    source, expected = SEEDED[fault]
    assert _find(source) == expected


def test_a_drop_names_its_line():
    source, _ = SEEDED["layers call does not pass it"]
    (drop,) = find_dropped_arguments(source, ERA)
    assert source.splitlines()[drop.line - 1].strip().startswith("return self.layers(")
    assert str(drop) == (
        f"line {drop.line}, PlainModel.forward: spec_decoding_params not passed to self.layers, "
        "so it does not reach the layer"
    )


def test_what_counts_as_passing():
    positional = _change(PATCHED, f",\n                           {PASS}", "").replace(
        "self.layers(input_ids,", "self.layers(input_ids, spec_decoding_params,"
    )
    assert _find(positional) == []
    by_dict = _change(PATCHED, "self.layers(input_ids, use_cache=use_cache,", "self.layers(input_ids, **extra,")
    by_dict = _change(by_dict, f",\n                           {PASS}", "")
    assert _find(by_dict) == [("PlainModel", "layer", "not passed", "self.layers")]
    filled = by_dict.replace(
        "        return self.layers(",
        "        extra = {'spec_decoding_params': spec_decoding_params}\n        return self.layers(",
    )
    assert _find(filled) == []


def test_an_alias_is_followed_and_a_namesake_is_not_mistaken():
    alias = PATCHED.replace("import Attention, LayerNorm", "import Attention as A, LayerNorm").replace(
        "self.attention = Attention(", "self.attention = A("
    )
    assert _find(_change(alias, f",\n                                {PASS}", "")) == [
        ("PlainDecoderLayer", "attention", "not passed", "self.attention")
    ]
    namesake = "class Attention(Module):\n    def forward(self, x):\n        return x\n\n\n" + PATCHED.replace(
        "import Attention, LayerNorm", "import LayerNorm"
    )
    assert _find(namesake.replace(PASS, "spec_decoding_params=None")) == []
