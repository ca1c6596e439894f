"""Files that are there whole or not at all: written under another name and renamed; read with an error that says where.

A disk that is full, or a folder that cannot be written, is an error of the run and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from porting_kit.errors import PortingKitError, RunFolderError

DISK_ERRORS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
DISK_ERRORS |= {errno.EFBIG: "a file grew beyond what the file system or the process may write"}


def unwritable(path: Path, error: Exception) -> RunFolderError:
    """The error for a place that cannot be written: a full disk by name, anything else as the system says it."""
    if (number := _find_number(error)) in DISK_ERRORS:
        there = next(folder for folder in path.parents if folder.exists())
        return RunFolderError(
            DISK_ERRORS[number],
            expected="room for what is written",
            found=f"{shutil.disk_usage(there).free / 2**20:.1f} MiB free",
            where=path,
            next_step="make room and run again, or name another folder",
        )
    return RunFolderError(
        "the output folder cannot be written",
        expected="a folder that can be written into",
        found=explain_problem(error),
        where=path,
        next_step="name another folder with --out",
    )


def _find_number(error: BaseException | None) -> int | None:
    """What the system refused, by its number: torch hides it in the context of an error, safetensors in the text."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            return int(found[1])
        error = error.__context__
    return None


def require_writable(folder: Path) -> Path:
    """Make a folder, and prove that files can be written into it, before work is done for it.

    Raises:
        RunFolderError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise unwritable(folder, error) from error


def require_free(folder: Path) -> None:
    """Raise RunFolderError unless a folder to write into is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(
            "the output folder is occupied",
            expected="a new or empty folder",
            found="files in it" if folder.is_dir() else "a file",
            where=folder,
            next_step="name another",
        )


@contextlib.contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder beside `target`; on success it takes target's place, on failure it is removed.

    The earlier content stays until the new one is complete. Of a link its target is replaced, and the link stays.

    Raises:
        RunFolderError: the folder cannot be written, or the disk is full.
    """
    target = Path(os.path.realpath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _name_beside(target)
        temporary.mkdir()
    except OSError as error:
        raise unwritable(target, error) from error
    try:
        yield temporary
        _put_in_place(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, PortingKitError):
            raise error.moved(temporary, target) from error
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise unwritable(target, error) from error
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    """Give a folder its name, in place of what has it; of two processes that do so at once the later one's stays."""
    old = _name_beside(target)
    while True:
        with contextlib.suppress(FileNotFoundError):
            target.rename(old)
        try:
            temporary.rename(target)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                if old.exists():
                    old.rename(target)
                raise unwritable(target, error) from error
            shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; the file written there takes path's place, on failure it is removed.

    Raises:
        RunFolderError: the folder cannot be written, or the disk is full.
    """
    temporary = _name_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, Exception) and _find_number(error) is not None:
            raise unwritable(path, error) from error
        raise


def _name_beside(path: Path) -> Path:
    """A hidden name in the same folder that nobody else takes. tempfile's own files and folders are for one user."""
    return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")


def write_text(path: Path, text: str) -> None:
    """Write a whole file: temporary name, flush to disk, rename. Raises RunFolderError, see `replace_file`."""
    with replace_file(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write a whole safetensors file that may be read by whoever may read any other file here.

    The package itself makes files for one user alone (safetensors 0.8.0). Raises RunFolderError, see `replace_file`.
    """
    from safetensors.torch import save_file

    with replace_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(dict(tensors), temporary, metadata=None if metadata is None else dict(metadata))
        temporary.chmod(mode)


def write_pickle(path: Path, content: Any) -> None:
    """Write a whole file as torch saves it. Raises RunFolderError, see `replace_file`."""
    import torch

    # given a path, torch says nothing of why it could not write
    with replace_file(path) as temporary, temporary.open("xb") as stream:
        torch.save(content, stream)


def explain_problem(problem: Exception) -> str:
    """What the system or a parser refused, in words for a message."""
    if not isinstance(problem, OSError):
        return str(problem)
    kinds = {
        FileExistsError: "a file where a folder is needed",
        NotADirectoryError: "a file where a folder is needed",
        IsADirectoryError: "a folder where a file is needed",
        FileNotFoundError: "no such file",
        PermissionError: "no permission",
    }
    said = kinds.get(type(problem)) or problem.strerror or type(problem).__name__
    return said if problem.filename is None else f"{said}: {problem.filename}"


def read_json(path: Path) -> Any:
    """Read a JSON document.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no UTF-8, no JSON, or nested deeper than the parser goes.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document the same way."""
    write_text(path, json.dumps(document, indent=2, default=str) + "\n")
