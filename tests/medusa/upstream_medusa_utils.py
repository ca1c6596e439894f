"""Load upstream's runtime/medusa_utils.py as a single file, without its package and without a GPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from pathlib import Path
from unittest import mock

import torch

NAME = "tensorrt_llm/runtime/medusa_utils.py"


def upstream_files() -> list[Path]:
    """One path per tree named in TRTLLM_SOURCE (separated by colons) that has the file."""
    roots = [Path(root) for root in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if root]
    return [root / NAME for root in roots if (root / NAME).is_file()]


def set_up_upstream(path: Path, choices: list[list[int]], num_heads: int) -> types.SimpleNamespace:
    """What the file makes of the choices, expansion included; `.cuda()` does nothing."""
    logger = types.ModuleType("tensorrt_llm.logger")
    logger.logger = logging.getLogger("upstream")
    stand_ins = {"tensorrt_llm": types.ModuleType("tensorrt_llm"), "tensorrt_llm.logger": logger}
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
        spec = importlib.util.spec_from_file_location("upstream_medusa_utils", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module._medusa_setup(module.expand_choices_if_needed([list(path) for path in choices]), num_heads)
