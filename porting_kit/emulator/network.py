"""What stands behind `default_net()`: plugin switches, the outputs a run marks, the attention step in progress.

A Network belongs to one namespace. While a model runs it is the running network of its thread; tensors find it there
when they are marked as outputs, and gpt_attention finds the KV cache and the lengths of the step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from porting_kit.emulator.symbols import SymbolModule, raise_not_emulated
from porting_kit.emulator.tensor_type import Tensor, cast
from porting_kit.errors import EmulatorError

if TYPE_CHECKING:
    from porting_kit.emulator.attention_step import AttentionStep

_RUNNING = threading.local()


class PluginConfig:
    """Plugin switches: packed input, the attention plugin and a paged cache are on, everything else is off.

    Any name may be read (releases differ in what they have); what is not set is None.
    """

    def __init__(self, **switches: Any) -> None:
        self.__dict__.update(
            remove_input_padding=True, gpt_attention_plugin="auto", paged_kv_cache=True, tokens_per_block=64
        )
        self.__dict__.update(switches)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class TensorRTNetwork:
    """The TensorRT network object: any layer that a program tries to add is not emulated."""

    num_layers = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise_not_emulated(f"tensorrt network.{name}")

        return refuse


class ModuleCallStack:
    """Module.__call__ keeps layer names here; the emulator has no use for them."""

    def module_names_set(self) -> bool:
        return True

    def set_module_names(self, module: Any) -> None:
        return None

    def get_mod_name(self, module: Any) -> str:
        return ""

    def set_layer_range(self, module: Any, layers: Any) -> None:
        return None

    def get_current_module(self) -> None:
        return None

    @contextlib.contextmanager
    def call_stack_mgr(self) -> Iterator[list]:
        yield []


class Network:
    """The stand-in for tensorrt_llm.network.Network.

    Attributes:
        outputs: name -> torch tensor, what the run marked as outputs.
        step: lengths, cache and masks of the step in progress; None outside a run.
        last_hidden: hidden states that the language-model head saw, [rows, E].
        device: where constants go.
    """

    def __init__(self) -> None:
        self.plugin_config = PluginConfig()
        self.trt_network = TensorRTNetwork()
        self.strongly_typed = True
        self.dtype = None
        self.outputs: dict[str, torch.Tensor] = {}
        self.step: AttentionStep | None = None
        self.last_hidden: torch.Tensor | None = None
        self.device = torch.device("cpu")
        self._module_call_stack = ModuleCallStack()
        self._inputs: dict[str, Any] = {}

    def mark_output(self, tensor: Tensor, name: str | None, dtype: Any) -> None:
        """Keep an output under its name, in the type the engine would give it."""
        self.outputs[name or tensor.name or f"output_{len(self.outputs)}"] = (
            tensor if dtype is None else cast(tensor, dtype)
        ).data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise_not_emulated(f"tensorrt_llm.network.Network.{name}")

    @contextlib.contextmanager
    def run(self, step: AttentionStep) -> Iterator[Network]:
        """Make this the running network for one step of a model."""
        previous = getattr(_RUNNING, "network", None)
        _RUNNING.network, self.step, self.outputs, self.last_hidden = self, step, {}, None
        try:
            yield self
        finally:
            _RUNNING.network, self.step = previous, None


def find_running_network() -> Network:
    """The network of the model that is running in this thread.

    Raises:
        EmulatorError: a network operation outside a model's forward.
    """
    network = getattr(_RUNNING, "network", None)
    if network is None:
        raise EmulatorError(
            "a network operation was used while no model was running",
            expected="operations inside a model's forward",
            found="a call outside of it",
            next_step="call the model through EmulatedModel.prefill or .decode",
        )
    return network


def find_running_device() -> torch.device:
    """The device for constants: that of the running model, the CPU while a model is built."""
    network = getattr(_RUNNING, "network", None)
    return torch.device("cpu") if network is None else network.device


def is_recording() -> bool:
    """Whether the step in progress is being written down, so that no value may be read back."""
    network = getattr(_RUNNING, "network", None)
    return network is not None and network.step is not None and network.step.is_recorded


@contextlib.contextmanager
def net_guard(network: Any) -> Iterator[Any]:
    """network.net_guard of TensorRT-LLM: there is only the namespace's own network to guard."""
    yield network


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def build_network_module(name: str) -> SymbolModule:
    """The stand-in for tensorrt_llm.network."""
    return SymbolModule(
        name,
        attributes={
            "Network": Network,
            "net_guard": net_guard,
            "PluginInfo": type("PluginInfo", (), {}),
            "set_np_weight": _ignore,
            "set_plugin_info": _ignore,
            "get_np_weight": _ignore,
            "get_plugin_info": _ignore,
        },
    )


def build_plugin_module(name: str) -> SymbolModule:
    """The stand-in for tensorrt_llm.plugin and tensorrt_llm.plugin.plugin."""
    return SymbolModule(
        name,
        attributes={
            "PluginConfig": PluginConfig,
            "TRT_LLM_PLUGIN_NAMESPACE": "tensorrt_llm",
            "_load_plugin_lib": _ignore,
            "init_all_reduce_helper": _ignore,
            "current_all_reduce_helper": _ignore,
        },
    )
