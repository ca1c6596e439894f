"""An engine folder is used for the port it was built for, whole and with its record, or not at all."""

import json

import pytest
from test_record import CARD, CHOICES, write_engine

from porting_kit.engine.command import CommandPlan
from porting_kit.engine.engine_folder import open_engine_folder
from porting_kit.engine.record import write_record
from porting_kit.errors import CheckpointError

MODEL = {
    "architecture": "BloomForCausalLM",
    "num_medusa_heads": 4,
    "max_draft_len": 63,
    "mapping": {"tp_size": 1, "pp_size": 1, "world_size": 1},
}


@pytest.fixture
def engine(tmp_path):
    """A whole engine with its record."""
    folder = write_engine(tmp_path / "engine")
    change_config(folder, lambda document: document["pretrained_config"].update(MODEL))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(MODEL))
    add_record(folder)
    return folder


def add_record(folder, **changes):
    plan = CommandPlan(("trtllm-build",), "0.11.0", (), "a test")
    settings = {"plan": plan, "choices": CHOICES, "checkpoint_dir": folder.parent / "checkpoint", "seconds": 1.0}
    write_record(folder, **settings | {"card": CARD} | changes)


def change_config(folder, change):
    file = folder / "config.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def open_engine(folder, **changes):
    settings = {
        "config": MODEL,
        "choices": CHOICES,
        "checkpoint_dir": folder.parent / "checkpoint",
        "release": "0.11.0",
        "compute_capability": "9.0",
    }
    return open_engine_folder(folder, **settings | changes)


def test_the_ports_own_engine_is_opened(engine):
    assert open_engine(engine).max_draft_len == 63


def test_an_engine_file_of_0_bytes_is_refused_without_and_with_a_record(engine):
    (engine / "rank0.engine").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no whole engine") as caught:
        open_engine(engine)
    assert "0 bytes" in caught.value.found
    (engine / "porting_record.json").unlink()
    with pytest.raises(CheckpointError, match="no whole engine"):
        open_engine(engine)


@pytest.mark.parametrize("damage", ["missing", "surplus"])
def test_the_number_of_engine_files_is_that_of_the_ranks(engine, damage):
    if damage == "missing":
        (engine / "rank0.engine").unlink()
    else:
        (engine / "rank1.engine").write_bytes(b"engine")
    with pytest.raises(CheckpointError, match="no whole engine"):
        open_engine(engine)


def test_an_engine_without_a_record_is_refused_and_the_way_to_one_is_said(engine):
    (engine / "porting_record.json").unlink()
    with pytest.raises(CheckpointError, match="no record beside it") as caught:
        open_engine(engine)
    assert "capture.py record" in caught.value.next_step


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"release": "0.13.0"}, "another release"),
        ({"compute_capability": "8.0"}, "another card"),
        ({"choices": [[0]]}, "another tree"),
        ({"config": MODEL | {"num_medusa_heads": 3}}, "another number of Medusa heads"),
        ({"config": MODEL | {"max_draft_len": 31}}, "another draft limit"),
        ({"config": MODEL | {"architecture": "LlamaForCausalLM"}}, "another model"),
        ({"config": MODEL | {"mapping": {"tp_size": 2}}}, "another number of ranks"),
        ({"choices": [[rank] for rank in range(64)]}, "cannot run this tree"),
    ],
)
def test_an_engine_of_something_else_is_refused(engine, changes, said):
    with pytest.raises(CheckpointError, match=said):
        open_engine(engine, **changes)


def test_the_mode_is_named_before_all_that_follows_from_it(engine):
    """An engine of the base alone has no heads and no draft limit either; a mode says more than three differences."""

    def leave_medusa_out(document):
        document["build_config"].update(speculative_decoding_mode=8)
        document["pretrained_config"].update(num_medusa_heads=None, max_draft_len=None, architecture="OtherForCausalLM")

    change_config(engine, leave_medusa_out)
    with pytest.raises(CheckpointError, match="engine mode") as caught:
        open_engine(engine)
    assert "lookahead_decoding" in caught.value.found


def test_an_engine_built_without_the_mode_is_refused(engine):
    change_config(engine, lambda document: document["build_config"].update(speculative_decoding_mode=1))
    with pytest.raises(CheckpointError, match="cannot run this tree: engine mode"):
        open_engine(engine)


def test_a_config_changed_after_the_record_is_refused(engine):
    change_config(engine, lambda document: document["build_config"].update(max_input_len=5))
    with pytest.raises(CheckpointError, match="changed after its record"):
        open_engine(engine)


def test_an_engine_of_another_checkpoint_is_refused(engine):
    (engine.parent / "checkpoint" / "rank0.safetensors").write_bytes(b"other weights")
    with pytest.raises(CheckpointError, match="another checkpoint"):
        open_engine(engine)
