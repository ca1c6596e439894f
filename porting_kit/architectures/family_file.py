"""A family that this package does not have, in one Python file of the user's.

The file looks like a module of `families/`: it imports from `porting_kit.architectures` and defines FAMILY. From then
on this process knows the family as it knows its own. The file is executed: name only files that you trust.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from porting_kit.architectures.family import EXTRA_FAMILIES, Family, load_families
from porting_kit.errors import BaseModelError, suggest_nearest

NEXT_STEP = "copy the nearest module of porting_kit/architectures/families and change its tables"


def use_family_file(path: str | Path) -> Family:
    """Execute a family file and make its family known to this process.

    Args:
        path: a Python file that defines FAMILY, a Family.

    Raises:
        BaseModelError: no such file, it fails (a rule that contradicts itself does), it defines no FAMILY, or its name
            or one of its classes is taken.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise BaseModelError(
            "there is no such family file",
            expected="a Python file",
            found="a folder" if path.is_dir() else "no such file",
            where=path,
            next_step=NEXT_STEP,
        )
    try:
        family = runpy.run_path(str(path)).get("FAMILY")
    except (Exception, SystemExit) as error:
        raise BaseModelError(
            "the family file cannot be executed",
            expected="Python that defines FAMILY; rules check themselves when they are declared",
            found=f"{type(error).__name__}: {error}",
            where=f"{path}:{_failing_line(error, path)}",
            next_step="correct the line",
        ) from error
    if not isinstance(family, Family):
        raise BaseModelError(
            "the family file defines no family",
            expected="FAMILY = Family(...)",
            found="no FAMILY" if family is None else type(family).__name__,
            where=path,
            next_step=NEXT_STEP,
        )
    own = {name: known for name, known in load_families().items() if EXTRA_FAMILIES.get(name) is not known}
    _require_free(family, own, path)
    EXTRA_FAMILIES[family.name] = family
    load_families.cache_clear()
    return family


def _require_free(family: Family, own: dict[str, Family], path: Path) -> None:
    taken = {name: known.name for known in own.values() for name in known.architectures}
    clashes = [f"class {name} of family {taken[name]}" for name in family.architectures if name in taken]
    if family.name in own:
        clashes.insert(0, f"family {family.name}")
    if clashes:
        near = suggest_nearest(family.name, own)
        raise BaseModelError(
            "the family file describes what this package has already",
            expected="a name and classes of its own",
            found=", ".join(clashes),
            where=path,
            next_step=f"use the family {near} as it is, or name yours otherwise" if near else "name yours otherwise",
        )


def _failing_line(error: BaseException, path: Path) -> int:
    """The line of the file that failed."""
    line, trace = getattr(error, "lineno", None) or 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
