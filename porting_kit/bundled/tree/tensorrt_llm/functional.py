"""The operations a model is made of.

Primitive operations are declared here and implemented by whoever runs the model: TensorRT-LLM adds a layer to a
TensorRT network, the emulator computes with PyTorch. Everything after the primitives is composed of them.

Shapes use the letters of porting_kit. Activations are packed: [T, E], the requests of a call one after the other.
"""

import math
from enum import IntEnum
from functools import wraps

import numpy as np

from .quantization import QuantMode


class PositionEmbeddingType(IntEnum):
    """How a model tells positions apart."""

    learned_absolute = 0
    rope_gptj = 1  # rotary on neighbouring pairs (0, 1), (2, 3) ...
    rope_gpt_neox = 2  # rotary on the pairs (i, i + half)
    long_rope = 3
    alibi = 4
    alibi_with_scale = 5
    relative = 6
    chatglm = 7

    def is_rope(self):
        return self in (type(self).rope_gptj, type(self).rope_gpt_neox, type(self).long_rope)

    def is_alibi(self):
        return self in (type(self).alibi, type(self).alibi_with_scale)

    @classmethod
    def from_string(cls, name):
        return cls[name]

    def __str__(self):
        return self.name


class RotaryScalingType(IntEnum):
    """How rotary positions are stretched beyond the trained length."""

    none = 0
    linear = 1
    dynamic = 2
    llama3 = 3


class AttentionMaskType(IntEnum):
    """Which keys a query may see."""

    padding = 0
    causal = 1
    bidirectional = 2


class Tensor:
    """A value in the network: it knows its shape and dtype, not its numbers.

    Arithmetic operators, `view`, `mean`, `sqrt`, `cast`, `ndim()` and `mark_output(name, dtype)` add operations. A
    Tensor is always true, also in `if tensor:`.
    """

    def __init__(self, *args, **kwargs):
        raise _needs_emulator("Tensor")


def _needs_emulator(name):
    return RuntimeError(f"tensorrt_llm.functional.{name} is only declared here; run the model in porting_kit.emulator")


def _primitive(declaration):
    """Mark a function whose body is supplied by the machinery that runs the model."""

    @wraps(declaration)
    def raise_without_emulator(*args, **kwargs):
        raise _needs_emulator(declaration.__name__)

    return raise_without_emulator


# Primitive operations -------------------------------------------------------------------------------------------------


@_primitive
def constant(ndarray):
    """A Tensor with fixed numbers."""


@_primitive
def shape(input, dim=None):
    """The shape as an int32 Tensor, or one entry of it."""


@_primitive
def cast(input, dtype):
    """The same numbers in another dtype."""


@_primitive
def matmul(input, mat2, transa=False, transb=False, use_fp32_acc=True):
    """The product of two matrices; `transa` and `transb` transpose the last two dims of one."""


@_primitive
def concat(inputs, dim=0):
    """Tensors joined along a dim; ints count as tensors of one element."""


@_primitive
def stack(inputs, dim=0):
    """Tensors of one shape joined along a new dim."""


@_primitive
def split(tensor, split_size_or_sections, dim=0):
    """A tensor cut into parts of one size, or of the sizes in a list."""


@_primitive
def slice(input, starts, sizes, strides=None):
    """A box of the tensor: where it starts and its size in each dim."""


@_primitive
def unsqueeze(input, axis):
    """The tensor with a new dim of size 1."""


@_primitive
def index_select(input, dim, index):
    """The rows of `input` along `dim` that `index` lists."""


@_primitive
def embedding(input, weight, tp_size=1, tp_group=None, sharding_dim=0, tp_rank=None):
    """Token ids [T] -> rows of `weight` [T, E]."""


@_primitive
def pow(left, right):
    """left to the power of right, elementwise."""


@_primitive
def maximum(left, right):
    """The larger of two, elementwise."""


@_primitive
def relu(input):
    """max(x, 0)."""


@_primitive
def tanh(input):
    """The hyperbolic tangent."""


@_primitive
def sigmoid(input):
    """1 / (1 + exp(-x))."""


@_primitive
def clip(input, alpha, beta):
    """Values held between alpha and beta."""


@_primitive
def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05, use_diff_of_squares=True):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim."""


@_primitive
def allreduce(tensor, group, strategy=None):
    """The sum of a tensor over the ranks of a group."""


@_primitive
def allgather(tensor, group, gather_dim=0):
    """The tensors of a group's ranks joined along a dim."""


@_primitive
def send(tensor, tgt):
    """Hand a tensor to another rank."""


@_primitive
def recv(tensor, src):
    """Take a tensor of the same shape from another rank."""


@_primitive
def gpt_attention(
    *,
    qkv,
    past_key_value,
    sequence_length,
    host_past_key_value_lengths,
    host_max_attention_window_sizes,
    host_sink_token_length,
    context_lengths,
    cache_indirection,
    host_request_types,
    layer_idx,
    num_heads,
    num_kv_heads,
    hidden_size_per_head,
    q_scaling,
    qk_tanh_scale=0.0,
    rotary_embedding_dim=0,
    rotary_embedding_base=10000.0,
    rotary_embedding_scale_type=RotaryScalingType.none,
    rotary_embedding_scale=1.0,
    rotary_embedding_max_positions=1024,
    position_embedding_type=PositionEmbeddingType.learned_absolute,
    rotary_cos_sin=None,
    kv_orig_quant_scale=None,
    kv_quant_orig_scale=None,
    kv_cache_quant_mode=QuantMode.NONE,
    max_context_length=None,
    mask_type=AttentionMaskType.causal,
    alibi_slopes=None,
    tp_size=1,
    tp_rank=0,
    kv_cache_block_offsets=None,
    host_kv_cache_block_offsets=None,
    host_kv_cache_pool_pointers=None,
    host_context_lengths=None,
    use_cache=True,
    spec_decoding_generation_lengths=None,
    spec_decoding_position_offsets=None,
    spec_decoding_packed_mask=None,
):
    """Attention over the KV cache for a batch of context and generation requests.

    Queries, keys and values arrive joined: qkv [T, (H + 2 K) * D]. The operation rotates queries and keys (or adds the
    ALiBi bias), appends keys and values to the cache, and attends. In the generation phase the three
    `spec_decoding_*` tensors let one request bring N tokens that form a tree:

    - generation_lengths int32 [B]: how many of the N tokens are valid;
    - position_offsets int32 [B, N]: each token's distance from the first, that is its depth in the tree;
    - packed_mask int32 [B * N, W]: bit j of row i set when token i may see token j.

    Without them a generation request has exactly one token.

    Returns:
        The attention output [T, H * D] and the updated cache.
    """


# Composed operations --------------------------------------------------------------------------------------------------


def silu(input):
    """x * sigmoid(x)."""
    return input * sigmoid(input)


def gelu(x):
    """GELU in its tanh form, which TensorRT-LLM uses under every name it has for GELU."""
    inner = (x + pow(x, 3.0) * 0.044715) * math.sqrt(2.0 / math.pi)
    return x * (tanh(inner) + 1.0) * 0.5


ACT2FN = {"relu": relu, "tanh": tanh, "gelu": gelu, "gelu_new": gelu, "gelu_fast": gelu, "silu": silu}


def rms_norm(input, normalized_shape, weight=None, eps=1e-06):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; the division in float32, the product in x's dtype."""
    wide = cast(input, "float32")
    root = (pow(wide, 2.0).mean(dim=-1, keepdim=True) + eps).sqrt()
    normalised = cast(wide / root, input.dtype)
    return normalised if weight is None else normalised * weight


def generate_alibi_slopes(num_heads, tp_size=1, tp_rank=0, alibi_scale=1.0, alibi_bias_max=8):
    """The ALiBi slope of each head of this rank, float32 [1, H, 1, 1] (arXiv 2108.12409).

    With n the largest power of two up to H, head i < n has slope 2^(-bias_max * (i + 1) / n); the rest take every
    second slope of the sequence for 2n heads.
    """
    n = 2 ** int(math.log2(num_heads))
    exponents = [(head + 1) / n for head in range(n)] + [(2 * extra + 1) / (2 * n) for extra in range(num_heads - n)]
    slopes = alibi_scale * np.exp2(-alibi_bias_max * np.asarray(exponents))
    per_rank = num_heads // tp_size
    return slopes[tp_rank * per_rank : (tp_rank + 1) * per_rank].astype(np.float32).reshape(1, per_rank, 1, 1)


class RopeEmbeddingUtils:
    """Tables for rotary embedding."""

    @staticmethod
    def create_sinusoidal_positions_for_attention_plugin(
        num_pos,
        dim,
        theta=10000.0,
        scale=1.0,
        scale_type=RotaryScalingType.none,
        dtype=np.float32,
        rope_scaling_config=None,
    ):
        """cos and sin of position * frequency, float32 [1, num_pos * dim], (cos, sin) side by side per frequency.

        Args:
            num_pos: positions.
            dim: rotated dims of a head; there are dim / 2 frequencies theta^(-2 i / dim).
            scale: with linear scaling, positions are divided by it.
            rope_scaling_config: the settings of llama3 scaling, named as in Hugging Face configs.
        """
        frequencies = theta ** -(np.arange(0, dim, 2) / dim)
        if scale_type == RotaryScalingType.linear:
            frequencies = frequencies / scale
        elif scale_type == RotaryScalingType.llama3:
            frequencies = RopeEmbeddingUtils.stretch_low_frequencies(frequencies, rope_scaling_config)
        angles = np.outer(np.arange(num_pos), frequencies)
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(1, -1).astype(dtype)

    @staticmethod
    def stretch_low_frequencies(frequencies, settings):
        """The rule of Llama 3.1: frequencies that turn seldom within the trained length are divided by the factor.

        Those with at most low_freq_factor turns are divided, those with at least high_freq_factor kept, in between the
        two are mixed in proportion.
        """
        low, high = settings.get("low_freq_factor", 1.0), settings.get("high_freq_factor", 4.0)
        turns = settings.get("original_max_position_embeddings", 8192) * frequencies / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / settings.get("factor", 8.0)


def gather_last_token_logits(hidden_states, last_token_ids, remove_input_padding):
    """The hidden states whose logits are wanted.

    Args:
        hidden_states: [T, E], packed.
        last_token_ids: int32; for each wanted token the number of tokens up to and including it. A context request
            names its last token, a generation request all of its tokens.
        remove_input_padding: must be true; these definitions take packed input only.
    """
    if not remove_input_padding:
        raise NotImplementedError("the bundled definitions take packed input only (remove_input_padding)")
    return index_select(hidden_states, 0, last_token_ids - 1)
