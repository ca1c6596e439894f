"""A Bloom that is trained on the spot: real attention at head size 128, where random weights are the worst case."""

from __future__ import annotations

import random
import sysconfig
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

HIDDEN, HEADS, LAYERS = 2048, 16, 4  # Bloom-1b7's heads of 128 dims
TRAINED_TOKENS, BATCH = 512, 16
HELD_OUT = 10
"""Every tenth file is kept from training."""


@dataclass(frozen=True)
class TrainedBloom:
    """The model, and its loss on held-out files in nats a byte."""

    model: Any
    held_out_loss: float
    steps: int


@lru_cache(maxsize=2)
def read_library(held_out: bool) -> bytes:
    """The source text of Python's standard library, the held-out files or the others."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [file for index, file in enumerate(files) if (index % HELD_OUT == 0) == held_out]
    return b"\n".join(file.read_bytes() for file in chosen)


def read_library_texts(count: int, length: int, *, seed: int, held_out: bool = False) -> list[list[int]]:
    """Byte strings from random places."""
    text, picker = read_library(held_out), random.Random(seed)
    places = [picker.randrange(len(text) - length) for _ in range(count)]
    return [list(text[place : place + length]) for place in places]


def train_bloom(
    seconds: float, device: str, *, hidden: int = HIDDEN, heads: int = HEADS, layers: int = LAYERS, batch: int = BATCH
) -> TrainedBloom:
    """Train a Bloom on bytes for a time; the learning rate falls to nothing towards its end."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=256, hidden_size=hidden, n_layer=layers, n_head=heads)
    model = transformers.BloomForCausalLM(config).to(device)
    rate = 4e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    started, steps = time.perf_counter(), 0
    with torch.enable_grad():
        while (spent := (time.perf_counter() - started) / seconds) < 1:
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (steps + 1) / 40) * (1 - spent)
            loss = _loss(model, batch, steps, device)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
            if device != "cpu":
                torch.cuda.synchronize()
    model = model.float().eval().requires_grad_(False)
    with torch.inference_mode():
        held_out = sum(float(_loss(model, batch, seed, device, held_out=True)) for seed in range(4)) / 4
    return TrainedBloom(model.cpu(), held_out, steps)


def _loss(model: Any, batch: int, seed: int, device: str, *, held_out: bool = False) -> torch.Tensor:
    texts = read_library_texts(batch, TRAINED_TOKENS, seed=seed, held_out=held_out)
    tokens = torch.tensor(texts, device=device)
    with torch.autocast("cuda" if device != "cpu" else "cpu", dtype=torch.bfloat16):
        return model(tokens, labels=tokens).loss
