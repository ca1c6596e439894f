"""Quantised checkpoints: config, weights, heads and exclude list agree, or the contradiction is named.

`quantise` writes what nvidia-modelopt 0.47.0 writes: names, types, shapes and packing were read off its files, and
where the package is installed its own files go through the same tests.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.conversion.convert import checkpoint_tensors, convert_checkpoint
from porting_kit.conversion.dequantised import read_matrix, write_dequantised
from porting_kit.conversion.heads import read_head_set
from porting_kit.conversion.quantised import find_faults, require_consistent
from porting_kit.conversion.quantised_comparison import compare_weights
from porting_kit.conversion.quantised_files import ALGORITHMS as KNOWN
from porting_kit.conversion.quantised_files import read_quantised
from porting_kit.conversion.quantised_heads import add_heads
from porting_kit.emulator import open_emulator
from porting_kit.errors import CheckpointError
from porting_kit.outcomes import Verdict
from porting_kit.source_tree import open_source_tree
from porting_kit.steps.quantised import check_quantised

E, V = 64, 160
GROUP = 32
ALGORITHMS = ("FP8", "W8A16", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "W4A8_AWQ")
QUANTISED = ("qkv", "dense", "fc", "gate", "proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small LLaMA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=E, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    """The base as a 16-bit checkpoint."""
    folder = tmp_path_factory.mktemp("plain") / "checkpoint"
    convert_checkpoint(base, folder, dtype="float16")
    return folder


@pytest.fixture
def heads(tmp_path):
    """Two heads with output matrices of their own."""
    folder = tmp_path / "heads"
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = 0.05 * torch.randn(E, E, generator=generator)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(E)
        tensors[f"{head}.1.weight"] = 0.05 * torch.randn(V, E, generator=generator)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    return folder


def quantise(plain, folder, algorithm, *, calibrated=True, group=GROUP):
    """A checkpoint in ModelOpt's layout, of as many ranks as the plain one has."""
    folder.mkdir(parents=True)
    for file in plain.glob("rank*.safetensors"):
        tensors = quantise_tensors(load_file(file), algorithm, calibrated=calibrated, group=group)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file.name)
    config = json.loads((plain / "config.json").read_text())
    config["quantization"] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    if algorithm.endswith("_AWQ"):
        config["quantization"] |= {"group_size": group, "pre_quant_scale": True, "has_zero_point": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantise_tensors(tensors, algorithm, *, calibrated, group):
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(".weight") and name.split(".")[-2] in QUANTISED]:
        module, weight = name.removesuffix(".weight"), tensors[name].float()
        if algorithm in ("W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "W4A8_AWQ"):
            smooth = 0.5 + torch.rand(weight.shape[1], generator=generator)
            tensors[f"{module}.prequant_scaling_factor"] = smooth.half()
            weight = weight / smooth.half().float()
        if algorithm == "FP8":
            scale = weight.abs().max().reshape(1) / 448.0
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        elif algorithm.startswith("W8"):
            scale = weight.abs().amax(1) / 127.0
            tensors[name] = (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
        else:
            groups = weight.reshape(len(weight), -1, min(group, weight.shape[1]))
            scale = groups.abs().amax(-1) / 7.0
            whole = (groups / scale[..., None]).round().clamp(-8, 7).reshape(weight.shape).to(torch.int8)
            tensors[name] = ((whole[0::2] & 15) | (whole[1::2] << 4)).to(torch.int8)
        tensors[f"{module}.weights_scaling_factor"] = scale.float()
        if algorithm == "W4A8_AWQ":
            tensors[f"{module}.weights_scaling_factor_2"] = weight.abs().max().reshape(1) / 448.0
        if calibrated and algorithm in ("FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ"):
            tensors[f"{module}.activation_scaling_factor"] = torch.tensor([0.01])
    return tensors


def compare_base(folder, base):
    return compare_weights(folder, checkpoint_tensors(base, dtype="float16")[1])


def edit(folder, change):
    tensors = load_file(folder / "rank0.safetensors")
    change(tensors)
    save_file(tensors, folder / "rank0.safetensors")


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization"] |= changes
    file.write_text(json.dumps(config))


def kinds(folder):
    return {fault.kind for fault in find_faults(read_quantised(folder))}


LAYER = "transformer.layers.1.mlp.proj"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestEachAlgorithm:
    def test_a_sound_checkpoint_has_no_fault_and_its_weights_are_the_bases(self, base, plain, tmp_path, algorithm):
        folder = quantise(plain, tmp_path / "quantised", algorithm)
        assert find_faults(read_quantised(folder)) == ()
        errors = compare_base(folder, base)
        assert len(errors) == 10
        assert all(error.passed for error in errors), errors
        assert min(error.relative_error for error in errors) > 1e-3  # it is quantised, not copied

    def test_a_scale_of_another_size_is_named_by_its_layer(self, base, plain, tmp_path, algorithm):
        folder = quantise(plain, tmp_path / "quantised", algorithm)
        edit(folder, lambda tensors: tensors[f"{LAYER}.weights_scaling_factor"].mul_(2))
        wrong = [error.module for error in compare_base(folder, base) if not error.passed]
        assert wrong == [LAYER]

    def test_the_16_bit_twin_runs_and_stays_near_the_base(self, plain, tmp_path, algorithm):
        if algorithm in ("W8A16", "W4A8_AWQ"):
            pytest.skip("dequantised as its neighbour is; its weights are compared above")
        twin = write_dequantised(quantise(plain, tmp_path / "q", algorithm), tmp_path / "twin", dtype="float32")
        ours, theirs = (logits(folder) for folder in (twin, plain))
        error = ((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max()
        assert 0 < error < (0.5 if algorithm.startswith("W4") else 0.1)

    def test_16_bit_heads_join_with_a_right_exclude_list(self, plain, tmp_path, algorithm, heads):
        folder = quantise(plain, tmp_path / "q", algorithm)
        joined = add_heads(folder, read_head_set(heads), tmp_path / "joined", max_draft_len=63)
        config = json.loads((joined / "config.json").read_text())
        assert {"lm_head", "medusa_heads", "*medusa_heads*"} <= set(config["quantization"]["exclude_modules"])
        assert (config["num_medusa_heads"], config["max_draft_len"]) == (2, 63)
        assert find_faults(read_quantised(joined)) == ()
        edit_config(joined, exclude_modules=["lm_head"])
        assert kinds(joined) == {"not quantised"}


def logits(folder):
    model = open_emulator(open_source_tree("bundled")).load_checkpoint(folder, dtype="float32")
    cache = model.new_cache(1, 40)
    return model.prefill([torch.arange(3, 35)], cache, all_logits=True).logits[0][:, :V]


@pytest.mark.parametrize("algorithm", ["FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ"])
def test_a_checkpoint_without_calibration_is_refused_as_such(plain, tmp_path, algorithm):
    folder = quantise(plain, tmp_path / "q", algorithm, calibrated=False)
    with pytest.raises(CheckpointError, match="without calibration: 10 activation scales are absent"):
        require_consistent(read_quantised(folder))
    outcome = check_quantised(folder).outcome
    assert (outcome.failing_gate, outcome.verdict) == ("no calibration", Verdict.FAIL)
    assert "without calibration, 10 activation scales are absent" in outcome.summary
    with pytest.raises(CheckpointError, match="without calibration"):
        write_dequantised(folder, tmp_path / "twin")
    assert not (tmp_path / "twin").exists()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda tensors: tensors.pop(f"{LAYER}.weights_scaling_factor"), "no scale"),
        (lambda tensors: tensors.update({f"{LAYER}.weight": torch.zeros(E, 128).half()}), "not quantised"),
        (lambda tensors: tensors.update({"lm_head.weights_scaling_factor": torch.ones(1)}), "scale without need"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(V, E).to(torch.int8)}), "quantised"),
        (lambda tensors: tensors[f"{LAYER}.weights_scaling_factor"].zero_(), "value"),
        (lambda tensors: tensors[f"{LAYER}.weights_scaling_factor"].fill_(float("nan")), "value"),
        (lambda tensors: tensors.update({f"{LAYER}.weights_scaling_factor": torch.ones(5)}), "shape"),
        (lambda tensors: tensors.update({"stray.weight": torch.zeros(4, 2, 2).to(torch.int8)}), "not judged"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name], "layers"),
    ],
)
def test_each_contradiction_is_found(plain, tmp_path, change, kind):
    folder = quantise(plain, tmp_path / "q", "W8A16")
    edit(folder, change)
    assert kinds(folder) == {kind}
    with pytest.raises(CheckpointError, match="contradicts itself"):
        require_consistent(read_quantised(folder))


def test_int8_heads_without_their_scale_are_found_and_the_mirror_case(plain, tmp_path, heads):
    folder = quantise(plain, tmp_path / "q", "W8A16")
    joined = add_heads(folder, read_head_set(heads), tmp_path / "joined", max_draft_len=63)
    name = "medusa_heads.0.medusa_layers.0.linear"
    edit(joined, lambda tensors: tensors.update({f"{name}.weight": torch.zeros(E, E).to(torch.int8)}))
    edit_config(joined, exclude_modules=["lm_head", "*lm_head", "medusa_heads.1*"])
    assert [fault.kind for fault in find_faults(read_quantised(joined)) if name in fault.module] == ["no scale"]
    edit(joined, lambda tensors: tensors.update({f"{name}.per_channel_scale": torch.ones(E)}))
    edit_config(joined, exclude_modules=["lm_head", "*medusa_heads*"])
    faults = [fault.kind for fault in find_faults(read_quantised(joined)) if name in fault.module]
    assert faults == ["quantised", "scale without need"]


def test_a_quantised_cache_needs_its_scales(plain, tmp_path):
    folder = quantise(plain, tmp_path / "q", "FP8")
    edit_config(folder, kv_cache_quant_algo="FP8")
    assert kinds(folder) == {"cache"}


CACHE = "transformer.layers.{}.kv_cache_scaling_factor"


@pytest.mark.parametrize(
    ("change", "kind", "layer"),
    [
        (lambda tensors: None, None, None),
        (lambda tensors: tensors.pop(CACHE.format("1.attention")), "cache", "1.attention"),
        (lambda tensors: tensors.update({CACHE.format("0.attention"): torch.ones(2)}), "shape", "0.attention"),
        (lambda tensors: tensors.update({CACHE.format("1.attention"): torch.ones(0)}), "shape", "1.attention"),
        (lambda tensors: tensors[CACHE.format("1.attention")].neg_(), "value", "1.attention"),
        (lambda tensors: tensors[CACHE.format("1.attention")].fill_(float("inf")), "value", "1.attention"),
        (lambda tensors: tensors.update({CACHE.format("0.mlp"): torch.ones(1)}), "scale without need", "0.mlp"),
    ],
)
def test_the_caches_scales_are_one_a_layer_and_their_values_are_said_not_to_be_proven(
    base, plain, tmp_path, change, kind, layer
):
    folder = quantise(plain, tmp_path / "q", "FP8")
    edit_config(folder, kv_cache_quant_algo="FP8")
    edit(
        folder,
        lambda tensors: tensors.update({CACHE.format(f"{number}.attention"): torch.ones(1) for number in range(2)}),
    )
    edit(folder, change)
    result = check_quantised(folder, base=base)
    wanted = [(kind, f"rank0: transformer.layers.{layer}")] if kind else []
    assert [(fault.kind, fault.module) for fault in result.faults] == wanted
    if kind is None:
        said = {"activation_scaling_factor": 10, "kv_cache_scaling_factor": 2}
        assert (result.outcome.verdict, result.outcome.figures["unproven_scales"]) == (Verdict.PASS, said)
        assert "their values not proven: 10 activation_scaling_factor, 2 kv" in result.outcome.summary


def test_nothing_is_said_of_scales_that_are_not_there(base, plain, tmp_path):
    outcome = check_quantised(quantise(plain, tmp_path / "q", "W8A16"), base=base).outcome
    assert outcome.figures["unproven_scales"] == {}
    assert "proven" not in outcome.summary


def test_config_without_quantisation_over_int8_weights_is_found(plain, tmp_path):
    folder = quantise(plain, tmp_path / "q", "W8A16")
    edit_config(folder, quant_algo=None)
    assert {"quantised", "scale without need"} == kinds(folder)


def test_heads_that_do_not_fit_leave_nothing_behind(plain, tmp_path, heads):
    folder = quantise(plain, tmp_path / "q", "FP8")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_size": 96}))
    with pytest.raises(CheckpointError, match="differ in hidden size"):
        add_heads(folder, read_head_set(heads), tmp_path / "joined", max_draft_len=63)
    assert not (tmp_path / "joined").exists()


def test_four_bits_are_unpacked_row_by_row():
    packed = torch.tensor([[0x21, 0x43], [0xF8, 0x7F]], dtype=torch.uint8).view(torch.int8)
    tensors = {"x.weight": packed, "x.weights_scaling_factor": torch.ones(4, 1)}
    rows = read_matrix(tensors, "x", KNOWN["W4A16_AWQ"]).weight
    assert rows.tolist() == [[1, 3], [2, 4], [-8, -1], [-1, 7]]


@pytest.mark.parametrize(
    ("algorithm", "scale"),
    [
        ("FP8", "weights_scaling_factor"),
        ("W8A16", "weights_scaling_factor"),
        ("W8A8_SQ_PER_CHANNEL", "weights_scaling_factor"),
        ("W8A8_SQ_PER_CHANNEL", "prequant_scaling_factor"),
    ],
)
def test_one_scale_that_is_2_percent_off_is_named(base, plain, tmp_path, algorithm, scale):
    """The distance of the whole matrix does not show it: it stays within what rounding explains."""
    folder = quantise(plain, tmp_path / "quantised", algorithm)
    edit(folder, lambda tensors: tensors[f"{LAYER}.{scale}"].view(-1)[:1].mul_(1.02))
    (wrong,) = [error for error in compare_base(folder, base) if not error.passed]
    assert wrong.module == LAYER
    assert wrong.relative_error <= wrong.bound
    place = {"FP8": "the whole matrix"}.get(algorithm, "row 0" if scale.startswith("weights") else "column 0")
    assert wrong.scale_fault.startswith(f"the scale of {place} is 1.0")
    outcome = check_quantised(folder, base=base).outcome
    assert (outcome.failing_gate, outcome.verdict) == ("weights", Verdict.FAIL)
    assert "times what it should be" in outcome.summary


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W4A8_AWQ"])
@pytest.mark.parametrize("scale", ["weights_scaling_factor", "prequant_scaling_factor"])
def test_4_bit_scales_are_told_by_the_numbers_that_they_give(base, plain, tmp_path, algorithm, scale):
    """Rounding to 4 bit moves the factor of a short row by more than a scale that is off; its numbers it does not."""
    folder = quantise(plain, tmp_path / "quantised", algorithm)
    edit(folder, lambda tensors: tensors[f"{LAYER}.{scale}"][:4].mul_(1.1))
    (wrong,) = [error for error in compare_base(folder, base) if not error.passed]
    assert wrong.module == LAYER
    assert wrong.relative_error <= wrong.bound


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W4A8_AWQ"])
def test_one_scale_of_a_group_of_32_that_is_2_percent_off_is_named(base, plain, tmp_path, algorithm):
    folder = quantise(plain, tmp_path / "quantised", algorithm)
    edit(folder, lambda tensors: tensors[f"{LAYER}.weights_scaling_factor"][5, 2].mul_(1.02))
    outcome = check_quantised(folder, base=base).outcome
    assert (outcome.failing_gate, outcome.verdict) == ("weights", Verdict.FAIL)
    assert f"{LAYER}: the scale of row 5, group 2 is 1.02 times" in outcome.summary


def test_numbers_that_another_scale_gave_are_named(base, plain, tmp_path):
    folder = quantise(plain, tmp_path / "quantised", "W4A16_AWQ")
    edit(folder, lambda tensors: tensors[f"{LAYER}.weight"][3:4].add_(1))
    (wrong,) = [error for error in compare_base(folder, base) if not error.passed]
    assert "numbers are not what the base's matrix gives by these scales, most in row 6" in wrong.scale_fault


def test_4_bit_scales_are_told_from_rounding_where_rows_are_long(tmp_path):
    """Rounding to 4 bit moves the factor of a row by itself; 2 percent show above it from some thousand inputs on."""
    from porting_kit.conversion.quantised_scales import find_scale_fault

    weight = torch.randn(8, 8192, generator=torch.Generator().manual_seed(5))
    groups = weight.reshape(8, -1, 128)
    scale = groups.abs().amax(-1) / 7.0
    whole = (groups / scale[..., None]).round().clamp(-8, 7).reshape(weight.shape).to(torch.int8)
    packed = ((whole[0::2] & 15) | (whole[1::2] << 4)).to(torch.int8)
    tensors = {"x.weight": packed, "x.weights_scaling_factor": scale}
    assert find_scale_fault(read_matrix(tensors, "x", KNOWN["W4A16_AWQ"]), weight, KNOWN["W4A16_AWQ"]) is None
    scale[3] *= 1.03
    fault = find_scale_fault(read_matrix(tensors, "x", KNOWN["W4A16_AWQ"]), weight, KNOWN["W4A16_AWQ"])
    assert fault.startswith("the scale of row 3 is 1.0")


def test_the_step_checks_compares_and_writes(base, plain, tmp_path, heads):
    folder = quantise(plain, tmp_path / "q", "FP8")
    result = check_quantised(
        folder, base=base, heads=heads, dequantised=tmp_path / "twin", out=tmp_path / "joined", max_draft_len=15
    )
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    (tmp_path / "any").touch()
    written = [tmp_path / name / "rank0.safetensors" for name in ("twin", "joined")]
    assert {file.stat().st_mode for file in written} == {(tmp_path / "any").stat().st_mode}
    assert json.loads((tmp_path / "joined" / "config.json").read_text())["max_draft_len"] == 15
    edit(folder, lambda tensors: tensors[f"{LAYER}.weight"].view(torch.uint8).bitwise_xor_(0x80))
    assert check_quantised(folder, base=base).outcome.failing_gate == "weights"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization": "x"}, "quantization"),
        ({"quantization": ["FP8"]}, "quantization"),
        ({"quantization": {"quant_algo": 8}}, "quantisation"),
        ({"quantization": {"quant_algo": ["FP8"]}}, "quantisation"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": "lm_head"}}, "exclude_modules"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": [3]}}, "exclude_modules"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": {"lm_head": True}}}, "exclude_modules"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": {"a": 1}}}, "kv_cache_quant_algo"),
        ({"dtype": "float8"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"dtype": ["float16"]}, "dtype"),
        ({"mapping": [1]}, "mapping"),
        ({"mapping": {"tp_size": "two"}}, "tp_size"),
        ({"mapping": {"tp_size": 0}}, "tp_size"),
        ({"mapping": {"tp_size": True}}, "tp_size"),
        ({"mapping": {"tp_size": 10**9}}, "mapping"),
        ({"mapping": {"world_size": 2, "tp_size": 1}}, "world_size"),
        ({"mapping": {"cp_size": 2}}, "context parallelism"),
        ({"mapping": {"world_size": 2, "cp_size": 2}}, "context parallelism"),
        ({"mapping": {"cp_size": "two"}}, "cp_size"),
        ({"mapping": {"world_size": 2, "tp_size": 2}}, "rank1.safetensors|missing"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"architecture": 5}, "architecture"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"head_size": [16]}, "head_size"),
        ({"intermediate_size": "128"}, "intermediate_size"),
        ({"norm_epsilon": "1e-5"}, "norm_epsilon"),
        ({"norm_epsilon": 0}, "norm_epsilon"),
        ({"rotary_base": True}, "rotary_base"),
        ({"rotary_base": float("inf")}, "rotary_base"),
        ({"rotary_scaling": [2]}, "rotary_scaling"),
        ({"position_embedding_type": 3}, "position_embedding_type"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"use_parallel_embedding": "yes"}, "use_parallel_embedding"),
        ({"embedding_sharding_dim": 2}, "embedding_sharding_dim"),
        ({"num_medusa_heads": "2"}, "num_medusa_heads"),
        ({"num_medusa_layers": -1}, "num_medusa_layers"),
        ({"max_draft_len": 64}, "max_draft_len"),
        ({"max_draft_len": -1}, "max_draft_len"),
        ({"quantization": {"quant_algo": "W4A16_AWQ", "group_size": "128"}}, "group_size"),
        ({"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 0}}, "group_size"),
        ({"quantization": {"quant_algo": "W4A16_AWQ", "pre_quant_scale": "yes"}}, "pre_quant_scale"),
    ],
)
def test_a_config_of_another_shape_is_refused_by_its_field(plain, tmp_path, changes, named):
    folder = quantise(plain, tmp_path / "q", "FP8")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=named) as caught:
        check_quantised(folder)
    assert caught.value.exit_code == 2
    assert str(folder) in caught.value.where


@pytest.mark.parametrize("damage", ["no tensors", "surplus rank", "no folder", "a list"])
def test_a_folder_that_holds_something_else_is_refused(plain, tmp_path, damage):
    folder = quantise(plain, tmp_path / "q", "FP8")
    if damage == "no tensors":
        save_file({}, folder / "rank0.safetensors")
    elif damage == "surplus rank":
        save_file({"a": torch.zeros(1)}, folder / "rank1.safetensors")
    elif damage == "a list":
        (folder / "config.json").write_text("[]")
    else:
        folder = tmp_path / "nowhere"
    with pytest.raises(CheckpointError):
        check_quantised(folder)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("algorithm", ["FP8", "W4A16_AWQ"])
def test_sharded_checkpoints_are_compared_rank_by_rank(base, tmp_path, algorithm, tp_size, pp_size):
    convert_checkpoint(base, tmp_path / "plain", dtype="float16", tp_size=tp_size, pp_size=pp_size)
    folder = quantise(tmp_path / "plain", tmp_path / "q", algorithm)
    result = check_quantised(folder, base=base)
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    assert len(result.errors) == 10 * tp_size
    last, layer = f"rank{tp_size * pp_size - 1}", LAYER if pp_size == 1 else LAYER.replace("layers.1", "layers.0")
    tensors = load_file(folder / f"{last}.safetensors")
    tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].flip(0).contiguous()
    save_file(tensors, folder / f"{last}.safetensors")
    wrong = [error.module for error in check_quantised(folder, base=base).errors if not error.passed]
    assert wrong == [f"{last}: {layer}"]


@pytest.mark.parametrize("vocab_rows", [V, V + 1])
def test_heads_join_a_sharded_base_on_every_rank(tmp_path, heads, vocab_rows):
    """Cut as the conversion cuts them: on every pipeline stage, and padded where the vocabulary does not divide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_rows, hidden_size=E, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(tmp_path / "base")
    tensors = load_file(heads / "medusa_lm_head.safetensors")
    for head in range(2):
        tensors[f"{head}.1.weight"] = torch.randn(vocab_rows, E, generator=torch.Generator().manual_seed(head))
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    ranks = {"tp_size": 2, "pp_size": 2, "dtype": "float16"}
    convert_checkpoint(tmp_path / "base", tmp_path / "plain", **ranks)
    convert_checkpoint(tmp_path / "base", tmp_path / "whole", heads=heads, **ranks)
    folder = quantise(tmp_path / "plain", tmp_path / "q", "FP8")
    joined = add_heads(folder, read_head_set(heads), tmp_path / "joined", max_draft_len=63)
    for rank in range(4):
        ours, wanted = (load_file(place / f"rank{rank}.safetensors") for place in (joined, tmp_path / "whole"))
        names = [name for name in wanted if name.startswith("medusa_heads.")]
        assert len(names) == 6
        assert all(torch.equal(ours[name], wanted[name]) for name in names)


def test_a_checkpoint_in_16_bit_has_no_base_to_be_compared_with(base, plain, tmp_path):
    assert check_quantised(plain).outcome.summary.startswith("not quantised")
    with pytest.raises(CheckpointError, match="not quantised"):
        check_quantised(plain, base=base)


@pytest.mark.parametrize("damage", ["no config", "cut", "unknown", "empty"])
def test_broken_folders_are_refused(plain, tmp_path, damage):
    folder = quantise(plain, tmp_path / "q", "FP8")
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "unknown":
        edit_config(folder, quant_algo="W3A3")
    else:
        data = (folder / "rank0.safetensors").read_bytes()
        (folder / "rank0.safetensors").write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    with pytest.raises(CheckpointError):
        require_consistent(read_quantised(folder))


class TestModelOpt:
    """ModelOpt's own files, where the package is installed."""

    @pytest.mark.parametrize(
        ("name", "algorithm"),
        [
            ("FP8_DEFAULT_CFG", "FP8"),
            ("INT8_SMOOTHQUANT_CFG", "W8A8_SQ_PER_CHANNEL"),
            ("INT8_WEIGHT_ONLY_CFG", "W8A16"),
            ("INT4_AWQ_CFG", "W4A16_AWQ"),
            ("W4A8_AWQ_BETA_CFG", "W4A8_AWQ"),
        ],
    )
    @pytest.mark.parametrize("vocab_rows", [192, V])
    def test_its_checkpoints_are_sound_and_are_the_bases(self, tmp_path, name, algorithm, vocab_rows):
        """AWQ pads a vocabulary of 160 to 192 rows, of zeros and in the config too, which is a difference."""
        pytest.importorskip("modelopt.torch.quantization", reason="nvidia-modelopt is not installed")
        export_with_modelopt(tmp_path, name, vocab_rows)
        assert read_quantised(tmp_path / "q").algorithm.name == algorithm
        result = check_quantised(tmp_path / "q", base=tmp_path / "base", dequantised=tmp_path / "twin")
        is_padded = "AWQ" in name and vocab_rows % 64 > 0
        assert [fault.module for fault in result.compared.differences] == (["vocab_size"] if is_padded else [])
        assert len(result.errors) == 10
        assert all(error.passed for error in result.errors), result.errors
        assert is_padded or logits(tmp_path / "twin").isfinite().all()


def export_with_modelopt(folder, name, vocab_rows):
    """A small LLaMA whose widths groups of 128 divide, as `base`, and ModelOpt's checkpoint of it as `q`."""
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_rows, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder / "base")
    model = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, V, (2, 40), generator=generator) for _ in range(4)]
    model = quantization.quantize(model, getattr(quantization, name), lambda m: [m(batch) for batch in batches])
    export_tensorrt_llm_checkpoint(
        model, "llama", dtype=torch.float16, export_dir=folder / "q", inference_tensor_parallel=1,
        inference_pipeline_parallel=1,
    )  # fmt: skip
