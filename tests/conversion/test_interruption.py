"""A conversion that is killed, finds the disk full, or meets another run leaves nothing that looks complete."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.architectures.base_config import read_base_config
from porting_kit.conversion import convert_checkpoint, estimate, spans
from porting_kit.conversion.checkpoint import RankFile
from porting_kit.conversion.journal import JOURNAL, LOCK, Journal, lock_folder
from porting_kit.errors import BaseModelError, CheckpointError, ConversionError
from tests.conversion.kills import (
    LARGER,
    convert_with_small_spans,
    digest,
    kill_and_resume,
    looks_complete,
    start_conversion,
)
from tests.conversion.rule_models import random_tensors, raw_config, write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted") / "base"
    write_model(folder, raw_config("llama", **LARGER), dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def expected(base: Path) -> dict[str, str]:
    convert_checkpoint(base, base.parent / "whole", dtype="float16", tp_size=2, verify=False)
    return digest(base.parent / "whole")


def test_a_killed_conversion_goes_on_where_it_was(base: Path, expected: dict[str, str], tmp_path: Path) -> None:
    resumed = kill_and_resume(base, tmp_path / "out", expected, kills=1, seed=1)
    assert resumed > 0


@pytest.mark.slow
def test_twenty_kills(base: Path, expected: dict[str, str], tmp_path: Path) -> None:
    for seed in range(5):
        assert kill_and_resume(base, tmp_path / f"out{seed}", expected, kills=4, seed=seed) > 0


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int, problem: BaseException) -> None:
    """Let a conversion write `count` parts, then fail."""
    write, written = RankFile.write, []

    def fail(self, name, tensor, place=0):
        if len(written) >= count:
            raise problem
        written.append(name)
        write(self, name, tensor, place)

    monkeypatch.setattr(RankFile, "write", fail)


def interrupt(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch, count: int = 40) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, count, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert_with_small_spans(base, out)
    assert not looks_complete(out)
    assert (out / JOURNAL).exists()


def test_an_interrupt_keeps_what_is_done(base, expected, tmp_path, monkeypatch) -> None:
    interrupt(base, tmp_path / "out", monkeypatch)
    read: list[str] = []
    source_rows = spans.TensorSource.read_rows
    monkeypatch.setattr(
        spans.TensorSource,
        "read_rows",
        lambda self, name, *rest, **options: read.append(name) or source_rows(self, name, *rest, **options),
    )
    outcome = convert_with_small_spans(base, tmp_path / "out")
    assert outcome.resumed_spans >= 15
    assert digest(tmp_path / "out") == expected
    again = convert_with_small_spans(base, tmp_path / "fresh")
    assert again.resumed_spans == 0


def test_a_journal_of_another_conversion_is_not_used(base, tmp_path, monkeypatch) -> None:
    """Other ranks, other weights, other dtype: what lies there is of no use and is started again."""
    interrupt(base, tmp_path / "out", monkeypatch)
    outcome = convert_checkpoint(base, tmp_path / "out", dtype="float16", tp_size=1)
    assert outcome.resumed_spans == 0
    assert any("started again: plan" in warning for warning in outcome.warnings)
    assert [file.name for file in (tmp_path / "out").glob("rank*")] == ["rank0.safetensors"]


def test_a_touched_source_is_converted_again(base, expected, tmp_path, monkeypatch) -> None:
    interrupt(base, tmp_path / "out", monkeypatch)
    os.utime(base / "model.safetensors")
    outcome = convert_with_small_spans(base, tmp_path / "out")
    assert outcome.resumed_spans == 0
    assert any("started again: sources" in warning for warning in outcome.warnings)
    assert digest(tmp_path / "out") == expected


def test_a_torn_journal_line_is_left_out(base, expected, tmp_path, monkeypatch) -> None:
    interrupt(base, tmp_path / "out", monkeypatch)
    with (tmp_path / "out" / JOURNAL).open("a") as stream:
        stream.write("[1, 2, 3")
    assert convert_with_small_spans(base, tmp_path / "out").resumed_spans > 0
    assert digest(tmp_path / "out") == expected


def test_a_journal_that_promises_too_much_is_found_by_the_proof(base, tmp_path, monkeypatch) -> None:
    """The proof rests on the files alone: it sees spans that the journal claims and nobody wrote."""
    interrupt(base, tmp_path / "out", monkeypatch)
    with (tmp_path / "out" / JOURNAL).open("a") as stream:
        stream.write(json.dumps(list(range(60))) + "\n")
    with pytest.raises(Exception, match="tensors fail") as caught:
        convert_with_small_spans(base, tmp_path / "out")
    assert type(caught.value).__name__ == "ConversionError"
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_run_killed_between_the_renames_is_finished(base, expected, tmp_path, monkeypatch) -> None:
    """One rank has its final name, the other not yet: nothing looks complete, and the next run ends it."""
    commit = RankFile.commit

    def stop_at_second(self):
        if self.path.name == "rank1.safetensors":
            raise KeyboardInterrupt
        commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(RankFile, "commit", stop_at_second)
        with pytest.raises(KeyboardInterrupt):
            convert_with_small_spans(base, tmp_path / "out")
    assert not looks_complete(tmp_path / "out")
    outcome = convert_with_small_spans(base, tmp_path / "out")
    assert outcome.resumed_spans > 0
    assert digest(tmp_path / "out") == expected


def test_an_earlier_checkpoint_stays_until_the_new_one_is_complete(base, expected, tmp_path, monkeypatch) -> None:
    """Interrupted, refused, gone on with: what was complete before is complete and unchanged until the last moment."""
    convert_checkpoint(base, tmp_path / "out", dtype="float32", tp_size=4, verify=False)
    earlier, receipt = digest(tmp_path / "out"), (tmp_path / "out" / "receipt.json").read_bytes()
    with monkeypatch.context() as patch:
        stop_after(patch, 40, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert_with_small_spans(base, tmp_path / "out")
    assert (looks_complete(tmp_path / "out"), digest(tmp_path / "out")) == (True, earlier)
    assert (tmp_path / "out" / "receipt.json").read_bytes() == receipt
    outcome = convert_with_small_spans(base, tmp_path / "out")
    assert outcome.resumed_spans > 0
    assert digest(tmp_path / "out") == expected  # and the files of the two ranks more are gone
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_a_value_that_overflows_late_leaves_the_earlier_checkpoint(base, tmp_path) -> None:
    convert_with_small_spans(base, tmp_path / "out")
    earlier = digest(tmp_path / "out")
    raw = raw_config("llama", **LARGER)
    write_model(tmp_path / "base", raw, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["lm_head.weight"][-1, -1] = 1e6
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    with pytest.raises(ConversionError, match="does not fit float16"):
        convert_with_small_spans(tmp_path / "base", tmp_path / "out")
    assert (looks_complete(tmp_path / "out"), digest(tmp_path / "out")) == (True, earlier)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*earlier, "config.json", "receipt.json"}


def test_an_earlier_checkpoint_of_the_same_header_is_never_taken_for_the_new_one(base, tmp_path, monkeypatch) -> None:
    """Same names, shapes and journal, and the unfinished file is gone: what lies there is the old model's."""
    convert_with_small_spans(base, tmp_path / "out")
    raw = raw_config("llama", **LARGER)
    other = {name: tensor * 0.5 for name, tensor in random_tensors(read_base_config(raw), torch.bfloat16).items()}
    write_model(tmp_path / "base", raw, other)
    with monkeypatch.context() as patch:
        stop_after(patch, 40, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert_with_small_spans(tmp_path / "base", tmp_path / "out")
    (tmp_path / "out" / ".rank1.safetensors.partial").unlink()
    outcome = convert_with_small_spans(tmp_path / "base", tmp_path / "out")
    assert outcome.resumed_spans == 0
    convert_with_small_spans(tmp_path / "base", tmp_path / "fresh")
    assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


def test_where_the_disk_cannot_hold_both_the_earlier_checkpoint_goes_first(
    base, expected, tmp_path, monkeypatch
) -> None:
    convert_with_small_spans(base, tmp_path / "out")
    own = sum(file.stat().st_blocks * 512 for file in (tmp_path / "out").glob("rank*"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: usage(1, 1, 1_200_000))
    assert own > 400_000
    outcome = convert_with_small_spans(base, tmp_path / "out")
    assert any("no room for two checkpoints" in warning for warning in outcome.warnings)
    assert digest(tmp_path / "out") == expected


def test_a_folder_in_use_is_refused(base, tmp_path) -> None:
    process = start_conversion(base, tmp_path / "out", 0.05)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(CheckpointError, match="in use by another run") as caught:
            convert_checkpoint(base, tmp_path / "out", dtype="float16", tp_size=2)
        assert str(process.pid) in str(caught.value.found)
        assert (tmp_path / "out" / JOURNAL).exists()  # the other run's work is left alone
    finally:
        process.kill()
        process.wait()
    assert convert_with_small_spans(base, tmp_path / "out").files  # the lock went with its process


def test_a_lock_is_taken_again_after_it_was_given_back(tmp_path) -> None:
    for _ in range(2):
        with lock_folder(tmp_path):
            assert (tmp_path / LOCK).exists()
            with pytest.raises(CheckpointError, match="in use"), lock_folder(tmp_path):
                pass
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("change", ["touch", "grow", "replace", "remove", "truncate"])
def test_a_source_that_changes_is_noticed(change: str, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "base"
    write_model(folder, raw_config("llama", **LARGER), dtype=torch.bfloat16)
    file = folder / "model.safetensors"
    note, noted = Journal.note, []

    def change_once(self, number, num_bytes):
        note(self, number, num_bytes)
        noted.append(number)
        if len(noted) == 5:
            if change == "touch":
                os.utime(file)
            elif change == "grow":
                file.open("ab").write(b"x")
            elif change == "truncate":
                os.truncate(file, 1000)
            else:
                content = file.read_bytes()
                file.unlink()
                if change == "replace":
                    file.write_bytes(content)

    monkeypatch.setattr(Journal, "note", change_once)
    with pytest.raises(BaseModelError, match=r"model.safetensors changed while it was read"):
        convert_with_small_spans(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_and_can_be_gone_on_from(base, expected, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 30, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(CheckpointError, match="the disk is full") as caught:
            convert_with_small_spans(base, tmp_path / "out")
    assert "goes on where it stopped" in str(caught.value.next_step)
    assert not looks_complete(tmp_path / "out")
    assert not list((tmp_path / "out").glob("rank*"))
    convert_with_small_spans(base, tmp_path / "out")
    assert digest(tmp_path / "out") == expected


def test_a_full_file_system(base, expected, tmp_path) -> None:
    """A real one: a tmpfs with room for a third, where it may be mounted; elsewhere a limit on the file's size."""
    small = tmp_path / "small"
    small.mkdir()
    size = sum(tensor.stat().st_size for tensor in (base.parent / "whole").glob("rank*")) // 3
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(small)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if mounted:
            with pytest.raises(CheckpointError, match="too little room"):
                convert_checkpoint(base, small / "out", dtype="float16", tp_size=2)
            assert not (small / "out").exists()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("porting_kit.conversion.convert.require_room", lambda *_: None)
            with pytest.raises(CheckpointError, match=r"the disk is full|a file grew beyond"):
                convert_checkpoint(base, small / "out", dtype="float16", tp_size=2)
        assert not looks_complete(small / "out")
        assert not list((small / "out").glob("rank*"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        if mounted:
            subprocess.run(["umount", str(small)], check=True)
