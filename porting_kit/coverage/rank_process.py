"""One rank of a `RankGroup`: a process that holds one rank's weights and does what the group asks of all.

The ranks are joined by torch.distributed (gloo); what they exchange is what the tree's own layers ask for.
"""

from __future__ import annotations

import pickle
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from porting_kit.emulator import open_emulator
from porting_kit.emulator.model_output import ModelOutput
from porting_kit.source_tree import open_source_tree


class RankWorker:
    """The model of one rank and its caches; every method is one request of the group.

    Args:
        tree_root: folder of the tree.
        rank: which rank of the checkpoint.
    """

    def __init__(self, tree_root: Path, rank: int) -> None:
        self.emulator, self.rank = open_emulator(open_source_tree(tree_root)), rank
        self.model: Any = None
        self.caches: dict[int, Any] = {}
        self.numbers = count()

    def build_model(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], source: str, class_name: str):
        """Put a model in place of the last one, whose caches go too."""
        self.model, self.caches = None, {}
        self.model = self.emulator.build_model(
            config, tensors, module_source=source, class_name=class_name, rank=self.rank
        )
        return self.model.vocab_size_padded, self.model.num_medusa_heads

    def new_cache(self, batch_size: int, capacity_tokens: int) -> int:
        """The number under which the cache is known."""
        number = next(self.numbers)
        self.caches[number] = self.model.new_cache(batch_size, capacity_tokens)
        return number

    def keep(self, cache: int, rows: torch.Tensor) -> torch.Tensor:
        """Keep accepted rows; the new lengths."""
        self.caches[cache].keep(rows)
        return self.caches[cache].lengths

    def run(self, phase: str, cache: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """One call of the model; (what it returned, the cache's lengths)."""
        found = getattr(self.model, phase)(*arguments, self.caches[cache], **options)
        parts = found if isinstance(found, tuple) else (found,)
        plain = [(part.logits, part.medusa_logits, part.hidden_states) for part in parts]
        return plain, self.caches[cache].lengths


def output_of(parts: Any) -> Any:
    """What `RankWorker.run` returned, as the model returned it."""
    outputs = tuple(ModelOutput(*part) for part in parts)
    return outputs if len(outputs) > 1 else outputs[0]


def serve(connection: Any, tree_root: Path, rank: int, world_size: int, meeting_place: str) -> None:
    """Do what the group asks until it asks for the end.

    Args:
        connection: this process's end of the pipe; requests are (method, arguments), answers (whether it went well,
            result or the error's kind and text), pickled.
        meeting_place: a file that does not exist yet, the same for all ranks of the group.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=world_size)
    worker = RankWorker(tree_root, rank)
    with torch.inference_mode():
        while (request := pickle.loads(connection.recv_bytes())) is not None:
            name, arguments = request
            try:
                answer = True, getattr(worker, name)(**arguments)
            except Exception as error:  # the group tells it
                answer = False, (type(error).__name__, str(error))
            connection.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
