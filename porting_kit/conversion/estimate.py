"""What a conversion will need, from headers alone: disk, memory, time. Too little disk is refused before it starts."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from porting_kit.conversion.planned import ConversionPlan
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.errors import CheckpointError

HEADER_BYTES = 200
"""Room that one tensor's entry takes in a header, rounded up."""
SPARE_BYTES = 1 << 20
PROCESS_BYTES = 230 << 20
"""Python with torch loaded and nothing else: measured 218 MiB (torch 2.13, CPU build)."""
PROBE_BYTES = 32 << 20
UNFINISHED, FINISHED = (".rank*.partial",), ("rank*.safetensors",)
"""Files of an interrupted conversion, and of a checkpoint that this one replaces."""


@dataclass(frozen=True)
class ConversionEstimate:
    """What a conversion will need.

    Args:
        output_bytes: all ranks' files.
        source_bytes: the files that are read.
        free_bytes: on the disk of the output folder.
        memory_bytes: peak of the process.
        largest_tensor_bytes: the largest source or target tensor.
        write_bytes_per_second: measured with a short file; None when it was not measured.
        seconds: at that rate; None without it.
    """

    output_bytes: int
    source_bytes: int
    free_bytes: int
    memory_bytes: int
    largest_tensor_bytes: int
    write_bytes_per_second: float | None = None
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def describe(self) -> str:
        """One line for a terminal."""
        text = f"{self.output_bytes / 2**30:.2f} GiB to write ({self.free_bytes / 2**30:.1f} GiB free), "
        text += f"peak memory about {self.memory_bytes / 2**20:.0f} MiB"
        return text if self.seconds is None else f"{text}, about {max(self.seconds, 1):.0f} s"


def measure_output(plan: ConversionPlan) -> int:
    """Bytes of all rank files, headers included."""
    return sum(planned.num_bytes + HEADER_BYTES * len(planned.pieces) for planned in plan.tensors) + SPARE_BYTES


def require_room(plan: ConversionPlan, out_folder: Path) -> bool:
    """Refuse a conversion that the disk has no room for. What an interrupted run left there counts as room.

    Returns:
        Whether there is room beside a checkpoint that is there already, so that it can stay until the new one is
        complete.

    Raises:
        CheckpointError: too little, even without that checkpoint.
    """
    needed = measure_output(plan)
    beside, instead = (_find_room(out_folder, patterns) for patterns in (UNFINISHED, (*UNFINISHED, *FINISHED)))
    if needed > instead:
        raise CheckpointError(
            "the disk has too little room for the checkpoint",
            expected=f"{needed / 2**30:.2f} GiB",
            found=f"{instead / 2**30:.2f} GiB free",
            where=out_folder,
            next_step="make room, or name a folder on another disk",
        )
    return needed <= beside


def estimate_conversion(
    plan: ConversionPlan, sources: Sequence[TensorSource], out_folder: Path, *, probe: bool = False
) -> ConversionEstimate:
    """Work out disk, memory and time.

    Args:
        probe: write a short file into the output folder's disk to learn how fast it is.
    """
    output = measure_output(plan)
    files = {file for source in sources for file in source.files()}
    pairs = [(source, name) for source in sources for name in source.names()]
    whole = max((source.read_bytes(name) for source, name in pairs if not source.has_rows(name)), default=0)
    largest = max((planned.num_bytes for planned in plan.tensors), default=0)
    largest = max([largest, *(entry.num_bytes for source in sources for entry in source.entries.values())])
    rate = measure_write_rate(out_folder, min(PROBE_BYTES, output)) if probe else None
    return ConversionEstimate(
        output_bytes=output,
        source_bytes=sum(file.stat().st_size for file in files),
        free_bytes=_find_room(out_folder, (*UNFINISHED, *FINISHED)),
        memory_bytes=PROCESS_BYTES + whole + min(largest, 192 << 20),
        largest_tensor_bytes=largest,
        write_bytes_per_second=rate,
        seconds=None if rate is None else output / rate,
    )


def measure_write_rate(folder: Path, size: int) -> float:
    """Bytes per second of a plain write with flush, measured on a file that is removed again."""
    folder = _existing(folder)
    path, block = folder / f".rate.{os.getpid()}.partial", bytes(1 << 20)
    started = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as stream:
            for _ in range(max(size >> 20, 1)):
                stream.write(block)
            os.fsync(stream.fileno())
    finally:
        path.unlink(missing_ok=True)
    return max(size, 1 << 20) / (time.perf_counter() - started)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _find_room(folder: Path, patterns: Sequence[str]) -> int:
    """Free bytes, with those of files in the folder that the conversion replaces or goes on with."""
    there = _existing(folder)
    own = 0
    if there == folder:
        own = sum(file.stat().st_blocks * 512 for pattern in patterns for file in folder.glob(pattern))
    return shutil.disk_usage(there).free + own
