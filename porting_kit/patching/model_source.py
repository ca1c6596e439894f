"""Patch a model definition so that the speculative-decoding arguments reach every attention call.

Source in, outcome out. The usual model needs four edits: the signatures of layer and model, the calls of attention and
layers. Which edits a file needs is found by following the arguments (`flow`), so a file that passes them half-way gets
the missing ones only, and a patched file needs none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..errors import PatchError
from .edits import Edit, Insertion, apply_insertions, insert_arguments
from .flow import (
    LIST_CLASSES,
    MISSING_PARAMETER,
    NOT_PASSED,
    OTHER_RELEASE,
    SWALLOWED,
    TOP_CLASS,
    Carrier,
    Flow,
    drops_of,
    passes,
    trace_flow,
)
from .learned_positions import plan_position_edits
from .structure import Call, ModelFile, read_model_file

PatchStatus = Literal["patched", "already_accepts", "refused"]

# State that a rejected draft token has already changed and that no cache length can undo.
RECURRENT_STATE = re.compile(r"\b(?:conv|ssm|lru|rnn|recurrent)_states?\b")


@dataclass(frozen=True)
class PatchOutcome:
    """What became of one model definition.

    Args:
        status: "patched"; "already_accepts": nothing to do; "refused": the model cannot take a tree of draft tokens,
            or not by passing arguments, and `reason` says why.
        source: the text after the patch; unchanged unless patched.
        edits: what was added where, in the order of the text.
        reason: why a model was refused.
        layer_classes, model_classes, top_classes: names of the classes on the way down.
        notes: what the user must know although the patch is complete.
    """

    status: PatchStatus
    source: str
    edits: tuple[Edit, ...] = ()
    reason: str | None = None
    layer_classes: tuple[str, ...] = ()
    model_classes: tuple[str, ...] = ()
    top_classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def patch_model_source(source: str, *, spec_arguments: tuple[str, ...], file: str) -> PatchOutcome:
    """Add the arguments to every signature and call on the way from the top class to attention.

    Args:
        source: the text of a model.py.
        spec_arguments: the era's names (`SourceTree.spec_arguments`); they are always passed by keyword.
        file: the file's name, for messages.

    Raises:
        PatchError: the text cannot be parsed, defines something twice, or has an attention layer that nothing is seen
            to call: patching the rest would leave a model that takes the arguments and ignores them.
    """
    model = read_model_file(source, file)
    flow = trace_flow(model)
    names = {"layer_classes": flow.layers, "model_classes": flow.models, "top_classes": flow.tops}
    drops = drops_of(flow, spec_arguments)
    reason = _find_reason_to_refuse(model, flow)
    if reason is None and (drops or not flow.carriers):
        reason = _find_reason_not_to_patch(flow, spec_arguments)
    if reason is not None:
        return PatchOutcome("refused", source, reason=reason, **names)
    _require_anchors(model, flow, file)
    edits, insertions, notes = plan_position_edits(model, flow, spec_arguments)
    if drops:
        for carrier in flow.carriers:
            _edit_carrier(model, carrier, spec_arguments, file, edits, insertions)
    if not edits:
        return PatchOutcome("already_accepts", source, notes=notes, **names)
    patched = apply_insertions(source, insertions)
    _require_complete(patched, spec_arguments, file)
    edits.sort(key=lambda edit: edit.line)
    return PatchOutcome("patched", patched, edits=tuple(edits), notes=notes, **names)


def _edit_carrier(
    model: ModelFile,
    carrier: Carrier,
    spec_arguments: tuple[str, ...],
    file: str,
    edits: list[Edit],
    insertions: list[Insertion],
) -> None:
    method = carrier.method
    missing = tuple(f"{name}=None" for name in spec_arguments if name not in method.parameters)
    calls = [
        (step.call, [name for name in spec_arguments if not passes(carrier, step.call, name)]) for step in carrier.steps
    ]
    # A method that hands everything on through **kwargs needs no parameter of its own.
    if missing and (method.swallows is None or any(unpassed for _, unpassed in calls)):
        calls = [
            (call, [name for name in spec_arguments if not passes(carrier, call, name, named=True)])
            for call, _ in calls
        ]
        edits.append(Edit(carrier.owner.name, method.name, method.line, "signature", missing))
        insertions += insert_arguments(
            model.source, method.arguments, missing, model.newline, before_starred=method.swallows is not None
        )
    for call, unpassed in calls:
        if unpassed:
            _require_keyword_call(carrier, call, unpassed, file)
            added = tuple(f"{name}={name}" for name in unpassed)
            edits.append(Edit(carrier.owner.name, method.name, call.line, call.callee, added))
            insertions += insert_arguments(model.source, call.arguments, added, model.newline)


def _require_keyword_call(carrier: Carrier, call: Call, unpassed: list[str], file: str) -> None:
    where = f"{file}:{call.line}, {carrier.owner.name}.{carrier.method.name}"
    for name in unpassed:
        if name in call.keywords:
            raise PatchError(
                f"{call.callee} is given {name}={call.keywords[name]} on purpose",
                expected=f"no {name}, or {name}={name}",
                found=f"{name}={call.keywords[name]}",
                where=where,
                next_step="remove the argument and patch again",
            )
    if call.callee.startswith("self.") and len(call.positional) > 2:
        raise PatchError(
            f"{call.callee} is called with {len(call.positional)} arguments by position",
            expected="keywords for all but the first; positions differ from release to release",
            found=f"{call.callee}({', '.join(call.positional)}, ...)",
            where=where,
            next_step="name the arguments in this call and patch again",
        )


def _find_reason_to_refuse(model: ModelFile, flow: Flow) -> str | None:
    """Why no patch can make this model take a tree of draft tokens, None when nothing speaks against it."""
    for owner in model.classes.values():
        forward = owner.methods.get("forward")
        if forward is not None:
            state = RECURRENT_STATE.search(" ".join((*forward.parameters, *_all_words(forward.calls))))
            if state is not None:
                return (
                    f"{owner.name} keeps a recurrent state ({state[0]}): a rejected draft token has already changed "
                    "it, and it cannot be rewound as a KV cache can"
                )
        for attribute, settings in owner.keywords.items():
            if any(each.get("cross_attention") == "True" for each in settings):
                return (
                    f"{owner.name}.{attribute} is cross attention: Medusa in TensorRT-LLM decodes decoder-only models, "
                    "and this is an encoder-decoder"
                )
        for method in owner.methods.values():
            if any(call.callee == "gpt_attention" for call in method.calls):
                return (
                    f"{owner.name}.{method.name} calls gpt_attention itself instead of layers.Attention, so what it "
                    "does with draft tokens cannot be told from outside"
                )
    if flow.foreign_attention:
        return (
            f"its attention class is {', '.join(flow.foreign_attention)}, not tensorrt_llm.layers.Attention: its "
            "kernels are not the ones that take a tree of draft tokens"
        )
    return None


def _find_reason_not_to_patch(flow: Flow, spec_arguments: tuple[str, ...]) -> str | None:
    """Why passing the arguments through would not be enough, or would be wrong."""
    if not flow.layers:
        return "it defines no decoder layer that calls tensorrt_llm.layers.Attention"
    others = [drop for drop in drops_of(flow, spec_arguments) if drop.kind == OTHER_RELEASE]
    if others:
        return (
            f"it is written for another release: {others[0].argument} in line {others[0].line}, where this tree's "
            f"Attention takes {', '.join(spec_arguments)}"
        )
    foreign_tops = [carrier.owner for carrier in flow.carriers if carrier.level == "top"]
    for owner in foreign_tops:
        if TOP_CLASS not in owner.bases:
            return (
                f"its top class {owner.name}({', '.join(owner.bases)}) is not built on {TOP_CLASS}: it makes the "
                "network's inputs itself, and makes none for a tree of draft tokens"
            )
    return None


def _require_anchors(model: ModelFile, flow: Flow, file: str) -> None:
    """Every layer with attention must be seen to be called, and to call its attention."""
    called = {step.call.callee for carrier in flow.carriers for step in carrier.steps if step.level == "attention"}
    for name in flow.layers:
        owner = model.classes[name]
        attributes = [each for each, built in owner.built.items() if any("Attention" in names for names in built)]
        uncalled = [each for each in attributes if not any(callee.startswith(f"self.{each}") for callee in called)]
        if uncalled:
            raise PatchError(
                f"no call of {name}'s attention was found",
                expected=f"a call self.{uncalled[0]}(...) in {name}",
                found="none",
                where=f"{file}:{owner.line}",
                next_step="patch this file by hand, or report its shape",
            )
    if flow.layers and not flow.models and not any(carrier.level == "top" for carrier in flow.carriers):
        searched = "self.<list>(...), self.<list>.forward(...), or a loop over self.<list>"
        raise PatchError(
            f"no call that runs the decoder layer {flow.layers[0]} was found",
            expected=f"{searched}, where <list> is built from {flow.layers[0]} ({', '.join(LIST_CLASSES)})",
            found="none in any class of the file",
            where=f"{file}:{model.classes[flow.layers[0]].line}",
            next_step="patch this file by hand, or report its shape",
        )


def _require_complete(patched: str, spec_arguments: tuple[str, ...], file: str) -> None:
    left = drops_of(trace_flow(read_model_file(patched, file)), spec_arguments)
    if left:
        raise PatchError(
            "a patched model still drops the arguments",
            expected="no drops",
            found=f"{len(left)} drops ({MISSING_PARAMETER}, {NOT_PASSED} or {SWALLOWED})",
            where=file,
            items=left,
            next_step="report this file's shape; the patch was not written",
        )


def _all_words(calls: tuple[Call, ...]) -> list[str]:
    return [word for call in calls for word in (*call.positional, *call.keywords)]
