"""The greedy settings that both sides of a comparison run with, and the ids that end a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GREEDY_SETTINGS: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
"""What both sides run with, whatever the model's generation config says."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "temperature": (1.0,),
    "top_k": (0, 50),  # 50 is transformers' own default and has no effect without sampling
    "top_p": (1.0,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
}


@dataclass(frozen=True)
class GenerationSettings:
    """The settings that both sides of a comparison run with.

    Args:
        effective: name -> value in force.
        overridden: name -> value that the model's own files asked for and that is not used.
        end_ids: every id that ends a text, from config, generation config and tokenizer.
        end_id_sources: id -> the files that name it.
    """

    effective: dict[str, Any]
    overridden: dict[str, Any]
    end_ids: tuple[int, ...]
    end_id_sources: dict[int, tuple[str, ...]]

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        sources = {str(end_id): list(names) for end_id, names in self.end_id_sources.items()}
        return {**vars(self), "end_ids": list(self.end_ids), "end_id_sources": sources}


def read_settings(config: Any, generation_config: Any = None, tokenizer: Any = None) -> GenerationSettings:
    """The greedy settings, what they override in the model's generation config, and every end id.

    End ids that only one of the three files names, and a generation config that samples, both make an engine and
    transformers differ although the port is right.
    """
    asked = generation_config.to_diff_dict() if generation_config is not None else {}
    overridden = {
        name: asked[name]
        for name, value in GREEDY_SETTINGS.items()
        if name in asked and asked[name] != value and asked[name] not in _NEUTRAL.get(name, (None,))
    }
    sources: dict[int, list[str]] = {}
    for name, holder in (("config", config), ("generation config", generation_config), ("tokenizer", tokenizer)):
        found = getattr(holder, "eos_token_id", None)
        for end_id in found if isinstance(found, list | tuple) else [found]:
            if end_id is not None and end_id >= 0:
                sources.setdefault(int(end_id), []).append(name)
    named = {end_id: tuple(dict.fromkeys(names)) for end_id, names in sorted(sources.items())}
    return GenerationSettings(dict(GREEDY_SETTINGS), overridden, tuple(named), named)
