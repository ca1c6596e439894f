"""A base model whose layers are read from disk when they run and let go afterwards: for bases larger than the memory.

Everything outside the stack of layers (embeddings, last norm, output matrix) stays loaded; of the layers one is, at a
time. Every pass reads the whole file, so that this is for few passes over many rows. Works where a layer's parameters
have the names that the file has; a model whose loader joins or splits tensors is refused by name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from porting_kit.alignment.reference import (
    Reference,
    choose_attention,
    read_base_config,
    read_reference_settings,
    resolve_dtype,
)
from porting_kit.conversion.tensor_source import open_tensor_source
from porting_kit.errors import BaseModelError

if TYPE_CHECKING:
    from porting_kit.conversion.tensor_source import TensorSource

SHARE_OF_MEMORY = 0.6
"""Of the memory that is free, what whole weights may take; the rest is for states and logits."""

_RENAMED = {"lm_head.weight": "embed_out.weight"}  # GPT-NeoX, renamed by transformers 5


def needs_streaming(path: str | Path, dtype: str | torch.dtype, device: str | torch.device) -> bool:
    """Whether the base's weights in this type take more than their share of the memory that is free on the device."""
    source = open_tensor_source(path)
    elements = sum(math.prod(source.shape(name)) for name in source.names())
    free = find_free_bytes(device)
    return free is not None and elements * resolve_dtype(dtype).itemsize > SHARE_OF_MEMORY * free


def find_free_bytes(device: str | torch.device) -> int | None:
    """Free memory of a GPU, or of the machine; None where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return None


def open_streamed_reference(
    path: str | Path, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu"
) -> Reference:
    """A base that computes what `load_reference`'s does, with one layer in memory at a time.

    Args:
        path: a model folder, or a GGUF file.
        dtype: what to compute in.
        device: where.

    Raises:
        BaseModelError: transformers cannot build it, or its parameters are not the file's tensors.
    """
    from transformers import GenerationConfig

    path = Path(path).expanduser()
    settings, tokenizer = read_reference_settings(path)
    config, model_class = read_base_config(path)
    attention, reason = choose_attention(config.model_type)
    computed = resolve_dtype(dtype)
    with _without_weights(computed):
        build = getattr(model_class, "from_config", None) or model_class._from_config  # the auto class has the first
        model = build(config, attn_implementation=attention)
    source = open_tensor_source(path)
    layers = _find_layers(model, path)
    names = _match_names(model, source)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    _load(model, outside, names, source, computed, device)
    model.tie_weights()
    with contextlib.suppress(OSError, ValueError):
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._buffers[own] = buffer.to(device)
    for prefix, layer in zip(_layer_names(model, layers), layers, strict=True):
        _stream(model, layer, prefix, names, source, computed, device)
    return Reference(model.eval(), settings, tokenizer, f"{attention}: {reason}; layers streamed", str(path))


@contextlib.contextmanager
def _without_weights(dtype: torch.dtype) -> Iterator[None]:
    """Modules made inside have parameters without memory; buffers, which no file holds, are real."""
    register, default = nn.Module.register_parameter, torch.get_default_dtype()

    def register_without(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta", dtype), requires_grad=False)

    nn.Module.register_parameter = register_without
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        nn.Module.register_parameter = register
        torch.set_default_dtype(default)


def _find_layers(model: nn.Module, where: Path) -> list[nn.Module]:
    """The stack of layers: the module list that holds most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    if not lists:
        raise BaseModelError(
            "the base has no stack of layers to stream",
            expected="a model whose decoder layers are one list",
            found=type(model).__name__,
            where=where,
            next_step="load the base as a whole: --no-stream",
        )
    return list(max(lists, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters())))


def _layer_names(model: nn.Module, layers: list[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in layers]


def _match_names(model: nn.Module, source: TensorSource) -> dict[str, str]:
    """Parameter -> tensor of the file; the base's prefix may be there or not. Tied parameters need no tensor."""
    prefix = f"{model.base_model_prefix}."
    tied = set(_tied_names(model))
    found, missing = {}, []
    for name, parameter in model.named_parameters():
        candidates = (name, name.removeprefix(prefix), f"{prefix}{name}", _RENAMED.get(name, name))
        chosen = next((candidate for candidate in candidates if candidate in source), None)
        if chosen is not None and source.shape(chosen) == tuple(parameter.shape):
            found[name] = chosen
        elif name not in tied:
            missing.append(name)
    if missing:
        raise BaseModelError(
            "the base's layers cannot be streamed: its loader changes tensors on the way in",
            expected="every parameter as a tensor of the file, under its own name and shape",
            found=f"{len(missing)} parameters that are not",
            where=source.where,
            items=missing,
            next_step="load it whole, on a machine with more memory (--no-stream)",
        )
    return found


def _tied_names(model: nn.Module) -> list[str]:
    keys = getattr(model, "_tied_weights_keys", None) or []
    return list(keys) if getattr(model.config.get_text_config(), "tie_word_embeddings", False) else []


def _load(
    model: nn.Module, wanted: list[str], names: dict[str, str], source: TensorSource, dtype: torch.dtype, device: Any
) -> None:
    """Give parameters their values."""
    for name in wanted:
        if name in names:
            owner, _, own = name.rpartition(".")
            value = source.read(names[name]).to(device, dtype)
            model.get_submodule(owner)._parameters[own] = nn.Parameter(value, requires_grad=False)


def _stream(
    model: nn.Module,
    layer: nn.Module,
    prefix: str,
    names: dict[str, str],
    source: TensorSource,
    dtype: torch.dtype,
    device: Any,
) -> None:
    """Read a layer before it runs, let it go afterwards."""
    own = [f"{prefix}.{name}" for name, _ in layer.named_parameters()]

    def read(*given: Any) -> None:
        _load(model, own, names, source, dtype, device)

    def free(*given: Any) -> None:
        for name in own:
            owner, _, last = name.rpartition(".")
            holder = model.get_submodule(owner)._parameters
            holder[last] = nn.Parameter(holder[last].detach().to("meta"), requires_grad=False)

    layer.register_forward_pre_hook(read)
    layer.register_forward_hook(free, always_call=True)
