"""Feed-forward blocks. `fc` is the activated branch, `gate` the linear one, `proj` the way back."""

from ..functional import ACT2FN
from ..module import Module
from ..quantization import QuantMode
from .linear import ColumnLinear, RowLinear


class MLP(Module):
    """proj(act(fc(x)))."""

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        hidden_act,
        bias=True,
        dtype=None,
        tp_group=None,
        tp_size=1,
        quant_mode=QuantMode.NONE,
    ):
        super().__init__()
        if hidden_act not in ACT2FN:
            raise ValueError(f"unsupported activation {hidden_act!r}; known: {sorted(ACT2FN)}")
        split = {"bias": bias, "dtype": dtype, "tp_group": tp_group, "tp_size": tp_size}
        self.hidden_act = hidden_act
        self.fc = ColumnLinear(hidden_size, ffn_hidden_size, gather_output=False, **split)
        self.proj = RowLinear(ffn_hidden_size, hidden_size, **split)

    def forward(self, hidden_states, lora_layer_params=None):
        return self.proj(ACT2FN[self.hidden_act](self.fc(hidden_states)))


class GatedMLP(MLP):
    """proj(act(fc(x)) * gate(x))."""

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        hidden_act,
        bias=True,
        dtype=None,
        tp_group=None,
        tp_size=1,
        quant_mode=QuantMode.NONE,
    ):
        super().__init__(hidden_size, ffn_hidden_size, hidden_act, bias, dtype, tp_group, tp_size, quant_mode)
        self.gate = ColumnLinear(
            hidden_size,
            ffn_hidden_size,
            bias=bias,
            dtype=dtype,
            tp_group=tp_group,
            tp_size=tp_size,
            gather_output=False,
        )

    def forward(self, hidden_states, lora_layer_params=None):
        return self.proj(ACT2FN[self.hidden_act](self.fc(hidden_states)) * self.gate(hidden_states))
