"""The commands around the engine: a log from elsewhere, serving settings, the build's files."""

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import call

LOG = "[TensorRT-LLM] TensorRT-LLM version: 0.11.0\n[TRT-LLM] [I] Build TensorRT engine Unnamed Network 0\n"


def test_a_log_is_explained_without_a_build(port, tmp_path):
    log = tmp_path / "build.log"
    log.write_text(LOG + "TypeError: forward() got an unexpected keyword argument 'spec_decoding_params'\n")
    code, document, _ = call("build", port.file, "--log", log)
    assert (code, document["failing_gate"]) == (1, "unpatched model")
    assert document["messages"][0]["line"] == 3
    log.write_text(LOG)
    code, document, _ = call("build", port.file, "--log", log)
    assert (code, document["failing_gate"]) == (1, "the log breaks off")


def test_serving_settings_are_written_and_a_users_file_is_checked(port, tmp_path):
    out = tmp_path / "run"
    options = ("-p", "trtllm.release=0.16.0", "--out", out)
    code, document, _ = call("serving", port.file, *options)
    assert (code, document["verdict"]) == (0, "pass")
    written = out / "engine" / "serving" / "config.pbtxt"
    assert 'key: "medusa_choices"' in written.read_text()
    assert "MedusaDecodingConfig" in (out / "engine" / "serving" / "serve.py").read_text()
    mine = tmp_path / "config.pbtxt"
    empty = 'key: "decoding_mode"\n  value: { string_value: "" }'
    assert empty in written.read_text()
    mine.write_text(written.read_text().replace(empty, empty.replace('""', '"top_k"')))
    code, document, _ = call("serving", port.file, *options, "--check", mine)
    assert (code, document["failing_gate"]) == (1, "decoding mode")
    other_end = 'parameters: {\n  key: "end_id"\n  value: { string_value: "77" }\n}\n'
    mine.write_text(written.read_text() + other_end)
    code, document, _ = call("serving", port.file, *options, "--check", mine)
    assert (code, document["failing_gate"]) == (1, "end token")
    (tmp_path / "notes.txt").write_text("nothing of ours\n")
    code, document, _ = call("serving", port.file, *options, "--check", tmp_path / "notes.txt")
    assert code == 2
    assert "nothing to check" in document["error"]["subject"]


def test_serving_refuses_an_empty_engine_and_one_without_a_record(port, tmp_path):
    """A folder that only looks like an engine never gets settings."""
    out, engine = tmp_path / "run", tmp_path / "engine"
    options = ("-p", "trtllm.release=0.16.0", "--out", out)
    assert call("serving", port.file, *options)[0] == 0
    config = json.loads((out / "checkpoint" / "config.json").read_text())
    build = {"max_batch_size": 4, "max_draft_len": config["max_draft_len"], "speculative_decoding_mode": 4}
    engine.mkdir()
    document = {"version": "0.16.0", "pretrained_config": config, "build_config": build}
    (engine / "config.json").write_text(json.dumps(document))
    for content, said in ((b"", "no whole engine"), (b"an engine", "no record beside it")):
        (engine / "rank0.engine").write_bytes(content)
        code, found, _ = call("serving", port.file, *options, "--engine", engine)
        assert code == 2
        assert said in found["error"]["subject"]
    (engine / "config.json").write_text(json.dumps(document | {"version": "0.13.0"}))
    code, found, _ = call("serving", port.file, *options, "--engine", engine)
    assert (code, found["error"]["found"]) == (2, "0.13.0")


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--port", "PORT", "--base", "BASE"), "with --port"), (("-p", "dtype=float16"), "-p changes fields")],
)
def test_options_of_quantised_that_would_do_nothing_are_refused(port, tmp_path, options, said):
    options = [{"PORT": port.file, "BASE": port.base}.get(word, word) for word in options]
    code, document, _ = call("quantised", tmp_path, *options)
    assert code == 2
    assert said in document["error"]["subject"]


def test_a_quantised_config_of_another_shape_is_a_clear_error(port, tmp_path):
    """`quantization: 'x'` used to be a crash."""
    from porting_kit.conversion import convert_checkpoint

    convert_checkpoint(port.base, tmp_path / "q", dtype="float16")
    file = tmp_path / "q" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization": "x"}))
    code, document, _ = call("quantised", tmp_path / "q")
    assert code == 2
    assert "unusable quantization" in document["error"]["subject"]


# A release whose kernels take the port: half precision, its ALiBi bias and head size fitted.
BUILDABLE = ("-p", "trtllm.release=0.13.0", "-p", "dtype=float16", "-p", "fit=auto")


@pytest.mark.parametrize("name", ["build.sh", "run.sh", "capture.py", "prompts.csv", "build_plan.json"])
def test_a_plan_leaves_everything_the_other_machine_needs(port, tmp_path, name):
    out = tmp_path / "run"
    code, document, _ = call("build", port.file, "--plan-only", *BUILDABLE, "--out", out)
    assert (code, document["verdict"]) == (0, "pass")
    assert f"engine/{name}" in document["products"]
    assert (out / "engine" / name).stat().st_size
    assert json.loads((out / "engine" / "build_plan.json").read_text())["release"] == "0.13.0"


def test_a_base_whose_prompts_cannot_be_made_is_still_planned(port, tmp_path):
    out = tmp_path / "run"
    port.edit_port(alignment={"prompts": ["a text, and no tokenizer"], "new_tokens": 8})
    code, document, _ = call("build", port.file, "--plan-only", *BUILDABLE, "--out", out)
    assert (code, document["verdict"]) == (0, "pass")
    assert any(remark.startswith("no capture script") for remark in document["figures"]["remarks"])
    assert not (out / "engine" / "capture.py").exists()
    assert "capture.py" not in (out / "engine" / "build.sh").read_text()


def test_what_preflight_refuses_is_not_planned_and_said_in_the_same_words(port, tmp_path):
    out, release = tmp_path / "run", ("-p", "trtllm.release=0.13.0", "-p", "dtype=float16")
    code, preflight, _ = call("preflight", port.file, *release, "--out", out)
    assert (code, preflight["verdict"], preflight["failing_gate"]) == (1, "refused", "head size")
    code, document, _ = call("build", port.file, "--plan-only", *release, "--out", out)
    assert (code, document["verdict"]) == (1, "refused")
    assert preflight["summary"] in document["error"]["subject"]
    assert document["error"]["next_step"] == preflight["figures"]["next_step"]
    assert not (out / "checkpoint").exists(), "it is said before anything is converted"
    assert not (out / "engine").exists()
    assert call("report", port.file, *release, "--out", out)[1]["verdict"] == "refused"

    code, document, stderr = call("convert", port.file, *release, "--out", out)
    assert code == 0, "the emulator can run such a checkpoint"
    assert f"preflight refuses an engine of this port: {preflight['summary']}" in stderr
    assert preflight["summary"] in document["figures"]["warnings"][0]


def test_a_plan_says_what_preflight_fails_or_did_not_judge(port, tmp_path):
    code, document, _ = call("build", port.file, "--plan-only", "--out", tmp_path / "unnamed")
    assert code == 0
    assert any("names no release" in remark for remark in document["figures"]["remarks"])
    demo, release = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini.yaml", "trtllm.release=0.13.0"
    code, document, _ = call("build", demo, "--plan-only", "-p", release, "--out", tmp_path / "silent")
    assert code == 0
    assert any("preflight fails this port: ALiBi" in remark for remark in document["figures"]["remarks"])
