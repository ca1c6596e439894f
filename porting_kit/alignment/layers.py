"""Layer by layer: the port's sub-modules against the base's, and the first one that parts from it.

`layer_parts` says which parts belong together. One pass of each side records them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from porting_kit.alignment.layer_parts import INPUT, KEYS, OUTPUT, ModulePair, explain_part, recorded_name
from porting_kit.alignment.noise import SAFETY
from porting_kit.alignment.reference import Reference, cached_keys
from porting_kit.alignment.result import LayerError, LayerReport
from porting_kit.alignment.rounding import computing_as
from porting_kit.conversion.apply import apply_operations
from porting_kit.medusa.named_trees import chain_choices
from porting_kit.medusa.tree import MedusaTree

MAX_CHAIN = 32
NOISE_FLOOR = 1e-9
_DENSE = ".attention.dense"


class RecordableModel(Protocol):
    """`emulator.EmulatedModel`, as far as it matters here."""

    def new_cache(self, batch_size: int, capacity_tokens: int) -> Any:
        """An empty cache."""

    def prefill(self, prompts: Sequence[torch.Tensor], cache: Any, *, all_logits: bool = False) -> Any:
        """Context phase."""

    def decode(self, tokens: torch.Tensor, cache: Any, **tree: Any) -> Any:
        """Generation phase."""

    def record(
        self, names: str = "*", *, inputs: bool = False
    ) -> contextlib.AbstractContextManager[dict[str, list[torch.Tensor]]]:
        """Outputs, or first inputs, of sub-modules by name."""


def compare_layers(
    model: RecordableModel,
    reference: Reference,
    pairs: Sequence[ModulePair],
    prompt: Sequence[int],
    emitted: Sequence[int],
    *,
    dims: Any,
    scalars: Any = None,
    noise_dtype: torch.dtype | None = None,
) -> LayerReport:
    """Run one text through both and compare every paired module, context phase and generation phase.

    Args:
        model: the port.
        reference: the base.
        pairs: from `pair_modules`.
        prompt: token ids of the context phase.
        emitted: tokens verified in one generation step as a chain; at most 32 are used, none leaves that phase out.
        dims: letters -> sizes, from the plan.
        scalars: names that `Scale` may ask for.
        noise_dtype: dtype of the port; its noise on each module is measured on the base and bounds the errors.
    """
    chain = list(emitted)[:MAX_CHAIN]
    text = [*prompt, *chain]
    theirs = _record_reference(reference, pairs, text)
    other = noise_dtype if noise_dtype not in (None, reference.dtype) else torch.float64
    with computing_as(reference, other):
        noisy = _record_reference(reference, pairs, text)
    noise = max((_relative(noisy[name], theirs[name]) for name in theirs), default=0.0)
    ours = _record_port(model, list(prompt), chain)
    spans = {"context": slice(0, len(prompt)), "generation": slice(len(prompt), len(text))}
    errors = []
    for phase, records in ours.items():
        for pair in _in_forward_order(pairs, theirs):
            wanted = _expected_output(pair, theirs, spans[phase], dims, scalars or {})
            found = records.get(pair.module)
            if found is not None and found.shape == wanted.shape:
                errors.append(_layer_error(pair, phase, found, wanted))
    bound = max(SAFETY * noise, NOISE_FLOOR)
    first = next((error for error in errors if not error.relative_error <= bound), None)
    return LayerReport(tuple(errors), bound, first, _describe(first, bound, errors))


def _record_reference(
    reference: Reference, pairs: Sequence[ModulePair], text: Sequence[int]
) -> dict[str, torch.Tensor]:
    """What the pairs' sources read, put out or cached, [S, ...] by recorded name, in the order of the forward pass."""
    wanted = {(source, pair.view) for pair in pairs for source in pair.sources}
    order: dict[str, torch.Tensor | None] = {}
    modules = dict(reference.model.named_modules())
    with _hooks(modules, wanted, order):
        output = reference.run(text, use_cache=any(view == KEYS for _, view in wanted))
    by_layer = cached_keys(output)
    for name in [name for name, tensor in order.items() if tensor is None]:
        order[name] = by_layer.get(modules[name.rpartition(":")[0]].layer_idx)
    return {name: tensor for name, tensor in order.items() if tensor is not None}


@contextlib.contextmanager
def _hooks(
    modules: dict[str, Any], wanted: set[tuple[str, str]], seen: dict[str, torch.Tensor | None]
) -> Iterator[None]:
    """Fill `seen` while a forward pass runs; keys, which are read after it, take their place before the attention's
    output."""
    handles = []
    for name, view in wanted:
        key = recorded_name(name, view)
        if view == OUTPUT:
            hook = _output_hook(seen, key)
            handles.append(modules[name].register_forward_hook(hook))
        elif view == INPUT:
            attention = name.rpartition(".")[0]
            keys = recorded_name(attention, KEYS) if (attention, KEYS) in wanted else None
            handles.append(modules[name].register_forward_pre_hook(_input_hook(seen, key, keys)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _output_hook(seen: dict[str, torch.Tensor | None], key: str) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and inputs:
            # The rows of the table: a subclass may scale them, which the port does elsewhere or in the weights.
            output = torch.nn.functional.embedding(inputs[0], module.weight)
        seen[key] = _rows(output[0] if isinstance(output, tuple) else output)

    return hook


def _input_hook(seen: dict[str, torch.Tensor | None], key: str, before: str | None) -> Any:
    def hook(module: Any, inputs: tuple[Any, ...]) -> None:
        if before is not None:
            seen.setdefault(before)
        if inputs:
            seen[key] = _rows(inputs[0])

    return hook


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., N] -> float64 [T, N]."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).double()


def _record_port(model: RecordableModel, prompt: list[int], chain: list[int]) -> dict[str, dict[str, torch.Tensor]]:
    """Phase -> part -> tensor [T, ...]: the prompt's tokens, then the chain's in one generation step."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    with torch.inference_mode():
        cache = model.new_cache(1, len(prompt) + len(chain) + 1)
        with model.record() as outputs, model.record("*" + _DENSE, inputs=True) as inputs:
            model.prefill([torch.tensor(prompt)], cache, all_logits=True)
        found["context"] = _collect(outputs, inputs, cache, slice(0, len(prompt)))
        if chain:
            tree = MedusaTree.from_choices(chain_choices(len(chain) - 1)) if len(chain) > 1 else None
            arguments = (
                {} if tree is None else {"position_offsets": tree.position_offsets, "packed_mask": tree.packed_mask}
            )
            with model.record() as outputs, model.record("*" + _DENSE, inputs=True) as inputs:
                model.decode(torch.tensor([chain]), cache, **arguments)
            span = slice(len(prompt), len(prompt) + len(chain))
            found["generation"] = _collect(outputs, inputs, cache, span)
    return found


def _collect(
    outputs: dict[str, list[torch.Tensor]], inputs: dict[str, list[torch.Tensor]], cache: Any, span: slice
) -> dict[str, torch.Tensor]:
    """First calls by the names that `layer_parts` gives: outputs, residual sums, attention outputs, rotated keys."""
    found = {name: _rows(calls[0]) for name, calls in outputs.items() if calls}
    layers = [name for name in found if name.rpartition(".layers.")[2].isdigit()]
    for name in layers:
        found[f"{name}.residual"] = found[name]
        if calls := inputs.get(name + _DENSE):
            found[f"{name}.attention.context"] = _rows(calls[0])
    if cache.layer_indices == [int(name.rpartition(".")[2]) for name in layers]:
        for name, tensor in zip(layers, cache.layers, strict=True):
            if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                found[f"{name}.attention.keys"] = tensor[0, 0, :, span].transpose(0, 1).flatten(1).double()
    return found


def _in_forward_order(pairs: Sequence[ModulePair], theirs: dict[str, torch.Tensor]) -> list[ModulePair]:
    order = {name: index for index, name in enumerate(theirs)}
    known = [pair for pair in pairs if all(key in order for key in pair.keys)]
    return sorted(known, key=lambda pair: max(order[key] for key in pair.keys))


def _expected_output(
    pair: ModulePair, theirs: dict[str, torch.Tensor], span: slice, dims: Any, scalars: Any
) -> torch.Tensor:
    outputs = [theirs[key][span].T for key in pair.keys]
    return apply_operations(pair.operations, outputs, pair.group, dims, scalars).T.double()


def _layer_error(pair: ModulePair, phase: str, found: torch.Tensor, wanted: torch.Tensor) -> LayerError:
    cosine = torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0).item()
    return LayerError(pair.module, " + ".join(pair.keys), phase, _relative(found, wanted), cosine)


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of the base's output; infinite for a broken output."""
    error = ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def _describe(first: LayerError | None, bound: float, errors: Sequence[LayerError]) -> str:
    if first is None:
        return f"All {len(errors)} compared module outputs agree with the base within the noise of {bound:.1e}."
    compared = {(error.module, error.phase) for error in errors}
    context = first.module.removesuffix(_DENSE) + ".attention.context"
    meaning = explain_part(first.module, attention_compared=(context, first.phase) in compared)
    return (
        f"In the {first.phase} phase the port first parts from the base at {first.module} (relative error "
        f"{first.relative_error:.1e}, cosine {first.cosine:.4f}, noise {bound:.1e}): {meaning}."
    )
