"""Medusa heads of the original project as a torch module: v1 (own output matrix) and v2 (the base's).

One head is R residual layers `x + SiLU(W x + b)` over the base's last hidden state (after its final norm), then an
output matrix: its own in v1, the base's `lm_head` in v2. Head m, counted from 0, predicts the token m + 2 places after
the position whose hidden state it reads; the base itself predicts the one 1 place after.
Tensor names are those of the original project (FasterDecoding/Medusa, medusa/model/medusa_model.py):
`{m}.{r}.linear.weight` [E, E], `{m}.{r}.linear.bias` [E] and, in v1 alone, `{m}.{R}.weight` [V, E].
This module trains nothing, and reads only the layout that it writes (`conversion` reads every known one).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import nn

from porting_kit.errors import HeadsError
from porting_kit.whole_files import read_json, write_json, write_tensors

HEADS_FILE = "medusa_lm_head.safetensors"
STORED_DTYPE = torch.float16
HeadVariant = Literal["v1", "v2"]
OutputMatrix = Callable[[torch.Tensor], torch.Tensor]


class ResidualLayer(nn.Module):
    """`x + SiLU(W x + b)`, starting as the identity (W and b zero gives SiLU(0) = 0), as the original does."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states [..., E] -> [..., E]."""
        return states + nn.functional.silu(self.linear(states))


class MedusaHeads(nn.ModuleList):
    """M heads over one hidden state; its state dict has the original project's tensor names.

    Args:
        hidden_size: E of the base.
        vocab_size: V of the base's output matrix.
        num_heads: M.
        num_layers: R, residual layers of each head.
        variant: "v1" (each head has its own [V, E] output matrix) or "v2" (heads use the base's).
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, num_heads: int, num_layers: int = 1, variant: HeadVariant = "v2"
    ) -> None:
        if num_heads < 1 or num_layers < 1 or variant not in ("v1", "v2"):
            raise HeadsError(
                "Medusa heads of this shape do not exist",
                expected="at least one head, at least one residual layer, variant v1 or v2",
                found=f"{num_heads} heads, {num_layers} layers, variant {variant!r}",
                next_step="correct the numbers of heads and layers",
            )
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers, self.variant = num_heads, num_layers, variant
        heads = []
        for _ in range(num_heads):
            modules: list[nn.Module] = [ResidualLayer(hidden_size) for _ in range(num_layers)]
            if variant == "v1":
                modules.append(nn.Linear(hidden_size, vocab_size, bias=False))
            heads.append(nn.Sequential(*modules))
        super().__init__(heads)

    def copy_output_matrix(self, weight: torch.Tensor) -> None:
        """Start every own output matrix (v1) from the base's, weight [V, E]; v2 has none and stays as it is."""
        if self.variant == "v1":
            with torch.no_grad():
                for head in self:
                    head[-1].weight.copy_(weight)

    def forward(self, hidden: torch.Tensor, output_matrix: OutputMatrix) -> torch.Tensor:
        """Logits of all heads.

        Args:
            hidden: [..., E], the base's last hidden state.
            output_matrix: the base's `lm_head` as a callable [..., E] -> [..., V]; not used by v1.

        Returns:
            logits [M, ..., V].
        """
        outputs = torch.stack([head(hidden) for head in self])
        return outputs if self.variant == "v1" else output_matrix(outputs)


def apply_output_matrix(output_matrix: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Logits of heads that share the base's output matrix, in its type, without the bias that some bases add.

    Phi and GPT-J do; the heads of TensorRT-LLM have none (tensorrt_llm/models/medusa/model.py, 0.8 to 0.17: `lm_head`
    with bias=False).

    Args:
        output_matrix: the base's `lm_head`, weight [V, E].
        states: [..., E] -> [..., V].
    """
    return nn.functional.linear(states.to(output_matrix.weight.dtype), output_matrix.weight)


def save_heads(heads: MedusaHeads, folder: Path, *, base_name: str, dtype: torch.dtype = STORED_DTYPE) -> None:
    """Write `medusa_lm_head.safetensors` and `config.json` as the original project lays them out.

    Raises:
        HeadsError: a value is not finite, or is too large for `dtype`.
    """
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in heads.state_dict().items()}
    _refuse_non_finite(tensors, folder)
    write_tensors(folder / HEADS_FILE, tensors, {"format": "pt"})
    config = {
        "base_model_name_or_path": base_name,
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "version": {"v1": "1", "v2": "2"}[heads.variant],
    }
    write_json(folder / "config.json", config)


def load_heads(folder: Path) -> MedusaHeads:
    """Read what `save_heads` wrote, as fp32.

    Raises:
        HeadsError: a file is missing, config and tensors disagree, or a value is not finite.
    """
    try:
        config = read_json(folder / "config.json")
        tensors = load_file(folder / HEADS_FILE)
        shape = {"num_heads": config["medusa_num_heads"], "num_layers": config["medusa_num_layers"]}
        sizes = (config["hidden_size"], config["vocab_size"])
    except (OSError, KeyError, ValueError) as error:
        raise HeadsError(
            "trained Medusa heads cannot be read",
            expected=f"config.json and {HEADS_FILE} as porting_kit writes them",
            found=f"{type(error).__name__}: {error}",
            where=folder,
            next_step="name the folder that training wrote, or train again",
        ) from error
    variant: HeadVariant = "v1" if f"0.{shape['num_layers']}.weight" in tensors else "v2"
    heads = MedusaHeads(*sizes, **shape, variant=variant)
    own = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if own != found:
        raise HeadsError(
            "config.json and the tensors of the Medusa heads disagree",
            expected=f"{len(own)} tensors for {shape}",
            found=f"{len(found)} tensors",
            where=folder,
            items=sorted(f"{name} {shape}" for name, shape in set(own.items()) ^ set(found.items())),
            next_step="name the folder that training wrote, or train again",
        )
    _refuse_non_finite(tensors, folder)
    heads.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return heads


def _refuse_non_finite(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    bad = sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all())
    if bad:
        raise HeadsError(
            "Medusa heads hold values that are not finite in their stored type",
            expected="finite numbers",
            where=folder,
            items=bad,
            next_step="train again with a lower learning rate (--learning-rate)",
        )
