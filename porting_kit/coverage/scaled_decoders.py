"""Plain decoders whose attention is scaled by 1 / D (maximal update parametrisation): Jais and Phi-3 small."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding, silu

from porting_kit.coverage.plain_decoders import PlainDecoder


class Jais(PlainDecoder):
    """Jais (inceptionai/jais-13b): GPT-2 with ALiBi and a gated MLP; embeddings, attention and logits are scaled."""

    embedding_scale, output_scale = 14.6, 0.22

    @property
    def inner(self) -> int:
        """I."""
        return self.size.inner

    def raw_config(self) -> dict[str, Any]:
        size = self.size
        return {
            **{"architectures": ["JAISLMHeadModel"], "model_type": "jais", "n_embd": self.E, "n_layer": size.layers},
            **{"n_head": self.H, "n_inner": self.inner, "n_positions": size.positions, "vocab_size": size.vocab},
            **{"activation_function": "swiglu", "layer_norm_epsilon": 1e-5, "position_embedding_type": "alibi"},
            **{"scale_qk_dot_by_d": True, "embeddings_scale": self.embedding_scale, "width_scale": self.output_scale},
            **{"scale_attn_weights": True, "tie_word_embeddings": True},
        }

    def add_weights(self) -> None:
        E, inner = self.E, self.inner
        layers = [("attn.c_attn", E, 3 * E), ("attn.c_proj", E, E)]
        layers += [("mlp.c_fc", E, inner), ("mlp.c_fc2", E, inner), ("mlp.c_proj", inner, E)]
        self.tensors["transformer.wte.weight"] = self.draw(self.size.vocab, E, scale=0.3)
        norms = ["transformer.ln_f"]
        for layer in range(self.size.layers):
            name = f"transformer.h.{layer}"
            norms += [f"{name}.ln_1", f"{name}.ln_2"]
            for part, columns, rows in layers:  # [in, out], as GPT-2 stores them
                self.tensors[f"{name}.{part}.weight"] = self.draw(rows, columns).T.contiguous()
                self.tensors[f"{name}.{part}.bias"] = self.draw(rows, scale=0.3)
        for norm in norms:
            self.tensors[f"{norm}.weight"], self.tensors[f"{norm}.bias"] = self.draw_norm(), self.draw(E, scale=0.3)

    def output_matrix(self) -> torch.Tensor:
        return self.tensors["transformer.wte.weight"]

    def dense(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A linear layer stored as [in, out]."""
        return self.point(x @ self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"])

    def last_state(self, tokens: torch.Tensor) -> torch.Tensor:
        S = tokens.shape[1]
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.H + 1) / self.H)
        bias = -slopes[:, None, None] * (torch.arange(S)[:, None] - torch.arange(S))
        x = self.point(embedding(tokens, self.tensors["transformer.wte.weight"]) * self.embedding_scale)
        for layer in range(self.size.layers):
            name = f"transformer.h.{layer}"
            q, k, v = self.dense(self.layer_norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn").split(self.E, dim=-1)
            mixed = self.attend(*map(self.heads_of, (q, k, v)), 1.0 / self.D, bias=bias)
            x = self.point(x + self.dense(mixed, f"{name}.attn.c_proj"))
            inner = self.layer_norm(x, f"{name}.ln_2")
            gated = self.point(self.dense(inner, f"{name}.mlp.c_fc") * silu(self.dense(inner, f"{name}.mlp.c_fc2")))
            x = self.point(x + self.dense(gated, f"{name}.mlp.c_proj"))
        return self.layer_norm(x, "transformer.ln_f")


class Phi3Small(PlainDecoder):
    """Phi-3 small (microsoft/Phi-3-small-8k-instruct): gegelu, grouped heads, scaled embeddings, attention and logits.

    All its layers see the whole text here; the published models see blocks of it in every second layer.
    """

    embedding_scale, output_scale, limit, theta = 10.0, 0.125, 4.0, 50000.0

    def raw_config(self) -> dict[str, Any]:
        size = self.size
        return {
            **{"architectures": ["Phi3SmallForCausalLM"], "model_type": "phi3small", "hidden_size": self.E},
            **{"num_hidden_layers": size.layers, "num_attention_heads": self.H, "num_key_value_heads": size.kv_heads},
            **{"ff_intermediate_size": size.inner, "vocab_size": size.vocab, "max_position_embeddings": size.positions},
            **{"layer_norm_epsilon": 1e-5, "hidden_act": "gegelu", "gegelu_limit": self.limit},
            **{"mup_embedding_multiplier": self.embedding_scale, "mup_width_multiplier": 1 / self.output_scale},
            **{"mup_use_scaling": True, "mup_attn_multiplier": 1.0, "rope_embedding_base": self.theta},
            **{"dense_attention_every_n_layers": 1, "blocksparse_block_size": 64, "blocksparse_vert_stride": 8},
            **{"blocksparse_num_local_blocks": 16, "blocksparse_homo_head_pattern": False},
            **{"tie_word_embeddings": True},
        }

    def add_weights(self) -> None:
        size, E, D = self.size, self.E, self.D
        rows = (self.H + 2 * size.kv_heads) * D
        layers = [("self_attn.query_key_value", rows, E), ("self_attn.dense", E, E)]
        layers += [("mlp.up_proj", 2 * size.inner, E), ("mlp.down_proj", E, size.inner)]
        self.tensors["model.embed_tokens.weight"] = self.draw(size.vocab, E, scale=0.3)
        norms = ["model.final_layernorm"]
        for layer in range(size.layers):
            name = f"model.layers.{layer}"
            norms += [f"{name}.input_layernorm", f"{name}.post_attention_layernorm"]
            for part, out, columns in layers:
                self.tensors[f"{name}.{part}.weight"] = self.draw(out, columns)
                self.tensors[f"{name}.{part}.bias"] = self.draw(out, scale=0.3)
        for norm in norms:
            self.tensors[f"{norm}.weight"], self.tensors[f"{norm}.bias"] = self.draw_norm(), self.draw(E, scale=0.3)

    def output_matrix(self) -> torch.Tensor:
        return self.tensors["model.embed_tokens.weight"]

    def dense(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A linear layer with a bias."""
        return self.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def gegelu(self, x: torch.Tensor) -> torch.Tensor:
        """Even columns gate (x sigmoid(1.702 x)), odd ones are linear plus one; both are limited."""
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    def last_state(self, tokens: torch.Tensor) -> torch.Tensor:
        B, S = tokens.shape
        K, D, theta = self.size.kv_heads, self.D, self.theta
        x = self.point(embedding(tokens, self.tensors["model.embed_tokens.weight"]) * self.embedding_scale)
        for layer in range(self.size.layers):
            name = f"model.layers.{layer}"
            packed = self.dense(self.layer_norm(x, f"{name}.input_layernorm"), f"{name}.self_attn.query_key_value")
            groups = packed.view(B, S, K, -1, D).transpose(1, 2)  # [B, K, S, queries of a group + 2, D]
            q = groups[:, :, :, :-2].permute(0, 1, 3, 2, 4).flatten(1, 2)
            k, v = groups[..., -2, :], groups[..., -1, :]
            mixed = self.attend(self.rotate(q, theta), self.rotate(k, theta), v, 1.0 / D)
            x = self.point(x + self.dense(mixed, f"{name}.self_attn.dense"))
            inner = self.layer_norm(x, f"{name}.post_attention_layernorm")
            gated = self.point(self.gegelu(self.dense(inner, f"{name}.mlp.up_proj")))
            x = self.point(x + self.dense(gated, f"{name}.mlp.down_proj"))
        return self.layer_norm(x, "model.final_layernorm")
