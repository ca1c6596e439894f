"""A quantised checkpoint against its base: config and every tensor in 16 bit; each seeded fault is named."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.architectures import read_base_config
from porting_kit.conversion.config_fields import build_config
from porting_kit.conversion.convert import convert_checkpoint
from porting_kit.conversion.dequantised import StoredMatrix
from porting_kit.conversion.quantised_comparison import measure_distance
from porting_kit.conversion.quantised_config import compare_config
from porting_kit.conversion.quantised_files import ALGORITHMS
from porting_kit.conversion.quantised_scales import find_scale_fault
from porting_kit.errors import CheckpointError, ConversionError, SourceTreeError
from porting_kit.outcomes import Verdict
from porting_kit.source_tree import BUNDLED_ROOT
from porting_kit.steps.quantised import check_quantised, format_quantised
from tests.conversion.rule_models import raw_config, write_model
from tests.conversion.test_quantised import GROUP, E, V, base, edit, heads, plain, quantise  # noqa: F401 (fixtures)

EMBEDDING, NORM, OUTPUT = "transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight"
LAYER = "transformer.layers.1.mlp.proj"


@pytest.fixture
def checkpoint(plain, tmp_path):  # noqa: F811
    return quantise(plain, tmp_path / "q", "FP8")


def change_config(folder, changes):
    """Write fields; None takes one out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def differences(folder, base_folder, **options):
    result = check_quantised(folder, base=base_folder, **options)
    found = result.compared.differences
    assert (result.outcome.verdict is Verdict.FAIL) == bool(found), result.outcome.summary
    return found


def test_every_tensor_in_16_bit_is_the_bases(checkpoint, base):  # noqa: F811
    result = check_quantised(checkpoint, base=base)
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    assert result.outcome.figures["unquantised_tensors"] == {"equal": 7, "not_compared": 0}
    assert "7 tensors in 16 bit are the base's" in result.outcome.summary
    assert result.document()["differences"] == []


def put(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def with_nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[3] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (put(EMBEDDING, lambda t: t.roll(1, 0)), "value", "differs from the base's in"),
        (put(EMBEDDING, lambda t: t[:-1].clone()), "shape", r"is \[159, 64\], expected \[160, 64\]"),
        (put(OUTPUT, lambda t: t.bfloat16().half()), "value", "rounded to bfloat16 on the way"),
        (put(OUTPUT, lambda t: t.float()), "dtype", "is float32, expected float16"),
        (put(NORM, lambda t: t * 1.001), "value", "by up to"),
        (put(NORM, with_nan), "value", "holds 1 values that are not finite"),
        (put("transformer.layers.0.input_layernorm.weight", torch.zeros_like), "value", "64 of 64 values"),
        (lambda tensors: tensors.pop(NORM), "missing", "there is no transformer.ln_f.weight"),
        (lambda tensors: tensors.update({"transformer.ln_f.bias": torch.zeros(E).half()}), "surplus", "has no place"),
        (lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(E).half()}), "surplus", "has no place"),
    ],
)
def test_a_tensor_that_is_not_the_bases_is_named(checkpoint, base, change, kind, said):  # noqa: F811
    edit(checkpoint, change)
    (fault,) = differences(checkpoint, base)
    assert fault.kind == kind
    assert fault.module.startswith("rank0: ")
    assert re.search(said, fault.text), fault.text


@pytest.mark.parametrize("name", ["transformer.position_embedding.weight", "transformer.layers.1.mlp.fc.bias"])
def test_position_tables_and_biases_are_compared(tmp_path, name):
    write_model(tmp_path / "base", raw_config("gpt2"))
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", dtype="float16")
    folder = quantise(tmp_path / "plain", tmp_path / "q", "W8A16")
    assert differences(folder, tmp_path / "base") == ()
    edit(folder, lambda tensors: tensors[name][1:2].add_(0.25))
    (fault,) = differences(folder, tmp_path / "base")
    assert (fault.kind, fault.module) == ("value", f"rank0: {name}")


def test_rotary_fields_of_a_base_without_them_are_not_compared(tmp_path):
    """Upstream's own config for GPT-2 says rotary_pct 1.0 (models/gpt/config.py, 0.16.0.dev2024121000)."""
    write_model(tmp_path / "base", raw_config("gpt2"))
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", dtype="float16")
    folder = quantise(tmp_path / "plain", tmp_path / "q", "W8A16")
    change_config(folder, {"rotary_pct": 1.0, "rotary_base": 10000.0, "architecture": "GPT2LMHeadModel"})
    assert differences(folder, tmp_path / "base") == ()


@pytest.mark.parametrize("family", ["bloom", "gemma", "falcon", "gptj", "opt", "phi", "qwen2", "cohere"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_sound_checkpoints_of_other_families_have_no_difference(tmp_path, family, tp_size):
    write_model(tmp_path / "base", raw_config(family, vocab_size=40))
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", dtype="float16", tp_size=tp_size)
    assert differences(quantise(tmp_path / "plain", tmp_path / "q", "W8A16"), tmp_path / "base") == ()


# ---------------------------------------------------------------- the config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "BloomForCausalLM"),
        ("hidden_size", 128),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_size", 32),
        ("intermediate_size", 256),
        ("vocab_size", 159),
        ("norm_epsilon", 1e-3),
        ("rotary_base", 500000.0),
        ("rotary_scaling", {"type": "linear", "factor": 2.0}),
        ("position_embedding_type", "learned_absolute"),
        ("hidden_act", "gelu"),
        ("attn_bias", True),
    ],
)
def test_a_field_of_another_model_is_named(checkpoint, base, field, value):  # noqa: F811
    change_config(checkpoint, {field: value})
    fault = differences(checkpoint, base)[0]
    assert (fault.kind, fault.module) == ("config", field)
    assert f"{field} is {value!r}" in fault.text


@pytest.mark.parametrize(
    ("family", "raw", "field", "value", "is_told"),
    [
        ("qwen2", {}, "attn_bias", None, False),  # as nvidia-modelopt writes it: QWenConfig takes True
        ("qwen2", {}, "attn_bias", False, True),
        ("gemma2", {}, "query_pre_attn_scalar", None, True),
        ("gemma2", {}, "final_logit_softcapping", None, True),
        ("cohere", {"logit_scale": 0.83}, "output_multiplier_scale", None, True),
        ("cohere", {"logit_scale": 0.0625}, "output_multiplier_scale", None, False),
        ("gptj", {}, "rotary_dim", None, True),
        ("llama", {"tie_word_embeddings": False}, "share_embedding_table", True, True),
        ("llama", {"tie_word_embeddings": True}, "share_embedding_table", True, False),
    ],
)
def test_a_class_has_defaults_of_its_own(tmp_path, family, raw, field, value, is_told):
    write_model(tmp_path / "base", raw_config(family, **raw))
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", dtype="float16")
    change_config(tmp_path / "plain", {field: value})
    model = read_base_config(tmp_path / "base")
    stated = json.loads((tmp_path / "plain" / "config.json").read_text())
    found = compare_config(stated, build_config(model, dtype="float16")[0], model)
    assert [fault.module for fault in found] == ([field] if is_told else [])


@pytest.mark.parametrize(
    ("raw", "field", "default"),
    [
        ({"rope_theta": 100000.0}, "rotary_base", "10000.0"),
        ({"rms_norm_eps": 1e-3}, "norm_epsilon", "1e-05"),
        ({"head_dim": 16}, "head_size", "8"),
        ({"num_key_value_heads": 2}, "num_key_value_heads", "4"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rotary_scaling", "None"),
        ({}, "position_embedding_type", "'learned_absolute'"),
        ({}, "hidden_act", "'gelu'"),
    ],
)
def test_a_field_that_is_left_out_is_the_librarys_default(tmp_path, raw, field, default):
    """nvidia-modelopt 0.47.0 writes no rotary_base beside transformers 5."""
    write_model(tmp_path / "base", raw_config("llama", attention_bias=False, mlp_bias=False, **raw))
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", dtype="float16")
    folder = quantise(tmp_path / "plain", tmp_path / "q", "FP8")
    assert differences(folder, tmp_path / "base") == ()
    change_config(folder, {field: None})
    result = check_quantised(folder, base=tmp_path / "base")
    assert f"{field} is absent, for which the library takes {default}" in result.outcome.summary
    assert (result.outcome.failing_gate, result.outcome.verdict) == ("config", Verdict.FAIL)
    if field == "rotary_base":
        assert result.outcome.figures["next_step"].startswith("correct rotary_base in the checkpoint's config.json")


def without(folder, *fields):
    """A quantised checkpoint of a base whose config says qk_layernorm, without some fields."""
    write_model(folder / "base", raw_config("cohere", use_qk_norm=True))
    convert_checkpoint(folder / "base", folder / "plain", dtype="float16")
    change_config(quantise(folder / "plain", folder / "q", "W8A16"), dict.fromkeys(fields))
    return folder / "q"


def test_a_field_without_a_known_default_is_listed_as_not_judged(tmp_path):
    result = check_quantised(without(tmp_path, "qk_layernorm"), base=tmp_path / "base")
    assert result.outcome.verdict is Verdict.PASS
    assert result.outcome.figures["not_judged_fields"] == ["qk_layernorm"]
    assert "not judged, as the config leaves them out: qk_layernorm" in result.outcome.summary
    assert "not judged, no default known: qk_layernorm (--source names a release)" in format_quantised(result)


def test_nothing_is_said_where_every_field_is_judged(tmp_path):
    result = check_quantised(without(tmp_path), base=tmp_path / "base")
    assert result.outcome.figures["not_judged_fields"] == []
    assert "not judged" not in result.outcome.summary + format_quantised(result)


def test_the_releases_own_source_says_what_it_takes_for_a_field(tmp_path):
    """A tree like those from 0.12 on: PretrainedConfig has qk_layernorm, and takes False."""
    root = tmp_path / "tree"
    shutil.copytree(BUNDLED_ROOT, root)
    models = root / "tensorrt_llm" / "models"
    file = models / "modeling_utils.py"
    file.write_text(file.read_text().replace("head_size=None,", "head_size=None,\n        qk_layernorm=False,"))
    registry = models / "__init__.py"
    registry.write_text(registry.read_text() + 'MODEL_MAP["CohereForCausalLM"] = LLaMAForCausalLM\n')
    (fault,) = differences(without(tmp_path, "qk_layernorm"), tmp_path / "base", source=str(root))
    assert (fault.kind, fault.module) == ("config", "qk_layernorm")
    assert fault.text.startswith("qk_layernorm is absent, for which the library takes False")


def test_a_tree_without_the_checkpoints_class_is_refused_where_it_was_named(tmp_path):
    with pytest.raises(SourceTreeError, match="has no architecture 'CohereForCausalLM'"):
        check_quantised(without(tmp_path), base=tmp_path / "base", source="bundled")
    with pytest.raises(CheckpointError, match="compared with a base"):
        check_quantised(tmp_path / "q", source="bundled")


@pytest.mark.parametrize(
    "changes",
    [
        {"rotary_base": None, "rotary_scaling": None, "attn_bias": None, "mlp_bias": None},  # the defaults are right
        {"norm_epsilon": 1.0000000e-06 * (1 + 1e-8), "logits_dtype": "float16", "use_parallel_embedding": True},
        {"architecture": "MistralForCausalLM", "hidden_act": "swiglu", "producer": {"name": "modelopt"}},
        {"rotary_scaling": {"rope_type": "default"}, "max_position_embeddings": 128},
    ],
)
def test_another_spelling_of_the_same_model_is_no_difference(checkpoint, base, changes):  # noqa: F811
    change_config(checkpoint, changes)
    assert differences(checkpoint, base) == ()


# ---------------------------------------------------------------- groups of INT4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group_size": 64}, r"its scale is \[64, 2\], groups of 64 need \[64, 1\]"),
        ({"group_size": None}, r"groups of 128 \(the library's, none is stated\) do not divide its 64"),
        ({"group_size": 48}, "groups of 48 do not divide its 64 inputs"),
    ],
)
def test_groups_that_do_not_fit_the_scales_are_named(plain, tmp_path, changes, said):  # noqa: F811
    folder = quantise(plain, tmp_path / "q", "W4A16_AWQ")
    section = {**json.loads((folder / "config.json").read_text())["quantization"], **changes}
    change_config(folder, {"quantization": section})
    faults = check_quantised(folder).faults
    assert {fault.kind for fault in faults} == {"group"}
    assert re.search(said, faults[0].text), faults[0].text


@pytest.mark.parametrize(
    ("changes", "said"), [({"pre_quant_scale": False}, "leaves every prequant"), ({"has_zero_point": True}, "zero")]
)
def test_settings_that_choose_other_parameters_are_named(plain, tmp_path, changes, said):  # noqa: F811
    folder = quantise(plain, tmp_path / "q", "W4A16_AWQ")
    section = {**json.loads((folder / "config.json").read_text())["quantization"], **changes}
    change_config(folder, {"quantization": section})
    (fault,) = check_quantised(folder).faults
    assert fault.kind == "setting"
    assert said in fault.text


def test_groups_of_128_need_no_word_in_the_config(tmp_path):
    write_model(tmp_path / "base", raw_config("llama", hidden_size=128, intermediate_size=256, attention_bias=False))
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", dtype="float16")
    folder = quantise(tmp_path / "plain", tmp_path / "q", "W4A16_AWQ", group=128)
    section = {**json.loads((folder / "config.json").read_text())["quantization"]}
    del section["group_size"]
    change_config(folder, {"quantization": section})
    assert check_quantised(folder).faults == ()
    assert GROUP != 128


# ---------------------------------------------------------------- ranks and vocabularies


@pytest.mark.parametrize("dim", [0, 1])
def test_an_embedding_that_is_cut_over_the_ranks_is_compared(base, tmp_path, dim):  # noqa: F811
    """ModelOpt cuts it and says so in the config; the conversion keeps it whole on every rank."""
    convert_checkpoint(base, tmp_path / "plain", dtype="float16", tp_size=2)
    folder = quantise(tmp_path / "plain", tmp_path / "q", "FP8")
    change_config(folder, {"use_parallel_embedding": True, "embedding_sharding_dim": dim})
    assert {fault.kind for fault in differences(folder, base)} == {"shape"}  # still whole
    for rank in range(2):
        file = folder / f"rank{rank}.safetensors"
        tensors = load_file(file)
        tensors[EMBEDDING] = tensors[EMBEDDING].chunk(2, dim)[rank].clone()
        save_file(tensors, file)
    assert differences(folder, base) == ()
    tensors[EMBEDDING] = tensors[EMBEDDING].flip(0).contiguous()
    save_file(tensors, file)
    (fault,) = differences(folder, base)
    assert (fault.kind, fault.module) == ("value", f"rank1: {EMBEDDING}")


@pytest.mark.parametrize(("row", "is_padding"), [("zero", True), ("last", True), ("other", False)])
def test_rows_behind_the_vocabulary_are_padding_or_a_difference(tmp_path, row, is_padding):
    """A vocabulary of 37 on two ranks has 38 rows."""
    write_model(tmp_path / "base", raw_config("llama", attention_bias=False, mlp_bias=False))
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", dtype="float16", tp_size=2)
    folder = quantise(tmp_path / "plain", tmp_path / "q", "FP8")
    tensors = load_file(folder / "rank1.safetensors")
    assert len(tensors[OUTPUT]) == 19
    tensors[OUTPUT][-1] = {"zero": 0 * tensors[OUTPUT][-1], "last": tensors[OUTPUT][-2]}.get(row, tensors[OUTPUT][0])
    save_file(tensors, folder / "rank1.safetensors")
    found = differences(folder, tmp_path / "base")
    assert bool(found) is not is_padding
    if found:
        assert "other rows than padding behind the vocabulary, from row 18 of this rank on" in found[0].text


def test_a_vocabulary_that_was_padded_in_the_config_too_is_a_difference(checkpoint, base):  # noqa: F811
    """ModelOpt pads to 64 rows for AWQ, and then no runtime masks the columns: a logit of 0 beats negative ones."""
    for name in (EMBEDDING, OUTPUT):
        edit(checkpoint, put(name, lambda t: torch.cat([t, torch.zeros(32, E).half()])))
    change_config(checkpoint, {"vocab_size": V + 32})
    (fault,) = differences(checkpoint, base)
    assert fault.module == "vocab_size"
    assert "take the rows behind" in check_quantised(checkpoint, base=base).outcome.figures["next_step"]
    assert "wins wherever all other logits are negative" in fault.text


@pytest.mark.parametrize("fault", ["none", "copy", "missing"])
def test_each_ranks_tensors_are_compared(base, tmp_path, fault):  # noqa: F811
    convert_checkpoint(base, tmp_path / "plain", dtype="float16", tp_size=2, pp_size=2)
    folder = quantise(tmp_path / "plain", tmp_path / "q", "FP8")
    file, name = folder / "rank3.safetensors", "transformer.layers.0.post_layernorm.weight"
    tensors = load_file(file)
    if fault == "copy":
        tensors[name] = tensors[name] + 1
    elif fault == "missing":
        del tensors[name]
    save_file(tensors, file)
    expected = {"none": [], "copy": [("value", f"rank3: {name}")], "missing": [("missing", f"rank3: {name}")]}[fault]
    assert [(found.kind, found.module) for found in differences(folder, base)] == expected


def test_an_output_matrix_that_is_shared_with_the_embedding_may_be_absent(tmp_path):
    write_model(tmp_path / "base", raw_config("bloom", vocab_size=40))
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", dtype="float16")
    folder = quantise(tmp_path / "plain", tmp_path / "q", "FP8")
    edit(folder, lambda tensors: tensors.pop(OUTPUT))
    assert [fault.kind for fault in differences(folder, tmp_path / "base")] == ["missing"]
    change_config(folder, {"share_embedding_table": True})
    assert differences(folder, tmp_path / "base") == ()


# ---------------------------------------------------------------- heads


@pytest.fixture
def joined(checkpoint, heads, tmp_path):  # noqa: F811
    check_quantised(checkpoint, heads=heads, out=tmp_path / "joined", max_draft_len=15)
    return tmp_path / "joined"


def test_heads_in_a_checkpoint_are_compared_where_they_are_named(joined, base, heads):  # noqa: F811
    known, unknown = (check_quantised(joined, base=base, heads=folder) for folder in (heads, None))
    assert known.outcome.verdict is unknown.outcome.verdict is Verdict.PASS, known.outcome.summary
    assert known.outcome.figures["unquantised_tensors"] == {"equal": 13, "not_compared": 0}
    assert unknown.outcome.figures["unquantised_tensors"] == {"equal": 7, "not_compared": 6}
    assert "6 of heads not compared" in unknown.outcome.summary
    edit(joined, put("medusa_heads.1.medusa_layers.0.linear.weight", lambda t: t.T.contiguous()))
    assert differences(joined, base) == ()
    (fault,) = differences(joined, base, heads=heads)
    assert (fault.kind, fault.module) == ("value", "rank0: medusa_heads.1.medusa_layers.0.linear.weight")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (put("medusa_heads.0.lm_head.weight", lambda t: t[:-1].clone()), "shape"),
        (put("medusa_heads.0.medusa_layers.0.linear.bias", with_nan), "value"),
        (lambda tensors: tensors.pop("medusa_heads.0.medusa_layers.0.linear.bias"), "missing"),
        (lambda tensors: tensors.update({"medusa_heads.0.stray.weight": torch.zeros(3).half()}), "surplus"),
    ],
)
def test_heads_that_are_not_at_hand_must_still_be_whole(joined, base, change, kind):  # noqa: F811
    edit(joined, change)
    assert [fault.kind for fault in differences(joined, base)] == [kind]


@pytest.mark.parametrize(
    "changes",
    [{"num_medusa_heads": 3}, {"num_medusa_heads": 1}, {"num_medusa_layers": 2}, {"num_medusa_heads": 10**9}],
)
def test_a_number_of_heads_that_the_file_has_not_is_found(joined, changes):
    change_config(joined, changes)
    assert [fault.kind for fault in check_quantised(joined).faults] == ["heads"]


def test_heads_to_compare_with_need_heads_in_the_checkpoint_and_a_base(checkpoint, base, heads):  # noqa: F811
    with pytest.raises(CheckpointError, match="holds no Medusa heads to compare with"):
        check_quantised(checkpoint, base=base, heads=heads)
    with pytest.raises(CheckpointError, match="either added or compared"):
        check_quantised(checkpoint, heads=heads)


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("limit", [0, -1, 64, 10**9])
def test_a_draft_limit_that_no_engine_verifies_is_refused(checkpoint, heads, tmp_path, limit):  # noqa: F811
    with pytest.raises(ConversionError, match="cannot be verified in one step") as caught:
        check_quantised(checkpoint, heads=heads, out=tmp_path / "joined", max_draft_len=limit)
    assert "from 1 to 63: with the root, 64 tokens" in str(caught.value.expected)
    assert not (tmp_path / "joined").exists()


def test_a_draft_limit_without_heads_to_add_is_refused(checkpoint):
    with pytest.raises(CheckpointError, match="written beside heads"):
        check_quantised(checkpoint, max_draft_len=15)


@pytest.mark.parametrize("limit", [0, 64])
def test_the_conversion_refuses_such_a_draft_limit_too(base, heads, tmp_path, limit):  # noqa: F811
    with pytest.raises(ConversionError, match="cannot be verified in one step"):
        convert_checkpoint(base, tmp_path / "out", heads=heads, max_draft_len=limit)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- smoothed matrices


def smoothed_matrix(outlier):
    """A matrix of int8 whose first input was smoothed by `outlier`, as SmoothQuant does where activations are large."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    prequant = torch.ones(1024)
    prequant[0] = 1 / outlier
    smooth = weight / prequant
    scale = smooth.abs().amax(1) / 127
    return weight, StoredMatrix((smooth / scale[:, None]).round(), scale, prequant)


def test_a_matrix_with_one_large_smoothed_column_is_judged_as_it_was_rounded():
    weight, matrix = smoothed_matrix(200.0)
    error, bound = measure_distance(matrix, weight, ALGORITHMS["W8A8_SQ_PER_CHANNEL"])
    assert 0.05 < error <= bound < 0.12
    plain_error = float((matrix.weight - weight).norm() / weight.norm())
    assert plain_error > 0.3  # columns of small inputs, which the layer divides out again
    other = StoredMatrix(matrix.numbers.flip(0), matrix.scale, matrix.prequant)
    error, bound = measure_distance(other, weight, ALGORITHMS["W8A8_SQ_PER_CHANNEL"])
    assert error > 10 * bound


def test_ranks_that_share_a_scale_are_judged_by_the_largest_numbers_of_all(base, tmp_path):  # noqa: F811
    """The matrix is cut along its inputs, and the large smoothed column lies on the first rank."""
    convert_checkpoint(base, tmp_path / "plain", dtype="float16", tp_size=2)
    folder = quantise(tmp_path / "plain", tmp_path / "q", "W8A8_SQ_PER_CHANNEL")
    weights = [load_file(tmp_path / "plain" / f"rank{rank}.safetensors")[f"{LAYER}.weight"].float() for rank in (0, 1)]
    prequant = [torch.ones(weight.shape[1]) for weight in weights]
    prequant[0][0] = 1 / 256
    smooth = [weight / factors for weight, factors in zip(weights, prequant, strict=True)]
    scale = torch.cat(smooth, 1).abs().amax(1) / 127
    for rank in (0, 1):
        tensors = load_file(folder / f"rank{rank}.safetensors")
        numbers = (smooth[rank] / scale[:, None]).round().to(torch.int8)
        tensors |= {f"{LAYER}.weight": numbers, f"{LAYER}.weights_scaling_factor": scale}
        tensors[f"{LAYER}.prequant_scaling_factor"] = prequant[rank].half()
        save_file(tensors, folder / f"rank{rank}.safetensors")
    result = check_quantised(folder, base=base)
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    assert max(error.relative_error for error in result.errors) > 0.05
    save_file({**tensors, f"{LAYER}.weight": numbers.flip(0).contiguous()}, folder / "rank1.safetensors")
    assert check_quantised(folder, base=base).outcome.failing_gate == "weights"


def test_a_column_that_hangs_on_one_number_is_not_judged_by_how_that_was_rounded():
    """In groups of its own scale one number outweighs the column; 4.4987 that became 5 is no fault of the scale."""
    weight = 0.05 * torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    weight[5, 9] = 4.4987
    scale = torch.full((64, 1), 0.05 * 3 / 7)
    scale[5] = 1.0
    numbers = (weight / scale).round().clamp(-8, 7)
    numbers[5, 9] = 5
    matrix = StoredMatrix(numbers, scale, torch.ones(64))
    assert find_scale_fault(matrix, weight, ALGORITHMS["W4A16_AWQ"]) is None


@pytest.mark.parametrize(("name", "top"), [("W8A16", 127), ("FP8", 448)])
def test_a_single_number_far_off_is_a_fault(name, top):
    weight = 0.05 * torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    scale = weight.abs().amax(1, keepdim=True) / top
    numbers = weight / scale
    numbers = numbers.to(torch.float8_e4m3fn).float() if name == "FP8" else numbers.round()
    assert find_scale_fault(StoredMatrix(numbers, scale, None), weight, ALGORITHMS[name]) is None
    numbers[7, 3] = -numbers[7, 3]
    assert find_scale_fault(StoredMatrix(numbers, scale, None), weight, ALGORITHMS[name]).startswith(
        "1 of 4096 numbers"
    )


# ---------------------------------------------------------------- one group of 4 bit


def round_in_groups(dtype, *, group=32, shrink=None):
    """A base's matrix [64, 256] in a dtype and its numbers of 4 bit, all arithmetic in that dtype, as AWQ has them.

    `shrink` says of each group what share of its largest number the scale is for.
    """
    generator = torch.Generator().manual_seed(6)
    weight = (0.02 * torch.randn(64, 256, generator=generator)).to(dtype)
    prequant = (0.5 + torch.rand(256, generator=generator)).to(dtype)
    groups = (weight * (1 / prequant)).reshape(64, -1, group)
    scale = groups.abs().amax(-1) / 7
    if shrink is not None:
        scale = scale * torch.tensor(shrink).to(dtype)[torch.randint(len(shrink), scale.shape, generator=generator)]
    numbers = (groups / scale[..., None]).round().clamp(-8, 7).reshape(weight.shape)
    return weight.float(), StoredMatrix(numbers.float(), scale.float(), prequant.float())


def shift(matrix, row, group, factor):
    scale = matrix.scale.clone()
    scale[row, group] *= factor
    return StoredMatrix(matrix.numbers, scale, matrix.prequant)


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float16, 1.02), (torch.float16, 0.98), (torch.bfloat16, 1.03), (torch.bfloat16, 0.97)],
)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_scale_of_one_group_is_held_against_its_largest_number(dtype, group, factor):
    """It turns one of 32 numbers, which two that chance may turn hid."""
    weight, matrix = round_in_groups(dtype, group=group)
    assert find_scale_fault(matrix, weight, ALGORITHMS["W4A16_AWQ"]) is None
    said = find_scale_fault(shift(matrix, 5, 1, factor), weight, ALGORITHMS["W4A16_AWQ"])
    assert said.startswith("the scale of row 5, group 1 is ")
    assert float(said.split()[8]) == pytest.approx(factor, rel=0.01)


def test_a_quantiser_that_searches_for_its_scales_is_not_held_against_largest_numbers():
    """Then one group that is 2 % off may pass, and one that is 10 % off is told by its numbers."""
    weight, matrix = round_in_groups(torch.float16, shrink=[1.0, 1.0, 0.95, 0.9])
    assert find_scale_fault(matrix, weight, ALGORITHMS["W4A16_AWQ"]) is None
    assert find_scale_fault(shift(matrix, 5, 1, 1.02), weight, ALGORITHMS["W4A16_AWQ"]) is None
    said = find_scale_fault(shift(matrix, 5, 1, 1.1), weight, ALGORITHMS["W4A16_AWQ"])
    assert said.endswith("numbers are not what the base's matrix gives by these scales, most in row 5")


def test_a_group_of_zeros_has_no_largest_number():
    weight, matrix = round_in_groups(torch.float16)
    weight[5, 32:64] = matrix.numbers[5, 32:64] = 0.0
    assert find_scale_fault(matrix, weight, ALGORITHMS["W4A16_AWQ"]) is None
