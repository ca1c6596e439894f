"""Medusa decoding with the reference project's own functions around a Hugging Face model: no code of this project's.

`medusa/model/utils.py` of FasterDecoding/Medusa is loaded from a copy that the caller names; it makes the buffers and
candidates, judges the paths and updates the text. The model and its cache are Hugging Face's, the tree's mask a plain
four-dimensional one. This file's own part is the model call alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def load_reference_utils(folder: Path) -> Any:
    """The module medusa/model/utils.py of a checkout."""
    file = folder / "medusa" / "model" / "utils.py"
    spec = importlib.util.spec_from_file_location("medusa_reference_utils", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class ReferenceRun:
    """Emitted tokens, and tokens accepted in each step."""

    tokens: list[int]
    accepted_lengths: list[int]


class ReferenceModel:
    """What the reference's functions call: a base with heads over a cache that is cut back after each step."""

    def __init__(self, base: Any, heads: torch.nn.Module) -> None:
        self.base, self.heads = base, heads
        self.cache: Any = None

    def run(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> Any:
        """(head logits [M, 1, S, V], logits [1, S, V]) of new tokens [1, S] behind the cache."""
        output = self.base.base_model(
            input_ids=tokens, past_key_values=self.cache, attention_mask=mask, position_ids=positions, use_cache=True
        )
        self.cache = output.past_key_values
        matrix = self.base.get_output_embeddings()
        return self.heads(output.last_hidden_state, matrix), matrix(output.last_hidden_state)


@torch.inference_mode()
def decode_with_reference(
    utils: Any, base: Any, heads: torch.nn.Module, choices: list[list[int]], prompt: Sequence[int], new_tokens: int
) -> ReferenceRun:
    """Greedy Medusa decoding of one prompt, until at least `new_tokens` tokens are there."""
    from transformers import DynamicCache

    buffers = utils.generate_medusa_buffers(choices, device="cpu")
    nodes = buffers["medusa_attn_mask"].shape[-1]
    model = ReferenceModel(base, heads)
    model.cache = DynamicCache()
    ids = torch.tensor([list(prompt)])
    medusa_logits, logits = model.run(ids)
    emitted = [int(logits[0, -1].argmax())]
    lengths: list[int] = []
    while len(emitted) < new_tokens:
        candidates, tree_candidates = utils.generate_candidates(
            medusa_logits, logits, buffers["tree_indices"], buffers["retrieve_indices"], temperature=0
        )
        past = ids.shape[1]
        visible = torch.ones(1, 1, nodes, past + nodes, dtype=torch.bool)
        visible[..., past:] = buffers["medusa_attn_mask"].bool()
        bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        positions = (buffers["medusa_position_ids"] + past).unsqueeze(0)
        tree_medusa, tree_logits = model.run(tree_candidates, bias, positions)
        paths = buffers["retrieve_indices"]
        path_logits, path_medusa = tree_logits[0, paths], tree_medusa[:, 0, paths]
        best, accepted = utils.evaluate_posterior(path_logits, candidates, temperature=0)
        # The reference's own update of the text; its copy of keys and values is given stand-ins and redone below.
        keys = torch.zeros(1, past + nodes, 1)
        ids, logits, medusa_logits, _ = utils.update_inference_inputs(
            ids, candidates, best, accepted, paths, None, path_logits, path_medusa, 0, keys, torch.zeros(1)
        )
        keep = torch.cat([torch.arange(past), paths[best, : accepted + 1] + past])
        for layer in model.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        lengths.append(int(accepted) + 1)
        # The root is the base's choice of the step before: what this step adds ends with the base's next choice.
        emitted += [*ids[0, past + 1 :].tolist(), int(logits[0, -1].argmax())]
    return ReferenceRun(emitted, lengths)
