"""A checkpoint that is not what the rules make of its base: `align` names the field or the tensors, and the fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from porting_kit.conversion import convert_checkpoint
from porting_kit.diagnosis import seed_fault
from porting_kit.engine.captured import write_captured_tokens
from porting_kit.errors import CheckpointError
from porting_kit.medusa.decoding import generate_greedy
from porting_kit.outcomes import Verdict
from porting_kit.steps.align import AlignResult, align_port, format_alignment
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.checkpoint_check import CheckpointCheck
from porting_kit.steps.context import PortRun, open_port_run
from porting_kit.steps.convert import convert_port
from porting_kit.steps.diagnose import diagnose_port
from tests.steps.sharded_port import change_ranks, write_port

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "gptneox": {"intermediate_size": 128, "rotary_emb_base": 500},
}
QUICK = {"alignment.new_tokens": 6, "alignment.batch_sizes": [8]}


@pytest.fixture(scope="module")
def port_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A port file by family."""
    known: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in known:
            known[family] = write_port(tmp_path_factory.mktemp(family), family, **FAMILIES[family])
        return known[family]

    return get


def open_converted(port: Path, out: Path, **overrides: Any) -> PortRun:
    run = open_port_run(port, run_folder=out, overrides={**QUICK, **overrides})
    convert_port(run, verify=False)
    return run


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields; None takes one out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def swap(first: str, second: str) -> Callable[[list[dict[str, torch.Tensor]]], None]:
    def change(ranks: list[dict[str, torch.Tensor]]) -> None:
        for tensors in ranks:
            for name in [name for name in tensors if f".{first}." in name]:
                other = name.replace(f".{first}.", f".{second}.")
                tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def zero(ending: str) -> Callable[[list[dict[str, torch.Tensor]]], None]:
    def change(ranks: list[dict[str, torch.Tensor]]) -> None:
        for tensors in ranks:
            tensors |= {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.endswith(ending)}

    return change


def join_interleaved(ranks: list[dict[str, torch.Tensor]]) -> None:
    """Query, key and value rows as GPT-NeoX's file has them: head by head."""
    for tensors in ranks:
        for name in [name for name in tensors if ".attention.qkv." in name]:
            blocks = tensors[name].unflatten(0, (3, 4, -1))
            tensors[name] = blocks.transpose(0, 1).flatten(0, 2).contiguous()


def said_of(result: AlignResult) -> dict[str, Any]:
    assert result.outcome.verdict is Verdict.FAIL
    assert result.cause["kind"] == "checkpoint"
    return dict(result.cause)


@pytest.mark.parametrize(
    ("family", "field", "value", "expected", "fault"),
    [
        ("qwen2", "rotary_base", 10000.0, "1000000.0", "rope_base_lost"),
        ("qwen2", "rotary_base", 500.0, "1000000.0", None),
        ("qwen2", "rotary_base", None, "1000000.0", None),
        ("qwen2", "norm_epsilon", 1e-2, "1e-06", None),
        ("qwen2", "hidden_act", "gelu", '"silu"', None),
        ("qwen2", "position_embedding_type", "rope_gptj", '"rope_gpt_neox"', "rotary_style_swapped"),
        ("gptneox", "rotary_pct", 1.0, "0.25", "rotary_share_ignored"),
        ("llama", "rotary_scaling", {"type": "linear", "factor": 1.0}, '"factor": 4.0', None),
    ],
)
def test_a_changed_field_is_the_cause(port_of, tmp_path, family, field, value, expected, fault) -> None:
    run = open_converted(port_of(family), tmp_path / "run")
    edit_config(run.folder.checkpoint, **{field: value})
    result = align_port(run, edited=True)
    cause = said_of(result)
    (change,) = cause["changes"]
    assert change["name"] == f"config.json: {field}"
    assert expected in change["expected"]
    assert change["found"] == ("no such field" if value is None else json.dumps(value))
    assert cause["fault"] == fault
    assert f"set {field} to" in cause["fix"]
    shown = format_alignment(result)
    assert f"config.json: {field}: expected" in shown
    assert "first parts from the base at" in shown, "the layer comparison is said as well"
    assert "with the checkpoint set right the port's logits are within" in shown


@pytest.mark.parametrize(
    ("family", "change", "names", "fault"),
    [
        ("qwen2", swap("fc", "gate"), ["mlp.fc.weight", "mlp.gate.weight"], "gate_and_up_swapped"),
        ("qwen2", zero(".qkv.bias"), ["attention.qkv.bias"], "qkv_bias_dropped"),
        ("qwen2", swap("input_layernorm", "post_layernorm"), ["input_layernorm", "post_layernorm"], "norms_swapped"),
        ("gptneox", join_interleaved, ["attention.qkv.weight", "attention.qkv.bias"], "qkv_not_deinterleaved"),
        ("qwen2", zero("0.mlp.proj.weight"), ["layers.0.mlp.proj.weight"], None),
    ],
    ids=["gate and up", "biases", "norms", "interleaved", "one matrix"],
)
def test_changed_tensors_are_the_cause(port_of, tmp_path, family, change, names, fault) -> None:
    run = open_converted(port_of(family), tmp_path / "run")
    change_ranks(run.folder.checkpoint, change)
    cause = said_of(align_port(run, edited=True))
    assert cause["fault"] == fault
    assert len(cause["changes"]) == len(names)
    for found, name in zip(sorted(cause["changes"], key=lambda one: one["name"]), sorted(names), strict=True):
        assert name in found["name"]
        assert "values differ, the first at" in found["found"]
        assert " instead of " in found["found"]
        assert "convert again" in found["fix"]


def test_two_changes_are_both_named(port_of, tmp_path) -> None:
    """A Qwen2 read as a LLaMA: no biases, base 10,000."""
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    change_ranks(run.folder.checkpoint, zero(".qkv.bias"))
    edit_config(run.folder.checkpoint, rotary_base=10000.0)
    cause = said_of(align_port(run, edited=True))
    assert set(cause["fault"].split(" + ")) == {"qkv_bias_dropped", "rope_base_lost"}
    assert [change["name"].rpartition(".")[2] for change in cause["changes"]] == ["json: rotary_base", "bias"]


@pytest.mark.parametrize(("field", "value", "expected"), [("num_attention_heads", 2, 4), ("num_key_value_heads", 4, 2)])
def test_a_field_that_no_model_can_be_built_with_is_named(port_of, tmp_path, field, value, expected) -> None:
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    edit_config(run.folder.checkpoint, **{field: value})
    with pytest.raises(CheckpointError, match=f"{field}: expected {expected}, found {value}") as caught:
        align_port(run, edited=True)
    assert "not the same shape" in caught.value.found
    assert caught.value.exit_code == 2


def test_a_field_without_effect_is_said_of_a_pass(port_of, tmp_path) -> None:
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    assert align_port(run).outcome.figures["changed_fields"] == []
    edit_config(run.folder.checkpoint, seq_length=77, own_field=1)
    outcome = align_port(run, edited=True).outcome
    assert outcome.verdict is Verdict.PASS
    assert "seq_length: expected 8192, found 77" in outcome.summary
    assert "own_field: expected no such field, found 1" in outcome.summary


def test_what_another_run_emitted_is_not_put_down_to_a_harmless_field(port_of, tmp_path) -> None:
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    align_port(run)
    ids = numpy.load(run.folder.root / "alignment" / "output_ids.npy")
    emitted = ids.copy()
    for row, prompt in enumerate(AlignmentSession(run, keeps_prompts=True).prompts):
        new = slice(len(prompt), len(prompt) + QUICK["alignment.new_tokens"])
        emitted[row, ..., new] = (ids[row, ..., new] * 7 + 5) % 80 + 5  # no fault of the list, and no end
    numpy.save(tmp_path / "emitted.npy", emitted)
    edit_config(run.folder.checkpoint, own_field=1)
    diagnosis = diagnose_port(run, tmp_path / "emitted.npy", edited=True).diagnosis
    assert diagnosis.changes == ()
    assert "own_field" not in diagnosis.verdict
    assert "own_field" in diagnosis.evidence[-1]


def test_a_right_run_is_not_blamed_for_this_checkpoint(port_of, tmp_path) -> None:
    """A swap is its own inverse: planted in a swapped checkpoint it explains what a right run emitted."""
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    align_port(run)
    shutil.copy(run.folder.root / "alignment" / "output_ids.npy", tmp_path / "right.npy")
    change_ranks(run.folder.checkpoint, swap("fc", "gate"))
    diagnosis = diagnose_port(run, tmp_path / "right.npy", edited=True).diagnosis
    assert [fault.name for fault in diagnosis.causes] == ["gate_and_up_swapped"]
    assert "the checkpoint is not what the rules make of its base" in diagnosis.verdict


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_named(port_of, tmp_path, value) -> None:
    """Token 0 for ever, as when float16 overflows; but the port is float32, and its own checkpoint holds the reason."""
    name = "transformer.layers.0.attention.qkv.bias"

    def plant(ranks: list[dict[str, torch.Tensor]]) -> None:
        ranks[0][name][3] = value

    run = open_converted(port_of("qwen2"), tmp_path / "run")
    change_ranks(run.folder.checkpoint, plant)
    (change,) = said_of(align_port(run, edited=True))["changes"]
    assert change["name"] == name
    shutil.copy(run.folder.root / "alignment" / "output_ids.npy", tmp_path / "observed.npy")
    diagnosis = diagnose_port(run, tmp_path / "observed.npy", edited=True).diagnosis
    assert diagnosis.causes == ()
    assert f"{name}: expected the base's values" in diagnosis.verdict
    assert f"({value} instead of " in diagnosis.verdict


HEAD = "medusa_heads.1.medusa_layers.0.linear.weight"


def plant_undefined(ranks: list[dict[str, torch.Tensor]]) -> None:
    ranks[0][HEAD][2, 3] = torch.nan


def test_a_head_that_is_no_number_is_named_though_every_token_is_right(port_of, tmp_path) -> None:
    """Tokens alone: a head that proposes nonsense takes more steps, and the text stays the base's."""
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    align_port(run)
    shutil.copy(run.folder.root / "alignment" / "output_ids.npy", tmp_path / "right.npy")
    assert diagnose_port(run, tmp_path / "right.npy").diagnosis.is_healthy
    change_ranks(run.folder.checkpoint, plant_undefined)
    found = diagnose_port(run, tmp_path / "right.npy", edited=True)
    assert found.outcome.failing_gate == "a changed checkpoint"
    assert found.outcome.verdict is Verdict.FAIL
    (change,) = found.diagnosis.changes
    assert change.name == HEAD
    assert "(nan instead of " in found.diagnosis.verdict
    assert "convert again" in found.document()["fix"]
    assert f"values that are no finite numbers: 1 in {HEAD}" in found.diagnosis.evidence


def test_a_head_that_is_no_number_hides_no_fault_of_the_run(port_of, tmp_path) -> None:
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    align_port(run)
    session = AlignmentSession(run)
    _, faulty = seed_fault("qkv_bias_dropped", session.port_state)
    emitted = generate_greedy(faulty.build(), session.prompts, QUICK["alignment.new_tokens"], [2]).tokens
    write_captured_tokens(tmp_path / "emitted.npy", session.prompts, emitted, end_id=2)
    change_ranks(run.folder.checkpoint, plant_undefined)
    diagnosis = diagnose_port(run, tmp_path / "emitted.npy", edited=True).diagnosis
    assert "qkv_bias_dropped" in [fault.name for fault in diagnosis.causes], diagnosis.verdict
    assert HEAD in diagnosis.evidence[-1]


def drop(name: str) -> Callable[[list[dict[str, torch.Tensor]]], None]:
    def change(ranks: list[dict[str, torch.Tensor]]) -> None:
        for tensors in ranks:
            del tensors[name]

    return change


def test_a_tensor_that_is_missing_is_named(port_of, tmp_path) -> None:
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    change_ranks(run.folder.checkpoint, drop("transformer.layers.0.mlp.proj.weight"))
    with pytest.raises(CheckpointError, match="no model can run from this checkpoint") as caught:
        align_port(run, edited=True)
    assert "layers.0.mlp.proj.weight: float32" in caught.value.expected
    assert caught.value.found.startswith("no such tensor")


@pytest.mark.parametrize(("text", "said"), [("[]", "a JSON object belongs here"), ("null", "not null")])
def test_a_config_that_is_no_object_is_refused(port_of, tmp_path, text, said) -> None:
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    (run.folder.checkpoint / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        align_port(run, edited=True)
    assert said in caught.value.found


def test_a_value_of_the_wrong_type_is_named(port_of, tmp_path) -> None:
    run = open_converted(port_of("qwen2"), tmp_path / "run")
    edit_config(run.folder.checkpoint, norm_epsilon="1e-6")
    with pytest.raises(CheckpointError, match=r"no model can run from this config\.json") as caught:
        align_port(run, edited=True)
    assert caught.value.expected.startswith("config.json: norm_epsilon")


def test_a_base_checkpoint_of_another_converter_is_held_against_the_base(port_of, tmp_path) -> None:
    """Its heads' tensors are copies of the port's, its base's tensors are whatever that converter made."""
    port = port_of("qwen2")
    foreign = tmp_path / "foreign"
    convert_checkpoint(port.parent / "base", foreign, dtype="float32")
    edit_config(foreign, seq_length=None, own_field=1, norm_epsilon=1.0000001e-06)  # as other converters write it
    run = open_converted(port, tmp_path / "right", base_checkpoint=str(foreign))
    assert align_port(run).outcome.figures["changed_fields"] == []
    change_ranks(foreign, zero(".qkv.bias"))
    run = open_converted(port, tmp_path / "wrong", base_checkpoint=str(foreign))
    cause = said_of(align_port(run, edited=True))
    assert cause["fault"] == "qkv_bias_dropped"
    edit_config(run.folder.checkpoint, rotary_base=10000.0)
    cause = said_of(align_port(run, edited=True))
    assert set(cause["fault"].split(" + ")) == {"qkv_bias_dropped", "rope_base_lost"}
    assert "set rotary_base to 1000000.0 in the checkpoint's config.json" in cause["fix"]
    assert "correct these tensors in the base checkpoint's rank files" in cause["fix"]
    edit_config(foreign, rotary_base=10000.0)
    with pytest.raises(CheckpointError, match=r"rotary_base is 10000\.0: the base's is 1000000\.0"):
        open_converted(port, tmp_path / "refused", base_checkpoint=str(foreign))


def test_fields_of_several_ranks_are_compared_too(port_of, tmp_path) -> None:
    run = open_converted(port_of("qwen2"), tmp_path / "run", **{"target.tp_size": 2})
    edit_config(run.folder.checkpoint, rotary_base=500.0)
    cause = said_of(align_port(run, edited=True))
    assert [change["name"] for change in cause["changes"]] == ["config.json: rotary_base"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_checkpoint_is_what_the_rules_make(port_of, tmp_path, family) -> None:
    check = CheckpointCheck(open_converted(port_of(family), tmp_path / "run"))
    assert (check.fields, check.tensors) == ((), ())
