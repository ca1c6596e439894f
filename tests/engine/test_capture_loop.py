"""The whole loop without hardware: plan, stand-in build, capture script, file brought back, verdict and cause.

`stand_in/` imitates TensorRT-LLM's runtime over the emulator with signatures recorded from its sources; what a real
engine does is not shown by this.
"""

import contextlib
import io
import json
import os
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import yaml

from porting_kit.alignment.reference import load_reference
from porting_kit.engine.capture_runtimes import close_at_end
from porting_kit.engine.captured_runs import read_capture_file
from porting_kit.errors import CapturedFileError
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.port import load_port
from porting_kit.steps import preflight
from porting_kit.steps.align import align_port
from porting_kit.steps.build import build_port
from porting_kit.steps.capture_request import make_capture_request
from porting_kit.steps.captured_alignment import count_end_token, split_merged
from porting_kit.steps.context import open_port_run
from porting_kit.steps.convert import convert_port
from porting_kit.steps.diagnose import diagnose_port
from porting_kit.steps.patch import patch_port
from porting_kit.steps.prompts import tokenize_prompts
from tests.alignment.tiny_ports import V, make_base, make_heads

STAND_IN = Path(__file__).parent / "stand_in"
RELEASE = "0.13.0.dev2024090300"
NEW_TOKENS = 16
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A port converted and built by the stand-in, once."""
    return build_with_stand_in(tmp_path_factory.mktemp("loop"), "bloom")


def build_with_stand_in(root, family):
    """The folder of a port of this family, converted and built."""
    make_base(root / "base", family)
    port = {
        "name": "loop",
        "base": "base",
        "heads": "heads",
        "dtype": "float32",
        "tree": TREE,
        "trtllm": {"source": "bundled", "release": RELEASE},
        "target": {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 192},
        "alignment": {"new_tokens": NEW_TOKENS},
    }
    file = root / "port.yaml"
    file.write_text(yaml.safe_dump(port))
    prompts, _ = tokenize_prompts(load_port(file), None, V)
    make_heads(root / "heads", load_reference(root / "base"), prompts, NEW_TOKENS)
    run = open_port_run(file, run_folder=root / "run")
    patch_port(run)
    convert_port(run)
    add_programs(root / "bin")
    environment = stand_in_environment(root)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "STAND_IN_RELEASE"):
            patch.setenv(name, environment[name])
        # The stand-in is no kernel: it takes the float32 and the small heads that preflight refuses for a real engine.
        fits = StepOutcome("preflight", Verdict.PASS, "", figures={"target_release": RELEASE})
        patch.setattr(preflight, "judge_engine", lambda port: fits)
        result = build_port(run, keep_logits=True)
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    return root


def add_programs(folder):
    """trtllm-build and nvidia-smi of the stand-in."""
    folder.mkdir()
    smi = "import sys\nprint('NVIDIA H200, 9.0' if 'csv' in ''.join(sys.argv) else 'GPU 0: NVIDIA H200 (UUID: 0)')\n"
    for name, body in (("trtllm-build", (STAND_IN / "builder.py").read_text()), ("nvidia-smi", smi)):
        file = folder / name
        file.write_text(f"#!{sys.executable}\n{body}")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)


def stand_in_environment(root, fault="", release=RELEASE):
    """Environment in which `import tensorrt_llm` finds the stand-in, and metadata says its release."""
    info = root / f"site-{release}" / f"tensorrt_llm-{release}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {release}\n")
    path = os.pathsep.join([str(STAND_IN), str(info.parent), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(root / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": path,
        "STAND_IN_RELEASE": release,
        "STAND_IN_FAULT": fault,
        "OMP_NUM_THREADS": "1",
    }


def capture_as_user(root, out, *options, fault="", release=RELEASE):
    """Run the written script in a process of its own, which starts another."""
    script = root / "run" / "engine" / "capture.py"
    return subprocess.run(
        [sys.executable, str(script), "--out", str(out), *options],
        env=stand_in_environment(root, fault, release),
        capture_output=True,
        text=True,
        check=False,
    )


def capture(root, out, *options, fault="", release=RELEASE):
    """Run the written script here, which saves the start of two processes: its exit code and what it said."""
    environment = stand_in_environment(root, fault, release)
    script = str(root / "run" / "engine" / "capture.py")
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            patch.delitem(sys.modules, name)
        for name in ("STAND_IN_RELEASE", "STAND_IN_FAULT"):
            patch.setenv(name, environment[name])
        for folder in environment["PYTHONPATH"].split(os.pathsep)[:2]:
            patch.syspath_prepend(folder)
        patch.setattr(sys, "argv", [script, "--out", str(out), "--in-process", *options])
        code = runpy.run_path(script, run_name="captured_here")["main"]()
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]
    return SimpleNamespace(returncode=code, stderr=said.getvalue())


def open_captured(root, file, **overrides):
    overrides = {"engine": "captured", "alignment.captured": str(file)} | overrides
    return open_port_run(root / "port.yaml", run_folder=root / "run", overrides=overrides)


@pytest.fixture(scope="module")
def healthy(built, tmp_path_factory):
    """The file a healthy engine leaves."""
    file = tmp_path_factory.mktemp("captured") / "captured.npz"
    done = capture(built, file, "--logits")
    assert done.returncode == 0, done.stderr
    return file


def test_the_build_step_leaves_what_the_other_machine_needs(built):
    engine = built / "run" / "engine"
    assert {"build_plan.json", "build.sh", "capture.py", "run.sh", "prompts.csv", "build.log"} <= {
        path.name for path in engine.iterdir()
    }
    assert "python3 engine/capture.py record" in (engine / "build.sh").read_text()
    assert "--medusa_choices" in (engine / "run.sh").read_text()
    record = json.loads((engine / "trtllm" / "porting_record.json").read_text())
    assert sorted(record["medusa_choices"]) == sorted(TREE)
    assert record["card"] == {"name": "NVIDIA H200", "compute_capability": "9.0"}


def test_the_script_names_nothing_of_this_package(built):
    text = (built / "run" / "engine" / "capture.py").read_text()
    assert "import porting_kit" not in text
    assert "from porting_kit" not in text


def test_a_healthy_engine_passes_and_says_what_it_covered(built, healthy):
    result = align_port(open_captured(built, healthy))
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    gates = {gate.name: gate for gate in result.alignment.gates}
    assert set(gates) >= {"tokens", "batches", "repeat", "heads", "logits", "runs"}
    assert all(gate.passed for gate in gates.values())
    assert result.outcome.covered == tuple(Coverage)
    assert result.alignment.tokens_per_step > 1.2
    assert f"ModelRunnerCpp of TensorRT-LLM {RELEASE}" in gates["runs"].detail


def test_logits_are_compared_with_the_base_as_the_library_computes_it(tmp_path):
    """TensorRT-LLM's gelu is the tanh form, GPT-NeoX's the erf form: no fault of the engine."""
    root = build_with_stand_in(tmp_path, "gptneox")
    done = capture(root, tmp_path / "captured.npz", "--logits")
    assert done.returncode == 0, done.stderr
    result = align_port(open_captured(root, tmp_path / "captured.npz"))
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    assert any(item.matched and item.logit_error > 1e-4 for item in result.alignment.inherent)
    (logits,) = [gate for gate in result.alignment.gates if gate.name == "logits"]
    assert logits.passed, logits.detail


def test_without_logits_the_kernels_arithmetic_is_not_covered(built, healthy, tmp_path):
    with np.load(healthy) as archive:
        np.savez(tmp_path / "tokens.npz", document=archive["document"])
    result = align_port(open_captured(built, tmp_path / "tokens.npz"))
    assert result.outcome.verdict is Verdict.PASS
    assert Coverage.KERNEL_ARITHMETIC not in result.outcome.covered
    assert Coverage.ENGINE in result.outcome.covered


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("alibi", "alibi_dropped_in_generation"),
        pytest.param("causal mask", "mask_causal", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_the_engine_is_named(built, tmp_path, fault, cause):
    assert capture(built, tmp_path / "captured.npz", "--logits", fault=fault).returncode == 0
    result = align_port(open_captured(built, tmp_path / "captured.npz"))
    assert result.outcome.verdict is Verdict.FAIL
    assert result.alignment.failing_gate in ("tokens", "logits")
    assert cause in {result.cause["fault"]} | set(result.cause["ties"])


@pytest.mark.slow
def test_the_diagnosis_of_a_captured_file_names_what_its_alignment_names(built, tmp_path):
    assert capture(built, tmp_path / "captured.npz", "--logits", fault="alibi").returncode == 0
    diagnosis = diagnose_port(open_captured(built, tmp_path / "captured.npz"), tmp_path / "captured.npz")
    document = diagnosis.document()
    assert "alibi_dropped_in_generation" in {document["fault"]} | set(document["ties"])


def test_rows_mixed_up_in_a_batch_fail_the_batches_gate(built, tmp_path):
    assert capture(built, tmp_path / "captured.npz", fault="mixed rows").returncode == 0
    result = align_port(open_captured(built, tmp_path / "captured.npz"))
    assert (result.outcome.verdict, result.alignment.failing_gate) == (Verdict.FAIL, "batches")


def test_a_run_that_fails_with_a_second_sequence_is_explained(built, tmp_path):
    assert capture(built, tmp_path / "captured.npz", fault="second sequence").returncode == 0
    result = align_port(open_captured(built, tmp_path / "captured.npz"))
    assert (result.outcome.verdict, result.alignment.failing_gate) == (Verdict.FAIL, "runs")
    assert "illegal memory access" in result.outcome.summary


@pytest.mark.parametrize(
    ("fault", "run"), [("refuse", capture), pytest.param("abort", capture_as_user, marks=pytest.mark.slow)]
)
def test_a_refusal_of_the_kernels_comes_back_as_one(built, tmp_path, fault, run):
    done = run(built, tmp_path / "captured.npz", fault=fault)
    found = read_capture_file(tmp_path / "captured.npz")
    assert bool(found.died) == (fault == "abort")
    assert (done.returncode != 0) == (fault == "abort")
    result = align_port(open_captured(built, tmp_path / "captured.npz"))
    assert result.outcome.verdict is Verdict.REFUSED
    assert result.outcome.failing_gate == "no multi-query kernel"


@pytest.mark.parametrize(
    ("release", "api"),
    [
        ("0.8.0", "ModelRunner"),
        ("0.10.0.dev2024043000", "ModelRunner"),
        ("0.11.0.dev2024062500", "ModelRunnerCpp"),
        ("0.16.0.dev2024121000", "ModelRunnerCpp"),
        ("0.20.0", "ModelRunnerCpp"),
        ("1.0.0", "ModelRunnerCpp"),
        ("1.1.0rc6", "ModelRunnerCpp"),
        ("1.2.0", "ModelRunnerCpp"),
    ],
)
def test_each_release_is_run_by_its_own_api(built, tmp_path, release, api):
    """The engine says which release built it, so each gets a copy that names its own."""
    capture_by(built, tmp_path, release, api)


@pytest.mark.parametrize("release", ["0.16.0.dev2024121000", "0.20.0", "1.0.0", "1.1.0rc6", "1.2.0"])
def test_the_llm_api_runs_it_too(built, tmp_path, release):
    capture_by(built, tmp_path, release, "LLM", "--api", "LLM")


@pytest.mark.parametrize(
    ("release", "options"),
    [
        ("0.16.0.dev2024121000", ()),
        ("0.20.0", ()),
        ("1.0.0", ()),
        ("1.1.0rc6", ("--api", "LLM")),
        ("1.2.0", ()),
        ("1.2.0", ("--api", "LLM")),
    ],
)
def test_logits_are_kept_where_the_release_must_be_asked_for_them(built, tmp_path, release, options):
    """From 0.20 on an executor that is not opened for logits keeps none, whatever the engine was built with."""
    capture_by(built, tmp_path, release, None, "--logits", *options)
    assert read_capture_file(tmp_path / "captured.npz").logits


def capture_by(built, tmp_path, release, api, *options):
    engine = tmp_path / "engine"
    shutil.copytree(built / "run" / "engine" / "trtllm", engine)
    (engine / "porting_record.json").unlink()
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps(config | {"version": release}))
    done = capture(built, tmp_path / "captured.npz", "--engine-dir", str(engine), *options, release=release)
    assert done.returncode == 0, done.stderr
    found = read_capture_file(tmp_path / "captured.npz")
    assert (found.api, found.failures, found.engine_release) == (api or found.api, [], release)
    names = {run.name for run in found.runs}
    assert {"medusa batch 1", "medusa batch 2", "medusa batch 4", "repeat"} <= names
    assert ("streamed" in names) == (found.api != "ModelRunner")
    assert all(len(rows[0]) >= 1 for run in found.runs for rows in run.tokens)


@pytest.mark.slow
def test_the_script_as_a_user_starts_it_leaves_the_same_file_and_a_log(built, healthy, tmp_path):
    done = capture_as_user(built, tmp_path / "captured.npz", "--logits")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs with ModelRunnerCpp, 0 failed" in (tmp_path / "captured.log").read_text()
    ours, theirs = (read_capture_file(file) for file in (tmp_path / "captured.npz", healthy))
    assert [run.tokens for run in ours.runs] == [run.tokens for run in theirs.runs]


@pytest.mark.slow
def test_an_engine_of_the_base_is_compared_too(built, tmp_path):
    base = tmp_path / "base_engine"
    shutil.copytree(built / "run" / "engine" / "trtllm", base)
    assert capture(built, tmp_path / "captured.npz", "--base-engine-dir", str(base)).returncode == 0
    result = align_port(open_captured(built, tmp_path / "captured.npz"))
    gates = {gate.name: gate.passed for gate in result.alignment.gates}
    assert gates["medusa equals greedy"] is True


class TestEngineFolder:
    """What the script refuses before it runs anything."""

    @pytest.fixture
    def engine(self, built, tmp_path):
        shutil.copytree(built / "run" / "engine" / "trtllm", tmp_path / "engine")
        return tmp_path / "engine"

    def refuse(self, built, engine, tmp_path, **options):
        done = capture(built, tmp_path / "captured.npz", "--engine-dir", str(engine), **options)
        assert done.returncode == 2
        assert not (tmp_path / "captured.npz").exists()
        return done.stderr

    def test_an_engine_file_of_0_bytes(self, built, engine, tmp_path):
        (engine / "rank0.engine").write_bytes(b"")
        assert "0 bytes" in self.refuse(built, engine, tmp_path)

    def test_no_engine_at_all(self, built, tmp_path):
        assert "config.json is missing" in self.refuse(built, tmp_path / "nothing", tmp_path)

    def test_another_release(self, built, engine, tmp_path):
        assert "is installed" in self.refuse(built, engine, tmp_path, release="0.16.0.dev2024121000")

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("medusa_choices", [[0]], "another tree"),
            ("checkpoint", "0" * 64, "another checkpoint"),
            ("engine", {"rank0.engine": "0" * 64}, "not the file"),
        ],
    )
    def test_a_record_of_something_else(self, built, engine, tmp_path, key, value, said):
        file = engine / "porting_record.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
        assert said in self.refuse(built, engine, tmp_path)

    def test_a_build_by_hand_gets_its_record_from_the_script(self, built, engine, tmp_path):
        (engine / "porting_record.json").unlink()
        done = capture(built, tmp_path / "x.npz", "record", "--engine-dir", str(engine))
        assert done.returncode == 0, done.stderr
        ours = json.loads((built / "run" / "engine" / "trtllm" / "porting_record.json").read_text())
        theirs = json.loads((engine / "porting_record.json").read_text())
        for key in ("release", "medusa_choices", "checkpoint", "engine", "config"):
            assert theirs[key] == ours[key]


def other_mode_and_prompts(document: dict) -> None:
    """The mode is said first: it explains whatever else differs."""
    document["engine"].update(build_config={"speculative_decoding_mode": 8})
    document["request"]["prompts"][0].append(7)


class TestForeignFiles:
    """Files that are refused before a token is judged."""

    def change(self, healthy, target, edit):
        with np.load(healthy) as archive:
            document = json.loads(archive["document"].tobytes().decode())
        edit(document)
        np.savez(target, document=np.frombuffer(json.dumps(document).encode(), dtype=np.uint8))
        return target

    @pytest.mark.parametrize(
        ("edit", "said"),
        [
            (lambda document: document["request"]["prompts"][0].append(7), "another port"),
            (lambda document: document["request"].update(medusa_choices=[[0]]), "another tree"),
            (lambda document: document["request"].update(checkpoint="0"), "another checkpoint"),
            (lambda document: document["request"].update(new_tokens=8), "another number of new tokens"),
            (lambda document: document["engine"].update(version="0.9.0"), "of another release"),
            (lambda document: document["engine"].update(build_config={"speculative_decoding_mode": 8}), "lookahead"),
            (lambda document: document["engine"].update(build_config={"max_draft_len": 1}), "allows 1 draft tokens"),
            (other_mode_and_prompts, "another mode: lookahead_decoding"),
            (lambda document: document.update(format=2), "another format"),
            (lambda document: document.pop("runs"), "lacks a part"),
            (lambda document: document["runs"][0]["tokens"][0][0].append(10**6), "outside the vocabulary"),
            (lambda document: document.update(runs=[]), "no tokens to judge"),
        ],
    )
    def test_a_file_of_something_else(self, built, healthy, tmp_path, edit, said):
        file = self.change(healthy, tmp_path / "changed.npz", edit)
        with pytest.raises(CapturedFileError, match=said):
            align_port(open_captured(built, file))

    @pytest.mark.parametrize("kept", [10, 400, -100])
    def test_a_cut_file(self, healthy, tmp_path, kept):
        (tmp_path / "cut.npz").write_bytes(healthy.read_bytes()[:kept])
        with pytest.raises(CapturedFileError, match="cannot be read"):
            read_capture_file(tmp_path / "cut.npz")

    def test_an_empty_and_a_missing_file(self, tmp_path):
        (tmp_path / "empty.npz").write_bytes(b"")
        with pytest.raises(CapturedFileError, match="empty"):
            read_capture_file(tmp_path / "empty.npz")
        with pytest.raises(CapturedFileError, match="does not exist"):
            read_capture_file(tmp_path / "none.npz")


def test_prompts_that_do_not_fit_the_engine_are_left_out(built):
    run = open_port_run(built / "port.yaml", run_folder=built / "run", overrides={"target.max_input_len": 20})
    wanted = make_capture_request(run, RELEASE)
    assert max(map(len, wanted.request["prompts"])) <= 20
    assert "left out" in wanted.remarks[0]


def test_the_largest_batch_is_filled_to_the_engines_maximum(built):
    run = open_port_run(built / "port.yaml", run_folder=built / "run", overrides={"target.max_batch_size": 11})
    groups = make_capture_request(run, RELEASE).request["groups"]
    assert [len(call) for call in groups["11"]] == [11]
    assert len(groups["1"]) == 8


class TestEndToken:
    """The end token may be left out of an answer and of its lengths."""

    REQUEST: ClassVar = {"end_ids": [2, 7], "end_id": 2, "new_tokens": 4}

    @pytest.mark.parametrize(
        ("tokens", "closed"),
        [
            ([5, 6], [5, 6, 2]),
            ([5, 7], [5, 7]),
            ([5, 2, 9], [5, 2]),
            ([5, 6, 8, 9], [5, 6, 8, 9]),
            ([], [2]),
        ],
    )
    def test_a_short_answer_is_closed(self, tokens, closed):
        assert close_at_end(tokens, self.REQUEST) == closed
        assert close_at_end(tokens, self.REQUEST | {"end_ids": []}) == tokens

    @pytest.mark.parametrize(
        ("observed", "ended", "whole"),
        [
            ([2, 1], None, [2, 1]),
            ([2, 1], 3, [2, 1]),
            ([2, 1], 4, [2, 2]),  # the last step is predicted to emit two
            ([2, 2], 5, [2, 2, 1]),
            ([], 1, [1]),
        ],
    )
    def test_its_step_is_counted(self, observed, ended, whole):
        assert count_end_token(observed, [2, 9, 2, 9, 1], ended) == whole

    def test_steps_that_arrived_together_are_taken_apart(self):
        assert split_merged([4, 1], [2, 9, 2, 9, 1]) == [2, 2, 1]
        assert split_merged([3, 1], [2, 9, 2, 9, 1]) == [3, 1]  # no sum of predictions
