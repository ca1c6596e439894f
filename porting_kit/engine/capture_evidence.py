"""What belongs to an engine and to what was captured from it: digests, versions, the card, the record, the file.

A part of the capture script: `capture_kit` joins it with the others into one file for the build machine. It needs the
standard library, and numpy and torch where they are at hand.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import traceback
from importlib import metadata
from pathlib import Path

FORMAT = 1
RECORD_NAME = "porting_record.json"
BLOCK_BYTES = 1 << 16
BLOCKS = 64
LOG_TAIL = 4000


def check_engine_folder(folder: Path, ranks: int) -> str | None:
    """Why the folder holds no engine that can be run, None when it does."""
    if not (folder / "config.json").is_file():
        return f"no engine at {folder}: config.json is missing; build it first (sh engine/build.sh)"
    engines = sorted(folder.glob("rank*.engine"))
    if not engines:
        return f"no rank*.engine in {folder}: the build did not finish"
    empty = [file.name for file in engines if file.stat().st_size == 0]
    if empty:
        return f"{', '.join(empty)} in {folder}: 0 bytes; the build ended early or the disk was full, build again"
    if len(engines) != ranks:
        return f"{len(engines)} engine files in {folder}, the port has {ranks} ranks"
    return None


def check_record(folder: Path, request: dict) -> str | None:
    """Why this engine is not the one the request is about, None when it is or when there is no record."""
    version = str(read_json(folder / "config.json").get("version"))
    installed = installed_release()
    if installed is not None and installed != version:
        return f"the engine was built by TensorRT-LLM {version}, and {installed} is installed: build again"
    file = folder / RECORD_NAME
    if not file.is_file():
        print(f"no {RECORD_NAME} beside the engine: tree and checkpoint cannot be compared", file=sys.stderr)
        return None
    record = read_json(file)
    if record.get("medusa_choices") != request["medusa_choices"]:
        return f"the engine's record has another tree than this script: see {file}"
    if record.get("checkpoint") != request["checkpoint"]:
        return f"the engine was built from another checkpoint than this script is about: see {file}"
    recorded = record.get("engine", {})
    changed = [path.name for path in sorted(folder.glob("*.engine")) if digest_file(path) != recorded.get(path.name)]
    if changed:
        return f"{', '.join(changed)}: not the file that {file} is about"
    card = current_card()
    if card and record.get("card") and card["compute_capability"] != record["card"].get("compute_capability"):
        return f"the engine was built on {record['card']}, and this is {card}: build it on this card"
    return None


def write_record(folder: Path, plan_file: Path, request: dict) -> Path:
    """The record that the build step itself would have written."""
    plan = read_json(plan_file) if plan_file.is_file() else {}
    record = {
        "release": str(read_json(folder / "config.json").get("version")),
        "command": plan.get("command", []),
        "medusa_choices": request["medusa_choices"],
        "checkpoint": request["checkpoint"],
        "engine": {file.name: digest_file(file) for file in sorted(folder.glob("*.engine"))},
        "config": digest_file(folder / "config.json"),
        "environment": versions(),
        "card": current_card(),
        "seconds": None,
    }
    write_atomically(folder / RECORD_NAME, (json.dumps(record, indent=2) + "\n").encode())
    return folder / RECORD_NAME


def versions() -> dict:
    """Versions of what the result depends on."""
    found = {"python": sys.version.split()[0]}
    for name in ("tensorrt_llm", "tensorrt", "torch", "nvidia-modelopt"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def installed_release() -> str | None:
    """Release of the installed tensorrt_llm, None when this Python has none."""
    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        return None


def current_card() -> dict | None:
    """Name and compute capability of the first card, None without one."""
    try:
        import torch

        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability(0)
        return {"name": torch.cuda.get_device_name(0), "compute_capability": f"{major}.{minor}"}
    except (ImportError, RuntimeError, AssertionError):
        return None


def last_error() -> str:
    """The exception being handled, as text."""
    return traceback.format_exc()[-LOG_TAIL:]


def digest_file(path: Path) -> str:
    """SHA-256 over the size and up to 64 blocks spread over the file: the same for every copy, fast for any size."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for block in range(BLOCKS):
            stream.seek(max(0, (size - BLOCK_BYTES) * block // (BLOCKS - 1)))
            digest.update(stream.read(BLOCK_BYTES))
            if size <= BLOCK_BYTES:
                break
    return digest.hexdigest()


def digest_texts(texts: list) -> str:
    """SHA-256 of several texts, order included."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write under another name and rename, so that no reader meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def write_file(path: Path, document: dict, arrays: dict) -> None:
    """One .npz: the document as UTF-8 bytes, and the logits."""
    import numpy as np

    stream = io.BytesIO()
    text = np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)
    np.savez_compressed(stream, document=text, **arrays)
    write_atomically(path, stream.getvalue())


def read_file(path: Path) -> tuple:
    """Document and logits of a file that `write_file` wrote."""
    import numpy as np

    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files if name != "document"}
        return json.loads(archive["document"].tobytes().decode()), arrays
