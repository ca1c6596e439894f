"""Compare an emulated model with Hugging Face: prompts, every node of a tree, what follows acceptance, Medusa's tokens.

Errors are relative: the largest difference of a position's logits over that position's largest logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from porting_kit.alignment.noise import relative_error
from porting_kit.alignment.reference import Reference
from porting_kit.coverage.precision import Bounds, emit_nearly_best
from porting_kit.medusa.tree import MedusaTree

CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
PROMPT_LENGTHS = (7, 12, 4)
NEW_TOKENS = 16
CAPACITY = 64


@dataclass(frozen=True)
class Errors:
    """Relative errors of one model.

    Args:
        context: every token of every prompt.
        tree: every node against the reference run on the node's own path, and the steps after acceptance.
        heads: every Medusa head on every node.
    """

    context: float
    tree: float
    heads: float | None = None


def coverage_tree() -> MedusaTree:
    """Seven nodes, three levels, two branches: small, and with every kind of node."""
    return MedusaTree.from_choices(CHOICES, name="coverage")


def draw_prompts(vocab_size: int, seed: int = 3) -> list[list[int]]:
    """Prompts of unequal lengths."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    limit = min(vocab_size, 161)  # a large vocabulary adds nothing
    return [torch.randint(3, limit, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def continue_greedily(reference: Reference, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The reference's own greedy texts, prompts included, each token from a fresh pass over the whole text."""
    texts = [list(prompt) for prompt in prompts]
    for _ in range(new_tokens):
        for text in texts:
            text.append(int(reference.logits([text])[0][-1].argmax()))
    return texts


def compare_context(model: Any, reference: Reference, prompts: Sequence[Sequence[int]]) -> tuple[float, list[Any]]:
    """(worst error over all prompt tokens, the model's logits [S, V] per prompt), all prompts in one batch."""
    import torch

    V = reference.vocab_size
    output = model.prefill(
        [torch.tensor(prompt) for prompt in prompts], model.new_cache(len(prompts), 32), all_logits=True
    )
    logits = [rows[:, :V] for rows in output.logits]
    theirs = reference.logits(prompts)
    return max(relative_error(ours, their) for ours, their in zip(logits, theirs, strict=True)), logits


def list_ancestors() -> list[list[int]]:
    """The nodes from the root to each node of the tree."""
    return [row.nonzero().flatten().tolist() for row in coverage_tree().mask]


def draw_trees(vocab_size: int, seed: int = 7) -> tuple[Any, Any]:
    """(the tokens of a tree for each of the first two prompts, [2, N]; the generator they came from)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, min(vocab_size, 161), (2, coverage_tree().num_nodes), generator=generator), generator


def list_tree_paths(prompts: Sequence[Sequence[int]], drafts: Any) -> list[list[int]]:
    """The text that leads to each node of both trees."""
    return [[*prompts[b], *drafts[b, path].tolist()] for b in range(2) for path in list_ancestors()]


def compare_model(
    model: Any,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    heads: dict[str, Any] | None = None,
    seed: int = 7,
) -> Errors:
    """Run a model that takes a tree, and the reference on the same tokens.

    Two prompts of unequal length; one call with their trees and a third prompt; acceptance of unequal paths; two
    ordinary steps of all three.

    Args:
        model: an EmulatedModel.
        reference: the base, computing what the library computes.
        prompts: three.
        heads: the checkpoint's tensors, to check the Medusa heads as well.
    """
    import torch

    from porting_kit.coverage.heads import head_logits

    V, tree = reference.vocab_size, coverage_tree()
    context, _ = compare_context(model, reference, prompts)
    cache = model.new_cache(3, CAPACITY)
    model.prefill([torch.tensor(prompt) for prompt in prompts[:2]], cache)
    drafts, generator = draw_trees(V, seed)
    third, nodes = model.mixed(
        [torch.tensor(prompts[2])],
        drafts,
        cache,
        position_offsets=tree.position_offsets,
        packed_mask=tree.packed_mask,
    )
    context = max(context, relative_error(third.logits[0, None, :V], reference.logits([prompts[2]])[0][-1:]))
    ancestors, paths = list_ancestors(), list_tree_paths(prompts, drafts)
    expected = torch.stack([rows[-1] for rows in reference.logits(paths)])
    worst = relative_error(nodes.logits.reshape(len(paths), -1)[:, :V], expected)
    head_error = None
    if heads is not None:
        states = torch.stack([rows[-1] for rows in reference.hidden_states(paths)])
        found = nodes.medusa_logits.reshape(nodes.medusa_logits.shape[0], len(paths), -1)[..., :V]
        head_error = relative_error(found.flatten(0, 1), head_logits(heads, states)[..., :V].flatten(0, 1))

    kept = [ancestors[-1], ancestors[0]]
    rows = torch.full((3, len(kept[0])), -1)
    for b, path in enumerate(kept):
        rows[b, : len(path)] = torch.tensor(path)
    cache.keep(rows)
    texts = [[*prompts[b], *drafts[b, kept[b]].tolist()] for b in range(2)] + [list(prompts[2])]
    for _ in range(2):
        tokens = torch.randint(3, min(V, 161), (3, 1), generator=generator)
        output = model.decode(tokens, cache)
        cache.keep(torch.zeros(3, 1, dtype=torch.int64))
        texts = [[*text, int(token)] for text, token in zip(texts, tokens[:, 0], strict=True)]
        expected = torch.stack([each[-1] for each in reference.logits(texts)])
        worst = max(worst, relative_error(output.logits[:, 0, :V], expected))
    return Errors(context, worst, head_error)


def compare_tokens(
    model: Any, reference: Any, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], bounds: Bounds
) -> tuple[bool, float]:
    """(Medusa's tokens are the base's, mean accepted length).

    In half precision a token within rounding of the base's own is as good.
    """
    from porting_kit.medusa.decoding import generate_medusa

    generation = generate_medusa(model, coverage_tree(), prompts, NEW_TOKENS)
    wanted = [list(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)]
    equal = generation.tokens == wanted
    if not equal and bounds != Bounds():
        equal = emit_nearly_best(reference, prompts, generation.tokens, bounds.logits)
    lengths = [length for row in generation.accepted_lengths for length in row]
    return equal, sum(lengths) / len(lengths)
