"""`-p NAME=VALUE` on a command line: values that replace fields of a port file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from porting_kit.errors import PortFileError


def parse_overrides(parameters: Sequence[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` texts as a dict, values read as YAML.

    Raises:
        PortFileError: no `=`, a name given twice, or a value that is not YAML.
    """
    overrides: dict[str, Any] = {}
    for text in parameters or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise PortFileError(
                "a parameter is written NAME=VALUE",
                expected="-p NAME=VALUE, VALUE in YAML",
                found=text,
                next_step="name a field of the port file, and quote what the shell would take apart",
            )
        if name in overrides:
            raise PortFileError(
                f"parameter {name!r} is given twice",
                expected="each parameter once",
                found=text,
                next_step="leave one of the two out",
            )
        try:
            overrides[name] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-45
            raise PortFileError(
                f"the value of parameter {name!r} is not YAML",
                expected="YAML",
                found=value,
                next_step="quote the value, for YAML and for the shell",
            ) from error
    return overrides
