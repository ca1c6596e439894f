"""The coverage page: figures of several trees side by side, written from the JSON of `porting-kit coverage --json`.

`python -m porting_kit.coverage.page FILE.json ... [--out PAGE.md]`; the page holds nothing that is not in those files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from porting_kit.architectures.releases import release_key
from porting_kit.coverage.tables import (
    format_table,
    half_precision_table,
    largest_error,
    merge_documents,
    ranks_table,
    single_files_table,
)
from porting_kit.errors import PortFileError
from porting_kit.whole_files import read_json

DEFAULT_PAGE = Path("notebooks/howto/coverage.md")
HEAD = """# Coverage

Which decoder classes of TensorRT-LLM take Medusa heads, and how far are they from Hugging Face?

Each row is one variant of a model family: a small random Hugging Face model, converted to a checkpoint with fitted
Medusa heads, and run in float32 by the tree's own Python code on the emulator, before and after the patch. A row is
**aligned** when the logits of every prompt token, of every node of a tree and of every head are within {bound:g} of
Hugging Face, relative to the largest logit, and Medusa's tokens are the base's greedy tokens. Differences by design are
set equal in the reference and named below. Half precision and several ranks have sections of their own.

Covered: {covered}. Not covered: {not_covered}.

This page is generated: `porting-kit coverage --source TREE --tp 2 --tp 4 --pp 2 --json > FILE.json` for each tree, the
same with `--dtype float16` and `--dtype bfloat16`, then `python -m porting_kit.coverage.page FILE.json ...`. A tree may
be measured in parts (`--part`, `--arch`); the first file that has a row counts.
"""


def load_documents(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The documents of trees in order of release, and those of single files behind them.

    Raises:
        PortFileError: a file is no document of the coverage command, or none is in float32.
    """
    documents, single = [], []
    for file in files:
        try:
            document = read_json(file)
            if isinstance(document, dict) and isinstance(document.get("single_files"), list):
                single.append(document)
                continue
            complete = isinstance(document["rows"], list) and document["tree"] and document["date"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _not_a_document(file, f"{type(error).__name__}: {error}") from error
        if not complete:
            raise _not_a_document(file, "a document without rows, tree or date")
        documents.append(document)
    if all(document["figures"]["dtype"] != "float32" for document in documents):
        raise _not_a_document(files[0], "rows in half precision only; the page's matrix shows float32")
    order = sorted(merge_documents(documents), key=lambda document: release_key(document["release"]) or (0, 0, 0, 0, 0))
    return order + single


def write_page(documents: Sequence[dict[str, Any]]) -> str:
    """The whole page as Markdown; the matrix shows the rows in float32."""
    single = [document for document in documents if "single_files" in document]
    documents = [document for document in documents if document not in single]
    halves = [document for document in documents if document["figures"]["dtype"] != "float32"]
    every, documents = documents, [document for document in documents if document not in halves]
    first = documents[0]
    covered = sorted({part for document in documents for part in document["covered"]})
    not_covered = [part for part in first["not_covered"] if part not in covered]
    head = HEAD.format(bound=first["figures"]["bound"], covered=", ".join(covered), not_covered=", ".join(not_covered))
    reasons = _collect_reasons(documents)
    sections = [
        head,
        "## Trees\n\n" + _trees_table(documents) + "\n\nWall seconds are summed over the parts of a tree, "
        "and include what else the machine did at the time.",
        "## Architectures\n\n"
        "A figure is the larger of the context's and the tree's error. `p`: the source was patched; `a`: it accepts a\n"
        "tree already. R1, R2, ...: refused, F1, ...: failed, with the reason below. A dash: not in this tree.\n\n"
        + _matrix(documents, reasons),
        "## Half precision\n\n"
        "Checkpoints in float16 and bfloat16. A row's bound is four times what rounding weights and every module's\n"
        "output to the type does to Hugging Face's own logits on the same tokens; a token of Medusa's counts as equal\n"
        "when only that rounding stands between it and the base's.\n\n" + half_precision_table(halves),
        "## Several ranks\n\n"
        "Every aligned row once more, its checkpoint cut for tensor-parallel (tp) or pipeline (pp) ranks, each rank a\n"
        "process, joined by torch.distributed (gloo). All ranks must say the same, within the bounds above.\n\n"
        + ranks_table(every),
        "## Single files\n\n"
        "Model definitions of which no whole tree is at hand: patched, checked that every argument arrives, and\n"
        "patched again without a change. The table is about their text; nothing was run for it.\n\n"
        + single_files_table(single),
        "## Reasons\n\n" + "\n".join(f"- **{mark}** {text}" for text, mark in reasons.items()),
        "## Differences by design\n\n" + _differences(documents),
        "## One position id per request\n\n" + _positions(documents),
    ]
    return "\n\n".join(section.rstrip() for section in sections) + "\n"


def _trees_table(documents: Sequence[dict[str, Any]]) -> str:
    rows = []
    for document in documents:
        tree, counts = document["tree"], document["counts"]
        commit = f"{tree['commit'][:12]}, {tree['commit_date'][:10]}" if tree["commit"] else tree["kind"]
        slowest = max((row["seconds"] for row in document["rows"]), default=0.0)
        cells = [
            document["release"],
            commit,
            document["date"],
            *(counts[key] for key in ("aligned", "refused", "failed")),
        ]
        rows.append([*cells, f"{document['seconds']:.0f}", f"{slowest:.0f}"])
    names = ["release", "commit", "run on", "aligned", "refused", "failed", "wall seconds", "slowest row"]
    return format_table(names, rows)


def _matrix(documents: Sequence[dict[str, Any]], reasons: dict[str, str]) -> str:
    lines: dict[tuple[str, str], list[str]] = {}
    for index, document in enumerate(documents):
        for row in document["rows"]:
            cells = lines.setdefault((row["arch"], row["case"]), ["–"] * len(documents))
            cells[index] = _cell(row, document["release"], reasons)
    body = [[arch, case, *cells] for (arch, case), cells in sorted(lines.items()) if set(cells) != {"–"}]
    return format_table(["architecture", "case", *(document["release"] for document in documents)], body)


def _cell(row: dict[str, Any], release: str, reasons: dict[str, str]) -> str:
    if row["status"] == "aligned":
        mark = {"patched": "p", "already_accepts": "a"}[row["patched"]]
        return f"{largest_error(row):.0e} {mark}"
    if _is_absent(row):
        return "–"
    return reasons[_word_reason(row, release)]


def _word_reason(row: dict[str, Any], release: str) -> str:
    """A reason without its release, which the column names already."""
    return str(row["reason"]).replace(f"TensorRT-LLM {release}", "this release")


def _is_absent(row: dict[str, Any]) -> bool:
    """The tree does not have the architecture: the row was never patched."""
    return row["status"] == "refused" and row["patched"] is None


def _collect_reasons(documents: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Reason -> its mark, in the order in which the rows show them."""
    marks: dict[str, str] = {}
    counts = {"refused": 0, "failed": 0}
    for document in documents:
        for row in document["rows"]:
            reason = _word_reason(row, document["release"])
            if row["reason"] and not _is_absent(row) and reason not in marks:
                counts[row["status"]] += 1
                marks[reason] = f"{row['status'][0].upper()}{counts[row['status']]}"
    return marks


def _differences(documents: Sequence[dict[str, Any]]) -> str:
    found: dict[str, set[str]] = {}
    for document in documents:
        for row in document["rows"]:
            for name in row["inherent"]:
                found.setdefault(name, set()).add(row["arch"])
    if not found:
        return "None was met."
    return format_table(
        ["set equal", "architectures"], [[name, ", ".join(sorted(archs))] for name, archs in found.items()]
    )


def _positions(documents: Sequence[dict[str, Any]]) -> str:
    rows = [
        [document["release"], row["arch"], row["case"], f"{row['tree_error']:.0e}", row["note"]]
        for document in documents
        for row in document["rows"]
        if row["note"] and row["status"] == "aligned"
    ]
    if not rows:
        return "No architecture of these trees has learned positions."
    return format_table(["release", "architecture", "case", "tree error", "control"], rows)


def _not_a_document(file: Path, found: str) -> PortFileError:
    return PortFileError(
        "this is no result of the coverage command",
        expected="what `porting-kit coverage --source TREE --json` prints",
        found=found,
        where=file,
        next_step="run the command for that tree again",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 2 for a file that is no coverage document."""
    parser = argparse.ArgumentParser(prog="python -m porting_kit.coverage.page", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=Path, default=DEFAULT_PAGE, metavar="PAGE.md")
    options = parser.parse_args(arguments)
    try:
        text = write_page(load_documents(options.files))
    except PortFileError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
