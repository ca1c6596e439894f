"""The patch: golden pairs, byte identity outside the edits, idempotence, refusals and missing anchors."""

from __future__ import annotations

import difflib
import re

import pytest

from porting_kit.errors import PatchError
from porting_kit.patching import find_dropped_arguments, patch_model_source
from tests.patching.golden_cases import FOLDER, NAMES, patch_case, read_case

ERA = ("spec_decoding_params",)
PLAIN = (FOLDER / "plain_decoder" / "before.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_golden_pair(name):
    outcome, said = patch_case(name)
    assert outcome.source == (FOLDER / name / "after.py").read_text(encoding="utf-8")
    assert said == read_case(name)
    # A hand-written expectation beside the generated one: the folder's name says whether the case is refused.
    assert (outcome.status == "refused") == name.startswith("refused_")


@pytest.mark.parametrize("name", NAMES)
def test_edits_only_add(name):
    outcome, _ = patch_case(name)
    before = (FOLDER / name / "before.py").read_text(encoding="utf-8")
    operations = difflib.SequenceMatcher(None, before, outcome.source, autojunk=False).get_opcodes()
    assert {tag for tag, *_ in operations} <= {"equal", "insert"}
    added = "".join(outcome.source[start:end] for tag, _, _, start, end in operations if tag == "insert")
    if any(edit.site == "new function" for edit in outcome.edits):
        return  # a function is listed by its name alone
    written = sum(len(argument) for edit in outcome.edits for argument in edit.added)
    assert len(re.sub(r"[\s,]", "", added)) == written


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("refused_")])
def test_applying_twice_equals_once(name):
    outcome, said = patch_case(name)
    compile(outcome.source, name, "exec")
    again = patch_model_source(outcome.source, spec_arguments=tuple(said["spec_arguments"]), file=name)
    assert (again.status, again.source, again.edits) == ("already_accepts", outcome.source, ())


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_line_endings_are_kept(newline):
    outcome = patch_model_source(PLAIN.replace("\n", newline), spec_arguments=ERA, file="model.py")
    expected = (FOLDER / "plain_decoder" / "after.py").read_text(encoding="utf-8").replace("\n", newline)
    assert outcome.source == expected


def test_calls_without_arguments_and_non_ascii_text():
    source = PLAIN.replace("self.attention(self.norm(hidden_states),", "self.attention(", 1)
    source = re.sub(r"return self\.layers\([^)]*\)", "return self.layers()  # größer ≥ 0", source)
    outcome = patch_model_source(source, spec_arguments=ERA, file="model.py")
    assert "return self.layers(spec_decoding_params=spec_decoding_params)  # größer ≥ 0" in outcome.source


def _without_call(source: str, call: str) -> str:
    changed = source.replace(call, "something_else(")
    assert changed != source
    return changed


@pytest.mark.parametrize(
    ("source", "subject", "quoted"),
    [
        (_without_call(PLAIN, "self.attention("), "no decoder layer", None),
        (_without_call(PLAIN, "self.layers("), "no call that runs the decoder layer PlainDecoderLayer", "self.<list>"),
        (PLAIN + "\n\nclass PlainModel:\n    pass\n", "class PlainModel is defined twice", "one definition"),
        (
            PLAIN.replace("    def forward(self,\n", "    def forward(self):\n        pass\n\n    def forward(self,\n"),
            "PlainDecoderLayer.forward is defined twice",
            "one definition",
        ),
        (
            PLAIN.replace("attention_params=attention_params)\n        if", "spec_decoding_params=None)\n        if"),
            "self.attention is given spec_decoding_params=None on purpose",
            "spec_decoding_params=spec_decoding_params",
        ),
        (
            PLAIN.replace("                                attention_mask=attention_mask,", "mask, use_cache, kv,"),
            "self.attention is called with 4 arguments by position",
            "keywords",
        ),
        ("def broken(:\n", "cannot be parsed", "Python"),
    ],
    ids=["attention", "layers", "class twice", "method twice", "given None", "by position", "syntax"],
)
def test_unknown_shapes_are_refused(source, subject, quoted):
    if quoted is None:
        outcome = patch_model_source(source, spec_arguments=ERA, file="model.py")
        assert outcome.status == "refused"
        assert subject in outcome.reason
        assert outcome.source == source
        return
    with pytest.raises(PatchError) as caught:
        patch_model_source(source, spec_arguments=ERA, file="model.py")
    assert subject in caught.value.subject
    assert quoted in caught.value.message
    assert "model.py" in caught.value.message


def test_one_layer_whose_attention_is_never_called_is_refused():
    two = (FOLDER / "two_kinds_of_layers" / "before.py").read_text(encoding="utf-8")
    two = two.replace("        self.self_attn = ", "        self.spare = Attention(1)\n        self.self_attn = ")
    with pytest.raises(PatchError, match="no call of SparseDecoderLayer's attention"):
        patch_model_source(two, spec_arguments=ERA, file="model.py")


def test_the_patched_call_receives_the_argument():
    """Run a patched file with stand-in classes: what the top is given arrives at attention."""
    received = []

    class Module:
        def __call__(self, *args, **kwargs):
            return self.forward(*args, **kwargs)

    class Attention(Module):
        def __init__(self, **kwargs):
            pass

        def forward(self, hidden_states, **kwargs):
            received.append(kwargs.get("spec_decoding_params"))
            return hidden_states

    class LayerNorm(Module):
        def __init__(self, **kwargs):
            pass

        def forward(self, x):
            return x

    class DecoderLayerList(Module):
        def __init__(self, cls, config):
            self.members = [cls(config, index) for index in range(2)]

        def forward(self, hidden_states, **kwargs):
            for layer in self.members:
                hidden_states = layer(hidden_states, **kwargs)
            return hidden_states

    def run(source):
        received.clear()
        names = dict(Module=Module, Attention=Attention, LayerNorm=LayerNorm, DecoderLayerList=DecoderLayerList)
        body = re.sub(r"^from .*\n", "", source, flags=re.MULTILINE).replace("(DecoderModelForCausalLM)", "")
        exec(compile(body, "patched", "exec"), names)
        model = names["PlainModel"](type("Config", (), {"hidden_size": 1}))
        model(1, spec_decoding_params="tree")
        return received

    with pytest.raises(TypeError, match="spec_decoding_params"):
        run(PLAIN)
    patched = patch_model_source(PLAIN, spec_arguments=ERA, file="model.py").source
    assert run(patched) == ["tree", "tree"]


def test_a_patch_that_would_stay_incomplete_is_not_given_out(monkeypatch):
    """Seeded fault: an editor that forgets the calls. The check after the patch must notice."""
    from porting_kit.patching import model_source

    keep = model_source.insert_arguments

    def forget_calls(source, arguments, added, newline, **options):
        return keep(source, arguments, added, newline, **options) if "=None" in added[0] else []

    monkeypatch.setattr(model_source, "insert_arguments", forget_calls)
    with pytest.raises(PatchError, match="still drops the arguments"):
        patch_model_source(PLAIN, spec_arguments=ERA, file="model.py")
    assert find_dropped_arguments(PLAIN, ERA)
