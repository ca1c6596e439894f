"""The stable interface: commands, exit codes, JSON documents."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from porting_kit.cli import app, main
from porting_kit.diagnosis import seed_fault
from porting_kit.engine.captured import write_captured_tokens
from porting_kit.medusa.decoding import generate_medusa
from porting_kit.steps import preflight
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.context import open_port_run
from porting_kit.steps.prompts import CAPTURED_PAGE, RANDOM_LENGTHS
from tests.cli.conftest import PortFolder, make_heads


def call(*arguments: object) -> tuple[int, dict, str]:
    """Exit code, JSON document of stdout, stderr."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout), result.stderr


def test_preflight_prints_gates_and_leaves_its_outcome_in_the_ports_run_folder(port: PortFolder, tmp_path):
    code, document, stderr = call("preflight", port.file)
    assert (code, document["verdict"], stderr) == (0, "pass", "")
    assert {"name", "value", "verdict", "remedy", "source"} <= set(document["gates"][0])
    written = json.loads((tmp_path / "runs" / "tiny" / "preflight" / "outcome.json").read_text())
    assert written["verdict"] == "pass"


def test_preflight_judges_without_a_run_folder_that_can_be_written_and_says_so(port: PortFolder, tmp_path):
    (tmp_path / "runs").write_text("in the way")
    code, document, stderr = call("preflight", port.file)
    assert (code, document["verdict"]) == (0, "pass")
    assert "its outcome is not kept" in stderr
    assert "cannot be written" in stderr
    assert call("preflight", port.file, "--out", tmp_path / "runs" / "asked")[0] == 2


def test_preflight_warns_of_heads_whose_config_names_another_base(port: PortFolder):
    config = json.loads((port.heads / "config.json").read_text())
    for name, warned in (("someone/vicuna-7b", True), ("someone/base", False)):
        (port.heads / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        result = CliRunner().invoke(app, ["preflight", str(port.file)])
        assert result.exit_code == 0
        assert (f"warning: the heads' config names the base {name}" in result.stdout) == warned


def test_preflight_names_the_silent_alibi_gate_of_a_release(port: PortFolder):
    release = "kernel=release:0.11.0.dev2024062500"
    code, document, _ = call("preflight", port.file, "-p", release, "-p", "dtype=float16")
    gates = {gate["name"]: gate for gate in document["gates"]}
    assert code == 1
    assert gates["ALiBi"]["verdict"] == "silent"
    assert gates["head size"]["verdict"] == "refused"
    assert document["verdict"] == "refused"
    assert document["failing_gate"] == "head size"


def test_steps_one_by_one_and_their_documents(port: PortFolder, tmp_path):
    out = tmp_path / "run"
    code, document, _ = call("preflight", port.file, "--out", out)
    assert code == 0
    code, document, _ = call("patch", port.file, "--out", out)
    assert code == 0
    assert [Path(name).name for name in document["products"]] == ["medusa_bloom.py", "port.patch"]
    code, document, _ = call("convert", port.file, "--out", out)
    assert (code, document["covered"]) == (0, ["weights"])
    code, document, _ = call("build", port.file, "--out", out, "--plan-only")
    assert code == 0
    assert document["plan"]["command"][0] == "trtllm-build"
    code, document, _ = call("build", port.file, "--out", out)
    assert (code, document["verdict"]) == (3, "not_run")
    code, document, _ = call("align", port.file, "--out", out)
    assert (code, document["verdict"], document["tokens_equal"]) == (0, "pass", True)
    for key in ("near_ties", "first_divergence", "tokens_per_step", "approximate_fit", "covered", "not_covered"):
        assert key in document
    code, document, _ = call("report", port.file, "--out", out)
    assert code == 0
    assert (out / "report.html").is_file()


def test_align_runs_what_is_missing_and_refuses_what_is_stale(port: PortFolder, tmp_path):
    out = tmp_path / "run"
    code, document, stderr = call("align", port.file, "--out", out)
    assert (code, document["verdict"]) == (0, "pass")
    assert "running it now" in stderr
    port.edit_port(tree=[[0], [1]])
    code, document, _ = call("align", port.file, "--out", out)
    assert code == 2
    assert "stale" in document["error"]["subject"]
    assert "port.tree" in document["error"]["found"]


def test_later_outcomes_outlive_a_step_that_gives_the_same_again_and_no_other(port: PortFolder, tmp_path):
    out = tmp_path / "run"
    for command in (["preflight"], ["align"], ["build", "--plan-only"]):
        call(*command, port.file, "--out", out)
    for command in ("patch", "convert"):
        code, _, stderr = call(command, port.file, "--out", out)
        assert (code, "stale" in stderr) == (0, False)
    code, document, _ = call("report", port.file, "--out", out)
    assert (code, document["verdict"]) == (0, "pass")

    weights = load_file(port.weights_file)
    weights["transformer.word_embeddings.weight"][0, 0] += 1
    save_file(weights, port.weights_file, metadata={"format": "pt"})
    code, _, stderr = call("convert", port.file, "--out", out)
    assert code == 0
    lines = [line for line in stderr.splitlines() if "stale" in line]
    assert [line.split(":")[0] for line in lines] == ["build", "align"]
    assert all("checkpoint" in line for line in lines)
    code, document, _ = call("report", port.file, "--out", out)
    assert (code, document["verdict"]) == (3, "not_run")
    assert "stale" in document["summary"]


@pytest.mark.parametrize(
    ("step", "product", "said"),
    [
        ("patch", "patched/medusa_bloom.py", "patched files"),
        ("convert", "checkpoint/config.json", "checkpoint"),
        ("convert", "checkpoint/medusa_choices.json", "checkpoint"),
    ],
)
def test_a_product_changed_behind_the_alignment_makes_it_stale(port: PortFolder, tmp_path, step, product, said):
    out = tmp_path / "run"
    call("align", port.file, "--out", out)
    file = out / product
    file.write_text(file.read_text() + "\n")
    document = call("report", port.file, "--out", out)[1]
    assert document["verdict"] == "not_run"
    assert document["summary"].startswith(f"{step}: edited, rerun it: {product}: ")
    assert f"stale, rerun it: {said} changed" in (out / "report.html").read_text()


def test_captured_tokens_of_the_run_script_are_aligned(port: PortFolder, tmp_path):
    out = tmp_path / "run"
    call("align", port.file, "--out", out)
    captured = tmp_path / "output.npy"
    captured.write_bytes((out / "alignment" / "output_ids.npy").read_bytes())
    options = ("-p", "engine=captured", "-p", f"alignment.captured={captured}")
    code, document, _ = call("align", port.file, "--out", out, *options)
    assert (code, document["verdict"]) == (0, "pass")
    assert document["covered"] == ["weights", "model code"]  # the file does not say what engine wrote it

    import numpy as np

    rows = np.load(captured)
    place = RANDOM_LENGTHS[0] + 2
    rows[0, place] = 50 if rows[0, place] != 50 else 51
    np.save(captured, rows)
    code, document, _ = call("align", port.file, "--out", out, *options)
    assert (code, document["verdict"]) == (1, "fail")
    assert document["first_divergence"]["kind"] == "wrong"


def test_a_captured_file_that_is_missing_is_found_before_torch_is_imported(port: PortFolder, tmp_path):
    port.edit_port(engine="captured", alignment={"captured": "output.npy"})
    for command in ("preflight", "align"):
        arguments = [
            "-X",
            "importtime",
            "-m",
            "porting_kit.cli",
            command,
            str(port.file),
            "--out",
            str(tmp_path / command),
        ]
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        assert result.returncode == 2
        assert "the captured file does not exist" in result.stderr
        imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line}
        assert not imported & {"torch", "transformers"}
        assert not (tmp_path / command / "checkpoint").exists()


def test_a_captured_file_that_is_not_named_is_asked_for_where_it_is_needed(port: PortFolder, tmp_path):
    """The engine must be built before there is one."""
    port.edit_port(engine="captured")
    out = tmp_path / "run"
    for command in ("preflight", "align"):
        code, document, stderr = call(command, port.file, "--out", out)
        assert code == 2
        error = document["error"]
        assert error["subject"] == "the port has engine: captured and names no captured file"
        assert error["expected"].startswith("alignment.captured: the file that ")
        assert "-p alignment.captured=captured.npz" in error["next_step"]
        assert (Path(__file__).parents[2] / CAPTURED_PAGE).is_file()
        assert CAPTURED_PAGE in error["next_step"]
        assert "engine: captured" in stderr
    assert call("build", port.file, "--out", out, "--plan-only")[0] == 0
    code, document, _ = call("report", port.file, "--out", out)
    assert (code, document["verdict"]) == (3, "not_run")


@pytest.mark.parametrize("command", ["preflight", "patch", "convert", "align", "run", "report", "build"])
def test_every_command_refuses_an_unknown_parameter(port: PortFolder, command, tmp_path):
    code, document, stderr = call(command, port.file, "--out", tmp_path / "run", "-p", "kernal=exact")
    assert code == 2
    assert "kernel" in json.dumps(document) + stderr
    assert not (tmp_path / "run").exists()


def test_preflight_takes_less_than_a_second_of_processor_time(port: PortFolder):
    command = [sys.executable, "-X", "importtime", "-m", "porting_kit.cli", "preflight", str(port.file)]
    started = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert time.perf_counter() - started < 60
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line}
    assert "porting_kit.steps.preflight" in imported
    # What would cost the second: either alone takes longer to import than the whole of preflight.
    assert not imported & {"torch", "transformers", "matplotlib"}


def test_diagnose_finds_nothing_in_healthy_tokens_and_names_a_planted_fault(port: PortFolder, tmp_path):
    out = tmp_path / "run"
    call("align", port.file, "--out", out)
    healthy = out / "alignment" / "output_ids.npy"
    code, document, _ = call("diagnose", port.file, "--out", out, "--observed", healthy)
    assert (code, document["verdict"], document["to_explain"]) == (0, "pass", 0)

    session = AlignmentSession(open_port_run(port.file, run_folder=out))
    planted, state = seed_fault("qkv_bias_dropped", session.port_state)
    generation = generate_medusa(state.build(), session.tree, session.prompts, 8)
    faulty = write_captured_tokens(tmp_path / "faulty.csv", session.prompts, generation.tokens, end_id=2)
    code, document, _ = call("diagnose", port.file, "--out", out, "--observed", faulty)
    assert (code, document["verdict"]) == (1, "fail")
    assert document["fault"] == planted
    assert document["fix"]


def test_diagnose_refuses_a_file_that_is_not_there(port: PortFolder, tmp_path):
    code, document, _ = call("diagnose", port.file, "--out", tmp_path / "run", "--observed", tmp_path / "absent.npy")
    assert code == 2
    assert "absent.npy" in json.dumps(document["error"])


def test_preflight_warns_of_a_window_that_sequences_outgrow(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=16)
    MistralForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "heads").mkdir()
    save_file(make_heads(), tmp_path / "heads" / "medusa_lm_head.safetensors")
    document = {"name": "tiny", "base": "base", "heads": "heads", "tree": [[0]]}
    (tmp_path / "port.yaml").write_text(yaml.safe_dump(document))
    code, document, _ = call("preflight", tmp_path / "port.yaml")
    assert (code, document["failing_gate"]) == (1, "sliding window")
    options = ("-p", "target.max_seq_len=16", "-p", "target.max_input_len=8")
    assert call("preflight", tmp_path / "port.yaml", *options)[0] == 0


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt, 130, "interrupted; what was written is complete or absent"),
        (EOFError, 70, "this is a defect of porting-kit"),
        (ZeroDivisionError, 70, "this is a defect of porting-kit"),
    ],
)
def test_what_ends_a_command_is_said(port: PortFolder, monkeypatch, capsys, raised, code, said):
    """typer leaves an interrupt without a word, and takes the end of a file for a user who gave up: exit code 1."""

    def fail(*given, **named):
        raise raised

    monkeypatch.setattr(preflight, "check_port_file", fail)
    monkeypatch.setattr(sys, "argv", ["porting-kit", "preflight", str(port.file)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    assert said in capsys.readouterr().err
