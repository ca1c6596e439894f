"""Which modules and functions of TensorRT-LLM the emulator replaces, and how.

Replaced whole: tensorrt_llm.parameter, network, plugin, logger. Replaced in part: functional.py (class Tensor,
gpt_attention, primitives, collectives) and layers/moe.py (_moe_plugin). Everything else is the tree's own code.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from porting_kit.emulator.attention import gpt_attention
from porting_kit.emulator.collectives import COLLECTIVES
from porting_kit.emulator.layout import Conditional
from porting_kit.emulator.moe import moe_plugin
from porting_kit.emulator.network import build_network_module, build_plugin_module, find_running_network
from porting_kit.emulator.parameter import Parameter
from porting_kit.emulator.primitives import PRIMITIVES
from porting_kit.emulator.symbols import SymbolModule
from porting_kit.emulator.tensor_type import Tensor

# Rotary tables kept per namespace and function: one model asks for one or two.
REMEMBERED_TABLES = 4


class Logger:
    """tensorrt_llm.logger.logger, forwarded to Python's logging."""

    def __init__(self) -> None:
        self._log = logging.getLogger("porting_kit.emulator.tensorrt_llm")
        self.level = "error"
        self.trt_logger = None

    def set_level(self, level: Any) -> None:
        self.level = level

    def _write(self, *args: Any) -> None:
        self._log.debug(" ".join(str(arg) for arg in args))

    # A model prints dozens of warnings about defaults while it is built; they are for the library's own log.
    debug = verbose = info = warning = error = log = _write
    warning_once = info_once = debug_once = error_once = _write


def build_logger_module(name: str) -> ModuleType:
    """The stand-in for tensorrt_llm.logger."""
    return SymbolModule(name, attributes={"logger": Logger(), "Logger": Logger})


def build_parameter_module(name: str) -> ModuleType:
    """The stand-in for tensorrt_llm.parameter."""
    return SymbolModule(name, attributes={"Parameter": Parameter})


def build_graph_rewriting_module(name: str) -> ModuleType:
    """The stand-in for tensorrt_llm.graph_rewriting, whose decorator records functions for graph surgery."""
    return SymbolModule(name, attributes={"record_signature": lambda function: function})


BOTTOM_MODULES: dict[str, Callable[[str], ModuleType]] = {
    "graph_rewriting": build_graph_rewriting_module,
    "logger": build_logger_module,
    "network": build_network_module,
    "parameter": build_parameter_module,
    "plugin": build_plugin_module,
    "plugin.plugin": build_plugin_module,
}


def replace_primitives(functional: ModuleType) -> None:
    """Replace the bottom of an executed functional.py: Tensor, primitives, collectives, gpt_attention.

    `relu`, `add` and their like are partial objects made at import, and ACT2FN holds them: both are rebuilt.
    """
    names = vars(functional)
    replaced: dict[int, Any] = {}
    for name, function in {**PRIMITIVES, **COLLECTIVES, "gpt_attention": gpt_attention}.items():
        if isinstance(names.get(name), FunctionType):
            replaced[id(names[name])] = function
            names[name] = function
    for name, value in list(names.items()):
        if isinstance(value, functools.partial) and id(value.func) in replaced:
            names[name] = functools.partial(replaced[id(value.func)], *value.args, **value.keywords)
            replaced[id(value)] = names[name]
    for value in list(names.values()):
        if isinstance(value, dict) and value and not value.get("__builtins__"):
            for key, item in list(value.items()):
                if id(item) in replaced:
                    value[key] = replaced[id(item)]
    names["Tensor"] = Tensor
    if "Conditional" in names:
        names["Conditional"] = Conditional
    if "gather_last_token_logits" in names:
        names["gather_last_token_logits"] = _watch_last_hidden(names["gather_last_token_logits"])
    if "RopeEmbeddingUtils" in names:
        _share_tables(names["RopeEmbeddingUtils"])


def _watch_last_hidden(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep what the language-model head sees, for ModelOutput.hidden_states."""

    @functools.wraps(function)
    def gather_last_token_logits(*args: Any, **kwargs: Any) -> Tensor:
        hidden = function(*args, **kwargs)
        find_running_network().last_hidden = hidden.data
        return hidden

    return gather_last_token_logits


def _share_tables(owner: type) -> None:
    """Compute equal rotary tables once: every layer of a release before 0.12 asks for its own copy."""
    for name, function in list(vars(owner).items()):
        if name.startswith("create_sinusoidal_positions"):
            plain = function.__func__ if isinstance(function, staticmethod) else function
            setattr(owner, name, staticmethod(_remember_results(plain)))


def _remember_results(function: Callable[..., Any]) -> Callable[..., Any]:
    results: dict[str, Any] = {}

    @functools.wraps(function)
    def remembered(*args: Any, **kwargs: Any) -> Any:
        key = repr([_describe(value) for value in (*args, *sorted(kwargs.items()))])
        if key not in results:
            if len(results) >= REMEMBERED_TABLES:
                results.clear()
            results[key] = function(*args, **kwargs)
        return results[key]

    return remembered


def _describe(value: Any) -> Any:
    """A value as text that differs whenever the value does (numpy's own text abbreviates and rounds)."""
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def replace_moe_plugin(moe: ModuleType) -> None:
    """Replace the plugin call of an executed layers/moe.py."""
    if "_moe_plugin" in vars(moe):
        vars(moe)["_moe_plugin"] = moe_plugin
