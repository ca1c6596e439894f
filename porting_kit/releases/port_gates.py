"""The gates of a port that are not about kernels: parallel sizes, vocabulary, tree, dtype, positions, lengths, limits.

Pure functions on numbers; each returns a `GateResult`. Sizes of memory and disk are in `resources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from porting_kit.releases.facts import ReleaseFacts
from porting_kit.releases.kernels import GateResult

# Largest finite values of the types (IEEE 754 half precision; bfloat16 has float32's range).
FLOAT16_MAX = 65504.0


def tensor_parallel_gate(*, tp_size: int, query_heads: int, kv_heads: int, intermediate_size: int) -> GateResult:
    """Whether heads and MLP divide among tensor-parallel ranks.

    Query heads must divide; key/value heads must divide, or be fewer than the ranks and divide them (they are then
    replicated). Source: layers/attention.py and converters' split functions, 0.9 to 0.14.
    """

    def divides(size: int) -> bool:
        shared = kv_heads % size == 0 or size % kv_heads == 0
        return query_heads % size == 0 and shared and intermediate_size % size == 0

    possible = [size for size in range(1, query_heads + 1) if divides(size)]
    value = f"tp {tp_size}; {query_heads} query heads, {kv_heads} key/value heads, MLP width {intermediate_size}"
    if divides(tp_size):
        return GateResult(
            "tensor parallel", value, "pass", "sizes that divide", source="layers/attention.py 0.11.0.dev2024062500"
        )
    return GateResult(
        "tensor parallel",
        value,
        "refused",
        "sizes that divide",
        effect="the shards cannot be cut",
        remedy=f"possible sizes: {', '.join(map(str, possible))}",
        source="layers/attention.py 0.11.0.dev2024062500",
    )


def pipeline_parallel_gate(*, pp_size: int, num_layers: int) -> GateResult:
    """Whether layers divide among pipeline ranks (mapping.py: equal shares; Medusa's README claims no pipeline)."""
    value = f"pp {pp_size}, {num_layers} layers"
    source = "mapping.py and examples/medusa/README.md 0.11.0.dev2024062500"
    if pp_size == 1:
        return GateResult("pipeline parallel", value, "pass", "1", source=source)
    if num_layers % pp_size:
        return GateResult(
            "pipeline parallel",
            value,
            "refused",
            "a size that divides the layers",
            effect="the library asserts equal shares",
            remedy="possible sizes: "
            + ", ".join(str(size) for size in range(1, num_layers + 1) if num_layers % size == 0),
            source=source,
        )
    return GateResult(
        "pipeline parallel",
        value,
        "silent",
        "1",
        effect="upstream claims no support for Medusa over pipeline ranks; its own converter is wrong for it",
        remedy="use pp_size 1, or check the alignment of the engine itself",
        source=source,
    )


def vocabulary_gate(*, vocab_size: int, tp_size: int, head_rows: int | None = None) -> GateResult:
    """Whether the vocabulary divides among ranks, and whether the heads have its size.

    The library pads to a multiple of tp_size (`pad_vocab_size` in _utils.py); zero rows give logit 0, which can win.

    Args:
        vocab_size: V of the base.
        tp_size: ranks.
        head_rows: output rows of the Medusa heads; None when they share the base's output matrix.
    """
    padded = -(-vocab_size // tp_size) * tp_size
    value = f"{vocab_size}" + (f" -> {padded}" if padded != vocab_size else "")
    source = "_utils.py pad_vocab_size and models/medusa/model.py 0.11.0.dev2024062500"
    if head_rows is not None and head_rows not in (vocab_size, padded):
        return GateResult(
            "vocabulary",
            f"base {vocab_size}, heads {head_rows}",
            "refused",
            "the same rows in base and heads",
            effect="the heads were trained for another vocabulary (a token added or a padded base)",
            remedy="use the base the heads were trained on",
            source=source,
        )
    if padded == vocab_size:
        return GateResult("vocabulary", value, "pass", f"a multiple of tp_size {tp_size}", source=source)
    return GateResult(
        "vocabulary",
        value,
        "mended",
        f"a multiple of tp_size {tp_size}",
        effect="a zero row has logit 0 and can win where real logits are negative; and the C++ decoder steps through "
        "Medusa logits by the unpadded size (0.12 to 0.14), so drafts of later heads are wrong (speed only)",
        remedy="the conversion pads base and heads to one size and keeps padded columns from winning",
        mended_by=("pad_vocabulary",),
        source=source + "; cpp medusaDecodingLayer 0.12.0.dev2024080600 to 0.14.0.dev2024100800",
    )


def tree_gate(*, num_drafts: int, depth: int, num_heads: int, max_draft_len: int) -> GateResult:
    """Whether the heads and the engine's draft limit hold the tree.

    Args:
        num_drafts: N - 1.
        depth: deepest level.
        num_heads: M, heads in use.
        max_draft_len: drafts the checkpoint (or engine) is made for.
    """
    value = f"{num_drafts} drafts, {depth} levels; {num_heads} heads, limit {max_draft_len}"
    source = "runtime/medusa_utils.py and cpp medusaModule 0.11.0.dev2024062500 to 0.13.0.dev2024090300"
    fault = None
    if max_draft_len == 0:
        fault = "the engine allows 0 draft tokens: it is built without the Medusa mode"
    elif depth > num_heads:
        fault = f"level {depth} needs head {depth}; there are {num_heads}"
    elif num_drafts > max_draft_len:
        fault = f"{num_drafts - max_draft_len} nodes too many: the runtime asserts at the first request"
    if fault is None:
        return GateResult("tree", value, "pass", "within heads and draft limit", source=source)
    return GateResult(
        "tree",
        value,
        "refused",
        "within heads and draft limit",
        effect=fault,
        remedy="trim the tree, or convert with more heads and a larger max_draft_len",
        source=source,
    )


def dtype_gate(*, source_dtype: str | None, dtype: str, largest_weight: float | None = None) -> GateResult:
    """Whether the weights survive the change of type.

    Args:
        source_dtype: type of the base's weights, None when its config does not say.
        dtype: type of the checkpoint.
        largest_weight: largest absolute value, where the weights were read.
    """
    value = f"{source_dtype or 'not stated'} -> {dtype}"
    if dtype == "float16" and largest_weight is not None and largest_weight > FLOAT16_MAX:
        return GateResult(
            "dtype",
            f"{value}, largest weight {largest_weight:.3g}",
            "refused",
            f"weights up to {FLOAT16_MAX:g}",
            effect="weights turn into infinity",
            remedy="use bfloat16",
            source="IEEE 754 half precision",
        )
    if source_dtype == "bfloat16" and dtype == "float16":
        return GateResult(
            "dtype",
            value,
            "silent",
            "the type the model was trained in",
            effect="activations of a model trained in bfloat16 can exceed float16's range: NaN, or one token for ever",
            remedy="use bfloat16, or check the reference for non-finite activations before comparing",
            source="IEEE 754 half precision",
        )
    return GateResult("dtype", value, "pass", "a type that holds the values", source="IEEE 754 half precision")


def position_gate(
    *, position_kind: str, rope_scaling: Mapping[str, object] | None, facts: ReleaseFacts, release: str
) -> GateResult:
    """Whether the release knows the position embedding and the kind of rotary scaling.

    Args:
        position_kind: TensorRT-LLM's PositionEmbeddingType name.
        rope_scaling: the scaling settings (`rope_type` or `type`), None when there are none.
        facts: the release range.
        release: the release, for the text.
    """
    kind = _scaling_kind(rope_scaling)
    value = position_kind + (f", {kind} scaling" if kind != "none" else "")
    source = f"functional.py PositionEmbeddingType and RotaryScalingType, {release}"
    known = ", ".join(facts.rope_scaling_kinds)
    # long_rope is a position type of its own from 0.10.0.dev2024050700 on, before it became a scaling type in 0.12.
    own_type = kind == "longrope" and position_kind == "long_rope"
    if position_kind not in (*facts.position_kinds, "none"):
        effect, remedy = (
            f"{release} has no position type {position_kind}",
            f"known: {', '.join(facts.position_kinds)}; use a later release",
        )
    elif kind not in facts.rope_scaling_kinds and not own_type:
        effect, remedy = (
            f"{release} has no rotary scaling of the kind {kind}",
            f"known: {known}; use a later release (llama3 and longrope came with 0.12.0.dev2024072302)",
        )
    else:
        return GateResult("positions", value, "pass", "a kind the release knows", source=source)
    return GateResult(
        "positions", value, "refused", "a kind the release knows", effect=effect, remedy=remedy, source=source
    )


def _scaling_kind(rope_scaling: Mapping[str, object] | None) -> str:
    if not rope_scaling:
        return "none"
    kind = str(rope_scaling.get("rope_type") or rope_scaling.get("type") or "none")
    return {"default": "none", "su": "longrope"}.get(kind, kind)


def length_gate(
    *, max_seq_len: int, max_input_len: int, max_positions: int | None, position_kind: str, scaling_factor: float = 1.0
) -> GateResult:
    """Whether the wanted lengths lie within what the model was made for.

    Args:
        max_seq_len: prompt and output, in tokens.
        max_input_len: prompt, in tokens.
        max_positions: positions the model was trained on, None when it has no limit.
        position_kind: TensorRT-LLM's name.
        scaling_factor: rotary scaling factor that lengthens the limit.
    """
    value = f"prompt {max_input_len}, sequence {max_seq_len}; model {max_positions or 'without a limit'}"
    source = "builder.py _init_max_seq_len 0.13.0.dev2024090300"
    if max_input_len >= max_seq_len:
        return GateResult(
            "lengths",
            value,
            "refused",
            "a prompt shorter than the sequence",
            effect="no room for output",
            remedy="raise max_seq_len above max_input_len",
            source=source,
        )
    limit = None if max_positions is None else int(max_positions * scaling_factor)
    if limit is None or max_seq_len <= limit:
        return GateResult("lengths", value, "pass", f"at most {limit or 'any length'}", source=source)
    if position_kind == "learned_absolute":
        return GateResult(
            "lengths",
            value,
            "refused",
            f"at most {limit}",
            effect="positions beyond the table of learned positions",
            remedy=f"set max_seq_len to {limit} or less",
            source=source,
        )
    return GateResult(
        "lengths",
        value,
        "silent",
        f"at most {limit}",
        effect="the library warns and runs: beyond the trained length both the model and the heads are guessing",
        remedy=f"set max_seq_len to {limit} or less",
        source=source,
    )


def max_num_tokens_gate(*, max_batch_size: int, num_nodes: int, max_num_tokens: int | None) -> GateResult:
    """Whether one step of a full batch fits: max_batch_size * N tokens.

    The builder raises max_num_tokens itself from 0.11.0.dev2024062500 on (builder.py); before, the engine is short.
    """
    need = max_batch_size * num_nodes
    value = f"{max_num_tokens or 'not set'} for {max_batch_size} x {num_nodes} = {need}"
    source = "builder.py 0.11.0.dev2024062500 l.757-765"
    if max_num_tokens is None or max_num_tokens >= need:
        return GateResult("tokens per step", value, "pass", f"at least {need}", source=source)
    return GateResult(
        "tokens per step",
        value,
        "refused",
        f"at least {need}",
        effect="a full batch does not fit into one verification step",
        remedy=f"build with --max_num_tokens {need} or more, or a smaller batch or tree",
        source=source,
    )


def batch_gate(*, max_batch_size: int, release: str, facts: ReleaseFacts) -> GateResult:
    """Whether the release is known to run more than one sequence at a time with Medusa."""
    source = "examples/medusa/README.md 0.8 and 0.9 (Python session only, no batch manager)"
    if max_batch_size == 1 or not facts.run.needs_py_session:
        return GateResult("batch", str(max_batch_size), "pass", "1 in early releases", source=source)
    return GateResult(
        "batch",
        str(max_batch_size),
        "silent",
        "1 in early releases",
        effect=f"in {release} Medusa runs in the Python session only, where more than one sequence has been reported "
        "to end in illegal memory access",
        remedy="check batch 1, 2 and the largest with unequal prompts, or use 0.11 or later",
        source=source,
    )


def model_class_gate(fault: Any, release: str) -> GateResult:
    """A fault of the release's own model class for this base, mended in a later release.

    Args:
        fault: a `Difference` of the family: name, effect, the first release `before` which it shows, source.
        release: the target.
    """
    return GateResult(
        "model class",
        f"{fault.name} in {release}",
        "silent",
        "a class that computes what the base does",
        effect=fault.effect,
        remedy=f"use {fault.before} or later",
        source=fault.source,
    )


def model_need_gate(need: Any, release: str) -> GateResult:
    """Something of the base that the release cannot express.

    Args:
        need: a `Need`: what, and the first release `since` which it is there, None for none.
        release: the target.
    """
    return GateResult(
        "model",
        f"{need.what} in {release}",
        "refused",
        f"{need.since} or later" if need.since else "no release takes this",
        effect="no checkpoint of this model makes sense for this release",
        remedy=f"use TensorRT-LLM {need.since} or later" if need.since else "take another model",
        source="the release's own model classes; see architectures/families",
    )


def window_gate(*, window: int, max_seq_len: int) -> GateResult:
    """A sliding window that sequences outgrow, for ports that name no release (the kernel gates have their own).

    The window is a setting of the runtime, not of the checkpoint: an engine without it attends to all of the past.

    Args:
        window: attention window of every layer, in tokens.
        max_seq_len: longest sequence wanted, in tokens.
    """
    return GateResult(
        "sliding window",
        f"{window} tokens, sequences up to {max_seq_len}",
        "silent",
        "max_seq_len at most the window",
        effect="beyond the window the engine attends to tokens that the base does not see",
        remedy=f"set max_seq_len to {window} or less",
        source="runtime/generation.py max_attention_window_size 0.11.0.dev2024062500",
    )
