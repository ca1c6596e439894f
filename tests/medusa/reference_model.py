"""A small decoder in plain PyTorch that satisfies `DecodableModel`, so that the loop is tested without the emulator.

Pre-norm attention with rotary positions, a key/value cache with unequal lengths, tree masks, and Medusa heads. It is
written for clarity; its own correctness is tested against a run without any cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from porting_kit.medusa.tree import unpack_mask

E, H, D, L, V, VP = 32, 4, 8, 2, 61, 64


@dataclass
class ReferenceOutput:
    logits: torch.Tensor
    medusa_logits: torch.Tensor | None
    hidden_states: torch.Tensor


class ReferenceCache:
    def __init__(self, batch_size: int, capacity: int, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(L, batch_size, H, capacity, D, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(batch_size, dtype=torch.long)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [B, H, N, D] go to past .. past + N - 1."""
        for b, past in enumerate(self.lengths.tolist()):
            self.keys[layer, b, :, past : past + keys.shape[2]] = keys[b]
            self.values[layer, b, :, past : past + keys.shape[2]] = values[b]

    def keep(self, rows: torch.Tensor) -> None:
        for b, past in enumerate(self.lengths.tolist()):
            kept = rows[b][rows[b] >= 0]
            for store in (self.keys, self.values):
                store[:, b, :, past : past + len(kept)] = store[:, b, :, past + kept]
            self.lengths[b] += len(kept)


class SelectableCache(ReferenceCache):
    def select(self, requests: torch.Tensor) -> SelectableCache:
        chosen = SelectableCache(0, 0, self.keys.dtype)
        chosen.keys, chosen.values = self.keys[:, requests], self.values[:, requests]
        chosen.lengths = self.lengths[requests]
        return chosen


class ReferenceModel(nn.Module):
    """Random weights from a seed; `cache_class` lets a test choose or break the cache."""

    def __init__(self, *, num_heads: int = 3, seed: int = 0, cache_class: type = SelectableCache) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = {"vocab_size": V}
        self.vocab_size_padded = VP
        self.num_medusa_heads = num_heads
        self.cache_class = cache_class
        self.decode_batches: list[int] = []
        self.embed = nn.Embedding(V, E)
        self.qkv = nn.ModuleList(nn.Linear(E, 3 * H * D) for _ in range(L))
        self.out = nn.ModuleList(nn.Linear(H * D, E) for _ in range(L))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(E, 64), nn.SiLU(), nn.Linear(64, E)) for _ in range(L))
        self.lm_head = nn.Linear(E, VP, bias=False)
        self.heads = nn.ModuleList(
            nn.ModuleDict({"block": nn.Linear(E, E), "out": nn.Linear(E, VP)}) for _ in range(num_heads)
        )
        with torch.no_grad():
            for linear in (*self.qkv, *self.out):
                linear.weight *= 4.0  # attention must matter, or faults in it would not show in the tokens
            self.lm_head.weight[V:] = 100.0 * self.lm_head.weight[:1]  # padding that would often win
        self.double().eval().requires_grad_(False)

    def new_cache(self, batch_size: int, capacity_tokens: int) -> ReferenceCache:
        return self.cache_class(batch_size, capacity_tokens, self.lm_head.weight.dtype)

    def prefill(self, prompts, cache) -> ReferenceOutput:
        hidden = []
        for b, prompt in enumerate(prompts):
            single = self.new_cache(1, len(prompt))
            mask = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
            states = self._forward(prompt[None], torch.arange(len(prompt))[None], single, mask[None])
            cache.keys[:, b, :, : len(prompt)], cache.values[:, b, :, : len(prompt)] = (
                single.keys[:, 0],
                single.values[:, 0],
            )
            cache.lengths[b] = len(prompt)
            hidden.append(states[:, -1])
        return self._logits(torch.cat(hidden))

    def decode(self, tokens, cache, *, position_offsets=None, packed_mask=None) -> ReferenceOutput:
        B, N = tokens.shape
        self.decode_batches.append(B)
        if position_offsets is None:
            assert N == 1
            position_offsets, tree = torch.zeros(1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
        else:
            tree = unpack_mask(packed_mask, N)
        past = cache.lengths
        mask = torch.zeros(B, N, int(past.max()) + N, dtype=torch.bool)
        for b in range(B):
            mask[b, :, : past[b]] = True
            mask[b, :, past[b] : past[b] + N] = tree
        return self._logits(self._forward(tokens, past[:, None] + position_offsets, cache, mask))

    def _forward(self, tokens, positions, cache, mask) -> torch.Tensor:
        B, N = tokens.shape
        states = self.embed(tokens)
        for layer in range(L):
            qkv = self.qkv[layer](nn.functional.layer_norm(states, (E,))).view(B, N, 3, H, D).permute(2, 0, 3, 1, 4)
            query, key = rotate(qkv[0], positions), rotate(qkv[1], positions)
            cache.write(layer, key, qkv[2])
            width = mask.shape[-1]
            keys, values = cache.keys[layer, :, :, :width], cache.values[layer, :, :, :width]
            attended = scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None])
            states = states + self.out[layer](attended.transpose(1, 2).reshape(B, N, H * D))
            states = states + self.mlp[layer](nn.functional.layer_norm(states, (E,)))
        return nn.functional.layer_norm(states, (E,))

    def _logits(self, states) -> ReferenceOutput:
        medusa = [head["out"](states + silu(head["block"](states))) for head in self.heads]
        return ReferenceOutput(4 * self.lm_head(states), torch.stack(medusa) if medusa else None, states)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, H, N, D] at positions [B, N]."""
    frequency = 100.0 ** (-torch.arange(D // 2, dtype=x.dtype) / (D // 2))
    angle = positions[:, None, :, None].to(x.dtype) * frequency
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def continue_without_cache(model: ReferenceModel, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """Greedy continuation by running the whole text again for every token."""
    text = prompt
    for _ in range(new_tokens):
        logits = model.prefill([text], model.new_cache(1, len(text))).logits
        text = torch.cat([text, logits[:, :V].argmax(-1)])
    return text[len(prompt) :].tolist()


def fit_heads(model: ReferenceModel, prompts: list[torch.Tensor], new_tokens: int) -> None:
    """Good heads: solve, by least squares, for each head's matrix on the model's own continuations of the prompts."""
    states, texts = [], []
    for prompt in prompts:
        text = torch.cat([prompt, torch.tensor(continue_without_cache(model, prompt, new_tokens))])
        mask = torch.ones(len(text), len(text), dtype=torch.bool).tril()
        states.append(
            model._forward(text[None], torch.arange(len(text))[None], model.new_cache(1, len(text)), mask[None])[0]
        )
        texts.append(text)
    for index, head in enumerate(model.heads):
        shift = index + 2
        inputs = torch.cat([state[:-shift] for state in states])
        targets = torch.cat([text[shift:] for text in texts])
        head["block"].weight.zero_()
        head["block"].bias.zero_()
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
        solved = torch.linalg.lstsq(inputs, nn.functional.one_hot(targets, VP).double()).solution
        head["out"].weight.copy_(solved[:-1].T)
        head["out"].bias.copy_(solved[-1])
