"""The Medusa class as text, run on stand-in classes: outputs of every release and phase, activation, inputs."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from porting_kit.patching.medusa_template import render_classes


class Value:
    """A tensor that only records what was done to it."""

    def __init__(self, text):
        self.text, self.output = text, None

    def mark_output(self, name, dtype):
        self.output = (name, dtype)

    def __add__(self, other):
        return Value(f"{self.text}+{other.text}")


class Module:
    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


class ColumnLinear(Module):
    def __init__(self, inputs, outputs, bias=True, gather_output=False, **parallel):
        self.name = f"W{inputs}x{outputs}{'b' if bias else ''}"
        assert gather_output
        assert parallel["tp_size"] == 2

    def forward(self, x):
        return Value(f"{self.name}({x.text})")


class Base(Module):
    """The base's top class; `returns` is what its forward gives."""

    def __init__(self, config):
        self.config = config
        self.seen_architecture = config.architecture

    def forward(self, *args, **kwargs):
        return self.config.returns

    def prepare_inputs(self, *args, **kwargs):
        return kwargs


LOGITS, CACHE, HIDDEN, ALL_HIDDEN = Value("logits"), Value("cache"), Value("x"), Value("all")


def make_config(**changes):
    mapping = SimpleNamespace(tp_size=2, tp_group=[0, 1], is_last_pp_rank=lambda: changes.pop("is_last", True))
    fields = dict(architecture="BaseForCausalLM", hidden_size=8, vocab_size=9, dtype="float16", logits_dtype="float32")
    fields |= dict(num_medusa_heads=2, num_medusa_layers=2, max_draft_len=6, hidden_act="gelu", mapping=mapping)
    return SimpleNamespace(**{**fields, "returns": (LOGITS, HIDDEN), **changes})


def make_class(*, paged=True, own_inputs=False, pass_draft_len=True, **names):
    names |= {
        "Module": Module,
        "ModuleList": list,
        "ColumnLinear": ColumnLinear,
        "Base": Base,
        "ACT2FN": {name: lambda x, name=name: Value(f"{name}({x.text})") for name in ("silu", "gelu")},
        "stack": lambda values, dim: Value(f"stack{dim}[{', '.join(value.text for value in values)}]"),
        "pad_vocab_size": lambda size, ranks: -(-size // ranks) * ranks,
        "default_net": lambda: SimpleNamespace(plugin_config=SimpleNamespace(paged_kv_cache=paged)),
    }
    source = render_classes("MedusaBase", "Base", own_inputs=own_inputs, pass_draft_len=pass_draft_len)
    exec(compile(source, "medusa", "exec"), names)
    return names["MedusaBase"]


@pytest.mark.parametrize(
    ("paged", "use_cache", "returns", "expected"),
    [
        (True, True, (LOGITS, HIDDEN), ("medusa", LOGITS)),
        (True, True, (LOGITS, HIDDEN, ALL_HIDDEN), ("medusa", LOGITS)),
        (False, True, (LOGITS, CACHE, HIDDEN), ("medusa", LOGITS, CACHE)),
        (False, False, (LOGITS, HIDDEN), ("medusa", LOGITS)),
    ],
    ids=["paged", "paged, later releases", "cache as output", "no cache"],
)
def test_outputs_of_every_release(paged, use_cache, returns, expected):
    model = make_class(paged=paged)(make_config(returns=returns))
    medusa_logits, *rest = model(input_ids=1, use_cache=use_cache)
    assert tuple(rest) == expected[1:]
    assert medusa_logits.output == ("medusa_logits", "float32")
    head = "W8x10(x+silu(W8x8b(x))+silu(W8x8b(x+silu(W8x8b(x)))))"
    assert medusa_logits.text == f"stack0[{head}, {head}]"


def test_other_pipeline_ranks_hand_on_what_the_base_returns():
    model = make_class()(make_config(is_last=False, returns=HIDDEN))
    assert model(use_cache=True) is HIDDEN


def test_the_heads_keep_their_own_activation():
    # Seeded: the base's hidden_act is gelu throughout, and must not be used unless asked for.
    text = make_class()(make_config(medusa_hidden_act="gelu"))(use_cache=True)[0].text
    assert "gelu" in text
    assert "silu" not in text


def test_base_code_sees_the_bases_architecture():
    model = make_class()(make_config(architecture="MedusaBase", base_architecture="BaseForCausalLM"))
    assert model.seen_architecture == "BaseForCausalLM"
    assert make_class()(make_config()).seen_architecture == "BaseForCausalLM"


def test_library_makes_the_inputs():
    inputs = make_class()(make_config()).prepare_inputs(max_batch_size=4)
    assert inputs == {"max_batch_size": 4, "speculative_decoding_draft_tokens_external": False, "max_draft_len": 6}


@pytest.mark.parametrize(("profiles", "beams"), [(1, 1), (2, 3)])
def test_class_makes_the_inputs_in_early_releases(profiles, beams):
    class EarlyBase(Base):
        def prepare_inputs(self, *args, **kwargs):
            return {"input_ids": SimpleNamespace(profiles=[None] * profiles), "seen": kwargs}

    made = make_class(
        own_inputs=True,
        Tensor=lambda **fields: fields,
        OrderedDict=dict,
        trt=SimpleNamespace(int32="int32"),
        GenerationMixin=SimpleNamespace(default_range=lambda largest: [1, (1 + largest) // 2, largest]),
    )
    made.__bases__ = (EarlyBase,)
    config = make_config(max_medusa_token_len=39)
    del config.max_draft_len
    inputs = made(config).prepare_inputs(max_batch_size=4, max_beam_width=beams)
    assert inputs["seen"]["max_draft_len"] == 39, "0.8 calls it max_medusa_token_len"
    offsets, mask = inputs["medusa_position_offsets"], inputs["medusa_packed_mask"]
    batches = [[1, 2, 4]] if profiles == 1 else [[1, 2, 4], [1, 6, 12]]
    assert (offsets["shape"], mask["shape"]) == ([-1, -1], [-1, -1, -1])
    assert list(offsets["dim_range"].values()) == [batches, [[0, 40, 40]] * profiles]
    assert list(mask["dim_range"].values()) == [batches, [[0, 40, 40]] * profiles, [[0, 1, 2]] * profiles]


def test_draft_length_is_not_passed_to_a_library_that_does_not_know_it():
    assert "max_draft_len']" not in render_classes("M", "B", own_inputs=True, pass_draft_len=False)
    assert not re.search(r"llama", render_classes("M", "B", own_inputs=True, pass_draft_len=True), re.IGNORECASE)
