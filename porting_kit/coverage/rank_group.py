"""Several ranks seen as one model: each in a process of its own, all asked the same, all bound to answer alike.

A `RankedModel` has the methods of an EmulatedModel, so that every comparison runs on it unchanged. Processes are
started once for a tree and size, with the tree's code imported; a rank that stops while the others wait for it ends
the whole group, and the next model starts a fresh one.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.noise import relative_error
from porting_kit.coverage.rank_process import output_of, serve
from porting_kit.errors import EmulatorError

WAIT_SECONDS = 300
# A rank that stopped leaves the others waiting inside a collective; this long they may still answer by themselves.
GRACE_SECONDS = 2
# Ranks end with the same sums and gathered columns; anything beyond the last digits is a fault of the cut.
AGREEMENT = 1e-6


class RankStopped(Exception):
    """A rank raised; the text is the error's kind and first line."""


class RankGroup:
    """The processes of one tree's ranks.

    Args:
        tree_root: folder of the tree; its code is executed in every process.
        world_size: how many ranks.
    """

    def __init__(self, tree_root: Path, world_size: int) -> None:
        self.tree_root, self.world_size = Path(tree_root), world_size
        self._folder: Any = None
        self._ranks: list[tuple[Any, Any]] = []

    def build_model(
        self, config: dict[str, Any], ranks: Sequence[dict[str, torch.Tensor]], source: str, class_name: str
    ) -> RankedModel:
        """The model of all ranks.

        Args:
            config: content of config.json.
            ranks: each rank's tensors.
            source, class_name: as `Emulator.build_model` takes them.

        Raises:
            RankStopped: a rank cannot build its part.
            EmulatorError: the ranks disagree, or do not answer.
        """
        shared = {"config": config, "source": source, "class_name": class_name}
        sizes = self.ask_each("build_model", [{**shared, "tensors": tensors} for tensors in ranks])
        return RankedModel(self, config, *sizes[0])

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """The same request to every rank; the answers in the order of the ranks."""
        return self.ask_each(method, [arguments] * self.world_size)

    def ask_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """One request to every rank, with arguments of its own."""
        if not self._ranks:
            self._start()
        connections = [connection for _, connection in self._ranks]
        for connection, own in zip(connections, arguments, strict=True):
            connection.send_bytes(pickle.dumps((method, own)))
        answers: dict[Any, Any] = {}
        deadline = time.monotonic() + WAIT_SECONDS
        while len(answers) < len(connections):
            ready = wait([each for each in connections if each not in answers], max(0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                try:
                    answers[connection] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    answers[connection] = False, ("EOFError", "the process of a rank died")
                if not answers[connection][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return self._read_answers(connections, answers)

    def _read_answers(self, connections: list[Any], answers: dict[Any, Any]) -> list[Any]:
        stopped = [text for done, text in answers.values() if not done]
        if len(answers) < len(connections) or any(kind == "EOFError" for kind, _ in stopped):
            self.close()
        if stopped:
            kind, text = stopped[0]
            raise RankStopped(f"{kind}: {(text.strip().splitlines() or ['no message'])[0]}")
        if len(answers) < len(connections):
            missing = [rank for rank, connection in enumerate(connections) if connection not in answers]
            raise EmulatorError(
                "ranks do not answer",
                expected=f"an answer within {WAIT_SECONDS} s",
                found=f"none of ranks {missing}",
                next_step="measure fewer rows at a time (--jobs), or these ranks alone",
            )
        return [answers[connection][1] for connection in connections]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["porting_kit.coverage.rank_process"])
        self._folder = tempfile.TemporaryDirectory(prefix="porting-kit-ranks-")
        meeting_place = str(Path(self._folder.name) / "meeting_place")
        for rank in range(self.world_size):
            here, there = context.Pipe()
            arguments = (there, self.tree_root, rank, self.world_size, meeting_place)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class RankedCache:
    """The caches of all ranks; see `emulator.cache.KVCache`."""

    def __init__(self, group: RankGroup, number: int, batch_size: int) -> None:
        self._group, self.number = group, number
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep accepted rows on every rank."""
        self.lengths = self._group.ask("keep", cache=self.number, rows=torch.as_tensor(rows))[0]


class RankedModel:
    """The model of a group. Methods, arguments and results are those of `emulator.model.EmulatedModel`."""

    def __init__(self, group: RankGroup, config: dict[str, Any], vocab_size_padded: int, num_medusa_heads: int) -> None:
        self._group, self.config = group, config
        self.vocab_size_padded, self.num_medusa_heads = vocab_size_padded, num_medusa_heads

    def new_cache(self, batch_size: int, capacity_tokens: int) -> RankedCache:
        """An empty cache on every rank."""
        number = self._group.ask("new_cache", batch_size=batch_size, capacity_tokens=capacity_tokens)[0]
        return RankedCache(self._group, number, batch_size)

    def prefill(self, prompts: Sequence[Any], cache: RankedCache, *, all_logits: bool = False) -> Any:
        """Context phase."""
        return self._run(
            "prefill", cache, ([torch.as_tensor(prompt) for prompt in prompts],), {"all_logits": all_logits}
        )

    def decode(self, tokens: Any, cache: RankedCache, **tree: Any) -> Any:
        """Generation phase."""
        return self._run("decode", cache, (tokens,), tree)

    def mixed(self, prompts: Sequence[Any], tokens: Any, cache: RankedCache, **tree: Any) -> Any:
        """Both at once."""
        return self._run("mixed", cache, (list(prompts), tokens), tree)

    def _run(self, phase: str, cache: RankedCache, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        answers = self._group.ask("run", phase=phase, cache=cache.number, arguments=arguments, options=options)
        require_agreement(answers)
        parts, cache.lengths = answers[0]
        return output_of(parts)


def require_agreement(answers: Sequence[Any]) -> None:
    """Raise EmulatorError unless all ranks have the same logits and Medusa logits."""
    (first, _), *others = answers
    for rank, (parts, _) in enumerate(others, 1):
        for mine, theirs in zip(first, parts, strict=True):
            error = max(_difference(a, b) for a, b in zip(mine[:2], theirs[:2], strict=True))
            if not error <= AGREEMENT:
                raise EmulatorError(
                    "ranks do not agree about the logits",
                    expected=f"the same on every rank, within {AGREEMENT:g} of the largest",
                    found=f"rank {rank} differs from rank 0 by {error:.2g}",
                    next_step="report this row: a tensor or a sum of this class differs from rank to rank",
                )


def _difference(mine: Any, theirs: Any) -> float:
    if mine is None:
        return 0.0
    if isinstance(mine, (list, tuple)):
        return max(_difference(a, b) for a, b in zip(mine, theirs, strict=True))
    return relative_error(theirs.reshape(-1, theirs.shape[-1]).float(), mine.reshape(-1, mine.shape[-1]).float())
