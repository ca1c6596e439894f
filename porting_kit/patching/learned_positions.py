"""Give every node of a tree its own learned position.

Models that look positions up in a table (OPT, GPT-2, StarCoder) read them from the engine input `position_ids`, of
which both runtimes feed one per request in the generation phase with Medusa (runtime/generation.py
0.11.0.dev2024062500, position_ids = context_lengths + step; cpp speculativeDecodingMode.h, updatesPositionIds excludes
Medusa). The patch computes them in the graph instead, from the same two inputs from which the attention kernel takes
rotary positions: sequence_length - N + offset (unfusedAttentionKernels_2_template.h, 9691e12b). Where the runtime feeds
one id per token, the computed ids are those.

How many requests are in the generation phase follows from shapes alone: T tokens and P ids differ by N - 1 for each.
"""

from __future__ import annotations

import re

from .edits import Edit, Insertion
from .flow import Carrier, Flow
from .structure import Call, ModelFile

FUNCTION_NAME = "spread_position_ids"
NEEDED = ("input_ids", "position_ids", "attention_params")

FUNCTION = '''\
def spread_position_ids(position_ids, input_ids, attention_params,
                        {tree}):
    """Position ids for every token, where the runtime feeds one per request.

    A request in the generation phase brings as many tokens as the offsets have
    columns. Context requests come first, with one id per token already. How
    many there are of each follows from the shapes.
    """
    from tensorrt_llm._common import default_net
    from tensorrt_llm.functional import (cast, concat, maximum, shape, slice,
                                         unsqueeze)
    packed = default_net().plugin_config.remove_input_padding
    if {tree} is None or not packed:
        return position_ids
    offsets = {offsets}
    sequence_length = attention_params.sequence_length
    nodes = shape(offsets, 1)
    surplus = shape(input_ids, 0) - shape(position_ids, 0)
    requests = surplus / maximum(nodes - 1, 1)
    context_tokens = shape(position_ids, 0) - requests
    first = shape(sequence_length, 0) - requests

    context_ids = slice(position_ids, [0], concat([context_tokens]))
    # The tokens of this call are counted in sequence_length.
    past = slice(sequence_length, concat([first]), concat([requests])) - nodes
    offsets = slice(offsets, [0, 0], concat([requests, nodes]))
    tree_ids = (unsqueeze(past, 1) + offsets).view(concat([requests * nodes]))
    return concat([context_ids, cast(tree_ids, position_ids.dtype)], dim=0)


'''


def plan_position_edits(
    model: ModelFile, flow: Flow, spec_arguments: tuple[str, ...]
) -> tuple[list[Edit], list[Insertion], tuple[str, ...]]:
    """The edits that a model with learned positions needs, and what to tell the user.

    Args:
        model, flow: the parsed file and the way down through it.
        spec_arguments: the era's names.

    Returns:
        Edits, insertions and notes; all empty for a model without learned positions.
    """
    edits: list[Edit] = []
    insertions: list[Insertion] = []
    notes: list[str] = []
    tree, offsets = name_offsets(spec_arguments)
    for carrier in flow.carriers:
        for call in _find_lookups(carrier):
            where = f"{carrier.owner.name}.{call.callee.removeprefix('self.')}"
            if call.positional == ("position_ids",) and _can_be_spread(carrier, call):
                added = f"{FUNCTION_NAME}(position_ids, input_ids, attention_params, {tree})"
                edits.append(Edit(carrier.owner.name, carrier.method.name, call.line, call.callee, (added,)))
                indent = model.newline + " " * (call.arguments.column + len(FUNCTION_NAME) + 1)
                rest = f", input_ids,{indent}attention_params,{indent}{tree})"
                insertions.append(Insertion(call.arguments.first, f"{FUNCTION_NAME}("))
                insertions.append(Insertion(call.arguments.last, rest))
            elif not call.positional or not call.positional[0].startswith(f"{FUNCTION_NAME}("):
                notes.append(
                    f"{where} looks learned positions up by position_ids, of which both runtimes feed one per request "
                    "in the generation phase: where this table is used, the nodes of a tree get wrong positions "
                    "although the arguments reach attention"
                )
                continue
            notes.append(
                f"{where}: learned positions are computed in the graph from sequence_length and the tree's offsets, "
                "because both runtimes feed one position id per request in the generation phase"
            )
    if insertions:
        line = min(model.classes[edit.class_name].line for edit in edits)
        offset = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", model.source))][line - 1]
        text = FUNCTION.format(tree=tree, offsets=offsets).replace("\n", model.newline)
        edits.insert(0, Edit(edits[0].class_name, "-", line, "new function", (FUNCTION_NAME,)))
        insertions.insert(0, Insertion(offset, text))
    return edits, insertions, tuple(notes)


def name_offsets(spec_arguments: tuple[str, ...]) -> tuple[str, str]:
    """The argument that brings the offsets, and the expression for them."""
    for name in spec_arguments:
        if name.endswith("position_offsets"):
            return name, name
    return spec_arguments[0], f"{spec_arguments[0]}.spec_decoding_position_offsets"


def _find_lookups(carrier: Carrier) -> list[Call]:
    """Calls of an embedding whose attribute is named after positions."""
    tables = {
        f"self.{attribute}"
        for attribute, built in carrier.owner.built.items()
        if "position" in attribute and any("Embedding" in names for names in built)
    }
    return [call for call in carrier.method.calls if call.callee in tables]


def _can_be_spread(carrier: Carrier, lookup: Call) -> bool:
    """Whether the method has what is needed, and uses the ids for nothing else."""
    others = (call for call in carrier.method.calls if call is not lookup)
    elsewhere = any("position_ids" in (*call.positional, *call.keywords.values()) for call in others)
    return not elsewhere and all(name in carrier.method.parameters for name in NEEDED)
