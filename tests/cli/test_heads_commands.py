"""`porting-kit heads`: train, check, tree and export over a small port, resumed, interrupted, and given bad input."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM
from typer.testing import CliRunner

from porting_kit.cli import app
from porting_kit.conversion.heads import read_head_set
from porting_kit.emulator.decoder import Decoder
from porting_kit.errors import TreeError
from porting_kit.medusa.step_costs import StepCosts
from porting_kit.medusa.tree_choice import TreeLimits
from porting_kit.steps import heads_training, heads_tree
from porting_kit.steps.context import open_port_run
from porting_kit.steps.heads_tree import choose_port_tree, measure_step_costs

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "notebooks" / "ports" / "bloom-mini"
SETTINGS = ["--prompts", "24", "--new-tokens", "12", "--steps", "12", "--prompt-tokens", "8", "--batch-positions", "64"]


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Path:
    """The demo's base and heads, with a text beside them."""
    folder = tmp_path_factory.mktemp("port")
    document = {"name": "small", "base": str(DEMO / "base"), "heads": str(DEMO / "heads"), "dtype": "float16"}
    document["alignment"] = {"prompts": ["Return a list of", "The value of the argument is"], "new_tokens": 16}
    (folder / "port.yaml").write_text(yaml.safe_dump(document))
    words = [
        "a",
        "function",
        "returns",
        "the",
        "value",
        "of",
        "its",
        "argument",
        "when",
        "the",
        "list",
        "is",
        "empty",
        "and",
        "raises",
        "an",
        "error",
    ]
    texts = [" ".join(words[(3 * i + j * j) % len(words)] for j in range(24)) for i in range(12)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    return folder


def call(port: Path, *arguments: str):
    result = CliRunner().invoke(app, ["heads", arguments[0], str(port / "port.yaml"), *arguments[1:]])
    return result


def run(port: Path, *arguments: str) -> dict:
    result = call(port, *arguments, "--run-folder", str(port / "run"), "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_training_writes_heads_a_card_and_a_tree(port: Path, variant: str):
    out = port / f"heads-{variant}"
    found = run(port, "train", "--data", str(port / "text.txt"), "--out", str(out), "--variant", variant, *SETTINGS)
    card = json.loads((out / "card.json").read_text())
    assert len(card["data"]["sha256"]) == len(card["base_files"]) == 64
    assert card["settings"]["seed"] == 0
    assert card["settings"]["steps"] == 12
    assert len(card["accuracy"]) == 4
    assert card["accuracy"][0]["top1"] == found["accuracy"][0]["top1"]
    heads = read_head_set(out)
    assert (heads.num_heads, heads.layout, heads.own_output) == (4, "original", variant == "v1")
    assert json.loads((out / "tree.json").read_text())
    assert not list((port / "run" / "heads").glob("training-*.pt"))


def train_into(port: Path, out: Path):
    arguments = ("train", "--data", str(port / "text.txt"), *SETTINGS, "--steps", "2", "--out", str(out))
    return call(port, *arguments, "--run-folder", str(port / "run"))


def read_tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_earlier_heads_are_replaced_and_nothing_that_lies_beside_them(port: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / "heads"
    assert train_into(port, out).exit_code == 0
    assert train_into(port, out).exit_code == 0
    (out / "tree.json").unlink()
    assert train_into(port, out).exit_code == 0
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("precious")
    before = read_tree(out)
    refused = train_into(port, out)
    assert refused.exit_code == 2
    assert "found: notes\n" in refused.output
    assert read_tree(out) == before
    shutil.rmtree(out / "notes")

    def put_a_file_there(*arguments, **options):
        (out / "mine.txt").write_text("put there while training ran")
        return training(*arguments, **options)

    training = heads_training.train_heads
    monkeypatch.setattr(heads_training, "train_heads", put_a_file_there)
    assert train_into(port, out).exit_code == 2
    assert (out / "mine.txt").exists()
    monkeypatch.undo()
    (out / "mine.txt").unlink()
    assert "continuing from step 2" in train_into(port, out).output  # what was trained is not lost


def test_the_files_that_a_run_keeps_are_not_replaced_by_heads(port: Path, tmp_path: Path):
    refused = train_into(port, port / "run" / "heads")
    assert refused.exit_code == 2
    assert "keeps its own files" in refused.output
    assert train_into(port, tmp_path / "o").exit_code == 0


def test_heads_are_written_through_a_link(port: Path, tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        assert train_into(port, tmp_path / "link").exit_code == 0
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "card.json").is_file()
        assert sorted(item.name for item in tmp_path.iterdir()) == ["link", "real"]


def test_a_base_whose_name_holds_a_dot_is_named_whole(port: Path, tmp_path: Path):
    (tmp_path / "bloom-1.7b").symlink_to(DEMO / "base")
    base = ("-p", f"base={tmp_path / 'bloom-1.7b'}")
    out = tmp_path / "heads"
    run(port, "train", "--data", str(port / "text.txt"), *SETTINGS, "--steps", "2", "--out", str(out), *base)
    run(port, "export", "--layout", "modelopt", "--out", str(tmp_path / "export"), "-p", f"heads={out}", *base)
    assert json.loads((out / "card.json").read_text())["base"] == "bloom-1.7b"
    for folder in (out, tmp_path / "export"):
        assert json.loads((folder / "config.json").read_text())["base_model_name_or_path"] == "bloom-1.7b"
    # of heads that state no base, an export states the port's
    config = json.loads((out / "config.json").read_text())
    del config["base_model_name_or_path"]
    (out / "config.json").write_text(json.dumps(config))
    run(port, "export", "--layout", "vllm", "--out", str(tmp_path / "vllm"), "-p", f"heads={out}", *base)
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["base_model_name_or_path"] == "bloom-1.7b"


def test_a_port_without_heads_can_be_trained_and_then_checked(port: Path, tmp_path: Path):
    document = yaml.safe_load((port / "port.yaml").read_text())
    del document["heads"]
    (tmp_path / "port.yaml").write_text(yaml.safe_dump(document))
    data = ("--data", str(port / "text.txt"), *SETTINGS)
    assert "run/heads/trained" in run(tmp_path, "train", *data)["folder"]
    refused = call(tmp_path, "check", "--run-folder", str(tmp_path / "run"))
    assert refused.exit_code == 2
    assert "lacks the key 'heads'" in refused.output
    trained = tmp_path / "run" / "heads" / "trained"
    named = {"heads": str(trained), "tree": str(trained / "tree.json")}
    (tmp_path / "port.yaml").write_text(yaml.safe_dump({**document, **named}))
    assert call(tmp_path, "check", "--run-folder", str(tmp_path / "run")).exit_code in (0, 1)
    assert json.loads((tmp_path / "run" / "heads" / "check.json").read_text())["layout"] == "original"


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory) -> Path:
    """The demo's base as a chat model, whose user ends with the first word of the answer's beginning."""
    folder = tmp_path_factory.mktemp("chat") / "base"
    shutil.copytree(DEMO / "base", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for message in messages %}Returns{{ message.content }} of{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_base_that_asks_itself_needs_no_text(port: Path, chat_base: Path, tmp_path: Path):
    short = ["--new-tokens", "12", "--steps", "2", "--batch-positions", "64", "-p", f"base={chat_base}"]
    found = run(port, "train", "--self-chat", "6", "--out", str(tmp_path / "heads"), *short)
    card = json.loads((tmp_path / "heads" / "card.json").read_text())
    assert "data" not in card
    assert (card["settings"]["prompts"], card["settings"]["self_chat"]) == (0, 6)
    assert (card["self_chat"]["asked"], card["self_chat"]["kept"]) == (6, 6)
    assert card["self_chat"]["sampled"] == found["self_chat"]["sampled"] >= 6
    with_text = ("--data", str(port / "text.txt"), "--prompts", "12", "--prompt-tokens", "8")
    run(port, "train", "--self-chat", "6", *with_text, "--out", str(tmp_path / "both"), *short)
    card = json.loads((tmp_path / "both" / "card.json").read_text())
    assert len(card["data"]["sha256"]) == 64
    assert (card["settings"]["prompts"], card["self_chat"]["kept"]) == (12, 6)


def test_a_base_without_a_chat_template_is_refused_before_its_weights_are_read(port: Path, monkeypatch):
    monkeypatch.setattr("porting_kit.steps.heads_training.load_reference", lambda *a, **k: pytest.fail("it was loaded"))
    result = call(port, "train", "--self-chat", "8", "--run-folder", str(port / "run"))
    assert result.exit_code == 2
    assert "chat prompts need a chat template" in result.output


def test_without_a_gpu_the_settings_are_small_ones(port: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run(port, "train", "--data", str(port / "text.txt"), "--out", str(tmp_path / "heads"), "--steps", "2")
    settings = json.loads((tmp_path / "heads" / "card.json").read_text())["settings"]
    assert (settings["prompts"], settings["new_tokens"], settings["steps"]) == (64, 32, 2)


@pytest.mark.slow
def test_an_interrupted_training_goes_on(port: Path, tmp_path: Path):
    """The process is interrupted in the middle; the same command ends it, and the heads are those of a whole run."""
    import signal

    arguments = ["train", str(port / "port.yaml"), "--data", str(port / "text.txt"), *SETTINGS, "--steps", "200"]

    def start(name: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "porting_kit", "heads", *arguments, "--out", str(tmp_path / name)]
        command += ["--run-folder", str(tmp_path / f"run-{name}")]
        return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT)

    broken = start("resumed")
    for line in broken.stderr:
        if line.startswith("step 20/"):
            broken.send_signal(signal.SIGINT)
            break
    broken.stderr.read()
    assert broken.wait() == 130
    assert not (tmp_path / "resumed").exists()
    assert len(list((tmp_path / "run-resumed" / "heads").glob("training-*.pt"))) == 1
    again = start("resumed")
    assert "continuing from step" in again.communicate()[1]
    assert again.returncode == 0
    whole = start("whole")
    whole.communicate()
    assert whole.returncode == 0
    first, second = (load_file(tmp_path / name / "medusa_lm_head.safetensors") for name in ("resumed", "whole"))
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name])


@pytest.mark.slow
def test_two_processes_train_the_same_heads(port: Path, chat_base: Path, tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "porting_kit", "heads"]
    command += ["train", str(port / "port.yaml"), "--data", str(port / "text.txt"), *SETTINGS]
    command += ["--self-chat", "9", "-p", f"base={chat_base}"]
    command += ["--out", str(tmp_path / "heads"), "--run-folder", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    card = json.loads((tmp_path / "heads" / "card.json").read_text())
    assert card["processes"] == 2
    assert (card["self_chat"]["asked"], card["self_chat"]["kept"]) == (9, 9)
    assert read_head_set(tmp_path / "heads").num_heads == 4


def test_a_check_and_a_tree_of_the_demo(port: Path):
    found = run(port, "check", "--new-tokens", "24")
    assert found["verdict"] == "pass"
    assert found["heads"][0]["verdict"] == "fits"
    assert {head["verdict"] for head in found["heads"]} <= {"fits", "undecided"}  # two prompts are few
    assert not [warning for warning in found["figures"]["warnings"] if "names the base" in warning]
    costs = port / "costs.json"
    costs.write_text(json.dumps({"1": 10, "8": 11, "64": 19, "512": 100}))
    small = run(port, "tree", "--new-tokens", "24", "--costs", str(costs), "--batch", "8")
    large = run(port, "tree", "--new-tokens", "24", "--costs", str(costs))
    assert small["chosen"]["nodes"] <= large["chosen"]["nodes"] <= 64
    assert large["rows"][-1]["nodes"] == 64  # the stock tree
    assert json.loads((port / "run" / "heads" / "tree.json").read_text()) == large["chosen"]["choices"]
    assert "expected gain" in large["summary"]


def test_costs_must_reach_the_smallest_tree_there_is(port: Path, tmp_path: Path, monkeypatch):
    """Ranks of heads whose second candidate alone is right: the smallest tree has 3 nodes."""
    monkeypatch.setattr(heads_tree, "load_ranks", lambda *a, **k: torch.ones(4, 6, 2, dtype=torch.long))
    opened = open_port_run(port / "port.yaml", run_folder=tmp_path / "run")
    with pytest.raises(TreeError, match="do not reach a tree at batch 1"):
        choose_port_tree(opened, TreeLimits(), costs=StepCosts((1, 2), (10.0, 11.0)))
    monkeypatch.setattr(heads_tree, "load_ranks", lambda *a, **k: pytest.fail("ranks were measured first"))
    with pytest.raises(TreeError, match="do not reach a tree at batch 2"):
        choose_port_tree(opened, TreeLimits(), costs=StepCosts((1, 2), (10.0, 11.0)), batch=2)


def test_a_tree_judged_on_the_prompt_it_was_chosen_from_is_called_so(port: Path, monkeypatch):
    ranks = torch.zeros(2, 6, 2, dtype=torch.long)
    monkeypatch.setattr(heads_tree, "load_ranks", lambda *a, prompts, **k: ranks[:prompts])
    for prompts, is_said in (("1", True), ("2", False)):
        result = call(port, "tree", "--prompts", prompts, "--run-folder", str(port / "run"))
        assert result.exit_code == 0, result.output
        assert ("note: with one prompt the tree is judged on what it was chosen from" in result.stdout) == is_said


@pytest.mark.parametrize("batch", [1, 4])
def test_measured_step_costs_are_those_of_the_batch(port: Path, tmp_path: Path, batch: int):
    opened = open_port_run(port / "port.yaml", run_folder=tmp_path / "run")
    costs = measure_step_costs(opened, batch=batch, sizes=(1, 2, 64))
    assert costs.tokens == (batch, 2 * batch, 64 * batch)
    assert 0 < costs.ms[0] <= costs.ms[1] < costs.ms[2]  # 64 times the arithmetic: no noise hides that


def test_steps_that_cannot_be_written_down_are_timed_eagerly(port: Path, tmp_path: Path, monkeypatch):
    def step(*arguments):
        raise RuntimeError("a value is read back")

    monkeypatch.setattr(Decoder, "step", step)
    costs = measure_step_costs(open_port_run(port / "port.yaml", run_folder=tmp_path / "run"), sizes=(1, 2))
    assert costs.tokens == (1, 2)


def test_a_tree_is_chosen_by_costs_measured_here(port: Path, monkeypatch):
    monkeypatch.setattr(heads_tree, "COST_SIZES", (1, 2, 8, 64))
    found = run(port, "tree", "--new-tokens", "24", "--measure-costs", "--batch", "4")
    assert found["batch"] == 4
    assert all(row["step_ms"] > 0 for row in found["rows"])
    speed_ups = [row["speed_up"] for row in found["rows"][:-1]]
    assert found["chosen"]["speed_up"] == max(speed_ups)
    assert "at batch 4" in found["summary"]


def test_ranks_are_measured_again_when_the_prompts_file_says_something_else(port: Path, tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("Return a list of\nThe value of the argument is\n")
    options = ("--new-tokens", "8", "-p", f"alignment.prompts={file}", "--run-folder", str(tmp_path / "run"))
    assert call(port, "check", *options).exit_code == 0
    assert "measuring" not in call(port, "tree", *options).stderr
    file.write_text("Raises an error when the\n")
    again = call(port, "tree", *options)
    assert "measuring the heads' ranks" in again.stderr
    assert len(load_file(tmp_path / "run" / "heads" / "ranks.safetensors")["ranks"]) == 1


def test_a_streamed_check_reads_the_same_ranks(port: Path, tmp_path: Path):
    arguments = ("--prompts", "2", "--new-tokens", "8", "--json", "--run-folder", str(tmp_path / "run"))
    whole = json.loads(call(port, "check", "--no-stream", *arguments).stdout)
    ranks = load_file(tmp_path / "run" / "heads" / "ranks.safetensors")["ranks"]
    streamed = json.loads(call(port, "check", "--stream", *arguments).stdout)
    assert (whole["figures"]["streamed"], streamed["figures"]["streamed"]) == (False, True)
    assert torch.equal(load_file(tmp_path / "run" / "heads" / "ranks.safetensors")["ranks"], ranks)


def test_random_heads_fail_the_check(port: Path, tmp_path: Path):
    torch.manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in load_file(DEMO / "heads" / "medusa_lm_head.safetensors").items()}
    save_file({name: torch.randn(shape) / 4 for name, shape in shapes.items()}, tmp_path / "heads.safetensors")
    arguments = ("-p", f"heads={tmp_path / 'heads.safetensors'}", "--run-folder", str(tmp_path / "run"), "--json")
    result = call(port, "check", "--new-tokens", "24", *arguments)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert {head["verdict"] for head in found["heads"]} == {"random"}
    assert found["failing_gate"] == "heads: random"


def test_a_check_on_too_few_tokens_is_not_run_to_an_end(port: Path, tmp_path: Path):
    """Heads that fit, but one prompt of three tokens cannot show it: that is no failure of theirs."""
    few = ["--prompts", "1", "--new-tokens", "6", "--run-folder", str(tmp_path / "run"), "--json"]
    prompts = ["-p", 'alignment.prompts=["the the the"]']
    result = call(port, "check", *few, *prompts)
    document = json.loads(result.stdout)
    assert document["heads"][0]["verdict"] == "undecided", document["summary"]
    assert document["verdict"] == "not_run"
    assert document["failing_gate"] is None
    assert "cannot tell whether these heads fit" in document["summary"]
    assert result.exit_code == 3


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("data", "said"), [("missing.txt", "the text cannot be read"), ("{text}", "brings no tokenizer")]
)
def test_a_missing_text_is_said_before_a_base_without_a_tokenizer(
    port: Path, tmp_path: Path, command: str, data: str, said: str
):
    shutil.copytree(DEMO / "base", tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer*"))
    options = ("--data", data.format(text=port / "text.txt"), "-p", f"base={tmp_path / 'base'}")
    result = call(port, command, *options, "--run-folder", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr.splitlines()[0]


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_tokenizer_of_another_base_is_refused(port: Path, tmp_path: Path, command: str):
    """The tokenizer has 2,560 tokens, the base half of them."""
    sizes = {"vocab_size": 1280, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    BloomForCausalLM(BloomConfig(**sizes)).save_pretrained(tmp_path / "base")
    for file in DEMO.glob("base/tokenizer*"):
        shutil.copy(file, tmp_path / "base")
    shapes = {"0.0.linear.weight": (32, 32), "0.0.linear.bias": (32,)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "heads.safetensors")
    options = ("-p", f"base={tmp_path / 'base'}", "-p", f"heads={tmp_path / 'heads.safetensors'}")
    (tmp_path / "text.txt").write_text((port / "text.txt").read_text().replace("\n\n", " "))
    options += ("--data", str(tmp_path / "text.txt"), "--run-folder", str(tmp_path / "run"))
    result = call(port, command, *(SETTINGS if command == "train" else ()), *options)
    assert result.exit_code == 2, result.output
    assert "the tokenizer does not belong to the base model" in result.output
    assert f"where: {tmp_path / 'base'}" in result.output


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (("train", "--data", "{text}", *SETTINGS, "--steps", "2", "--out", "{out}"), "training-"),
        (("export", "--layout", "original", "--out", "{out}"), "out/medusa_lm_head.safetensors"),
        (("export", "--layout", "original", "--out", "{out}", "--pickle"), "out/medusa_lm_head.pt"),
    ],
)
def test_a_full_disk_is_said_and_leaves_nothing(port: Path, tmp_path: Path, arguments, written: str):
    """The limit on a file's size refuses as a full disk does."""
    filled = [argument.format(text=port / "text.txt", out=tmp_path / "out") for argument in arguments]
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, earlier[1]))
    try:
        result = call(port, *filled, "--run-folder", str(tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
    assert result.exit_code == 2, result.output
    assert "a file grew beyond" in result.output
    assert written in result.output
    assert set(read_tree(tmp_path)) == {"run/run.json"}


@pytest.mark.parametrize("layout", ["original", "tgi", "merged"])
def test_an_export_names_the_layout_that_was_asked_for(port: Path, tmp_path: Path, layout: str):
    found = run(port, "export", "--layout", layout, "--out", str(tmp_path / "out"))
    assert f" written as {layout}" in found["summary"]


def test_an_export_is_written_once(port: Path, tmp_path: Path):
    out = tmp_path / "vllm"
    found = run(port, "export", "--layout", "vllm", "--out", str(out))
    assert read_head_set(out).layout == "vLLM"
    assert found["file"].endswith(".safetensors")
    again = call(port, "export", "--layout", "vllm", "--out", str(out), "--run-folder", str(port / "run"))
    assert again.exit_code == 2
    assert "occupied" in again.output


@pytest.mark.parametrize("command", [("train", "--data", "{text}", *SETTINGS), ("check",), ("tree",)])
def test_a_file_in_place_of_the_heads_folder_is_refused_at_once(port: Path, tmp_path: Path, command: tuple[str, ...]):
    folder = tmp_path / "run"
    assert (
        call(port, "export", "--layout", "tgi", "--out", str(tmp_path / "o"), "--run-folder", str(folder)).exit_code
        == 0
    )
    (folder / "heads").write_text("in the way")
    filled = [argument.format(text=port / "text.txt") for argument in command]
    result = call(port, *filled, "--run-folder", str(folder))
    assert result.exit_code == 2, result.output
    assert "cannot be written" in result.output
    assert "step 1/" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--data", "missing.txt"), "the text cannot be read"),
        (("train", "--data", "{short}"), "shorter than one window"),
        (("train", "--data", "{short}"), "where: {short}"),
        (("check", "--data", "{short}"), "where: {short}"),
        (("train", "--data", "{text}", "--prompts", "3"), "too few continuations"),
        (("train", "--data", "{text}", "--prompts", "3"), "where: {text}"),
        (("train", "--data", "{text}", "--steps", "0"), "training settings cannot be used"),
        (("train", "--prompts", "0"), "nothing to train on"),
        (("train", "--self-chat", "8"), "no text and 24 prompts"),
        (("train", "--data", "{text}", "--prompts", "0", "--self-chat", "8"), "text.txt and 0 prompts"),
        (("train", "--data", "{text}", "--self-chat", "-1"), "self_chat: -1"),
        (("train", "--data", "{text}", "--self-chat-temperature", "0"), "self_chat_temperature: 0.0"),
        (("train", "--data", "{text}", "--self-chat-top-p", "1.5"), "self_chat_top_p: 1.5"),
        (("train", "--data", "{text}", "--variant", "v3"), "variant: v3, none of v1, v2"),
        (("train", "--data", "{text}", "--out", "{short}/heads"), "cannot be written"),
        (("check", "--new-tokens", "100000"), "do not fit the base's positions"),
        (("train", "--data", "{text}", "--new-tokens", "100000"), "where: {base}"),
        (("train", "--data", "{text}", "--out", "{occupied}"), "did not write"),
        (("export", "--layout", "vlm", "--out", "{new}"), "did you mean 'vllm'"),
        (("tree", "--max-nodes", "65"), "limits leave no tree"),
        (("tree", "--costs", "{costs}", "--batch", "16"), "do not reach a tree at batch 16"),
        (("tree", "--costs", "{falling}"), "fall where steps grow"),
        (("tree", "--costs", "{costs}", "--measure-costs"), "given and to be measured"),
        (("tree", "--costs", "missing.json"), "step costs cannot be read"),
        (("check", "--data", "missing.txt"), "the text cannot be read"),
        (("check", "-p", "heads=nowhere"), "do not exist"),
    ],
)
def test_bad_input_is_refused(port: Path, tmp_path: Path, arguments: tuple[str, ...], said: str):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "mine.txt").write_text("x")
    costs = {"costs": {"1": 10, "8": 11.2}, "falling": {"1": 10, "8": 5, "64": 19}}
    for name, times in costs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(times))
    names = {name: tmp_path / f"{name}.json" for name in costs}
    names |= {"short": tmp_path / "short.txt", "text": port / "text.txt", "occupied": tmp_path / "occupied"}
    names["base"] = DEMO / "base"
    filled = [argument.format(**names, new=tmp_path / "new") for argument in arguments]
    settings = [*SETTINGS] if filled[0] == "train" else []
    result = call(port, filled[0], *settings, *filled[1:], "--run-folder", str(tmp_path / "run"))
    assert result.exit_code == 2, result.output
    assert said.format(**names) in result.output
    assert not (tmp_path / "new").exists()
