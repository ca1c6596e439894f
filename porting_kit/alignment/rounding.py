"""The base computed as another dtype would: what rounding alone does to it, without another implementation's habits.

Half precision is imitated: weights and the output of every module are rounded to the dtype, sums are float32, as the
kernels have it. Hugging Face's own half-precision run rounds more (BLOOM's ALiBi bias as a whole, to 0.25 at distance
500 in float16), which would widen the near-tie tolerance, and is several times slower on a CPU.

Float32 is told from float64. Rotary frequencies are moved by their last digit as well, because the library makes its
tables of angles with another formula: at position n that is n times the error, and it is no fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from porting_kit.alignment.reference import Reference

HALF = (torch.float16, torch.bfloat16)
FREQUENCIES = "inv_freq"


@contextlib.contextmanager
def computing_as(reference: Reference, dtype: torch.dtype) -> Iterator[Reference]:
    """While open, the reference rounds as `dtype` does; afterwards it is bit for bit as before.

    Args:
        reference: the base in float32.
        dtype: float16 or bfloat16 are imitated in the reference's own dtype; any other is computed in.
    """
    own = reference.dtype
    parameters = list(reference.model.parameters())
    frequencies = [buffer for name, buffer in reference.model.named_buffers() if name.endswith(FREQUENCIES)]
    saved = [tensor.data for tensor in (*parameters, *frequencies)]
    handles = []
    try:
        for parameter in parameters:
            rounded = parameter.data.to(dtype)
            parameter.data = rounded.to(own) if dtype in HALF else rounded
        if dtype in HALF and own not in HALF:
            handles = [
                module.register_forward_hook(_round_output(dtype, own))
                for name, module in reference.model.named_modules()
                if name and "Rotary" not in type(module).__name__  # tables of angles, float32 in the kernels
            ]
        if dtype not in HALF:
            for frequency in frequencies:
                frequency.data = frequency.data * (1 + torch.finfo(frequency.dtype).eps)
        yield reference
    finally:
        for handle in handles:
            handle.remove()
        for tensor, data in zip((*parameters, *frequencies), saved, strict=True):
            tensor.data = data


def read_rounded(
    reference: Reference, texts: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits [S, V] and hidden states [S, E] of each text, rounded as a port's dtype does, from one pass over each.

    Args:
        reference: the base in float32.
        texts: token ids.
        dtype: what the port computes in; the reference's own is told from float64.
    """
    with computing_as(reference, dtype if dtype != reference.dtype else torch.float64):
        read = [reference.read(text) for text in texts]
    return [logits for logits, _ in read], [states for _, states in read]


def _round_output(dtype: torch.dtype, own: torch.dtype) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_round(output[0], dtype, own), *output[1:]) if output else output
        return _round(output, dtype, own)

    return hook


def _round(value: Any, dtype: torch.dtype, own: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype).to(own) if is_float else value
