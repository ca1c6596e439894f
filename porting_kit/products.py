"""What a step made, file by file, as it was when the step finished, and whether anybody edited it since.

A file is known by its size, by the times of its content and of its entry, and by its SHA-256. While size and times are
the same a large file is not read again, so that gigabytes of weights cost nothing from step to step; small files are
always read. Where only a time differs the content decides: a folder that was copied or moved and a file that was
touched are what they were, and the new times are kept.

This sees every byte that changed, and files that are gone. It does not see files that were added, what lies in a
product that is a folder (an engine has a record of its own), or an edit of a large file after which its size and both
its times are put back, which takes the system's clock to be set back.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from porting_kit.provenance import WHOLE_FILE_BYTES

PART_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
MOST_THREADS = 4
"""More of them wait for the disk."""

Made = dict[str, Any]
"""One file, JSON-ready: `bytes`, `modified_ns`, `changed_ns`, `sha256`."""


def describe_products(root: Path, products: Iterable[str]) -> dict[str, Made]:
    """Product -> what is known of it, for those that are files; large ones are read once, on several threads.

    Args:
        root: the run folder.
        products: names relative to it.
    """
    return {name: {**_read_state(root / name), "sha256": hash_parts(root / name)} for name in _files(root, products)}


def find_edits(root: Path, made: Mapping[str, Made]) -> tuple[dict[str, str], dict[str, Made]]:
    """What became of products since they were made.

    Args:
        root: the run folder.
        made: from `describe_products`.

    Returns:
        (product -> what is wrong with it, for those that were edited; product -> what is known of it now, for those of
        which only a time differs).
    """
    edits: dict[str, str] = {}
    renewed: dict[str, Made] = {}
    for name, known in made.items():
        path = root / name
        if not path.is_file():
            edits[name] = "gone"
            continue
        state = _read_state(path)
        same_times = all(state[key] == known.get(key) for key in state)
        if state["bytes"] != known.get("bytes"):
            edits[name] = f"{state['bytes']} bytes instead of {known.get('bytes')}"
        elif same_times and state["bytes"] > WHOLE_FILE_BYTES:
            continue
        elif hash_parts(path) != known.get("sha256"):
            edits[name] = "other content"
        elif not same_times:
            renewed[name] = {**known, **state}
    return edits, renewed


def hash_parts(path: Path) -> str:
    """SHA-256 of a file; of one larger than 64 MiB that of the SHA-256 of its parts, which threads share."""
    size = path.stat().st_size
    starts = range(0, size, PART_BYTES) or range(1)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(starts)), "digests") as pool:
        digests = list(pool.map(lambda start: _hash_part(path, start), starts))
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def _hash_part(path: Path, start: int) -> bytes:
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    left = PART_BYTES
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left and (count := stream.readinto(block[:left])):
            digest.update(block[:count])
            left -= count
    return digest.digest()


def _read_state(path: Path) -> Made:
    stat = path.stat()
    return {"bytes": stat.st_size, "modified_ns": stat.st_mtime_ns, "changed_ns": stat.st_ctime_ns}


def _files(root: Path, products: Iterable[str]) -> list[str]:
    return [name for name in products if (root / name).is_file()]
