"""The same model on a GPU: every phase agrees with the CPU run."""

from __future__ import annotations

import pytest
import torch

from porting_kit.emulator import EmulatedModel, open_emulator
from porting_kit.emulator.replay import Recording
from porting_kit.source_tree import SourceTree
from tests.emulator.differential import DEPTHS, TREE, relative
from tests.emulator.naive_attention import pack_mask
from tests.emulator.patched import patch_model
from tests.emulator.random_checkpoint import make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def run_phases(model: EmulatedModel) -> list[torch.Tensor]:
    """Logits of a prefill, a mixed call, acceptance and an ordinary step."""
    generator = torch.Generator().manual_seed(0)
    cache = model.new_cache(3, 64)
    prompts = [torch.randint(0, 90, (length,), generator=generator) for length in (9, 4, 6)]
    logits = [model.prefill(prompts[:2], cache).logits]
    drafts = torch.randint(0, 90, (2, 6), generator=generator)
    tree = {"position_offsets": torch.tensor(DEPTHS), "packed_mask": pack_mask(TREE)}
    context, nodes = model.mixed(prompts[2:], drafts, cache, **tree)
    cache.keep(torch.tensor([[0, 2, 5], [0, -1, -1], [-1, -1, -1]]))
    logits += [context.logits, nodes.logits, model.decode(torch.tensor([[1], [2], [3]]), cache).logits]
    return [tensor.cpu() for tensor in logits]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("float16", 1e-2), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("family", ["llama", "bloom", "gptneox"])
def test_cuda_agrees_with_cpu(bundled: SourceTree, family: str, dtype: str, bound: float) -> None:
    config, tensors = make_checkpoint(open_emulator(bundled), family)
    arguments = patch_model(bundled, config["architecture"])
    runs = {}
    for device, kind in (("cpu", "float32"), ("cuda", dtype)):
        model = open_emulator(bundled, device=device).build_model(config, tensors, dtype=kind, **arguments)
        runs[device] = run_phases(model)
    for found, expected in zip(runs["cuda"], runs["cpu"], strict=True):
        assert relative(found, expected) < bound


def generate(model: EmulatedModel, steps: int) -> list[torch.Tensor]:
    """Logits of tree steps over growing pasts, two requests of unequal length, some steps without a tree."""
    generator = torch.Generator().manual_seed(1)
    cache = model.new_cache(2, 600)
    model.prefill([torch.randint(0, 90, (length,), generator=generator) for length in (240, 230)], cache)
    tree = {"position_offsets": torch.tensor(DEPTHS), "packed_mask": pack_mask(TREE)}
    logits = []
    for step in range(steps):
        if step % 5 == 4:
            logits.append(model.decode(torch.randint(0, 90, (2, 1), generator=generator), cache).logits)
            cache.keep(torch.zeros(2, 1, dtype=torch.int64))
        else:
            drafts = torch.randint(0, 90, (2, 6), generator=generator)
            logits.append(model.decode(drafts, cache, **tree).logits)
            cache.keep(torch.tensor([[0, 1, 4], [0, 2, -1]]))
    recordings = list(cache.recordings.values())
    if model.replays.is_enabled:
        assert sum(isinstance(recording, Recording) for recording in recordings) >= 2
    else:
        assert not recordings
    return [tensor.cpu() for tensor in logits]


@pytest.mark.parametrize("family", ["llama", "bloom", "gptneox"])
def test_replayed_steps_agree_with_eager_ones(bundled: SourceTree, family: str) -> None:
    """Recordings serve growing pasts, across the boundary of a bucket of cache rows."""
    config, tensors = make_checkpoint(open_emulator(bundled), family)
    arguments = patch_model(bundled, config["architecture"])
    model = open_emulator(bundled, device="cuda").build_model(config, tensors, **arguments)
    replayed = generate(model, 20)
    model.replays.is_enabled = False
    for found, expected in zip(replayed, generate(model, 20), strict=True):
        assert relative(found, expected) < 2e-5
