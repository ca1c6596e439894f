"""The driver, on recorded stand-ins for trtllm-build and nvidia-smi that stand on the PATH."""

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from porting_kit.engine.command import CommandPlan, PlannedFlag
from porting_kit.engine.run import EngineEnvironment, find_environment, require_same_release, run_command
from porting_kit.errors import EnvironmentMissing, PortFileError
from porting_kit.outcomes import Verdict

RELEASE = "0.11.0.dev2024062500"
# What a build of this release prints, shortened.
RECORDED_LOG = f"""\
[TensorRT-LLM] TensorRT-LLM version: {RELEASE}
[06/26/2024-10:00:00] [TRT-LLM] [I] Set gpt_attention_plugin to float16.
[06/26/2024-10:00:05] [TRT-LLM] [I] Build TensorRT engine Unnamed Network 0
[06/26/2024-10:01:05] [TRT-LLM] [I] Total time of building Unnamed Network 0: 00:01:00
[06/26/2024-10:01:06] [TRT-LLM] [I] Serializing engine to engine/rank0.engine...
[06/26/2024-10:01:09] [TRT-LLM] [I] Engine serialized. Total time: 00:00:03
[06/26/2024-10:01:09] [TRT-LLM] [I] Total time of building all engines: 00:01:09
"""


def install(folder: Path, name: str, body: str, interpreter: str = sys.executable) -> None:
    """An executable script of this name."""
    file = folder / name
    file.write_text(f"#!{interpreter}\n{body}", encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def builder(log: str, *, returncode: int = 0, writes: bool = True) -> str:
    return (
        "import pathlib, sys\n"
        f"sys.stdout.write({log!r})\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--output_dir') + 1])\n"
        f"if {writes}:\n"
        "    out.mkdir(parents=True, exist_ok=True)\n"
        "    (out / 'config.json').write_text('{}')\n"
        "    (out / 'rank0.engine').write_bytes(b'engine')\n"
        f"sys.exit({returncode})\n"
    )


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A PATH with a GPU listing and room for a trtllm-build."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    install(folder, "nvidia-smi", "print('GPU 0: NVIDIA H200 (UUID: GPU-0)')")
    return folder


@pytest.fixture
def plan(tmp_path):
    flags = (PlannedFlag("output_dir", str(tmp_path / "engine"), "where"), PlannedFlag("max_draft_len", "63", "tree"))
    return CommandPlan(("trtllm-build",), RELEASE, flags, "a test")


def run(plan, tmp_path, **options):
    engine = tmp_path / "engine"
    settings = {
        "log_file": tmp_path / "log" / "build.log",
        "expected_files": (engine / "config.json", engine / "rank0.engine"),
    }
    return run_command(plan, **settings | options)


def test_without_tensorrt_llm_nothing_is_run_and_the_reason_is_given(plan, tmp_path, machine):
    outcome = run(plan, tmp_path)
    assert outcome.verdict is Verdict.NOT_RUN
    assert outcome.reason.startswith("no tensorrt_llm here")
    assert not (tmp_path / "log").exists()


def test_without_a_gpu_nothing_is_run_and_the_reason_is_given(plan, tmp_path, machine):
    install(machine, "trtllm-build", builder(RECORDED_LOG))
    (machine / "nvidia-smi").unlink()
    outcome = run(plan, tmp_path)
    assert (outcome.verdict, outcome.reason) == (Verdict.NOT_RUN, "no GPU here")


def test_a_driver_that_lists_no_card_is_no_gpu(machine):
    install(machine, "nvidia-smi", "import sys; print('No devices were found'); sys.exit(6)")
    assert find_environment().gpus == ()


def test_a_build_streams_its_log_and_reports_phases(plan, tmp_path, machine):
    install(machine, "trtllm-build", builder(RECORDED_LOG))
    seen = []
    outcome = run(plan, tmp_path, on_phase=lambda name, seconds: seen.append(name))
    assert outcome.verdict is Verdict.PASS, outcome.reason
    assert outcome.release == RELEASE
    assert (
        seen
        == list(outcome.phases)
        == [
            "library loaded",
            "engine being built",
            "engine built",
            "engine being written",
            "engine written",
            "all engines built",
        ]
    )
    log = outcome.log_file.read_text()
    assert log.startswith("$ trtllm-build --output_dir")
    assert log.endswith(RECORDED_LOG)
    assert outcome.messages == ()


def test_a_refusal_of_the_library_is_recognised(plan, tmp_path, machine):
    log = RECORDED_LOG + "TypeError: forward() got an unexpected keyword argument 'spec_decoding_params'\n"
    install(machine, "trtllm-build", builder(log, returncode=1, writes=False))
    outcome = run(plan, tmp_path)
    assert outcome.verdict is Verdict.FAIL
    assert outcome.reason.startswith("unpatched model")
    assert "porting-kit patch" in outcome.next_step
    assert outcome.tail[-1].startswith("TypeError")


def test_an_unknown_failure_is_not_explained_away(plan, tmp_path, machine):
    install(machine, "trtllm-build", builder("something else\n", returncode=3, writes=False))
    outcome = run(plan, tmp_path)
    assert outcome.verdict is Verdict.FAIL
    assert "return code 3" in outcome.reason
    assert outcome.next_step is None


def test_success_without_an_engine_is_a_failure(plan, tmp_path, machine):
    install(machine, "trtllm-build", builder(RECORDED_LOG, writes=False))
    outcome = run(plan, tmp_path)
    assert outcome.verdict is Verdict.FAIL
    assert "rank0.engine" in outcome.reason


def test_another_release_in_the_log_is_told(plan, tmp_path, machine):
    install(machine, "trtllm-build", builder(RECORDED_LOG.replace(RELEASE, "0.11.0")))
    outcome = run(plan, tmp_path)
    assert outcome.verdict is Verdict.PASS
    assert "it is release 0.11.0" in outcome.reason


def test_a_build_beyond_its_time_limit_is_stopped_with_its_children(plan, tmp_path, machine):
    marker = tmp_path / "child.pid"
    sleep = shutil.which("sleep", path=os.defpath)
    body = f"{sleep} 60 &\necho $! > {marker}\necho started\nwait\n"
    install(machine, "trtllm-build", body, interpreter="/bin/sh")
    begin = time.monotonic()
    outcome = run(plan, tmp_path, time_limit_seconds=2)
    assert time.monotonic() - begin < 20
    assert outcome.verdict is Verdict.FAIL
    assert "time limit" in outcome.reason
    assert "started" in outcome.log_file.read_text()
    assert not _runs(int(marker.read_text()))


def _runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_killed_build_names_the_likely_cause(plan, tmp_path, machine):
    install(machine, "trtllm-build", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    outcome = run(plan, tmp_path)
    assert outcome.verdict is Verdict.FAIL
    assert "out of memory" in outcome.reason


def test_another_installed_release_is_refused_with_the_differences(plan, tmp_path):
    environment = EngineEnvironment("/bin/true", "0.9.0", ("GPU 0",))
    with pytest.raises(EnvironmentMissing) as raised:
        run(plan, tmp_path, environment=environment)
    assert (raised.value.expected, raised.value.found) == (RELEASE, "0.9.0")
    assert any("use_py_session" in item for item in raised.value.items)


def test_a_release_of_the_same_range_with_the_same_flags_is_accepted(plan):
    require_same_release(plan, "0.11.0")
    with pytest.raises(PortFileError):
        require_same_release(plan, "1.3.0")


def test_looking_for_the_library_imports_neither_it_nor_torch():
    code = (
        "import sys, porting_kit.engine.run as run; run.find_environment()\n"
        "sys.exit(', '.join({'torch', 'tensorrt_llm', 'transformers'} & set(sys.modules)) or 0)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
