"""A run folder never passes off a stale, half-written or foreign result as a good one."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

from porting_kit.errors import RunFolderError
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.run_folder import STEPS, open_run_folder
from porting_kit.whole_files import read_json, replace_file, replace_folder, write_pickle, write_tensors, write_text


def outcome(step: str, **inputs: str) -> StepOutcome:
    return StepOutcome(step, Verdict.PASS, "fine", covered=(Coverage.WEIGHTS,), inputs=inputs)


def test_outcome_round_trips_and_lists_what_is_not_covered(tmp_path):
    folder = open_run_folder(tmp_path / "run", "tiny")
    folder.begin("convert")
    folder.finish(outcome("convert", weights="a"))
    assert folder.outcome("convert") == outcome("convert", weights="a")
    document = json.loads((folder.step("convert") / "outcome.json").read_text())
    assert document["covered"] == ["weights"]
    assert "engine" in document["not_covered"]


def test_stale_inputs_are_refused_by_name(tmp_path):
    folder = open_run_folder(tmp_path / "run", "tiny")
    folder.begin("convert")
    folder.finish(outcome("convert", weights="a", config="c"))
    assert folder.require("convert", {"weights": "a", "config": "c"}).verdict is Verdict.PASS
    with pytest.raises(RunFolderError, match="stale") as caught:
        folder.require("convert", {"weights": "b", "config": "c"})
    assert "weights" in caught.value.found
    assert "config" not in caught.value.found


def test_a_step_that_has_not_finished_is_refused(tmp_path):
    folder = open_run_folder(tmp_path / "run", "tiny")
    with pytest.raises(RunFolderError, match="has not finished"):
        folder.require("patch", {})


def test_beginning_a_step_forgets_its_outcome_and_the_report_that_shows_it(tmp_path):
    folder = open_run_folder(tmp_path / "run", "tiny")
    for step in STEPS:
        folder.begin(step)
    for step in STEPS:
        folder.finish(outcome(step))
    folder.begin("convert")
    assert [step for step in STEPS if folder.outcome(step)] == ["preflight", "patch", "build", "align"]


def test_damaged_outcome_is_an_error_not_a_pass(tmp_path):
    folder = open_run_folder(tmp_path / "run", "tiny")
    folder.begin("patch")
    (folder.step("patch") / "outcome.json").write_text('{"verdict": "pass"')
    with pytest.raises(RunFolderError, match="cannot be read"):
        folder.outcome("patch")


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunFolderError, match="no run folder"):
        open_run_folder(tmp_path, "tiny")
    assert [item.name for item in tmp_path.iterdir()] == ["mine.txt"]


def test_the_run_of_another_port_is_left_alone(tmp_path):
    open_run_folder(tmp_path / "run", "tiny")
    with pytest.raises(RunFolderError, match="another port"):
        open_run_folder(tmp_path / "run", "other")
    open_run_folder(tmp_path / "run", "tiny")


def test_failed_replacement_keeps_the_old_content(tmp_path):
    target = tmp_path / "product"
    with replace_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(UnicodeEncodeError), replace_folder(target) as folder:
        write_text(folder / "a", "new \ud800")
    assert (target / "a").read_text() == "old"
    with replace_folder(target) as folder:
        (folder / "b").write_text("newer")
    assert sorted(item.name for item in target.iterdir()) == ["b"]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["product"]


def test_the_target_of_a_link_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "product")
    for name in "ab":
        with replace_folder(tmp_path / "link") as folder:
            (folder / name).write_text("")
        assert (tmp_path / "link").is_symlink()
        assert [item.name for item in (tmp_path / "product").iterdir()] == [name]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["link", "product"]


def test_a_killed_writer_leaves_nothing_that_looks_complete(tmp_path):
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from porting_kit.whole_files import replace_folder
        with replace_folder(Path(sys.argv[1]) / "checkpoint") as folder:
            (folder / "config.json").write_text("{}")
            print("writing", flush=True)
            time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_results_may_be_read_by_whoever_may_read_other_files(tmp_path, umask, file_mode, folder_mode):
    """Temporary files of tempfile, and all files of safetensors 0.8.0, are for one user alone."""
    import torch

    earlier = os.umask(umask)
    try:
        with replace_folder(tmp_path / "checkpoint") as folder:
            write_text(folder / "config.json", "{}")
            write_tensors(folder / "rank0.safetensors", {"a": torch.zeros(2)}, {"format": "pt"})
    finally:
        os.umask(earlier)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "checkpoint").iterdir()}
    assert modes == {"config.json": file_mode, "rank0.safetensors": file_mode}
    assert (tmp_path / "checkpoint").stat().st_mode & 0o777 == folder_mode


def test_write_text_replaces_whole_files_only(tmp_path):
    write_text(tmp_path / "a.txt", "one")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.txt", "two \ud800")
    assert (tmp_path / "a.txt").read_text() == "one"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"]


@contextmanager
def no_file_above(size_bytes: int):
    """Writing beyond that is refused as a full disk refuses it."""
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


def write_zeros(kind: str, path: Path, count: int) -> None:
    import torch

    content = {"a": torch.zeros(count, dtype=torch.uint8)}
    match kind:
        case "text":
            write_text(path, "0" * count)
        case "tensors":
            write_tensors(path, content)
        case "pickle":
            write_pickle(path, content)
        case "bytes":
            path.write_bytes(bytes(count))


@pytest.mark.parametrize("kind", ["text", "tensors", "pickle"])
def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path, kind):
    file = tmp_path / "kept" / "file"
    write_zeros(kind, file, 10)
    before = file.read_bytes()
    with no_file_above(200_000), pytest.raises(RunFolderError, match="a file grew beyond") as caught:
        write_zeros(kind, file, 1_000_000)
    assert caught.value.where == str(file)
    assert caught.value.found.endswith("MiB free")
    assert file.read_bytes() == before
    assert [item.name for item in file.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["text", "tensors", "pickle", "bytes"])
def test_a_full_disk_in_a_new_folder_names_the_folder_that_was_asked_for(tmp_path, kind):
    full = pytest.raises(RunFolderError, match="a file grew beyond")
    with no_file_above(200_000), full as caught, replace_folder(tmp_path / "product") as folder:
        write_zeros(kind, folder / "a", 1_000_000)
    assert caught.value.where.startswith(str(tmp_path / "product"))
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file_have_names_of_their_own(tmp_path):
    with replace_file(tmp_path / "a") as first, replace_file(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "a").read_text() == "first"
    assert [item.name for item in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("is_there", [False, True])
def test_of_two_folders_that_take_one_name_at_once_the_later_one_stays(tmp_path, monkeypatch, is_there):
    target, rename = tmp_path / "product", Path.rename
    if is_there:
        target.mkdir()
        (target / "old").write_text("")

    def be_overtaken(path, new):
        """Just before the new folder gets its name, another process's does."""
        if Path(new) == target and not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            target.mkdir()
            (target / "theirs").write_text("")
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", be_overtaken)
    with replace_folder(target) as folder:
        (folder / "ours").write_text("")
    assert [item.name for item in target.iterdir()] == ["ours"]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["done", "product"]


def test_a_folder_that_cannot_get_its_name_leaves_the_earlier_one(tmp_path, monkeypatch):
    target, rename = tmp_path / "product", Path.rename
    target.mkdir()
    (target / "old").write_text("")

    def refuse_ours(path, new):
        if (path / "ours").exists():
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", refuse_ours)
    with pytest.raises(RunFolderError, match="cannot be written") as caught, replace_folder(target) as folder:
        (folder / "ours").write_text("")
    assert caught.value.where == str(target)
    assert [item.name for item in target.iterdir()] == ["old"]
    assert [item.name for item in tmp_path.iterdir()] == ["product"]


def test_a_folder_that_cannot_be_made_or_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written") as caught:
        open_run_folder(tmp_path / "file" / "run", "tiny")
    assert caught.value.found.startswith("a file where a folder is needed: ")
    folder = open_run_folder(tmp_path / "run", "tiny")
    (folder.root / "patch").write_text("in the way")
    with pytest.raises(RunFolderError, match="cannot be written"):
        folder.begin("patch")


@pytest.mark.parametrize(
    ("content", "problem"), [(b"[" * 100_000, "nested too deeply"), (b"{", "Expecting"), (b"\xff\xfe", "utf-8")]
)
def test_a_damaged_document_is_a_value_error(tmp_path, content, problem):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_json(file)
