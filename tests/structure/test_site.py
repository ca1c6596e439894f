"""The site builds without warnings, takes the outputs of a complete run, and loads nothing from another host."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parent / "fixtures" / "keeps_the_contract.ipynb"


@pytest.fixture(scope="module")
def site(root):
    """The site's build module, which lies outside the package."""
    spec = importlib.util.spec_from_file_location("site_build", root / "notebooks" / "site" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(root, tmp_path):
    """A copy of what the site is made from, the project's notebooks included, with one short notebook more."""
    shutil.copytree(
        root / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("ports", ".ipynb_checkpoints")
    )
    shutil.copy(root / "README.md", tmp_path)
    shutil.copy(FIXTURE, tmp_path / "notebooks" / "00_count.ipynb")
    return tmp_path


def write_executed(folder: Path, *outputs: dict) -> None:
    notebook = json.loads(FIXTURE.read_text(encoding="utf-8"))
    notebook["cells"][5].update(outputs=list(outputs), execution_count=1)
    folder.mkdir(parents=True)
    (folder / "00_count.ipynb").write_text(json.dumps(notebook))


def build(project: Path) -> subprocess.CompletedProcess:
    pytest.importorskip("myst_nb", reason="the docs extra is not installed")
    command = [sys.executable, "notebooks/site/build.py", "--out", "build/docs"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)


STREAM = {"output_type": "stream", "name": "stdout", "text": "three heads\n"}
WIDGET = {
    "output_type": "display_data",
    "metadata": {},
    "data": {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "HBox()"},
}


def test_the_site_builds_with_the_outputs_of_the_run(project):
    shutil.copytree(
        project / "notebooks", project / "runs" / "demo", ignore=shutil.ignore_patterns("site", "howto", "00_count.*")
    )
    path = {"output_type": "stream", "name": "stdout", "text": f"{project}/runs/demo\n"}
    write_executed(project / "runs" / "demo" / "preflight", STREAM, WIDGET, path)
    run = build(project)
    assert run.returncode == 0, run.stderr
    page = (project / "build" / "docs" / "00_count.html").read_text()
    assert "three heads" in page
    assert "HBox" not in page
    assert "runs/demo" in page
    assert str(project) not in page
    for stated in ("00_count.html", "index.html"):
        assert "those of the run <code" in (project / "build" / "docs" / stated).read_text()
    for needed in ("refused", "port file", "covered"):
        assert needed in "".join(file.read_text() for file in (project / "build" / "docs").glob("*.html"))


PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><circle r="4" /></svg>'


def test_without_a_run_every_notebook_says_so_and_a_new_page_is_found_with_its_picture(project):
    howto = project / "notebooks" / "howto"
    (howto / "a_new_page.md").write_text("# A page nobody listed\n\n![a circle](circle.svg)\n")
    (howto / "circle.svg").write_text(PICTURE)
    # What JupyterLab leaves behind where somebody opened a page, and a notebook of the reader's own.
    (howto / ".ipynb_checkpoints").mkdir()
    (howto / ".ipynb_checkpoints" / "a_new_page-checkpoint.md").write_text("# An old copy\n")
    shutil.copy(FIXTURE, project / "notebooks" / "Untitled.ipynb")
    run = build(project)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    pages = project / "build" / "docs"
    notebooks = sorted(pages.glob("[0-9]*.html"))
    assert len(notebooks) == len(list((project / "notebooks").glob("[0-9]*.ipynb")))
    for page in (*notebooks, pages / "index.html"):
        assert "shown without outputs" in page.read_text(), page.name
    assert "A page nobody listed" in (pages / "index.html").read_text()
    assert "circle.svg" in (pages / "howto" / "a_new_page.html").read_text()
    assert (pages / "_images" / "circle.svg").read_text() == PICTURE
    assert not list(pages.rglob("*-checkpoint*"))
    assert not list(pages.rglob(".ipynb_checkpoints"))


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ({"verdict": "fail"}, "*fail*"),
        ({"verdict": "not_run"}, "*not run*"),
        ({"verdict": "pass", "figures": {"approximate_fit": None}}, "*pass*"),
        ({"verdict": "pass", "figures": {"approximate_fit": {"passed": True}}}, "*pass, approximate fit*"),
        (None, "`demo`."),
    ],
)
def test_the_note_names_the_run_and_how_it_ended(site, tmp_path, outcome, said):
    run = tmp_path / "demo"
    (run / "report").mkdir(parents=True)
    if outcome:
        (run / "report" / "outcome.json").write_text(json.dumps(outcome))
    assert said in site.describe_outputs(run)


def test_the_note_stands_below_the_title_even_of_a_notebook_that_broke_off(site):
    notebook = json.loads(FIXTURE.read_text(encoding="utf-8"))
    notebook["cells"].insert(0, {"cell_type": "markdown", "id": "x", "metadata": {}, "source": "An error below"})
    cells = json.loads(site.add_note(json.dumps(notebook), "No run."))["cells"]
    assert ["".join(cell["source"])[:2] for cell in cells[:3]] == ["An", "# ", "::"]


def test_a_page_that_loads_from_another_host_fails_the_build(site, tmp_path, monkeypatch, capsys):
    build_module = pytest.importorskip("sphinx.cmd.build", reason="the docs extra is not installed")

    def write_page(arguments: list[str]) -> int:
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs" / "a.html").write_text("<img src='https://example.org/plot.png'>")
        return 0

    monkeypatch.setattr(build_module, "build_main", write_page)
    assert site.build_site(tmp_path / "runs", tmp_path / "docs") == 1
    assert "a.html: https://example.org/plot.png" in capsys.readouterr().err


def test_a_broken_reference_fails_the_build(project):
    page = project / "notebooks" / "site" / "index.md"
    page.write_text(page.read_text().replace("contribute\n", "contribute\nno-such-page\n"))
    run = build(project)
    assert run.returncode == 1
    assert "no-such-page" in run.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script async="async" src="//cdn.example.org/x.js"></script>'),
        ("a.html", "<link rel='stylesheet' href='https://fonts.example.org/css'>"),
        ("a.css", '@import url("https://fonts.example.org/css");'),
        ("a.css", "src: url(//fonts.example.org/x.woff2)"),
    ],
)
def test_what_a_browser_would_load_is_found(site, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert len(site.find_external_resources(tmp_path)) == 1


@pytest.mark.parametrize(
    "text",
    ['<a href="https://example.org">x</a>', '<img src="_static/x.png">', "<svg xmlns='http://www.w3.org/2000/svg'>"],
)
def test_links_and_own_files_are_left_alone(site, tmp_path, text):
    (tmp_path / "a.html").write_text(text)
    assert site.find_external_resources(tmp_path) == []


def test_only_a_run_with_every_notebook_counts(site, tmp_path):
    write_executed(tmp_path / "runs" / "half" / "preflight", STREAM)
    found, _ = site.find_complete_run(tmp_path / "runs", ["00_count.ipynb", "01_patch.ipynb"])
    assert found is None
    found, files = site.find_complete_run(tmp_path / "runs", ["00_count.ipynb"])
    assert found == tmp_path / "runs" / "half"
    assert files == {"00_count.ipynb": tmp_path / "runs" / "half" / "preflight" / "00_count.ipynb"}


def test_a_run_that_passed_comes_before_a_newer_one_that_failed(site, tmp_path):
    for name, verdict, age_s in (("good", "pass", 200), ("older", "pass", 300), ("bad", "fail", 100)):
        write_executed(tmp_path / name / "preflight", STREAM)
        (tmp_path / name / "report").mkdir()
        (tmp_path / name / "report" / "outcome.json").write_text(json.dumps({"verdict": verdict}))
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    assert site.find_complete_run(tmp_path, ["00_count.ipynb"])[0] == tmp_path / "good"
    shutil.rmtree(tmp_path / "good")
    shutil.rmtree(tmp_path / "older")
    assert site.find_complete_run(tmp_path, ["00_count.ipynb"])[0] == tmp_path / "bad"
