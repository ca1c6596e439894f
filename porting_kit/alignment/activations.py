"""Does the base itself survive a dtype? Non-finite and saturated activations, found before anything is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from porting_kit.alignment.reference import Reference, dtype_name
from porting_kit.alignment.rounding import computing_as
from porting_kit.errors import BaseModelError


@dataclass(frozen=True)
class ActivationRange:
    """What the modules of a reference put out on given texts.

    Args:
        dtype: what it computed in.
        largest: largest finite magnitude of any output.
        largest_module: where.
        broken_modules: modules with an infinite or undefined output, in forward order.
    """

    dtype: torch.dtype
    largest: float
    largest_module: str
    broken_modules: tuple[str, ...]

    def survives(self, dtype: torch.dtype) -> bool:
        """True when nothing was broken and `dtype` can hold the largest output."""
        return not self.broken_modules and self.largest < torch.finfo(dtype).max


@torch.inference_mode()
def measure_activations(reference: Reference, texts: Sequence[Sequence[int]]) -> ActivationRange:
    """Run the texts and look at the output of every module."""
    largest: dict[str, float] = {}
    broken: dict[str, None] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
                magnitude = tensor.abs().max().item()
                if magnitude != magnitude or magnitude == float("inf"):
                    broken.setdefault(name)
                else:
                    largest[name] = max(largest.get(name, 0.0), magnitude)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in reference.model.named_modules() if name]
    try:
        reference.logits(texts)
    finally:
        for handle in handles:
            handle.remove()
    module = max(largest, key=largest.__getitem__, default="")
    return ActivationRange(reference.dtype, largest.get(module, 0.0), module, tuple(broken))


def check_activations(reference: Reference, texts: Sequence[Sequence[int]], dtype: torch.dtype) -> ActivationRange:
    """Refuse a comparison in a dtype that the base itself does not survive.

    Args:
        reference: the base in float32.
        texts: token ids.
        dtype: what the port computes in.

    Raises:
        BaseModelError: the reference is broken in `dtype`; no verdict on a port would be possible.
    """
    with computing_as(reference, dtype):
        found = replace(measure_activations(reference, texts), dtype=dtype)
    if found.survives(dtype):
        return found
    exact = measure_activations(reference, texts)
    raise BaseModelError(
        f"The reference is broken in {dtype_name(dtype)}, so no verdict on the port is possible",
        expected=f"finite activations below {torch.finfo(dtype).max:.3g}",
        found=f"{len(found.broken_modules)} modules with non-finite output; in {dtype_name(exact.dtype)} the largest "
        f"activation is {exact.largest:.3g} ({exact.largest_module})",
        items=found.broken_modules,
        where=reference.where or None,
        next_step="Port to bfloat16: it has the range of float32.",
    )
