"""Toy models of every attention that a kernel fit knows, fitted and run in the emulator."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.emulator import open_emulator
from porting_kit.kernel_fit.fit import FittedCheckpoint, apply_fit
from porting_kit.kernel_fit.plan import FitPlan, plan_fit
from porting_kit.patching.medusa_module import build_medusa_module, make_imports_absolute, read_source
from porting_kit.releases.kernels import KernelProfile, kernel_profile
from porting_kit.releases.shape import AttentionShape
from porting_kit.source_tree import SourceTree, open_source_tree
from tests.emulator.toy_models import VOCAB, ToySize, make_reference

RELEASE = "0.11.0.dev2024062500"
LENGTH = 160
MASK = torch.tensor([[0b0001], [0b0011], [0b0101], [0b1011]], dtype=torch.int32)  # a root, two children, a grandchild
OFFSETS = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3))


def shape_of(config: dict[str, Any], **more: Any) -> AttentionShape:
    """The attention shape of a checkpoint's config, as a half-precision engine has it."""
    read = {
        "head_size": config["head_size"],
        "query_heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "dtype": "float16",
        "position_kind": config["position_embedding_type"],
        "q_scaling": float(config.get("q_scaling") or 1.0),
        "max_seq_len": LENGTH,
    }
    return AttentionShape(**{**read, **more})


def float32_profile(name: str) -> KernelProfile:
    """A release's kernels without the gate on the data type, so that float32 can measure what they compute."""
    profile = kernel_profile(name)
    return replace(profile, gates=tuple(gate for gate in profile.gates if gate.name != "data type"))


@dataclass
class FittedModel:
    """A toy model, its plan, and its fitted checkpoint."""

    reference: Any
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    plan: FitPlan
    fitted: FittedCheckpoint
    tree: SourceTree
    source: str
    class_name: str

    def emulate(self, kernel: str = "exact", *, config: dict[str, Any] | None = None) -> Any:
        """The fitted model under the patched base class."""
        emulator = open_emulator(self.tree, kernel=float32_profile(kernel))
        return emulator.build_model(
            config or self.fitted.config, self.fitted.tensors, module_source=self.source, class_name=self.class_name
        )


def fit_toy(
    family: str,
    size: ToySize,
    *,
    source: str = "bundled",
    release: str = RELEASE,
    wanted: Any = "auto",
    dtype: str = "float32",
    engine_dtype: str = "float16",
    sharpness: float = 1.0,
    activations: Any = None,
    **shape: Any,
) -> FittedModel:
    """Convert, plan, fit and patch a toy model.

    Args:
        dtype: of the checkpoint; float32 measures what the fit alone costs.
        engine_dtype: the type that the fit is planned for.
        sharpness: factor on the content logits, put on the query weights of both sides.
    """
    tree = open_source_tree(source)
    reference = make_reference(family, size)
    if sharpness != 1.0:
        sharpen(reference, size, sharpness)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        upstream = None if tree.kind == "bundled" else tree.release
        config, tensors = checkpoint_tensors(Path(folder), dtype=dtype, release=upstream)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    plan = plan_fit(
        shape_of(config, dtype=engine_dtype, **shape), kernel_profile(f"release:{release}"), wanted, config=config
    )
    module = build_medusa_module(tree, config["architecture"], fit=plan)
    text = module.source
    if module.outcome.status == "already_accepts":
        file = tree.find_model(config["architecture"]).file
        package = ".".join(file.relative_to(tree.root).with_suffix("").parts[:-1])
        text = make_imports_absolute(read_source(file), package)
    moments = activations(config, tensors, tree) if callable(activations) else activations
    fitted = apply_fit(plan, config, tensors, activations=moments)
    return FittedModel(reference, config, tensors, plan, fitted, tree, text, module.base_class_name)


def sharpen(reference: Any, size: ToySize, factor: float) -> None:
    """Multiply the query rows of a Bloom by a factor: content logits become that much sharper."""
    head = size.hidden_size // size.heads
    with torch.no_grad():
        for block in reference.transformer.h:
            layer = block.self_attention.query_key_value
            layer.weight.view(size.heads, 3, head, -1)[:, 0] *= factor
            layer.bias.view(size.heads, 3, head)[:, 0] *= factor


def random_tokens(length: int, seed: int = 0) -> torch.Tensor:
    """Token ids [S]."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def context_error(model: FittedModel, emulated: Any, length: int = LENGTH - 10) -> float:
    """Largest difference of the context phase's logits from Hugging Face."""
    tokens = random_tokens(length)
    expected = model.reference(tokens[None]).logits[0]
    found = emulated.prefill([tokens], emulated.new_cache(1, length), all_logits=True).logits[0][:, :VOCAB]
    return float((found.float() - expected).abs().max())


@torch.no_grad()
def tree_error(model: FittedModel, emulated: Any, past: int = 90) -> float:
    """Largest difference of a tree's logits from Hugging Face run on each path."""
    tokens, nodes = random_tokens(past), random_tokens(len(PATHS), seed=1)
    cache = emulated.new_cache(1, past + len(PATHS))
    emulated.prefill([tokens], cache)
    found = emulated.decode(nodes[None], cache, position_offsets=OFFSETS, packed_mask=MASK).logits[0]
    worst = 0.0
    for node, path in enumerate(PATHS):
        expected = model.reference(torch.cat([tokens, nodes[list(path)]])[None]).logits[0, -1]
        worst = max(worst, float((found[node, :VOCAB].float() - expected).abs().max()))
    return worst
