"""Patch TensorRT-LLM model definitions for Medusa: source in, patched source out, nothing edited in place.

`patch_model_source` patches one text, `find_dropped_arguments` checks one, `build_medusa_module` makes the module for
`trtllm-build --model_cls_file`, `write_patch` puts module and diff into a folder.
"""

from .edits import Edit
from .flow import Drop, find_dropped_arguments
from .model_source import PatchOutcome, patch_model_source

__all__ = ["Drop", "Edit", "PatchOutcome", "find_dropped_arguments", "patch_model_source"]
