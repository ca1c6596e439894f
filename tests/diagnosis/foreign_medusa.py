"""Decoding with a draft tree, written again: no cache, every entry that ever was computed goes through the model anew.

An entry is a token with a position and the entries that it saw. What a cache holds is a list of entries, so that rows
left in place after a step are the entries of rejected drafts. Faults of tree and cache are changes of these lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load_file

from porting_kit.alignment.reference import load_reference
from tests.alignment.tiny_ports import NUM_HEADS, TinyPort

Path = tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """How steps are made.

    Args:
        name: in words.
        accepts: as in `foreign_engines.Engine`.
        see: bool [N, N], which node sees which -> the same, changed.
        place: depths of the nodes -> positions behind the root.
        heads: which head proposes for each depth.
        layers: whose residual layer each head runs.
        moves: the accepted path's rows move behind the past; False leaves them where they are.
        bonus_from_root: the token behind the accepted drafts is read at the root.
        choices: another tree than the port's.
    """

    name: str
    accepts: tuple[str | None, ...]
    see: Callable[[torch.Tensor], torch.Tensor] | None = None
    place: Callable[[list[int]], list[int]] | None = None
    heads: tuple[int, ...] = tuple(range(NUM_HEADS))
    layers: tuple[int, ...] = tuple(range(NUM_HEADS))
    moves: bool = True
    bonus_from_root: bool = False
    choices: tuple[Path, ...] | None = None


@dataclass(frozen=True)
class Steps:
    """What the loop emitted: tokens, logits [n, V] that chose them, and tokens of each step, per prompt."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    accepted_lengths: list[list[int]]


@torch.inference_mode()
def run_loop(port: TinyPort, loop: Loop, new_tokens: int) -> Steps:
    """Decode every prompt of the port."""
    model = load_reference(port.folder / "base").model
    heads = load_file(port.folder / "heads" / "medusa_lm_head.safetensors")
    choices = loop.choices or tuple(map(tuple, port.state.tree.choices()))
    nodes: list[Path] = [(), *sorted(map(tuple, choices), key=lambda path: (len(path), path))]
    found = Steps([], [], [])
    for prompt in port.prompts:
        tokens, logits, lengths = _decode(model, heads, nodes, loop, prompt, new_tokens)
        found.tokens.append(tokens[:new_tokens])
        found.logits.append(torch.stack(logits[:new_tokens]))
        found.accepted_lengths.append(lengths)
    return found


def _decode(
    model: Any, heads: dict[str, torch.Tensor], nodes: list[Path], loop: Loop, prompt: Sequence[int], new_tokens: int
) -> tuple[list[int], list[torch.Tensor], list[int]]:
    N, depths = len(nodes), [len(path) for path in nodes]
    sees = torch.tensor([[path[: len(other)] == other for other in nodes] for path in nodes])
    sees = sees if loop.see is None else loop.see(sees)
    places = depths if loop.place is None else loop.place(depths)
    tokens, positions = list(prompt), list(range(len(prompt)))
    seen: list[list[int]] = [list(range(entry + 1)) for entry in range(len(prompt))]
    cache = list(range(len(prompt)))
    logits, hidden = _compute(model, tokens, positions, seen)
    emitted, rows, lengths = [int(logits[-1].argmax())], [logits[-1]], []
    state = hidden[-1]
    while len(emitted) < new_tokens:
        drafts = [_propose(heads, state, loop.heads[head], loop.layers[head]) for head in range(NUM_HEADS)]
        start, length = len(tokens), len(cache)
        tokens += [emitted[-1], *(drafts[len(path) - 1][path[-1]] for path in nodes[1:])]
        positions += [length + place for place in places]
        seen += [[*cache, *(start + other for other in range(N) if sees[node, other])] for node in range(N)]
        logits, hidden = _compute(model, tokens, positions, seen)
        best = logits[start:].argmax(-1).tolist()
        path = _accept(nodes, tokens[start:], best)
        chosen = [start + node for node in path]
        read = [*chosen[:-1], start if loop.bonus_from_root else chosen[-1]]
        emitted += [int(logits[entry].argmax()) for entry in read]
        rows += [logits[entry] for entry in read]
        lengths.append(len(path))
        state = hidden[chosen[-1]]
        cache += chosen if loop.moves else [start + row for row in range(len(path))]
    return emitted, rows, lengths


def _compute(
    model: Any, tokens: list[int], positions: list[int], seen: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, V] and hidden states [S, E] of all entries, each with what it saw."""
    mask = torch.full((1, 1, len(tokens), len(tokens)), torch.finfo(torch.float32).min)
    for entry, others in enumerate(seen):
        mask[0, 0, entry, others] = 0
    output = model.model(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask,
        use_cache=False,
    )
    hidden = output.last_hidden_state[0]
    return model.lm_head(hidden), hidden


def _propose(heads: dict[str, torch.Tensor], state: torch.Tensor, head: int, layer: int) -> list[int]:
    """Tokens of one head, the likeliest first."""
    weight, bias = heads[f"{layer}.0.linear.weight"], heads[f"{layer}.0.linear.bias"]
    inner = state + torch.nn.functional.silu(weight @ state + bias)
    return (heads[f"{head}.1.weight"] @ inner).topk(16).indices.tolist()


def _accept(nodes: list[Path], drafts: list[int], best: list[int]) -> list[int]:
    """The longest path whose every draft is the best token of its parent; the first of equals."""
    index = {path: node for node, path in enumerate(nodes)}
    longest = [0]
    for path in nodes[1:]:
        way = [index[path[:depth]] for depth in range(len(path) + 1)]
        steps = pairwise(way)
        if all(drafts[child] == best[parent] for parent, child in steps) and len(way) > len(longest):
            longest = way
    return longest


def _move_first(depths: list[int]) -> list[int]:
    return [0] * len(depths)


def _other_tree(sees: torch.Tensor) -> torch.Tensor:
    """Ancestors in a tree that has nothing to do with this one: node n hangs under n // 3."""
    N = len(sees)
    other = torch.eye(N, dtype=torch.bool)
    for node in range(1, N):
        other[node] |= other[node // 3]
    return other


LOOPS = (
    Loop("right", ()),
    Loop("mask causal", ("mask_causal",), see=lambda sees: torch.ones_like(sees).tril()),
    Loop("mask transposed", ("mask_transposed",), see=lambda sees: sees.T),
    Loop("mask bits reversed", ("mask_bits_reversed",), see=lambda sees: sees.flip(-1)),
    Loop("mask of another tree", (None, "mask_of_another_tree"), see=_other_tree),
    Loop("positions all the root's", ("position_offsets_ignored",), place=_move_first),
    Loop("positions numbered", ("position_offsets_numbered",), place=lambda depths: list(range(len(depths)))),
    Loop("positions one too far", (None,), place=lambda depths: [depth + 1 for depth in depths]),
    Loop("rows not moved", ("accepted_kv_not_moved",), moves=False),
    Loop("bonus read at the root", ("bonus_token_from_wrong_node",), bonus_from_root=True),
    Loop("heads shifted by one", ("heads_shifted_by_one",), heads=(1, 2, 0), layers=(1, 2, 0)),
    Loop("heads in reverse", ("heads_shifted_by_one",), heads=(2, 1, 0), layers=(2, 1, 0)),
    Loop("layers of the first head", ("head_layers_shared",), layers=(0, 0, 0)),
    Loop("another tree altogether", (None,), choices=((0,), (0, 0), (0, 0, 0))),
    Loop("the first draft alone", (None,), choices=((0,),)),
)
