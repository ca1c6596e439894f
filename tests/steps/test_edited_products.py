"""What patch and convert made is used by no later step once somebody edited it, unless it is to be judged as it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from porting_kit.cli import app
from porting_kit.errors import RunFolderError
from porting_kit.outcomes import Verdict
from porting_kit.steps.align import align_port
from porting_kit.steps.build import build_port
from porting_kit.steps.context import PortRun, open_port_run
from porting_kit.steps.convert import convert_port
from porting_kit.steps.diagnose import diagnose_port
from porting_kit.steps.patch import patch_port
from porting_kit.steps.report import write_report
from porting_kit.steps.serving import write_serving
from tests.steps.sharded_port import change_ranks, write_port

QUICK = {"alignment.new_tokens": 6, "alignment.batch_sizes": [8]}
WEIGHTS, MODULE, TREE = "checkpoint/rank0.safetensors", "patched/medusa_qwen.py", "checkpoint/medusa_choices.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A port file, and its run folder with patch and convert done."""
    port = write_port(tmp_path_factory.mktemp("port"))
    run = open_port_run(port, run_folder=port.parent / "run", overrides=QUICK)
    patch_port(run)
    convert_port(run, verify=False)
    return port, run.folder.root


@pytest.fixture
def run(made: tuple[Path, Path], tmp_path: Path) -> PortRun:
    """A copy of that run, made a moment later: no time of any file is the same."""
    port, root = made
    shutil.copytree(root, tmp_path / "run", copy_function=shutil.copyfile)
    return open_port_run(port, run_folder=tmp_path / "run", overrides=QUICK)


def flip_a_byte(root: Path) -> str:
    content = bytearray((root / WEIGHTS).read_bytes())
    content[-9] ^= 1
    (root / WEIGHTS).write_bytes(content)
    return WEIGHTS


def change_a_line(root: Path) -> str:
    file = root / MODULE
    file.write_text(file.read_text().replace("def forward", "def  forward", 1))
    return MODULE


def write_another_tree(root: Path) -> str:
    (root / TREE).write_text(json.dumps([[0], [0, 0]]))
    return TREE


STEPS: dict[str, Callable[[PortRun], object]] = {
    "build": lambda run: build_port(run, plan_only=True),
    "align": align_port,
    "serving": write_serving,
    "diagnose": lambda run: diagnose_port(run, run.port_file),
}


@pytest.mark.parametrize("edit", [flip_a_byte, change_a_line, write_another_tree])
def test_no_step_uses_an_edited_product(run: PortRun, edit: Callable[[Path], str]) -> None:
    product = edit(run.folder.root)
    step = "patch" if product == MODULE else "convert"
    for use in STEPS.values():
        with pytest.raises(RunFolderError, match=f"what step '{step}' made was edited since") as caught:
            use(run)
        assert caught.value.exit_code == 2
        assert caught.value.found.startswith(f"{product}: ")
        assert caught.value.next_step.startswith(f"rerun `porting-kit {step}`")
    assert not (run.folder.step("build") / "outcome.json").exists()
    report = write_report(run).outcome
    assert (report.verdict, report.failing_gate) == (Verdict.NOT_RUN, f"{step} is edited")


def test_a_copied_and_touched_run_is_used_and_its_times_are_kept(run: PortRun) -> None:
    for name in (WEIGHTS, MODULE, TREE):
        os.utime(run.folder.root / name, ns=(5, 5))
    build_port(run, plan_only=True)
    assert run.folder.outcome("convert").made[WEIGHTS]["modified_ns"] == 5
    assert run.folder.outcome("convert").summary.endswith("(--verify)")


def test_running_the_step_again_mends_it(run: PortRun) -> None:
    write_another_tree(run.folder.root)
    convert_port(run, verify=False)
    assert build_port(run, plan_only=True).outcome.verdict is Verdict.PASS


def test_the_command_refuses_and_judges_when_asked(made: tuple[Path, Path], run: PortRun) -> None:
    flip_a_byte(run.folder.root)
    overrides = [text for name, value in QUICK.items() for text in ("-p", f"{name}={json.dumps(value)}")]
    command = ["align", str(made[0]), "--out", str(run.folder.root), "--json", *overrides]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["found"] == f"{WEIGHTS}: other content"
    done = CliRunner().invoke(app, [*command, "--edited"])
    document = json.loads(done.stdout)
    assert document["figures"]["edited"] == [f"{WEIGHTS}: other content"]
    assert f"judged as edited since the step that made it: {WEIGHTS}" in document["summary"]
    assert (done.exit_code, document["verdict"]) == (0, "pass")


def test_heads_that_are_never_accepted_are_noticed_when_edited(run: PortRun) -> None:
    """No token, logit or step of this alignment tells a last head of zeros from the right one."""

    def empty_last_head(ranks: list[dict[str, torch.Tensor]]) -> None:
        for name, tensor in ranks[0].items():
            if name.startswith("medusa_heads.2."):
                ranks[0][name] = torch.zeros_like(tensor)

    change_ranks(run.folder.checkpoint, empty_last_head)
    with pytest.raises(RunFolderError, match="edited since"):
        align_port(run)
    outcome = align_port(run, edited=True).outcome
    assert outcome.verdict is Verdict.PASS
    assert "medusa_heads.2.lm_head.weight: expected the base's values" in outcome.summary
    assert f"edited since the step that made it: {WEIGHTS}" in outcome.summary
    assert write_report(run).outcome.verdict is Verdict.NOT_RUN


def test_a_file_that_the_port_names_is_an_input(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Another tree or other prompts under the same name make another port."""
    port = tmp_path / "port.yaml"
    port.write_text(made[0].read_text().replace("base: base", f"base: {made[0].parent / 'base'}"))
    for name, text in {"tree.json": "[[0], [1]]", "prompts.txt": "one", "captured.npy": "ids"}.items():
        (tmp_path / name).write_text(text)
    named = {"tree": "tree.json", "alignment.prompts": "prompts.txt", "alignment.captured": "captured.npy"}
    run = open_port_run(port, run_folder=tmp_path / "run", overrides={**named, "engine": "captured"})
    before = {step: run.inputs(step) for step in ("preflight", "convert", "build", "align")}
    changed = {"tree.json": ("tree file", 4), "prompts.txt": ("prompts file", 1), "captured.npy": ("captured file", 1)}
    for name, (what, steps) in changed.items():
        (tmp_path / name).write_text("other")
        found = {step: before[step] != run.inputs(step) and what for step in before}
        assert list(found.values()).count(what) == steps
        assert before["align"][what] != run.inputs("align")[what]
        before = {step: run.inputs(step) for step in before}
