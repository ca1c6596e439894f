"""Which keys a query sees, and at what distance: causal rows, sliding windows, packed tree masks, ALiBi biases."""

from __future__ import annotations

import torch

from porting_kit.emulator.attention_step import AttentionStep
from porting_kit.errors import EmulatorError


def unpack_tree_mask(packed: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Bits of a packed mask: bit b % 32 of word b // 32 says whether the row's node sees node b.

    Args:
        packed: int32 [..., W].
        num_nodes: N.

    Returns:
        bool [..., N].

    Raises:
        EmulatorError: W words do not hold N bits.
    """
    if packed.shape[-1] * 32 < num_nodes:
        raise EmulatorError(
            "the packed tree mask is too narrow",
            expected=f"{-(-num_nodes // 32)} words of 32 bits for {num_nodes} nodes",
            found=f"{packed.shape[-1]} words",
            next_step="pack the mask of this tree again",
        )
    bits = (packed.unsqueeze(-1) >> torch.arange(32, device=packed.device, dtype=packed.dtype)) & 1
    return bits.flatten(-2)[..., :num_nodes].bool()


def build_context_mask(
    length: int, window: int | None, first_row: int, rows: int, device: torch.device
) -> torch.Tensor:
    """Causal mask of query rows first_row .. first_row + rows - 1 over `length` keys, bool [rows, length]."""
    distance = build_context_distance(length, first_row, rows, device)
    allowed = distance <= 0
    return allowed if window is None else allowed & (distance > -window)


def build_context_distance(length: int, first_row: int, rows: int, device: torch.device) -> torch.Tensor:
    """Key position minus query position, int64 [rows, length]."""
    positions = torch.arange(length, device=device)
    return positions.unsqueeze(0) - positions[first_row : first_row + rows].unsqueeze(1)


def build_generation_mask(
    step: AttentionStep,
    tree: torch.Tensor | None,
    key_positions: torch.Tensor,
    query_positions: torch.Tensor,
    window: int | None,
) -> torch.Tensor | None:
    """Which keys each generation query sees, bool [B, N, keys]; None when every query sees every key.

    Args:
        step: the step.
        tree: bool [B, N, N] visibility among the nodes, None for one token a request.
        key_positions: int64 [B, keys], the position of every cache row up to the longest request.
        query_positions: int64 [B, N].
        window: sliding window, None for none.
    """
    device = key_positions.device
    lengths = step.generation_lengths
    keys = key_positions.shape[1]
    nodes = max(lengths)
    is_whole = len(set(step.pasts)) == 1 and len(set(lengths)) == 1 and not step.is_recorded
    if tree is None and nodes == 1 and is_whole and (window is None or keys <= window):
        return None
    columns = torch.arange(keys, device=device)
    past = step.past_column(device).unsqueeze(2)
    allowed = (columns < past).expand(-1, nodes, -1)
    offset = (columns - past).expand(-1, nodes, -1)
    is_node = (offset >= 0) & (offset < nodes)
    if tree is None:
        drafts = offset <= torch.arange(nodes, device=device).view(1, -1, 1)
    else:
        drafts = tree.gather(2, offset.clamp(0, nodes - 1))
    allowed = allowed | (is_node & drafts)
    if window is not None:
        allowed = allowed & (query_positions.unsqueeze(2) - key_positions.unsqueeze(1) < window)
    return allowed
