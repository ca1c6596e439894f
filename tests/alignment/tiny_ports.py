"""Small ports of every bundled family: a random Hugging Face base, heads fitted to it, and the port in the emulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from porting_kit.alignment.head_oracle import ReferenceHeads, read_reference_heads
from porting_kit.alignment.reference import Reference, load_reference
from porting_kit.architectures.base_config import read_base_config
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.conversion.heads import read_head_set
from porting_kit.conversion.plan import ConversionPlan, plan_conversion
from porting_kit.conversion.tensor_source import open_tensor_source
from porting_kit.diagnosis.port_state import PortState, describe_port
from porting_kit.medusa.tree import read_tree
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree

V = 160
NUM_HEADS = 3
PROMPT_LENGTHS = (3, 17, 40, 70)

SIZES = {"vocab_size": V, "num_hidden_layers": 2}
LLAMA_LIKE = {
    **SIZES,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# Untied: with tied embeddings the text of a random model hardly depends on attention.
BLOOM_LIKE = {"vocab_size": V, "n_layer": 2, "tie_word_embeddings": False}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {**BLOOM_LIKE, "hidden_size": 64, "n_head": 4}),
    "bloom-128": ("Bloom", {**BLOOM_LIKE, "hidden_size": 256, "n_head": 2}),
    "llama": ("Llama", {**LLAMA_LIKE, "rope_theta": 500.0}),
    "mistral": ("Mistral", {**LLAMA_LIKE, "rope_theta": 500.0}),
    "qwen2": ("Qwen2", {**LLAMA_LIKE, "rope_theta": 1000000.0}),
    "gptneox": (
        "GPTNeoX",
        {
            **SIZES,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "max_position_embeddings": 512,
            "hidden_act": "gelu",
        },
    ),
    # Not among the bundled definitions: these need a source tree.
    "gpt2": ("GPT2", {**BLOOM_LIKE, "n_embd": 64, "n_head": 4, "n_positions": 512}),
    "gptj": ("GPTJ", {**BLOOM_LIKE, "n_embd": 64, "n_head": 4, "n_positions": 512, "rotary_dim": 8}),
    "opt": (
        "OPT",
        {
            **SIZES,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        },
    ),
    "falcon": ("Falcon", {**SIZES, "hidden_size": 64, "num_attention_heads": 4, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {**LLAMA_LIKE, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**LLAMA_LIKE, "head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "phi": ("Phi", {**LLAMA_LIKE, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
}


@dataclass
class TinyPort:
    """One base with its heads and its healthy port."""

    folder: Path
    reference: Reference
    heads: ReferenceHeads
    plan: ConversionPlan
    state: PortState
    prompts: list[list[int]]

    @property
    def differences(self) -> tuple[Any, ...]:
        """The family's inherent differences."""
        return self.plan.base.definition.differences


def make_prompts(lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 5) -> list[list[int]]:
    """Random token ids of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (length,), generator=generator).tolist() for length in lengths]


def make_base(folder: Path, family: str, *, seed: int = 0, embedding_scale: float = 1.0, **config: Any) -> Path:
    """Save a base whose attention matters and whose tokens are decided; more so with small embeddings."""
    kind, settings = BASES[family]
    torch.manual_seed(seed)
    model_config = getattr(transformers, f"{kind}Config")(**{**settings, "eos_token_id": 2, **config})
    model_class = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    model = model_class(model_config).eval()
    scale = 0.15 * (64 / model_config.hidden_size) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(scale * noise)
            else:
                parameter.add_(0.2 * noise)
        model.get_input_embeddings().weight.mul_(embedding_scale)
    model.save_pretrained(folder)
    return folder


def make_heads(folder: Path, reference: Reference, prompts: Sequence[Sequence[int]], new_tokens: int = 60) -> Path:
    """Heads in the original layout that know the base's own continuations of the prompts."""
    emitted = reference.generate(prompts, new_tokens)
    texts = [[*prompt, *row] for prompt, row in zip(prompts, emitted, strict=True)]
    hidden = reference.hidden_states(texts)
    E = hidden[0].shape[1]
    generator = torch.Generator().manual_seed(9)
    tensors = {}
    for head in range(NUM_HEADS):
        weight, bias = torch.randn(E, E, generator=generator) * 0.1, torch.randn(E, generator=generator) * 0.1
        shift = head + 2
        inputs = torch.cat([rows[len(p) - 1 : -shift] for rows, p in zip(hidden, prompts, strict=True)])
        inputs = inputs + torch.nn.functional.silu(inputs @ weight.T + bias)
        targets = torch.tensor(
            [token for t, p in zip(texts, prompts, strict=True) for token in t[len(p) - 1 + shift :]]
        )
        ridge = inputs.T @ inputs + 1e-2 * torch.eye(E)
        one_hot = torch.nn.functional.one_hot(targets, V).float()
        tensors |= {
            f"{head}.0.linear.weight": weight,
            f"{head}.0.linear.bias": bias,
            f"{head}.1.weight": torch.linalg.solve(ridge, inputs.T @ one_hot).T.contiguous(),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}))
    return folder


def save_random_heads(folder: Path, hidden_size: int, vocab_size: int) -> Path:
    """Heads that know nothing: every step confirms one token, with few exceptions."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for head in range(NUM_HEADS):
        tensors |= {
            f"{head}.0.linear.weight": 0.02 * torch.randn(hidden_size, hidden_size, generator=generator),
            f"{head}.0.linear.bias": torch.zeros(hidden_size),
            f"{head}.1.weight": 0.02 * torch.randn(vocab_size, hidden_size, generator=generator),
        }
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}))
    return folder


def make_port(
    folder: Path, family: str, *, dtype: str = "float32", tree: str = "small_3", source: str = "bundled", **config: Any
) -> TinyPort:
    """Base, heads, conversion, patched module and emulator, all with the project's own parts."""
    base_folder = make_base(folder / "base", family, **config)
    reference = load_reference(base_folder)
    prompts = make_prompts()
    heads = read_head_set(make_heads(folder / "heads", reference, prompts))
    tensor_source = open_tensor_source(base_folder)
    base = read_base_config(base_folder, tensor_source.names())
    port_config, tensors = checkpoint_tensors(base_folder, heads, dtype=dtype)
    source_tree = open_source_tree(source)
    module = build_medusa_module(source_tree, port_config["architecture"])
    state = describe_port(
        source_tree,
        port_config,
        tensors,
        tree=read_tree(tree),
        module_source=module.source,
        class_name=module.class_name,
    )
    return TinyPort(
        folder=folder,
        reference=reference,
        heads=read_reference_heads(heads, reference),
        plan=plan_conversion(base, tensor_source, dtype=dtype, heads=heads),
        state=state,
        prompts=prompts,
    )
