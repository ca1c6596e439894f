"""Decoders in plain PyTorch for families that transformers has neither itself nor as a relative: Grok-1 and Arctic.

Each is written from the public description and the tensor names of its model, holds random weights under those names,
and computes whole prompts in float32. GELU is its tanh form, as TensorRT-LLM always has it. What Medusa heads read is
what goes into `lm_head`. Every weight is a parameter and every step of the arithmetic ends in `self.point`, so that
`alignment.rounding` can make the model compute as a half precision would.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import embedding, gelu, layer_norm, linear, silu

from porting_kit.coverage.reference_models import ModelSize


class PlainConfig(SimpleNamespace):
    """What a comparison asks of a config; `raw` is the config.json."""

    _attn_implementation = "eager"

    def get_text_config(self) -> PlainConfig:
        """Itself: there is no other part."""
        return self


class PlainDecoder(torch.nn.Module):
    """Embedding, layers, a last norm, an output matrix. Subclasses give names, weights and the layers' arithmetic.

    Args:
        size: sizes; E = H D.
        seed: of the weights.
    """

    output_scale = 1.0

    def __init__(self, size: ModelSize, seed: int = 1) -> None:
        super().__init__()
        self.size, self.generator = size, torch.Generator().manual_seed(seed)
        self.E, self.H, self.D = size.hidden_size, size.heads, size.hidden_size // size.heads
        self.point = torch.nn.Identity()
        self.tensors: dict[str, torch.Tensor] = {}
        self.add_weights()
        self.tensors = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in self.tensors.items()}
        for name, parameter in self.tensors.items():
            self.register_parameter(name.replace(".", "/"), parameter)
        raw = self.raw_config()
        self.config = PlainConfig(raw=raw, vocab_size=size.vocab, hidden_size=self.E, model_type=raw["model_type"])
        self.lm_head = torch.nn.Linear(self.E, size.vocab, bias=False)
        self.lm_head.weight = self.output_matrix()
        del self.generator

    def add_weights(self) -> None:
        """Fill `tensors`."""
        raise NotImplementedError

    def raw_config(self) -> dict[str, Any]:
        """The config.json."""
        raise NotImplementedError

    def output_matrix(self) -> torch.Tensor:
        """[V, E]."""
        raise NotImplementedError

    def last_state(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [B, S] -> what the output matrix reads, [B, S, E]."""
        raise NotImplementedError

    def draw(self, *shape: int, scale: float | None = None) -> torch.Tensor:
        """Random values, by default as large as a matrix needs to keep the scale of its input."""
        return torch.randn(shape, generator=self.generator) * (shape[-1] ** -0.5 if scale is None else scale)

    def draw_norm(self) -> torch.Tensor:
        """A norm's weight, off its start."""
        return 1 + self.draw(self.E, scale=0.2)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        """Tokens [B, S] -> .logits [B, S, V]."""
        return SimpleNamespace(logits=self.lm_head(self.last_state(input_ids)) * self.output_scale)

    def get_output_embeddings(self) -> torch.nn.Module:
        """The output matrix, as transformers' models give it."""
        return self.lm_head

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json and model.safetensors."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config.raw), encoding="utf-8")
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors"
        )

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """A linear layer."""
        return self.point(linear(x, weight, bias))

    def rms(self, x: torch.Tensor, name: str, eps: float = 1e-5) -> torch.Tensor:
        """An RMS norm."""
        return self.point(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.tensors[name])

    def layer_norm(self, x: torch.Tensor, name: str, eps: float = 1e-5) -> torch.Tensor:
        """A LayerNorm."""
        return self.point(layer_norm(x, (self.E,), self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], eps))

    def heads_of(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, n D] -> [B, n, S, D]."""
        return x.view(*x.shape[:2], -1, self.D).transpose(1, 2)

    def rotate(self, x: torch.Tensor, theta: float) -> torch.Tensor:
        """Rotate halves, as LLaMA does; x [B, n, S, D]."""
        D, S = self.D, x.shape[2]
        angles = torch.arange(S)[:, None] * theta ** (-torch.arange(0, D, 2) / D)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return self.point(x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, cap: float = 0.0, bias: Any = 0.0
    ) -> torch.Tensor:
        """Causal attention over [B, n, S, D], key/value heads repeated; [B, S, E]."""
        k, v = (part.repeat_interleave(self.H // part.shape[1], dim=1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) * scale
        scores = (cap * torch.tanh(scores / cap) if cap else scores) + bias
        S = q.shape[2]
        scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))
        return self.point((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def mix(
        self, x: torch.Tensor, router: str, expert: str, names: tuple[str, str, str], act: Any, top: int, whole: bool
    ):
        """Experts: act(gate x) * (up x), summed with the router's softmax, which may be made whole again."""
        weights, chosen = linear(x, self.tensors[router]).softmax(-1).topk(top, dim=-1)
        if whole:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number in range(self.tensors[router].shape[0]):
            gate, up, down = (self.tensors[f"{expert}.{number}.{name}.weight"] for name in names)
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + share * self.linear(self.point(act(self.linear(x, gate)) * self.linear(x, up)), down)
        return self.point(out)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU as TensorRT-LLM has it."""
    return gelu(x, approximate="tanh")


class Grok(PlainDecoder):
    """Grok-1 (xai-org/grok-1; tensor names of hpcai-tech/grok-1): experts from a softmax over all, not made whole."""

    embedding_scale, output_scale = 78.38367176906169, 0.5773502691896257
    X, J, CAP = 4, 48, 30.0

    def raw_config(self) -> dict[str, Any]:
        size = self.size
        return {
            **{"architectures": ["Grok1ModelForCausalLM"], "model_type": "grok-1", "hidden_size": self.E},
            **{"num_hidden_layers": size.layers, "num_attention_heads": self.H, "num_key_value_heads": size.kv_heads},
            **{"intermediate_size": self.J, "vocab_size": size.vocab, "max_position_embeddings": size.positions},
            **{"rms_norm_eps": 1e-5, "num_experts": self.X, "num_experts_per_tok": self.size.experts_chosen},
            **{"attn_output_multiplier": self.D**-0.5, "embedding_multiplier_scale": self.embedding_scale},
            **{"output_multiplier_scale": self.output_scale, "max_attn_value": self.CAP, "tie_word_embeddings": True},
        }

    def add_weights(self) -> None:
        size, E, D = self.size, self.E, self.D
        self.tensors["model.embed_tokens.weight"] = self.draw(size.vocab, E, scale=0.02)  # it is scaled up
        self.tensors["model.norm.scale"] = self.draw_norm()
        for layer in range(size.layers):
            name = f"model.layers.{layer}"
            for part, heads in (("q", self.H), ("k", size.kv_heads), ("v", size.kv_heads)):
                self.tensors[f"{name}.attn.{part}_proj.weight"] = self.draw(heads * D, E, scale=0.3)
            self.tensors[f"{name}.attn.o_proj.weight"] = self.draw(E, self.H * D)
            self.tensors[f"{name}.moe_block.gate.weight"] = self.draw(self.X, E)
            for expert in range(self.X):
                place = f"{name}.moe_block.experts.{expert}"
                self.tensors[f"{place}.linear.weight"] = self.draw(self.J, E)
                self.tensors[f"{place}.linear_v.weight"] = self.draw(self.J, E)
                self.tensors[f"{place}.linear_1.weight"] = self.draw(E, self.J)
            for part in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"):
                self.tensors[f"{name}.{part}.scale"] = self.draw_norm()

    def output_matrix(self) -> torch.Tensor:
        return self.tensors["model.embed_tokens.weight"]

    def last_state(self, tokens: torch.Tensor) -> torch.Tensor:
        t = self.tensors
        x = self.point(embedding(tokens, t["model.embed_tokens.weight"]) * self.embedding_scale)
        for layer in range(self.size.layers):
            name = f"model.layers.{layer}"
            inner = self.rms(x, f"{name}.pre_attn_norm.scale")
            q, k, v = (self.heads_of(self.linear(inner, t[f"{name}.attn.{part}_proj.weight"])) for part in "qkv")
            mixed = self.attend(self.rotate(q, 1e4), self.rotate(k, 1e4), v, self.D**-0.5, cap=self.CAP)
            mixed = self.linear(mixed, t[f"{name}.attn.o_proj.weight"])
            x = self.point(x + self.rms(mixed, f"{name}.post_attn_norm.scale"))
            moe, names = f"{name}.moe_block", ("linear", "linear_v", "linear_1")
            inner = self.rms(x, f"{name}.pre_moe_norm.scale")
            experts = self.mix(
                inner, f"{moe}.gate.weight", f"{moe}.experts", names, tanh_gelu, self.size.experts_chosen, False
            )
            x = self.point(x + self.rms(experts, f"{name}.post_moe_norm.scale"))
        return self.rms(x, "model.norm.scale")


class Arctic(PlainDecoder):
    """Snowflake Arctic: a small MLP after attention, and experts that read the input of attention beside it."""

    X, J = 4, 48

    def raw_config(self) -> dict[str, Any]:
        size = self.size
        return {
            **{"architectures": ["ArcticForCausalLM"], "model_type": "arctic", "hidden_size": self.E},
            **{"num_hidden_layers": size.layers, "num_attention_heads": self.H, "num_key_value_heads": size.kv_heads},
            **{"intermediate_size": self.J, "vocab_size": size.vocab, "max_position_embeddings": size.positions},
            **{
                "rms_norm_eps": 1e-5,
                "num_local_experts": self.X,
                "num_experts_per_tok": self.size.experts_chosen,
                "hidden_act": "silu",
            },
            **{"moe_layer_frequency": 1, "parallel_attn_mlp_res": True, "use_residual": True, "rope_theta": 50000.0},
            **{"tie_word_embeddings": False, "attention_bias": False},
        }

    def add_weights(self) -> None:
        size, E, D = self.size, self.E, self.D
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self.tensors[name] = self.draw(size.vocab, E)
        self.tensors["model.norm.weight"] = self.draw_norm()
        for layer in range(size.layers):
            name = f"model.layers.{layer}"
            for part, heads in (("q", self.H), ("k", size.kv_heads), ("v", size.kv_heads)):
                self.tensors[f"{name}.self_attn.{part}_proj.weight"] = self.draw(heads * D, E)
            self.tensors[f"{name}.self_attn.o_proj.weight"] = self.draw(E, self.H * D)
            for part in ("input_layernorm", "post_attention_layernorm", "residual_layernorm"):
                self.tensors[f"{name}.{part}.weight"] = self.draw_norm()
            for part in ("w1", "w2", "w3"):
                self.tensors[f"{name}.residual_mlp.{part}.weight"] = self.draw(E, E)
            self.tensors[f"{name}.block_sparse_moe.gate.weight"] = self.draw(self.X, E)
            for expert in range(self.X):
                place = f"{name}.block_sparse_moe.experts.{expert}"
                for part, rows, columns in (("w1", self.J, E), ("w3", self.J, E), ("w2", E, self.J)):
                    self.tensors[f"{place}.{part}.weight"] = self.draw(rows, columns)

    def output_matrix(self) -> torch.Tensor:
        return self.tensors["lm_head.weight"]

    def last_state(self, tokens: torch.Tensor) -> torch.Tensor:
        t = self.tensors
        x = embedding(tokens, t["model.embed_tokens.weight"])
        for layer in range(self.size.layers):
            name = f"model.layers.{layer}"
            inner = self.rms(x, f"{name}.input_layernorm.weight")
            q, k, v = (self.heads_of(self.linear(inner, t[f"{name}.self_attn.{part}_proj.weight"])) for part in "qkv")
            mixed = self.attend(self.rotate(q, 5e4), self.rotate(k, 5e4), v, self.D**-0.5)
            after = self.point(x + self.linear(mixed, t[f"{name}.self_attn.o_proj.weight"]))
            inner = self.rms(after, f"{name}.residual_layernorm.weight")
            w1, w2, w3 = (t[f"{name}.residual_mlp.{part}.weight"] for part in ("w1", "w2", "w3"))
            beside, moe = self.rms(x, f"{name}.post_attention_layernorm.weight"), f"{name}.block_sparse_moe"
            experts = self.mix(
                beside, f"{moe}.gate.weight", f"{moe}.experts", ("w1", "w3", "w2"), silu, self.size.experts_chosen, True
            )
            residual = self.linear(self.point(silu(self.linear(inner, w1)) * self.linear(inner, w3)), w2)
            x = self.point(after + residual + experts)
        return self.rms(x, "model.norm.weight")
