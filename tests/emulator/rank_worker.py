"""One rank of a sharded checkpoint: run by torchrun from test_ranks.py, writes rank 0's (or its own) logits.

Arguments: source tree, result folder, then checkpoint folders, each with as many ranks as there are processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from porting_kit.emulator import open_emulator
from porting_kit.source_tree import open_source_tree
from tests.emulator.differential import DEPTHS, TREE
from tests.emulator.naive_attention import pack_mask

PROMPTS = [torch.tensor([5, 17, 3, 88, 41, 2]), torch.tensor([9, 1, 7])]


def run_phases(model: object) -> dict[str, torch.Tensor]:
    """Logits (and Medusa logits where there are heads) of a prefill and of a tree step."""
    cache = model.new_cache(2, 32)
    first = model.prefill(PROMPTS, cache)
    drafts = torch.arange(12).view(2, 6)
    tree = model.decode(drafts, cache, position_offsets=torch.tensor(DEPTHS), packed_mask=pack_mask(TREE))
    return {"prefill": first.logits, "tree": tree.logits}


def main(source: str, results: str, *folders: str) -> None:
    rank = int(os.environ["RANK"])
    emulator = open_emulator(open_source_tree(source))
    for folder in folders:
        model = emulator.load_checkpoint(Path(folder), rank=rank)
        torch.save(run_phases(model), Path(results) / f"{Path(folder).name}-{rank}.pt")
    dist.barrier()  # a rank that leaves while another still sends ends it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
