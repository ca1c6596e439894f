"""The checkpoint's config.json, and the table that says where each of its fields came from.

Each row is kept (a key of the source, same meaning), derived (worked out), defaulted (the source is silent), or
dropped (the source states something the checkpoint has no field for). Nothing is defaulted without a row that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.config_reader import lookup
from porting_kit.architectures.fields import REQUIRED, Field
from porting_kit.architectures.names import evaluate_dim
from porting_kit.architectures.releases import release_key
from porting_kit.errors import BaseModelError, ConversionError
from porting_kit.releases.build_flags import draft_limit_key

if TYPE_CHECKING:
    from porting_kit.architectures.base_config import BaseConfig
    from porting_kit.conversion.heads import HeadSet

MAX_DRAFT_TOKENS = 63
"""With the root 64 tokens: two words of a packed mask, the most that the kernels of any release were built for; also
TensorRT-LLM's own default (medusa/config.py 0.13.0.dev2024090300)."""
ELSEWHERE = {
    "sliding_window": "a run-time option: max_attention_window_size",
    "layer_types": "layers do not differ in TensorRT-LLM's class",
}


@dataclass(frozen=True)
class FieldRow:
    """One row of the table.

    Args:
        target: key in the checkpoint's config.json, None when dropped.
        value: the value written; for a dropped row the source's value.
        source: key in the source's config, None when there is none.
        kind: "kept", "derived", "defaulted" or "dropped".
        note: how or why.
    """

    target: str | None
    value: Any
    source: str | None
    kind: str
    note: str = ""


def build_config(
    base: BaseConfig,
    *,
    dtype: str,
    tp_size: int = 1,
    pp_size: int = 1,
    heads: HeadSet | None = None,
    max_draft_len: int | None = None,
    release: str | None = None,
) -> tuple[dict[str, Any], tuple[FieldRow, ...]]:
    """The config to write, and its table.

    Args:
        base: the base's settings, switches settled.
        dtype: dtype of the checkpoint.
        heads: adds the Medusa keys.
        max_draft_len: draft tokens of the largest tree; 63 when None.
        release: TensorRT-LLM release it is for; the first ones read the draft limit under another name.

    Raises:
        BaseModelError: the source lacks a key that the runtime class needs.
    """
    rows = [(row, _resolve(row, base)) for row in base.definition.all_fields if base.applies(row.when)]
    rows = [resolved for row, resolved in rows if not (row.optional and resolved.value is None)]
    rows.append(_dtype_row(base, dtype))
    written = {row.target for row in rows}
    whole = [
        FieldRow("logits_dtype", "float32", None, "derived", "logits are always float32"),
        _embedding_row(base, tp_size),
        FieldRow("embedding_sharding_dim", 0, None, "derived", "not sharded"),
        FieldRow("share_embedding_table", False, None, "derived", "the output matrix is written out"),
        FieldRow("quantization", {"quant_algo": None, "kv_cache_quant_algo": None}, None, "derived", "not quantised"),
        FieldRow(
            "mapping",
            {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size},
            None,
            "derived",
            "as asked for",
        ),
    ]
    rows += [row for row in whole if row.target not in written]
    if heads is not None:
        rows += list_head_rows(heads, max_draft_len, release)
    rows += [FieldRow(None, base.raw[key], key, "dropped", _why_dropped(key)) for key in base.unread_keys]
    rows += _unwritten_rows(base)
    return set_fields({}, rows), tuple(rows)


def find_changed_fields(config: Mapping[str, Any], rows: Sequence[FieldRow]) -> list[tuple[FieldRow, Any]]:
    """The rows whose value is not the one in a config.json, with what is there; None where there is nothing."""
    found = [(row, lookup(config, row.target)) for row in rows if row.target is not None]
    return [(row, value) for row, value in found if value != json.loads(json.dumps(row.value))]


def require_draft_limit(max_draft_len: int) -> None:
    """Refuse a number of draft tokens that no engine can verify in one step.

    Raises:
        ConversionError: below 1 or above 63.
    """
    if not 1 <= max_draft_len <= MAX_DRAFT_TOKENS:
        raise ConversionError(
            "this number of draft tokens cannot be verified in one step",
            expected=f"max_draft_len from 1 to {MAX_DRAFT_TOKENS}: with the root, 64 tokens fill the packed mask",
            found=max_draft_len,
            next_step="name the number of nodes of the largest tree, without its root",
        )


def list_head_rows(heads: HeadSet, max_draft_len: int | None, release: str | None) -> list[FieldRow]:
    """The keys that Medusa heads add; arguments as for `build_config`, and ConversionError for the limit."""
    draft = MAX_DRAFT_TOKENS if max_draft_len is None else max_draft_len
    require_draft_limit(draft)
    kind = "defaulted" if max_draft_len is None else "derived"
    # The bundled definitions have a name in place of a release number.
    is_numbered = release is not None and release_key(release) is not None
    names = dict.fromkeys(("max_draft_len", *([draft_limit_key(release)] if is_numbered else [])))
    return [
        FieldRow("num_medusa_heads", heads.num_heads, None, "derived", "counted from the head tensors"),
        FieldRow("num_medusa_layers", heads.num_layers, None, "derived", "counted from the head tensors"),
        FieldRow("medusa_hidden_act", "silu", None, "derived", "heads are trained with SiLU, whatever the base has"),
        *(FieldRow(name, draft, None, kind, "draft tokens of the largest tree") for name in names),
    ]


def set_fields(config: dict[str, Any], rows: Sequence[FieldRow]) -> dict[str, Any]:
    """Write rows into a config, dotted targets as mappings; returns it."""
    for row in rows:
        if row.target is not None:
            *path, last = row.target.split(".")
            place = config
            for part in path:
                place = place.setdefault(part, {})
            place[last] = row.value
    return config


def _embedding_row(base: BaseConfig, tp_size: int) -> FieldRow:
    rules = [rule for rule in base.definition.rules if rule.target == "transformer.vocab_embedding.weight"]
    split = tp_size > 1 and any(rule.shard.dim == 0 for rule in rules if base.applies(rule.when))
    note = "the embedding is split over the ranks" if split else "embeddings are whole on every rank"
    return FieldRow("use_parallel_embedding", split, None, "derived", note)


def _why_dropped(key: str) -> str:
    return ELSEWHERE.get(key, "no field of the checkpoint, and not known to this family")


def _resolve(row: Field, base: BaseConfig) -> FieldRow:
    if row.kind == "constant":
        return FieldRow(row.target, row.value, None, "derived", row.note)
    if row.kind == "size":
        return FieldRow(row.target, evaluate_dim(row.source, base.dims), None, "derived", row.note)
    if row.kind == "switch":
        origin = base.origins.get(f"switch:{row.source}")
        kind, source, note = (origin.kind, origin.key, origin.note) if origin else ("defaulted", None, "")
        value = base.switch(row.source)
        value = row.mapping[value] if row.mapping else value
        return FieldRow(row.target, value, source, kind, row.note or note)
    if row.kind == "key":
        value = lookup(base.raw, row.source)
        if value is None and row.default is REQUIRED:
            raise BaseModelError(
                f"the config lacks {row.source}",
                expected=f"the value that becomes {row.target}",
                found="no such key",
                where=base.where,
                next_step="complete config.json; nothing is guessed",
            )
        kind = "defaulted" if value is None else "kept"
        value = row.default if value is None else value
        return _mapped(row, value, row.source if kind == "kept" else None, kind, row.note)
    name, *path = row.source.split(".")
    origin = base.origins.get(name)
    kind, source, note = (origin.kind, origin.key, origin.note) if origin else ("derived", None, "")
    value = getattr(base, name)
    value = lookup(value or {}, ".".join(path)) if path else value
    return _mapped(row, value, source, kind, row.note or note)


def _mapped(row: Field, value: Any, source: str | None, kind: str, note: str) -> FieldRow:
    if row.mapping and isinstance(value, str) and value in row.mapping and row.mapping[value] != value:
        return FieldRow(row.target, row.mapping[value], source, "derived", f"{value} by another name")
    return FieldRow(row.target, dict(value) if hasattr(value, "items") else value, source, kind, note)


def _dtype_row(base: BaseConfig, dtype: str) -> FieldRow:
    if base.dtype == dtype:
        return FieldRow("dtype", dtype, base.origins["dtype"].key, "kept")
    return FieldRow("dtype", dtype, base.origins["dtype"].key, "derived", f"as asked for; the source is {base.dtype}")


def _unwritten_rows(base: BaseConfig) -> list[FieldRow]:
    """Attributes that were read, mean something at run time, and have no field."""
    written = {row.source for row in base.definition.all_fields if row.kind == "attribute"}
    rows = []
    for name, value in (("sliding_window", base.sliding_window), ("final_softcap", base.final_softcap)):
        origin = base.origins.get(name)
        if value is not None and name not in written and origin is not None and origin.key is not None:
            rows.append(FieldRow(None, value, origin.key, "dropped", _why_dropped(name)))
    return rows
