"""English prose to train on, collected from the documentation that installed packages carry.

The text is what a reader of the docs sees: docstrings and the standard library's language reference, paragraph by
paragraph, without doctests, tables and markup. The same package versions give the same text, byte for byte, and the
versions and the hash are recorded with it. Nothing is downloaded.
This module does not tokenise and knows no model.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import lzma
import platform
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from porting_kit.errors import EnvironmentMissing

# Dependencies of this project, direct or of its extras, that carry much prose.
TEXT_PACKAGES = [
    "accelerate",
    "anyio",
    "attrs",
    "babel",
    "beautifulsoup4",
    "click",
    "docutils",
    "fonttools",
    "fsspec",
    "huggingface_hub",
    "hypothesis",
    "ipykernel",
    "ipython",
    "ipywidgets",
    "jedi",
    "jinja2",
    "jupyter_client",
    "jupyter_core",
    "jupyter_server",
    "jupyterlab",
    "libcst",
    "matplotlib",
    "mpmath",
    "myst-parser",
    "nbclient",
    "nbconvert",
    "nbformat",
    "networkx",
    "numpy",
    "packaging",
    "papermill",
    "parso",
    "pillow",
    "platformdirs",
    "pluggy",
    "prompt_toolkit",
    "psutil",
    "pydantic",
    "pygments",
    "pyparsing",
    "pytest",
    "pyzmq",
    "requests",
    "rich",
    "safetensors",
    "sphinx",
    "sqlalchemy",
    "sympy",
    "tokenizers",
    "torch",
    "tornado",
    "tqdm",
    "traitlets",
    "transformers",
    "typer",
    "urllib3",
    "virtualenv",
    "wcwidth",
]

DOCUMENT_SEPARATOR = "\n\x00\n"
HELD_OUT_PER_THOUSAND = 15

_ROLE = re.compile(r":[a-z:+-]+:(?=`)")
_LINK_TARGET = re.compile(r"`~?\.?([\w.]+)\s*<[^`>]*>`_*")
_ITEM = re.compile(r"^\s*(?:[-*+•]\s|\d+[.)]\s|[\w*,. ]{1,40}(?:\([^)]*\))?\s?:\s)")
_IDENTIFIER = re.compile(r"`[^`]*`|\b\w*[A-Z_]\w*[a-z]\w*\b|\d+")
_FUNCTION_WORDS = frozenset(
    [
        "the",
        "a",
        "an",
        "of",
        "to",
        "is",
        "are",
        "in",
        "for",
        "and",
        "that",
        "this",
        "with",
        "be",
        "by",
        "it",
        "as",
        "if",
        "or",
        "on",
        "not",
        "from",
    ]
)


@dataclass(frozen=True)
class TextSource:
    """Where the text came from: enough to collect the same text again."""

    python: str
    packages: dict[str, str]
    documents: int
    characters: int
    sha256: str

    def as_dict(self) -> dict[str, object]:
        """The fields for a card."""
        return asdict(self)


def collect_text(packages: Sequence[str] = tuple(TEXT_PACKAGES)) -> tuple[list[str], TextSource]:
    """Collect documents from the standard library and from `packages`, in a fixed order, without repeats.

    Args:
        packages: distribution names.

    Returns:
        documents: prose, one entry a docstring, paragraphs on lines of their own.
        source: versions, counts and the hash of the joined documents.

    Raises:
        EnvironmentMissing: a package is not installed.
    """
    seen: set[bytes] = set()
    documents: list[str] = []
    versions = {package: _version(package) for package in sorted(packages)}
    for package in ("", *versions):  # "" is the standard library
        for docstring in read_docstrings(_python_files(package)):
            document = clean_document(docstring, seen)
            if document:
                documents.append(document)
    joined = DOCUMENT_SEPARATOR.join(documents)
    source = TextSource(
        python=platform.python_version(),
        packages=versions,
        documents=len(documents),
        characters=len(joined),
        sha256=hashlib.sha256(joined.encode()).hexdigest(),
    )
    return documents, source


def split_held_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into training and held-out documents by each one's own hash, so that order and growth do not matter."""
    training: list[str] = []
    held_out: list[str] = []
    for document in documents:
        bucket = int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") % 1000
        (held_out if bucket < HELD_OUT_PER_THOUSAND else training).append(document)
    return training, held_out


def read_docstrings(files: Sequence[Path]) -> Iterator[str]:
    """Yield every docstring of Python files; a file that does not parse is a template or a test and is passed over."""
    for file in files:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        if file.parent.name == "pydoc_data":
            yield from (value.value for value in _string_values(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield docstring


def clean_document(docstring: str, seen: set[bytes]) -> str:
    """Reduce a docstring to its prose; `seen` holds the fingerprints of the paragraphs used so far and is added to.

    Returns:
        the paragraphs that read as English and are new, one a line; "" when none is left.
    """
    kept = []
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(docstring)):
        for line in _join_lines(paragraph):
            if not is_prose(line):
                continue
            # names and numbers differ between copies of one sentence; the sentence is what must not repeat
            fingerprint = hashlib.sha1(_IDENTIFIER.sub("X", line).lower().encode()).digest()
            if fingerprint not in seen:
                seen.add(fingerprint)
                kept.append(line)
    return "\n".join(kept)


def is_prose(line: str) -> bool:
    """Whether a line reads as English: ASCII, mostly letters, long enough, with function words."""
    if len(line) < 30 or not line.isascii() or any(mark in line for mark in (">>>", "```", "====", "----", "\\")):
        return False
    words = line.lower().split()
    letters = sum(character.isalpha() or character == " " for character in line)
    common = sum(word in _FUNCTION_WORDS for word in words)
    return letters >= 0.85 * len(line) and len(words) >= 6 and common >= 0.12 * len(words)


def write_text(documents: Sequence[str], source: TextSource, file: Path) -> None:
    """Write documents to one xz file, and their source beside it as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps(source.as_dict(), indent=2) + "\n", encoding="utf-8")
    file.write_bytes(lzma.compress(DOCUMENT_SEPARATOR.join(documents).encode(), preset=6))


def read_text(file: Path) -> list[str]:
    """Read documents from a file of `write_text`, or from a plain text file (blank lines part its documents)."""
    if file.suffix == ".xz":
        return lzma.decompress(file.read_bytes()).decode().split(DOCUMENT_SEPARATOR)
    return [part.strip() for part in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")) if part.strip()]


def _join_lines(paragraph: str) -> list[str]:
    """Undo the line wrapping: a line that opens a list item or a parameter starts a new one, others continue."""
    if any(line.lstrip().startswith((">>>", "...", "#", ".. ", "|", "+-")) for line in paragraph.splitlines()):
        return []
    lines: list[str] = []
    for raw in paragraph.splitlines():
        if lines and not _ITEM.match(raw):
            lines[-1] += " " + raw.strip()
        else:
            lines.append(raw.strip())
    return [_strip_markup(line) for line in lines]


def _strip_markup(line: str) -> str:
    """Remove reStructuredText and Markdown marks that a reader of rendered docs does not see."""
    line = _ROLE.sub("", line).replace("``", "`").replace("**", "")
    line = _LINK_TARGET.sub(r"`\1`", line).replace("`~", "`").replace("[`", "`").replace("`]", "`")
    return re.sub(r"\s+", " ", line.lstrip("-*+ ")).strip()


def _string_values(tree: ast.Module) -> Iterator[ast.Constant]:
    """The string values of dictionaries: the standard library keeps its language reference as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (v for v in node.values if isinstance(v, ast.Constant) and isinstance(v.value, str))


def _python_files(package: str) -> list[Path]:
    """Python files of a distribution, sorted; of the standard library, without its tests, for the name ""."""
    if package:
        files = importlib.metadata.files(package) or []
        located = {Path(str(file.locate())) for file in files if file.suffix == ".py"}
        return sorted(file for file in located if file.is_file())
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
    return sorted(f for f in root.rglob("*.py") if not skipped.intersection(f.relative_to(root).parts))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentMissing(
            "the training text comes from installed packages, and one is missing",
            expected=package,
            found="none",
            next_step="install the project with its extras docs, dev and train, or pass a text file instead",
        ) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: collect the text into one file and print its source."""
    parser = argparse.ArgumentParser(prog="python -m porting_kit.medusa.training_text", description=main.__doc__)
    parser.add_argument("out", type=Path, help="file to write, ending in .xz")
    options = parser.parse_args(arguments)
    documents, source = collect_text()
    write_text(documents, source, options.out)
    print(f"{source.documents} documents, {source.characters} characters, sha256 {source.sha256}")


if __name__ == "__main__":
    main()
