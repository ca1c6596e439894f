"""Engine folders against the tree they will be run with, their records, and the server settings that go with them."""

import json
import os
import shutil

import pytest

from porting_kit.engine import capture_evidence
from porting_kit.engine.command import CommandPlan, PlannedFlag
from porting_kit.engine.engine_config import read_engine_config
from porting_kit.engine.record import (
    check_engine,
    read_record,
    require_same_port,
    write_record,
)
from porting_kit.errors import CheckpointError

CHOICES = [[0], [0, 0], [1]]
CARD = {"name": "NVIDIA H200", "compute_capability": "9.0"}


def write_engine(folder, *, version="0.11.0", **build):
    settings = {
        "max_batch_size": 8,
        "max_input_len": 1024,
        "max_seq_len": 2111,
        "max_num_tokens": 8192,
        "max_draft_len": 63,
        "speculative_decoding_mode": 4,
        "gather_generation_logits": True,
        "plugin_config": {"tokens_per_block": 64},
    } | build
    document = {
        "version": version,
        "pretrained_config": {
            "architecture": "BloomForCausalLM",
            "num_medusa_heads": 4,
            "max_draft_len": 63,
            "mapping": {"tp_size": 2, "pp_size": 1},
        },
        "build_config": {key: value for key, value in settings.items() if value is not None},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "rank0.engine").write_bytes(b"engine")
    return folder


def verdicts(folder, num_drafts=63, depth=4, planned_release=None):
    gates = check_engine(
        read_engine_config(folder), num_drafts=num_drafts, depth=depth, planned_release=planned_release
    )
    return {gate.name: gate for gate in gates}


def test_an_engine_says_what_it_was_built_for(tmp_path):
    engine = read_engine_config(write_engine(tmp_path))
    assert (engine.release, engine.mode, engine.max_draft_len, engine.num_medusa_heads) == ("0.11.0", "medusa", 63, 4)
    assert (engine.max_batch_size, engine.tokens_per_block, engine.tp_size) == (8, 64, 2)
    assert engine.gather_generation_logits


def test_a_fitting_engine_passes_every_gate(tmp_path):
    gates = verdicts(write_engine(tmp_path), planned_release="0.11.0")
    assert {gate.verdict for gate in gates.values()} == {"pass"}


def test_an_engine_without_the_medusa_mode_is_named_as_such(tmp_path):
    gates = verdicts(write_engine(tmp_path, max_draft_len=0, speculative_decoding_mode=1))
    assert gates["engine mode"].verdict == "refused"
    assert "0 draft tokens" in gates["engine mode"].effect
    assert gates["tree"].verdict == "refused"
    assert "without the Medusa mode" in gates["tree"].effect


def test_another_speculative_mode_is_refused(tmp_path):
    gates = verdicts(write_engine(tmp_path, speculative_decoding_mode=8))
    assert gates["engine mode"].verdict == "refused"
    assert "lookahead_decoding" in gates["engine mode"].value


def test_an_engine_of_a_release_without_the_mode_field_is_judged_by_its_limit(tmp_path):
    folder = write_engine(tmp_path, version="0.9.0", speculative_decoding_mode=None, max_seq_len=None, max_output_len=9)
    assert verdicts(folder)["engine mode"].verdict == "pass"
    assert read_engine_config(folder).max_seq_len == 1033


def test_a_tree_above_the_draft_limit_is_refused(tmp_path):
    gates = verdicts(write_engine(tmp_path, max_draft_len=15))
    assert gates["tree"].verdict == "refused"
    assert "48 nodes too many" in gates["tree"].effect


def test_a_batch_that_does_not_fit_into_one_step_is_refused(tmp_path):
    gates = verdicts(write_engine(tmp_path, max_num_tokens=256))
    assert gates["tokens per step"].verdict == "refused"
    assert "8 x 64 = 512" in gates["tokens per step"].value


def test_an_engine_of_another_release_lists_the_differences(tmp_path):
    gate = verdicts(write_engine(tmp_path, version="0.9.0"), planned_release="0.13.0")["engine release"]
    assert gate.verdict == "refused"
    assert "known differences" in gate.effect
    assert verdicts(write_engine(tmp_path), planned_release="0.11.0")["engine release"].verdict == "pass"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no config.json"),
        ("{", "not JSON"),
        ('{"architecture": "BloomForCausalLM"}', "not an engine's"),
        ('{"version": "0.11.0"}', "not an engine's"),
        ("[]", "not an engine's"),
        ('{"version": "0.11.0", "pretrained_config": 3, "build_config": {}}', "unusable pretrained_config"),
        ('{"version": "0.11.0", "pretrained_config": {}, "build_config": {"max_batch_size": "8"}}', "max_batch_size"),
    ],
)
def test_folders_that_are_no_engines_are_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_engine_config(tmp_path)


@pytest.fixture
def recorded(tmp_path):
    folder = write_engine(tmp_path / "engine")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    plan = CommandPlan(("trtllm-build",), "0.11.0", (PlannedFlag("max_draft_len", "63", "tree"),), "a test")
    write_record(folder, plan=plan, choices=CHOICES, checkpoint_dir=tmp_path / "checkpoint", seconds=12.34)
    return folder


def test_the_tree_stays_beside_its_engine(recorded):
    record = read_record(recorded)
    assert record["medusa_choices"] == CHOICES
    assert record["command"] == ["trtllm-build", "--max_draft_len", "63"]
    assert set(record["engine"]) == {"rank0.engine"}


def test_an_engine_that_changed_since_is_not_the_recorded_one(recorded):
    (recorded / "rank0.engine").write_bytes(b"another")
    with pytest.raises(CheckpointError, match="not the ones the record is about"):
        read_record(recorded)


def test_a_missing_or_broken_record_is_refused(recorded):
    (recorded / "porting_record.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_record(recorded)
    (recorded / "porting_record.json").unlink()
    with pytest.raises(CheckpointError, match="no record"):
        read_record(recorded)


class TestSamePort:
    """An engine is used with the tree, checkpoint, release and card it was built for, or not at all."""

    def check(self, recorded, **changes):
        settings = {
            "choices": CHOICES,
            "checkpoint_dir": recorded.parent / "checkpoint",
            "release": "0.11.0",
            "card": CARD,
        }
        require_same_port(read_record(recorded) | {"card": CARD}, **settings | changes)

    def test_its_own_port_passes(self, recorded):
        self.check(recorded)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"choices": [[0]]}, "another tree"),
            ({"release": "0.13.0"}, "another release"),
            ({"card": {"name": "NVIDIA A100", "compute_capability": "8.0"}}, "another card"),
        ],
    )
    def test_another_one_is_refused(self, recorded, changes, said):
        with pytest.raises(CheckpointError, match=said):
            self.check(recorded, **changes)

    def test_a_checkpoint_that_changed_is_refused(self, recorded):
        (recorded.parent / "checkpoint" / "config.json").write_text('{"max_draft_len": 5}')
        with pytest.raises(CheckpointError, match="another checkpoint"):
            self.check(recorded)

    def test_a_copied_engine_is_still_the_recorded_one(self, recorded, tmp_path):
        (recorded / "rank0.engine").write_bytes(bytes(range(256)) * 20000)  # above what a fingerprint reads whole
        plan = CommandPlan(("trtllm-build",), "0.11.0", (), "a test")
        write_record(recorded, plan=plan, choices=CHOICES, checkpoint_dir=recorded.parent / "checkpoint", seconds=1.0)
        shutil.copytree(recorded, tmp_path / "copy")
        os.utime(tmp_path / "copy" / "rank0.engine", (1, 1))
        assert read_record(tmp_path / "copy")["release"] == "0.11.0"

    def test_an_engine_file_of_0_bytes_is_refused(self, recorded):
        (recorded / "rank0.engine").write_bytes(b"")
        with pytest.raises(CheckpointError, match="empty"):
            read_record(recorded)

    def test_the_capture_script_refuses_another_card(self, recorded, monkeypatch):
        record = read_record(recorded) | {"card": CARD}
        (recorded / "porting_record.json").write_text(json.dumps(record))
        request = {"medusa_choices": CHOICES, "checkpoint": record["checkpoint"]}
        monkeypatch.setattr(capture_evidence, "current_card", lambda: CARD)
        assert capture_evidence.check_record(recorded, request) is None
        monkeypatch.setattr(capture_evidence, "current_card", lambda: {"name": "A100", "compute_capability": "8.0"})
        assert "build it on this card" in capture_evidence.check_record(recorded, request)
