"""What reaches attention of the draft tree: position offsets, packed mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from porting_kit.diagnosis import tree_faults as tree
from porting_kit.diagnosis.catalogue.kernel import needs_branches
from porting_kit.diagnosis.fault import EVERY_RELEASE, GENERATION, Fault
from porting_kit.diagnosis.head_faults import lacks_heads
from porting_kit.diagnosis.port_state import PortState
from porting_kit.medusa.named_trees import NAMED_CHOICES
from porting_kit.medusa.tree import MedusaTree

DEFAULT_TREE = "mc_sim_7b_63"


def _wrapped(wrapper: Callable[[Any], Any]) -> Callable[[PortState], PortState]:
    return lambda state: state.with_wrapper(wrapper)


def _needs_positions_and_tree(state: PortState) -> str | None:
    kind = str(state.config.get("position_embedding_type"))
    return lacks_heads(state) or ("positions do not enter attention" if kind == "none" else None)


def _needs_rotary_branches(state: PortState) -> str | None:
    kind = str(state.config.get("position_embedding_type"))
    return needs_branches(state) or ("ALiBi has a fault of its own" if "alibi" in kind else None)


def _take_default_mask(state: PortState) -> PortState:
    """The mask of the runtime's default tree, cut to as many nodes."""
    listed = NAMED_CHOICES[DEFAULT_TREE][: state.tree.num_drafts]
    return state.with_wrapper(tree.take_mask_of(MedusaTree.from_choices(listed)))


TREE_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="position_offsets_ignored",
        kind="tree",
        title="position offsets of the tree ignored",
        symptom="the first token of each step is right, tokens at depth 1 and more are often wrong",
        cause="every node is rotated (or biased) as if it stood at the root's position",
        fix="pass spec_decoding_params (spec_decoding_position_offsets) through layer and model to attention",
        releases=EVERY_RELEASE,
        source="models/<arch>/model.py without the argument; unfusedAttentionKernels_2_template.h",
        apply=_wrapped(tree.ignore_offsets),
        applies=_needs_positions_and_tree,
        phase=GENERATION,
    ),
    Fault(
        name="position_offsets_numbered",
        kind="tree",
        title="tree nodes numbered one after the other instead of by depth",
        symptom="tokens at depth 1 and more are often wrong, more so in wide trees",
        cause="position offsets 0, 1, 2, ... as for plain text",
        fix="offsets are the depth of each node (medusa_position_offsets.npy of this port)",
        releases=EVERY_RELEASE,
        source="runtime/medusa_utils.py, 0.11.0.dev2024062500",
        apply=_wrapped(tree.number_offsets),
        applies=_needs_rotary_branches,
        phase=GENERATION,
    ),
    Fault(
        name="mask_bits_reversed",
        kind="tree",
        title="bits of the packed tree mask reversed",
        symptom="wrong from the second token on",
        cause="bit b % 32 of word b // 32 is column b; another packing order was used",
        fix="pack the mask as medusa/tree.py pack_mask does",
        releases=EVERY_RELEASE,
        source="runtime/medusa_utils.py get_packed_mask, 0.11.0.dev2024062500",
        apply=_wrapped(tree.reverse_mask_bits),
        applies=lacks_heads,
        phase=GENERATION,
    ),
    Fault(
        name="mask_transposed",
        kind="tree",
        title="rows and columns of the tree mask exchanged",
        symptom="the root sees its drafts: wrong from the second token on",
        cause="row a, column b says whether a sees b; the other way round was packed",
        fix="pack row by row: the row's node, then the columns it sees",
        releases=EVERY_RELEASE,
        source="runtime/medusa_utils.py get_medusa_mask, 0.11.0.dev2024062500",
        apply=_wrapped(tree.transpose_mask),
        applies=lacks_heads,
        phase=GENERATION,
    ),
    Fault(
        name="mask_causal",
        kind="tree",
        title="tree mask ignored: drafts see each other as plain text",
        symptom="the first token of each step is right, deeper ones are wrong as soon as the tree branches",
        cause="the packed mask never reaches attention, or its rows were filled causally",
        fix="pass spec_decoding_params (spec_decoding_packed_mask) through layer and model to attention",
        releases=EVERY_RELEASE,
        source="models/<arch>/model.py without the argument",
        apply=_wrapped(tree.causal_mask),
        applies=needs_branches,
        phase=GENERATION,
    ),
    Fault(
        name="mask_of_another_tree",
        kind="tree",
        title="tree mask belongs to another tree",
        symptom="the first token of each step is right, deeper ones are often wrong",
        cause="mask and drafts made from different lists of choices, or from one list in different orders",
        fix="give engine and runtime one medusa_choices: the file medusa_choices.json of this port",
        releases=EVERY_RELEASE,
        source="runtime/medusa_utils.py, sorted choices, 0.11.0.dev2024062500; medusaModule.h default choices",
        apply=lambda state: state.with_wrapper(tree.order_depth_first(state.tree)),
        variants=(_take_default_mask,),
        applies=needs_branches,
        phase=GENERATION,
    ),
    Fault(
        name="tree_lost_in_some_layers",
        kind="tree",
        title="tree arguments do not reach some of the layers",
        symptom="the first token of each step is right, deeper ones are often wrong",
        cause="some layers call attention without spec_decoding_params: a branch of the layer's code was not patched",
        fix="pass spec_decoding_params in every branch of the layer that calls attention; this port's patch lists them",
        releases=EVERY_RELEASE,
        source="models/<arch>/model.py with several attention calls (cogvlm, nemotron_nas), 0.14.0.dev2024100800",
        apply=_wrapped(tree.starve_layers(lambda layer, layers: layer % 2 == 1)),
        variants=(
            _wrapped(tree.starve_layers(lambda layer, layers: layer % 2 == 0)),
            _wrapped(tree.starve_layers(lambda layer, layers: layer >= layers // 2)),
            _wrapped(tree.starve_layers(lambda layer, layers: layer > 0)),
        ),
        applies=needs_branches,
        phase=GENERATION,
    ),
)
