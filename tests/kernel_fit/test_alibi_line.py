"""The ALiBi line as rotary waves: followed where keys matter, held down where they do not."""

import numpy as np
import pytest

from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.alibi import ERROR_BOUND_NATS
from porting_kit.kernel_fit.alibi_line import FLOOR_NATS, MARGIN_NATS, alibi_slopes, fit_alibi, frequencies


@pytest.mark.parametrize("heads", [3, 8, 12, 40, 112])
def test_slopes_are_those_of_transformers(heads):
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    line = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)
    assert np.allclose(alibi_slopes(heads), line[:, 0, 1].numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("heads", "pairs", "length"), [(16, 16, 1024), (12, 24, 600), (3, 8, 1024), (32, 8, 512), (32, 6, 1024)]
)
def test_line_is_followed_and_far_keys_stay_down(heads, pairs, length):
    fit = fit_alibi(alibi_slopes(heads), pairs, length)
    distances = np.arange(length, dtype=float)
    found = fit.evaluate(distances)
    line = -alibi_slopes(heads)[:, None] * distances
    near = line > -FLOOR_NATS
    gap = np.where(near, found - line, np.nan)
    # each head's constant is free
    error = (np.nanmax(gap, axis=1) - np.nanmin(gap, axis=1)) / 2
    assert error.max() <= ERROR_BOUND_NATS
    assert error.max() == pytest.approx(fit.error_nats, abs=1e-9)
    far = np.where(near, -np.inf, found - np.nanmean(gap, axis=1, keepdims=True))
    assert far.max() <= -FLOOR_NATS + MARGIN_NATS + 0.5


def test_wrong_base_would_be_seen():
    fit = fit_alibi(alibi_slopes(8), 16, 256)
    distances = np.arange(256, dtype=float)
    other = fit.cosine @ np.cos(distances[:, None] * frequencies(1.2 * fit.base, 16)).T
    other += fit.sine @ np.sin(distances[:, None] * frequencies(1.2 * fit.base, 16)).T
    assert np.ptp(other - fit.evaluate(distances), axis=1).max() > 10 * ERROR_BOUND_NATS


def test_half_precision_gets_smaller_waves():
    exact = fit_alibi(alibi_slopes(8), 12, 512, "float32")
    half = fit_alibi(alibi_slopes(8), 12, 512, "float16")
    assert half.noise_nats < 0.02
    assert np.hypot(half.cosine, half.sine).max() <= np.hypot(exact.cosine, exact.sine).max()


def test_too_few_pairs_are_refused():
    with pytest.raises(ConversionError, match="so few rotary pairs"):
        fit_alibi(alibi_slopes(8), 3, 512)
