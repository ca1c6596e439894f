"""Run a TensorRT-LLM source tree's own model definitions in eager PyTorch, without TensorRT and without a GPU.

The emulator stands in for the bottom layer only: the module `tensorrt`, the network, parameters, plugins, primitive
operations, gpt_attention, the MoE plugin and the collectives. Everything above is the tree's own, unmodified or
patched code, in an import namespace of its own. It knows nothing of conversion, patching, trees or acceptance.
"""

from porting_kit.emulator.cache import KVCache
from porting_kit.emulator.emulator import Emulator, open_emulator
from porting_kit.emulator.model import EmulatedModel
from porting_kit.emulator.model_output import ModelOutput

__all__ = ["EmulatedModel", "Emulator", "KVCache", "ModelOutput", "open_emulator"]
