"""Ports with a fault planted, and what a run of them leaves behind: the cases of the diagnosis benchmark."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.diagnosis.choice_faults import forbid_ngrams, penalise_repetition, subtract_penalty
from porting_kit.diagnosis.fault import DRAFTS, READING, Fault
from porting_kit.diagnosis.observation import Observation
from porting_kit.diagnosis.port_state import PortState
from porting_kit.medusa.decoding import generate_medusa
from porting_kit.medusa.generation import Generation
from tests.alignment.tiny_ports import TinyPort, make_port

NEW_TOKENS = 24
WINDOW = 24
PENALTIES = (1.1, 1.27, 1.5)
AMOUNTS = (0.9, 1.2, 0.6)
TOLERANCE = 1e-4
NOISE = 1e-4
"""Near-tie tolerance in logits and relative logit noise of the float32 ports: ten times what they show."""

SETTINGS: dict[str, dict[str, Any]] = {
    "bloom": {},
    "llama": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "max_position_embeddings": 64},
    "qwen2": {},
    "gptneox": {"rotary_emb_base": 500.0, "embedding_scale": 0.3},
}
FAMILIES = tuple(SETTINGS)
NOT_PLANTED = {
    "softcap_dropped_in_generation": "none of these families has a soft-cap on attention logits, as Gemma 2 has",
    "one_position_id_per_request": "none of these families has learned positions, as GPT-2 has; the patched module of "
    "one that has computes them itself",
    "learned_position_offset": "none of these families has learned positions with leading rows that no position uses, "
    "as OPT has; engines of OPT are made by hand in `tests/diagnosis/test_foreign_upstream.py`",
}
"""Kinds of the catalogue that none of these ports can have -> why."""


@dataclass(frozen=True)
class Case:
    """One planted fault on one port.

    Args:
        fault: what was planted.
        family, seed: of the port.
        state: the healthy port.
        observation: what the faulty one left, with logits and steps.
        carrier: cases of one carrier have one healthy port.
    """

    fault: Fault
    family: str
    seed: int
    state: PortState
    observation: Observation
    carrier: str = "plain"

    def with_logits(self) -> Observation:
        """Tokens and logits; steps only for faults that change nothing else."""
        return self.observation if self.fault.phase == DRAFTS else replace(self.observation, accepted_lengths=None)

    def tokens_alone(self) -> Observation:
        """What a file of token ids holds."""
        return replace(self.observation, accepted_lengths=None, logits=None, logits_noise=None)


def make_healthy(folder: Path, family: str, seed: int, **settings: Any) -> TinyPort:
    """A healthy port of a random base."""
    return make_port(folder / f"{family}-{seed}", family, seed=seed, **{**SETTINGS[family], **settings})


def find_carrier(fault: Fault, port: TinyPort) -> tuple[str, PortState] | None:
    """The port, changed so far that it can have the fault; None when its family cannot."""
    state = port.state
    if fault.name == "sliding_window_ignored":
        return "window", state.with_window(WINDOW)
    if fault.name == "tied_head_left_empty":
        embedding = state.tensors["transformer.vocab_embedding.weight"]
        return "tied", replace(state, tensors={**state.tensors, "lm_head.weight": embedding.clone()})
    if fault.name == "gelu_erf_for_tanh" and state.config["hidden_act"] == "gelu":
        return "tanh gelu", state.with_config(hidden_act="gelu_new")  # the same function under a name that says so
    if fault.name == "heads_take_base_activation" and fault.applies(state) is not None:
        return "relu heads", state.with_config(medusa_hidden_act="relu")
    return ("plain", state) if fault.applies(state) is None else None


def plant_all(port: TinyPort, other: TinyPort, family: str, seed: int) -> Iterator[Case]:
    """Every fault that the port can have, planted in the form that the seed chooses.

    Args:
        port: the healthy port.
        other: a port of the same family on another base, whose heads are foreign to this one.
        family, seed: for the record.
    """
    for fault in CATALOGUE:
        carrier = find_carrier(fault, port)
        if carrier is not None:
            name, state = carrier
            observation = observe_planted(fault, state, port.prompts, other.state, seed)
            yield Case(fault, family, seed, state, observation, name)


def observe_planted(
    fault: Fault, state: PortState, prompts: list[list[int]], other: PortState, seed: int
) -> Observation:
    """Run the port with the fault."""
    if fault.phase == READING:
        return _observe_reading(fault, state, prompts, seed)
    form = fault.forms[seed % len(fault.forms)]
    if fault.name == "heads_of_another_base":
        foreign = {name: other.tensors[name] for name in state.tensors if name.startswith("medusa_heads.")}
        return _observe(replace(state, tensors={**state.tensors, **foreign}).build(), state, prompts)
    return _observe(form(state).build(), state, prompts)


def _observe(model: Any, state: PortState, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> Observation:
    return _as_observation(generate_medusa(model, state.tree, prompts, new_tokens, keep_logits=True), prompts)


def _as_observation(generation: Generation, prompts: list[list[int]], **more: Any) -> Observation:
    return Observation(
        prompts,
        generation.tokens,
        TOLERANCE,
        accepted_lengths=generation.accepted_lengths,
        logits=generation.logits,
        logits_noise=NOISE,
        **more,
    )


def _observe_reading(fault: Fault, state: PortState, prompts: list[list[int]], seed: int) -> Observation:
    model = state.build()
    if fault.name == "doubled_start_token":
        doubled = [[prompt[0], *prompt] for prompt in prompts]
        return replace(_observe(model, state, doubled), prompts=prompts)
    if fault.name == "start_token_lost":
        return replace(_observe(model, state, [prompt[1:] for prompt in prompts]), prompts=prompts)
    if fault.name == "padding_read_as_text":
        longest = max(map(len, prompts))
        padded = [[seed % 2] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        return replace(_observe(model, state, padded), prompts=prompts)
    if fault.name == "state_left_from_previous_call":
        return _observe_leftovers(model, state, prompts)
    if fault.name == "end_token_handled_differently":
        healthy = generate_medusa(model, state.tree, prompts, NEW_TOKENS, keep_logits=True)
        stop = healthy.tokens[0][NEW_TOKENS // 2]
        ended = generate_medusa(model, state.tree, prompts, NEW_TOKENS, [stop], keep_logits=True)
        return _as_observation(ended, prompts, asked_tokens=NEW_TOKENS, end_ids=(2,))
    if fault.name == "padding_column_wins":
        return _observe_padding(model, state, prompts, seed)
    generator = torch.Generator().manual_seed(seed)
    rescore = _choose_rule(fault, seed)
    rows = [_choose_freely(model, state, prompt, fault, rescore, generator) for prompt in prompts]
    return Observation(
        prompts,
        [tokens for tokens, _ in rows],
        TOLERANCE,
        logits=[logits for _, logits in rows],
        logits_noise=NOISE,
    )


def _choose_rule(fault: Fault, seed: int) -> Any:
    if fault.name == "ngrams_forbidden":
        return forbid_ngrams(2)
    if seed % 2:
        return subtract_penalty(AMOUNTS[seed % len(AMOUNTS)], by_count=True, with_prompt=False)
    return penalise_repetition(PENALTIES[seed % len(PENALTIES)])


def _observe_leftovers(model: Any, state: PortState, prompts: list[list[int]]) -> Observation:
    """Each prompt is appended to the text of all before it."""
    found, text = [], []
    for prompt in prompts:
        text = [*text, *prompt]
        found.append(_observe(model, state, [text]))
        text = [*text, *found[-1].tokens[0]]
    return replace(
        found[0],
        prompts=prompts,
        tokens=[one.tokens[0] for one in found],
        logits=[one.logits[0] for one in found],
        accepted_lengths=[one.accepted_lengths[0] for one in found],
    )


def _observe_padding(model: Any, state: PortState, prompts: list[list[int]], seed: int) -> Observation:
    """Half of the texts end in an id of the padding, after which the run says anything."""
    healthy = _observe(model, state, prompts)
    V = int(state.config["vocab_size"])
    generator = torch.Generator().manual_seed(seed)
    tokens = copy.deepcopy([list(row) for row in healthy.tokens])
    for row in tokens[::2]:
        place = int(torch.randint(2, len(row) - 2, (1,), generator=generator))
        junk = torch.randint(0, V, (len(row) - place - 1,), generator=generator).tolist()
        row[place:] = [V + int(torch.randint(0, 20, (1,), generator=generator)), *junk]
    return replace(healthy, tokens=tokens)


@torch.inference_mode()
def _choose_freely(
    model: Any, state: PortState, prompt: list[int], fault: Fault, rescore: Any, generator: torch.Generator
) -> tuple[list[int], torch.Tensor]:
    """One token a step, chosen by a rule that is not greedy; the logits are the model's own."""
    tokens: list[int] = []
    rows = []
    for _ in range(NEW_TOKENS):
        text = [*prompt, *tokens]
        cache = model.new_cache(1, len(text) + 1)
        logits = model.prefill([torch.tensor(text)], cache).logits[:, : int(state.config["vocab_size"])]
        rows.append(logits[0])
        if fault.name == "tokens_sampled":
            best = logits[0].topk(50)
            drawn = torch.multinomial(torch.softmax(best.values / 1.5, -1), 1, generator=generator)
            tokens.append(int(best.indices[drawn]))
        else:
            places = logits.double().expand(len(tokens) + 1, -1)
            tokens.append(int(rescore(state, places, prompt, [*tokens, 0])[-1].argmax()))
    return tokens, torch.stack(rows)
