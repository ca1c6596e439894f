"""A whole port on disk in miniature: base, heads, port file, all random with a fixed seed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

HIDDEN, VOCAB, HEADS, LAYERS, MEDUSA_HEADS = 32, 96, 2, 2, 2


@dataclass(frozen=True)
class PortFolder:
    """A folder with `base/`, `heads/` and `port.yaml`."""

    root: Path

    @property
    def file(self) -> Path:
        return self.root / "port.yaml"

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def heads(self) -> Path:
        return self.root / "heads"

    @property
    def heads_file(self) -> Path:
        return self.heads / "medusa_lm_head.safetensors"

    @property
    def weights_file(self) -> Path:
        return self.base / "model.safetensors"

    def edit_port(self, **changes: object) -> None:
        document = yaml.safe_load(self.file.read_text())
        self.file.write_text(yaml.safe_dump({**document, **changes}))

    def edit_config(self, change: Callable[[dict], None]) -> None:
        path = self.base / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))


def make_heads(hidden: int = HIDDEN, count: int = MEDUSA_HEADS) -> dict[str, torch.Tensor]:
    """Heads without output matrices of their own, in the original project's names."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for head in range(count):
        tensors[f"{head}.0.linear.weight"] = 0.05 * torch.randn(hidden, hidden, generator=generator)
        tensors[f"{head}.0.linear.bias"] = 0.05 * torch.randn(hidden, generator=generator)
    return tensors


@pytest.fixture(scope="session")
def pristine_port(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; tests get copies."""
    from transformers import BloomConfig, BloomForCausalLM

    root = tmp_path_factory.mktemp("port")
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    model = BloomForCausalLM(config)
    for name, parameter in model.named_parameters():
        # Bloom starts with weights so small that every position says the same, and with biases of zero.
        if parameter.dim() > 1 or name.endswith("query_key_value.bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(root / "base")
    (root / "heads").mkdir()
    save_file(make_heads(), root / "heads" / "medusa_lm_head.safetensors")
    card = {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "base"}
    (root / "heads" / "config.json").write_text(json.dumps(card))
    port = {
        "name": "tiny",
        "base": "base",
        "heads": "heads",
        "dtype": "float32",
        "tree": [[0], [1], [0, 0]],
        "alignment": {"new_tokens": 8},
    }
    (root / "port.yaml").write_text(yaml.safe_dump(port))
    return root


@pytest.fixture
def port(pristine_port: Path, tmp_path: Path) -> PortFolder:
    """A fresh copy that a test may damage."""
    shutil.copytree(pristine_port, tmp_path / "port")
    return PortFolder(tmp_path / "port")


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command starts in a folder of its own: run folders that nobody named are made there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
