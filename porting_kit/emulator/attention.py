"""gpt_attention: packed multi-head attention over a KV cache, context and generation requests in one call.

Attention logits are q.k / (sqrt(D) * q_scaling) + bias, softmax over the keys a query may see. PyTorch's fused
attention does the work wherever it can express it; soft-cap, and ALiBi in half precision, are computed in float32.
Source of the arguments and of the packed layout: docs/gpt_attention.md and functional.py, 0.11.0.dev2024062500.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as torch_functional

from porting_kit.emulator.attention_arguments import (
    AttentionSetting,
    read_attention_setting,
    read_tree,
    refuse_by_kernel,
)
from porting_kit.emulator.attention_step import AttentionStep, pack_requests, pad_requests
from porting_kit.emulator.cache import is_run, store_rows
from porting_kit.emulator.half_precision import is_slow
from porting_kit.emulator.network import find_running_network
from porting_kit.emulator.rotary import find_cos_sin, read_rotary_setting, rotate
from porting_kit.emulator.symbols import raise_not_emulated
from porting_kit.emulator.tensor_type import Tensor
from porting_kit.emulator.tree_mask import (
    build_context_distance,
    build_context_mask,
    build_generation_mask,
)

# Elements of one block of attention biases [H, rows, keys]: 32 Mi floats are 128 MiB.
BIAS_BLOCK_ELEMENTS = 1 << 25
# enable_gqa came with PyTorch 2.5.
HAS_GROUPED_ATTENTION = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 5)


def gpt_attention(*positional: Any, **arguments: Any) -> tuple[Tensor, Tensor | None]:
    """The stand-in for functional.gpt_attention of any release; upstream calls it with keywords.

    Returns:
        (context [T, H * D], None): a paged cache is not an output.

    Raises:
        EmulatorError: an argument that the emulator does not provide, or several tokens a request without a tree.
        KernelRefusal: the kernel profile refuses the shape in a generation step with a tree.
    """
    if positional:
        raise_not_emulated("functional.gpt_attention with positional arguments")
    step = find_running_network().step
    setting = read_attention_setting(step, arguments)
    rotary = read_rotary_setting(arguments, step.longest)
    T = arguments["qkv"].data.shape[0]
    H, K, D = setting.query_heads, setting.kv_heads, setting.head_size
    qkv = arguments["qkv"].data.view(T, H + 2 * K, D)
    split = step.context_tokens
    outputs = []
    if step.context_lengths:
        outputs.append(attend_context(step, setting, rotary, qkv[:split]))
    if step.generation_lengths:
        tree, offsets = read_tree(step, arguments, qkv.device)
        if step.is_speculative:
            refuse_by_kernel(step, setting, arguments)
        outputs.append(attend_generation(step, setting, rotary, qkv[split:], tree, offsets))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    network = find_running_network()
    # A model that predates the paged cache marks its cache as an output; there is nothing to hand out.
    present = None if network.plugin_config.paged_kv_cache else Tensor(output.new_empty(0), name="present_key_value")
    return Tensor(output.reshape(T, H * D)), present


def attend_context(step: AttentionStep, setting: AttentionSetting, rotary: Any, qkv: torch.Tensor) -> torch.Tensor:
    """Causal attention of whole prompts. qkv [T, H + 2K, D] -> [T, H, D]."""
    H, K = setting.query_heads, setting.kv_heads
    lengths = step.context_lengths
    if rotary is not None:
        positions = step.remember(
            ("context positions", qkv.device),
            None,
            lambda: torch.cat([torch.arange(n) for n in lengths]).to(qkv.device),
        )
        cos, sin = find_cos_sin(step, rotary, positions, lengths, lengths)
        query_key = rotate(qkv[:, : H + K], cos, sin, rotary.kind)
    else:
        query_key = qkv[:, : H + K]
    padded = pad_requests(step, query_key, lengths)
    values = pad_requests(step, qkv[:, H + K :], lengths)
    layer = step.cache.layer(setting.layer, K, setting.head_size, qkv.dtype)
    store_rows(layer, step.context_slots, [0] * len(lengths), padded[:, :, H:], values)
    query, key, value = (part.transpose(1, 2) for part in (padded[:, :, :H], padded[:, :, H:], values))
    output = attend_prompt(step, setting, query, key, value)
    return pack_requests(step, output.transpose(1, 2), lengths)


def attend_prompt(
    step: AttentionStep, setting: AttentionSetting, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Causal attention, padding at the end, [B, H, S, D] over [B, K, S, D]; in blocks of rows for a bias."""
    S, device = query.shape[2], query.device
    window = setting.window if setting.window is not None and setting.window < S else None
    if setting.slopes is None and window is None and not setting.softcap:
        return attend(query, key, value, setting, is_causal=True)
    heads = setting.query_heads if setting.slopes is not None else 1
    rows = max(1, min(S, BIAS_BLOCK_ELEMENTS // (heads * S)))
    blocks = []
    for first in range(0, S, rows):
        last = min(first + rows, S)

        def make(first: int = first, last: int = last) -> torch.Tensor:
            allowed = build_context_mask(last, window, first, last - first, device)
            if setting.slopes is None:
                return allowed
            distance = build_context_distance(last, first, last - first, device)
            # Four dimensions: PyTorch's fused attention on a CPU takes no mask of three.
            return build_bias(setting.slopes, distance, allowed, query.dtype).unsqueeze(0)

        key_of_mask = ("context mask", first, last, window, setting.slopes_key)
        mask = step.remember(key_of_mask, setting.slopes, make) if rows == S else make()
        blocks.append(attend(query[:, :, first:last], key[:, :, :last], value[:, :, :last], setting, mask=mask))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def build_bias(
    slopes: torch.Tensor, distance: torch.Tensor, allowed: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """ALiBi bias slope * (key position - query position), -inf where a key is not seen.

    Args:
        slopes: [H].
        distance: int64 [..., rows, keys].
        allowed: bool, broadcastable to distance; None when every key is seen.
        dtype: type of the attention; the bias is float32 or float64 (half types would round distances).

    Returns:
        [..., H, rows, keys].
    """
    working = torch.float64 if dtype is torch.float64 else torch.float32
    bias = slopes.to(working).view(-1, 1, 1) * distance.unsqueeze(-3).to(working)
    return bias if allowed is None else bias.masked_fill(~allowed.unsqueeze(-3), -math.inf)


def attend_generation(
    step: AttentionStep,
    setting: AttentionSetting,
    rotary: Any,
    qkv: torch.Tensor,
    tree: torch.Tensor | None,
    offsets: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the nodes of each request over its cache and its visible nodes. qkv [T, H + 2K, D] -> [T, H, D]."""
    H, K = setting.query_heads, setting.kv_heads
    lengths, device = step.generation_lengths, qkv.device
    N, end = max(lengths), step.generation_end

    def make_positions() -> torch.Tensor:
        return step.past_column(device) + (offsets if offsets is not None else torch.arange(N, device=device))

    positions = step.remember(("generation positions", id(offsets), device), offsets, make_positions)
    if rotary is not None:
        packed = step.remember(
            ("packed positions", id(positions)), positions, lambda: pack_requests(step, positions, lengths)
        )
        cos, sin = find_cos_sin(step, rotary, packed, lengths, step.generation_ends)
        query_key = rotate(qkv[:, : H + K], cos, sin, rotary.kind)
    else:
        query_key = qkv[:, : H + K]
    padded = pad_requests(step, query_key, lengths)
    values = pad_requests(step, qkv[:, H + K :], lengths)
    layer = step.cache.layer(setting.layer, K, setting.head_size, qkv.dtype)
    slots = list(step.generation_slots)
    step.store_generation(layer, padded[:, :, H:], values)
    if step.kernels is not None:
        mask = find_generation_bias(step, setting, tree, positions, end, qkv.dtype)
        query = padded[:, :, :H].transpose(1, 2)
        output = step.kernels.attend_rows(query, layer, mask, end, setting.scale, setting.softcap)
        return pack_requests(step, output, lengths)
    cached = layer[slots[0] : slots[0] + len(slots)] if is_run(slots) else layer[slots]
    keys, values = cached[:, 0, :, :end], cached[:, 1, :, :end]
    real_kernel = getattr(step.kernel, "attend_tree", None) if step.is_speculative else None
    if real_kernel is not None:
        if step.is_recorded:
            raise RuntimeError("the real kernel is called at every step; a recording would keep its first answer")
        output = real_kernel(padded[:, :, :H], keys, values, step.past_column(device), tree, setting.scale)
        return pack_requests(step, output, lengths)
    mask = find_generation_bias(step, setting, tree, positions, end, qkv.dtype)
    output = attend(padded[:, :, :H].transpose(1, 2), keys, values, setting, mask=mask)
    return pack_requests(step, output.transpose(1, 2), lengths)


def find_generation_bias(
    step: AttentionStep,
    setting: AttentionSetting,
    tree: torch.Tensor | None,
    positions: torch.Tensor,
    end: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Mask (bool [B, 1, N, end]) or ALiBi bias (float [B, H, N, end]) of the generation requests; None for neither."""
    is_ignored = step.is_speculative and not getattr(step.kernel, "alibi_in_generation", True)
    slopes = None if is_ignored else setting.slopes

    def make() -> torch.Tensor | None:
        device = positions.device
        past = step.past_column(device)
        columns = torch.arange(end, device=device).unsqueeze(0)
        # A draft row's position is its depth in the tree, not its row.
        offset = (columns - past).clamp(0, positions.shape[1] - 1)
        key_positions = torch.where(columns < past, columns, positions.gather(1, offset))
        allowed = build_generation_mask(step, tree, key_positions, positions, setting.window)
        if slopes is None:
            return None if allowed is None else allowed.unsqueeze(1)
        return build_bias(slopes, key_positions.unsqueeze(1) - positions.unsqueeze(2), allowed, dtype)

    slopes_key = None if slopes is None else setting.slopes_key
    key = ("generation mask", id(tree), id(positions), setting.window, slopes_key)
    return step.remember(key, (tree, positions), make)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    setting: AttentionSetting,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """softmax(scale * q.k + bias) v, [B, H, S, D] over [B, K, keys, D] -> [B, H, S, D] in the type of the query."""
    H, K = query.shape[1], key.shape[1]
    step = find_running_network().step
    is_ignored = step.is_speculative and not getattr(step.kernel, "softcap_in_generation", True) and not is_causal
    if setting.softcap and not is_ignored:
        return attend_with_softcap(query, key, value, setting, mask)
    dtype = query.dtype
    if is_slow(query):
        query, key, value = query.float(), key.float(), value.float()
        mask = mask.float() if mask is not None and mask.dtype is not torch.bool else mask
    if mask is not None and mask.dtype is not torch.bool and mask.dtype is not dtype:
        query, key, value = query.to(mask.dtype), key.to(mask.dtype), value.to(mask.dtype)
    if H == K:
        output = torch_functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=setting.scale
        )
    elif is_causal:
        output = attend_prompt_groups(query, key, value, setting.scale)
    else:
        output = attend_groups(query, key, value, mask, setting.scale)
    return output.to(dtype)


def attend_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Grouped attention of few queries: a group's heads become rows of one head, so that no key is copied."""
    B, H, N, D = query.shape
    K = key.shape[1]
    if mask is not None:
        mask = mask.expand(B, H, N, mask.shape[-1]).reshape(B, K, H // K * N, mask.shape[-1])
    rows = query.reshape(B, K, H // K * N, D)
    output = torch_functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return output.reshape(B, H, N, D)


def attend_prompt_groups(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Grouped causal attention of a whole prompt."""
    if HAS_GROUPED_ATTENTION:
        return torch_functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
    times = query.shape[1] // key.shape[1]
    key, value = repeat_heads(key, times), repeat_heads(value, times)
    return torch_functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def repeat_heads(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """[B, K, S, D] with each head repeated for its group of query heads, [B, K * times, S, D]."""
    B, K, S, D = tensor.shape
    return tensor.unsqueeze(2).expand(B, K, times, S, D).reshape(B, K * times, S, D)


def attend_with_softcap(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, setting: AttentionSetting, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention whose logits pass through softcap * tanh(logits / softcap) before the bias, in float32 or float64."""
    working = torch.float64 if query.dtype is torch.float64 else torch.float32
    times = query.shape[1] // key.shape[1]
    logits = query.to(working) @ repeat_heads(key, times).to(working).transpose(-1, -2) * setting.scale
    logits = setting.softcap * torch.tanh(logits / setting.softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else logits + mask
    return (logits.softmax(-1) @ repeat_heads(value, times).to(working)).to(query.dtype)
