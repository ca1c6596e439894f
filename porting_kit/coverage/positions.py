"""Learned positions as both runtimes feed them: one position id per request, whatever the tree.

A release's kernel profile supplies that behaviour; its gates are left out, because the small models here have head
sizes and a type that no kernel takes. The control shows that the case can fail: without the computed positions the
same patched model must be wrong, or stop over the shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from porting_kit.alignment.noise import relative_error
from porting_kit.alignment.reference import Reference
from porting_kit.coverage.comparison import CAPACITY, coverage_tree
from porting_kit.errors import EmulatorError
from porting_kit.patching.learned_positions import FUNCTION_NAME
from porting_kit.releases.kernels import kernel_profile

# Far above rounding, far below what wrong positions do (0.7 and more of the largest logit).
WRONG = 1e-2
IDENTITY = f"\n\ndef {FUNCTION_NAME}(position_ids, *others, **named):\n    return position_ids\n"


def with_single_positions(emulator: Any, release: str) -> Any:
    """The emulator with a release's habit of one position id per request, and with no other kernel limit.

    Raises:
        PortFileError: nothing is known of the release's kernels.
    """
    limited = copy.copy(emulator)
    limited.kernel = replace(
        kernel_profile(f"release:{release}"), gates=(), alibi_in_generation=True, softcap_in_generation=True
    )
    return limited


def without_computed_positions(source: str) -> str:
    """A patched module whose positions are the runtime's again."""
    return source + IDENTITY


def compare_steps(model: Any, reference: Reference, prompts: Sequence[Sequence[int]], seed: int = 11) -> float:
    """Worst relative error of two tree steps, the second one after an accepted path of three nodes.

    Only the second step tells the number of tokens from the number of steps.
    """
    import torch

    V, tree, B = reference.vocab_size, coverage_tree(), len(prompts)
    cache = model.new_cache(B, CAPACITY)
    model.prefill([torch.tensor(prompt) for prompt in prompts], cache)
    generator = torch.Generator().manual_seed(seed)
    ancestors = [row.nonzero().flatten().tolist() for row in tree.mask]
    texts, worst = [list(prompt) for prompt in prompts], 0.0
    for _ in range(2):
        drafts = torch.randint(3, min(V, 161), (B, tree.num_nodes), generator=generator)
        output = model.decode(drafts, cache, position_offsets=tree.position_offsets, packed_mask=tree.packed_mask)
        paths = [[*texts[b], *drafts[b, path].tolist()] for b in range(B) for path in ancestors]
        expected = torch.stack([rows[-1] for rows in reference.logits(paths)])
        worst = max(worst, relative_error(output.logits.reshape(len(paths), -1)[:, :V], expected))
        kept = ancestors[-1][:3]
        cache.keep(torch.tensor([kept] * B))
        texts = [[*text, *drafts[b, kept].tolist()] for b, text in enumerate(texts)]
    return worst


def describe_control(emulator: Any, build: Any, reference: Reference, prompts: Sequence[Sequence[int]]) -> str | None:
    """What the model does without computed positions; None when it is right, and the case shows nothing.

    Args:
        emulator: of `with_single_positions`.
        build: emulator -> the model without computed positions.
    """
    try:
        error = compare_steps(build(emulator), reference, prompts)
    except (RuntimeError, EmulatorError) as stopped:
        return f"without computed positions it stops: {str(stopped).splitlines()[0]}"
    return None if error < WRONG else f"without computed positions it is wrong by {error:.2g}"
