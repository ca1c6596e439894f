"""Tables of the coverage page that sum up rows: half precision against its measured bounds, and several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Document = dict[str, Any]


def format_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def largest_error(row: dict[str, Any]) -> float:
    """The larger of the context's and the tree's error of an aligned row or run."""
    return max(row["context_error"], row["tree_error"])


def merge_documents(documents: Sequence[Document]) -> list[Document]:
    """Documents of one release and dtype as one: a tree may be measured in parts, by `--arch`."""
    merged: dict[tuple[str, str], Document] = {}
    for document in documents:
        key = document["release"], document["figures"]["dtype"]
        if key not in merged:
            merged[key] = {**document, "rows": [], "seconds": 0.0}
        known = {(row["arch"], row["case"]) for row in merged[key]["rows"]}
        merged[key]["rows"] += [row for row in document["rows"] if (row["arch"], row["case"]) not in known]
        merged[key]["seconds"] += document["seconds"]
        merged[key]["date"] = max(merged[key]["date"], document["date"])
    for document in merged.values():
        statuses = [row["status"] for row in document["rows"]]
        document["counts"] = {status: statuses.count(status) for status in ("aligned", "refused", "failed")}
    return list(merged.values())


def half_precision_table(documents: Sequence[Document]) -> str:
    """Rows in float16 and bfloat16: counts, the largest error, and how much of its row's bound an error takes."""
    rows = []
    for document in documents:
        aligned = [row for row in document["rows"] if row["status"] == "aligned"]
        shares = [largest_error(row) / row["bound"] for row in aligned] or [0.0]
        worst = max(aligned, key=largest_error, default=None)
        rows.append(
            [
                document["release"],
                document["figures"]["dtype"],
                *(document["counts"][status] for status in ("aligned", "refused", "failed")),
                "–" if worst is None else f"{largest_error(worst):.1e} ({worst['arch']}, bound {worst['bound']:.1e})",
                f"{sorted(shares)[len(shares) // 2]:.2f}",
                f"{max(shares):.2f}",
            ]
        )
    if not rows:
        return "Not measured in these files."
    names = [
        "release",
        "dtype",
        "aligned",
        "refused",
        "failed",
        "largest error",
        "median share of the bound",
        "largest",
    ]
    return format_table(names, rows)


def single_files_table(documents: Sequence[Document]) -> str:
    """Model definitions read one by one: what the patch does to each."""
    rows = [row for document in documents for row in document["single_files"]]
    if not rows:
        return "None in these files."
    lines = [
        [
            row["family"],
            row["commit"],
            row["status"].replace("_", " "),
            ", ".join(row["found"]) or "–",
            row["reason"] or "–",
        ]
        for row in sorted(rows, key=lambda row: (row["family"], row["commit"]))
    ]
    statuses = [row["status"] for row in rows]
    counts = ", ".join(f"{statuses.count(status)} {status.replace('_', ' ')}" for status in dict.fromkeys(statuses))
    names = ["file", "commit", "outcome", "what kept the tree out", "reason"]
    return f"{len(rows)} files: {counts}.\n\n" + format_table(names, lines)


def ranks_table(documents: Sequence[Document]) -> str:
    """The same rows on several ranks, by release."""
    rows, reasons = [], {}
    for document in documents:
        runs = [(row, run) for row in document["rows"] for run in row.get("sharded", ())]
        for ranks in dict.fromkeys(run["ranks"] for _, run in runs):
            chosen = [(row, run) for row, run in runs if run["ranks"] == ranks]
            counts = [sum(run["status"] == status for _, run in chosen) for status in ("aligned", "refused", "failed")]
            errors = [largest_error(run) for _, run in chosen if run["status"] == "aligned"]
            dtype = document["figures"]["dtype"]
            rows.append([document["release"], dtype, ranks, *counts, f"{max(errors):.1e}" if errors else "–"])
            for row, run in chosen:
                if run["reason"]:
                    reason = str(run["reason"]).replace(f"TensorRT-LLM {document['release']}", "this release")
                    reason = re.sub(r"TensorRT-LLM's \w+ ", "TensorRT-LLM's class ", reason)  # named behind it
                    named = reasons.setdefault((run["status"], ranks, reason), {})
                    named.setdefault(row["arch"], set()).add(document["release"])
    if not rows:
        return "Not measured in these files."
    names = ["release", "dtype", "ranks", "aligned", "refused", "failed", "largest error"]
    lines = [
        f"- {status} on {ranks}: {reason} – {', '.join(sorted(archs))}"
        for (status, ranks, reason), archs in sorted(reasons.items())
    ]
    return "\n\n".join([format_table(names, rows), "\n".join(lines)]).rstrip()
