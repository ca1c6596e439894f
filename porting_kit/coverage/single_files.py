"""Model definitions of releases of which no whole tree is at hand: each file is patched, checked, and patched again.

`python -m porting_kit.coverage.single_files FOLDER > FILE.json`; the files lie as FOLDER/COMMIT/tensorrt_llm/models/
FAMILY/model.py. Nothing runs: what a file computes can only be compared in its own tree.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from porting_kit.errors import PortFileError, PortingKitError
from porting_kit.patching import find_dropped_arguments, patch_model_source
from porting_kit.patching.medusa_module import read_source

PATTERN = "*/tensorrt_llm/models/*/model.py"
ARGUMENTS = ("spec_decoding_params",)  # from 0.11.0 on: source_tree.spec_arguments


def patch_single_files(folder: Path, arguments: Sequence[str] = ARGUMENTS) -> dict[str, Any]:
    """The JSON document of a folder of files.

    Raises:
        PortFileError: the folder holds no such file.
    """
    files = sorted(folder.glob(PATTERN))
    if not files:
        raise PortFileError(
            "no model definitions there",
            expected=PATTERN,
            found="none",
            where=folder,
            next_step="name a folder of model.py files",
        )
    rows = [patch_single_file(file, tuple(arguments)) for file in files]
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"single_files": rows, "date": date}


def patch_single_file(file: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """What becomes of one file: status, and that the patched text passes everything on and is left alone the next time.

    A file that cannot be read or patched is a row with its reason, never an error.
    """
    started = time.process_time()
    row: dict[str, Any] = {"commit": file.parts[-5], "family": file.parent.name, "reason": None, "found": []}
    try:
        source = read_source(file)
        outcome = patch_model_source(source, spec_arguments=arguments, file=str(file))
        row |= {"status": outcome.status, "reason": outcome.reason, "edits": len(outcome.edits)}
        row["seconds"] = round(time.process_time() - started, 3)
        if outcome.status != "refused":
            row["found"] = sorted({drop.kind for drop in find_dropped_arguments(source, arguments)})
            again = patch_model_source(outcome.source, spec_arguments=arguments, file=str(file))
            if find_dropped_arguments(outcome.source, arguments) or again.source != outcome.source:
                row |= {
                    "status": "failed",
                    "reason": "the patched text does not pass every argument on, or changes again",
                }
    except PortingKitError as error:
        row |= {"status": "failed", "reason": f"{error.subject} ({error.found})"}
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the document; 2 where there is nothing to read."""
    parser = argparse.ArgumentParser(
        prog="python -m porting_kit.coverage.single_files", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        document = patch_single_files(options.folder)
    except PortFileError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
