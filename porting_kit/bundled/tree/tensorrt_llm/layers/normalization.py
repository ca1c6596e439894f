"""Normalisation over the hidden dim."""

from ..functional import layer_norm, rms_norm
from ..module import Module
from ..parameter import Parameter


def _as_shape(normalized_shape):
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


class LayerNorm(Module):
    """Mean and variance removed, then scaled and shifted."""

    def __init__(self, normalized_shape, eps=1e-05, elementwise_affine=True, bias=True, dtype=None):
        super().__init__()
        self.normalized_shape, self.eps, self.dtype = _as_shape(normalized_shape), eps, dtype
        has_bias = elementwise_affine and bias
        for name, present in (("weight", elementwise_affine), ("bias", has_bias)):
            self.register_parameter(name, Parameter(shape=self.normalized_shape, dtype=dtype) if present else None)

    def forward(self, x):
        weight = 1.0 if self.weight is None else self.weight.value
        bias = 0.0 if self.bias is None else self.bias.value
        return layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RmsNorm(Module):
    """Divided by the root mean square, then scaled."""

    def __init__(self, normalized_shape, eps=1e-06, elementwise_affine=True, dtype=None):
        super().__init__()
        self.normalized_shape, self.eps, self.dtype = _as_shape(normalized_shape), eps, dtype
        weight = Parameter(shape=self.normalized_shape, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x):
        return rms_norm(x, self.normalized_shape, None if self.weight is None else self.weight.value, self.eps)
