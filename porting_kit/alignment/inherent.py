"""Differences between TensorRT-LLM and Hugging Face that no port can remove, kept apart from faults.

Where it can be done the reference is made to compute what the library computes, and the port is judged against that;
how far the two references lie apart is reported. What cannot be matched is listed as such. A family's table speaks of
the library's own definitions; a source tree may compute some of it as Hugging Face does, which its logits tell.
Source of the table of differences: `architectures.family.Difference`, one entry per family with its upstream file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import nn

from porting_kit.alignment.noise import measure_error
from porting_kit.alignment.reference import Reference

TANH_GELU = "gelu_pytorch_tanh"
_NORM_EPS_NAMES = ("eps", "variance_epsilon")
_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


class KnownDifference(Protocol):
    """`architectures.family.Difference`, as far as it matters here."""

    name: str
    effect: str
    source: str
    reference: Any


@dataclass(frozen=True)
class InherentDifference:
    """One difference on this model.

    Args:
        name, effect, source: from the family's table.
        matched: the reference was made to compute what the library computes.
        logit_error: how far that moved the logits, over the largest; None when not matched.
        applies: the port shows this difference; assumed where its logits are not known.
    """

    name: str
    effect: str
    source: str
    matched: bool
    logit_error: float | None = None
    applies: bool = True


@contextlib.contextmanager
def matched_to_library(reference: Reference, differences: Sequence[KnownDifference]) -> Iterator[None]:
    """While open, the reference computes what the library computes, for every difference that can be matched."""
    restore = [undo for difference in differences for undo in _match(reference.model, difference)]
    try:
        yield
    finally:
        for undo in reversed(restore):
            undo()


def choose_differences(
    reference: Reference,
    differences: Sequence[KnownDifference],
    texts: Sequence[Sequence[int]],
    port_logits: Sequence[torch.Tensor],
) -> list[KnownDifference]:
    """Those differences that a port's own logits show: the set under which the reference comes nearest to it.

    Only documented differences are candidates, so no fault can be explained away by this.

    Args:
        reference: the base.
        differences: the family's.
        texts: token ids.
        port_logits: [S, V] per text, the port's context phase.
    """
    matchable = [difference for difference in differences if _can_match(reference, difference)]
    ours = torch.cat([logits.double().cpu() for logits in port_logits])
    errors = {}
    for size in range(len(matchable) + 1):
        for chosen in combinations(range(len(matchable)), size):
            with matched_to_library(reference, [matchable[index] for index in chosen]):
                theirs = torch.cat([logits.double().cpu() for logits in reference.logits(texts)])
            errors[chosen] = (ours - theirs).norm().item()
    nearest = min(errors, key=errors.__getitem__)
    return [matchable[index] for index in nearest]


def measure_inherent(
    reference: Reference,
    differences: Sequence[KnownDifference],
    texts: Sequence[Sequence[int]],
    applying: Sequence[KnownDifference] | None = None,
) -> list[InherentDifference]:
    """How far each difference moves the base's own logits on these texts; those that this base does not have are left
    out.

    Args:
        applying: those that the port shows; None takes all for shown.
    """
    plain = reference.logits(texts) if differences else []
    found = []
    for difference in differences:
        if _is_same(reference.model, difference):
            continue
        matched = _can_match(reference, difference)
        error = None
        if matched:
            with matched_to_library(reference, [difference]):
                error = measure_error(plain, reference, texts)
        applies = applying is None or not matched or difference in applying
        found.append(InherentDifference(difference.name, difference.effect, difference.source, matched, error, applies))
    return found


def _can_match(reference: Reference, difference: KnownDifference) -> bool:
    undo = _match(reference.model, difference)
    for step in reversed(undo):
        step()
    return bool(undo)


def _is_same(model: nn.Module, difference: KnownDifference) -> bool:
    """Whether the base computes what the library computes: seen in its own modules, never assumed for want of them."""
    wanted = dict(difference.reference)
    if wanted.get("hidden_act") == TANH_GELU:
        own = [module for module in model.modules() if type(module).__module__ in _ACTIVATION_MODULES]
        return bool(own) and not any(map(_is_erf_gelu, own))
    if "norm_eps" in wanted:
        epsilons = [own for _, _, own in _list_norm_eps(model)]
        return bool(epsilons) and all(own == float(wanted["norm_eps"]) for own in epsilons)
    return False


def _match(model: nn.Module, difference: KnownDifference) -> list[Callable[[], None]]:
    """Change the model in place; returns what undoes it, empty when nothing in it is affected or it cannot be done."""
    wanted = dict(difference.reference)
    if wanted.get("hidden_act") == TANH_GELU:
        return _replace_modules(model, _is_erf_gelu, lambda: nn.GELU(approximate="tanh"))
    if "norm_eps" in wanted:
        return _set_norm_eps(model, float(wanted["norm_eps"]))
    return []


def _is_erf_gelu(module: nn.Module) -> bool:
    if isinstance(module, nn.GELU):
        return module.approximate == "none"
    return type(module).__name__ == "GELUActivation"


def _replace_modules(
    model: nn.Module, chosen: Callable[[nn.Module], bool], make: Callable[[], nn.Module]
) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if chosen(child):
                setattr(parent, name, make())
                undo.append(lambda parent=parent, name=name, child=child: setattr(parent, name, child))
    return undo


def _list_norm_eps(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Every norm, the attribute that holds its epsilon, and the epsilon."""
    found = [(module, name, getattr(module, name, None)) for module in model.modules() for name in _NORM_EPS_NAMES]
    return [
        one for one in found if isinstance(one[2], float) and isinstance(getattr(one[0], "weight", None), torch.Tensor)
    ]


def _set_norm_eps(model: nn.Module, eps: float) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for module, attribute, own in _list_norm_eps(model):
        if own != eps:
            setattr(module, attribute, eps)
            undo.append(lambda module=module, attribute=attribute, own=own: setattr(module, attribute, own))
    return undo
