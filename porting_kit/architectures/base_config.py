"""The base model's config.json in one normalised form, whatever spelling it came in.

Every attribute remembers where it came from (a key, a rule, a default), and every key that nobody read is known, so
that the config table can account for both sides. Two spellings that disagree are refused. This module reads one small
JSON file (or takes a dict), never weights, and imports neither torch nor transformers.

Letters: E hidden size, D head size, H query heads, K key/value heads, L layers, I MLP width, V vocabulary, X experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from porting_kit.architectures.config_reader import LETTER_OF, Origin, normalise_config
from porting_kit.architectures.family import Family, LayerTraits, Refusal, find_family, load_families
from porting_kit.architectures.releases import release_key
from porting_kit.architectures.rules import condition_terms
from porting_kit.errors import BaseModelError
from porting_kit.whole_files import read_json


@dataclass(frozen=True)
class BaseConfig:
    """A base model's settings. See the module for letters; sizes are counts, `rope_base` is theta.

    Args:
        family: name of the family (`definition` gives the Family itself).
        architecture: TensorRT-LLM's architecture name, written into the checkpoint.
        source_architecture: the class name in the Hugging Face config, None when it names none.
        position_kind: TensorRT-LLM's position embedding type.
        norm_kind: "rms" or "layer".
        rope_share: part of each head that is rotated.
        q_scaling: the attention logit is divided by q_scaling * sqrt(D).
        output_scale: factor on the logits that goes into the output matrix.
        embedding_scale: factor on the embeddings that the class applies.
        switches: the family's switches; None where the config is silent.
        layers: what each layer has of its own; empty where layers are alike.
        refusals: settings TensorRT-LLM's class cannot follow; `require_supported` raises for them.
        origins: attribute -> where it came from.
        unread_keys: config keys that no attribute, field or requirement read, and that matter at run time.
        raw: the config as read (text part).
    """

    family: str
    architecture: str
    source_architecture: str | None
    model_type: str | None
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    position_kind: str
    norm_kind: str
    norm_eps: float
    activation: str | None
    tied: bool
    dtype: str | None
    rope_base: float
    rope_scaling: Mapping[str, object] | None
    rope_share: float
    rope_local_base: float | None
    rotary_dim: int
    q_scaling: float
    attention_softcap: float | None
    final_softcap: float | None
    sliding_window: int | None
    num_experts: int | None
    experts_per_token: int | None
    expert_size: int | None
    shared_expert_size: int | None
    embedding_size: int | None
    output_scale: float = 1.0
    embedding_scale: float | None = None
    switches: Mapping[str, bool | None] = field(default_factory=dict)
    layers: tuple[LayerTraits, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    unread_keys: tuple[str, ...] = ()
    where: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def definition(self) -> Family:
        """The family's rules and traits."""
        return load_families()[self.family]

    @property
    def dims(self) -> dict[str, int]:
        """Letter -> size, for shape expressions. Letters the model has no size for are absent."""
        values = {letter: getattr(self, name) for name, letter in LETTER_OF.items()}
        return {letter: value for letter, value in values.items() if value is not None}

    @property
    def length_threshold(self) -> int | None:
        """Tokens beyond which the rotary factors of all positions are others; None where they never change.

        Source: `dynamic_rope_update` in transformers/modeling_rope_utils.py, for the kinds longrope and dynamic.
        """
        scaling = self.rope_scaling or {}
        if scaling.get("type") not in ("longrope", "dynamic"):
            return None
        original = scaling.get("original_max_position_embeddings") or self.raw.get("original_max_position_embeddings")
        return int(original or self.max_positions or 0) or None

    def layer_dims(self, layer: int | None) -> dict[str, int]:
        """The same for one layer; None is outside the layers."""
        return self.dims if layer is None or not self.layers else self.dims | dict(self.layers[layer].sizes)

    @property
    def written_layers(self) -> list[dict[str, Any]]:
        """The layers' entries in the checkpoint's config.json."""
        return [dict(layer.written) for layer in self.layers]

    def switch(self, name: str) -> bool:
        """A switch's value; the family's default where the config is silent."""
        value = self.switches[name]
        return self.definition.switches[name].default if value is None else value

    def applies(self, condition: str | None, layer: int | None = None) -> bool:
        """Whether a rule's `when` holds, in one layer where layers differ."""
        own = self.layers[layer].switches if self.layers and layer is not None else {}
        return all(own.get(name, self.switch(name)) == wanted for name, wanted in condition_terms(condition))

    def with_evidence(self, tensor_names: Collection[str]) -> BaseConfig:
        """Settle the switches on which the config is silent by the tensors that are there."""
        settled = dict(self.switches)
        origins = dict(self.origins)
        for name, rule in self.definition.switches.items():
            if settled[name] is None and rule.evidence is not None:
                settled[name] = rule.evidence in tensor_names
                presence = "present" if settled[name] else "absent"
                origins[f"switch:{name}"] = Origin("derived", None, f"tensor {rule.evidence} is {presence}")
        return replace(self, switches=settled, origins=origins)

    def for_release(self, release: str | None) -> BaseConfig:
        """Settle what the TensorRT-LLM release decides: some switches, and the architecture's name in its MODEL_MAP.

        None and texts that are no release number keep the defaults.
        """
        asked = release_key(release) if release else None
        settled, origins = dict(self.switches), dict(self.origins)
        for name, rule in self.definition.switches.items():
            if rule.since is None and rule.until is None:
                continue
            settled[name] = rule.default if asked is None else rule.holds_for(asked)
            note = "no release given" if asked is None else f"TensorRT-LLM {release}"
            origins[f"switch:{name}"] = Origin("defaulted" if asked is None else "derived", None, note)
        architecture = self.architecture
        if asked is not None and self.definition.renamed is not None:
            since, older = self.definition.renamed
            architecture = older if asked < release_key(since) else architecture
        return replace(self, architecture=architecture, switches=settled, origins=origins)

    def require_supported(self) -> None:
        """Raise BaseModelError naming every setting that TensorRT-LLM's class cannot follow."""
        if not self.refusals:
            return
        first = self.refusals[0]
        raise BaseModelError(
            f"TensorRT-LLM's {self.architecture} has no counterpart for {first.key} = {first.value!r}: {first.effect}",
            expected="settings that the class has",
            found=f"{first.key} = {first.value!r}",
            where=f"{self.where}; {first.source}",
            items=[f"{r.key} = {r.value!r} ({r.effect})" for r in self.refusals[1:]],
            next_step="the model would build and run with different arithmetic; it cannot be ported as it is",
        )


def read_base_config(path: str | Path | Mapping[str, Any], tensor_names: Collection[str] | None = None) -> BaseConfig:
    """Read and normalise a base model's config.

    Args:
        path: a model folder, a config.json, a GGUF file, or the config as a dict.
        tensor_names: names in the weight files, where they are at hand: they settle what the config leaves open.

    Raises:
        BaseModelError: no config, not a decoder of a known family, a value missing, or two spellings that disagree.
    """
    raw, where = _load_raw(path)
    raw = _text_part(raw, where)
    family = find_family(raw, tensor_names)
    base = BaseConfig(**normalise_config(raw, family, where))
    return base if tensor_names is None else base.with_evidence(tensor_names)


def name_base(path: Path) -> str:
    """What a base is called where its name is all that is kept: its folder's name, a GGUF file's without the ending."""
    path = path.absolute()
    return path.stem if path.suffix == ".gguf" else path.name


def _load_raw(path: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(path, Mapping):
        return dict(path), "config"
    path = Path(path)
    if path.suffix == ".gguf":
        from porting_kit.architectures.gguf_header import read_gguf_config

        return read_gguf_config(path), str(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        gguf = sorted(path.glob("*.gguf")) if path.is_dir() else []
        if len(gguf) == 1:
            return _load_raw(gguf[0])
        raise BaseModelError(
            "the base model has no config.json",
            expected="a Hugging Face model folder, its config.json, or a .gguf file",
            found="no such folder" if not path.exists() else "a folder without config.json",
            where=path,
            next_step="correct base in the port file, or fetch config.json",
        )
    try:
        raw = read_json(file)
    except ValueError as error:
        raise BaseModelError(
            "config.json is not JSON",
            expected="a JSON object",
            found=error,
            where=file,
            next_step="fetch config.json again",
        ) from None
    if not isinstance(raw, dict):
        raise BaseModelError(
            "config.json is not a JSON object",
            expected="a JSON object",
            found=type(raw).__name__,
            where=file,
            next_step="fetch config.json again",
        )
    if "base_model_name_or_path" in raw and "hidden_size" not in raw and "model_type" not in raw:
        raise BaseModelError(
            "this folder holds Medusa heads only, not a base model",
            expected="the base model's own folder",
            found=f"a head config that names {raw['base_model_name_or_path']!r} as its base",
            where=file,
            next_step="pass the base's folder as base and this one as heads",
        )
    return raw, str(file)


def _text_part(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The decoder's own settings of a config that nests them."""
    inner = raw.get("text_config") or raw.get("llm_config")
    if not isinstance(inner, dict) or "hidden_size" in raw:
        return raw
    merged = {key: value for key, value in raw.items() if key in ("dtype", "torch_dtype", "tie_word_embeddings")}
    merged |= inner
    merged.setdefault("architectures", raw.get("architectures"))
    return merged
