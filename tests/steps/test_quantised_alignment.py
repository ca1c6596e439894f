"""A quantised checkpoint is aligned on its 16-bit twin: Medusa must be right, the distance to the base bounded."""

import json

import pytest

from porting_kit.errors import CheckpointError, RunFolderError
from porting_kit.outcomes import Verdict
from porting_kit.steps.context import open_port_run
from porting_kit.steps.quantised import check_quantised
from porting_kit.steps.quantised_alignment import align_quantised
from tests.cli.conftest import PortFolder, port, pristine_port  # noqa: F401 (fixtures)
from tests.conversion.test_quantised import edit, quantise
from tests.conversion.test_quantised_base import change_config

LAYER = "transformer.layers.1.mlp.proj"


@pytest.fixture
def case(port: PortFolder, tmp_path):  # noqa: F811
    """A run, and its base as an FP8 checkpoint."""
    from porting_kit.conversion.convert import convert_checkpoint

    run = open_port_run(port.file, run_folder=tmp_path / "run")
    convert_checkpoint(port.base, tmp_path / "plain", dtype="float32")
    return run, quantise(tmp_path / "plain", tmp_path / "fp8", "FP8")


def test_medusa_on_an_fp8_base_is_right_and_called_approximate(case):
    run, checkpoint = case
    result = align_quantised(run, checkpoint)
    passed = {gate.name for gate in result.alignment.gates if gate.passed}
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    assert passed >= {"tokens", "medusa equals greedy", "batches", "repeat", "heads", "fit"}
    fit = result.alignment.approximate_fit
    assert fit.notes == ("weights in FP8",)
    assert 0 < fit.mean_divergence <= fit.bounds["mean_divergence"]
    assert (run.folder.root / "quantised_alignment.json").is_file()
    assert not list(run.folder.root.glob("tmp*"))


@pytest.mark.slow
def test_a_scale_of_another_layer_fails_the_distance(case):
    run, checkpoint = case
    edit(checkpoint, lambda tensors: tensors[f"{LAYER}.weights_scaling_factor"].mul_(64))
    result = align_quantised(run, checkpoint)
    assert result.outcome.verdict is Verdict.FAIL
    assert "fit" in {gate.name for gate in result.alignment.gates if gate.passed is False}


def test_one_scale_that_is_2_percent_off_fails_by_the_weights(case):
    """Too small for the distance of the text; the weights show it."""
    run, checkpoint = case
    edit(checkpoint, lambda tensors: tensors[f"{LAYER}.weights_scaling_factor"].mul_(1.02))
    result = align_quantised(run, checkpoint)
    assert (result.outcome.verdict, result.outcome.failing_gate) == (Verdict.FAIL, "weights")
    assert LAYER in result.outcome.summary


def test_heads_that_a_checkpoint_holds_are_the_ports_or_fail(case, tmp_path):
    run, checkpoint = case
    check_quantised(checkpoint, heads=run.port.heads_path, out=tmp_path / "joined")
    assert align_quantised(run, tmp_path / "joined").outcome.verdict is Verdict.PASS
    name = "medusa_heads.0.medusa_layers.0.linear.weight"
    edit(tmp_path / "joined", lambda tensors: tensors[name].mul_(1.01))
    result = align_quantised(run, tmp_path / "joined")
    assert (result.outcome.verdict, result.outcome.failing_gate) == (Verdict.FAIL, "value")
    assert name in result.outcome.summary


def test_4_bit_heads_are_judged_on_the_twins_own_states(case, tmp_path):
    """The base's states would predict other steps than the twin's: 4 bit move them."""
    run, _ = case
    checkpoint = quantise(tmp_path / "plain", tmp_path / "int4", "W4A16_AWQ")
    result = align_quantised(run, checkpoint)
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    assert "heads" in {gate.name for gate in result.alignment.gates if gate.passed}


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"norm_epsilon": 1e-2}, "norm_epsilon is 0.01"), ({"hidden_act": "relu"}, "hidden_act is 'relu'")],
)
def test_a_config_that_makes_another_model_fails_by_the_config(case, changes, said):
    run, checkpoint = case
    change_config(checkpoint, changes)
    result = align_quantised(run, checkpoint)
    assert (result.outcome.verdict, result.outcome.failing_gate) == (Verdict.FAIL, "config")
    assert said in result.outcome.summary
    assert result.outcome.covered == ()


def test_a_norm_that_is_not_the_bases_fails_by_its_value(case):
    """Too small for the distance of the text, and no matrix shows it."""
    run, checkpoint = case
    edit(checkpoint, lambda tensors: tensors["transformer.ln_f.weight"].mul_(1.001))
    result = align_quantised(run, checkpoint)
    assert (result.outcome.verdict, result.outcome.failing_gate) == (Verdict.FAIL, "value")
    assert "transformer.ln_f.weight differs from the base's" in result.outcome.summary


def test_logits_in_16_bit_do_not_blur_the_comparison_of_the_phases(case):
    """nvidia-modelopt 0.47.0 writes logits_dtype float16."""
    run, checkpoint = case
    change_config(checkpoint, {"logits_dtype": "float16"})
    result = align_quantised(run, checkpoint)
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary


@pytest.mark.parametrize("algorithm", ["FP8", pytest.param("W8A8_SQ_PER_CHANNEL", marks=pytest.mark.slow)])
def test_a_sharded_checkpoint_is_joined_and_aligned(case, tmp_path, algorithm):
    from porting_kit.conversion.convert import convert_checkpoint

    run, _ = case
    convert_checkpoint(run.port.base_path, tmp_path / "cut", dtype="float32", tp_size=2)
    checkpoint = quantise(tmp_path / "cut", tmp_path / "sharded", algorithm)
    result = align_quantised(run, checkpoint)
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary


def test_a_checkpoint_of_another_base_is_refused(case):
    run, checkpoint = case
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    with pytest.raises(CheckpointError, match="another base: vocab_size"):
        align_quantised(run, checkpoint)


@pytest.mark.parametrize("kind", ["folder", "file", "twice"])
def test_results_never_replace_what_is_there(kind, tmp_path):
    """A folder of somebody else's, a file, or one place for two results: refused before anything is read."""
    place = tmp_path / "mine"
    if kind == "file":
        place.write_text("keep me")
    elif kind == "folder":
        place.mkdir()
        (place / "mine.txt").write_text("keep me")
    options = {"dequantised": place} if kind == "folder" else {"heads": tmp_path / "heads", "out": place}
    options |= {"dequantised": place} if kind == "twice" else {}
    with pytest.raises(RunFolderError):
        check_quantised(tmp_path / "checkpoint", **options)
    if kind == "file":
        assert place.read_text() == "keep me"
    if kind == "folder":
        assert (place / "mine.txt").read_text() == "keep me"
