"""Config and tokenizer of a GGUF file are taken out once, and only what comes back the same is kept."""

import sys
from types import SimpleNamespace

import pytest

from porting_kit.alignment import gguf_settings
from porting_kit.alignment.gguf_settings import find_settings, without_progress_bars


class Tokenizer:
    """A tokenizer that counts how often it was made from the GGUF file."""

    bos_token_id, eos_token_id, pad_token_id, chat_template = 1, 2, None, None

    def __init__(self, shift=0):
        self.shift = shift

    def __len__(self):
        return 300

    def __call__(self, text):
        return {"input_ids": [ord(letter) + self.shift for letter in text]}

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A GGUF file, a cache, and a stand-in for transformers; `file.made` lists what was made from the file."""
    made, came_back = [], [0]

    def make_tokenizer(where, gguf_file=None, **_):
        if gguf_file is None:
            return Tokenizer(came_back[0])
        made.append("tokenizer")
        return Tokenizer()

    def make_config(where, gguf_file, **_):
        made.append("config")
        return SimpleNamespace(save_pretrained=lambda folder: (folder / "config.json").write_text("{}"))

    transformers = SimpleNamespace(
        __version__="1",
        AutoConfig=SimpleNamespace(from_pretrained=make_config),
        AutoTokenizer=SimpleNamespace(from_pretrained=make_tokenizer),
    )
    bars = SimpleNamespace(
        is_progress_bar_enabled=lambda: True,
        disable_progress_bar=lambda: made.append("bars off"),
        enable_progress_bar=lambda: made.append("bars on"),
    )
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "transformers.utils", SimpleNamespace(logging=bars))
    monkeypatch.setenv("PORTING_KIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF one")
    return SimpleNamespace(path=tmp_path / "model.gguf", made=made, came_back=came_back, transformers=transformers)


def test_they_are_made_once_without_bars_and_found_again(file):
    folder = find_settings(file.path)
    assert {item.name for item in folder.iterdir()} == {"config.json", "tokenizer.json"}
    assert file.made == ["bars off", "config", "tokenizer", "bars on"]
    assert find_settings(file.path) == folder
    assert len(file.made) == 4


@pytest.mark.parametrize("change", ["file", "version"])
def test_another_file_or_version_has_its_own(file, change):
    folder = find_settings(file.path)
    if change == "file":
        file.path.write_bytes(b"GGUF two")
    else:
        file.transformers.__version__ = "2"
    assert find_settings(file.path) not in (None, folder)


def test_a_tokenizer_that_does_not_come_back_the_same_is_not_kept(file, tmp_path):
    file.came_back[0] = 1
    assert find_settings(file.path) is None
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_done_without(file, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    assert find_settings(file.path) is None
    monkeypatch.setattr(gguf_settings, "_take_out", lambda *_: pytest.fail("made for a cache that is none"))
    monkeypatch.delenv("PORTING_KIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert gguf_settings._cache() == tmp_path / "other" / "porting-kit" / "gguf"


def test_the_bar_of_the_gguf_reader_is_not_drawn(monkeypatch):
    """It does not ask whether bars are wanted."""

    def draw(tensors, **_):
        raise AssertionError("drawn")

    reader = SimpleNamespace(tqdm=draw)
    monkeypatch.setitem(sys.modules, "transformers.modeling_gguf_pytorch_utils", reader)
    with without_progress_bars():
        assert list(reader.tqdm([1, 2], desc="tensors")) == [1, 2]
    assert reader.tqdm is draw
