"""What a tree must respect (heads in use, the engine's draft limit, the runtimes' packing), and how to make it fit."""

from __future__ import annotations

from porting_kit.errors import TreeError, format_count, format_items
from porting_kit.medusa.choices import MAX_DRAFT_NODES
from porting_kit.medusa.named_trees import TreePath
from porting_kit.medusa.tree import MedusaTree

MAX_RANK = 15
"""The C++ runtime packs a path into 4 bits a rank (medusaModule.h, PREFIX_CHUNK_SIZE_BITS): a larger rank collides."""


def check_tree(tree: MedusaTree, *, num_heads: int | None = None, max_draft_len: int = MAX_DRAFT_NODES) -> None:
    """Refuse a tree that the heads or the engine cannot hold, with the trimmed tree that they can.

    Args:
        tree: the tree.
        num_heads: M, heads in use; None when not known yet.
        max_draft_len: drafts the engine is built for.

    Raises:
        TreeError: deeper than the heads; more nodes than `max_draft_len` or than 63; a rank above 15.
    """
    if num_heads is not None and tree.depth > num_heads:
        raise TreeError(
            f"The tree is {tree.depth} levels deep, too deep for {format_count(num_heads, 'head')}",
            expected=f"paths of at most {format_count(num_heads, 'rank')}",
            found=f"[{format_items(tree.nodes[-1])}]",
            where=tree.name,
            next_step=f"Use {tree.depth} heads, or the trimmed tree: "
            f"{_describe_trimmed(tree, num_heads, max_draft_len)}.",
        )
    limit = min(max_draft_len, MAX_DRAFT_NODES)
    if tree.num_drafts > limit:
        cause = "max_draft_len" if max_draft_len <= MAX_DRAFT_NODES else "the kernels' 64 tokens a step"
        raise TreeError(
            f"The tree has {tree.num_drafts} draft nodes after expansion, more than {cause} allows",
            expected=f"at most {format_count(limit, 'draft node')}",
            found=tree.describe(),
            where=tree.name,
            next_step=f"Build with a larger max_draft_len (63 at most), or use the trimmed tree: "
            f"{_describe_trimmed(tree, num_heads, max_draft_len)}.",
        )
    if (largest := max(tree.top_k_per_level) - 1) > MAX_RANK:
        raise TreeError(
            "The tree uses a rank that the C++ runtime cannot tell from its neighbour's",
            expected=f"ranks 0 to {MAX_RANK}",
            found=largest,
            where=tree.name,
            next_step="Drop the paths with larger ranks; candidates that far down are almost never accepted.",
        )


def runtime_cautions(tree: MedusaTree) -> tuple[str, ...]:
    """What works in one runtime and not in the other; sentences for display."""
    if tree.num_nodes % 32 != 1 or tree.num_nodes == 1:
        return ()
    return (
        f"A tree of {tree.num_drafts} draft nodes leaves one column in the last mask word: the Python runtime "
        "(`--use_py_session`) stops with a ValueError in get_packed_mask (runtime/medusa_utils.py, "
        "up to 0.12.0.dev2024070900). Later releases and the C++ runtime are right; one node more or less avoids it.",
    )


def trim_tree(tree: MedusaTree, *, num_heads: int | None = None, max_draft_len: int = MAX_DRAFT_NODES) -> MedusaTree:
    """The largest part of a tree that fits: paths cut to `num_heads` levels, then nodes kept in the listed order.

    Raises:
        TreeError: nothing is left (`num_heads` or `max_draft_len` below 1).
    """
    limit = min(max_draft_len, MAX_DRAFT_NODES)
    if limit < 1 or (num_heads is not None and num_heads < 1):
        raise TreeError(
            "Nothing is left of the tree after trimming",
            expected="at least one head and one draft node",
            found=f"{num_heads} heads, max_draft_len {max_draft_len}",
            next_step="Build the engine with Medusa mode and a positive max_draft_len.",
        )
    waiting = [node for node in tree.listed if num_heads is None or len(node) <= num_heads]
    kept: dict[TreePath, None] = {(): None}
    while waiting and len(kept) <= limit:
        # A first-level node waits for its left neighbour, so that ranks stay without gaps.
        fitting = (node for node in waiting if _required(node) in kept)
        node = next(fitting)
        kept[node] = None
        waiting.remove(node)
    return MedusaTree.from_choices(tuple(kept)[1:], name=None if tree.name is None else f"{tree.name} trimmed")


def _required(node: TreePath) -> TreePath:
    return (node[0] - 1,) if len(node) == 1 and node[0] > 0 else node[:-1]


def _describe_trimmed(tree: MedusaTree, num_heads: int | None, max_draft_len: int) -> str:
    if max_draft_len < 1 or num_heads == 0:
        return "nothing would be left"
    trimmed = trim_tree(tree, num_heads=num_heads, max_draft_len=max_draft_len)
    return f"{trimmed.describe()}: {trimmed.choices()}"
