"""Kernels and fits through the commands: what the machine lacks, what a release refuses, what cannot apply."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from porting_kit.architectures.releases import release_key
from porting_kit.source_tree import open_source_tree
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.context import open_port_run
from tests.alignment.tiny_ports import make_base
from tests.benchmarks.xqa import write_port
from tests.cli.conftest import PortFolder, make_heads
from tests.cli.test_commands import call
from tests.emulator.test_xqa import make_kernel
from tests.emulator.toy_models import make_reference


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for a machine without a GPU")
def test_the_real_kernel_without_a_gpu_is_exit_3(port: PortFolder, tmp_path):
    code, document, stderr = call("align", port.file, "--out", tmp_path / "run", "-p", "kernel=xqa")
    assert code == 3
    text = str(document) + stderr
    assert "needs a GPU" in text
    assert "release:<x>" in text
    # Said before anything is loaded or written.
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_port_goes_through_the_kernel_and_the_verdict_says_so(port: PortFolder, tmp_path, monkeypatch):
    from porting_kit.emulator import xqa
    from porting_kit.steps import alignment_session

    kernel = make_kernel()
    monkeypatch.setattr(xqa, "open_xqa_kernel", lambda tokens_per_block: kernel)
    monkeypatch.setattr(alignment_session, "open_xqa_kernel", lambda tokens_per_block: kernel)
    options = ("-p", "kernel=xqa", "-p", "dtype=float16", "-p", "alignment.new_tokens=3")
    code, document, _ = call("align", port.file, "--out", tmp_path / "run", *options)
    assert kernel.calls > 0
    assert "kernel arithmetic" in document["covered"]
    assert document["figures"]["kernel"].startswith("XQA of flashinfer-python 0.7.4 (commit 77039051b0be)")
    # An ALiBi model as it is: the kernel drops the bias, and the verdict names it.
    assert (code, document["verdict"]) == (1, "fail")


def test_files_of_an_engine_need_no_kernel_here(port: PortFolder, tmp_path):
    captured = {"kernel": "xqa", "engine": "captured", "alignment.captured": "base/config.json"}
    run = open_port_run(port.file, run_folder=tmp_path / "run", overrides=captured)
    assert AlignmentSession(run).kernel.attend_tree is None


BUG_REPORT = "0.11.0.dev2024062500"
SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(":") if source]


@pytest.fixture(scope="module")
def bloom_of_64(tmp_path_factory) -> Path:
    """A random Bloom of head size 64 with heads that know its own text, and its port file."""
    return write_port(tmp_path_factory.mktemp("bloom"), "bloom")


def test_bloom_of_head_size_64_is_refused_unfitted_and_passes_fitted(bloom_of_64: Path, tmp_path):
    release = ("-p", f"kernel=release:{BUG_REPORT}")
    code, document, _ = call("preflight", bloom_of_64, *release)
    gates = {gate["name"]: gate["verdict"] for gate in document["gates"]}
    assert (code, gates["head size"], gates["ALiBi"]) == (1, "refused", "silent")
    code, document, _ = call("align", bloom_of_64, "--out", tmp_path / "off", *release)
    assert (code, document["verdict"]) == (1, "refused")
    assert "No available XQA kernels" in document["summary"]

    code, document, _ = call("preflight", bloom_of_64, *release, "-p", "fit=auto")
    gates = {gate["name"]: gate["verdict"] for gate in document["gates"]}
    assert (code, gates["head size"], gates["ALiBi"]) == (0, "mended", "mended")
    code, document, _ = call("align", bloom_of_64, "--out", tmp_path / "auto", *release, "-p", "fit=auto")
    assert (code, document["verdict"]) == (0, "pass")
    assert document["wrong_tokens"] == 0
    assert document["approximate_fit"]["passed"]
    assert document["figures"]["fit"] == "fold_alibi (approximate)"
    config = json.loads((tmp_path / "auto" / "checkpoint" / "config.json").read_text())
    assert [note["transform"] for note in config["kernel_fit"]["notes"]] == ["fold_alibi"]
    assert config["kernel_fit"]["notes"][0]["figures"]["logit_error_nats"] <= 0.025


@pytest.mark.slow
def test_bloom_of_head_size_64_in_bfloat16_is_fitted_exactly_on_two_ranks(bloom_of_64: Path, tmp_path):
    options = ("-p", f"kernel=release:{BUG_REPORT}", "-p", "fit=auto", "-p", "dtype=bfloat16")
    options += ("-p", "target.tp_size=2", "-p", "alignment.new_tokens=8")
    code, document, stderr = call("align", bloom_of_64, "--out", tmp_path / "run", *options)
    assert (code, document["verdict"], document["wrong_tokens"]) == (0, "pass", 0), stderr
    assert not document.get("approximate_fit")
    assert document["figures"]["fit"] == "write_positions (exact)"
    config = json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())
    (note,) = config["kernel_fit"]["notes"]
    assert (note["transform"], note["exact"]) == ("write_positions", True)
    assert note["figures"]["logit_error_nats"] < 1e-3
    assert "PositionedAttention" in next((tmp_path / "run" / "patched").glob("*.py")).read_text()


def test_a_text_beyond_the_fits_length_is_refused(bloom_of_64: Path, tmp_path):
    # The longest prompt has 66 tokens, and 24 follow: 90 tokens where the fit reaches 80.
    options = ("-p", f"kernel=release:{BUG_REPORT}", "-p", "fit=auto", "-p", "target.max_seq_len=80")
    options += ("-p", "target.max_input_len=72")
    code, document, stderr = call("align", bloom_of_64, "--out", tmp_path / "run", *options)
    assert code == 2
    assert "longer than the kernel fit reaches" in str(document) + stderr
    assert not (tmp_path / "run" / "alignment").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"fit": "[fold_scale]"}, "fold_scale cannot be applied"),
        ({"fit": "[pad_query_groups]"}, "pad_query_groups cannot be applied"),
        ({"fit": "[fold_alibis]"}, "did you mean fold_alibi"),
        ({"fit": "[truncate_heads:60, fold_alibi]"}, "cannot keep 60 of 64"),
        ({"fit": "[write_positions]"}, "summed in float32"),
        ({"fit": "[write_positions, fold_alibi]", "dtype": "bfloat16"}, "stands for ALiBi already"),
        ({"fit": "[write_positions]", "dtype": "bfloat16", "target.pp_size": 2}, "fed no position_ids"),
        ({"fit": "[fold_alibi]", "target.kv_cache_type": "fp8"}, "fp8 cache"),
        ({"fit": "auto", "target.max_seq_len": 16384}, "longer than fold_alibi can follow"),
        ({"fit": "[fold_alibi]", "target.max_seq_len": 16384}, "longer than fold_alibi can follow"),
        ({"target.kv_cache_type": "fp9"}, "kv_cache_type"),
        ({"target.compute_capability": "9.²"}, "compute capability"),
        ({"target.compute_capability": "hopper"}, "compute capability"),
        ({"kernel": "release:0.11.x"}, "release number"),
    ],
)
def test_what_cannot_apply_is_exit_2_and_says_why(bloom_of_64: Path, overrides, words):
    options = {"kernel": f"release:{BUG_REPORT}", **overrides}
    code, document, stderr = call("preflight", bloom_of_64, *(f"-p{key}={value}" for key, value in options.items()))
    assert code == 2
    assert words in str(document) + stderr


def test_a_card_that_no_release_has_a_kernel_for_is_refused(bloom_of_64: Path):
    code, document, _ = call(
        "preflight",
        bloom_of_64,
        "-p",
        f"kernel=release:{BUG_REPORT}",
        "-p",
        "fit=auto",
        "-p",
        "target.compute_capability=7.3",
    )
    assert (code, document["verdict"], document["failing_gate"]) == (1, "refused", "compute capability")


@pytest.mark.parametrize(("length", "verdict"), [(128, "silent"), (48, None)])
def test_a_window_is_met_without_a_release_too(length: int, verdict: str | None, port: PortFolder):
    base = port.root / "mistral"
    make_reference("mistral").save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "sliding_window": 48}))
    port.edit_port(base="mistral")
    save_file(make_heads(hidden=64), port.heads_file)
    lengths = ("-p", f"target.max_seq_len={length}", "-p", "target.max_input_len=32")
    code, document, stderr = call("preflight", port.file, *lengths)
    assert document.get("gates"), stderr
    found = {gate["name"]: gate["verdict"] for gate in document["gates"]}
    assert (found.get("sliding window"), code) == (verdict, 1 if verdict else 0)


@pytest.mark.upstream
@pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE names no TensorRT-LLM checkout")
@pytest.mark.parametrize("source", SOURCES)
def test_a_fault_of_the_releases_own_class_fails_preflight(source: str, port: PortFolder):
    release = release_key(open_source_tree(source).release)
    if release < release_key("0.11.0.dev2024060400"):
        pytest.skip("this tree has no Phi-3 with two tables of frequencies")
    make_reference("phi3-long").save_pretrained(port.root / "phi3")
    port.edit_port(base="phi3", trtllm=source)
    save_file(make_heads(hidden=64), port.heads_file)
    lengths = ("-p", "target.max_seq_len=128", "-p", "target.max_input_len=64")
    _, document, stderr = call("preflight", port.file, *lengths)
    assert document.get("gates"), stderr
    verdicts = {gate["name"]: (gate["verdict"], gate["remedy"]) for gate in document["gates"]}
    wrong = ("silent", "use 0.12.0.dev2024070200 or later")
    assert verdicts.get("model class") == (wrong if release < release_key("0.12.0.dev2024070200") else None)


def test_a_config_that_contradicts_its_tensors_is_exit_2(port: PortFolder):
    base = make_base(port.root / "llama", "llama")
    config = json.loads((base / "config.json").read_text())
    assert config.setdefault("head_dim", 16) == 16
    (base / "config.json").write_text(json.dumps({**config, "head_dim": 32}))
    port.edit_port(base="llama")
    save_file(make_heads(hidden=64), port.heads_file)
    for command in ("preflight", "convert"):
        code, document, stderr = call(
            command, port.file, *(("--out", port.root / "run") if command == "convert" else ())
        )
        assert code == 2
        assert "other shapes than the config says" in str(document) + stderr
        assert "[64, 64] instead of [128, 64]" in str(document) + stderr
    assert not (port.root / "run" / "checkpoint").exists()
