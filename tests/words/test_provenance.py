"""Fingerprints change when content does, and not otherwise."""

import os

from porting_kit.provenance import describe_environment, fingerprint_path, hash_value


def test_fingerprint_follows_content(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"one")
    first = fingerprint_path(tmp_path)
    assert fingerprint_path(tmp_path) == first
    file.write_bytes(b"two")
    assert fingerprint_path(tmp_path) != first
    assert fingerprint_path(tmp_path / "none") == "absent"


def test_large_file_is_told_by_its_ends_its_size_and_its_time(tmp_path):
    file = tmp_path / "large.bin"
    file.write_bytes(bytes(3 << 20))
    os.utime(file, ns=(0, 0))
    first = fingerprint_path(file)
    file.write_bytes(bytes(3 << 20)[:-1] + b"x")
    os.utime(file, ns=(0, 0))
    assert fingerprint_path(file) != first


def test_value_hash_ignores_key_order():
    assert hash_value({"a": 1, "b": 2}) == hash_value({"b": 2, "a": 1}) != hash_value({"a": 2, "b": 1})


def test_environment_names_versions():
    assert describe_environment()["porting-kit"] != "not installed"
