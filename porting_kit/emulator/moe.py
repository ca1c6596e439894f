"""The mixture-of-experts plugin: router logits choose experts, whose MLPs are summed with the router's weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as torch_functional

from porting_kit.emulator.symbols import raise_not_emulated
from porting_kit.emulator.tensor_type import Tensor

# MoeConfig.ExpertScaleNormalizationMode (layers/moe.py, 0.11.0.dev2024062500); a config may hold the bare number.
KEEP_SCALES, RENORMALIZE, SPARSE_MIXER = 0, 1, 2
# The plugin's gated activations apply to the second half of the first product (layers/moe.py, 0.11.0.dev2024062500).
_GATED = {"swiglu": torch_functional.silu, "fast-swiglu": torch_functional.silu, "geglu": torch_functional.gelu}
_PLAIN = {
    "relu": torch.relu,
    "gelu": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "silu": torch_functional.silu,
    "identity": lambda x: x,
}


def moe_plugin(
    moe_config: Any, hidden_states: Tensor, *tensors: Tensor, **arguments: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """The stand-in for layers.moe._moe_plugin of any release.

    Args:
        moe_config: upstream's MoeConfig: num_experts, top_k, normalization_mode.
        hidden_states: [T, E].
        tensors: the router's logits, float32 [T, experts]; from 0.16.0.dev2024112600 on the states before quantisation
            come first.
        arguments: expert_weight(s)_1 [experts, F or 2F, E], expert_weight(s)_2 [experts, E, F], biases, act_fn, ranks.

    Returns:
        [T, E]; under tensor parallelism this rank's part of the sum. With a side stream also the states that the
        shared expert reads, which are the input.
    """
    if arguments.get("lora_params") is not None and getattr(arguments["lora_params"], "lora_ranks", None):
        raise_not_emulated("the MoE plugin with LoRA")
    if arguments.get("expert_scale_1") is not None:
        raise_not_emulated("the MoE plugin with quantised experts")

    def read(*names: str) -> torch.Tensor | None:
        for name in names:
            value = arguments.get(name)
            if value is not None:
                return value.data if isinstance(value, Tensor) else value.value.data
        return None

    first, second = read("expert_weight_1", "expert_weights_1"), read("expert_weight_2", "expert_weights_2")
    first_bias, second_bias = read("expert_bias_1"), read("expert_bias_2")
    data = hidden_states.data
    weights, chosen = choose_experts(moe_config, (tensors[-1] if tensors else arguments["routing"]).data)
    offset = first.shape[0] * int(arguments.get("ep_rank", 0)) if int(arguments.get("ep_size", 1)) > 1 else 0
    is_first_rank = int(arguments.get("tp_rank", 0)) == 0
    output = torch.zeros_like(data)
    for expert in range(first.shape[0]):
        token, rank = (chosen == expert + offset).nonzero(as_tuple=True)
        if not token.numel():
            continue
        inner = torch_functional.linear(data[token], first[expert], None if first_bias is None else first_bias[expert])
        inner = activate(inner, arguments["act_fn"])
        bias = second_bias[expert] if second_bias is not None and is_first_rank else None
        part = torch_functional.linear(inner, second[expert], bias)
        output.index_add_(0, token, (part * weights[token, rank].unsqueeze(1)).to(data.dtype))
    if int(arguments.get("side_stream_id", 0)):
        return Tensor(output), tensors[0] if len(tensors) > 1 else hidden_states
    return Tensor(output)


def choose_experts(moe_config: Any, routing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float [T, top_k], experts int64 [T, top_k]): softmax over all experts, renormalised when configured."""
    if int(moe_config.normalization_mode) == SPARSE_MIXER:
        return mix_sparsely(routing, int(moe_config.top_k), float(moe_config.sparse_mixer_epsilon))
    probabilities = torch.softmax(routing, dim=-1)
    weights, chosen = torch.topk(probabilities, int(moe_config.top_k), dim=-1)
    mode = int(moe_config.normalization_mode)
    if mode == RENORMALIZE:
        weights = weights / weights.sum(-1, keepdim=True)
    elif mode != KEEP_SCALES:
        raise_not_emulated(f"the MoE plugin with normalisation mode {mode}")
    return weights, chosen


def mix_sparsely(routing: torch.Tensor, top_k: int, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The sparse mixer of Phi-3.5-MoE (SparseMixer-v2, arXiv 2409.12136, as a trained model runs it).

    Experts are chosen one after the other. Each one's weight is its softmax among those whose logit is within
    2 epsilon of the largest one left, relative to the larger of both.
    """
    left, weights, chosen = routing, [], []
    for _ in range(top_k):
        largest, expert = left.max(dim=-1, keepdim=True)
        distance = (largest - routing) / routing.abs().clamp(min=largest)
        near = left.masked_fill(distance > 2 * epsilon, float("-inf"))
        weights.append(torch.softmax(near, dim=-1).gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


def activate(inner: torch.Tensor, name: str) -> torch.Tensor:
    """The plugin's activation; a gated one has its linear half first and its activated half second."""
    if name in _GATED:
        linear, gate = inner.chunk(2, dim=-1)
        function = _GATED[name]
        return linear * (function(gate, approximate="tanh") if name == "geglu" else function(gate))
    if name not in _PLAIN:
        raise_not_emulated(f"the MoE plugin with activation {name}")
    return _PLAIN[name](inner)
