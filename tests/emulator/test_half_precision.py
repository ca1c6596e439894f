"""Half-precision products computed in float32, whatever the weights were made under."""

import pytest
import torch

from porting_kit.emulator.half_precision import linear_rounded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_made_in_inference_mode_are_multiplied_too(dtype):
    """They have no version by which a kept copy could be told stale, so none is kept."""
    with torch.inference_mode():
        weight = torch.randn(5, 8, dtype=dtype)
        rows = torch.randn(3, 8, dtype=dtype)
        expected = (rows.float() @ weight.float().T).to(dtype)
        assert torch.equal(linear_rounded(rows, weight), expected)
        weight.mul_(2)
        assert torch.equal(linear_rounded(rows, weight), (rows.float() @ weight.float().T).to(dtype))
