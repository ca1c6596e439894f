"""The tokenizer of a base on disk: a Hugging Face folder's, or a GGUF file's with the tokenizer files beside it.

Of the files beside a GGUF file transformers takes tokenizer.json alone, and then neither the special tokens nor the
chat template of either (read in 5.24): what the files beside it state goes first here, and the rest is the GGUF's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from porting_kit.architectures.gguf_header import read_gguf_header

VOCABULARY_FILE, SETTINGS_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES_BESIDE = (VOCABULARY_FILE, SETTINGS_FILE, TEMPLATE_FILE, "special_tokens_map.json", "added_tokens.json")
"""Files beside a GGUF file that its tokenizer is made of, where they are there."""
SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
"""transformers' name -> the setting of a GGUF file with its id (ggml-org/ggml docs/gguf.md)."""


def read_tokenizer(path: Path, **options: Any) -> Any:
    """The tokenizer of a model folder or a GGUF file.

    Args:
        path: the folder or the file.
        options: for transformers' `from_pretrained`.

    Raises:
        Exception: whatever transformers raises; BaseModelError: the header of the GGUF file cannot be read.
    """
    from transformers import AutoTokenizer

    if path.suffix != ".gguf":
        return AutoTokenizer.from_pretrained(str(path), **options)
    folder = path.parent
    has_vocabulary, has_settings = ((folder / name).is_file() for name in (VOCABULARY_FILE, SETTINGS_FILE))
    if has_vocabulary and has_settings:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        template = tokenizer.chat_template or _read_template(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=path.name, **options)
        template = _read_template(folder) or tokenizer.chat_template
    if has_vocabulary:
        stated = read_gguf_header(path).settings
        if not has_settings:
            _take_special_tokens(tokenizer, stated)
        template = template or stated.get("tokenizer.chat_template")
    tokenizer.chat_template = template
    return tokenizer


def _read_template(folder: Path) -> str | None:
    """The chat template that files state by themselves; its own file goes before the settings, as in transformers."""
    file, settings = folder / TEMPLATE_FILE, folder / SETTINGS_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    return template if isinstance(template, str) else None


def _take_special_tokens(tokenizer: Any, stated: Mapping[str, Any]) -> None:
    for name, key in SPECIAL_TOKENS.items():
        if key in stated:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(stated[key]))
