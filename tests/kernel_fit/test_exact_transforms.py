"""Padding and folding against Hugging Face: the same logits, in the context phase and in a tree."""

import pytest
import torch

from porting_kit.emulator import open_emulator
from porting_kit.errors import CheckpointError, ConversionError, KernelRefusal
from porting_kit.kernel_fit.exact_transforms import fold_scale, pad_head_size, pad_query_groups
from porting_kit.kernel_fit.fit import apply_fit
from porting_kit.patching.medusa_module import build_medusa_module
from tests.emulator.toy_models import ToySize
from tests.kernel_fit.fitted_models import RELEASE, context_error, fit_toy, float32_profile, tree_error

TOLERANCE = 1e-5
GROUPS_RELEASE = "0.9.0.dev2024022700"  # refuses groups that are no power of two
PYTHIA = ToySize(hidden_size=256, heads=4, kv_heads=4, inner=1024)
SMOLLM2 = ToySize(hidden_size=9 * 64, heads=9, kv_heads=3, inner=128)
QWEN2 = ToySize(hidden_size=14 * 128, heads=14, kv_heads=2, inner=128, layers=1)
CASES = {
    "head size": ("llama", ToySize(hidden_size=256, heads=4, kv_heads=2), RELEASE, ("pad_head_size",)),
    "partial rotary": (
        "gptneox",
        ToySize(hidden_size=256, heads=4, kv_heads=4, inner=1024),
        RELEASE,
        ("pad_head_size",),
    ),
    "SmolLM2 geometry": ("llama", SMOLLM2, GROUPS_RELEASE, ("pad_head_size", "pad_query_groups")),
    "Qwen2-7B groups of seven": ("qwen2", QWEN2, GROUPS_RELEASE, ("pad_query_groups",)),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request):
    family, size, release, names = CASES[request.param]
    model = fit_toy(family, size, release=release)
    assert model.plan.names == names
    return model, release


def test_fitted_model_is_exact_in_context_and_tree(case):
    model, release = case
    assert model.plan.exact
    emulated = model.emulate(f"release:{release}")
    scale = 4.0  # logits of the toy models
    assert context_error(model, emulated) < TOLERANCE * scale
    assert tree_error(model, emulated) < TOLERANCE * scale


def test_unfitted_model_is_refused_by_the_release(case):
    model, release = case
    module = build_medusa_module(model.tree, model.config["architecture"])
    patched = (
        {}
        if module.outcome.status != "patched"
        else {"module_source": module.source, "class_name": module.base_class_name}
    )
    emulator = open_emulator(model.tree, kernel=float32_profile(f"release:{release}"))
    unfitted = emulator.build_model(model.config, model.tensors, **patched)
    with pytest.raises(KernelRefusal):
        tree_error(model, unfitted)


def test_forgotten_query_factor_would_be_seen(case):
    model, _ = case
    if "pad_head_size" not in model.plan.names:
        pytest.skip("no head is padded here")
    name = "transformer.layers.0.attention.qkv.weight"
    rows = model.fitted.config["num_attention_heads"] * model.fitted.config["head_size"]
    kept = model.fitted.tensors[name].clone()
    model.fitted.tensors[name][:rows] *= 0.5**0.5
    try:
        assert context_error(model, model.emulate()) > 100 * TOLERANCE
    finally:
        model.fitted.tensors[name].copy_(kept)


def test_rotary_share_left_as_it_was_would_be_seen():
    model = fit_toy("llama", ToySize(hidden_size=256, heads=4, kv_heads=2))
    wrong = {**model.fitted.config, "rotary_pct": 1.0}
    assert context_error(model, model.emulate(config=wrong)) > 100 * TOLERANCE


def test_zero_heads_go_behind_each_group():
    config = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_size": 1, "hidden_size": 1, **ROPE}
    rows = torch.tensor([[1.0], [2], [3], [4], [5], [6], [70], [80], [700], [800]])
    tensors = {"l.attention.qkv.weight": rows, "l.attention.dense.weight": torch.tensor([[1.0, 2, 3, 4, 5, 6]])}
    fitted, changed, note = pad_query_groups(config, tensors)
    assert changed["l.attention.qkv.weight"].flatten().tolist() == [1, 2, 3, 0, 4, 5, 6, 0, 70, 80, 700, 800]
    assert changed["l.attention.dense.weight"].flatten().tolist() == [1, 2, 3, 0, 4, 5, 6, 0]
    assert (fitted["num_attention_heads"], note.exact) == (8, True)


def test_zero_dims_go_behind_each_head():
    config = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_size": 1, "hidden_size": 1, **ROPE}
    tensors = {
        "l.attention.qkv.weight": torch.tensor([[1.0], [2], [3]]),
        "l.attention.qkv.bias": torch.tensor([4.0, 5, 6]),
        "l.attention.dense.weight": torch.tensor([[7.0]]),
    }
    fitted, changed, _ = pad_head_size({**config, "rotary_dim": 0}, tensors, head_size=4)
    assert changed["l.attention.qkv.weight"].flatten().tolist() == [2, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]
    assert changed["l.attention.qkv.bias"].tolist() == [8, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0]
    assert changed["l.attention.dense.weight"].flatten().tolist() == [7, 0, 0, 0]
    assert fitted["head_size"] == 4


ROPE = {"position_embedding_type": "rope_gpt_neox", "dtype": "float32"}


@pytest.mark.parametrize("scaling", [1.5, 64**-0.5])
def test_folded_scale_gives_the_same_logits(scaling):
    """Gemma 2 divides by more than sqrt(D) (query_pre_attn_scalar), jais by D."""
    from porting_kit.kernel_fit.attention_arguments import follow_fit
    from porting_kit.patching.medusa_module import make_imports_absolute, read_source

    model = fit_toy("llama", ToySize(), wanted="off")
    file = model.tree.find_model("LlamaForCausalLM").file
    text = follow_fit(make_imports_absolute(read_source(file), "tensorrt_llm.models.llama"), ["q_scaling"]).source
    scaled = {**model.config, "q_scaling": scaling}
    fitted, tensors, note = fold_scale(scaled, model.tensors)
    assert note.exact
    assert fitted["q_scaling"] == 1.0
    emulator = open_emulator(model.tree)
    tokens = [torch.arange(40)]

    def logits(config, weights):
        run = emulator.build_model(config, weights, module_source=text, class_name="LLaMAForCausalLM")
        return run.prefill(tokens, run.new_cache(1, 40), all_logits=True).logits[0]

    expected = logits(scaled, model.tensors)
    assert torch.allclose(logits(fitted, tensors), expected, atol=TOLERANCE)
    assert not torch.allclose(logits(fitted, model.tensors), expected, atol=100 * TOLERANCE)


@pytest.mark.parametrize(
    ("transform", "config", "problem"),
    [
        (lambda c: pad_head_size(c, {}, head_size=64), {"head_size": 64}, "only makes heads larger"),
        (lambda c: pad_head_size(c, {}, head_size=128), {"qk_layernorm": True}, "qk_layernorm"),
        (lambda c: pad_head_size(c, {}, head_size=128), {"clip_qkv": 6.0}, "clip_qkv 6"),
        (lambda c: pad_head_size(c, {}, head_size=128), {"position_embedding_type": "alibi_with_scale"}, "slopes"),
        (lambda c: pad_query_groups(c, {}), {}, "nothing to do"),
        (lambda c: pad_query_groups(c, {}), {"num_attention_heads": 6, "position_embedding_type": "alibi"}, "slopes"),
        (lambda c: fold_scale(c, {}), {}, "nothing to fold"),
    ],
)
def test_transforms_that_cannot_apply_are_refused(transform, config, problem):
    whole = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 64, "hidden_size": 256, **ROPE}
    with pytest.raises(ConversionError, match=problem):
        transform({**whole, **config})


def test_config_that_contradicts_its_tensors_is_refused():
    model = fit_toy("llama", ToySize(hidden_size=256, heads=4, kv_heads=2), wanted="off")
    plan = fit_toy("llama", ToySize(hidden_size=256, heads=4, kv_heads=2)).plan
    with pytest.raises(CheckpointError, match="another shape than the config says"):
        apply_fit(plan, {**model.config, "head_size": 32}, model.tensors)


def test_fitting_twice_is_refused(case):
    model, _ = case
    with pytest.raises(CheckpointError, match="fitted already"):
        apply_fit(model.plan, model.fitted.config, model.fitted.tensors)


def test_zero_heads_in_the_wrong_place_would_be_seen(case):
    model, _ = case
    if "pad_query_groups" not in model.plan.names:
        pytest.skip("no group is padded here")
    name = "transformer.layers.0.attention.qkv.weight"
    heads, size = model.fitted.config["num_attention_heads"], model.fitted.config["head_size"]
    rows = model.fitted.tensors[name][: heads * size]
    kept = rows.clone()
    rows.copy_(kept.view(heads, size, -1).roll(1, 0).flatten(0, 1))
    try:
        assert context_error(model, model.emulate()) > 100 * TOLERANCE
    finally:
        rows.copy_(kept)
