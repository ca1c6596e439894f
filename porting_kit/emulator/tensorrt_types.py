"""The module `tensorrt` as TensorRT-LLM's Python sees it here: data types and operation names, nothing that computes.

`float64` runs (for checks) keep TensorRT-LLM's word for float32, because its own tables know no double: a tensor that
holds float64 calls itself FLOAT, and a cast to FLOAT leaves it in float64.
"""

from __future__ import annotations

from enum import Enum
from types import ModuleType

import numpy as np
import torch

from porting_kit.emulator.symbols import Symbol, SymbolModule

# The release of TensorRT that the stand-in claims to be: at least 10, where networks are strongly typed.
TENSORRT_VERSION = "10.4.0"


class DataType(Enum):
    """TensorRT's element types; `int(...)` gives TensorRT's own number."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9

    def __int__(self) -> int:
        return self.value

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return torch.empty(0, dtype=TORCH_DTYPES[self]).element_size()


TORCH_DTYPES: dict[DataType, torch.dtype] = {
    DataType.FLOAT: torch.float32,
    DataType.HALF: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT8: torch.int8,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.UINT8: torch.uint8,
    DataType.BOOL: torch.bool,
    DataType.FP8: torch.float8_e4m3fn,
}
DATA_TYPES: dict[torch.dtype, DataType] = {
    **{torch_type: data_type for data_type, torch_type in TORCH_DTYPES.items()},
    torch.float64: DataType.FLOAT,
}
# The strings a checkpoint's config uses, and torch's names for them.
TORCH_DTYPE_OF_NAME: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "bool": torch.bool,
    "fp8": torch.float8_e4m3fn,
}


class OperationFamily:
    """A family such as ElementWiseOperation: every attribute is its own name as text ("SUM")."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name

    def __or__(self, other: object) -> object:
        return self

    __ror__ = __or__

    def __call__(self, *args: object) -> None:
        raise TypeError(f"tensorrt.{self._name} is a family of names")


OPERATION_FAMILIES = (
    "ActivationType",
    "ElementWiseOperation",
    "FillOperation",
    "GatherMode",
    "LayerType",
    "MatrixOperation",
    "PluginFieldType",
    "ReduceOperation",
    "SampleMode",
    "ScatterMode",
    "TensorLocation",
    "TopKOperation",
    "UnaryOperation",
)


def torch_to_numpy_dtype_is_abstract(dtype: np.dtype) -> torch.dtype | None:
    """The torch type behind TensorRT-LLM's abstract numpy types (V2 is bfloat16, V1 is fp8), None for real ones."""
    if dtype.kind != "V":
        return None
    return torch.bfloat16 if dtype.itemsize == 2 else torch.float8_e4m3fn


def build_tensorrt_module() -> ModuleType:
    """The stand-in for `import tensorrt`."""
    module = SymbolModule("tensorrt", attributes={"__version__": TENSORRT_VERSION, "DataType": DataType})
    names = {
        "float32": DataType.FLOAT,
        "float16": DataType.HALF,
        "bfloat16": DataType.BF16,
        "int8": DataType.INT8,
        "int32": DataType.INT32,
        "int64": DataType.INT64,
        "bool": DataType.BOOL,
        "uint8": DataType.UINT8,
        "fp8": DataType.FP8,
        "int4": DataType.INT4,
    }
    module.__dict__.update(names)
    module.__dict__.update({name: OperationFamily(name) for name in OPERATION_FAMILIES})
    # dims_array in _utils asks whether dimensions may be 64 bits wide by building one.
    module.__dict__["Dims"] = tuple
    module.__dict__["Logger"] = Symbol("tensorrt.Logger")
    return module
