"""A GGUF base's tokenizer: what the files beside it state goes first, the rest is the GGUF's own."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from porting_kit.alignment.gguf_settings import find_settings, load_tokenizer
from porting_kit.base_tokenizer import SETTINGS_FILE, TEMPLATE_FILE, VOCABULARY_FILE, read_tokenizer

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
WORDS = ["<unk>", "<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
IDS = {word: index for index, word in enumerate(WORDS)}
OWN = "of the GGUF {{ bos_token }}"
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """A GGUF file without tensors, whose settings hold a tokenizer and a chat template."""
    monkeypatch.setenv("PORTING_KIT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "base" / "model.gguf"
    file.parent.mkdir()
    writer = gguf.GGUFWriter(str(file), "llama")
    for add in (writer.add_embedding_length, writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
        add(2)
    writer.add_feed_forward_length(4)
    writer.add_context_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(OWN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_beside(file: Path, *, vocabulary: bool = True, settings: dict | None = None, template: str = "") -> None:
    tokenizer = Tokenizer(models.BPE(IDS, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if vocabulary:
        tokenizer.save(str(file.parent / VOCABULARY_FILE))
    if settings is not None:
        (file.parent / SETTINGS_FILE).write_text(json.dumps(settings))
    if template:
        (file.parent / TEMPLATE_FILE).write_text(template)


STATING = {**SETTINGS, "chat_template": "of the settings"}


@pytest.mark.parametrize(
    ("beside", "template"),
    [
        (None, OWN),
        ({}, OWN),
        ({"settings": SETTINGS}, OWN),
        ({"settings": STATING}, "of the settings"),
        ({"settings": STATING, "template": "of its file"}, "of its file"),
        ({"template": "of its file"}, "of its file"),
        ({"vocabulary": False, "settings": STATING}, "of the settings"),
        ({"vocabulary": False, "template": "of its file"}, "of its file"),
    ],
)
def test_the_template_is_of_the_files_beside_a_gguf_else_its_own(base, beside, template):
    if beside is not None:
        write_beside(base, **beside)
    made = read_tokenizer(base, local_files_only=True)
    assert made.chat_template == template
    assert made("xy")["input_ids"][-2:] == [IDS["x"], IDS["y"]]


def test_special_tokens_come_from_the_same_place_as_a_template_needs_them(base):
    """The settings beside it say that there is no first token; where they are missing the GGUF says there is one."""
    write_beside(base)
    alone = read_tokenizer(base, local_files_only=True)
    assert (alone.bos_token, alone.eos_token, alone.unk_token) == ("<s>", "</s>", "<unk>")
    said = alone.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert said == "of the GGUF <s>"
    write_beside(base, settings=SETTINGS)
    stated = read_tokenizer(base, local_files_only=True)
    assert (stated.bos_token, stated.eos_token) == (None, "</s>")


def test_what_was_kept_of_a_gguf_is_not_used_once_files_beside_it_say_otherwise(base):
    assert load_tokenizer(base).chat_template == OWN
    kept = find_settings(base)
    write_beside(base, settings=SETTINGS, template="of its file")
    assert load_tokenizer(base).chat_template == "of its file"
    assert find_settings(base) not in (None, kept)
