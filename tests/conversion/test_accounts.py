"""The accounts close on both sides: delete, add, reshape one tensor and see three different errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.architectures import read_base_config
from porting_kit.conversion import (
    UnevenRanks,
    checkpoint_tensors,
    convert_checkpoint,
    open_tensor_source,
    plan_conversion,
)
from porting_kit.conversion.plan import MissingTensors, ShapeMismatch, SurplusTensors
from porting_kit.errors import BaseModelError, CheckpointError, ConversionError
from tests.conversion.rule_models import head_tensors, random_tensors, raw_config, write_model

DOWN = "model.layers.1.mlp.down_proj.weight"


def convert(folder: Path, **options):
    options.setdefault("dtype", "float32")
    return convert_checkpoint(folder / "base", folder / "out", **options)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    raw = raw_config("llama")
    tensors = random_tensors(read_base_config(raw))
    del tensors[DOWN]
    write_model(tmp_path / "base", raw, tensors)
    with pytest.raises(MissingTensors, match=r"1 tensors that llama needs are missing") as caught:
        convert(tmp_path)
    assert caught.value.items == (DOWN,)


def test_a_surplus_tensor_is_named(tmp_path: Path) -> None:
    raw = raw_config("llama")
    tensors = random_tensors(read_base_config(raw))
    write_model(tmp_path / "base", raw, tensors | {"model.layers.1.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(SurplusTensors, match="have no place in TensorRT-LLM's LlamaForCausalLM") as caught:
        convert(tmp_path)
    assert caught.value.items == ("model.layers.1.self_attn.q_norm.weight [8]",)


def test_another_shape_is_named(tmp_path: Path) -> None:
    raw = raw_config("llama")
    tensors = random_tensors(read_base_config(raw))
    tensors[DOWN] = tensors[DOWN].T.contiguous()
    write_model(tmp_path / "base", raw, tensors)
    with pytest.raises(ShapeMismatch, match="1 tensors have other shapes than the config says") as caught:
        convert(tmp_path)
    assert caught.value.items == (f"{DOWN} [48, 32] instead of [32, 48]",)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    raw = raw_config("llama")
    tensors = random_tensors(read_base_config(raw))
    tensors[DOWN][3, 4] = float("nan")  # found in the middle of writing
    write_model(tmp_path / "base", raw, tensors)
    with pytest.raises(ConversionError, match="holds inf or nan"):
        convert(tmp_path)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match="holds inf or nan"):
        convert(tmp_path)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_every_source_has_one_fate_and_every_target_one_origin(tmp_path: Path) -> None:
    raw = raw_config("llama")
    tensors = random_tensors(read_base_config(raw)) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    write_model(tmp_path / "base", raw, tensors)
    save_file(head_tensors(3), tmp_path / "medusa_lm_head.safetensors")
    outcome = convert(tmp_path, heads=tmp_path)
    fates = {fate.name: fate for fate in outcome.sources}
    assert len(fates) == len(outcome.sources) == len(tensors) + 9
    assert fates["model.layers.0.self_attn.rotary_emb.inv_freq"].reason.startswith("rotary frequencies")
    assert fates["model.layers.1.self_attn.k_proj.weight"].targets == ("transformer.layers.1.attention.qkv.weight",)
    assert fates["2.1.weight"].targets == ("medusa_heads.2.lm_head.weight",)
    written = set(load_file(tmp_path / "out" / "rank0.safetensors"))
    assert {origin.name for origin in outcome.targets} == written
    assert {row.target for row in outcome.field_table if row.target} == set(outcome.config)


def test_inner_and_wrapped_names_are_found(tmp_path: Path) -> None:
    """BLOOM's own checkpoints lack the prefix `transformer.`; a wrapper's carry one more."""
    raw = raw_config("bloom")
    tensors = random_tensors(read_base_config(raw))
    write_model(tmp_path / "inner", raw, {name.removeprefix("transformer."): t for name, t in tensors.items()})
    write_model(tmp_path / "wrapped", raw, {f"language_model.{name}": t for name, t in tensors.items()})
    write_model(tmp_path / "plain", raw, tensors)
    _, plain = checkpoint_tensors(tmp_path / "plain", dtype="float32")
    for other in ("inner", "wrapped"):
        _, found = checkpoint_tensors(tmp_path / other, dtype="float32")
        assert set(found) == set(plain)
        assert all(torch.equal(found[name], plain[name]) for name in plain)


# ---- tied embeddings


def tied_model(folder: Path, tied: bool | None, head: torch.Tensor | None) -> dict[str, torch.Tensor]:
    raw = raw_config("llama", tie_word_embeddings=True)
    tensors = random_tensors(read_base_config(raw))
    if head is not None:
        tensors["lm_head.weight"] = head
    write_model(folder / "base", raw_config("llama", tie_word_embeddings=tied), tensors)
    return tensors


def test_a_tied_model_gets_its_embedding_as_output_matrix(tmp_path: Path) -> None:
    tensors = tied_model(tmp_path, True, None)
    outcome = convert(tmp_path)
    stored = load_file(tmp_path / "out" / "rank0.safetensors")
    assert torch.equal(stored["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert "tied embeddings: lm_head.weight is a copy of model.embed_tokens.weight" in outcome.warnings


@pytest.mark.parametrize("tied", [False, None])
def test_an_untied_model_without_output_matrix_is_refused(tied: bool | None, tmp_path: Path) -> None:
    tied_model(tmp_path, tied, None)
    with pytest.raises(MissingTensors, match="no output matrix, and its config does not tie it"):
        convert(tmp_path)


def test_a_tied_model_with_another_output_matrix_keeps_it_and_warns(tmp_path: Path) -> None:
    head = torch.full((37, 32), 0.5)
    tied_model(tmp_path, True, head)
    outcome = convert(tmp_path)
    assert torch.equal(load_file(tmp_path / "out" / "rank0.safetensors")["lm_head.weight"], head)
    assert any("differs from it; the file's own matrix is used" in warning for warning in outcome.warnings)


def test_a_tied_model_with_the_same_matrix_stored_does_not_warn(tmp_path: Path) -> None:
    raw = raw_config("llama", tie_word_embeddings=True)
    tensors = random_tensors(read_base_config(raw))
    tied_model(tmp_path, True, tensors["model.embed_tokens.weight"].clone())
    assert not [warning for warning in convert(tmp_path).warnings if "tied" in warning or "ties" in warning]


# ---- vocabulary padding


def test_base_and_heads_are_padded_alike_and_no_padded_column_wins(tmp_path: Path) -> None:
    """37 tokens on 2 ranks; all real logits negative: a zero row would win, a repeated real row cannot."""
    raw = raw_config("llama")
    tensors = random_tensors(read_base_config(raw))
    tensors["lm_head.weight"] = -tensors["lm_head.weight"].abs() - 0.1
    write_model(tmp_path / "base", raw, tensors)
    save_file(head_tensors(2), tmp_path / "medusa_lm_head.safetensors")
    outcome = convert(tmp_path, heads=tmp_path, tp_size=2)
    parts = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(2)]
    for name in ("lm_head.weight", "medusa_heads.0.lm_head.weight", "medusa_heads.1.lm_head.weight"):
        assert [part[name].shape for part in parts] == [(19, 32), (19, 32)]
    logits = torch.cat([part["lm_head.weight"] for part in parts]) @ torch.ones(32)
    assert int((logits[:37] >= logits[37]).sum()) >= 1
    assert logits[37] < 0
    assert any("padded by 1 rows to 38" in warning for warning in outcome.warnings)


# ---- dtypes


@pytest.mark.parametrize("value", [7e4, -1e30])
def test_values_that_float16_cannot_hold_are_refused(value: float, tmp_path: Path) -> None:
    raw = raw_config("qwen2")
    tensors = random_tensors(read_base_config(raw), torch.bfloat16)
    tensors[DOWN][0, 0] = value
    write_model(tmp_path / "base", raw, tensors)
    with pytest.raises(ConversionError, match=r"transformer.layers.1.mlp.proj.weight does not fit float16"):
        convert(tmp_path, dtype="float16")
    assert convert(tmp_path, dtype="bfloat16").verified


def test_bfloat16_written_as_float16_is_said(tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("qwen2"), dtype=torch.bfloat16)
    warnings = convert(tmp_path, dtype="float16").warnings
    assert any(warning.startswith("bfloat16 weights are written as float16") for warning in warnings)
    assert not convert(tmp_path, dtype="bfloat16").warnings


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    raw = raw_config("qwen2")
    tensors = random_tensors(read_base_config(raw))
    tensors[DOWN] = torch.zeros(32, 48, dtype=torch.int8)
    write_model(tmp_path / "base", raw, tensors)
    with pytest.raises(ConversionError, match="is not a floating-point tensor"):
        convert(tmp_path)
    with pytest.raises(ConversionError, match="dtype 'int8' cannot be written"):
        convert(tmp_path, dtype="int8")


# ---- requests


def test_unsupported_settings_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("gptneox", use_parallel_residual=False))
    with pytest.raises(BaseModelError, match="no counterpart for use_parallel_residual = False"):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp_size": 3}, "query heads do not divide over the ranks"),
        ({"pp_size": 3}, "layers do not divide over the pipeline ranks"),
        ({"tp_size": 0}, "ranks are counted from one"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(options: dict, text: str, tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("qwen2"))
    with pytest.raises(ConversionError, match=text):
        convert(tmp_path, **options)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        *((family, "cannot be split over pipeline ranks") for family in ("bloom", "gptj", "mpt")),
        ("gemma", "an embedding that is the output matrix as well"),
    ],
)
def test_pipeline_ranks_are_refused_where_the_class_has_none(family: str, text: str, tmp_path: Path) -> None:
    """The models of GPT-J and MPT neither receive nor send hidden states; Gemma's shares its embedding."""
    write_model(tmp_path / "base", raw_config(family))
    with pytest.raises(UnevenRanks, match=text):
        convert(tmp_path, pp_size=2)


def test_the_checkpoint_never_goes_into_its_own_input(tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("qwen2"))
    with pytest.raises(CheckpointError, match="one of its own inputs"):
        convert_checkpoint(tmp_path / "base", tmp_path / "base")


@pytest.mark.parametrize(
    ("family", "changes", "release", "text"),
    [
        ("qwen2", {}, "0.9.0.dev2024022700", "its model class"),
        ("llama", {"head_dim": 16}, "0.9.0.dev2024022700", "a head size of 16"),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "0.11.0.dev2024062500",
            "rope scaling of kind 'llama3'",
        ),
    ],
)
def test_what_a_release_cannot_express_is_refused(family, changes, release, text, tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config(family, **changes))
    with pytest.raises(BaseModelError, match=text) as caught:
        convert(tmp_path, release=release)
    assert caught.value.next_step.startswith("use TensorRT-LLM 0.")
    assert convert(tmp_path, release="0.16.0.dev2024121000").verified


def test_a_plan_needs_no_values(tmp_path: Path) -> None:
    """Sizes of all files are known from names and shapes."""
    raw = raw_config("qwen2")
    tensors = write_model(tmp_path / "base", raw)
    plan = plan_conversion(read_base_config(raw), open_tensor_source(tmp_path / "base"), dtype="float16", tp_size=2)
    assert sum(planned.num_bytes for planned in plan.tensors) > 2 * sum(t.numel() for t in tensors.values())
    assert plan.rank_tensors(0).keys() == plan.rank_tensors(1).keys()
