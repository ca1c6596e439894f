"""Config and tokenizer of a GGUF base, taken out of the file once.

transformers needs 10 to 30 s to make them from a GGUF file, every time, and a build plan needs nothing else of it.
They are kept in a folder of the user's cache, named after the file's fingerprint and the version of transformers, and
only when the tokenizer that was written down says the same as the one that was made. PORTING_KIT_CACHE names another
place.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from porting_kit.provenance import fingerprint_path, hash_value

PROBES = ("The sea", " def f(x):\n\treturn x ** 2\n", "Ünïcode 你好 🙂", "<s></s><|endoftext|><|im_start|>user 12345")


def find_settings(file: Path) -> Path | None:
    """A folder with the config and tokenizer of a GGUF file; made when it is not there. None where none can be kept."""
    try:
        folder = _cache() / hash_value([fingerprint_path(file), _version()])
        if not folder.is_dir():
            _take_out(file, folder)
    except Exception:  # a cache is a convenience: whatever is wrong, the slow way says it better
        return None
    return folder if folder.is_dir() else None


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws bars on stderr, into the middle of ours, and widgets that a saved notebook shows as broken."""
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    reader = None
    with contextlib.suppress(ImportError):
        reader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    drawn = getattr(reader, "tqdm", None)  # its bar asks nobody
    if drawn is not None:
        reader.tqdm = lambda tensors, *_, **__: tensors
    try:
        yield
    finally:
        if drawn is not None:
            reader.tqdm = drawn
        if were_shown:
            logging.enable_progress_bar()


def _cache() -> Path:
    stated = os.environ.get("PORTING_KIT_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(stated) if stated else home / "porting-kit" / "gguf"


def _version() -> str:
    import transformers

    return transformers.__version__


def _take_out(file: Path, folder: Path) -> None:
    """Make both from the file and put them down; nothing is left when the tokenizer does not come back as it was."""
    from transformers import AutoConfig, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with without_progress_bars():
            AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, **options).save_pretrained(place)
            made = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, **options)
        made.save_pretrained(place)
        if _answers(made) == _answers(AutoTokenizer.from_pretrained(str(place), **options)):
            with contextlib.suppress(OSError):  # another process was first
                place.rename(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _answers(tokenizer: Any) -> list[Any]:
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)]
    return [*special, *(list(tokenizer(text)["input_ids"]) for text in PROBES)]
