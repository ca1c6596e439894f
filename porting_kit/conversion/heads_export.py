"""Write heads in the layout that another project reads: the inverse of `heads`.

Every layout goes back through `read_head_set` to the same values, which a test checks for each. Heads that share the
base's output matrix stay without one where the layout can say so; otherwise the base's matrix has to be given.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.conversion.head_layouts import LAYOUTS, HeadLayout
from porting_kit.conversion.heads import HeadSet
from porting_kit.errors import HeadsError, suggest_nearest
from porting_kit.whole_files import write_json, write_pickle, write_tensors

if TYPE_CHECKING:
    import torch

HEADS_FILE = "medusa_lm_head"

EXPORT_LAYOUTS = {
    "original": "original",
    "merged": "merged into the base",
    "modelopt": "ModelOpt",
    "tensorrt_llm": "TensorRT-LLM checkpoint",
    "vllm": "vLLM",
    "tgi": "original",
}
"""Name on the command line -> layout. text-generation-inference reads the original names."""

OWN_MATRIX = ("tensorrt_llm",)
"""Layouts in which a head cannot be without an output matrix."""


def find_export_layout(name: str) -> HeadLayout:
    """The layout of a name on the command line.

    Raises:
        HeadsError: no such layout.
    """
    if name not in EXPORT_LAYOUTS:
        near = suggest_nearest(name, EXPORT_LAYOUTS)
        raise HeadsError(
            f"no layout has the name {name!r}",
            expected=", ".join(EXPORT_LAYOUTS),
            found=repr(name),
            next_step=f"did you mean {near!r}?" if near else "name one of them",
        )
    return next(layout for layout in LAYOUTS if layout.name == EXPORT_LAYOUTS[name])


def export_tensors(
    heads: HeadSet, layout_name: str, base_matrix: Callable[[], torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Heads as tensors and config of a layout.

    Args:
        heads: the heads in use are exported.
        layout_name: a key of EXPORT_LAYOUTS.
        base_matrix: reads the base's output matrix [V, E], for heads without their own; called only when needed.

    Returns:
        name -> tensor in the heads' dtype, and what belongs into config.json beside them.

    Raises:
        HeadsError: an unknown layout, or a matrix that is needed and not given.
    """
    layout = find_export_layout(layout_name)
    needs_matrix = not heads.own_output and layout_name in (*OWN_MATRIX, "vllm")
    if needs_matrix and base_matrix is None:
        raise HeadsError(
            f"the layout {layout_name} holds output matrices, and these heads share the base's",
            expected="the base, to copy its output matrix from",
            found="no base to read",
            where=heads.where,
            next_step="export through a port file whose base has its weights",
        )
    tensors: dict[str, torch.Tensor] = {}
    dtype = heads.read(next(iter(heads.origins))).dtype
    for head in range(heads.num_heads):
        place = {"{h}": str(head)}
        for layer in range(heads.num_layers):
            prefix = f"medusa_heads.{head}.medusa_layers.{layer}.linear"
            where = {**place, "{l}": str(layer)}
            tensors[_fill(layout.weight, where)] = heads.read(f"{prefix}.weight")
            tensors[_fill(layout.bias, where)] = heads.read(f"{prefix}.bias")
        output = _fill(layout.output, {**place, "{l}": str(heads.num_layers)})
        if heads.own_output:
            tensors[output] = heads.read(f"medusa_heads.{head}.lm_head.weight")
        elif needs_matrix and layout_name in OWN_MATRIX:
            tensors[output] = base_matrix().to(dtype).clone()
    shared = None
    if needs_matrix and layout_name == "vllm":
        shared = tensors["lm_heads.0.weight"] = base_matrix().to(dtype)
    vocab_size = heads.vocab_size or (None if shared is None else len(shared))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, _config(heads, layout_name, vocab_size)


def _fill(pattern: str, numbers: dict[str, str]) -> str:
    for placeholder, number in numbers.items():
        pattern = pattern.replace(placeholder, number)
    return pattern


def _config(heads: HeadSet, layout_name: str, vocab_size: int | None) -> dict[str, Any]:
    """config.json of a layout; what it means is stated where the layout's own reader looks."""
    base_name = heads.stated.get("base_model_name_or_path")
    named = {} if base_name is None else {"base_model_name_or_path": base_name}
    if layout_name == "vllm":
        # vllm/transformers_utils/configs/medusa.py; without medusa_fc_bias the biases are dropped in silence.
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": heads.num_heads,
            "num_hidden_layers": heads.num_layers,
            "hidden_size": heads.hidden_size,
            "vocab_size": vocab_size,
            "truncated_vocab_size": vocab_size,
            "original_lm_head": not heads.own_output,
            "medusa_fc_bias": True,
            **named,
        }
    if layout_name == "modelopt":
        return {"medusa": {"num_medusa_heads": heads.num_heads, "num_medusa_layers": heads.num_layers}, **named}
    if layout_name == "tensorrt_llm":
        return {"num_medusa_heads": heads.num_heads, "num_medusa_layers": heads.num_layers, **named}
    return {
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "version": "1" if heads.own_output else "2",
        **named,
    }


def write_export(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], *, as_pickle: bool) -> Path:
    """Write the head file and its config.json into a folder that is not there yet.

    Returns:
        the head file.
    """
    file = folder / f"{HEADS_FILE}.{'pt' if as_pickle else 'safetensors'}"
    if as_pickle:
        write_pickle(file, tensors)
    else:
        write_tensors(file, tensors, {"format": "pt"})
    write_json(folder / "config.json", config)
    return file
