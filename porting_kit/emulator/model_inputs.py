"""The keyword arguments of a model's forward, built by the signatures that its release has."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from porting_kit.emulator.attention_step import AttentionStep
from porting_kit.emulator.namespace import Namespace
from porting_kit.emulator.tensor_type import Tensor


def find_position_ids(step: AttentionStep, position_offsets: Any) -> torch.Tensor:
    """The engine input position_ids, int64 [T].

    Exact: past length + depth for every node. A runtime of TensorRT-LLM feeds one id per request in the generation
    phase, prompt length + iterations, whatever the tree (generation.py 0.11.0.dev2024062500 _prepare_context_inputs
    and its counterpart for generation; speculativeDecodingMode.h updatesPositionIds excludes Medusa).
    """
    parts = [torch.arange(length) for length in step.context_lengths]
    is_single = step.is_speculative and getattr(step.kernel, "one_position_id_per_request", False)
    for index, (length, past) in enumerate(zip(step.generation_lengths, step.pasts, strict=True)):
        slot = step.generation_slots[index]
        if is_single:
            parts.append((step.cache.context_lengths[slot] + step.cache.iterations[slot]).reshape(1))
        elif position_offsets is None:
            parts.append(torch.arange(past, past + length))
        else:
            offsets = torch.as_tensor(position_offsets)
            row = offsets if offsets.dim() == 1 else offsets[index]
            parts.append(past + row[:length].to(torch.int64).cpu())
    return torch.cat(parts)


class ModelInputs:
    """Builds the keyword arguments of a release's forward, by the signatures that the release has."""

    def __init__(self, namespace: Namespace, num_layers: int) -> None:
        layers = namespace.import_module("tensorrt_llm.layers.attention")
        utils = namespace.import_module("tensorrt_llm.models.modeling_utils")
        self._attention_params = KnownCall(layers.AttentionParams)
        self._cache_params = KnownCall(layers.KeyValueCacheParams)
        self._spec_class = KnownCall(getattr(layers, "SpecDecodingParams", layers.AttentionParams))
        names = inspect.signature(utils.DecoderModelForCausalLM.forward).parameters
        self._spec_names = [name for name in names if name.startswith(("medusa_", "spec_decoding_"))]
        self._num_layers = num_layers
        # 0.8 hands every layer its own pointers, and zips over them (models/modeling_utils.py, 0.8.0).
        self._has_layer_pointers = hasattr(layers.KeyValueCacheParams, "get_first_kv_cache_block_pointers")
        # Engine inputs that describe memory layouts; gpt_attention reads lengths from the step instead.
        self._placeholder = Tensor(torch.zeros(1, dtype=torch.int32))

    def build(
        self,
        step: AttentionStep,
        ids: torch.Tensor,
        positions: torch.Tensor,
        last_token_ids: torch.Tensor,
        device: torch.device,
    ) -> dict[str, Any]:
        """Arguments of the model's forward for one step."""
        contexts, pasts = list(step.context_lengths), list(step.pasts)
        # sequence_length counts this step's tokens too (runtime/generation.py, 0.11.0.dev2024062500).
        lengths = torch.tensor([*contexts, *step.generation_ends], dtype=torch.int32)
        host_pasts = torch.tensor([0] * len(contexts) + pasts, dtype=torch.int32)
        if step.is_recorded:
            host_pasts = step.past_column(device).flatten().int()
            lengths = host_pasts + max(step.generation_lengths)
        prompts = [*contexts, *(int(step.cache.context_lengths[slot]) for slot in step.generation_slots)]
        context_lengths = Tensor(torch.tensor(prompts, dtype=torch.int32))
        kinds = Tensor(torch.tensor([0] * len(contexts) + [1] * len(pasts), dtype=torch.int32))
        attention = {
            "sequence_length": Tensor(lengths),
            "context_lengths": context_lengths,
            "host_context_lengths": context_lengths,
            "max_context_length": max(prompts),
            "host_request_types": kinds,
            "host_runtime_perf_knobs": self._placeholder,
            "host_context_progress": self._placeholder,
        }
        cache = {
            "past_key_value": [None] * self._num_layers,
            "host_past_key_value_lengths": Tensor(host_pasts),
            "host_max_attention_window_sizes": self._placeholder,
            "host_sink_token_length": self._placeholder,
            "cache_indirection": self._placeholder,
            "host_kv_cache_pool_pointers": self._placeholder,
            "host_kv_cache_pool_mapping": self._placeholder,
        }
        if self._has_layer_pointers:
            for name in ("host_max_attention_window_sizes", "kv_cache_block_pointers", "host_kv_cache_block_pointers"):
                cache[name] = [self._placeholder] * self._num_layers
        return {
            "input_ids": Tensor(ids.to(device)),
            "position_ids": Tensor(positions.to(device)),
            "use_cache": True,
            "last_token_ids": Tensor(last_token_ids.to(device)),
            "attention_mask": None,
            "kv_cache_params": self._cache_params(cache),
            "attention_params": self._attention_params(attention),
        }

    def build_tree(
        self, position_offsets: Any, packed_mask: Any, lengths: Sequence[int], device: torch.device
    ) -> dict[str, Any] | None:
        """The era's speculative-decoding arguments; None for ordinary generation."""
        if packed_mask is None:
            return None
        B, N = len(lengths), max(lengths)
        offsets = torch.as_tensor(position_offsets).to(device, torch.int32)
        offsets = offsets.expand(B, N).contiguous() if offsets.dim() == 1 else offsets
        words = torch.as_tensor(packed_mask).to(device, torch.int32)
        words = words.expand(B, N, -1) if words.dim() == 2 and words.shape[0] == N else words
        names = self._spec_names
        if "spec_decoding_params" not in names:
            values = {"packed_mask": Tensor(words), "position_offsets": Tensor(offsets)}
            return {name: values[name.split("_", 1)[1].removeprefix("decoding_")] for name in names}
        # From 0.11 on the mask has one row per generated token (generation_mixin.py, 0.11.0.dev2024062500).
        packed = torch.cat([words[index, :length] for index, length in enumerate(lengths)])
        fields = {
            "spec_decoding_is_generation_length_variable": len(set(lengths)) > 1,
            "spec_decoding_max_generation_length": N,
            "spec_decoding_generation_lengths": Tensor(torch.tensor(lengths, dtype=torch.int32)),
            "spec_decoding_position_offsets": Tensor(offsets),
            "spec_decoding_packed_mask": Tensor(packed),
            "spec_decoding_use": Tensor(torch.ones(1, dtype=torch.int32)),
        }
        return {"spec_decoding_params": self._spec_class(fields)}


class KnownCall:
    """Calls a class with those of the given values that its signature knows."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._names = frozenset(inspect.signature(function).parameters)

    def __call__(self, values: dict[str, Any]) -> Any:
        return self._function(**{name: value for name, value in values.items() if name in self._names})
