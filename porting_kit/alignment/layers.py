"""Layer by layer: the port's sub-modules against the base's, and the first one that parts from it.

Which modules belong together follows from the conversion plan: a port's matrix that was made of some of the base's
matrices puts out what those put out, joined and reordered the same way. So a new family needs no table of its own here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from porting_kit.alignment.noise import SAFETY
from porting_kit.alignment.reference import Reference
from porting_kit.alignment.result import LayerError, LayerReport
from porting_kit.alignment.rounding import computing_as
from porting_kit.architectures import operations as ops
from porting_kit.conversion.apply import apply_operations
from porting_kit.medusa.named_trees import chain_choices
from porting_kit.medusa.tree import MedusaTree

SUFFIX = ".weight"
MAX_CHAIN = 32
NOISE_FLOOR = 1e-9
# What a weight operation does to the module's output: rows of the weight are entries of the output.
_ON_ROWS = (ops.Concatenate, ops.Ungroup, ops.ReorderBlocks, ops.Take, ops.PadRows, ops.Scale)
_NO_EFFECT = (ops.Transpose, ops.Add)  # Conv1D's storage; a norm's weight kept as an offset from one

_MEANINGS = (
    ("vocab_embedding", "the token embedding, or a factor on it"),
    ("position_embedding", "the learned positions"),
    ("ln_embed", "the norm after the embedding"),
    ("layernorm", "this norm's weights or its epsilon"),
    ("attention.qkv", "the fused query, key and value projection: order of its rows, or its bias"),
    (
        "attention.dense",
        "the attention between the projections (rotary base and kind, ALiBi, scaling, mask, cache), or the output "
        "projection",
    ),
    ("mlp.fc", "the first MLP matrix: gate and up swapped, or its bias"),
    ("mlp.gate", "the second MLP input matrix: gate and up swapped, or its bias"),
    ("mlp.proj", "the MLP's activation, or its last matrix"),
    ("ln_f", "the last norm"),
    ("lm_head", "the output matrix"),
)


class PlannedTarget(Protocol):
    """`conversion.plan.PlannedTensor`, as far as it matters here."""

    target: str
    sources: tuple[str, ...]
    operations: tuple[Any, ...]
    group: int
    origin: str


class RecordableModel(Protocol):
    """`emulator.EmulatedModel`, as far as it matters here."""

    def new_cache(self, batch_size: int, capacity_tokens: int) -> Any:
        """An empty cache."""

    def prefill(self, prompts: Sequence[torch.Tensor], cache: Any, *, all_logits: bool = False) -> Any:
        """Context phase."""

    def decode(self, tokens: torch.Tensor, cache: Any, **tree: Any) -> Any:
        """Generation phase."""

    def record(self, names: str = "*") -> contextlib.AbstractContextManager[dict[str, list[torch.Tensor]]]:
        """Outputs of sub-modules by name."""


@dataclass(frozen=True)
class ModulePair:
    """A module of the port and the modules of the base that its output is made of.

    Args:
        module: dotted name in the port.
        sources: dotted names in the base.
        operations: what turns the bases' outputs, rows first, into the port's.
        group: see `PlannedTensor.group`.
    """

    module: str
    sources: tuple[str, ...]
    operations: tuple[Any, ...]
    group: int


def pair_modules(tensors: Sequence[PlannedTarget], reference: Reference) -> list[ModulePair]:
    """Pairs for every weight of a conversion plan whose modules can be compared; experts and positions cannot."""
    known = {name for name, _ in reference.model.named_modules()}
    pairs = []
    for planned in tensors:
        sources = tuple(_find_module(name, known) for name in planned.sources)
        kept = tuple(operation for operation in planned.operations if not isinstance(operation, _NO_EFFECT))
        comparable = all(isinstance(operation, _ON_ROWS) for operation in kept) and planned.origin == "base"
        if planned.target.endswith(SUFFIX) and sources and all(sources) and comparable:
            pairs.append(ModulePair(planned.target.removesuffix(SUFFIX), sources, kept, planned.group))
    return pairs


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
    return LayerReport(tuple(errors), bound, first, _describe(first, bound, len(errors)))


def _record_reference(
    reference: Reference, pairs: Sequence[ModulePair], text: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Outputs [S, ...] by module name, in the order of the forward pass."""
    wanted = {source for pair in pairs for source in pair.sources}
    seen: dict[str, torch.Tensor] = {}
    with _hooks(reference.model, wanted, seen):
        reference.logits([text])
    return seen


@contextlib.contextmanager
def _hooks(model: Any, wanted: set[str], seen: dict[str, torch.Tensor]) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if name in wanted:

            def hook(module: Any, inputs: Any, output: Any, name: str = name) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                seen[name] = tensor.detach().reshape(-1, tensor.shape[-1]).double()

            handles.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record_port(model: RecordableModel, prompt: list[int], chain: list[int]) -> dict[str, dict[str, torch.Tensor]]:
    """Phase -> module -> output [T, ...]: the prompt's tokens, then the chain's in one generation step."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    with torch.inference_mode():
        cache = model.new_cache(1, len(prompt) + len(chain) + 1)
        with model.record() as records:
            model.prefill([torch.tensor(prompt)], cache, all_logits=True)
        found["context"] = _first_calls(records)
        if chain:
            tree = MedusaTree.from_choices(chain_choices(len(chain) - 1)) if len(chain) > 1 else None
            inputs = (
                {} if tree is None else {"position_offsets": tree.position_offsets, "packed_mask": tree.packed_mask}
            )
            with model.record() as records:
                model.decode(torch.tensor([chain]), cache, **inputs)
            found["generation"] = _first_calls(records)
    return found


def _first_calls(records: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: calls[0].reshape(-1, calls[0].shape[-1]).double() for name, calls in records.items() if calls}


def _in_forward_order(pairs: Sequence[ModulePair], theirs: dict[str, torch.Tensor]) -> list[ModulePair]:
    order = {name: index for index, name in enumerate(theirs)}
    known = [pair for pair in pairs if all(source in order for source in pair.sources)]
    return sorted(known, key=lambda pair: max(order[source] for source in pair.sources))


def _expected_output(
    pair: ModulePair, theirs: dict[str, torch.Tensor], span: slice, dims: Any, scalars: Any
) -> torch.Tensor:
    outputs = [theirs[source][span].T for source in pair.sources]
    return apply_operations(pair.operations, outputs, pair.group, dims, scalars).T.double()


def _layer_error(pair: ModulePair, phase: str, found: torch.Tensor, wanted: torch.Tensor) -> LayerError:
    cosine = torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0).item()
    return LayerError(pair.module, " + ".join(pair.sources), phase, _relative(found, wanted), cosine)


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of the base's output; infinite for a broken output."""
    error = ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def _describe(first: LayerError | None, bound: float, count: int) -> str:
    if first is None:
        return f"All {count} compared module outputs agree with the base within the noise of {bound:.1e}."
    kind = next((meaning for name, meaning in _MEANINGS if name in first.module), "this module")
    return (
        f"In the {first.phase} phase the port first parts from the base at {first.module} (relative error "
        f"{first.relative_error:.1e}, cosine {first.cosine:.4f}, noise {bound:.1e}): {kind}."
    )


def _find_module(tensor_name: str, known: set[str]) -> str | None:
    """The base's module that owns a tensor; the file may spell the name without the wrapper's prefix, or with one."""
    if not tensor_name.endswith(SUFFIX):
        return None
    name = tensor_name.removesuffix(SUFFIX)
    if name in known:
        return name
    longer = [candidate for candidate in known if candidate.endswith(f".{name}") or name.endswith(f".{candidate}")]
    return longer[0] if len(longer) == 1 else None
