"""A weight: its shape and dtype are known when the model is defined, its value when a checkpoint is loaded."""


class Parameter:
    """One weight of a layer.

    Args:
        value: an array that is part of the model itself (rotary tables, ALiBi slopes); None for a checkpoint's weight.
        shape: the shape when there is no value yet.
        dtype: the dtype's name, such as "float16".
        is_buffer: whether the value belongs to the model and not to a checkpoint.
    """

    def __init__(self, value=None, shape=None, dtype=None, is_buffer=False):
        self._value = value
        self._shape = tuple(shape if value is None else value.shape)
        self.dtype = "float32" if dtype is None else dtype
        self.is_buffer = is_buffer

    @property
    def shape(self):
        return self._shape

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        if tuple(value.shape) != self._shape:
            raise ValueError(f"a value of shape {tuple(value.shape)} does not fit a parameter of shape {self._shape}")
        self._value = value

    def is_inited(self):
        """Whether a value is there."""
        return self._value is not None
