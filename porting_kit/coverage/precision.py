"""What a half-precision port may differ by: four times what rounding alone does to the reference, measured on each row.

The reference stays in float32; `alignment.rounding` makes it round weights and every module's output as the dtype
would. In float32 the bound is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from porting_kit.alignment.gates import ERROR_FACTOR
from porting_kit.alignment.noise import relative_error
from porting_kit.alignment.reference import Reference, resolve_dtype
from porting_kit.alignment.rounding import computing_as
from porting_kit.coverage.heads import head_logits

# float32 rounding of two ways to add up the same products; measured 2e-7 to 3e-6.
BOUND = 1e-5
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Bounds:
    """Largest relative errors that rounding explains.

    Args:
        logits: of the base's logits.
        heads: of the Medusa heads' logits.
    """

    logits: float = BOUND
    heads: float = BOUND


def measure_bounds(
    reference: Reference, texts: Sequence[Sequence[int]], dtype: str, heads: dict[str, Any] | None = None
) -> Bounds:
    """The bounds of one model on given texts.

    Args:
        dtype: of the checkpoint; float32 has fixed bounds.
        heads: the checkpoint's tensors, for the heads' bound.
    """
    if dtype == "float32":
        return Bounds()
    plain, states = reference.logits(texts), reference.hidden_states(texts)
    with computing_as(reference, resolve_dtype(dtype)) as rounded:
        noisy, noisy_states = rounded.logits(texts), rounded.hidden_states(texts)
    pairs = list(zip(plain, noisy, strict=True))
    if heads is not None:
        pairs_of_heads = [
            (head_logits(heads, ours).flatten(0, 1), head_logits(heads, theirs).flatten(0, 1))
            for ours, theirs in zip(states, noisy_states, strict=True)
        ]
    else:
        pairs_of_heads = pairs
    worst = [max(relative_error(noise, exact) for exact, noise in each) for each in (pairs, pairs_of_heads)]
    return Bounds(*(max(ERROR_FACTOR * error, BOUND) for error in worst))


def emit_nearly_best(
    reference: Reference, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], bound: float
) -> bool:
    """Whether the base prefers every emitted token, or only rounding stands between it and the token it prefers.

    Args:
        tokens: emitted after each prompt.
        bound: relative error of logits; two logits may each be wrong by it.
    """
    for prompt, emitted in zip(prompts, tokens, strict=True):
        rows = reference.logits([[*prompt, *emitted]])[0][len(prompt) - 1 : -1]
        for row, token in zip(rows, emitted, strict=True):
            if float(row.max() - row[token]) > 2 * bound * float(row.abs().max()):
                return False
    return True
