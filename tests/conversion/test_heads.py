"""Heads of every known layout become the same tensors; what cannot be expressed is refused with the keys seen."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.architectures import read_base_config
from porting_kit.conversion import checkpoint_tensors, convert_checkpoint, read_head_set
from porting_kit.errors import ConversionError, HeadsError
from tests.conversion.rule_models import head_tensors, raw_config, write_model


def as_merged(tensors: dict, prefix: str) -> dict:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def as_vllm(tensors: dict) -> dict:
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[2] == "linear":
            renamed[f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"] = tensor
        else:
            renamed[f"lm_heads.{parts[0]}.weight"] = tensor
    return renamed


def as_trtllm(tensors: dict) -> dict:
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        inner = f"medusa_layers.{parts[1]}.linear.{parts[3]}" if parts[2] == "linear" else "lm_head.weight"
        renamed[f"medusa_heads.{parts[0]}.{inner}"] = tensor
    return renamed


LAYOUTS = {
    "original": lambda t: t,
    "merged into the base": lambda t: as_merged(t, "medusa_head"),
    "ModelOpt": lambda t: as_merged(t, "medusa_heads"),
    "TensorRT-LLM checkpoint": as_trtllm,
    "vLLM": as_vllm,
}


def write_heads(folder: Path, tensors: dict, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "medusa_lm_head.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_model(tmp_path / "base", raw_config("qwen2"))
    return tmp_path / "base"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_every_layout_gives_the_same_tensors(layout: str, num_layers: int, base: Path, tmp_path: Path) -> None:
    tensors = head_tensors(3, num_layers)
    heads = read_head_set(write_heads(tmp_path / "heads", LAYOUTS[layout](tensors)))
    assert (heads.layout, heads.num_heads, heads.num_layers) == (layout, 3, num_layers)
    _, found = checkpoint_tensors(base, heads, "float32")
    for head in range(3):
        for layer in range(num_layers):
            target = f"medusa_heads.{head}.medusa_layers.{layer}.linear"
            assert torch.equal(found[f"{target}.weight"], tensors[f"{head}.{layer}.linear.weight"])
            assert torch.equal(found[f"{target}.bias"], tensors[f"{head}.{layer}.linear.bias"])
        assert torch.equal(found[f"medusa_heads.{head}.lm_head.weight"], tensors[f"{head}.{num_layers}.weight"])


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_both_file_formats_are_read(suffix: str, tmp_path: Path) -> None:
    tensors = head_tensors(3)
    if suffix == "pt":
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    else:
        write_heads(tmp_path, tensors)
    heads = read_head_set(tmp_path)
    assert heads.num_heads == 3
    assert torch.equal(heads.read("medusa_heads.2.lm_head.weight"), tensors["2.1.weight"])


def test_the_oldest_pickle_format_is_read(tmp_path: Path) -> None:
    torch.save(head_tensors(2), tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    assert read_head_set(tmp_path).num_heads == 2


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self):
            return (print, ("this must never run",))

    torch.save({"0.0.linear.weight": Payload()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadsError, match="is not a plain state dict"):
        read_head_set(tmp_path)


def test_a_refused_pickle_brings_no_advice_to_run_its_code(tmp_path: Path) -> None:
    """The oldest format is read by torch, whose message begins with how to switch the protection off."""
    path = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": tmp_path}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(HeadsError, match="is neither a safetensors nor a PyTorch weight file") as caught:
        read_head_set(tmp_path)
    assert "pathlib" in caught.value.found
    assert "weights_only" not in str(caught.value)
    assert "safe_globals" not in str(caught.value)


def test_a_config_named_as_heads_is_told_from_weights(tmp_path: Path) -> None:
    write_heads(tmp_path, head_tensors(2), {"medusa_num_heads": 2})
    with pytest.raises(HeadsError, match=r"config\.json holds settings, not weights") as caught:
        read_head_set(tmp_path / "config.json")
    assert str(tmp_path) in caught.value.next_step


def test_merged_heads_are_read_from_the_base_itself(tmp_path: Path) -> None:
    """One folder holds base and heads; as base it converts without them, as heads it gives them."""
    raw = raw_config("qwen2")
    tensors = write_model(tmp_path / "plain", raw)
    write_model(tmp_path / "merged", raw, tensors | as_merged(head_tensors(2), "medusa_head"))
    heads = read_head_set(tmp_path / "merged")
    assert (heads.layout, heads.num_heads, heads.warnings) == ("merged into the base", 2, ())
    outcome = convert_checkpoint(tmp_path / "merged", tmp_path / "out", heads=heads, dtype="float32")
    assert outcome.config["num_medusa_heads"] == 2
    assert sum(bool(fate.targets) for fate in outcome.sources if fate.name.startswith("medusa_head")) == 6
    alone = convert_checkpoint(tmp_path / "merged", tmp_path / "alone", dtype="float32")
    assert all("Medusa head" in fate.reason for fate in alone.sources if fate.name.startswith("medusa_head"))


def test_heads_without_an_output_matrix_get_the_bases(base: Path, tmp_path: Path) -> None:
    tensors = {name: t for name, t in head_tensors(3).items() if "linear" in name}
    heads = read_head_set(write_heads(tmp_path / "heads", tensors))
    assert not heads.own_output
    assert any("the base's is copied" in warning for warning in heads.warnings)
    outcome = convert_checkpoint(base, tmp_path / "out", heads=heads, dtype="float32", tp_size=2)
    stored = load_file(tmp_path / "out" / "rank1.safetensors")
    for head in range(3):
        assert torch.equal(stored[f"medusa_heads.{head}.lm_head.weight"], stored["lm_head.weight"])
    origins = {origin.name: origin for origin in outcome.targets}
    assert origins["medusa_heads.0.lm_head.weight"].origin == "copied"


@pytest.mark.parametrize("release", ["0.9.0.dev2024022700", "0.13.0.dev2024090300"])
def test_a_base_whose_output_is_its_embedding_lends_that_to_the_heads(release: str, tmp_path: Path) -> None:
    """Gemma's class of 0.11 to 0.16 has no output matrix in its checkpoint; before, the embedding holds a scale."""
    tensors = write_model(tmp_path / "base", raw_config("gemma"))
    alone = {name: t for name, t in head_tensors(2).items() if "linear" in name}
    heads = read_head_set(write_heads(tmp_path / "heads", alone))
    _, found = checkpoint_tensors(tmp_path / "base", heads, "float32", release=release)
    for head in range(2):
        assert torch.equal(found[f"medusa_heads.{head}.lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_missing_biases_become_zeros(base: Path, tmp_path: Path) -> None:
    tensors = {name: t for name, t in as_vllm(head_tensors(2)).items() if not name.endswith("bias")}
    heads = read_head_set(write_heads(tmp_path / "heads", tensors, {"num_heads": 2, "num_hidden_layers": 1}))
    assert any("2 residual layers have no bias" in warning for warning in heads.warnings)
    _, found = checkpoint_tensors(base, heads, "float16")
    assert not found["medusa_heads.1.medusa_layers.0.linear.bias"].any()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"medusa_num_heads": 2}, "the config says 2 heads, the file holds 5; the file counts"),
        ({"num_medusa_heads": 4}, "the config says 4 heads, the file holds 5; the file counts"),
        ({"medusa_num_layers": 3}, "the config says 3 residual layers a head, the file holds 1; the file counts"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, None),
        ({}, None),
    ],
)
def test_the_tensors_count_and_the_config_is_compared(config: dict, said: str | None, tmp_path: Path) -> None:
    heads = read_head_set(write_heads(tmp_path, head_tensors(5), config))
    assert heads.num_heads == 5
    assert heads.warnings == ((said,) if said else ())


def test_fewer_heads_can_be_asked_for(base: Path, tmp_path: Path) -> None:
    heads = read_head_set(write_heads(tmp_path / "heads", head_tensors(5)), use=2)
    assert (heads.num_heads, heads.found_heads) == (2, 5)
    assert heads.warnings == ("2 of 5 heads are used",)
    outcome = convert_checkpoint(base, tmp_path / "out", heads=heads, dtype="float32")
    assert outcome.config["num_medusa_heads"] == 2
    unused = [fate for fate in outcome.sources if fate.reason == "a head that is not used"]
    assert len(unused) == 9


@pytest.mark.parametrize("use", [0, 6])
def test_more_heads_than_exist_are_refused(use: int, tmp_path: Path) -> None:
    write_heads(tmp_path, head_tensors(5))
    with pytest.raises(HeadsError, match=f"{use} heads were asked for"):
        read_head_set(tmp_path, use=use)


def test_gaps_between_heads_are_refused(tmp_path: Path) -> None:
    tensors = {name: t for name, t in head_tensors(4).items() if not name.startswith("2.")}
    with pytest.raises(HeadsError, match="not numbered without gaps") as caught:
        read_head_set(write_heads(tmp_path, tensors))
    assert caught.value.found == "[0, 1, 3]; missing [2]"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["1.0.linear", "1.1.linear", "0.0.linear"])
def test_gaps_between_layers_are_refused(name: str, layout: str, tmp_path: Path) -> None:
    tensors = head_tensors(2, 2)
    del tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    with pytest.raises(HeadsError, match="do not all have the same residual layers"):
        read_head_set(write_heads(tmp_path, LAYOUTS[layout](tensors)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize(
    ("gone", "added", "said"),
    [
        ("2.0.linear.weight", None, "1 biases of the heads have no weight beside them"),
        ("0.0.linear.weight", None, "1 biases of the heads have no weight beside them"),
        (None, "7.0.linear.bias", "1 biases of the heads have no weight beside them"),
        (None, "0.1.linear.bias", "1 biases of the heads have no weight beside them"),
        ("1.0.linear.bias", None, "some residual layers have a bias and some have none"),
        ("2.0.linear.bias", None, "some residual layers have a bias and some have none"),
        (None, "0.0.linear.scale", "1 tensors of the head file fit no place"),
    ],
)
def test_a_tensor_that_lacks_its_like_is_refused_by_name(
    gone: str | None, added: str | None, said: str, own_output: bool, layout: str, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in head_tensors(3).items() if own_output or "linear" in name}
    if gone:
        odd = gone.replace("bias", "weight") if gone.endswith("bias") else gone.replace("weight", "bias")
        del tensors[gone]
    else:
        odd, tensors[added] = added, torch.ones(32)
    with pytest.raises(HeadsError, match=said) as caught:
        read_head_set(write_heads(tmp_path, LAYOUTS[layout](tensors)))
    assert caught.value.items == tuple(LAYOUTS[layout]({odd: None}))


def test_a_name_with_zeros_before_its_number_takes_no_other_tensors_place(tmp_path: Path) -> None:
    tensors = head_tensors(2) | {"00.0.linear.weight": torch.ones(32, 32)}
    with pytest.raises(HeadsError, match="1 tensors of the head file fit no place") as caught:
        read_head_set(write_heads(tmp_path, tensors))
    assert caught.value.items == ("00.0.linear.weight",)


def test_a_second_bias_of_a_block_used_twice_is_refused(tmp_path: Path) -> None:
    tensors = {name.replace(".1.weight", ".2.weight"): tensor for name, tensor in head_tensors(2).items()}
    assert read_head_set(write_heads(tmp_path, tensors)).num_layers == 2
    tensors["0.1.linear.bias"] = torch.ones(32)
    with pytest.raises(HeadsError, match="1 tensors of the head file fit no place") as caught:
        read_head_set(write_heads(tmp_path, tensors))
    assert caught.value.items == ("0.1.linear.bias",)


@pytest.mark.parametrize(
    "stray", ["medusa_head.0.norm.weight", "medusa_head.0.0.linear.scale", "medusa_head.00.0.weight"]
)
def test_a_stray_head_tensor_among_the_bases_own_is_refused(stray: str, tmp_path: Path) -> None:
    raw = raw_config("qwen2")
    merged = write_model(tmp_path / "plain", raw) | as_merged(head_tensors(2), "medusa_head")
    write_model(tmp_path / "merged", raw, merged | {stray: torch.ones(32)})
    with pytest.raises(HeadsError, match="1 tensors of the head file fit no place") as caught:
        read_head_set(tmp_path / "merged")
    assert caught.value.items == (stray,)


def test_a_stray_tensor_beside_heads_without_a_base_is_refused(tmp_path: Path) -> None:
    """In a layout that may lie inside a base, a file of heads alone has no base that the tensor could belong to."""
    tensors = as_merged(head_tensors(2), "medusa_heads") | {"3.0.linear.weight": torch.ones(32, 32)}
    with pytest.raises(HeadsError, match="1 tensors of the head file fit no place") as caught:
        read_head_set(write_heads(tmp_path, tensors))
    assert caught.value.items == ("3.0.linear.weight",)


def test_the_bases_matrix_in_a_file_of_heads_is_said(tmp_path: Path) -> None:
    tensors = as_vllm(head_tensors(2)) | {"lm_head.weight": torch.ones(40, 32)}
    assert read_head_set(write_heads(tmp_path, tensors)).warnings == (
        "the file's lm_head.weight is the base's output matrix and is left; the base's own is used",
    )


@pytest.mark.parametrize("layout", ["original", "merged into the base"])
def test_a_name_that_counts_absurdly_many_layers_is_refused(layout: str, tmp_path: Path) -> None:
    """A block that is used several times is stored once, and the output's number says how often."""
    tensors = head_tensors(2)
    tensors["0.65.weight"] = tensors.pop("0.1.weight")
    with pytest.raises(HeadsError, match="head 1 uses its one residual block 65 times") as caught:
        read_head_set(write_heads(tmp_path, LAYOUTS[layout](tensors)))
    assert str(tmp_path) in str(caught.value)
    assert "0.65.weight" in str(caught.value)


def test_one_head_without_output_matrix_is_refused(tmp_path: Path) -> None:
    tensors = head_tensors(2)
    del tensors["1.1.weight"]
    with pytest.raises(HeadsError, match="some heads have an output matrix of their own and some have none"):
        read_head_set(write_heads(tmp_path, tensors))


def test_an_unknown_layout_lists_the_keys_seen(tmp_path: Path) -> None:
    tensors = {f"heads.{k}.fc.weight": torch.ones(32, 32) for k in range(3)}
    with pytest.raises(HeadsError, match="the layout of the heads is not known") as caught:
        read_head_set(write_heads(tmp_path, tensors))
    assert caught.value.items == tuple(sorted(tensors))


def test_left_over_tensors_are_refused(tmp_path: Path) -> None:
    tensors = head_tensors(2) | {"0.0.norm.weight": torch.ones(32)}
    with pytest.raises(HeadsError, match="1 tensors of the head file fit no place") as caught:
        read_head_set(write_heads(tmp_path, tensors))
    assert caught.value.items == ("0.0.norm.weight",)


def test_a_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    tensors = as_vllm(head_tensors(1, vocab=20)) | {"token_map": torch.arange(20)}
    with pytest.raises(HeadsError, match="reduced vocabulary, which TensorRT-LLM's Medusa cannot express"):
        read_head_set(write_heads(tmp_path, tensors))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden": 48}, "another hidden size"),
        ({"vocab": 36}, "different vocabularies"),
        ({"vocab": 30}, "the heads lack 7 rows"),
        ({"vocab": 44}, "the base lacks 7 rows"),
    ],
)
def test_heads_of_another_base_are_refused(sizes: dict, said: str, base: Path, tmp_path: Path) -> None:
    heads = read_head_set(write_heads(tmp_path / "heads", head_tensors(2, **sizes)))
    with pytest.raises(HeadsError, match=said):
        convert_checkpoint(base, tmp_path / "out", heads=heads)
    assert not (tmp_path / "out").exists()


def test_the_odd_file_is_named(base: Path, tmp_path: Path) -> None:
    heads = read_head_set(write_heads(tmp_path / "heads", head_tensors(2, vocab=36)))
    with pytest.raises(HeadsError) as caught:
        convert_checkpoint(base, tmp_path / "out", heads=heads)
    assert caught.value.next_step.startswith("the heads lack 1 rows")


def test_two_files_that_disagree_are_refused(tmp_path: Path) -> None:
    tensors = head_tensors(2)
    write_heads(tmp_path, tensors)
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    assert read_head_set(tmp_path).num_heads == 2  # the same content twice is no conflict
    tensors["1.1.weight"] = tensors["1.1.weight"] + 1
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadsError, match="hold different heads") as caught:
        read_head_set(tmp_path)
    assert caught.value.items == ("1.1.weight",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t["0.0.linear.bias"].fill_(float("nan")), "a head tensor is not finite"),
        (lambda t: t["1.1.weight"].fill_(float("-inf")), "a head tensor is not finite"),
        (lambda t: t["1.1.weight"].zero_(), "the output matrix of head 2 is all zero"),
    ],
)
def test_damaged_values_are_refused(change, said: str, tmp_path: Path) -> None:
    tensors = head_tensors(2)
    change(tensors)
    write_heads(tmp_path, tensors)
    with pytest.raises(HeadsError, match=said):
        read_head_set(tmp_path)
    assert read_head_set(tmp_path, check_values=False).num_heads == 2


def test_untrained_and_doubled_heads_are_said(tmp_path: Path) -> None:
    tensors = head_tensors(3)
    for part in ("0.linear.weight", "0.linear.bias", "1.weight"):
        tensors[f"2.{part}"] = tensors[f"0.{part}"].clone()
    tensors["1.0.linear.weight"].zero_()
    assert read_head_set(write_heads(tmp_path, tensors)).warnings == (
        "head 2: its residual layers are all zero, as before training",
        "heads 1 and 3 are identical",
    )


def test_head_values_beyond_the_dtype_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = head_tensors(1)
    tensors["0.1.weight"][0, 0] = 1e6
    heads = read_head_set(write_heads(tmp_path / "heads", tensors))
    with pytest.raises(ConversionError, match=r"medusa_heads.0.lm_head.weight does not fit float16"):
        convert_checkpoint(base, tmp_path / "out", heads=heads, dtype="float16")


def test_swapped_folders_are_told_apart(base: Path, tmp_path: Path) -> None:
    from porting_kit.errors import BaseModelError

    stated = {"medusa_num_heads": 2, "base_model_name_or_path": "/data/exp/old_run"}
    write_heads(tmp_path / "heads", head_tensors(2), stated)
    with pytest.raises(BaseModelError, match="holds Medusa heads only"):
        convert_checkpoint(tmp_path / "heads", tmp_path / "out", heads=base)
    with pytest.raises(HeadsError, match="holds a base model and no Medusa heads"):
        read_head_set(base)
    heads = read_head_set(tmp_path / "heads")  # the stored path is noted, never followed
    assert heads.stated["base_model_name_or_path"] == "/data/exp/old_run"


@pytest.mark.parametrize(
    ("stated", "warned"),
    [
        ("/data/exp/old_run", True),
        ("someone/Base", False),
        ("/elsewhere/base/", False),
        ("acme/tiny-1b", False),
        (None, False),
    ],
)
def test_heads_of_a_base_by_another_name_are_said(stated: str | None, warned: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("qwen2", _name_or_path="acme/tiny-1B"))
    write_heads(tmp_path / "heads", head_tensors(1), {"base_model_name_or_path": stated})
    outcome = convert_checkpoint(tmp_path / "base", tmp_path / "out", heads=tmp_path / "heads", dtype="float32")
    assert any(f"names the base {stated}" in warning for warning in outcome.warnings) == warned


@pytest.mark.parametrize(
    ("base", "stated", "warned"),
    [
        ("Llama-3.1-8B/config.json", "Llama-3.1-8B", False),
        ("Llama-3.1-8B/config.json", "Llama-3", True),
        ("bloom-mini/base/config.json", "bloom-mini", False),
        ("bloom-mini/base/config.json", "bloom-7b1", True),
        ("bloom-mini/final/config.json", "bloom-mini", True),
        ("models/Llama-3.1-8B.Q4_1.gguf", "Llama-3.1-8B.Q4_1", False),
        ("models/Llama-3.1-8B.Q4_1.gguf", "someone/Llama-3.1-8B", False),
        ("models/Llama-3.1-8B-BF16.gguf", "Llama-3.1-8B", False),
        ("Llama-3.1-8B/model.gguf", "Llama-3.1-8B", False),
        ("models/Llama-3.1-8B.Q4_1.gguf", "Llama-3", True),
    ],
)
def test_a_base_is_known_by_its_whole_name(base: str, stated: str, warned: bool, tmp_path: Path) -> None:
    write_heads(tmp_path, head_tensors(1), {"base_model_name_or_path": stated})
    config = replace(read_base_config(raw_config("qwen2")), where=f"/models/{base}")
    assert bool(read_head_set(tmp_path).compare_base(config)) == warned


def test_a_pointer_in_place_of_heads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(HeadsError, match="is a 63-byte pointer, not weights"):
        read_head_set(tmp_path)


def test_headers_are_read_without_torch(base: Path, tmp_path: Path) -> None:
    """A verdict before anything heavy: configs, weight names and head counts without torch or transformers."""
    write_heads(tmp_path / "heads", head_tensors(2))
    torch.save(head_tensors(3), tmp_path / "medusa_lm_head.pt")
    script = f"""
import sys
from porting_kit.architectures import read_base_config
from porting_kit.conversion import open_tensor_source, plan_conversion, read_head_set
source = open_tensor_source({str(base)!r})
heads = read_head_set({str(tmp_path / "heads")!r}, check_values=False)
assert read_head_set({str(tmp_path / "medusa_lm_head.pt")!r}, check_values=False).num_heads == 3
plan = plan_conversion(read_base_config({str(base)!r}), source, heads=heads)
assert plan.world_size == 1 and heads.num_heads == 2
print(sorted(name for name in ("torch", "transformers", "numpy", "safetensors") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
