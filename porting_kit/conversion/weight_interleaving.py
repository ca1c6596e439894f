"""Weight-only int8 and int4 as upstream's own converters write them, back to plain rows.

Upstream quantises a matrix by output channel and stores it as its kernels want to load it: rows of 16 or 32 inputs
permuted, the matrix turned round, the columns of 2 or 4 outputs interleaved in tiles of 64 inputs, a bias added, and
the elements of every 32-bit word reordered. Which of these are done depends on the card that ran the converter and on
the release, and the checkpoint does not say. Sources: cutlass_kernels/cutlass_preprocessors.cpp and
mixed_gemm_B_layout.h 0.13.0.dev2024090300; quantization/functional.py of 1.x (preprocess_weights_for_mixed_gemm).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from porting_kit.errors import CheckpointError

TILE_INPUTS = 64
"""Inputs of one tile for 16-bit activations: 128 bytes of them."""
PERMUTED_INPUTS = {
    8: (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15),
    4: (0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27,
        4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31),
}  # fmt: skip
"""Stored input k of a block is this input of the matrix."""
WORD_ORDER = {8: (0, 2, 1, 3), 4: (0, 2, 4, 6, 1, 3, 5, 7)}
"""Stored element k of a 32-bit word is this element before."""


@dataclass(frozen=True)
class StoredLayout:
    """What was done to a matrix on its way into the checkpoint.

    Args:
        name: for messages.
        permuted: inputs are permuted in blocks, a bias is added and words are reordered.
        tiled: columns of several outputs are interleaved in tiles.
    """

    name: str
    permuted: bool
    tiled: bool


LAYOUTS = (
    StoredLayout("compute capability 8.0 to 8.9", permuted=True, tiled=True),
    StoredLayout("compute capability 9.0, releases of 2024", permuted=False, tiled=False),
    StoredLayout("compute capability 9.0, 1.x", permuted=True, tiled=False),
)


def undo_interleaving(stored: torch.Tensor, layout: StoredLayout, *, bits: int) -> torch.Tensor:
    """The whole numbers of a matrix, int8 [out, in].

    Args:
        stored: int8 [in, out * bits / 8], as the checkpoint has it.
        layout: how it was stored.
        bits: 4 or 8.

    Raises:
        CheckpointError: sizes that the layout cannot have.
    """
    inputs, outputs = stored.shape[0], stored.shape[1] * 8 // bits
    columns = 8 // bits * 2 if layout.tiled else 1
    block = TILE_INPUTS if layout.tiled else len(PERMUTED_INPUTS[bits]) if layout.permuted else 1
    if inputs % block or outputs % columns:
        raise CheckpointError(
            "a weight-only matrix has sizes that its layout cannot have",
            expected=f"inputs in blocks of {block}, outputs in groups of {columns} ({layout.name})",
            found=f"{inputs} inputs, {outputs} outputs",
            next_step="name the base that the checkpoint was made of, or quantise it again",
        )
    values = _split_bytes(stored, bits)
    if layout.permuted:
        words = values.reshape(-1, 32 // bits)
        plain = torch.empty_like(words)
        plain[:, list(WORD_ORDER[bits])] = words
        values = plain.reshape(-1) - (1 << (bits - 1))  # the bias
    else:
        values = torch.where(values >= 1 << (bits - 1), values - (1 << bits), values)
    if layout.tiled:
        tiles = values.reshape(outputs // columns, inputs // TILE_INPUTS, columns, TILE_INPUTS)
        values = tiles.transpose(1, 2)
    rows = values.reshape(outputs, inputs)
    if not layout.permuted:
        return rows.to(torch.int8)
    order = torch.tensor(PERMUTED_INPUTS[bits])
    places = (torch.arange(0, inputs, len(order))[:, None] + order).reshape(-1)
    unpermuted = torch.empty_like(rows)
    unpermuted[:, places] = rows
    return unpermuted.to(torch.int8)


def _split_bytes(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """The stored elements one after the other, as whole numbers from 0 on; the low half of a byte comes first."""
    whole = stored.contiguous().view(torch.uint8).reshape(-1).to(torch.int16)
    return whole if bits == 8 else torch.stack([whole & 15, whole >> 4], dim=1).reshape(-1)
