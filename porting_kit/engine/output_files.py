"""The formats in which TensorRT-LLM's run script leaves its output: reading them as they are, and writing the same.

Formats (examples/run.py print_output, 0.8.0.dev2024013000 to 0.16.0.dev2024121000):

- `--output_npy`: int32 [batch * beams, length], prompt included, the rest of each row filled with the end id;
- `--output_csv`: the same rows as integer text;
- `--output_logits_npy NAME.npy`: NAME_context.npy [sum of prompt tokens, Vp] and NAME_generation.npy
  [B, new tokens, Vp] or [B, 1, new tokens, Vp], float32. A Medusa engine has no context logits.

What the ids mean, and whether they belong to a port, is for `captured`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from porting_kit.errors import CapturedFileError

NPY_MAGIC = b"\x93NUMPY"


def read_id_table(file: Path) -> np.ndarray:
    """The id table of a .npy or .csv file, int64 [rows, columns].

    Raises:
        CapturedFileError: missing, empty, a Git LFS pointer, or no table of integers.
    """
    data = _read_bytes(file)
    if data.startswith(NPY_MAGIC):
        table = load_array(file)
        if table.ndim == 3 and table.shape[1] == 1:  # the session's own output_ids, with its beams
            table = table[:, 0]
        if table.ndim != 2 or table.dtype.kind not in "iu":
            raise CapturedFileError(
                "not a table of token ids",
                expected="int32 [batch, length]",
                found=f"{table.dtype} {list(table.shape)}",
                where=file,
                next_step="name the file that --output_npy wrote, made with one beam",
            )
        return table.astype(np.int64)
    try:
        rows = [[int(cell) for cell in row] for row in csv.reader(io.StringIO(data.decode("utf-8"))) if row]
    except (UnicodeDecodeError, ValueError) as error:
        raise CapturedFileError(
            "neither a .npy file nor rows of integers", expected="a file of --output_npy or --output_csv",
            found="JSON" if data.lstrip()[:1] in (b"[", b"{") else error, where=file,
            next_step="name the file that run.py wrote with --output_npy or --output_csv, token ids and not text",
        ) from None  # fmt: skip
    if not rows:
        raise CapturedFileError(
            "the captured file is empty",
            expected="a row of token ids per prompt",
            found="blank lines",
            where=file,
            next_step="run the engine again: run.py wrote no tokens",
        )
    if len({len(row) for row in rows}) != 1:
        raise CapturedFileError(
            "rows of different lengths", expected="one length: run.py fills rows with the end id",
            found=sorted({len(row) for row in rows}), where=file, next_step="was the file cut off while copying?",
        )  # fmt: skip
    return np.array(rows, dtype=np.int64)


def _read_bytes(file: Path) -> bytes:
    if not file.is_file():
        raise CapturedFileError(
            "the captured file does not exist",
            expected="a file of --output_npy or --output_csv",
            found="no such file",
            where=file,
            next_step="name the file run.py wrote",
        )
    data = file.read_bytes()
    if not data:
        raise CapturedFileError(
            "the captured file is empty",
            expected="a file of --output_npy or --output_csv",
            found="0 bytes",
            where=file,
            next_step="copy it again, or run the engine again: nothing was written",
        )
    if data.startswith(b"version https://git-lfs"):
        raise CapturedFileError(
            "the captured file is a Git LFS pointer",
            expected="a file of --output_npy or --output_csv",
            found="a pointer",
            where=file,
            next_step="run git lfs pull",
        )
    return data


def load_array(file: Path) -> np.ndarray:
    """The array of a .npy file; pickled objects are refused. Raises CapturedFileError."""
    _read_bytes(file)
    try:
        return np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise CapturedFileError(
            "the .npy file cannot be read",
            expected="a NumPy file",
            found=error,
            where=file,
            next_step="copy it again: it may be cut off",
        ) from None


def find_logits_file(path: Path) -> Path:
    """NAME_generation.npy for the NAME.npy given to the run script; the path itself when it is that file."""
    generation = Path(str(path).split(".npy")[0] + "_generation.npy")
    return generation if generation.is_file() and not path.name.endswith("_generation.npy") else path


def write_captured_tokens(
    path: str | Path,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    *,
    end_id: int,
    length: int | None = None,
) -> Path:
    """Write prompts and outputs as run.py does: int32 [B, length], rows filled with the end id.

    Args:
        path: a .npy file, or a .csv file for integer text.
        prompts: token ids.
        outputs: generated ids, one list a prompt.
        end_id: the fill.
        length: columns; the longest row when None (run.py uses the session's maximum).

    Raises:
        CapturedFileError: lists of different lengths, or a row longer than `length`.
    """
    if len(prompts) != len(outputs):
        raise CapturedFileError(
            "prompts and outputs differ in number",
            expected=len(prompts),
            found=len(outputs),
            where=path,
            next_step="give one list of outputs for each prompt",
        )
    rows = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, rows), default=0)
    width = longest if length is None else length
    if width < longest:
        raise CapturedFileError(
            "a row is longer than the file is wide",
            expected=f"at most {width}",
            found=longest,
            where=path,
            next_step="give a larger length",
        )
    table = np.full((len(rows), width), end_id, dtype=np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".csv":
        with file.open("w", newline="", encoding="utf-8") as text:
            csv.writer(text).writerows(table.tolist())
    else:
        np.save(file, table)
    return file


def write_captured_logits(path: str | Path, logits: Sequence[np.ndarray]) -> Path:
    """Write generation logits as run.py does: NAME_generation.npy, float32 [B, new tokens, Vp].

    Args:
        path: the name given to `--output_logits_npy`.
        logits: [tokens, Vp] for each prompt; shorter ones are filled with zeros.

    Raises:
        CapturedFileError: no logits, or vocabularies that differ.
    """
    widths = {array.shape[-1] for array in logits}
    if len(widths) != 1:
        raise CapturedFileError(
            "the logits have no common vocabulary size",
            expected="one vocabulary for all prompts",
            found=sorted(widths),
            where=path,
            next_step="give logits of one engine",
        )
    rows = max(array.shape[0] for array in logits)
    table = np.zeros((len(logits), rows, widths.pop()), dtype=np.float32)
    for index, array in enumerate(logits):
        table[index, : array.shape[0]] = array
    file = Path(str(path).split(".npy")[0] + "_generation.npy")
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file, table)
    return file
