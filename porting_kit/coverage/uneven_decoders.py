"""Plain decoders whose layers differ from one another: Nemotron-NAS and DeciLM."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding, silu

from porting_kit.architectures.families.nemotron_nas import mlp_width
from porting_kit.coverage.plain_decoders import PlainDecoder


class NemotronNas(PlainDecoder):
    """Llama-3_1-Nemotron-51B and its like: every layer another group size, MLP width, linear part or part left out."""

    theta = 50000.0
    # (queries to a key/value head, ffn_mult), a number's place taken by "linear" or "no_op".
    PLAN: tuple[tuple[Any, Any], ...] = (
        (4, 3.0),
        ("no_op", 9.0),
        (2, "linear"),
        ("linear", 3.0),
        (1, "no_op"),
        (8, 9.0),
    )

    def raw_config(self) -> dict[str, Any]:
        size = self.size
        return {
            **{"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "hidden_size": self.E},
            **{"num_hidden_layers": len(self.PLAN), "num_attention_heads": self.H, "num_key_value_heads": None},
            **{"intermediate_size": None, "vocab_size": size.vocab, "max_position_embeddings": size.positions},
            **{"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": self.theta, "rope_scaling": None},
            **{"tie_word_embeddings": False, "block_configs": [self.describe_block(*block) for block in self.PLAN]},
        }

    def describe_block(self, attention: Any, ffn: Any) -> dict[str, Any]:
        """One entry of `block_configs`, as the published models have it."""
        stands = {
            part: {"no_op": part == "no_op", "replace_with_linear": part == "linear"} for part in (attention, ffn)
        }
        group = None if isinstance(attention, str) else attention
        factor = None if isinstance(ffn, str) else ffn
        return {
            "attention": {**stands[attention], "n_heads_in_group": group, "sparsify": None, "window_length": None},
            "ffn": {**stands[ffn], "ffn_mult": factor, "sparsify": None},
        }

    def add_weights(self) -> None:
        E, D, H = self.E, self.D, self.H
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self.tensors[name] = self.draw(self.size.vocab, E)
        self.tensors["model.norm.weight"] = self.draw_norm()
        for layer, (attention, ffn) in enumerate(self.PLAN):
            name, shapes = f"model.layers.{layer}", {}
            if attention == "linear":
                shapes["self_attn.linear_attn"] = (E, E)
            elif attention != "no_op":
                rows = {"q": H * D, "k": H // attention * D, "v": H // attention * D}
                shapes |= {f"self_attn.{part}_proj": (count, E) for part, count in rows.items()}
                shapes["self_attn.o_proj"] = (E, H * D)
            if ffn == "linear":
                shapes["mlp.linear_mlp"] = (E, E)
            elif ffn != "no_op":
                inner = self.width(ffn)
                shapes |= {f"mlp.{part}_proj": (inner, E) for part in ("gate", "up")}
                shapes["mlp.down_proj"] = (E, inner)
            for part, shape in shapes.items():
                self.tensors[f"{name}.{part}.weight"] = self.draw(*shape)
            for part, norm in ((attention, "input_layernorm"), (ffn, "post_attention_layernorm")):
                if part != "no_op":
                    self.tensors[f"{name}.{norm}.weight"] = self.draw_norm()

    def width(self, factor: Any) -> int:
        """I of one layer."""
        return mlp_width(factor, self.E)

    def output_matrix(self) -> torch.Tensor:
        return self.tensors["lm_head.weight"]

    def last_state(self, tokens: torch.Tensor) -> torch.Tensor:
        x = embedding(tokens, self.tensors["model.embed_tokens.weight"])
        for layer, (attention, ffn) in enumerate(self.PLAN):
            if attention != "no_op":
                inner = self.rms(x, f"model.layers.{layer}.input_layernorm.weight")
                x = self.point(x + self.attention_of(f"model.layers.{layer}.self_attn", attention, inner))
            if ffn != "no_op":
                inner = self.rms(x, f"model.layers.{layer}.post_attention_layernorm.weight")
                x = self.point(x + self.mlp_of(f"model.layers.{layer}.mlp", ffn, inner))
        return self.rms(x, "model.norm.weight")

    def attention_of(self, name: str, kind: Any, x: torch.Tensor) -> torch.Tensor:
        """Attention, or the linear layer in its place."""
        if kind == "linear":
            return self.linear(x, self.tensors[f"{name}.linear_attn.weight"])
        q, k, v = (self.heads_of(self.linear(x, self.tensors[f"{name}.{part}_proj.weight"])) for part in "qkv")
        mixed = self.attend(self.rotate(q, self.theta), self.rotate(k, self.theta), v, self.D**-0.5)
        return self.linear(mixed, self.tensors[f"{name}.o_proj.weight"])

    def mlp_of(self, name: str, kind: Any, x: torch.Tensor) -> torch.Tensor:
        """The gated MLP, or the linear layer in its place."""
        if kind == "linear":
            return self.linear(x, self.tensors[f"{name}.linear_mlp.weight"])
        gate, up, down = (self.tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return self.linear(self.point(silu(self.linear(x, gate)) * self.linear(x, up)), down)


class DeciLM(NemotronNas):
    """DeciLM-7B: only the number of key/value heads differs from layer to layer."""

    PLAN = ((4, 1), (2, 1), (8, 1), (1, 1))

    def raw_config(self) -> dict[str, Any]:
        raw = super().raw_config()
        del raw["block_configs"]
        heads = [self.H // group for group, _ in self.PLAN]
        own = {"model_type": "deci", "num_key_value_heads_per_layer": heads, "num_key_value_heads": max(heads)}
        return raw | own | {"intermediate_size": self.size.inner}

    def width(self, factor: Any) -> int:
        return self.size.inner
