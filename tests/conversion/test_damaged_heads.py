"""Whatever byte of a head file is damaged: the project's error, or the same tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from porting_kit.cli import app
from porting_kit.conversion import pickle_files, read_head_set
from porting_kit.errors import HeadsError, PortingKitError
from tests.conversion.rule_models import head_tensors, raw_config, write_model

DAMAGES = 300
FORMATS = {"zip": "pt", "legacy": "pt", "safetensors": "safetensors"}


def save_heads(file: Path, tensors: Any, kind: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file, _use_new_zipfile_serialization=kind == "zip")
    return file


def damage(content: bytes, kind: str, seed: int) -> Iterator[bytes]:
    """A byte flipped, a piece taken out, the end cut off: at seeded places.

    Only the zip format has checksums. A changed value of the others is a value like any other, so their values stay.
    """
    chance = random.Random(seed)
    values = {"zip": 0, "legacy": content.rfind(b"].") + 2, "safetensors": 8 + int.from_bytes(content[:8], "little")}
    end = values[kind] or len(content)
    for number in range(DAMAGES):
        place = chance.randrange(end)
        length = 1 if number % 4 else chance.randrange(1, 20)
        if number % 10 == 9:
            yield content[: chance.randrange(len(content))]
        elif number % 4:
            yield content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
        else:
            yield content[:place] + content[place + length :]


def find_faults(folder: Path, kind: str, seed: int = 1) -> list[str]:
    """Damages that end in another error than the project's, in one without its fields, or in other tensors."""
    tensors = head_tensors(2, hidden=8, vocab=12)
    file = save_heads(folder / f"medusa_lm_head.{FORMATS[kind]}", tensors, kind)
    before = read_head_set(file).origins
    faults = []
    for number, content in enumerate(damage(file.read_bytes(), kind, seed)):
        file.write_bytes(content)
        try:
            heads = read_head_set(file)
        except PortingKitError as problem:
            if not (problem.subject and problem.expected and problem.where and problem.next_step):
                faults.append(f"damage {number}: {problem}")
            continue
        except Exception as problem:
            faults.append(f"damage {number}: {problem!r}")
            continue
        if (
            kind == "legacy"
        ):  # a byte of its pickle may say other strides, or another byte order: torch's reading counts
            tensors = torch.load(file, weights_only=True)
        same = heads.origins == before and all(
            torch.equal(heads.read(name), tensors[origin]) for name, origin in before.items()
        )
        if not same:
            faults.append(f"damage {number}: other tensors")
    return faults


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_gives_the_projects_error_or_the_same_tensors(kind: str, tmp_path: Path) -> None:
    assert find_faults(tmp_path, kind) == []


def test_a_reader_that_ignores_checksums_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_files._Parts, "checksum", lambda *_: None)
    assert any("other tensors" in fault for fault in find_faults(tmp_path, "zip"))


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 0xFF
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (b"data.pkl", "the checksum of medusa_lm_head/data.pkl is not the file's"),
        (b"PK\x01\x02", "Bad magic number for central directory"),
        (b"PK\x05\x06", "a zip without the directory at its end: the file is cut short or damaged"),
    ],
)
def test_damage_of_a_zip_is_said_with_its_cause(part: bytes, said: str, tmp_path: Path) -> None:
    file = save_heads(tmp_path / "medusa_lm_head.pt", head_tensors(2), "zip")
    place = file.read_bytes().find(part)
    flip(file, place + 80 if part == b"data.pkl" else place)
    with pytest.raises(HeadsError, match="or is damaged") as caught:
        read_head_set(file, check_values=False)
    assert caught.value.found == said


@pytest.mark.parametrize("turned", [False, True])
def test_a_changed_value_in_a_zip_is_refused(turned: bool, tmp_path: Path) -> None:
    """Read where it lies, and read by torch, which looks at no checksum."""
    tensors = head_tensors(2)
    if turned:
        tensors = {name: tensor.T.contiguous().T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    file = save_heads(tmp_path / "medusa_lm_head.pt", tensors, "zip")
    flip(file, file.read_bytes().find(tensors["1.1.weight"].T.contiguous().numpy().tobytes()[:16] if turned
                                      else tensors["1.1.weight"].numpy().tobytes()[:16]))  # fmt: skip
    with pytest.raises(HeadsError, match="damaged"):
        read_head_set(file)


def test_a_zip_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        file = save_heads(tmp_path / "medusa_lm_head.pt", head_tensors(2), "zip")
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_head_set(file).num_heads == 2


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([torch.ones(2)], "list"),
        (torch.ones(2), "Tensor"),
        ({"state_dict": [torch.ones(2)]}, "list"),
        ({"0.0.linear.weight": torch.ones(2, 2), "epoch": 3}, "1 of 2 are something else"),
    ],
)
def test_a_pickle_of_anything_but_tensors_by_name_is_refused(
    content: object, found: str, kind: str, tmp_path: Path
) -> None:
    file = save_heads(tmp_path / "medusa_lm_head.pt", content, kind)
    with pytest.raises(HeadsError, match="is not a plain state dict") as caught:
        read_head_set(file)
    assert caught.value.found.lstrip("_") == found


@pytest.mark.parametrize(
    ("tensor", "said"), [(torch.eye(4).to_sparse(), "torch.sparse_coo"), (torch.eye(4) + 0j, "complex64")]
)
def test_a_tensor_that_no_weight_is_like_is_refused_by_name(tensor: torch.Tensor, said: str, tmp_path: Path) -> None:
    file = save_heads(tmp_path / "medusa_lm_head.pt", {"0.0.linear.weight": tensor}, "legacy")
    with pytest.raises(HeadsError, match="is not a plain state dict") as caught:
        read_head_set(file)
    assert caught.value.items == (f"0.0.linear.weight: {said}",)


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_state_dict_inside_another_is_read(kind: str, tmp_path: Path) -> None:
    tensors = head_tensors(2)
    heads = read_head_set(save_heads(tmp_path / "medusa_lm_head.pt", {"state_dict": tensors}, kind))
    assert torch.equal(heads.read("medusa_heads.1.lm_head.weight"), tensors["1.1.weight"])


@pytest.mark.parametrize("command", ["preflight", "convert"])
@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_commands_refuse_damaged_heads(command: str, kind: str, tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("qwen2"))
    content = head_tensors(2) if kind == "zip" else [torch.ones(2)]
    file = save_heads(tmp_path / "heads" / "medusa_lm_head.pt", content, kind)
    if kind == "zip":
        flip(file, file.read_bytes().find(b"data.pkl") + 80)
    port = tmp_path / "port.yaml"
    port.write_text(f"name: damaged\nbase: {tmp_path}/base\nheads: {tmp_path}/heads\ntrtllm: bundled\ntree: small_3\n")
    result = CliRunner().invoke(app, [command, str(port), "--out", str(tmp_path / "run")])
    assert result.exit_code == 2, result.output
    assert "next step" in result.output
