"""The layouts in which Medusa heads are published, as patterns over tensor names.

Sources: FasterDecoding/Medusa medusa/model/medusa_model.py (original, merged); NVIDIA ModelOpt 0.15 to 0.47,
modelopt/torch/speculative/plugins/transformers.py (0.47: hf_medusa.py) and export/mcore_hf_export_map.py, and
tensorrt_llm/models/medusa/weight.py 0.13.0.dev2024090300 (the ModelOpt prefix); vllm-project/vllm
vllm/model_executor/models/medusa.py;
huggingface/text-generation-inference server/text_generation_server/layers/medusa.py (original, no output matrix in its
second version). The original and ModelOpt build a head's residual layers as one block used several times, so that
a file may hold the block once. Names are matched component by component: `1.0.linear.weight` is head 1, layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from porting_kit.errors import HeadsError

_NUMBER = re.compile(r"\{([hl])\}")
_BASE_PARTS = re.compile(r"embed|attn|attention|norm\b|\bwte\b")

MAX_BLOCK_USES = 64
"""More uses of one residual block than this are a slip in a name: each is a layer of the checkpoint; heads have few."""


@dataclass(frozen=True)
class HeadLayout:
    """How one project names the tensors of its heads. `{h}` is the head, `{l}` the residual layer.

    Args:
        name: short name.
        weight, bias: a residual layer's tensors.
        output: the head's own output matrix; with `{l}`, the number is one past the last layer.
        inside_base: the tensors may lie among a base's own; what does not begin as the heads' names do is then the
            base's.
        extras: names that belong to the layout and are not tensors of a head.
    """

    name: str
    weight: str
    bias: str
    output: str
    inside_base: bool = False
    extras: tuple[str, ...] = ()


LAYOUTS = (
    HeadLayout("original", "{h}.{l}.linear.weight", "{h}.{l}.linear.bias", "{h}.{l}.weight"),
    HeadLayout(
        "merged into the base",
        "medusa_head.{h}.{l}.linear.weight",
        "medusa_head.{h}.{l}.linear.bias",
        "medusa_head.{h}.{l}.weight",
        inside_base=True,
    ),
    HeadLayout(
        "ModelOpt",
        "medusa_heads.{h}.{l}.linear.weight",
        "medusa_heads.{h}.{l}.linear.bias",
        "medusa_heads.{h}.{l}.weight",
        inside_base=True,
    ),
    HeadLayout(
        "TensorRT-LLM checkpoint",
        "medusa_heads.{h}.medusa_layers.{l}.linear.weight",
        "medusa_heads.{h}.medusa_layers.{l}.linear.bias",
        "medusa_heads.{h}.lm_head.weight",
        inside_base=True,
    ),
    HeadLayout(
        "vLLM",
        "blocks.{h}.layers.{l}.weight",
        "blocks.{h}.layers.{l}.bias",
        "lm_heads.{h}.weight",
        extras=("token_map", "lm_head.weight"),
    ),
)


@dataclass(frozen=True)
class HeadNames:
    """Names of one head file sorted by what they are: (head, layer) -> name, head -> name."""

    layout: HeadLayout
    weights: dict[tuple[int, int], str]
    biases: dict[tuple[int, int], str]
    outputs: dict[int, str]
    extras: tuple[str, ...]
    others: tuple[str, ...]


def match_layout(names: Collection[str], where: object) -> HeadNames:
    """Find the layout whose patterns account for all names.

    Raises:
        HeadsError: none does (the keys are listed), some names are left over, or a name counts absurdly many uses of a
            residual block.
    """
    best: HeadNames | None = None
    for layout in LAYOUTS:
        sorted_names = _sort_names(layout, names, where)
        if not sorted_names.weights and not sorted_names.outputs:
            continue
        if not sorted_names.others:
            return sorted_names
        if best is None or len(sorted_names.others) < len(best.others):
            best = sorted_names
    known = [f"{layout.name}: {layout.weight}, {layout.output}" for layout in LAYOUTS]
    if best is not None:
        raise HeadsError(
            f"{len(best.others)} tensors of the head file fit no place in its layout ({best.layout.name})",
            expected=f"{best.layout.weight}, {best.layout.bias}, {best.layout.output}",
            where=where,
            items=best.others,
            next_step="remove what is not part of the heads, or name the layout it belongs to",
        )
    embeddings = sorted(name for name in names if "embed" in name or "wte" in name.split("."))
    if embeddings:
        raise HeadsError(
            "this file holds a base model and no Medusa heads",
            expected="; ".join(known),
            found=f"{len(names)} tensors, among them {embeddings[0]}",
            where=where,
            next_step="name the folder of the heads; base and heads may be swapped",
        )
    raise HeadsError(
        "the layout of the heads is not known",
        expected="; ".join(known),
        found=f"{len(names)} tensors",
        where=where,
        items=sorted(names),
        next_step="rename the tensors to the original layout",
    )


def _sort_names(layout: HeadLayout, names: Collection[str], where: object) -> HeadNames:
    weights, biases, outputs = {}, {}, {}
    extras, others, last_layers = [], [], {}
    outside = {name for name in names if name.split(".")[0] != layout.weight.split(".")[0]}
    of_base = outside if layout.inside_base and any(_BASE_PARTS.search(name) for name in outside) else ()
    for name in names:
        if numbers := _match(layout.weight, name):
            weights[numbers["h"], numbers["l"]] = name
        elif numbers := _match(layout.bias, name):
            biases[numbers["h"], numbers["l"]] = name
        elif numbers := _match(layout.output, name):
            last_layers.setdefault(numbers["h"], []).append((numbers.get("l"), name))
        elif name in layout.extras:
            extras.append(name)
        elif name not in of_base:
            others.append(name)
    depth = max((layer for _, layer in weights), default=0) + 1
    for head, candidates in last_layers.items():
        layers = sorted(layer for h, layer in weights if h == head)
        for number, name in candidates:
            # One block used several times is stored once: the output's number still counts its uses.
            is_shared = depth == 1 and layers == [0] and number is not None and number > 1
            if is_shared and number > MAX_BLOCK_USES:
                raise HeadsError(
                    f"the name {name} says that head {head + 1} uses its one residual block {number} times",
                    expected=f"at most {MAX_BLOCK_USES} times; the number is one past the last residual layer",
                    found=number,
                    where=where,
                    next_step="correct the number in the name: 1 where the block is used once",
                )
            if head not in outputs and (
                number is None or is_shared or number in ((layers[-1] + 1, depth) if layers else (number,))
            ):
                outputs[head] = name
                for layer in range(1, number or 1) if is_shared else ():
                    weights[head, layer] = weights[head, 0]
                    others += [biases[head, layer]] if (head, layer) in biases else []
                    biases |= {(head, layer): biases[head, 0]} if (head, 0) in biases else {}
            else:
                others.append(name)
    return HeadNames(layout, weights, biases, outputs, tuple(extras), tuple(others))


def _match(pattern: str, name: str) -> dict[str, int] | None:
    parts, wanted = name.split("."), pattern.split(".")
    if len(parts) != len(wanted):
        return None
    numbers: dict[str, int] = {}
    for part, want in zip(parts, wanted, strict=True):
        if placeholder := _NUMBER.fullmatch(want):
            if not part.isdecimal() or str(int(part)) != part:  # "00" would take the place of "0"
                return None
            numbers[placeholder.group(1)] = int(part)
        elif part != want:
            return None
    return numbers
