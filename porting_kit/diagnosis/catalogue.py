"""The faults that a port can have, as data. Adding one is one entry here and, where it is new, one small function.

Numbers of releases and file names are TensorRT-LLM's. An entry says what a user sees, why, and the exact fix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from porting_kit.diagnosis import runtime_faults as runtime
from porting_kit.diagnosis import weight_faults as weights
from porting_kit.diagnosis.fault import Fault
from porting_kit.diagnosis.port_state import PortState
from porting_kit.errors import PortFileError, suggest_nearest

ALL = "0.8 to 1.2"


def _kernel(**changes: bool) -> Callable[[PortState], PortState]:
    """Exact kernels but for these attributes of the profile."""
    name = " ".join(changes)
    return lambda state: replace(state, kernel=replace(state.kernel, name=f"hypothesis: {name}", **changes))


def _wrapped(wrapper: runtime.FaultyModel) -> Callable[[PortState], PortState]:
    return lambda state: state.with_wrapper(wrapper)


def _needs_position(word: str) -> Callable[[PortState], str | None]:
    def check(state: PortState) -> str | None:
        kind = str(state.config.get("position_embedding_type"))
        return None if word in kind else f"positions are {kind}"

    return check


def _needs_tree(state: PortState) -> str | None:
    return weights.lacks_heads(state)


def _needs_branches(state: PortState) -> str | None:
    if reason := weights.lacks_heads(state):
        return reason
    return None if len(state.tree.leaf_paths) > 1 else "the tree is a chain"


def _needs_positions_and_tree(state: PortState) -> str | None:
    kind = str(state.config.get("position_embedding_type"))
    return weights.lacks_heads(state) or ("positions do not enter attention" if kind == "none" else None)


def _needs_softcap(state: PortState) -> str | None:
    found = any("soft" in key and value for key, value in state.config.items())
    return None if found else "no soft-cap in the config"


CATALOGUE: tuple[Fault, ...] = (
    Fault(
        name="alibi_dropped_in_generation",
        kind="kernel",
        title="ALiBi bias dropped in the generation phase",
        symptom="the first token is right, the text after it is poor; no error is raised",
        cause="the XQA multi-query kernel that verifies the draft tree takes no ALiBi slopes; the context phase's "
        "kernel does",
        fix="fold the ALiBi bias into rotary dimensions before converting: fit: [fold_alibi] (kernel fit) in the port "
        "file, or fit: auto; no patch of model.py can mend it",
        releases=f"{ALL}, precompiled kernels; the just-in-time kernels refuse ALiBi",
        source="gptAttentionCommon.cpp l.235 and xqaParams.h l.49, 0.14.0.dev2024100800; measured on an H200",
        apply=_kernel(alibi_in_generation=False),
        applies=_needs_position("alibi"),
    ),
    Fault(
        name="softcap_dropped_in_generation",
        kind="kernel",
        title="soft-cap on attention logits dropped in the generation phase",
        symptom="small deviations after the first token, larger where attention is sharp",
        cause="the multi-query kernel does not read the tanh scale",
        fix="none in these releases: choose a release whose kernels have it, or a base without soft-cap",
        releases=ALL,
        source="decoderXQAImplPrecompiled.cpp, 0.14.0.dev2024100800: no use of the tanh scale",
        apply=_kernel(softcap_in_generation=False),
        applies=_needs_softcap,
    ),
    Fault(
        name="one_position_id_per_request",
        kind="kernel",
        title="learned positions fed with one id per request",
        symptom="drafts are judged as if they all stood at one position; at batch 2 a shape error",
        cause="both runtimes feed position_ids of one value per request, counted in iterations and not in tokens",
        fix="use the patched module of this port: it computes positions in the graph from past length and offsets",
        releases=ALL,
        source="runtime/generation.py l.2606 and speculativeDecodingMode.h l.78, 0.14.0.dev2024100800",
        apply=_kernel(one_position_id_per_request=True),
        applies=_needs_position("learned"),
    ),
    Fault(
        name="qkv_bias_dropped",
        kind="weights",
        title="query, key and value biases dropped",
        symptom="wrong from the first token on",
        cause="examples/medusa/convert_checkpoint.py passes no biases on, and attn_bias is absent from its config",
        fix="convert with this port's rules, which write attention.qkv.bias and attn_bias: true",
        releases="0.8 to 0.14",
        source="examples/medusa/convert_checkpoint.py, 0.14.0.dev2024100800",
        apply=lambda state: weights.drop_bias(state, ".attention.qkv.bias"),
        applies=lambda state: weights.missing_bias(state, ".attention.qkv.bias"),
    ),
    Fault(
        name="output_bias_dropped",
        kind="weights",
        title="bias of the attention output projection dropped",
        symptom="wrong from the first token on, often fluent",
        cause="a converter written for models without that bias",
        fix="convert with this port's rules, which write attention.dense.bias",
        releases=ALL,
        source="examples/medusa/convert_checkpoint.py, 0.14.0.dev2024100800",
        apply=lambda state: weights.drop_bias(state, ".attention.dense.bias"),
        applies=lambda state: weights.missing_bias(state, ".attention.dense.bias"),
    ),
    Fault(
        name="rope_base_lost",
        kind="config",
        title="rotary base lost: 10,000 used",
        symptom="right for short prompts, worse the further the text goes",
        cause="a converter default, or the key under another name: the tables are made from rotary_base",
        fix="write rotary_base (GPT-NeoX: rotary_base and rotary_emb_base) into config.json with the base's own theta",
        releases="0.8 to 0.14 (Medusa converter), from 0.12 on GPT-NeoX",
        source="examples/medusa/convert_checkpoint.py --rotary_base; layers/attention.py l.494, 0.12.0.dev2024080600",
        apply=weights.lose_rope_base,
        applies=weights.keeps_default_rope_base,
        decided_by="a prompt of 200 tokens or more",
    ),
    Fault(
        name="rope_scaling_lost",
        kind="config",
        title="rotary scaling lost",
        symptom="right for short prompts, wrong beyond the original context length",
        cause="rope_scaling under its new key names is not read, or reduced to its type",
        fix="write rotary_scaling with all its factors into config.json",
        releases="0.8 to 0.14 (Medusa converter)",
        source="examples/medusa/convert_checkpoint.py, 0.14.0.dev2024100800",
        apply=lambda state: state.with_config(rotary_scaling=None),
        applies=lambda state: None if state.config.get("rotary_scaling") else "no rotary scaling in the config",
        decided_by="a prompt longer than the original context length",
    ),
    Fault(
        name="qkv_not_deinterleaved",
        kind="weights",
        title="fused query/key/value rows not de-interleaved",
        symptom="nonsense from the first token on",
        cause="BLOOM, GPT-NeoX and Falcon store q, k, v head by head; TensorRT-LLM wants all q, all k, all v",
        fix="reorder rows of weight and bias alike: the family's Ungroup rule",
        releases=ALL,
        source="examples/bloom/convert_checkpoint.py and examples/gptneox/convert_checkpoint.py",
        apply=weights.interleave_qkv,
        applies=lambda state: None if state.has_tensor(".attention.qkv.weight") else "no fused projection",
    ),
    Fault(
        name="key_and_value_swapped",
        kind="weights",
        title="key and value projections swapped",
        symptom="nonsense from the first token on",
        cause="the fused projection was joined in another order than q, k, v",
        fix="join q, then k, then v, with the real head counts, for weight and bias alike",
        releases=ALL,
        source="layers/attention.py: qkv split, all releases",
        apply=weights.swap_key_and_value,
        applies=lambda state: None if state.has_tensor(".attention.qkv.weight") else "no fused projection",
    ),
    Fault(
        name="gate_and_up_swapped",
        kind="weights",
        title="gate and up projections of the MLP swapped",
        symptom="nonsense from the first token on",
        cause="TensorRT-LLM's fc is the activated branch (gate_proj), its gate the linear one (up_proj)",
        fix="mlp.fc takes gate_proj, mlp.gate takes up_proj",
        releases=ALL,
        source="layers/mlp.py GatedMLP, all releases",
        apply=weights.swap_gate_and_up,
        applies=weights.lacks_gate,
    ),
    Fault(
        name="head_taken_from_embedding",
        kind="weights",
        title="tied output matrix wrong: the embedding used although the model has its own",
        symptom="fluent but wrong, or nonsense, from the first token on",
        cause="tie_word_embeddings believed although the file holds a different lm_head.weight",
        fix="take lm_head.weight from the file",
        releases=ALL,
        source="examples/medusa/convert_checkpoint.py, 0.14.0.dev2024100800",
        apply=weights.take_embedding_as_head,
        applies=lambda state: "the two are tied" if weights.is_tied(state) else None,
    ),
    Fault(
        name="tied_head_left_empty",
        kind="weights",
        title="tied output matrix left empty",
        symptom="token 0 for ever",
        cause="the file of a model with tied embeddings has no lm_head.weight, and nothing was put in its place",
        fix="write the embedding matrix as lm_head.weight",
        releases=ALL,
        source="examples/medusa/convert_checkpoint.py, 0.14.0.dev2024100800",
        apply=weights.leave_head_empty,
        applies=lambda state: None if weights.is_tied(state) else "the two are not tied",
    ),
    Fault(
        name="position_offsets_ignored",
        kind="tree",
        title="position offsets of the tree ignored",
        symptom="the first token of each step is right, tokens at depth 1 and more are often wrong",
        cause="every node is rotated (or biased) as if it stood at the root's position",
        fix="pass spec_decoding_params (spec_decoding_position_offsets) through layer and model to attention",
        releases=ALL,
        source="models/<arch>/model.py without the argument; unfusedAttentionKernels_2_template.h",
        apply=_wrapped(runtime.ignore_offsets),
        applies=_needs_positions_and_tree,
    ),
    Fault(
        name="position_offsets_numbered",
        kind="tree",
        title="tree nodes numbered one after the other instead of by depth",
        symptom="tokens at depth 1 and more are often wrong, more so in wide trees",
        cause="position offsets 0, 1, 2, ... as for plain text",
        fix="offsets are the depth of each node (medusa_position_offsets.npy of this port)",
        releases=ALL,
        source="runtime/medusa_utils.py, 0.11.0.dev2024062500",
        apply=_wrapped(runtime.number_offsets),
        applies=_needs_branches,
    ),
    Fault(
        name="mask_bits_reversed",
        kind="tree",
        title="bits of the packed tree mask reversed",
        symptom="wrong from the second token on",
        cause="bit b % 32 of word b // 32 is column b; another packing order was used",
        fix="pack the mask as medusa/tree.py pack_mask does",
        releases=ALL,
        source="runtime/medusa_utils.py get_packed_mask, 0.11.0.dev2024062500",
        apply=_wrapped(runtime.reverse_mask_bits),
        applies=_needs_tree,
    ),
    Fault(
        name="mask_transposed",
        kind="tree",
        title="rows and columns of the tree mask exchanged",
        symptom="the root sees its drafts: wrong from the second token on",
        cause="row a, column b says whether a sees b; the other way round was packed",
        fix="pack row by row: the row's node, then the columns it sees",
        releases=ALL,
        source="runtime/medusa_utils.py get_medusa_mask, 0.11.0.dev2024062500",
        apply=_wrapped(runtime.transpose_mask),
        applies=_needs_tree,
    ),
    Fault(
        name="mask_causal",
        kind="tree",
        title="tree mask ignored: drafts see each other as plain text",
        symptom="the first token of each step is right, deeper ones are wrong as soon as the tree branches",
        cause="the packed mask never reaches attention, or its rows were filled causally",
        fix="pass spec_decoding_params (spec_decoding_packed_mask) through layer and model to attention",
        releases=ALL,
        source="models/<arch>/model.py without the argument",
        apply=_wrapped(runtime.causal_mask),
        applies=_needs_branches,
    ),
    Fault(
        name="accepted_kv_not_moved",
        kind="runtime",
        title="keys and values of accepted drafts not moved",
        symptom="right until a draft off the first path is accepted, then the text derails",
        cause="the cache rows of the accepted path are not copied behind the past",
        fix="let the runtime update the cache: do not disable kv_cache_updater, and give it the tree's own paths",
        releases=ALL,
        source="runtime/generation.py update_kv_cache_draft_token_location, 0.11.0.dev2024062500",
        apply=_wrapped(runtime.leave_rows_in_place),
        applies=_needs_branches,
    ),
    Fault(
        name="heads_shifted_by_one",
        kind="heads",
        title="Medusa heads shifted by one",
        symptom="the text is right, steps accept hardly anything",
        cause="head h holds the weights of head h + 1",
        fix="number heads from 0: head h predicts the token h + 2 places ahead",
        releases=ALL,
        source="models/medusa/model.py, all releases",
        apply=weights.shift_heads,
        applies=lambda state: weights.lacks_heads(state, at_least=2),
        decided_by="accepted lengths per step",
    ),
)

NAMES = {fault.name: fault for fault in CATALOGUE}


def find_fault(name: str) -> Fault:
    """The entry of this name; PortFileError with the nearest name when there is none."""
    if name not in NAMES:
        nearest = suggest_nearest(name, NAMES)
        raise PortFileError(
            f"No fault has the name {name!r}",
            expected=", ".join(NAMES),
            next_step=f"Did you mean {nearest!r}?" if nearest else None,
        )
    return NAMES[name]
