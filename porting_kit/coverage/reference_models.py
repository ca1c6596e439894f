"""Small random Hugging Face models of every family and variant: what a tree's classes are compared with.

Sizes are as small as they can be while heads, groups and blocks stay different from each other. Weights are large
enough that every layer matters, every bias and norm weight is off its start, and logits are of order one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from porting_kit.architectures.family import load_families
from porting_kit.errors import EnvironmentMissing


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a random model: E, L, H, K, MLP width, V, trained positions, and experts that a token is sent to."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    inner: int = 128
    vocab: int = 161
    positions: int = 128
    experts_chosen: int = 2


Tensors = dict[str, Any]
Rename = Callable[[Tensors, dict[str, Any], ModelSize], tuple[Tensors, dict[str, Any]]]


@dataclass(frozen=True)
class Defect:
    """A fault of some releases that a port cannot mend and that the reference can be given.

    Args:
        what: the fault, for the row.
        until: the first release without it.
        give: makes the reference compute the same.
    """

    what: str
    until: str
    give: Callable[[Any], None]


@dataclass(frozen=True, eq=False)
class ReferenceCase:
    """One model.

    Args:
        name: the variant, as the row shows it.
        family: name of the family under `architectures/` that it must be recognised as.
        make_config: sizes -> transformers config.
        attention: transformers' attention implementation; eager adds ALiBi twice in Falcon.
        make_model: config -> model, where the relative needs more than its config says; None is transformers' own.
        prepare: changes the random weights before they are saved.
        rename: the saved tensors and config under the family's own names; None: they are saved as they are.
        relative: what the reference really is, when it is a re-expressed relative.
        edit_config: changes to the saved config.json that the model itself does not see.
        hugging_face_class: name in `architectures` of config.json; None: the first that the family lists.
        defect: a fault of some releases.
        size: sizes that differ from the usual.
        learned_positions: positions come from a table.
    """

    name: str
    family: str
    make_config: Callable[[ModelSize], Any]
    attention: str = "eager"
    make_model: Callable[[Any], Any] | None = None
    prepare: Callable[[Any], None] | None = None
    rename: Rename | None = None
    relative: str | None = None
    edit_config: Mapping[str, Any] = field(default_factory=dict)
    hugging_face_class: str | None = None
    defect: Defect | None = None
    size: ModelSize = field(default_factory=ModelSize)
    learned_positions: bool = False

    @property
    def class_in_config(self) -> str:
        """The Hugging Face class that the saved config names."""
        return self.hugging_face_class or next(iter(load_families()[self.family].architectures))

    @property
    def text(self) -> str:
        """The name, and what stands for a family that transformers does not have."""
        return self.name if self.relative is None else f"{self.name} ({self.relative})"


def make_config(name: str, **settings: Any) -> Any:
    """A transformers config by the name of its class without `Config`.

    Raises:
        EnvironmentMissing: this transformers does not have it.
    """
    import transformers

    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        raise EnvironmentMissing(
            f"transformers {transformers.__version__} has no {name}",
            expected=f"{name}Config",
            found="none",
            next_step="install a newer transformers",
        )
    return config_class(**settings)


def rope_settings(
    theta: float = 50000.0, kind: str = "default", partial_rotary_factor: float | None = None, **more: Any
) -> dict[str, Any]:
    """Rotary settings in the spelling of the installed transformers: one dict from 5 on, several keys before."""
    import transformers

    share = {} if partial_rotary_factor is None else {"partial_rotary_factor": partial_rotary_factor}
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **share, **more}}
    scaling = {} if kind == "default" else {"rope_scaling": {"rope_type": kind, **more}}
    return {"rope_theta": theta, **share, **scaling}


def make_reference(case: ReferenceCase, size: ModelSize | None = None, seed: int = 1) -> Any:
    """The case's model in float32 with random weights, in evaluation mode."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = case.make_config(size or case.size)
    if case.make_model is not None:
        model = case.make_model(config)  # a plain decoder is random already
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=case.attention)
    model = model.float().eval().requires_grad_(False)
    if isinstance(model, transformers.PreTrainedModel):
        randomise_weights(model, seed)
    if case.prepare is not None:
        case.prepare(model)
    return model


def randomise_weights(model: Any, seed: int = 1) -> None:
    """Draw every weight anew: matrices keep the scale of their input, norms and biases leave their start values."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1 and name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif weight.dim() == 1 or "norm" in name:
                weight.add_(0.2 * noise)
            else:
                is_table = any(part in name for part in ("embed", "wte", "wpe", "tok_"))
                weight.copy_(noise * (1.0 if is_table else weight.shape[-1] ** -0.5))


def save_reference(case: ReferenceCase, model: Any, folder: Path, *, hugging_face_class: str | None = None) -> Path:
    """Write the model as its users have it: the family's own tensor names and config.json.

    Args:
        case: the case the model was made from.
        model: the model.
        folder: where to.
        hugging_face_class: write this name into `architectures`.
    """
    import json

    from safetensors.torch import load_file, save_file
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    config_file, weights_file = folder / "config.json", folder / "model.safetensors"
    raw = json.loads(config_file.read_text(encoding="utf-8"))
    if case.rename is not None:
        tensors, raw = case.rename(load_file(weights_file), raw, case.size)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights_file)
    raw |= dict(case.edit_config)
    if hugging_face_class is not None:
        raw["architectures"] = [hugging_face_class]
    config_file.write_text(json.dumps(raw), encoding="utf-8")
    return folder
