"""Config and tokenizer of a GGUF base, taken out of the file once.

transformers needs 10 to 30 s to make them from a GGUF file, every time, and a build plan needs nothing else of it.
They are kept in a folder of the user's cache, named after the fingerprints of the file and of the tokenizer files
beside it and the version of transformers, and only when the tokenizer that was written down says the same as the one
that was made. PORTING_KIT_CACHE names another place.
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

from porting_kit.base_tokenizer import FILES_BESIDE, read_tokenizer
from porting_kit.provenance import fingerprint_path, hash_value

PROBES = ("The sea", " def f(x):\n\treturn x ** 2\n", "Ünïcode 你好 🙂", "<s></s><|endoftext|><|im_start|>user 12345")


def find_settings(file: Path) -> Path | None:
    """A folder with the config and tokenizer of a GGUF file; made when it is not there. None where none can be kept."""
    try:
        beside = [fingerprint_path(file.parent / name) for name in FILES_BESIDE]
        folder = _cache() / hash_value([fingerprint_path(file), *beside, _version()])
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


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a base, a model folder or a GGUF file; None when it brings none. Never reaches for a network."""
    place = (find_settings(path) if path.suffix == ".gguf" else None) or path
    if place.is_dir() and not any(map(_is_tokenizer_file, place.iterdir())):
        return None  # transformers 5 makes an empty one, whose end id 0 would cut texts
    try:
        with without_progress_bars():
            return read_tokenizer(place, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception:  # any failure of an optional part: prompts may be given as ids
        return None


def _is_tokenizer_file(path: Path) -> bool:
    """tokenizer.json, tokenizer_config.json, tokenizer.model; vocab.json, vocab.txt; spiece.model; qwen.tiktoken."""
    return path.name.startswith(("tokenizer", "vocab")) or path.suffix in (".model", ".tiktoken")


def _cache() -> Path:
    stated = os.environ.get("PORTING_KIT_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(stated) if stated else home / "porting-kit" / "gguf"


def _version() -> str:
    import transformers

    return transformers.__version__


def _take_out(file: Path, folder: Path) -> None:
    """Make both from the file and put them down; nothing is left when the tokenizer does not come back as it was."""
    from transformers import AutoConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with without_progress_bars():
            AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, **options).save_pretrained(place)
            made = read_tokenizer(file, **options)
        made.save_pretrained(place)
        if _answers(made) == _answers(read_tokenizer(place, **options)):
            with contextlib.suppress(OSError):  # another process was first
                place.rename(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _answers(tokenizer: Any) -> list[Any]:
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)]
    special.append(tokenizer.chat_template)
    return [*special, *(list(tokenizer(text)["input_ids"]) for text in PROBES)]
