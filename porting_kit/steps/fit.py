"""The kernel fit of a port: planned from headers for preflight and patch, carried out by convert.

A fit is planned for the kernels the engine will run on, so it follows the port's `kernel` (or its tree's release).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.base_config import BaseConfig
from porting_kit.conversion.config_fields import build_config
from porting_kit.kernel_fit.plan import FitPlan, plan_fit
from porting_kit.port import Port
from porting_kit.releases.kernels import KernelProfile
from porting_kit.releases.shape import attention_shape
from porting_kit.source_tree import SourceTree

if TYPE_CHECKING:
    from porting_kit.kernel_fit.activations import HeadMoments

START_TOKENS = 4


def plan_port_fit(port: Port, base: BaseConfig, profile: KernelProfile) -> FitPlan:
    """Choose the transforms that the port asks for; reads no weights.

    Args:
        port: its `fit` is `auto`, `off` or a list of transforms.
        base: the base's config, settled by its tensor names.
        profile: the target release's kernels.

    Raises:
        PortFileError: an unknown transform, or one that cannot apply here.
        BaseModelError: `auto` finds no combination that passes every gate.
    """
    shape = attention_shape(base, port.target, dtype=port.dtype, positions_in_graph=True)
    config, _ = build_config(base, dtype=port.dtype)
    ranks = {"mapping": {"tp_size": port.target.tp_size, "pp_size": port.target.pp_size}}
    return plan_fit(shape, profile, port.fit, config={**config, **ranks})


def measure_port_activations(port: Port, source_tree: SourceTree, fit: FitPlan) -> Mapping[str, HeadMoments] | None:
    """Queries and keys of the unfitted base on text that it writes itself; None when the fit needs none.

    The base runs in the emulator, in float32 and exact arithmetic, so no other library's model is needed.
    """
    if not fit.needs_activations:
        return None
    from porting_kit.conversion import checkpoint_tensors
    from porting_kit.emulator import open_emulator
    from porting_kit.kernel_fit.activations import measure_activations, sample_prompts

    config, tensors = checkpoint_tensors(port.base_path, dtype="float32")
    model = open_emulator(source_tree).build_model(config, tensors)
    starts = _starts(port, int(config["vocab_size"]))
    return measure_activations(model, sample_prompts(model, starts))


def _starts(port: Port, vocab_size: int) -> list[list[int]]:
    """The first tokens of the port's prompts."""
    from porting_kit.alignment.gguf_settings import load_tokenizer
    from porting_kit.steps.prompts import tokenize_prompts

    prompts, _ = tokenize_prompts(port, load_tokenizer(port.base_path), vocab_size)
    return [prompt[:START_TOKENS] for prompt in prompts]


def describe_fit(fit: FitPlan) -> dict[str, Any]:
    """The plan for an outcome's figures."""
    return {**fit.as_dict(), "text": str(fit)}
