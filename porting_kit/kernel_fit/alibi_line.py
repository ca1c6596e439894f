"""The ALiBi line as a sum of rotary waves: how well, at what base, with which amplitudes.

Softmax ignores what depends on the query alone, so the bias -m*d of a key at distance d needs only a function of d up
to a constant. A pair of rotary dims with constant queries and keys contributes a wave in d:

    f(d) = sum_t cosine_t * cos(theta_t * d) + sine_t * sin(theta_t * d) + constant,   theta_t = base ** (-t / P)

This module finds the waves for all heads at once. It knows nothing of weights or configs.

Letters: H heads, P pairs of dims, S distances (0 to the longest sequence - 1), A distances in use by one solve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from porting_kit.errors import ConversionError

FLOOR_NATS = 21.0
"""A key whose bias is below minus this is only held down, not followed. With -12 a sharp content logit lifts far keys
back up (measured: attention output off by 3 %); with -20 and lower it does not."""
MARGIN_NATS = 1.0
"""Far keys may rise this far above the floor."""
FAR_PRICE = 0.1
"""What a far key one nat above its bound counts, in nats of error."""
NEAR_POINTS = 112
FAR_POINTS = 208
PROBE_HEADS = 6
PROBE_ROUNDS = 30
ROUNDS = 120
LOWEST_TURNS = (3.2, 2.0, 1.2)
"""Angles in radians, over the whole length, of the slowest wave: the candidates for the base."""
RIDGES = (1e-4, 1e-3, 4e-3)
HALF_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 0.0}


@dataclass(frozen=True)
class AlibiFit:
    """Waves that stand for ALiBi lines.

    Args:
        slopes: m of each head, float64 [H].
        base: rotary base.
        length_tokens: distances from 0 to this minus one were fitted.
        cosine, sine: amplitudes in nats, float64 [H, P].
        error_nats: largest |f(d) + m*d| (up to each head's constant) where -m*d is above -FLOOR_NATS.
        floor_nats: the highest f(d) reaches beyond (a negative number).
        noise_nats: rounding noise of the waves in the dtype asked for, root mean square over the worst head.
    """

    slopes: np.ndarray
    base: float
    length_tokens: int
    cosine: np.ndarray
    sine: np.ndarray
    error_nats: float
    floor_nats: float
    noise_nats: float

    @property
    def pairs(self) -> int:
        """P."""
        return self.cosine.shape[1]

    def evaluate(self, distances: np.ndarray) -> np.ndarray:
        """f at distances [S] without the constant, float64 [H, S]."""
        angles = distances[:, None] * frequencies(self.base, self.pairs)
        return self.cosine @ np.cos(angles).T + self.sine @ np.sin(angles).T


def alibi_slopes(heads: int, bias_max: float = 8.0) -> np.ndarray:
    """m of each head, float64 [H], as the models and the library define it.

    Source: Press et al., Train Short Test Long; tensorrt_llm/functional.py generate_alibi_slopes,
    0.11.0.dev2024062500: for a head count that is no power of two, the slopes of the power of two below it, then every
    second one of the power above.
    """
    closest = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-bias_max / closest * np.arange(1, closest + 1))
    rest = 2.0 ** (-bias_max / (2 * closest) * (2 * np.arange(heads - closest) + 1))
    return np.concatenate([first, rest])


def frequencies(base: float, pairs: int) -> np.ndarray:
    """theta_t in radians a token, float64 [P]."""
    return base ** (-np.arange(pairs) / pairs)


def fit_alibi(slopes: Sequence[float], pairs: int, length_tokens: int, dtype: str = "float16") -> AlibiFit:
    """Find base and waves for a model's slopes.

    The base and the ridge on the amplitudes are chosen together: a small ridge follows the line better, but its large
    waves that cancel each other are rounded more coarsely in half precision.

    Args:
        slopes: m of each head.
        pairs: P, from 4.
        length_tokens: the longest sequence.
        dtype: type of queries and keys.

    Raises:
        ConversionError: fewer than four pairs, or no length.
    """
    if pairs < 4 or length_tokens < 2:
        raise ConversionError(
            "ALiBi cannot be expressed with so few rotary pairs",
            expected="at least 4 pairs and a length from 2 tokens",
            found=f"{pairs} pairs, {length_tokens} tokens",
            next_step="leave more room in the heads, or raise target.max_seq_len",
        )
    return _fit_alibi(tuple(float(slope) for slope in slopes), pairs, length_tokens, dtype)


@lru_cache(maxsize=32)
def _fit_alibi(slopes: tuple[float, ...], pairs: int, length_tokens: int, dtype: str) -> AlibiFit:
    every = np.array(slopes)
    ordered = np.sort(np.unique(every))
    picked = np.unique(np.linspace(0, len(ordered) - 1, PROBE_HEADS).round().astype(int))
    probe = ordered[picked]
    candidates = [
        _solve(probe, base, pairs, length_tokens, ridge, PROBE_ROUNDS, dtype)
        for base in _candidate_bases(pairs, length_tokens)
        for ridge in RIDGES
    ]
    best = min(candidates, key=_badness)
    return _solve(every, best[0].base, pairs, length_tokens, best[1], ROUNDS, dtype)[0]


def _candidate_bases(pairs: int, length_tokens: int) -> list[float]:
    """Bases whose slowest wave makes a part of a turn over the whole length."""
    exact = [(max(length_tokens, 16) / turn) ** (pairs / (pairs - 1)) for turn in LOWEST_TURNS]
    return sorted({float(f"{base:.4g}") for base in exact})


def _badness(candidate: tuple[AlibiFit, float]) -> float:
    fit = candidate[0]
    above = max(0.0, fit.floor_nats + FLOOR_NATS - MARGIN_NATS)
    return fit.error_nats + fit.noise_nats + FAR_PRICE * above


def _solve(
    slopes: np.ndarray, base: float, pairs: int, length_tokens: int, ridge: float, rounds: int, dtype: str
) -> tuple[AlibiFit, float]:
    """Least squares, re-weighted towards the largest error of each head; far keys join where they rise too high."""
    distances = np.arange(length_tokens, dtype=float)
    angles = distances[:, None] * frequencies(base, pairs)
    basis = np.concatenate([np.cos(angles), np.sin(angles), np.ones((length_tokens, 1))], axis=1)
    line = -slopes[:, None] * distances
    near = line > -FLOOR_NATS
    sampled = _sample_near(near)
    weight = sampled.astype(float)
    target = np.where(near, line, -FLOOR_NATS - MARGIN_NATS)
    penalty = np.diag([ridge] * (2 * pairs) + [0.0])
    best, least = None, math.inf
    pulled = weight
    for _ in range(rounds):
        active = np.argsort(-pulled, axis=1, kind="stable")[:, : NEAR_POINTS + FAR_POINTS]
        used = np.take_along_axis(pulled, active, axis=1)
        weighted = basis[active] * used[:, :, None]
        wanted = np.take_along_axis(target, active, axis=1) * used
        transposed = weighted.transpose(0, 2, 1)
        waves = np.linalg.solve(transposed @ weighted + penalty, transposed @ wanted[:, :, None])[:, :, 0]
        found = waves @ basis.T
        error = np.where(near, np.abs(found - line), 0.0)
        above = np.where(near, 0.0, np.maximum(found + FLOOR_NATS - MARGIN_NATS, 0.0))
        worst = error.max(1) + FAR_PRICE * above.max(1)
        if best is None:
            best, least = waves.copy(), worst
        better = worst < least
        best[better], least = waves[better], np.minimum(worst, least)
        growth = 1 + 0.5 * error / (error.max(1, keepdims=True) + 1e-12)
        weight = np.where(sampled, np.clip(weight * growth, 0.1, 30), weight)
        weight = np.where(_peaks(above), np.clip(weight + 0.1, 0, 10), weight)
        # A far key that is low enough is left alone: it is held down, never pulled up.
        pulled = np.where(near | (found > target), weight, 0.0)
    return _judge(slopes, base, best, basis, line, near, pairs, dtype), ridge


def _peaks(above: np.ndarray) -> np.ndarray:
    """Where each row has a local maximum above zero, [H, S] bool."""
    before = np.pad(above, ((0, 0), (1, 0)))[:, :-1]
    after = np.pad(above, ((0, 0), (0, 1)))[:, 1:]
    return (above > 0) & (above >= before) & (above >= after)


def _sample_near(near: np.ndarray) -> np.ndarray:
    """At most NEAR_POINTS distances of each head's near part, denser towards the query, both ends kept."""
    sampled = np.zeros_like(near)
    for row, count in enumerate(near.sum(1)):
        if count <= NEAR_POINTS:
            sampled[row, :count] = True
            continue
        # Chebyshev-like: the largest errors of a fit sit at the ends of its range.
        spread = 0.5 - 0.5 * np.cos(np.linspace(0, np.pi, NEAR_POINTS))
        sampled[row, np.unique((spread * (count - 1)).round().astype(int))] = True
    return sampled


def _judge(
    slopes: np.ndarray,
    base: float,
    waves: np.ndarray,
    basis: np.ndarray,
    line: np.ndarray,
    near: np.ndarray,
    pairs: int,
    dtype: str,
) -> AlibiFit:
    found = waves @ basis.T
    # The constant is free: centre each head's error.
    gap = np.where(near, found - line, np.nan)
    middle = (np.nanmax(gap, axis=1) + np.nanmin(gap, axis=1)) / 2
    found = found - middle[:, None]
    error = np.where(near, np.abs(found - line), 0.0).max()
    far = np.where(near, -np.inf, found).max()
    power = (waves[:, :-1] ** 2).sum(1)
    return AlibiFit(
        slopes=slopes,
        base=base,
        length_tokens=basis.shape[0],
        cosine=waves[:, :pairs],
        sine=waves[:, pairs : 2 * pairs],
        error_nats=float(error),
        floor_nats=float(far) if np.isfinite(far) else -FLOOR_NATS,
        noise_nats=float(np.sqrt(power.max())) * HALF_EPSILON.get(dtype, 2.0**-11),
    )
