"""Weight files of every format give the same tensors; damaged ones are refused within a second, by name."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from porting_kit.conversion import open_tensor_source
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.errors import BaseModelError

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12).reshape(3, 4).float(),
    "model.norm.weight": torch.tensor([1.5, -2.0, 3.0]).bfloat16(),
    "lm_head.weight": torch.arange(6).reshape(2, 3).half(),
    "empty": torch.empty(0, 4),
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def write_shards(folder: Path, suffix: str = "safetensors") -> list[Path]:
    """Two shards and their index."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = list(TENSORS)
    weight_map, files = {}, []
    for number, part in enumerate((names[:2], names[2:]), start=1):
        file = folder / f"{stem}-0000{number}-of-00002.{suffix}"
        tensors = {name: TENSORS[name] for name in part}
        save_file(tensors, file) if suffix == "safetensors" else torch.save(tensors, file)
        weight_map |= {name: file.name for name in part}
        files.append(file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def check_content(folder: Path) -> None:
    source = open_tensor_source(folder)
    assert set(source.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert source.dtype(name) == str(tensor.dtype).removeprefix("torch.")
        assert torch.equal(source.read(name), tensor)


def test_one_safetensors_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    check_content(tmp_path)
    check_content(tmp_path / "model.safetensors")


def test_one_pickle(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    check_content(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(suffix: str, tmp_path: Path) -> None:
    write_shards(tmp_path, suffix)
    check_content(tmp_path)


def test_unaligned_values_are_read(tmp_path: Path) -> None:
    """Writers that do not pad the header leave values at odd offsets."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((3 - len(header)) % 8)
    data = torch.tensor([1.5, -2.5]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert open_tensor_source(tmp_path).read("x").tolist() == [1.5, -2.5]


def refused(folder: Path) -> str:
    """The message, which must come at once."""
    started = time.perf_counter()
    with pytest.raises(BaseModelError) as caught:
        open_tensor_source(folder)
    assert time.perf_counter() - started < 1
    return caught.value.message


def test_a_pointer_file_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path)
    files[1].write_text(POINTER)
    assert f"{files[1].name} is a {len(POINTER)}-byte pointer, not weights" in refused(tmp_path)


@pytest.mark.parametrize("cut_bytes", [1, 12])
def test_a_shard_cut_short_is_named(cut_bytes: int, tmp_path: Path) -> None:
    files = write_shards(tmp_path)
    files[0].write_bytes(files[0].read_bytes()[:-cut_bytes])
    message = refused(tmp_path)
    assert f"{files[0].name} is cut short" in message
    assert f"{files[0].stat().st_size} bytes" in message


def test_a_pickle_cut_short_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "bin")
    files[0].write_bytes(files[0].read_bytes()[:-200])
    assert files[0].name in refused(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path)
    files[1].unlink()
    message = refused(tmp_path)
    assert "1 of the 2 shards that the index names are missing" in message
    assert files[1].name in message


def cut_after_the_check(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The file loses its end in the moment between the look at it and the read."""
    check = TensorSource.check_unchanged
    cut: list[Path] = []

    def check_then_cut(self, file: Path) -> None:
        check(self, file)
        if not cut:
            cut.append(file)
            os.truncate(file, size)

    monkeypatch.setattr(TensorSource, "check_unchanged", check_then_cut)


@pytest.mark.parametrize("how", ["whole", "rows"])
def test_a_file_cut_short_after_the_check_is_an_error_and_not_the_end_of_the_process(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file would end the process with SIGBUS here."""
    save_file({"x": torch.ones(1 << 16, 8)}, tmp_path / "model.safetensors")
    source = open_tensor_source(tmp_path)
    cut_after_the_check(monkeypatch, 4096)
    with pytest.raises(BaseModelError, match=r"model\.safetensors changed while it was read"):
        source.read("x") if how == "whole" else source.read_rows("x", 60000, 60010, 8)


def test_plain_pickles_are_read_where_their_values_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch stores values uncompressed in its zip: rows of them are read without the rest, and without a pickle."""
    shared = torch.arange(24.0).reshape(6, 4)
    tensors = {
        **TENSORS,
        "shared": shared,
        "part": shared[2:4],
        "scalar": torch.tensor(3.0),
        "flags": torch.ones(3) > 0,
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the pickle was loaded"))
    source = open_tensor_source(tmp_path)
    for name, tensor in tensors.items():
        assert source.has_rows(name)
        assert torch.equal(source.read(name), tensor), name
    assert torch.equal(source.read_rows("shared", 1, 3, 4), shared[1:3])


def test_values_that_do_not_lie_in_rows_are_left_to_torch(tmp_path: Path) -> None:
    turned = torch.arange(12.0).reshape(3, 4).T
    torch.save({"turned": turned, "plain": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    source = open_tensor_source(tmp_path)
    assert (source.has_rows("turned"), source.has_rows("plain")) == (False, True)
    assert torch.equal(source.read("turned"), turned)


@pytest.mark.parametrize("change", ["compressed", "big-endian"])
def test_a_zip_that_torch_did_not_write_so_is_left_to_torch(change: str, tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2, 3)}, tmp_path / "plain.bin")
    with zipfile.ZipFile(tmp_path / "plain.bin") as old, zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if change == "big-endian" and entry.filename.endswith("byteorder"):
                content = b"big"
            how = zipfile.ZIP_DEFLATED if change == "compressed" else zipfile.ZIP_STORED
            new.writestr(entry.filename, content, how)
    (tmp_path / "plain.bin").unlink()
    assert not open_tensor_source(tmp_path).has_rows("x")


def test_a_web_page_in_place_of_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("<!DOCTYPE html><html>404</html>")
    assert "is a web page, not weights" in refused(tmp_path)


def test_a_header_of_60_bytes_is_no_web_page(tmp_path: Path) -> None:
    """Its length is written as the byte `<`, and so might be the one behind a blank."""
    for length in (60, 0x3C20):
        record = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        header = json.dumps(record, separators=(",", ":")).encode()
        header += b" " * (length - len(header))
        file = tmp_path / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        assert file.read_bytes().lstrip()[:1] == b"<"
        assert open_tensor_source(tmp_path).shape("x") == (1,)


@pytest.mark.parametrize(
    "text", ["\n <html>", "<?xml version='1.0'?>", "<Error><Code>AccessDenied</Code>", "Entry not found"]
)
def test_other_answers_of_servers_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text(text)
    assert "is a web page, not weights" in refused(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        (([0, 8], [4, 12]), "a and b overlap"),
        (([0, 8], [0, 8]), "a and b overlap"),
        (([4, 12], [0, 8]), "b and a overlap"),
        (([0, 8], [12, 20]), "4 bytes between a and b belong to no tensor"),
        (([16, 24], [8, 16]), "8 bytes between the header and b belong to no tensor"),
    ],
)
def test_bytes_of_two_tensors_or_of_none_are_refused(offsets, said: str, tmp_path: Path) -> None:
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in zip("ab", offsets, strict=True)
    }
    header["empty"] = {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}
    text = json.dumps(header).encode()
    size = max(max(place) for place in offsets)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    assert said in refused(tmp_path)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "model.safetensors is empty" in refused(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path)
    save_file({name: TENSORS[name] for name in ("lm_head.weight", "empty", "model.norm.weight")}, files[1])
    message = refused(tmp_path)
    assert "1 tensors lie in two files" in message
    assert f"where: {tmp_path}\n" in message
    assert "model.norm.weight" in message


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"]["model.layers.0.gone"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(record))
    message = refused(tmp_path)
    assert "the shard index and the shards disagree" in message
    assert "model.layers.0.gone" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "the shard index cannot be read"),
        ("[]", "no weight_map"),
        ('{"metadata": {}}', "no weight_map"),
        ('{"weight_map": 3}', "weight_map: 3"),
        ('{"weight_map": null}', "weight_map: None"),
        ('{"weight_map": ["a.safetensors"]}', "weight_map: ['a.safetensors']"),
        ('{"weight_map": {"a": 3}}', "weight_map: {'a': 3}"),
        ('{"weight_map": {}}', "weight_map: {}"),
    ],
)
def test_a_damaged_index_is_refused_in_plain_words(text: str, said: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    message = refused(tmp_path)
    assert said in message
    assert "Error" not in message


def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert "contradicts itself" in refused(tmp_path)


@pytest.mark.parametrize("names", [(), ("config.json", "README.md")])
def test_a_folder_without_weights_says_what_it_holds(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    message = refused(tmp_path)
    assert "the folder holds no weights" in message
    assert (", ".join(sorted(names)) or "an empty folder") in message


def test_a_folder_of_heads_is_no_base(tmp_path: Path) -> None:
    save_file({"0.0.linear.weight": torch.ones(2, 2)}, tmp_path / "medusa_lm_head.safetensors")
    assert "holds Medusa heads only, not a base model" in refused(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
