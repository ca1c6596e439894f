"""Do heads fit a base: their agreement with what the base itself says next, against chance, without an engine.

One head at a time is read, asked at every position of the base's own greedy continuations, and dropped. Asked is not
only the token that it should name: agreement with the tokens before and after tells shifted heads, other activations
tell a wrong one, and the shape of the weights tells heads that were trained for another base from heads that were never
trained. This module knows tensors and names, no file layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional

from porting_kit.errors import HeadsError
from porting_kit.medusa.head_ranks import CHUNK_POSITIONS, UNKNOWN_RANK
from porting_kit.medusa.heads import apply_output_matrix
from porting_kit.medusa.self_distillation import IGNORED, Continuations

TRAINED_ACTIVATION = "silu"
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "none": lambda states: states,
}

NOISE_SPREAD = 0.15
"""A random matrix's largest singular value is what its entries' size predicts, within this share (Marchenko and
Pastur). Of trained heads it was 2.0 to 2.8 times that (SmolLM2, bloom-mini)."""

MARGIN = 0.02
"""Agreement this far above chance, beyond three standard errors, counts as agreement. The errors are those of as many
positions as there are different tokens: positions that repeat a token are no new evidence."""

LARGEST_ERROR = 0.25
"""Where three standard errors of chance are more than this, heads that fit would not stand out either."""

OWN_TOKEN = 0.9
"""A head that names the base's own next token this often was trained for it, or hardly at all: layers of zeros do."""

CLEAR_GAIN = 1.5
"""Agreement above chance that another activation must reach, as a multiple of SiLU's, where SiLU's is clear already."""


class HeadTensors(Protocol):
    """`conversion.heads.HeadSet`, as far as it matters here."""

    num_heads: int
    num_layers: int

    @property
    def own_output(self) -> bool: ...
    def read(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class HeadReading:
    """What one head turned out to be.

    Args:
        head: counted from 0.
        verdict: `fits`, `random`, `untrained`, `foreign`, `shifted`, `wrong activation`, or `undecided`: on too few
            different tokens to say more.
        top1, top5: agreement with the token that the head should name.
        chance1, chance5: agreement of the tokens that are most frequent there, always named.
        positions: how many were asked.
        by_offset: top-1 agreement with the base's own next token (0), the one after (1), ...; its own is head + 1.
        by_activation: top-1 agreement with each activation in place of SiLU.
        spread: largest singular value of the residual layers over a random matrix's of the same size.
        sentence: the verdict in words.
    """

    head: int
    verdict: str
    top1: float
    top5: float
    chance1: float
    chance5: float
    positions: int
    by_offset: tuple[float, ...]
    by_activation: dict[str, float]
    spread: float
    sentence: str


@dataclass(frozen=True)
class HeadFit:
    """All heads of a file on one base.

    Args:
        readings: one per head.
        ranks: int64 [rows, C - 1, M] as of `head_ranks.measure_ranks`.
        notes: what else was found: heads that share layers.
    """

    readings: tuple[HeadReading, ...]
    ranks: torch.Tensor
    notes: tuple[str, ...]

    @property
    def wrong(self) -> tuple[HeadReading, ...]:
        """The heads that do not fit, those left undecided apart."""
        return tuple(reading for reading in self.readings if reading.verdict not in ("fits", "undecided"))

    @property
    def fits(self) -> bool:
        """Whether the first head fits and no other one is wrong."""
        return self.readings[0].verdict == "fits" and not self.wrong

    def as_dict(self) -> dict[str, object]:
        """Figures, without the ranks."""
        return {"heads": [asdict(reading) for reading in self.readings], "notes": list(self.notes)}


@torch.no_grad()
def read_fit(heads: HeadTensors, continuations: Continuations, output_matrix: torch.nn.Module) -> HeadFit:
    """Ask every head at every position.

    Args:
        heads: the heads; tensors are read when their head is asked.
        continuations: the base's own, see self_distillation.
        output_matrix: the base's `lm_head`, for heads without their own.

    Raises:
        HeadsError: a head gives values that are not finite, or there is no position to ask at.
    """
    M = heads.num_heads
    hidden = continuations.hidden.flatten(0, 1)
    # Column j: the token j places after the base's own next one, up to one past the last head's.
    following = torch.stack([_later_tokens(continuations.tokens, j) for j in range(M + 2)], dim=-1).flatten(0, 1)
    if not bool((following[:, M] != IGNORED).any()):
        raise HeadsError(
            "the base's continuations are too short to ask the heads",
            expected=f"at least {M + 1} tokens before the end of a text",
            found=f"{continuations.rows} texts, all shorter",
            next_step="ask for more tokens (--new-tokens), or give other prompts",
        )
    readings, ranks, digests = [], [], {}
    notes: list[str] = []
    for head in range(M):
        layers, output = _read_head(heads, head, output_matrix, hidden.device)
        digest = tuple(hash(weight.cpu().numpy().tobytes()) for weight, _ in layers)
        if digest in digests and heads.own_output:
            notes.append(f"heads {digests[digest] + 1} and {head + 1} share their residual layers")
        digests.setdefault(digest, head)
        asked = _ask(head, layers, output, hidden, following)
        ranks.append(asked.ranks)
        readings.append(_judge(head, asked, layers, following[:, head + 1]))
    shape = (*continuations.tokens[:, 1:].shape, M)
    readings = _tell_shifted_from_untrained(readings)
    return HeadFit(tuple(readings), torch.stack(ranks, dim=-1).view(shape).cpu(), tuple(notes))


@dataclass
class _Asked:
    """One head's answers: ranks [T] of its own target, top-1 by offset and activation, top-5."""

    ranks: torch.Tensor
    top5: float
    by_offset: tuple[float, ...]
    by_activation: dict[str, float]


def _later_tokens(tokens: torch.Tensor, places: int) -> torch.Tensor:
    """tokens [rows, C] moved up by `places`, IGNORED past the end: [rows, C - 1]."""
    moved = torch.full_like(tokens, IGNORED)
    if places < tokens.shape[1]:
        moved[:, : tokens.shape[1] - places] = tokens[:, places:]
    return moved[:, :-1]


def _read_head(
    heads: HeadTensors, head: int, output_matrix: torch.nn.Module, device: torch.device
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Callable[[torch.Tensor], torch.Tensor]]:
    layers = []
    for layer in range(heads.num_layers):
        prefix = f"medusa_heads.{head}.medusa_layers.{layer}.linear"
        weight, bias = heads.read(f"{prefix}.weight"), heads.read(f"{prefix}.bias")
        layers.append((weight.to(device).float(), bias.to(device).float()))
    if not heads.own_output:
        return layers, lambda states: apply_output_matrix(output_matrix, states).float()
    matrix = heads.read(f"medusa_heads.{head}.lm_head.weight").to(device)
    matrix = matrix.float() if device.type == "cpu" else matrix
    return layers, lambda states: functional.linear(states.to(matrix.dtype), matrix).float()


def _ask(
    head: int,
    layers: list[tuple[torch.Tensor, torch.Tensor]],
    output: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    following: torch.Tensor,
) -> _Asked:
    best: dict[str, list[torch.Tensor]] = {name: [] for name in ACTIVATIONS}
    ranks = []
    for states, targets in zip(
        hidden.split(CHUNK_POSITIONS), following[:, head + 1].split(CHUNK_POSITIONS), strict=True
    ):
        for name, activation in ACTIVATIONS.items():
            x = states.float()
            for weight, bias in layers:
                x = x + activation(functional.linear(x, weight, bias))
            logits = output(x)
            if not bool(logits.isfinite().all()):
                raise HeadsError(
                    f"head {head + 1} gives logits that are not finite on this base",
                    expected="finite numbers",
                    found="inf or nan",
                    next_step="the heads were saved from a run that diverged, or do not belong to this base",
                )
            best[name].append(logits.argmax(-1))
            if name == TRAINED_ACTIVATION:
                own = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1))
                ranks.append((logits > own).sum(-1).masked_fill(targets == IGNORED, UNKNOWN_RANK))
    all_ranks = torch.cat(ranks)
    known = all_ranks[all_ranks != UNKNOWN_RANK]
    said = {name: torch.cat(parts) for name, parts in best.items()}
    return _Asked(
        ranks=all_ranks,
        top5=float((known < 5).float().mean()),
        by_offset=tuple(_agreement(said[TRAINED_ACTIVATION], following[:, j]) for j in range(following.shape[1])),
        by_activation={name: _agreement(tokens, following[:, head + 1]) for name, tokens in said.items()},
    )


def _agreement(said: torch.Tensor, targets: torch.Tensor) -> float:
    known = targets != IGNORED
    return float((said[known] == targets[known]).float().mean()) if bool(known.any()) else 0.0


def _judge(
    head: int, asked: _Asked, layers: list[tuple[torch.Tensor, torch.Tensor]], targets: torch.Tensor
) -> HeadReading:
    known = targets[targets != IGNORED]
    frequent = known.unique(return_counts=True)[1].sort(descending=True).values
    chance1, chance5 = (float(frequent[:n].sum()) / len(known) for n in (1, 5))
    top1, spread = asked.by_offset[head + 1], measure_spread(layers)
    error = 3 * (chance1 * (1 - chance1) / len(frequent)) ** 0.5
    bound = chance1 + MARGIN + error
    is_noise = abs(spread - 1) < NOISE_SPREAD
    is_zero = not any(bool(weight.any()) for weight, _ in layers)
    offset = max(range(len(asked.by_offset)), key=lambda j: asked.by_offset[j])
    activation = max(asked.by_activation, key=lambda name: asked.by_activation[name])
    with_another = asked.by_activation[activation]
    is_better = with_another > max(top1, bound) + 2 * MARGIN
    verdict, sentence = "fits", _word_agreement(head, top1, len(known), chance1)
    if is_better:
        sentence += f"; with {activation} in place of SiLU it agrees in {with_another:.1%}"
    if is_better and (top1 <= bound or with_another - chance1 > CLEAR_GAIN * (top1 - chance1)):
        verdict = "wrong activation"
    elif _is_shifted(head, offset, asked.by_offset, max(bound, top1 + 2 * MARGIN)):
        where = "the base's own next token" if offset == 0 else f"the token that head {offset} should name"
        verdict = "shifted"
        sentence += f"; it names {where} in {asked.by_offset[offset]:.1%}: the heads are out of order"
    elif top1 > bound:
        verdict = "fits"
    elif is_zero:
        verdict, sentence = "untrained", f"{sentence}: its residual layers are zero, as before training"
    elif top1 > chance1 + MARGIN:
        verdict, sentence = "undecided", f"{sentence}: too few different tokens to tell, ask with other prompts"
    elif asked.by_offset[0] > OWN_TOKEN:
        verdict, sentence = "untrained", sentence + _name_own_token(asked.by_offset[0])
    elif is_noise:
        verdict, sentence = "random", f"{sentence}, and its layers look like random numbers: it was never trained"
    elif error > LARGEST_ERROR:
        verdict = "undecided"
        sentence += f": {len(frequent)} different tokens are too few to tell, ask at more positions"
    else:
        verdict = "foreign"
        sentence += ", and its layers were trained: for another base, on other texts, or too little"
    return HeadReading(
        head,
        verdict,
        top1,
        asked.top5,
        chance1,
        chance5,
        len(known),
        asked.by_offset,
        asked.by_activation,
        spread,
        sentence,
    )


def _is_shifted(head: int, offset: int, by_offset: tuple[float, ...], bound: float) -> bool:
    """Whether a head names another token than its own.

    The base's own next token (offset 0) is what any layers leave of the hidden state: only a first head that names it
    nearly always may have been trained for it.
    """
    if offset == 0 and (head > 0 or by_offset[0] <= OWN_TOKEN):
        return False
    return offset != head + 1 and by_offset[offset] > bound


def _word_agreement(head: int, top1: float, positions: int, chance1: float) -> str:
    return f"head {head + 1} agrees in {top1:.1%} of {positions} positions (chance is {chance1:.1%})"


def _name_own_token(share: float) -> str:
    return f"; it names the base's own next token in {share:.1%}, as before training: it was hardly trained"


def _tell_shifted_from_untrained(readings: list[HeadReading]) -> list[HeadReading]:
    """A first head that names the base's own next token is shifted where the second one names the first's, too.

    Where the second one names the base's own next token as well, both are nearly what they were before training.
    """
    first, *others = readings
    if first.verdict != "shifted" or first.by_offset[0] < max(first.by_offset):
        return readings
    if not others or others[0].by_offset[0] <= OWN_TOKEN:
        return readings
    sentence = _word_agreement(first.head, first.top1, first.positions, first.chance1)
    sentence += _name_own_token(first.by_offset[0])
    return [replace(first, verdict="untrained", sentence=sentence), *others]


def measure_spread(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Largest singular value over that of random entries of the same size, the largest of the layers; 0 for zeros."""
    found = 0.0
    for weight, _ in layers:
        size = float(weight.square().mean().sqrt())
        if size == 0:
            continue
        vector = torch.ones(weight.shape[1], device=weight.device)
        for _ in range(30):
            vector = weight.T @ (weight @ vector)
            vector = vector / vector.norm()
        expected = size * (weight.shape[0] ** 0.5 + weight.shape[1] ** 0.5)
        found = max(found, float((weight @ vector).norm()) / expected)
    return found
