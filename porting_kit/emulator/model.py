"""A model of a source tree, ready to run: prefill, decode a tree, keep what was accepted, record its modules."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from porting_kit.emulator.attention_step import AttentionStep
from porting_kit.emulator.cache import KVCache
from porting_kit.emulator.collectives import broadcast_output
from porting_kit.emulator.decoder import Decoder, Decoders
from porting_kit.emulator.model_inputs import ModelInputs, find_position_ids
from porting_kit.emulator.model_output import ModelOutput
from porting_kit.emulator.namespace import Namespace
from porting_kit.emulator.replay import Replays
from porting_kit.emulator.tensor_type import Tensor
from porting_kit.errors import EmulatorError


class EmulatedModel:
    """A model built from a tree's own classes; made by Emulator.build_model and Emulator.load_checkpoint.

    Attributes:
        config: the checkpoint's config.json.
        vocab_size_padded: Vp.
        num_medusa_heads: M, 0 without heads.
        dtype, device: of weights and activations.
        module: the tree's own model object.
    """

    def __init__(
        self,
        namespace: Namespace,
        module: Any,
        config: dict[str, Any],
        *,
        kernel: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._namespace = namespace
        self.module = module
        self.config = config
        self.kernel = kernel
        self.dtype = dtype
        self.device = device
        self.mapping = module.config.mapping
        self.num_medusa_heads = int(config.get("num_medusa_heads") or 0) if hasattr(module, "medusa_heads") else 0
        tp_size = self.mapping.tp_size
        self.vocab_size_padded = -(-int(config["vocab_size"]) // tp_size) * tp_size
        self.num_local_layers = int(config["num_hidden_layers"]) // self.mapping.pp_size
        self.inputs = ModelInputs(namespace, self.num_local_layers)
        self.decoders = Decoders()
        self.replays = Replays(is_enabled=device.type == "cuda" and self.mapping.world_size == 1)

    def new_cache(
        self, batch_size: int, capacity_tokens: int, *, attention_window: int | Sequence[int] | None = None
    ) -> KVCache:
        """An empty cache for B requests.

        Args:
            batch_size: B.
            capacity_tokens: tokens a request may hold, draft rows included.
            attention_window: TensorRT-LLM's max_attention_window_size: tokens a query sees, itself included; one
                number, or one per layer (repeated when there are fewer).
        """
        return KVCache(batch_size, capacity_tokens, device=self.device, attention_window=attention_window)

    def prefill(self, prompts: Sequence[torch.Tensor], cache: KVCache, *, all_logits: bool = False) -> ModelOutput:
        """Context phase: fill cache rows 0 .. len(prompts) - 1 from the start.

        Args:
            prompts: int64 [S_b] each.
            cache: its first rows are overwritten.
            all_logits: logits of every prompt token, a list of [S_b, Vp], instead of the last one's.
        """
        lengths = [len(prompt) for prompt in prompts]
        slots = list(range(len(prompts)))
        cache.check_room(slots, lengths)
        step = AttentionStep(cache=cache, context_lengths=lengths, context_slots=slots, kernel=self.kernel)
        rows = torch.arange(1, sum(lengths) + 1) if all_logits else torch.tensor(lengths).cumsum(0)
        output = self._run(step, torch.cat([torch.as_tensor(prompt) for prompt in prompts]), rows)
        begin_requests(cache, slots, lengths)
        if all_logits:
            output.logits = list(output.logits.split(lengths))
        return output

    def decode(
        self,
        tokens: torch.Tensor | Sequence[torch.Tensor],
        cache: KVCache,
        *,
        position_offsets: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
    ) -> ModelOutput:
        """Generation phase for every cache row: write rows past .. past + N - 1, return logits of each node.

        Args:
            tokens: int64 [B, N], or B tensors of unequal lengths (logits then come packed, [sum of lengths, Vp]).
            cache: lengths stay as they are until cache.keep.
            position_offsets: int [N] or [B, N], depth of each node; None for ordinary generation (N = 1).
            packed_mask: int32 [N, W] or [B, N, W]; None for ordinary generation.
        """
        rows = [torch.as_tensor(row) for row in tokens]
        lengths = [len(row) for row in rows]
        step = self._generation_step(cache, lengths, list(range(len(rows))), position_offsets, packed_mask)
        replayed = self.replays.run(self, step, rows, position_offsets, packed_mask)
        if replayed is not None:
            cache.pending_rows = max(lengths)
            return replayed
        spec = self.inputs.build_tree(position_offsets, packed_mask, lengths, self.device)
        output = self._run(step, torch.cat(rows), torch.arange(1, sum(lengths) + 1), spec, position_offsets)
        cache.pending_rows = max(lengths)
        return output.shape_nodes(len(lengths), lengths[0]) if len(set(lengths)) == 1 else output

    def mixed(
        self,
        prompts: Sequence[torch.Tensor],
        tokens: torch.Tensor,
        cache: KVCache,
        *,
        position_offsets: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
    ) -> tuple[ModelOutput, ModelOutput]:
        """Context and generation requests in one call, packed as the runtime packs them: prompts first.

        Cache rows 0 .. G - 1 generate, where tokens is [G, N]; the prompts fill the rows behind them.

        Returns:
            (output of the prompts as prefill gives it, output of the generation requests as decode gives it).
        """
        rows = [torch.as_tensor(row) for row in tokens]
        G, N, C = len(rows), len(rows[0]), len(prompts)
        lengths = [len(prompt) for prompt in prompts]
        slots = list(range(G, G + C))
        cache.check_room(slots, lengths)
        step = self._generation_step(cache, [N] * G, list(range(G)), position_offsets, packed_mask)
        step.context_lengths, step.context_slots = lengths, slots
        spec = self.inputs.build_tree(position_offsets, packed_mask, [N] * G, self.device)
        last = torch.tensor(lengths).cumsum(0)
        nodes = sum(lengths) + torch.arange(1, G * N + 1)
        ids = torch.cat([*(torch.as_tensor(prompt) for prompt in prompts), *rows])
        both = self._run(step, ids, torch.cat((last, nodes)), spec, position_offsets)
        begin_requests(cache, slots, lengths)
        cache.pending_rows = N
        medusa, hidden = both.medusa_logits, both.hidden_states  # no hidden states on the earlier pipeline ranks
        return (
            ModelOutput(
                both.logits[:C], None if medusa is None else medusa[:, :C], None if hidden is None else hidden[:C]
            ),
            ModelOutput(
                both.logits[C:].view(G, N, -1),
                None if medusa is None else medusa[:, C:].reshape(medusa.shape[0], G, N, -1),
                None if hidden is None else hidden[C:],
            ),
        )

    @contextlib.contextmanager
    def record(self, names: str = "*", *, inputs: bool = False) -> Iterator[dict[str, list[torch.Tensor]]]:
        """Record outputs, or first inputs, of sub-modules while the context is open.

        Args:
            names: glob over dotted module names ("transformer.layers.*.attention"); "*" for all. An attention
                layer's qkv and dense, its mlp and its norms are modules of their own.
            inputs: record what each module is given first, instead of what it puts out.

        Yields:
            name -> one tensor per call, packed [T, ...] (the first output of a module with several).
        """
        records: dict[str, list[torch.Tensor]] = {}
        watched = [(name, module) for name, module in self.module.named_modules() if name]
        chosen = [(name, module) for name, module in watched if fnmatch.fnmatch(name, names)]
        if not chosen:
            raise EmulatorError(
                "no module of the model has a recorded name",
                expected=f"a glob that matches one of {len(watched)} modules",
                found=names,
                items=[name for name, _ in watched],
                next_step="choose a glob that matches one of the names",
            )
        self.replays.suspend(+1)
        before = []
        for name, module in chosen:
            before.append(module.__dict__.get("forward"))
            module.__dict__["forward"] = _recorder(records, name, module.forward, inputs)
        try:
            yield records
        finally:
            self.replays.suspend(-1)
            for (_, module), forward in zip(chosen, before, strict=True):
                module.__dict__.pop("forward")
                if forward is not None:
                    module.__dict__["forward"] = forward

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Name -> the tensor in use (not a copy): change it in place to change the model."""
        return {name: parameter.value.data for name, parameter in self.module.named_parameters()}

    def _generation_step(
        self, cache: KVCache, lengths: list[int], slots: list[int], position_offsets: Any, packed_mask: Any
    ) -> AttentionStep:
        if (position_offsets is None) != (packed_mask is None):
            raise EmulatorError(
                "a tree needs both its mask and its position offsets",
                expected="packed_mask and position_offsets, or neither",
                found="one of them",
                next_step="give both, as MedusaTree makes them",
            )
        pasts = cache.lengths[: len(slots)].tolist()
        cache.check_room(slots, [past + length for past, length in zip(pasts, lengths, strict=True)])
        return AttentionStep(
            cache=cache,
            generation_lengths=lengths,
            generation_slots=slots,
            pasts=pasts,
            kernel=self.kernel,
            is_speculative=packed_mask is not None,
        )

    def _run(
        self,
        step: AttentionStep,
        ids: torch.Tensor,
        last_token_ids: torch.Tensor,
        spec: dict[str, Any] | None = None,
        position_offsets: Any = None,
    ) -> ModelOutput:
        """One forward of the tree's model over packed tokens."""
        positions = find_position_ids(step, position_offsets)
        return self.run_step(step, ids, positions, last_token_ids, spec)

    def open_decoder(
        self,
        batch_size: int,
        capacity_tokens: int,
        position_offsets: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
    ) -> Decoder | None:
        """Whole decode steps of one shape without the model's Python; None where steps have to run eagerly."""
        return self.decoders.open(self, batch_size, capacity_tokens, position_offsets, packed_mask)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let single modules be called outside a step."""
        network = self._namespace.network
        network.device = self.device
        with torch.no_grad(), network.run(AttentionStep(cache=self.new_cache(1, 1))):
            yield

    def run_step(
        self,
        step: AttentionStep,
        ids: torch.Tensor,
        positions: torch.Tensor,
        last_token_ids: torch.Tensor,
        spec: dict[str, Any] | None,
    ) -> ModelOutput:
        """One forward, every input given."""
        network = self._namespace.network
        network.device = self.device
        kwargs = self.inputs.build(step, ids, positions, last_token_ids, self.device)
        kwargs.update(spec or {})
        if not self.mapping.is_first_pp_rank():
            shape = (len(ids), int(self.config["hidden_size"]))
            kwargs["hidden_states"] = Tensor(torch.empty(shape, dtype=self.dtype, device=self.device))
        with torch.no_grad(), network.run(step):
            try:
                self.module.forward(**kwargs)
            except AssertionError as error:
                # Some models before 0.9 have no paged cache and say so (gptneox/model.py, 0.9.0.dev2024022700).
                if "Paged KV cache is not supported" not in str(error):
                    raise
                network.plugin_config.paged_kv_cache = False
                self.module.forward(**kwargs)
            outputs, hidden = network.outputs, network.last_hidden
        logits, medusa = outputs.get("logits"), outputs.get("medusa_logits")
        if self.mapping.pp_size > 1:
            logits, medusa = self._share_outputs(logits, medusa, len(last_token_ids))
        return ModelOutput(logits, medusa, hidden)

    def _share_outputs(self, logits: Any, medusa: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        ranks, like = self.mapping.pp_group, torch.empty(0, dtype=self.logits_dtype, device=self.device)
        logits = broadcast_output(logits, (rows, self.vocab_size_padded), like, ranks)
        if self.num_medusa_heads:
            shape = (self.num_medusa_heads, rows, self.vocab_size_padded)
            medusa = broadcast_output(medusa, shape, like, ranks)
        return logits, medusa

    @property
    def logits_dtype(self) -> torch.dtype:
        """Type of the logits: the config's, float64 when the model runs in it."""
        if self.dtype is torch.float64:
            return torch.float64
        return getattr(torch, str(self.config.get("logits_dtype", "float32")))


def begin_requests(cache: KVCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
    """Note that prompts of these lengths were written into these cache rows."""
    for slot, length in zip(slots, lengths, strict=True):
        cache.lengths[slot] = cache.context_lengths[slot] = length
        cache.iterations[slot] = 0


def _recorder(records: dict[str, list[torch.Tensor]], name: str, forward: Any, inputs: bool) -> Any:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        values = args if inputs else output if isinstance(output, (tuple, list)) else (output,)
        if values and isinstance(values[0], Tensor):
            records.setdefault(name, []).append(values[0].data)
        return output

    return recorded
