"""Everything a port is made of, as values that a fault can change, and the model that follows from them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.emulator import Emulator, open_emulator
from porting_kit.errors import CheckpointError
from porting_kit.medusa.tree import MedusaTree
from porting_kit.releases.kernels import KernelProfile, kernel_profile
from porting_kit.whole_files import read_json

Wrapper = Callable[[Any], Any]


@dataclass(frozen=True)
class PortState:
    """A port before it is built.

    Args:
        config: content of config.json.
        tensors: name -> tensor of the one rank.
        emulator: the source tree's emulator.
        kernel: whose attention arithmetic it runs with.
        tree: the Medusa tree; None for plain decoding.
        module_source: text of the patched module, None for the tree's own class.
        class_name: class in it.
        wrappers: put around the built model, in order: faults of the runtime.
        dtype: run in this dtype instead of the config's.
        attention_window: tokens that a query may see, itself included, one number or one a layer; None for all.
        leading_positions: rows of the base's position table that a right checkpoint leaves out (OPT's first two), which
            a faulty one reads; None where there are none, or the base is not at hand.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    emulator: Emulator = field(repr=False)
    kernel: KernelProfile = field(default_factory=lambda: kernel_profile("exact"))
    tree: MedusaTree | None = None
    module_source: str | None = None
    class_name: str | None = None
    wrappers: tuple[Wrapper, ...] = ()
    dtype: str | None = None
    attention_window: int | Sequence[int] | None = None
    leading_positions: torch.Tensor | None = field(default=None, repr=False)

    def build(self) -> Any:
        """The model: the emulator's, inside the wrappers."""
        emulator = copy.copy(self.emulator)  # shares the imported tree; only the kernel differs
        emulator.kernel = self.kernel
        model = emulator.build_model(
            dict(self.config),
            self.tensors,
            module_source=self.module_source,
            class_name=self.class_name,
            dtype=self.dtype,
        )
        if self.attention_window is not None:
            model.new_cache = functools.partial(model.new_cache, attention_window=self.attention_window)
        if self.wrappers or self.attention_window is not None:
            # Whole steps written down once know nothing of what is changed here.
            model.open_decoder = lambda *arguments: None
        for wrap in self.wrappers:
            model = wrap(model)
        return model

    def with_config(self, **changes: Any) -> PortState:
        """The same port with other config values."""
        return replace(self, config={**self.config, **changes})

    def with_tensors(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> PortState:
        """The same port with every tensor passed through `change(name, tensor)`; it must not change in place."""
        return replace(self, tensors={name: change(name, tensor) for name, tensor in self.tensors.items()})

    def with_wrapper(self, wrapper: Wrapper) -> PortState:
        """The same port with a runtime fault around its model."""
        return replace(self, wrappers=(*self.wrappers, wrapper))

    def with_window(self, attention_window: int | Sequence[int] | None) -> PortState:
        """The same port with another sliding window."""
        return replace(self, attention_window=attention_window)

    def has_tensor(self, ending: str) -> bool:
        """Whether any tensor's name ends so."""
        return any(name.endswith(ending) for name in self.tensors)


def describe_port(
    source_tree: Any,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    tree: MedusaTree | None = None,
    module_source: str | None = None,
    class_name: str | None = None,
    device: str = "cpu",
) -> PortState:
    """A healthy port with exact kernels: what every hypothesis starts from.

    Args:
        source_tree: a `SourceTree`.
        config, tensors: from `conversion.checkpoint_tensors` or a checkpoint folder.
        tree: the Medusa tree.
        module_source, class_name: the patched module.
        device: where to run.
    """
    emulator = open_emulator(source_tree, device=device)
    return PortState(config, tensors, emulator, tree=tree, module_source=module_source, class_name=class_name)


def read_port_state(
    source_tree: Any,
    checkpoint: str | Path,
    *,
    tree: MedusaTree | None = None,
    module_file: str | Path | None = None,
    class_name: str | None = None,
    device: str = "cpu",
) -> PortState:
    """The same from a one-rank checkpoint folder and the patched module's file.

    Args:
        checkpoint: folder with config.json and rank0.safetensors.
        module_file: the file for `trtllm-build --model_cls_file`; None for the tree's own class.

    Raises:
        CheckpointError: the folder holds no one-rank checkpoint.
    """
    from safetensors.torch import load_file

    files = {name: Path(checkpoint) / name for name in ("config.json", "rank0.safetensors")}
    missing = [name for name, path in files.items() if not path.is_file()]
    if missing:
        raise CheckpointError(
            "The checkpoint is incomplete",
            expected="config.json and rank0.safetensors",
            items=missing,
            where=checkpoint,
            next_step="Convert again.",
        )
    config = read_json(files["config.json"])
    if (config.get("mapping") or {}).get("world_size", 1) != 1:
        raise CheckpointError(
            "The diagnosis needs the checkpoint of one rank",
            expected="one rank: world_size 1",
            found=config["mapping"],
            where=checkpoint,
            next_step="Convert once more with tp_size 1 and pp_size 1 for the diagnosis.",
        )
    source = None if module_file is None else Path(module_file).read_text(encoding="utf-8")
    return describe_port(
        source_tree,
        config,
        load_file(files["rank0.safetensors"]),
        tree=tree,
        module_source=source,
        class_name=class_name,
        device=device,
    )
