"""Hashes, versions and time stamps that go beside every result.

This module does not know what is hashed; large weight files are fingerprinted by header, size and time stamp,
because reading gigabytes to see whether they changed would cost more than the step that uses them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

WHOLE_FILE_BYTES = 1 << 20
"""Files up to this size are hashed whole; of larger ones the first and last part, the size and the time stamp."""


def hash_value(value: Any) -> str:
    """SHA-256 of a JSON-serialisable value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a whole file, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if sys.version_info >= (3, 11) else _digest(stream)


def _digest(stream: Any) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def fingerprint_path(path: Path) -> str:
    """A fingerprint of a file or folder that changes when its content is replaced. 'absent' when nothing is there."""
    if path.is_dir():
        files = sorted(item for item in path.rglob("*") if item.is_file() and "__pycache__" not in item.parts)
        return hash_value([(str(item.relative_to(path)), fingerprint_path(item)) for item in files])
    if not path.is_file():
        return "absent"
    stat = path.stat()
    if stat.st_size <= WHOLE_FILE_BYTES:
        return hash_file(path)
    with path.open("rb") as stream:
        head = stream.read(WHOLE_FILE_BYTES // 2)
        stream.seek(-(WHOLE_FILE_BYTES // 2), 2)
        tail = stream.read()
    return hash_value([hashlib.sha256(head + tail).hexdigest(), stat.st_size, stat.st_mtime_ns])


def describe_environment() -> dict[str, str]:
    """Versions of what a result depends on, read without importing the packages."""
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("porting-kit", "torch", "transformers", "safetensors", "tensorrt_llm"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
