"""Medusa heads fitted to a random base in closed form, so that drafts are accepted and acceptance is really tested.

Random heads propose tokens that a random base never confirms: decoding with them would be right whatever acceptance and
the movement of cache rows do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_HEADS = 3
RIDGE = 1e-2


def write_fitted_heads(
    hidden_states: Sequence[Any], texts: Sequence[Sequence[int]], vocab_size: int, file: Path, seed: int = 5
) -> Path:
    """Fit one head per distance to the tokens of given texts and save them in the original project's names.

    Args:
        hidden_states: [S, E] per text, what the output matrix reads.
        texts: the token ids, S per text.
        vocab_size: V.
        file: a .safetensors file to write.
        seed: of the residual layers, which stay random.

    Head h reads x + silu(W x + b) at position t and is fitted, by ridge regression on one-hot targets, to the token at
    t + h + 2.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    E = hidden_states[0].shape[-1]
    tensors = {}
    for head in range(NUM_HEADS):
        weight = torch.randn(E, E, generator=generator) / E**0.5
        bias = 0.1 * torch.randn(E, generator=generator)
        rows, targets = [], []
        for states, text in zip(hidden_states, texts, strict=True):
            known = len(text) - head - 2
            x = states[:known].float()
            rows.append(x + torch.nn.functional.silu(x @ weight.T + bias))
            targets.append(torch.as_tensor(text[head + 2 :]))
        x, target = torch.cat(rows).double(), torch.cat(targets)
        # The dual form solves a system as large as the number of positions, not of hidden dimensions squared by V.
        gram = x @ x.T
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        wanted = torch.nn.functional.one_hot(target, vocab_size).double()
        tensors[f"{head}.0.linear.weight"] = weight
        tensors[f"{head}.0.linear.bias"] = bias
        tensors[f"{head}.1.weight"] = (torch.linalg.solve(gram, wanted).T @ x).float().contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file)
    return file


def head_logits(tensors: dict[str, Any], hidden_states: Any) -> Any:
    """What the checkpoint's heads say of hidden states [n, E]: [M, n, V], computed apart from the tree's own class."""
    import torch

    logits = []
    for head in range(NUM_HEADS):
        name = f"medusa_heads.{head}.medusa_layers.0.linear"
        x = hidden_states
        x = x + torch.nn.functional.silu(x @ tensors[f"{name}.weight"].float().T + tensors[f"{name}.bias"].float())
        logits.append(x @ tensors[f"medusa_heads.{head}.lm_head.weight"].float().T)
    return torch.stack(logits)
