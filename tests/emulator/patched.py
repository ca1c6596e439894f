"""Model definitions of a tree with the speculative-decoding arguments passed on, as text for the emulator."""

from __future__ import annotations

from typing import Any

from porting_kit.patching.medusa_module import make_imports_absolute, patch_architecture
from porting_kit.source_tree import SourceTree


def patch_model(tree: SourceTree, architecture: str) -> dict[str, Any]:
    """Keyword arguments of Emulator.build_model: the patched module, or nothing where the tree's own model will do."""
    outcome = patch_architecture(tree, architecture)
    if outcome.status != "patched":
        return {}
    model = tree.find_model(architecture)
    package = ".".join(model.file.relative_to(tree.root).parent.parts)
    return {"module_source": make_imports_absolute(outcome.source, package), "class_name": model.class_name}
