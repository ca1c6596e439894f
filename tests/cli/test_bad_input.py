"""Bad input gets a clear error and exit code 2, and leaves no checkpoint behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.port import load_port
from porting_kit.steps.preflight import check_port
from tests.cli.conftest import PortFolder, make_heads
from tests.cli.test_commands import call

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456789\n"


def point_nowhere(port: PortFolder) -> None:
    port.edit_port(base="no_such_folder")


def swap_folders(port: PortFolder) -> None:
    port.edit_port(base="heads", heads="base")


def name_the_base_as_heads(port: PortFolder) -> None:
    port.edit_port(heads="base")


def name_no_prompts_file(port: PortFolder) -> None:
    port.edit_port(alignment={"prompts": "nowhere.txt"})


def name_weights_as_prompts(port: PortFolder) -> None:
    port.edit_port(alignment={"prompts": "base/model.safetensors"})


def bring_nothing_back(port: PortFolder) -> None:
    port.edit_port(engine="captured", alignment={"captured": "output.npy"})


def write_header(file: Path, header: object) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def leave_a_header_without_shapes(port: PortFolder) -> None:
    write_header(port.weights_file, {"transformer.ln_f.weight": {"dtype": "F32", "data_offsets": [0, 4]}})


def leave_a_list_for_a_header(port: PortFolder) -> None:
    write_header(port.weights_file, [1, 2])


def nest_the_config(port: PortFolder) -> None:
    (port.base / "config.json").write_text("[" * 100_000)


def number_a_head_high(port: PortFolder) -> None:
    save_file({name.replace("1.0.", "99999999999.0."): item for name, item in make_heads().items()}, port.heads_file)


def flatten_a_head(port: PortFolder) -> None:
    tensors = make_heads()
    tensors["0.0.linear.weight"] = torch.tensor(1.0)
    save_file(tensors, port.heads_file)


def store_heads_as_numbers(port: PortFolder) -> None:
    save_file({name: tensor.to(torch.int8) for name, tensor in make_heads().items()}, port.heads_file)


def store_one_bias_as_switches(port: PortFolder) -> None:
    save_file({**make_heads(), "1.0.linear.bias": torch.zeros(32, dtype=torch.bool)}, port.heads_file)


def let_two_tensors_overlap(port: PortFolder) -> None:
    """Both have the right size, and one begins inside the other."""
    data = port.weights_file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name in ("transformer.h.0.mlp.dense_h_to_4h.bias", "transformer.h.1.mlp.dense_h_to_4h.bias"):
        first, last = header[name]["data_offsets"]
        header[name]["data_offsets"] = [first - 4, last - 4]
    text = json.dumps(header).encode()
    port.weights_file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def name_a_base_checkpoint_that_is_none(port: PortFolder) -> None:
    port.edit_port(base_checkpoint="base")


def name_a_base_checkpoint_of_other_ranks(port: PortFolder) -> None:
    from porting_kit.conversion import convert_checkpoint

    convert_checkpoint(port.base, port.root / "upstream", dtype="float32", tp_size=2)
    port.edit_port(base_checkpoint="upstream", dtype="float32")


def leave_a_pointer(port: PortFolder) -> None:
    port.weights_file.write_text(POINTER)


def cut_the_weights(port: PortFolder) -> None:
    port.weights_file.write_bytes(port.weights_file.read_bytes()[:-1024])


def name_a_missing_shard(port: PortFolder) -> None:
    index = {"metadata": {}, "weight_map": {"transformer.ln_f.weight": "model-00002-of-00002.safetensors"}}
    port.weights_file.unlink()
    (port.base / "model.safetensors.index.json").write_text(json.dumps(index))


def poison_a_head(port: PortFolder) -> None:
    tensors = make_heads()
    tensors["1.0.linear.weight"][3, 4] = float("nan")
    save_file(tensors, port.heads_file)


def shrink_the_heads(port: PortFolder) -> None:
    save_file(make_heads(hidden=24), port.heads_file)


def skip_a_head(port: PortFolder) -> None:
    save_file({name.replace("1.0.", "3.0."): tensor for name, tensor in make_heads().items()}, port.heads_file)


def ask_for_too_many_heads(port: PortFolder) -> None:
    port.edit_port(heads={"path": "heads", "use": 5})


def untie_without_a_head(port: PortFolder) -> None:
    port.edit_config(lambda config: config.update(tie_word_embeddings=False))


def plant_nothing(port: PortFolder) -> None:
    port.edit_port(tree=[])


def list_numbers_for_a_tree(port: PortFolder) -> None:
    port.edit_port(tree=[1, 7, 6])


def grow_too_deep(port: PortFolder) -> None:
    port.edit_port(tree=[[0], [0, 0], [0, 0, 0]])


def skip_a_rank(port: PortFolder) -> None:
    port.edit_port(tree=[[0], [2]])


def name_no_tree_source(port: PortFolder) -> None:
    port.edit_port(trtllm=str(port.base))


def ask_for_an_unknown_release(port: PortFolder) -> None:
    port.edit_port(kernel="release:0.3.0")


def misspell_a_key(port: PortFolder) -> None:
    port.edit_port(heds="heads")


FAULTS: dict[Callable[[PortFolder], None], str] = {
    point_nowhere: "no_such_folder",
    swap_folders: "heads",
    name_the_base_as_heads: "base model",
    name_no_prompts_file: "prompts file",
    name_weights_as_prompts: "UTF-8",
    bring_nothing_back: "captured file",
    leave_a_header_without_shapes: "damaged",
    leave_a_list_for_a_header: "damaged",
    nest_the_config: "config.json",
    number_a_head_high: "without gaps",
    flatten_a_head: "no matrices",
    store_heads_as_numbers: "int8",
    store_one_bias_as_switches: "bool",
    let_two_tensors_overlap: "overlap",
    name_a_base_checkpoint_that_is_none: "no TensorRT-LLM checkpoint",
    name_a_base_checkpoint_of_other_ranks: "another tp_size",
    leave_a_pointer: "pointer",
    cut_the_weights: "model.safetensors",
    name_a_missing_shard: "model-00002-of-00002",
    poison_a_head: "finite",
    shrink_the_heads: "24",
    skip_a_head: "head",
    ask_for_too_many_heads: "5",
    untie_without_a_head: "lm_head",
    plant_nothing: "tree",
    list_numbers_for_a_tree: "cartesian:7,6",
    grow_too_deep: "3 levels",
    skip_a_rank: "rank",
    name_no_tree_source: "tensorrt_llm",
    ask_for_an_unknown_release: "0.3.0",
    misspell_a_key: "heads",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_convert_or_preflight_refuses(port: PortFolder, fault, tmp_path):
    fault(port)
    out = tmp_path / "run"
    # Values are not read by preflight, and convert does not judge kernels.
    command = "convert" if fault is poison_a_head else "preflight"
    code, document, stderr = call(command, port.file, "--out", out)
    assert code == 2, stderr
    assert FAULTS[fault] in json.dumps(document["error"])
    assert document["error"]["subject"]
    assert document["verdict"] != "pass"
    assert not (out / "checkpoint").exists()
    assert not list(out.glob("*/outcome.json"))


def test_an_override_that_yaml_cannot_read_is_refused(port: PortFolder):
    code, document, _ = call("preflight", port.file, "-p", "name=2026-13-45")
    assert code == 2
    assert "2026-13-45" in document["error"]["found"]


def test_an_override_replaces_a_field_however_the_file_spells_it(port: PortFolder):
    port.edit_port(target={"compute_capability": "8.0"})
    code, document, _ = call("preflight", port.file, "-p", "target.sm=90")
    assert code == 0, document


def test_a_model_known_by_its_tensors_alone_is_converted_as_it_is_preflighted(port: PortFolder, tmp_path):
    port.edit_config(lambda config: config.update(architectures=["NopeForCausalLM"], model_type="nope"))
    out = tmp_path / "run"
    assert call("preflight", port.file)[0] == 0
    assert call("convert", port.file, "--out", out)[0] == 0
    assert call("build", port.file, "--plan-only", "--out", out)[0] == 0


def test_an_incomplete_checkpoint_is_not_compared(port: PortFolder, tmp_path):
    assert call("convert", port.file, "--out", tmp_path / "run")[0] == 0
    checkpoint = tmp_path / "run" / "checkpoint"
    assert call("compare", checkpoint, checkpoint)[0] == 0
    (checkpoint / "rank0.safetensors").rename(checkpoint / "rank1.safetensors")
    code, document, _ = call("compare", checkpoint, checkpoint)
    assert code == 2
    assert "rank0.safetensors" in document["error"]["expected"]


def test_checkpoints_without_tensors_are_not_compared(port: PortFolder, tmp_path):
    """Nothing equals nothing: that must not pass for two checkpoints that are the same."""
    assert call("convert", port.file, "--out", tmp_path / "run")[0] == 0
    checkpoint = tmp_path / "run" / "checkpoint"
    save_file({}, checkpoint / "rank0.safetensors")
    code, document, _ = call("compare", checkpoint, checkpoint)
    assert code == 2
    assert "holds no tensors" in document["error"]["subject"]


def test_the_disk_that_is_judged_is_that_of_the_run_folder(port: PortFolder, tmp_path, monkeypatch):
    """The working directory may lie on another disk; a run folder that is not there yet is judged by its parent."""
    import shutil
    from collections import namedtuple

    asked, usage = [], namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(Path(path)) or usage(10, 10, 0))
    code, document, _ = call("preflight", port.file, "--out", tmp_path / "run")
    assert (code, document["failing_gate"]) == (1, "disk")
    assert asked == [tmp_path / "run"]
    check_port(load_port(port.file))
    assert asked[1:] == [Path()]
    (tmp_path / "runs").mkdir()
    check_port(load_port(port.file))
    assert asked[2:] == [Path("runs")]
    call("preflight", port.file)
    assert asked[3:] == [tmp_path / "runs" / "tiny"]


def test_preflight_of_a_port_with_a_base_checkpoint_passes_for_a_right_one(port: PortFolder):
    from porting_kit.conversion import convert_checkpoint

    convert_checkpoint(port.base, port.root / "upstream", dtype="float32")
    port.edit_port(base_checkpoint="upstream", dtype="float32")
    assert call("preflight", port.file)[0] == 0


def test_a_head_count_that_lies_is_said_and_the_tensors_win(port: PortFolder, tmp_path):
    (port.heads / "config.json").write_text(json.dumps({"medusa_num_heads": 5, "medusa_num_layers": 1}))
    code, document, _ = call("convert", port.file, "--out", tmp_path / "run")
    assert code == 0
    assert document["figures"]["heads"] == 2
    assert any("5" in warning for warning in document["figures"]["warnings"])


def test_an_output_folder_with_other_content_is_left_alone(port: PortFolder, tmp_path):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    code, document, _ = call("convert", port.file, "--out", out)
    assert code == 2
    assert "thesis.txt" in document["error"]["found"]
    assert [item.name for item in out.iterdir()] == ["thesis.txt"]


def test_a_failed_conversion_keeps_the_checkpoint_of_the_last_good_one(port: PortFolder, tmp_path):
    out = tmp_path / "run"
    assert call("convert", port.file, "--out", out)[0] == 0
    before = load_file(out / "checkpoint" / "rank0.safetensors")
    poison_a_head(port)
    assert call("convert", port.file, "--out", out)[0] == 2
    after = load_file(out / "checkpoint" / "rank0.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    # The old checkpoint is whole, and still no later step takes it for the result of today's inputs.
    code, document, _ = call("align", port.file, "--out", out)
    assert code == 2
    assert "finite" in json.dumps(document)


def cut_the_checkpoint(out: Path) -> None:
    shard = out / "checkpoint" / "rank0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def cut_the_checkpoints_config(out: Path) -> None:
    config = out / "checkpoint" / "config.json"
    config.write_text(config.read_text()[:-30])


def remove_the_checkpoint(out: Path) -> None:
    shutil.rmtree(out / "checkpoint")


def leave_python_from_the_module(out: Path) -> None:
    (out / "patched" / "medusa_bloom.py").write_text("raise SystemExit(0)\n")


def break_the_modules_syntax(out: Path) -> None:
    (out / "patched" / "medusa_bloom.py").write_text("def forward(:\n")


def remove_the_module(out: Path) -> None:
    (out / "patched" / "medusa_bloom.py").unlink()


PRODUCT_FAULTS: dict[Callable[[Path], None], str] = {
    cut_the_checkpoint: "damaged",
    cut_the_checkpoints_config: "damaged",
    remove_the_checkpoint: "the run folder holds no checkpoint",
    leave_python_from_the_module: "SystemExit",
    break_the_modules_syntax: "SyntaxError",
    remove_the_module: "medusa_bloom.py",
}


@pytest.mark.parametrize("fault", PRODUCT_FAULTS, ids=lambda fault: fault.__name__)
def test_align_refuses_products_that_were_damaged_since(port: PortFolder, tmp_path, fault):
    out = tmp_path / "run"
    for step in ("patch", "convert"):
        assert call(step, port.file, "--out", out)[0] == 0
    fault(out)
    code, document, stderr = call("align", port.file, "--out", out)
    assert code == 2, stderr
    assert "was edited since" in document["error"]["subject"]
    code, document, stderr = call("align", port.file, "--out", out, "--edited")
    assert code == 2, stderr
    assert PRODUCT_FAULTS[fault] in json.dumps(document["error"])
    assert not (out / "align" / "outcome.json").exists()
