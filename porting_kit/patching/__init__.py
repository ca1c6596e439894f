"""Patch TensorRT-LLM model definitions for Medusa: source in, patched source out, nothing edited in place.

`patch_model_source` patches one text, `find_dropped_arguments` checks one, `build_medusa_module` makes the module for
`trtllm-build --model_cls_file` and the diff for the tree, `write_patch` puts both into a folder.
"""

from .edits import Edit
from .flow import Drop, find_dropped_arguments
from .medusa_module import MedusaModule, ReleaseTooOld, build_medusa_module, patch_architecture, write_patch
from .model_source import PatchOutcome, patch_model_source

__all__ = [
    "Drop",
    "Edit",
    "MedusaModule",
    "PatchOutcome",
    "ReleaseTooOld",
    "build_medusa_module",
    "find_dropped_arguments",
    "patch_architecture",
    "patch_model_source",
    "write_patch",
]
