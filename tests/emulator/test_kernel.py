"""Release kernels: refused shapes, ALiBi and soft-cap left out, one position id per request."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from porting_kit.emulator import EmulatedModel
from porting_kit.errors import KernelRefusal
from porting_kit.releases.kernels import kernel_profile
from tests.emulator.differential import DEPTHS, TREE, relative
from tests.emulator.naive_attention import pack_mask
from tests.emulator.test_attention import LAYERS, error, run_context, run_tree
from tests.emulator.test_model import PROMPT

RELEASE = "release:0.11.0.dev2024062500"
LENIENT = {
    "name": RELEASE,
    "alibi_in_generation": False,
    "softcap_in_generation": False,
    "one_position_id_per_request": True,
}


def lenient_profile() -> SimpleNamespace:
    """A release's arithmetic without its refusals, so that toy shapes reach the silent faults."""
    return SimpleNamespace(**LENIENT, refuse=lambda shape: None)


def run_steps(model: EmulatedModel, batch: int = 1) -> list[torch.Tensor]:
    """Logits of a prefill, an ordinary step, and a tree step."""
    cache = model.new_cache(batch, 32)
    logits = [model.prefill([PROMPT] * batch, cache).logits]
    logits.append(model.decode(torch.full((batch, 1), 9), cache).logits)
    drafts = torch.arange(6).expand(batch, 6)
    tree = {"position_offsets": torch.tensor(DEPTHS), "packed_mask": pack_mask(TREE)}
    logits.append(model.decode(drafts, cache, **tree).logits)
    return logits


def test_release_refuses_the_shape_at_the_first_tree_step(build: Callable[..., EmulatedModel]) -> None:
    """Head size 8 in float32: the context phase and ordinary generation run, the tree step stops."""
    model = build("llama", kernel=kernel_profile(RELEASE))
    cache = model.new_cache(1, 32)
    model.prefill([PROMPT], cache)
    model.decode(torch.tensor([[1]]), cache)
    with pytest.raises(KernelRefusal) as caught:
        model.decode(torch.arange(6)[None], cache, position_offsets=torch.tensor(DEPTHS), packed_mask=pack_mask(TREE))
    assert caught.value.exit_code == 1
    assert "0.11.0.dev2024062500" in caught.value.where


def test_exact_profile_is_no_profile(build: Callable[..., EmulatedModel]) -> None:
    plain, exact = build("bloom"), build("bloom", kernel=kernel_profile("exact"))
    for first, second in zip(run_steps(plain), run_steps(exact), strict=True):
        assert torch.equal(first, second)


def test_release_drops_alibi_in_tree_steps_only(build: Callable[..., EmulatedModel]) -> None:
    exact, release = run_steps(build("bloom")), run_steps(build("bloom", kernel=lenient_profile()))
    assert torch.equal(exact[0], release[0])
    assert torch.equal(exact[1], release[1])
    assert relative(release[2], exact[2]) > 1e-2


def test_release_leaves_rotary_models_as_they_are(build: Callable[..., EmulatedModel]) -> None:
    for family in ("llama", "qwen2", "gptneox"):
        exact, release = run_steps(build(family), 2), run_steps(build(family, kernel=lenient_profile()), 2)
        for first, second in zip(exact, release, strict=True):
            assert torch.equal(first, second), family


def test_release_ignores_the_soft_cap_in_tree_steps() -> None:
    layer = LAYERS["soft-cap"]
    for kernel, low, high in ((None, 0.0, 1e-6), (lenient_profile(), 1e-3, 10.0)):
        cache, naive, output, expected = run_context(layer, torch.float64)
        assert error(output, expected) < 1e-6
        output, expected = run_tree(layer, cache, naive, torch.float64, kernel=kernel)
        assert low <= error(output, expected) < high
