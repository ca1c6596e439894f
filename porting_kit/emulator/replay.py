"""Decode steps recorded as CUDA graphs and replayed: the Python of a model runs once, not at every step.

A recording fits one batch size, one number of nodes, and a range of lengths: it attends to cache rows up to a multiple
of `BUCKET_TOKENS` behind a mask made from the lengths on the GPU, so that the same kernels serve every past within.
What cannot be recorded (an operation that reads a value back, rotary embedding that depends on the length) runs
eagerly, as does everything on a CPU, and the first step of each shape: eager execution checks and refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from porting_kit.emulator.attention_step import AttentionStep
from porting_kit.emulator.model_inputs import find_position_ids
from porting_kit.emulator.model_output import ModelOutput

if TYPE_CHECKING:
    from porting_kit.emulator.model import EmulatedModel

BUCKET_TOKENS = 256
_LOG = logging.getLogger(__name__)


@dataclass
class RecordedStep(AttentionStep):
    """A step whose pasts are a tensor on the GPU.

    Args:
        past_buffer: int64 [B, 1].
        end: cache rows that every request attends to behind its mask.
    """

    past_buffer: torch.Tensor | None = None
    end: int = 0

    def __post_init__(self) -> None:
        self.is_recorded = True

    @property
    def generation_end(self) -> int:
        return self.end

    @property
    def generation_ends(self) -> list[int]:
        return [self.end] * len(self.generation_lengths)

    def past_column(self, device: torch.device) -> torch.Tensor:
        return self.past_buffer

    def store_generation(self, layer: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.kernels is not None:
            self.kernels.store_rows(layer, self.past_buffer, keys, values)
            return
        B, N = keys.shape[:2]
        requests = torch.arange(B, device=keys.device).unsqueeze(1)
        rows = self.past_buffer + torch.arange(N, device=keys.device)
        layer[requests, 0, :, rows] = keys
        layer[requests, 1, :, rows] = values


class Recording:
    """One decode step as a CUDA graph, with the buffers it reads.

    Args:
        model: the model; its weights must stay where they are.
        step: the eager step whose shape is recorded.
        end: cache rows to attend to.
        has_tree: whether the step carries a tree.
        num_words: W of its packed mask.
        num_positions: position ids of the step, one a token or one a request.
        pool: memory pool that the recordings of a cache share.
    """

    def __init__(
        self,
        model: EmulatedModel,
        step: AttentionStep,
        end: int,
        *,
        has_tree: bool,
        num_words: int,
        num_positions: int,
        pool: Any,
    ) -> None:
        device = model.device
        self._B, self._N = len(step.generation_lengths), max(step.generation_lengths)
        T = self._B * self._N

        def make_buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._ids, self._positions, self._pasts = make_buffer(T), make_buffer(num_positions), make_buffer(self._B, 1)
        self._offsets = make_buffer(self._B, self._N, dtype=torch.int32)
        self._words = make_buffer(self._B, self._N, num_words, dtype=torch.int32)
        # Every tensor that the graph reads must outlive it.
        self._last_token_ids = torch.arange(1, T + 1, device=device)

        def run() -> ModelOutput:
            recorded = RecordedStep(
                cache=step.cache,
                generation_lengths=step.generation_lengths,
                generation_slots=step.generation_slots,
                pasts=[0] * self._B,
                kernel=step.kernel,
                is_speculative=step.is_speculative,
                past_buffer=self._pasts,
                end=end,
            )
            tree = (self._offsets, self._words) if has_tree else (None, None)
            spec = model.inputs.build_tree(*tree, step.generation_lengths, device)
            return model.run_step(recorded, self._ids, self._positions, self._last_token_ids, spec)

        self._fill_pasts(step)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = run()

    def _fill_pasts(self, step: AttentionStep) -> None:
        self._pasts.copy_(torch.tensor(step.pasts).unsqueeze(1))

    def replay(
        self, step: AttentionStep, ids: torch.Tensor, positions: torch.Tensor, offsets: Any, packed_mask: Any
    ) -> ModelOutput:
        """Run the recording on new tokens, lengths and tree; the output is the caller's own."""
        self._fill_pasts(step)
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        if packed_mask is not None:
            self._offsets.copy_(torch.as_tensor(offsets))
            self._words.copy_(torch.as_tensor(packed_mask))
        self._graph.replay()
        output = self._output
        medusa = output.medusa_logits
        return ModelOutput(
            output.logits.clone(),
            None if medusa is None else medusa.clone(),
            None if output.hidden_states is None else output.hidden_states.clone(),
        ).shape_nodes(self._B, self._N)


class Replays:
    """A model's recordings.

    Args:
        is_enabled: False runs every step eagerly; may be changed at any time.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._suspended = 0

    def suspend(self, change: int) -> None:
        """Count reasons to run eagerly: +1 when modules start being recorded, -1 when they stop."""
        self._suspended += change

    @property
    def is_suspended(self) -> bool:
        """Whether modules are being recorded."""
        return self._suspended > 0

    def run(
        self,
        model: EmulatedModel,
        step: AttentionStep,
        rows: Sequence[torch.Tensor],
        position_offsets: Any,
        packed_mask: Any,
    ) -> ModelOutput | None:
        """Replay a decode step; None when it has to run eagerly."""
        lengths = step.generation_lengths
        if not self.is_enabled or self._suspended or len(set(lengths)) != 1 or len(lengths) != step.cache.batch_size:
            return None
        end = min(step.cache.capacity, -(-step.generation_end // BUCKET_TOKENS) * BUCKET_TOKENS)
        num_words = 0 if packed_mask is None else torch.as_tensor(packed_mask).shape[-1]
        key = (model, lengths[0], end, num_words)
        recordings = step.cache.recordings
        if key not in recordings:
            # The first step of a shape runs eagerly, the second is recorded.
            recordings[key] = None
            return None
        positions = find_position_ids(step, position_offsets)
        if recordings[key] is None:
            recordings[key] = self._record(model, step, end, num_words, len(positions))
        if isinstance(recordings[key], Recording):
            return recordings[key].replay(step, torch.cat(list(rows)), positions, position_offsets, packed_mask)
        return None

    def _record(
        self, model: EmulatedModel, step: AttentionStep, end: int, num_words: int, num_positions: int
    ) -> Recording | str:
        """A recording, or the reason why there is none."""
        # Recordings of one cache share memory: they never run at the same time, and they end together.
        cache = step.cache
        if cache.recording_pool is None:
            cache.recording_pool = torch.cuda.graph_pool_handle()
        try:
            return Recording(
                model,
                step,
                end,
                has_tree=num_words > 0,
                num_words=num_words,
                num_positions=num_positions,
                pool=cache.recording_pool,
            )
        except Exception as error:
            _LOG.info("a decode step cannot be recorded and runs eagerly: %s", error)
            torch.cuda.synchronize(model.device)
            cache.recording_pool = None
            return str(error)
