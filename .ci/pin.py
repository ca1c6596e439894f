"""Rewrite `.ci/constraints.txt`: what pip resolves for every supported Python, merged into one file with markers.

    python3 .ci/pin.py python3.10 python3.11 python3.12        (itself it needs Python 3.11)

Each interpreter resolves the project with the extras that `make` installs; nothing is installed. It does so as the
first patch release of its line (3.11.0 for 3.11.7): some packages need a later one than distributions ship.
Only versions are kept: no hashes, no addresses, no local build suffix, so that one file serves CPU and CUDA torch.
Versions that should not float with the day of the run are named in DIRECT_PINS.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
EXTRAS = "gguf,train,docs,dev"
DIRECT_PINS = (
    "torch==2.13.0",
    'transformers==5.24.0 ; python_version >= "3.11"',
    'transformers==5.20.2 ; python_version < "3.11"',  # the last release that installs on Python 3.10
)
# Companions of torch's CUDA build: they follow torch's own exact requirements and exist on Linux only.
UNPINNED = re.compile(r"^(nvidia-|cuda-|triton$|porting-kit$)")
HEADER = """\
# Exact versions that `make` installs, for each supported Python. Written by .ci/pin.py (`make pin`); do not edit.
# The bounds a user of the package gets are those in pyproject.toml.
"""


def resolve_versions(interpreter: str) -> tuple[str, dict[str, str]]:
    """The interpreter's version ("3.11") and what pip would install with it: package name -> version."""
    import tomllib  # Python 3.11

    short = "import sys; print('%d.%d' % sys.version_info[:2])"
    python_version = subprocess.run(
        [interpreter, "-c", short], check=True, capture_output=True, text=True
    ).stdout.strip()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in EXTRAS.split(",") for line in project["optional-dependencies"][extra]]
    command = [interpreter, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--python-version", f"{python_version}.0", "--only-binary", ":all:", "--target", tempfile.gettempdir()]
    command += [*DIRECT_PINS, *project["dependencies"], *extras]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = {}
    for item in json.loads(report.stdout)["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if not UNPINNED.match(name):
            found[name] = item["metadata"]["version"].split("+")[0]
    return python_version, found


def merge_versions(resolved: dict[str, dict[str, str]]) -> list[str]:
    """Constraint lines: one a package where all Pythons agree, otherwise one a run of Pythons, with a marker."""
    pythons = sorted(resolved, key=lambda version: tuple(map(int, version.split("."))))
    lines = []
    for name in sorted({name for found in resolved.values() for name in found}):
        runs: list[tuple[str, list[str]]] = []
        for python_version in pythons:
            version = resolved[python_version].get(name)
            if version is None:
                continue
            if runs and runs[-1][0] == version:
                runs[-1][1].append(python_version)
            else:
                runs.append((version, [python_version]))
        for position, (version, members) in enumerate(runs):
            bounds = []
            if position > 0:
                bounds.append(f'python_version >= "{members[0]}"')
            if position < len(runs) - 1:
                bounds.append(f'python_version < "{runs[position + 1][1][0]}"')
            lines.append(f"{name}=={version}" + (f" ; {' and '.join(bounds)}" if bounds else ""))
    return lines


def main(interpreters: list[str]) -> None:
    """Resolve with each interpreter and write the file."""
    lines = merge_versions(dict(resolve_versions(interpreter) for interpreter in interpreters))
    CONSTRAINTS.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{CONSTRAINTS.relative_to(ROOT)}: {len(lines)} lines")


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
