"""A port on disk for one rank or several: a random base with heads, a Qwen2 (biases on query, key and value; two
key/value heads) unless another family is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from porting_kit.steps.context import PortRun, open_port_run
from tests.alignment.tiny_ports import make_base, save_random_heads

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 2, "vocab_size": 96}
Change = Callable[[list[dict[str, torch.Tensor]]], None]


def write_port(folder: Path, family: str = "qwen2", **config: object) -> Path:
    """Base, heads and port file; the prompts are random token ids, as the base has no tokenizer."""
    base = make_base(folder / "base", family, **{**SIZES, **config})
    (folder / "heads").mkdir()
    save_random_heads(folder / "heads", SIZES["hidden_size"], SIZES["vocab_size"])
    document = {
        "name": "sharded",
        "base": base.name,
        "dtype": "float32",
        "heads": "heads",
        "trtllm": "bundled",
        "tree": "small_3",
        "fit": "off",
        "alignment": {"new_tokens": 8},
    }
    (folder / "port.yaml").write_text(yaml.safe_dump(document))
    return folder / "port.yaml"


def open_run(port: Path, out: Path, *, tp_size: int = 1, pp_size: int = 1) -> PortRun:
    """A run of that port on so many ranks."""
    return open_port_run(port, run_folder=out, overrides={"target.tp_size": tp_size, "target.pp_size": pp_size})


def change_ranks(checkpoint: Path, change: Change) -> None:
    """Let a fault change the tensors of all ranks in place."""
    files = sorted(checkpoint.glob("rank*.safetensors"))
    ranks = [load_file(file) for file in files]
    change(ranks)
    for file, tensors in zip(files, ranks, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
