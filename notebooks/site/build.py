"""Build the site: stage pages and notebooks in a folder, run Sphinx, check that the result needs no other host.

A notebook is taken as executed by a run (`runs/<name>/**/<notebook>`) when one run holds them all; a run that passed
comes first. Otherwise it is taken as it is in the source, without outputs. The index page and every notebook say which.

How-to pages are found by themselves: every file in `notebooks/howto/` is staged, pictures beside the pages included.
Hidden files, which editors and JupyterLab leave behind, and notebooks without a number are no part of the site.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parent
ROOT = SITE.parents[1]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
NO_OUTPUTS = (
    "The notebooks are shown without outputs: no complete run was there when the site was built. `make demo`, then "
    "`make docs`, adds them."
)
# Elements that make a browser fetch something while it renders the page. A plain link (`a href`) does not.
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|link)\b[^>]*?\b(?:src|href|data)\s*=\s*[\"']?((?:https?:)?//[^\s\"'>]+)",
    re.IGNORECASE,
)
LOADED_BY_STYLE = re.compile(r"(?:@import\s*|url\()\s*[\"']?((?:https?:)?//[^\s\"')]+)", re.IGNORECASE)


def find_complete_run(runs: Path, names: list[str]) -> tuple[Path | None, dict[str, Path]]:
    """The newest run that passed (else the newest) and holds every notebook executed, and where each lies in it."""
    folders = [folder for folder in runs.glob("*") if folder.is_dir()] if runs.is_dir() else []
    for folder in sorted(folders, key=lambda path: (has_passed(path), path.stat().st_mtime), reverse=True):
        executed = {name: next(iter(sorted(folder.rglob(name))), None) for name in names}
        if names and all(executed.values()):
            return folder, {name: path for name, path in executed.items() if path is not None}
    return None, {}


def has_passed(run: Path) -> bool:
    """Whether the run's report says pass."""
    return read_report(run).get("verdict") == "pass"


def read_report(run: Path) -> dict:
    """The outcome of the run's report, empty when it has none."""
    outcome = run / "report" / "outcome.json"
    return json.loads(outcome.read_text(encoding="utf-8")) if outcome.is_file() else {}


def stage_sources(staging: Path, runs: Path) -> str:
    """Copy pages, README and notebooks into the staging folder; returns the sentence on where outputs come from."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    shutil.copytree(ROOT / "notebooks" / "howto", staging / "howto", ignore=shutil.ignore_patterns(".*"))
    notebooks = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    run, executed = find_complete_run(runs, [notebook.name for notebook in notebooks])
    outputs = describe_outputs(run)
    for notebook in notebooks:
        text = executed.get(notebook.name, notebook).read_text(encoding="utf-8")
        text = add_note(drop_widgets(text), outputs)
        text = text.replace(f"{runs.resolve().parent}/", "")  # papermill writes absolute paths
        (staging / notebook.name).write_text(text, encoding="utf-8")
    for page in [*SITE.glob("*.md"), ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8").replace("{{ outputs }}", outputs)
        text = text.replace("](notebooks/howto/", "](howto/")  # the README's links start at the repository
        (staging / page.name).write_text(text, encoding="utf-8")
    return outputs


def describe_outputs(run: Path | None) -> str:
    """One sentence for a reader: which run the outputs come from and how it ended, or that there are none."""
    if run is None:
        return NO_OUTPUTS
    report = read_report(run)
    verdict = report.get("verdict", "").replace("_", " ")
    if verdict == "pass" and report.get("figures", {}).get("approximate_fit"):
        verdict = "pass, approximate fit"
    ending = f", whose verdict is *{verdict}*" if verdict else ""
    return f"The outputs in the notebooks are those of the run `{run.name}`{ending}."


def add_note(notebook: str, sentence: str) -> str:
    """The notebook with a note below its title."""
    document = json.loads(notebook)
    cells = document["cells"]
    titles = [place for place, cell in enumerate(cells) if "".join(cell["source"]).startswith("# ")]
    note = {"cell_type": "markdown", "id": "outputs", "metadata": {}, "source": f":::{{note}}\n{sentence}\n:::"}
    cells.insert(titles[0] + 1 if titles else 0, note)
    return json.dumps(document)


def drop_widgets(notebook: str) -> str:
    """The notebook without widgets: a page cannot run them, and each has a static twin beside it."""
    document = json.loads(notebook)
    document["metadata"].pop("widgets", None)
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [output for output in cell["outputs"] if WIDGET_VIEW not in output.get("data", {})]
    return json.dumps(document)


def find_external_resources(folder: Path) -> list[str]:
    """`page: address` for everything that a built page would load from another host while it renders."""
    found = []
    for page in sorted(folder.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        found += [f"{page.relative_to(folder)}: {address}" for address in LOADED.findall(text)]
    for sheet in sorted(folder.rglob("*.css")):
        addresses = LOADED_BY_STYLE.findall(sheet.read_text(encoding="utf-8"))
        found += [f"{sheet.relative_to(folder)}: {address}" for address in addresses]
    return found


def build_site(runs: Path, out: Path) -> int:
    """Stage, build with warnings as errors, check; returns the exit status."""
    from sphinx.cmd.build import build_main

    staging = out.parent / f"{out.name}-source"
    outputs = stage_sources(staging, runs)
    shutil.rmtree(out, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(SITE)]
    status = build_main([*options, "-d", str(out.parent / f"{out.name}-cache"), str(staging), str(out)])
    if status:
        return status
    external = find_external_resources(out)
    if external:
        print("the site loads from other hosts:", *external[:10], sep="\n  ", file=sys.stderr)
        return 1
    print(f"{out / 'index.html'}\n{outputs}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run folders")
    parser.add_argument("--out", type=Path, default=Path("build/docs"), help="where the pages go")
    arguments = parser.parse_args()
    sys.exit(build_site(arguments.runs, arguments.out.resolve()))
