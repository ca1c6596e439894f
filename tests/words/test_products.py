"""An edited product is told from one that was only touched, copied or moved, without reading large ones again."""

import hashlib
import os
import shutil

import pytest

from porting_kit import products
from porting_kit.products import describe_products, find_edits, hash_parts

NAMES = ("checkpoint/config.json", "checkpoint/rank0.safetensors")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A run folder with one small file, and one that counts as large, of three parts."""
    monkeypatch.setattr(products, "WHOLE_FILE_BYTES", 64)
    monkeypatch.setattr(products, "PART_BYTES", 1 << 20)
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / NAMES[0]).write_text("{}")
    (folder / NAMES[1]).write_bytes(os.urandom((2 << 20) + 5))
    return folder


@pytest.mark.parametrize("place", [0, (1 << 20) - 1, 1 << 20, (2 << 20) + 4])
def test_one_byte_anywhere_is_an_edit(root, place):
    made = describe_products(root, NAMES)
    content = bytearray((root / NAMES[1]).read_bytes())
    content[place] ^= 1
    (root / NAMES[1]).write_bytes(content)
    assert find_edits(root, made) == ({NAMES[1]: "other content"}, {})


def test_a_small_file_is_read_even_when_its_times_were_put_back(root):
    made = describe_products(root, NAMES)
    (root / NAMES[0]).write_text("[]")
    stat = (root / NAMES[0]).stat()
    made[NAMES[0]] |= {"modified_ns": stat.st_mtime_ns, "changed_ns": stat.st_ctime_ns}
    assert find_edits(root, made)[0] == {NAMES[0]: "other content"}


def test_a_large_file_whose_change_was_dated_back_is_read(root):
    made = describe_products(root, NAMES)
    content = bytearray((root / NAMES[1]).read_bytes())
    content[7] ^= 1
    (root / NAMES[1]).write_bytes(content)
    os.utime(root / NAMES[1], ns=(made[NAMES[1]]["modified_ns"],) * 2)
    assert find_edits(root, made)[0] == {NAMES[1]: "other content"}


def test_a_file_that_is_gone_or_of_another_size_is_an_edit(root):
    made = describe_products(root, NAMES)
    (root / NAMES[0]).unlink()
    (root / NAMES[1]).write_bytes(b"abc")
    assert find_edits(root, made)[0] == {NAMES[0]: "gone", NAMES[1]: f"3 bytes instead of {(2 << 20) + 5}"}


def test_what_was_touched_copied_or_moved_is_what_it_was(root, tmp_path):
    made = describe_products(root, NAMES)
    for name in NAMES:
        os.utime(root / name, ns=(1, 1))
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    for folder in (tmp_path / "copy", root.rename(tmp_path / "moved")):
        edits, renewed = find_edits(folder, made)
        assert (edits, set(renewed)) == ({}, set(NAMES))
        assert find_edits(folder, {**made, **renewed}) == ({}, {})


def test_a_large_file_is_not_read_again_while_its_times_are_the_same(root, monkeypatch):
    made = describe_products(root, NAMES)
    read = []
    monkeypatch.setattr(products, "hash_parts", lambda path: read.append(path.name) or made[NAMES[0]]["sha256"])
    assert find_edits(root, made) == ({}, {})
    assert read == ["config.json"]


def test_folders_are_left_to_their_own_records(root):
    assert describe_products(root, ["checkpoint", "nothing"]) == {}


def test_the_digest_of_a_file_of_one_part_is_its_sha256(tmp_path):
    for content in (b"", b"abc", bytes(3 << 20)):
        (tmp_path / "file").write_bytes(content)
        assert hash_parts(tmp_path / "file") == hashlib.sha256(content).hexdigest()
