"""The bundled tree, opened once, and its models on toy weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from porting_kit.emulator import EmulatedModel, Emulator, open_emulator
from porting_kit.source_tree import SourceTree, open_source_tree
from tests.emulator.patched import patch_model
from tests.emulator.toy_models import build_case


@pytest.fixture(scope="session")
def bundled() -> SourceTree:
    """The small model definitions that this package carries."""
    return open_source_tree("bundled")


@pytest.fixture(scope="session")
def emulator(bundled: SourceTree) -> Emulator:
    """An emulator of the bundled tree with exact arithmetic."""
    return open_emulator(bundled)


@pytest.fixture(scope="session")
def cases() -> Callable[[str], tuple[Any, dict, dict]]:
    """family -> (reference, config, tensors), built once."""
    made: dict[str, tuple[Any, dict, dict]] = {}

    def find(family: str) -> tuple[Any, dict, dict]:
        if family not in made:
            made[family] = build_case(family)
        return made[family]

    return find


@pytest.fixture
def build(bundled: SourceTree, cases: Callable[[str], tuple[Any, dict, dict]]) -> Callable[..., EmulatedModel]:
    """Build a patched bundled model of a family, with any kernel profile or dtype."""

    def make(family: str, *, kernel: Any = None, **options: Any) -> EmulatedModel:
        _, config, tensors = cases(family)
        arguments = patch_model(bundled, config["architecture"])
        return open_emulator(bundled, kernel=kernel).build_model(config, tensors, **arguments, **options)

    return make
