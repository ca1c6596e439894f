"""What transforms read from and write to a checkpoint's config, and what makes them inapplicable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from porting_kit.errors import ConversionError

Config = Mapping[str, Any]
ALIBI_KINDS = ("alibi", "alibi_with_scale")
SHARE_KEYS = ("rotary_pct", "partial_rotary_factor")
BASE_KEYS = ("rotary_base", "rotary_emb_base")
QKV_BIAS_KEY = "attention_qkv_bias"
DENSE_BIAS_KEY = "attention_dense_bias"
POSITION_DIMS = 4
"""Dims of a head that write_positions takes: two digits of the position, for each of two parts of the slope."""
DIGIT_BASE, LARGEST_DIGIT = 128, 256
"""Digits are whole numbers that bfloat16, with eight bits, holds exactly."""
WRITING_DTYPES = ("bfloat16", "float32")
"""Types in which every kernel sums a logit in float32."""


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not below value."""
    return 1 << (value - 1).bit_length()


def rotary_dims(config: Config) -> int:
    """How many dims of each head are rotated: an even number, the first ones."""
    if config.get("rotary_dim") is not None:
        return int(config["rotary_dim"])
    shares = [config[key] for key in SHARE_KEYS if config.get(key) is not None]
    return int(config["head_size"] * (shares[0] if shares else 1.0))


def set_rotary_dims(config: dict[str, Any], dims: int) -> None:
    """Write the rotated share under every key that some release reads.

    `rotary_pct` is always written: from 0.12 on the rotary tables are made from it
    (layers/attention.py 0.13.0.dev2024090300, create_attention_const_params).
    """
    share = dims / config["head_size"]
    if int(config["head_size"] * share) != dims:
        raise ConversionError(
            "the rotated share cannot be written exactly",
            expected="a share that gives back the number of dims",
            found=f"{dims} of {config['head_size']} dims",
            next_step="choose a head size that is a power of two",
        )
    for key in SHARE_KEYS:
        if key in config or key == "rotary_pct":
            config[key] = share
    if "rotary_dim" in config:
        config["rotary_dim"] = dims


def refuse_changed_rows(config: Config, transform: str, *, clipping: bool = True) -> None:
    """Stop when something happens to queries and keys between projection and kernel that zeros or factors disturb.

    Raises:
        ConversionError: rows are clipped, or normalised.
    """
    what = None
    if clipping and config.get("clip_qkv") is not None:
        what = f"clip_qkv {config['clip_qkv']:g}: the projections are clipped after they are made"
    elif config.get("qk_layernorm"):
        what = "qk_layernorm: queries and keys are normalised after the projection"
    if what is not None:
        raise ConversionError(
            f"{transform} cannot be applied to this model",
            expected="projections that go to the kernel as they are",
            found=what,
            next_step="no transform mends this: choose a release whose kernel takes the model as it is",
        )
