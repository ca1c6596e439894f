"""Matrix products with weights, whole or split over the tensor-parallel ranks.

A column-parallel layer holds some of the output features, a row-parallel one some of the input features. The usual
pair is column-parallel first, without gathering, then row-parallel, whose sum over the ranks is the exact result.
"""

from ..functional import allgather, allreduce, cast, matmul
from ..module import Module
from ..parameter import Parameter


class Linear(Module):
    """y = x W^T + b, with the output features split over the ranks.

    Args:
        in_features, out_features: sizes of the whole layer.
        gather_output: whether every rank gets all output features.
    """

    def __init__(
        self, in_features, out_features, bias=True, dtype=None, tp_group=None, tp_size=1, gather_output=True, **unused
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features // tp_size
        self.dtype, self.tp_group, self.tp_size, self.gather_output = dtype, tp_group, tp_size, gather_output
        self.weight = Parameter(shape=(self.out_features, self.in_features), dtype=dtype)
        self.register_parameter("bias", Parameter(shape=(self.out_features,), dtype=dtype) if bias else None)

    def forward(self, x, lora_runtime_params=None):
        y = matmul(x, self.weight.value, transb=True)
        if self.bias is not None:
            y = y + cast(self.bias.value, y.dtype)
        if self.gather_output and self.tp_size > 1 and self.tp_group is not None:
            y = allgather(y, self.tp_group, gather_dim=-1)
        return y


ColumnLinear = Linear


class RowLinear(Module):
    """y = x W^T + b, with the input features split over the ranks and the partial results summed."""

    def __init__(self, in_features, out_features, bias=True, dtype=None, tp_group=None, tp_size=1, **unused):
        super().__init__()
        self.in_features = in_features // tp_size
        self.out_features = out_features
        self.dtype, self.tp_group, self.tp_size = dtype, tp_group, tp_size
        self.weight = Parameter(shape=(self.out_features, self.in_features), dtype=dtype)
        self.register_parameter("bias", Parameter(shape=(self.out_features,), dtype=dtype) if bias else None)

    def forward(self, x, lora_runtime_params=None):
        y = matmul(x, self.weight.value, transb=True)
        if self.tp_size > 1 and self.tp_group is not None:
            y = allreduce(y, self.tp_group)
        # After the sum: every rank holds the whole bias, which must count once.
        if self.bias is not None:
            y = y + cast(self.bias.value, y.dtype)
        return y
