"""The port file is read strictly: a wrong key or value is an error that says which and what is near."""

from pathlib import Path

import pytest
import yaml

from porting_kit.errors import PortFileError
from porting_kit.port import load_port, make_port

MINIMAL = {"name": "tiny", "base": "base", "heads": "heads"}


def write(folder: Path, document: object) -> Path:
    file = folder / "port.yaml"
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return file


def test_minimal_port_has_defaults_and_paths_beside_the_file(tmp_path):
    port = load_port(write(tmp_path, MINIMAL))
    assert port.base_path == tmp_path / "base"
    assert port.heads_path == tmp_path / "heads"
    assert (port.dtype, port.kernel, port.source, port.target.tp_size) == ("float16", "exact", "bundled", 1)


def test_an_architecture_file_lies_beside_the_port_file(tmp_path):
    assert load_port(write(tmp_path, MINIMAL)).architecture_path is None
    port = load_port(write(tmp_path, {**MINIMAL, "architecture_file": "rules.py"}))
    assert port.architecture_path == tmp_path / "rules.py"


@pytest.mark.parametrize(
    ("change", "named", "near"),
    [
        ({"kernal": "exact"}, "kernal", "kernel"),
        ({"target": {"tp_sise": 2}}, "target.tp_sise", "target.tp_size"),
        ({"heads": {"path": "h", "used": 2}}, "heads.used", "heads.use"),
    ],
)
def test_misspelt_key_suggests_the_nearest(tmp_path, change, named, near):
    with pytest.raises(PortFileError) as caught:
        load_port(write(tmp_path, MINIMAL | change))
    assert named in caught.value.subject
    assert near in caught.value.expected
    assert "port.yaml" in caught.value.where


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"kernel": "fast"}, "kernel"),
        ({"target": {"compute_capability": "hopper"}}, "target.compute_capability"),
        ({"target": {"kv_cache_type": "int3"}}, "target.kv_cache_type"),
        ({"target": {"compute_capability": "9.²"}}, "target.compute_capability"),
        ({"target": {"max_seq_len": 10**12}}, "target.max_seq_len"),
        ({"kernel": "release:0.11.0\n"}, "kernel"),
        ({"alignment": {"new_tokens": 0}}, "alignment.new_tokens"),
        ({"name": "a/b"}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": " "}, "name"),
        ({"name": "x" * 300}, "name"),
        ({"heads": {"path": "h", "use": True}}, "heads.use"),
        ({"target": {"tp_size": True}}, "target.tp_size"),
        ({"target": None}, "target"),
        ({"alignment": {"batch_sizes": []}}, "alignment.batch_sizes"),
        ({"alignment": {"batch_sizes": [0]}}, "alignment.batch_sizes"),
        ({"alignment": {"near_tie_tolerance": float("inf")}}, "alignment.near_tie_tolerance"),
        ({"alignment": {"prompts": []}}, "'alignment.prompts'"),
        ({"tree": [[0], ["a"]]}, "'tree'"),
        ({"fit": [1]}, "'fit'"),
    ],
)
def test_wrong_value_names_the_field(tmp_path, change, field):
    with pytest.raises(PortFileError) as caught:
        load_port(write(tmp_path, MINIMAL | change))
    assert field in caught.value.subject
    assert caught.value.exit_code == 2


def test_missing_key_is_named(tmp_path):
    with pytest.raises(PortFileError, match="lacks the key 'heads'"):
        load_port(write(tmp_path, {"name": "x", "base": "b"}))


@pytest.mark.parametrize("text", ["a: [", "- a list", "just text"])
def test_not_a_mapping_is_refused(tmp_path, text):
    with pytest.raises(PortFileError):
        load_port(write(tmp_path, text))


def test_absent_file_is_refused(tmp_path):
    with pytest.raises(PortFileError, match="does not exist"):
        load_port(tmp_path / "none.yaml")


def test_overrides_reach_into_sections_and_none_means_unchanged():
    port = make_port(
        MINIMAL, {"target.tp_size": 2, "heads.use": 3, "trtllm.release": "0.11.0", "dtype": None}, folder=Path()
    )
    assert (port.target.tp_size, port.heads.use, port.heads.path) == (2, 3, "heads")
    assert (port.trtllm.release, port.dtype) == ("0.11.0", "float16")


def test_unknown_override_is_refused_with_the_nearest_name():
    with pytest.raises(PortFileError) as caught:
        make_port(MINIMAL, {"tp_sise": 2}, folder=Path())
    assert "target.tp_size" in caught.value.expected


@pytest.mark.parametrize(("written", "kept"), [(9.0, "9.0"), (90, "9.0"), ("sm86", "8.6"), ("sm_100", "10.0")])
def test_compute_capability_spellings(written, kept):
    port = make_port(MINIMAL | {"target": {"compute_capability": written}}, folder=Path())
    assert port.target.compute_capability == kept


def test_yaml_off_is_the_word_off(tmp_path):
    assert load_port(write(tmp_path, "name: x\nbase: b\nheads: h\nfit: off\n")).fit == "off"


def test_package_that_is_not_installed_says_how_to_get_it():
    port = make_port(MINIMAL | {"base": "package:no_such_package/model.gguf"}, folder=Path())
    with pytest.raises(PortFileError) as caught:
        _ = port.base_path
    assert "pip install no-such-package" in caught.value.next_step


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name: a\nname: b\nbase: x\nheads: h\n", "twice"),
        ("name: a\nbase: x\nheads: h\ntarget: {tp: 1, tp: 2}\n", "twice"),
        ("name: a\nbase: x\nheads: h\ntarget: {tp: 1, tp_size: 2}\n", "twice"),
        ("name: a\nbase: x\nheads: h\non: 3\n", "no text"),
        ("name: a\nbase: x\nheads: h\n1: 3\n", "no text"),
        ("name: 2026-13-45\n", "YAML"),
        ("[" * 5000, "YAML"),
    ],
)
def test_keys_and_values_that_yaml_would_let_pass(tmp_path, text, named):
    with pytest.raises(PortFileError) as caught:
        load_port(write(tmp_path, text))
    assert named in str(caught.value)


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "~no-such-user-here/base", "package:"])
def test_a_path_that_no_file_can_have(tmp_path, path):
    with pytest.raises(PortFileError) as caught:
        _ = make_port(MINIMAL | {"base": path}, folder=tmp_path).base_path
    assert "tiny" in caught.value.subject


def test_an_override_inside_a_value_that_is_no_section(tmp_path):
    with pytest.raises(PortFileError, match="no section"):
        make_port(MINIMAL | {"target": 3}, {"target.tp_size": 2}, folder=tmp_path)


@pytest.mark.parametrize("tree", [[[True]], [[0], ["1"]], [[0], [0.0]]])
def test_a_rank_must_be_a_whole_number(tree: list) -> None:
    with pytest.raises(PortFileError, match="unusable value for 'tree'"):
        make_port({"name": "x", "base": "a", "heads": "b", "tree": tree}, folder=Path())


@pytest.mark.parametrize(("override", "value"), [("trtllm.release", 0.11), ("kernel", {"release": None}), ("name", 7)])
def test_text_that_yaml_read_as_something_else_is_to_be_quoted(override, value):
    with pytest.raises(PortFileError) as caught:
        make_port(MINIMAL, {override: value}, folder=Path())
    assert repr(value) in str(caught.value)
    assert f"in quotes: {override}:" in caught.value.next_step


def test_quotes_are_not_advised_where_a_list_was_given():
    with pytest.raises(PortFileError) as caught:
        make_port(MINIMAL, {"kernel": ["exact"]}, folder=Path())
    assert "quotes" not in str(caught.value)
