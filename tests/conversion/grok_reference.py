"""Grok-1 in plain PyTorch, for comparison: transformers has no Grok.

Written from the public description of the model (xai-org/grok-1) and the tensor names of hpcai-tech/grok-1. GELU is
its tanh form, as TensorRT-LLM always has it; experts are chosen from a softmax over all and not normalised again.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn.functional import embedding, gelu, linear

E, L, H, K, D, J, X, TOP, V = 64, 2, 8, 2, 8, 48, 4, 2, 161
EMBEDDING_SCALE, OUTPUT_SCALE, SOFT_CAP, THETA = 78.38367176906169, 0.5773502691896257, 30.0, 10000.0
CONFIG = {
    "architectures": ["Grok1ModelForCausalLM"],
    "model_type": "grok-1",
    "hidden_size": E,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "intermediate_size": J,
    "vocab_size": V,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "num_experts": X,
    "num_experts_per_tok": TOP,
    "attn_output_multiplier": D**-0.5,
    "embedding_multiplier_scale": EMBEDDING_SCALE,
    "output_multiplier_scale": OUTPUT_SCALE,
    "max_attn_value": SOFT_CAP,
    "tie_word_embeddings": True,
}


def make_tensors() -> dict[str, torch.Tensor]:
    """Random weights; the embedding is small because it is scaled up."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {"model.embed_tokens.weight": draw(V, E, scale=0.02), "model.norm.scale": 1 + draw(E, scale=0.2)}
    for layer in range(L):
        name = f"model.layers.{layer}"
        for part, heads in (("q", H), ("k", K), ("v", K)):
            tensors[f"{name}.attn.{part}_proj.weight"] = draw(heads * D, E, scale=0.3)
        tensors[f"{name}.attn.o_proj.weight"] = draw(E, H * D, scale=E**-0.5)
        tensors[f"{name}.moe_block.gate.weight"] = draw(X, E, scale=E**-0.5)
        for expert in range(X):
            place = f"{name}.moe_block.experts.{expert}"
            tensors[f"{place}.linear.weight"] = draw(J, E, scale=E**-0.5)
            tensors[f"{place}.linear_v.weight"] = draw(J, E, scale=E**-0.5)
            tensors[f"{place}.linear_1.weight"] = draw(E, J, scale=J**-0.5)
        for part in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"):
            tensors[f"{name}.{part}.scale"] = 1 + draw(E, scale=0.2)
    return tensors


class GrokReference(torch.nn.Module):
    """Logits of whole prompts, float32."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        """tokens [B, S] -> .logits [B, S, V]."""
        t = self.tensors
        x = embedding(tokens, t["model.embed_tokens.weight"]) * EMBEDDING_SCALE
        for layer in range(L):
            name = f"model.layers.{layer}"
            attention = self.attend(self.norm(x, f"{name}.pre_attn_norm"), f"{name}.attn")
            x = x + self.norm(attention, f"{name}.post_attn_norm")
            experts = self.mix(self.norm(x, f"{name}.pre_moe_norm"), f"{name}.moe_block")
            x = x + self.norm(experts, f"{name}.post_moe_norm")
        logits = linear(self.norm(x, "model.norm"), t["model.embed_tokens.weight"]) * OUTPUT_SCALE
        return SimpleNamespace(logits=logits)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.tensors[f"{name}.scale"]

    def attend(self, x: torch.Tensor, name: str) -> torch.Tensor:
        B, S, _ = x.shape
        q, k, v = (
            linear(x, self.tensors[f"{name}.{part}_proj.weight"]).view(B, S, -1, D).transpose(1, 2) for part in "qkv"
        )
        angles = torch.arange(S)[:, None] * THETA ** (-torch.arange(0, D, 2) / D)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (part * cos + torch.cat((-part[..., D // 2 :], part[..., : D // 2]), -1) * sin for part in (q, k))
        k, v = (part.repeat_interleave(H // K, dim=1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) * D**-0.5
        scores = SOFT_CAP * torch.tanh(scores / SOFT_CAP)
        scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, H * D)
        return linear(mixed, self.tensors[f"{name}.o_proj.weight"])

    def mix(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weights, chosen = linear(x, self.tensors[f"{name}.gate.weight"]).softmax(-1).topk(TOP, dim=-1)
        out = torch.zeros_like(x)
        for expert in range(X):
            up, gate, down = (
                self.tensors[f"{name}.experts.{expert}.{part}.weight"] for part in ("linear_v", "linear", "linear_1")
            )
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            out = out + share * linear(gelu(linear(x, gate), approximate="tanh") * linear(x, up), down)
        return out
