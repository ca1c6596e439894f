"""The source that follows its config: exact edits, everything else as it was, unknown shapes refused."""

import difflib

import pytest

from porting_kit.errors import PatchError
from porting_kit.kernel_fit.attention_arguments import CONFIG_FIELDS, follow_fit
from porting_kit.kernel_fit.fit_step import KEYWORDS
from porting_kit.source_tree import open_source_tree

LAYER = """\
from ...layers import MLP, Attention as Attn  # a comment


class Layer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        options = {"tp_size": 1}
        self.attention = Attn(
            hidden_size=config.hidden_size,  # E
            bias=config.bias,
            head=1, **options)
        self.mlp = MLP(bias=config.bias)
"""


def test_keywords_are_set_in_the_calls_own_layout():
    followed = follow_fit(LAYER, ("bias", "attention_head_size"))
    changes = [line for line in difflib.ndiff(LAYER.splitlines(), followed.source.splitlines()) if line[0] in "+-"]
    assert "+             bias=config.attention_qkv_bias," in changes
    assert "attention_head_size=config.head_size" in followed.source
    assert "self.mlp = MLP(bias=config.bias)" in followed.source
    assert [edit.added for edit in followed.edits] == [
        ("bias=config.attention_qkv_bias",),
        ("attention_head_size=config.head_size",),
    ]
    compile(followed.source, "layer.py", "exec")


def test_twice_is_once():
    once = follow_fit(LAYER, tuple(CONFIG_FIELDS))
    assert once.changed
    assert not follow_fit(once.source, tuple(CONFIG_FIELDS)).changed


def test_nothing_asked_changes_nothing():
    assert follow_fit(LAYER, ()).source == LAYER


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAYER.replace("...layers", "...other"), "no attention layer was found"),
        (LAYER.replace("hidden_size=config.hidden_size,", "config.hidden_size,"), "not keywords"),
        (LAYER.replace('options = {"tp_size": 1}', "options = make()"), "not keywords"),
        (LAYER.replace('"tp_size"', '"bias"'), "not keywords"),
        (LAYER.replace("self, config, layer_idx", "self, settings, layer_idx"), "no config is at hand"),
        (LAYER.replace("class Layer(Module):", "class Layer(Module:"), "cannot be parsed"),
    ],
)
def test_unknown_shapes_are_refused(text, problem):
    with pytest.raises(PatchError, match=problem):
        follow_fit(text, ("bias",))


def test_every_keyword_of_every_transform_has_a_field():
    assert {keyword for keywords in KEYWORDS.values() for keyword in keywords} <= set(CONFIG_FIELDS)


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_bundled_models_can_follow(architecture):
    file = open_source_tree("bundled").find_model(architecture).file
    followed = follow_fit(file.read_text(encoding="utf-8"), KEYWORDS["fold_alibi"], file=str(file))
    for keyword in KEYWORDS["fold_alibi"]:
        assert followed.source.count(f"{keyword}=config.{CONFIG_FIELDS[keyword]}") == 1
