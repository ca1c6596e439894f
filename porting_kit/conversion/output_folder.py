"""The folder a checkpoint is written into: one writer at a time, resumable, complete only when config.json is there.

Order of names: unfinished rank files are hidden; when all are on the disk they get their names, then the documents
beside them are written, and config.json last. A checkpoint that is there already stays as it is until then, and loses
its config.json before anything else of it is touched; where the disk cannot hold both it goes first. A run that dies
leaves the hidden files and the journal for the next one; an error of the input leaves nothing of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from porting_kit.architectures.names import Shape
from porting_kit.conversion.checkpoint import RankFile, sync_folder, write_config, write_document
from porting_kit.conversion.journal import JOURNAL, Journal, lock_folder, read_journal
from porting_kit.errors import CheckpointError, PortingKitError
from porting_kit.whole_files import DISK_ERRORS, explain_problem

RECEIPT = "receipt.json"
CONFIG = "config.json"


@dataclass
class OutputFolder:
    """An output folder that this process holds; made by `open_output`.

    Args:
        path: the folder.
        ranks: the unfinished rank files.
        journal: what is done so far.
        done: spans that an interrupted run finished.
        note: why an interrupted run was not continued, "" when there was none or it was.
        dropped: the checkpoint that was there went first, for want of room.
    """

    path: Path
    ranks: Sequence[RankFile]
    journal: Journal
    done: set[int] = field(default_factory=set)
    note: str = ""
    dropped: bool = False

    def finish(self, config: Mapping[str, Any], documents: Mapping[str, Any]) -> tuple[Path, ...]:
        """Name the rank files, write the documents, then config.json. Returns the files of the checkpoint."""
        self.journal.close(self.journal.flush)
        for file in self.ranks:
            file.require_complete()
        for name in (CONFIG, RECEIPT):
            (self.path / name).unlink(missing_ok=True)
        sync_folder(self.path)
        for file in self.ranks:
            file.commit()
        for file in set(self.path.glob("rank*.safetensors")) - {file.path for file in self.ranks}:
            file.unlink()  # of an earlier checkpoint with more ranks
        sync_folder(self.path)
        for name, document in documents.items():
            write_document(self.path / name, document)
        config_file = write_config(self.path, config)
        self.journal.remove()
        return (*(file.path for file in self.ranks), config_file)


@contextmanager
def open_output(
    path: Path,
    rank_tensors: Sequence[Mapping[str, tuple[str, Shape]]],
    description: dict[str, Any],
    *,
    keep_earlier: bool = True,
) -> Iterator[OutputFolder]:
    """Take an output folder; go on with the unfinished files of an interrupted run of the same conversion.

    Args:
        rank_tensors: what each rank's file holds, see `ConversionPlan.rank_tensors`.
        description: see `describe_conversion`.
        keep_earlier: leave a complete checkpoint that is there until this one is complete; False removes it first.

    Raises:
        CheckpointError: another run holds the folder, it cannot be written, or the disk is full.
    """
    existed = path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _explain(error, path) from error
    names = (CONFIG, RECEIPT, JOURNAL, *(f"rank{rank}.safetensors" for rank in range(len(rank_tensors))))
    if in_the_way := [name for name in names if (path / name).is_dir()]:
        raise CheckpointError(
            "the output folder holds folders of the names that files need",
            expected="files, or nothing, under these names",
            where=path,
            items=in_the_way,
            next_step="name another output folder; nothing was changed",
        )
    with lock_folder(path):
        folder: OutputFolder | None = None
        try:
            folder = _start(path, rank_tensors, description, keep_earlier)
            yield folder
        except PortingKitError:
            _close(folder)
            remove_unfinished(path) if (path / CONFIG).is_file() else remove_checkpoint(path)
            if not existed:
                shutil.rmtree(path, ignore_errors=True)
            raise
        except OSError as error:
            _close(folder)
            if error.errno in DISK_ERRORS:
                raise _explain(error, path) from error
            raise
        except BaseException:
            _close(folder, flush=True)
            raise


def _start(
    path: Path,
    rank_tensors: Sequence[Mapping[str, tuple[str, Shape]]],
    description: dict[str, Any],
    keep_earlier: bool,
) -> OutputFolder:
    has_earlier = (path / CONFIG).is_file()
    if has_earlier and not keep_earlier:
        (path / CONFIG).unlink()
        sync_folder(path)
        for file in path.glob("rank*.safetensors"):
            file.unlink()
    is_whole = (path / CONFIG).is_file()
    done, note = read_journal(path, description)
    files = [path / f"rank{rank}.safetensors" for rank in range(len(rank_tensors))]
    ranks: list[RankFile] = []
    if done is not None:
        try:
            for file, tensors in zip(files, rank_tensors, strict=True):
                # Without config.json a file of the final name may be one that a stopped run had just renamed.
                ranks.append(RankFile(file, tensors, keep=True, take_named=not is_whole))
        except CheckpointError as problem:
            done, note = None, problem.subject
            for rank in ranks:
                rank.close()
    if done is None:
        remove_unfinished(path) if is_whole else remove_checkpoint(path)
        ranks = []
        for file, tensors in zip(files, rank_tensors, strict=True):
            ranks.append(RankFile(file, tensors))
    journal = Journal(path, description, ranks, done or ())
    return OutputFolder(path, ranks, journal, done or set(), note, has_earlier and not keep_earlier)


def _close(folder: OutputFolder | None, *, flush: bool = False) -> None:
    """Let go of the files; after an interruption what was written is written down first."""
    if folder is None:
        return
    folder.journal.close(folder.journal.flush if flush and not _all_closed(folder.ranks) else None)
    for file in folder.ranks:
        file.close()


def _all_closed(ranks: Sequence[RankFile]) -> bool:
    return any(file.descriptor < 0 for file in ranks)


def remove_checkpoint(path: Path) -> None:
    """Remove what a conversion left: config.json first, so that no half checkpoint looks whole."""
    for file in (path / CONFIG, path / RECEIPT, *path.glob("rank*.safetensors")):
        file.unlink(missing_ok=True)
    remove_unfinished(path)


def remove_unfinished(path: Path) -> None:
    """Remove what an unfinished conversion left, and nothing of a checkpoint that is complete."""
    for file in (path / JOURNAL, *path.glob(".*.partial")):
        file.unlink(missing_ok=True)


def _explain(error: OSError, path: Path) -> CheckpointError:
    if error.errno in DISK_ERRORS:
        free = shutil.disk_usage(path).free
        return CheckpointError(
            DISK_ERRORS[error.errno],
            expected="room for the whole checkpoint",
            found=f"{free / 2**20:.0f} MiB free",
            where=path,
            next_step="make room and run again: it goes on where it stopped; or remove the folder",
        )
    return CheckpointError(
        "the output folder cannot be written",
        expected="a folder that can be written into",
        found=explain_problem(error),
        where=path,
        next_step="name another output folder",
    )
