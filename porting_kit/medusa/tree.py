"""The Medusa token tree: which candidates of which head are verified together in one step.

A path `(k1, ..., kd)` takes the k_i-th best token of head i at depth i. Two notations are read: the full list, where
every node is listed, and the path-only list, where a long path stands for all of its prefixes. Either becomes the
full, prefix-closed list, and only that is counted, written or given to a runtime: upstream takes a list that mixes the
two for a full one and then counts too few nodes (tensorrt_llm/runtime/medusa_utils.py, `expand_choices_if_needed`,
0.8 to 0.14).

Order and derived tensors equal both runtimes of TensorRT-LLM: runtime/medusa_utils.py and
cpp/tensorrt_llm/runtime/medusaModule.cpp (0.11.0.dev2024062500 to 0.13.0.dev2024090300).

Reading and checking need no torch; only the tensor properties import it. How choices are spelt is in `choices`, what
heads and engine can hold in `tree_limits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from porting_kit.errors import LISTED_ITEMS, TreeError, format_count
from porting_kit.medusa.choices import check_paths, read_choices
from porting_kit.medusa.named_trees import TreePath

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MedusaTree:
    """A prefix-closed tree. Build it with `read_tree`, or with `from_choices` from a list of paths.

    Args:
        nodes: every node as a path, the root `()` first, then by depth, then lexicographic.
        listed: the draft nodes in the order the author listed them (most useful first), expanded nodes before theirs.
        added: nodes that the author did not list, present as the prefix of a listed one.
        name: the name it was asked for by, None for a plain list.
    """

    nodes: tuple[TreePath, ...]
    listed: tuple[TreePath, ...]
    added: tuple[TreePath, ...] = ()
    name: str | None = None

    @classmethod
    def from_choices(
        cls, choices: Iterable[Sequence[int]], *, name: str | None = None, expand: bool = True
    ) -> MedusaTree:
        """Check a list of paths and close it under prefixes.

        Args:
            choices: paths in either notation.
            name: kept for display.
            expand: False refuses a path whose prefix is not listed, for input that must be complete already.

        Raises:
            TreeError: no path; a path that is empty, no list of non-negative integers, or listed twice; a first level
                whose ranks have a gap; with `expand=False` a path without its parent.
        """
        paths = check_paths(choices)
        listed: dict[TreePath, None] = {}
        for path in paths:
            for depth in range(1, len(path) + 1):
                listed.setdefault(path[:depth])
        given = set(paths)
        added = tuple(node for node in listed if node not in given)
        if added and not expand:
            raise TreeError(
                "The tree has paths whose parent is not listed",
                expected="every prefix of every path in the list",
                found=f"{len(added)} missing",
                where=name,
                items=[list(node) for node in added],
                next_step="Add the missing nodes, or read the list with expansion.",
            )
        _check_first_level(listed, name)
        nodes = ((), *sorted(listed, key=lambda node: (len(node), node)))
        return cls(nodes=nodes, listed=tuple(listed), added=added, name=name)

    @property
    def num_nodes(self) -> int:
        """N: nodes including the root, the tokens of one verification step."""
        return len(self.nodes)

    @property
    def num_drafts(self) -> int:
        """N - 1: what `max_draft_len` must hold."""
        return len(self.nodes) - 1

    @property
    def depth(self) -> int:
        """The deepest level; the tree needs that many heads."""
        return len(self.nodes[-1])

    @cached_property
    def nodes_per_level(self) -> tuple[int, ...]:
        """Draft nodes at depth 1, 2, ..."""
        counts = Counter(len(node) for node in self.nodes[1:])
        return tuple(counts[depth] for depth in range(1, self.depth + 1))

    @cached_property
    def top_k_per_level(self) -> tuple[int, ...]:
        """How many candidates each head must propose: one more than the largest rank used at its level."""
        return tuple(
            1 + max(node[-1] for node in self.nodes if len(node) == depth) for depth in range(1, self.depth + 1)
        )

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent; -1 for the root."""
        index = {node: position for position, node in enumerate(self.nodes)}
        return (-1, *(index[node[:-1]] for node in self.nodes[1:]))

    @cached_property
    def leaf_paths(self) -> tuple[tuple[int, ...], ...]:
        """Node indices from the root to each leaf, leaves in lexicographic order of their paths."""
        index = {node: position for position, node in enumerate(self.nodes)}
        inner = {node[:-1] for node in self.nodes[1:]}
        leaves = sorted(node for node in self.nodes if node not in inner)
        return tuple(tuple(index[leaf[:depth]] for depth in range(len(leaf) + 1)) for leaf in leaves)

    @cached_property
    def tree_ids(self) -> torch.Tensor:
        """int64 [N]: where each node's token stands in [root, head 1's top-k, head 2's top-k, ...]."""
        import torch

        first = [1]
        for top_k in self.top_k_per_level:
            first.append(first[-1] + top_k)
        return torch.tensor([0, *(first[len(node) - 1] + node[-1] for node in self.nodes[1:])])

    @cached_property
    def position_offsets(self) -> torch.Tensor:
        """int32 [N]: the depth of each node, added to the past length to get its position."""
        import torch

        return torch.tensor([len(node) for node in self.nodes], dtype=torch.int32)

    @cached_property
    def mask(self) -> torch.Tensor:
        """bool [N, N]: row a may see column b, its ancestors and itself."""
        import torch

        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    @cached_property
    def packed_mask(self) -> torch.Tensor:
        """int32 [N, W]: `mask` as the kernel reads it."""
        return pack_mask(self.mask)

    @cached_property
    def paths(self) -> torch.Tensor:
        """int64 [P, depth + 1]: `leaf_paths`, padded with -1."""
        return self.padded_paths(self.depth)

    def padded_paths(self, num_heads: int) -> torch.Tensor:
        """int64 [P, num_heads + 1]: `leaf_paths`, padded with -1 to the width a runtime with `num_heads` heads uses."""
        import torch

        width = num_heads + 1
        return torch.tensor([[*path, *[-1] * (width - len(path))] for path in self.leaf_paths])

    def choices(self) -> list[list[int]]:
        """The full list in runtime order, for `--medusa_choices` or a tree file."""
        return [list(node) for node in self.nodes[1:]]

    def describe(self) -> str:
        """One line: size, nodes per level, longest path, what expansion added."""
        levels = " + ".join(str(count) for count in self.nodes_per_level)
        text = f"{format_count(self.num_drafts, 'draft node')} ({levels} by depth), "
        text += format_count(len(self.leaf_paths), "path")
        text += f", longest {list(self.nodes[-1])}"
        return text if not self.added else f"{text}; {len(self.added)} of them implied by longer paths"


def read_tree(spec: object) -> MedusaTree:
    """The tree that a name, a text, a file or a list stands for (see `choices`); limits are `tree_limits.check_tree`'s.

    Raises:
        TreeError: the spelling or the list cannot be used.
    """
    if isinstance(spec, MedusaTree):
        return spec
    paths, name = read_choices(spec)
    return MedusaTree.from_choices(paths, name=name)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., N, N] into int32 [..., N, W]: column b is bit b % 32 of word b // 32."""
    import torch

    columns = mask.shape[-1]
    words = -(-columns // 32)
    padded = torch.nn.functional.pad(mask.to(torch.int64), (0, words * 32 - columns))
    bits = padded.unflatten(-1, (words, 32)) << torch.arange(32, device=mask.device)
    return bits.sum(-1).to(torch.int32)


def unpack_mask(packed: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """The inverse of `pack_mask`: int32 [..., N, W] to bool [..., N, num_nodes]."""
    import torch

    bits = packed.unsqueeze(-1) >> torch.arange(32, device=packed.device, dtype=torch.int32)
    return (bits & 1).flatten(-2)[..., :num_nodes].bool()


def _check_first_level(nodes: Iterable[TreePath], name: str | None) -> None:
    """Both the Python runtime's node order and its tree ids assume first-level ranks 0, 1, 2, ... (medusa_utils.py)."""
    ranks = sorted(node[0] for node in nodes if len(node) == 1)
    if ranks[-1] >= len(ranks):
        # The smallest gaps only: a slip of the hand can write a rank of a billion.
        missing = sorted(set(range(min(ranks[-1], len(ranks) + LISTED_ITEMS))) - set(ranks))[:LISTED_ITEMS]
        raise TreeError(
            "The first level of the tree skips ranks",
            expected=f"ranks 0 to {ranks[-1]} without a gap",
            found=ranks,
            where=name,
            items=[[rank] for rank in missing],
            next_step="Add the missing paths: the runtimes number first-level nodes by their rank.",
        )
