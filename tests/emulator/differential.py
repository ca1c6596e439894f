"""Compare an emulated model with Hugging Face: prompts, tree nodes, a mixed batch, what follows acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.emulator import EmulatedModel
from tests.emulator.naive_attention import draft_tree, pack_mask

TREE, DEPTHS = draft_tree([-1, 0, 0, 1, 1, 2])
PROMPT_LENGTHS = (7, 12)


@dataclass
class Differences:
    """Largest logit difference over largest logit, of each phase."""

    context: float = 0.0
    tree: float = 0.0
    after: float = 0.0

    def worst(self) -> float:
        return max(self.context, self.tree, self.after)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over largest expected value."""
    V = expected.shape[-1]
    return float((found[..., :V].double() - expected.double()).abs().max() / expected.double().abs().max())


@torch.no_grad()
def compare_model(model: EmulatedModel, reference: Any, vocab: int, seed: int = 3) -> Differences:
    """Run both models on the same tokens.

    Batch of two prompts of unequal length; then one call with their trees and a third prompt; then acceptance of
    unequal paths and two ordinary steps of all three.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(0, vocab, shape, generator=generator)

    def refer(ids: torch.Tensor) -> torch.Tensor:
        return reference(ids[None], use_cache=False).logits[0]

    found = Differences()
    prompts = [draw(length) for length in PROMPT_LENGTHS]
    cache = model.new_cache(3, 64)
    output = model.prefill(prompts, cache, all_logits=True)
    for prompt, logits in zip(prompts, output.logits, strict=True):
        found.context = max(found.context, relative(logits, refer(prompt)))

    N, third = len(TREE), draw(5)
    drafts = draw(2, N)
    context, trees = model.mixed(
        [third], drafts, cache, position_offsets=torch.tensor(DEPTHS), packed_mask=pack_mask(TREE)
    )
    found.context = max(found.context, relative(context.logits[0], refer(third)[-1]))
    for b in range(2):
        for node in range(N):
            path = TREE[node].nonzero().flatten()
            expected = refer(torch.cat([prompts[b], drafts[b, path]]))[-1]
            found.tree = max(found.tree, relative(trees.logits[b, node], expected))

    cache.keep(torch.tensor([[0, 2, 5], [0, -1, -1], [-1, -1, -1]]))
    texts = [torch.cat([prompts[0], drafts[0, [0, 2, 5]]]), torch.cat([prompts[1], drafts[1, :1]]), third]
    for _ in range(2):
        tokens = draw(3, 1)
        output = model.decode(tokens, cache)
        cache.keep(torch.zeros(3, 1, dtype=torch.int64))
        texts = [torch.cat([text, token]) for text, token in zip(texts, tokens, strict=True)]
    for b, text in enumerate(texts):
        found.after = max(found.after, relative(output.logits[b, 0], refer(text)[-1]))
    return found
