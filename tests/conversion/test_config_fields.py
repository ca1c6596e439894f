"""Each field of config.json has a row that says where it came from; nothing is lost or guessed in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from porting_kit.architectures import load_families, read_base_config
from porting_kit.conversion import convert_checkpoint
from porting_kit.conversion.config_fields import build_config
from porting_kit.conversion.convert import choose_dtype
from tests.conversion.rule_models import head_tensors, raw_config, write_model


def rows_of(raw: dict, **options) -> dict:
    """Target -> row; dropped rows by their source."""
    _, rows = build_config(read_base_config(raw), dtype="float16", **options)
    return {row.target or row.source: row for row in rows}


@pytest.mark.parametrize("family", sorted(load_families()))
def test_table_and_config_say_the_same(family: str) -> None:
    config, rows = build_config(read_base_config(raw_config(family)), dtype="float16")
    for row in rows:
        assert row.kind in ("kept", "derived", "defaulted", "dropped")
        if row.target is None:
            assert row.kind == "dropped"
            continue
        value = config
        for part in row.target.split("."):
            value = value[part]
        assert value == row.value
        assert row.kind != "kept" or row.source is not None
    json.dumps(config)
    assert not [row for row in rows if row.kind == "dropped"], "the family's own config has keys nobody reads"


def test_qwen_loses_nothing() -> None:
    """The keys that a LLaMA config object would drop."""
    raw = raw_config("qwen2", model_type="mycorp_chat", qwen_type="qwen2", rope_theta=1e6)
    rows = rows_of(raw)
    assert (rows["rotary_base"].value, rows["rotary_base"].kind, rows["rotary_base"].source) == (
        1e6,
        "kept",
        "rope_theta",
    )
    assert rows["qwen_type"].value == "qwen2"
    assert rows["attn_bias"].value is True
    assert not [row for row in rows.values() if row.kind == "dropped"]


@pytest.mark.parametrize(
    "spelling",
    [
        {"rotary_emb_base": 30000, "rotary_pct": 0.5},
        {"rope_theta": 30000, "partial_rotary_factor": 0.5, "rotary_emb_base": None, "rotary_pct": None},
        {
            "rope_parameters": {"rope_theta": 30000, "partial_rotary_factor": 0.5, "rope_type": "default"},
            "rotary_emb_base": None,
            "rotary_pct": None,
        },
    ],
)
def test_gptneox_states_its_base_twice(spelling: dict) -> None:
    """From 0.12 on the tables are made from `rotary_base`, which upstream's converter does not write."""
    rows = rows_of(raw_config("gptneox", **spelling))
    assert rows["rotary_base"].value == rows["rotary_emb_base"].value == 30000.0
    assert rows["rotary_pct"].value == 0.5


def test_what_has_no_field_is_shown_as_dropped() -> None:
    rows = rows_of(raw_config("llama", attention_multiplier=0.3, sliding_window=64))
    assert (rows["attention_multiplier"].kind, rows["attention_multiplier"].value) == ("dropped", 0.3)
    assert (rows["sliding_window"].kind, rows["sliding_window"].note) == (
        "dropped",
        "a run-time option: max_attention_window_size",
    )


def test_a_missing_value_is_shown_as_defaulted() -> None:
    assert rows_of(raw_config("llama"))["norm_epsilon"].kind == "defaulted"
    for family in ("qwen", "qwen2"):
        row = rows_of(raw_config(family))["seq_length"]
        assert (row.kind, row.value, row.source) == ("defaulted", 8192, None)
    assert rows_of(raw_config("llama", rms_norm_eps=3e-5))["norm_epsilon"].value == 3e-5


def test_activations_get_their_name_in_tensorrt_llm() -> None:
    rows = rows_of(raw_config("nemotron"))
    assert (rows["hidden_act"].value, rows["hidden_act"].note) == ("squared-relu", "relu2 by another name")


def test_long_rope_tables_are_carried_over() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rows = rows_of(raw_config("phi3", rope_scaling=scaling, original_max_position_embeddings=32))
    assert rows["position_embedding_type"].value == "long_rope"
    assert rows["longrope_scaling_long_factors"].value == [2.0] * 4
    assert rows["original_max_position_embeddings"].value == 32
    assert "longrope_scaling_long_factors" not in rows_of(raw_config("phi3"))


def test_medusa_keys_come_from_the_heads(tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("bloom"))
    save_file(head_tensors(3, 2), tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 9}))
    outcome = convert_checkpoint(tmp_path / "base", tmp_path / "out", heads=tmp_path, max_draft_len=15)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == outcome.config
    assert config["architecture"] == "BloomForCausalLM"
    found = [config[key] for key in ("num_medusa_heads", "num_medusa_layers", "max_draft_len", "medusa_hidden_act")]
    assert found == [3, 2, 15, "silu"]
    assert config["hidden_act"] == "gelu"
    alone = convert_checkpoint(tmp_path / "base", tmp_path / "alone").config
    assert "num_medusa_heads" not in alone
    assert "max_draft_len" not in alone


@pytest.mark.parametrize(
    ("stated", "chosen"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float16"), (None, "float16")]
)
def test_the_dtype_follows_the_base(stated: str | None, chosen: str) -> None:
    assert choose_dtype(read_base_config(raw_config("llama", torch_dtype=stated))) == chosen


def test_experts_are_described_in_old_keys_and_new(tmp_path: Path) -> None:
    config, _ = build_config(read_base_config(raw_config("mixtral")), dtype="float16")
    assert (config["moe_num_experts"], config["moe_top_k"], config["moe_normalization_mode"]) == (4, 2, 1)
    config, _ = build_config(read_base_config(raw_config("deepseek_v1")), dtype="float16")
    assert config["moe"] == {
        "num_experts": 4,
        "top_k": 2,
        "shared_expert_intermediate_size": 32,
        "normalization_mode": 0,
    }
