"""The convert step: estimates, a base checkpoint in place of the base, runs that go on, what is refused early."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from porting_kit.conversion import convert_checkpoint
from porting_kit.conversion.stream import Progress
from porting_kit.errors import CheckpointError, ConversionError, PortingKitError
from porting_kit.outcomes import Verdict
from porting_kit.steps.compare import compare_folders, format_comparison
from porting_kit.steps.context import open_port_run
from porting_kit.steps.convert import convert_port, estimate_port
from porting_kit.steps.progress import ProgressBar
from porting_kit.steps.proof import format_proof, prove_port
from tests.steps.sharded_port import change_ranks, open_run, write_port


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_port(tmp_path_factory.mktemp("convert"))


def test_the_estimate_converts_nothing_and_fits_what_is_written(port: Path, tmp_path: Path) -> None:
    run = open_run(port, tmp_path / "run", tp_size=2)
    estimate = estimate_port(run)
    assert estimate.outcome.verdict is Verdict.PASS
    assert not run.folder.checkpoint.exists()
    assert run.folder.outcome("convert") is None
    written = convert_port(run).outcome.figures["bytes"]
    assert written <= estimate.estimate.output_bytes < written + (2 << 20)
    assert estimate.document()["estimate"]["seconds"] > 0


def test_a_large_conversion_says_first_what_it_needs(port: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    convert_port(open_run(port, tmp_path / "small"))
    assert "GiB to write" not in capsys.readouterr().err
    monkeypatch.setattr("porting_kit.steps.convert.ANNOUNCED_BYTES", 1000)
    convert_port(open_run(port, tmp_path / "large"))
    assert "GiB to write" in capsys.readouterr().err


def test_a_base_checkpoint_gives_the_same_as_the_base(port: Path, tmp_path: Path) -> None:
    whole, joined = open_run(port, tmp_path / "whole", tp_size=2), tmp_path / "joined"
    convert_port(whole)
    convert_checkpoint(port.parent / "base", tmp_path / "upstream", dtype="float32", tp_size=2)
    overrides = {"target.tp_size": 2, "base_checkpoint": str(tmp_path / "upstream")}
    run = open_port_run(port, run_folder=joined, overrides=overrides)
    convert_port(run, verify=False)
    assert compare_folders(whole.folder.checkpoint, run.folder.checkpoint).outcome.verdict is Verdict.PASS
    assert prove_port(run).outcome.verdict is Verdict.PASS
    overrides["target.tp_size"] = 1
    with pytest.raises(CheckpointError, match="of another tp_size than the port"):
        convert_port(open_port_run(port, run_folder=tmp_path / "other", overrides=overrides))


@pytest.fixture
def joined(port: Path, tmp_path: Path):
    """A port that adds heads to a checkpoint of two ranks, and that checkpoint."""
    folder = tmp_path / "upstream"
    convert_checkpoint(port.parent / "base", folder, dtype="float32", tp_size=2)
    overrides = {"target.tp_size": 2, "base_checkpoint": str(folder)}
    return lambda: open_port_run(port, run_folder=tmp_path / "joined", overrides=overrides), folder


NORM = "transformer.layers.1.post_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(NORM), f"there is no {NORM}"),
        (lambda tensors: tensors.update({"transformer.stray.bias": torch.zeros(3)}), "stray.bias .* has no place"),
        (lambda tensors: tensors.update({NORM: torch.ones(3)}), f"{NORM} is .3., expected"),
        (lambda tensors: tensors.update({NORM: tensors[NORM].half()}), f"{NORM} is float16, expected float32"),
    ],
)
def test_a_base_checkpoint_with_other_tensors_is_refused(joined, change, said: str) -> None:
    """Whatever its config says: the library would leave out what it does not ask for, or stop while it loads."""
    open_joined, folder = joined
    change_ranks(folder, lambda ranks: change(ranks[1]))
    with pytest.raises(CheckpointError, match=said):
        convert_port(open_joined())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_epsilon", 1e-3),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 1),
        ("position_embedding_type", "alibi"),
        ("hidden_act", "relu"),
        ("num_hidden_layers", 3),
        ("intermediate_size", 96),
    ],
)
def test_a_base_checkpoint_with_another_config_is_refused(joined, field: str, value) -> None:
    open_joined, folder = joined
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=f"not what the port's base converts to: {field} is {value!r}"):
        convert_port(open_joined())


def test_a_field_that_a_base_checkpoint_leaves_out_counts_as_the_releases_default(tmp_path: Path) -> None:
    """GPT-NeoX's rotary base stands in no table of defaults: the release's own class says 10,000."""
    rope = {"rope_type": "default", "rope_theta": 30000.0, "partial_rotary_factor": 0.25}
    port, upstream = write_port(tmp_path, "gptneox", intermediate_size=128, rope_parameters=rope), tmp_path / "upstream"
    convert_checkpoint(tmp_path / "base", upstream, dtype="float32")
    file = upstream / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("rotary_emb_base") == 30000
    file.write_text(json.dumps(config))
    run = open_port_run(port, run_folder=tmp_path / "run", overrides={"base_checkpoint": str(upstream)})
    with pytest.raises(CheckpointError, match="rotary_emb_base is absent, for which the library takes 10000"):
        convert_port(run)


def test_a_field_of_which_no_default_is_known_is_said_to_be_not_judged(joined, capsys) -> None:
    open_joined, folder = joined
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["seq_length"], config["qwen_type"]
    file.write_text(json.dumps(config))
    said = "the base checkpoint leaves out seq_length, and no default is known: not judged"
    assert said in convert_port(open_joined()).outcome.figures["warnings"]
    assert said in capsys.readouterr().err


def test_values_of_a_base_checkpoint_are_led_back_to_the_base(joined) -> None:
    """Copied bit for bit, and still of another model: only the Hugging Face base can tell."""
    open_joined, folder = joined
    change_ranks(folder, lambda ranks: ranks[0]["transformer.layers.0.mlp.proj.weight"].mul_(1.01))
    run = open_joined()
    convert_port(run)
    outcome = prove_port(run).outcome
    assert (outcome.verdict, outcome.failing_gate) == (Verdict.FAIL, "inverse rules")
    assert outcome.figures["unproved"] == ["transformer.layers.0.mlp.proj.weight"]
    assert outcome.figures["next_step"].startswith("convert the base checkpoint again")


def test_a_mistake_of_the_base_checkpoints_converter_is_named(joined) -> None:
    open_joined, folder = joined
    name = "transformer.layers.0.attention.qkv.weight"

    def swap(ranks) -> None:
        ranks[0][name], ranks[1][name] = ranks[1][name], ranks[0][name]

    change_ranks(folder, swap)
    run = open_joined()
    convert_port(run)
    result = prove_port(run)
    assert [mistake.name for mistake in result.mistakes] == ["shards in another order"]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_base_checkpoint_may_cut_its_embedding(joined, dim: int) -> None:
    """Upstream's converters do with --use_parallel_embedding."""
    open_joined, folder = joined
    name = "transformer.vocab_embedding.weight"

    def cut(ranks) -> None:
        for rank, tensors in enumerate(ranks):
            tensors[name] = tensors[name].chunk(2, dim)[rank].clone()

    change_ranks(folder, cut)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "use_parallel_embedding": True, "embedding_sharding_dim": dim}))
    run = open_joined()
    convert_port(run)
    assert prove_port(run).outcome.verdict is Verdict.PASS
    change_ranks(run.folder.checkpoint, lambda ranks: ranks[1][name].mul_(2))
    assert name in prove_port(run).outcome.figures["unproved"][0]


@pytest.mark.parametrize(("field", "value"), [("norm_epsilon", 1e-3), ("position_embedding_type", "learned_absolute")])
def test_a_field_of_the_config_that_was_changed_is_named(port: Path, tmp_path: Path, field: str, value) -> None:
    """The tensors are all right; the library would read the field without a question."""
    run = open_run(port, tmp_path / "run")
    convert_port(run)
    assert prove_port(run).outcome.verdict is Verdict.PASS
    file = run.folder.checkpoint / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, field: value}))
    outcome = prove_port(run).outcome
    assert outcome.verdict is Verdict.FAIL
    assert f"{field} is {value!r}, the conversion wrote {config[field]!r}" in outcome.summary


def test_compare_names_what_differs(port: Path, tmp_path: Path) -> None:
    one, two = (open_run(port, tmp_path / name) for name in ("one", "two"))
    convert_port(one)
    convert_port(two)

    def change(ranks) -> None:
        ranks[0]["transformer.ln_f.weight"][3] += 0.5
        del ranks[0]["medusa_heads.0.medusa_layers.0.linear.bias"]

    change_ranks(two.folder.checkpoint, change)
    file = two.folder.checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "norm_epsilon": 1.0}))
    result = compare_folders(one.folder.checkpoint, two.folder.checkpoint)
    text = format_comparison(result)
    assert result.outcome.verdict is Verdict.FAIL
    assert "transformer.ln_f.weight: values, 1 of 32 values differ, the first at [3], by at most 0.5" in text
    assert "medusa_heads.0.medusa_layers.0.linear.bias: only in the first" in text
    assert "config norm_epsilon" in text
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        compare_folders(one.folder.checkpoint, tmp_path)


def test_a_proof_converts_first_and_says_what_fails(port: Path, tmp_path: Path) -> None:
    run = open_run(port, tmp_path / "run")
    assert prove_port(run).outcome.figures["verified"] > 0
    change_ranks(run.folder.checkpoint, lambda ranks: ranks[0]["lm_head.weight"].mul_(2))
    text = format_proof(prove_port(run))
    assert "FAIL  lm_head.weight (ranks 0)" in text
    assert "tensors hold other values than the source" in text
    convert_port(run)
    assert prove_port(run).outcome.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"target.tp_size": 3}, "query heads do not divide over the ranks"),
        ({"target.pp_size": 4}, "layers do not divide"),
        ({"target.tp_size": 8}, "do not divide over the ranks"),
    ],
)
def test_what_cannot_work_is_refused_in_the_first_second(overrides, message: str, port: Path, tmp_path: Path) -> None:
    run = open_port_run(port, run_folder=tmp_path / "run", overrides=overrides)
    started = time.perf_counter()
    with pytest.raises(ConversionError, match=message):
        convert_port(run)
    assert time.perf_counter() - started < 1
    assert not run.folder.checkpoint.exists()


def test_too_little_disk_is_refused_at_once(port: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(port, tmp_path / "run")
    convert_port(run)
    monkeypatch.setattr("porting_kit.conversion.estimate._find_room", lambda *_: 1000)
    with pytest.raises(PortingKitError, match="too little room"):
        convert_port(run)
    assert (run.folder.checkpoint / "config.json").exists()  # the old checkpoint was not touched


def test_progress_is_one_line_with_rate_and_time_left() -> None:
    class Screen:
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

        def fileno(self) -> int:
            raise OSError

    screen = Screen()
    with ProgressBar("convert", screen) as bar:
        bar.show(Progress(done_bytes=1 << 20, total_bytes=100 << 20, seconds=0.5))
        assert screen.text == ""
        bar.show(Progress(done_bytes=20 << 20, total_bytes=100 << 20, seconds=2.0))
    assert "convert" in screen.text
    assert "20.0M/100M" in screen.text
    assert "MB/s" in screen.text
    assert "<00:0" in screen.text  # time left
