"""KVCache.keep and rewind on labelled rows, where a wrong order is visible."""

from __future__ import annotations

import pytest
import torch

from porting_kit.emulator import KVCache
from porting_kit.errors import EmulatorError


def label_rows(cache: KVCache, lengths: list[int], nodes: int) -> torch.Tensor:
    """Fill one layer with its own row numbers, as if `nodes` draft rows had just been written."""
    layer = cache.layer(0, 2, 3, torch.float32)
    layer[:] = torch.arange(cache.capacity).view(1, 1, 1, -1, 1) + 100 * torch.arange(cache.batch_size).view(
        -1, 1, 1, 1, 1
    )
    cache.lengths = torch.tensor(lengths)
    cache.pending_rows = nodes
    return layer


def test_keep_moves_accepted_rows_behind_the_past() -> None:
    cache = KVCache(2, 12)
    layer = label_rows(cache, [3, 5], 6)
    cache.keep(torch.tensor([[0, 2, 5], [0, 4, -1]]))
    assert cache.lengths.tolist() == [6, 7]
    assert cache.iterations.tolist() == [1, 1]
    for kind in range(2):
        for head in range(2):
            assert layer[0, kind, head, :6, 0].tolist() == [0, 1, 2, 3, 5, 8]
            assert layer[1, kind, head, :7, 0].tolist() == [100, 101, 102, 103, 104, 105, 109]


def test_keep_reads_before_it_writes() -> None:
    """Rows 1 and 2 both move down by one: neither may be overwritten before it is read."""
    cache = KVCache(1, 8)
    layer = label_rows(cache, [2], 4)
    cache.keep(torch.tensor([[1, 2, 3]]))
    assert layer[0, 0, 0, :5, 0].tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("rows", [[[0, 6]], [[-1, 0]]], ids=["unwritten row", "row after padding"])
def test_keep_refuses(rows: list) -> None:
    cache = KVCache(1, 12)
    label_rows(cache, [3], 6)
    with pytest.raises(EmulatorError, match="did not write"):
        cache.keep(torch.tensor(rows))


def test_keep_twice_is_refused() -> None:
    cache = KVCache(1, 12)
    label_rows(cache, [3], 2)
    cache.keep(torch.tensor([[0]]))
    with pytest.raises(EmulatorError, match="did not write"):
        cache.keep(torch.tensor([[0]]))


def test_rewind() -> None:
    cache = KVCache(2, 12)
    label_rows(cache, [3, 5], 0)
    cache.rewind([2, 5])
    assert cache.lengths.tolist() == [2, 5]
    with pytest.raises(EmulatorError, match="longer"):
        cache.rewind([3, 5])
