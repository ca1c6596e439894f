"""What can be wrong with an engine, done by hand to a Hugging Face model; see `foreign_engines`.

Weights are changed as a converter would have got them wrong, code as a model file would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn

LLAMAS = ("llama", "qwen2")
ALL = ("llama", "qwen2", "bloom", "gptneox")


# ---------------------------------------------------------------------------------------------- parts of a model


def layers_of(model: Any) -> list[Any]:
    """The decoder layers."""
    for path in ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers"):
        found: Any = model
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return list(found)
    raise LookupError(type(model).__name__)


def each_layer(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """`change` done to every layer."""

    def spoil(model: Any) -> None:
        for layer in layers_of(model):
            change(layer)

    return spoil


def attention_of(layer: Any) -> Any:
    """Its attention."""
    names = ("self_attn", "self_attention", "attention", "attn")
    return next(getattr(layer, name) for name in names if hasattr(layer, name))


def modules_named(model: Any, *endings: str) -> list[Any]:
    """Modules whose name ends so."""
    return [module for name, module in model.named_modules() if name.endswith(endings)]


def swap_data(first: torch.Tensor, second: torch.Tensor) -> None:
    """Two parameters exchange their values."""
    first.data, second.data = second.data.clone(), first.data.clone()


def zero(*tensors: torch.Tensor | None) -> None:
    """All of them zero."""
    for tensor in tensors:
        if tensor is not None:
            tensor.data.zero_()


def norms_of(model: Any) -> list[Any]:
    """Every norm module."""
    return [module for module in model.modules() if "Norm" in type(module).__name__ and hasattr(module, "weight")]


def head_size(attention: Any) -> int:
    """D."""
    return int(getattr(attention, "head_dim", None) or attention.head_size)


# --------------------------------------------------------------------------------------------------- weights


def drop_biases(*letters: str) -> Callable[[Any], None]:
    """Biases of these projections of a LLaMA-like attention lost."""
    return each_layer(lambda layer: zero(*(getattr(layer.self_attn, f"{letter}_proj").bias for letter in letters)))


def rotate_biases(layer: Any) -> None:
    """Biases joined as k, v, q where the weights are q, k, v."""
    own = layer.self_attn
    parts = [own.q_proj.bias, own.k_proj.bias, own.v_proj.bias]
    joined = torch.cat([parts[1], parts[2], parts[0]]).clone()
    for part, value in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = value


def take_rows_as_parts(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows stored head by head (q, k, v of each) read as if they were all q, then all k, then all v."""
    rows = weight.reshape(3, heads, -1, *weight.shape[1:])
    return rows.transpose(0, 1).reshape(weight.shape).contiguous()


def misread_fused(*parts: str) -> Callable[[Any], None]:
    """BLOOM's and GPT-NeoX's fused projection not taken apart head by head: weight, bias or both."""

    def change(layer: Any) -> None:
        own = attention_of(layer)
        heads = own.query_key_value.weight.shape[0] // 3 // head_size(own)
        for part in parts:
            tensor = getattr(own.query_key_value, part)
            tensor.data = take_rows_as_parts(tensor.data, heads)

    return each_layer(change)


def swap_fused(first: int, second: int) -> Callable[[Any], None]:
    """Two of q, k, v exchanged in a projection that is stored head by head."""

    def change(layer: Any) -> None:
        own = attention_of(layer)
        for tensor in (own.query_key_value.weight, own.query_key_value.bias):
            rows = tensor.data.reshape(-1, 3, head_size(own), *tensor.shape[1:]).clone()
            order = [0, 1, 2]
            order[first], order[second] = order[second], order[first]
            tensor.data = rows[:, order].reshape(tensor.shape).contiguous()

    return each_layer(change)


def quantise(bits: int, group: int | None = None) -> Callable[[Any], None]:
    """Round-to-nearest with one scale a row (or group of columns), without any calibration."""

    def spoil(model: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and "lm_head" not in name and "embed_out" not in name:
                weight = module.weight.data
                rows = weight.reshape(weight.shape[0], -1, group or weight.shape[1])
                scale = rows.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
                module.weight.data = ((rows / scale).round() * scale).reshape(weight.shape)

    return spoil


def tune_further(share: float) -> Callable[[Any], None]:
    """Another fine-tune of the same base: every matrix moved by this share of its size."""

    def spoil(model: Any) -> None:
        generator = torch.Generator().manual_seed(77)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.data += share * parameter.data.std() * noise if parameter.dim() > 1 else 0

    return spoil


def permute_rows(model: Any) -> None:
    """The MLP's output matrix of one layer with its columns in another order."""
    module = modules_named(layers_of(model)[0], "down_proj", "dense_4h_to_h")[0]
    order = torch.randperm(module.weight.shape[1], generator=torch.Generator().manual_seed(5))
    module.weight.data = module.weight.data[:, order].contiguous()


# ------------------------------------------------------------------------------------------------ rotary, config


def set_rotary(change: Callable[[torch.Tensor], torch.Tensor], scaling: float | None = None) -> Callable[[Any], None]:
    """The rotary frequencies of the whole model changed."""

    def spoil(model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith("rotary_emb"):
                module.inv_freq = change(module.inv_freq.float())
                if scaling is not None:
                    module.attention_scaling = scaling

    return spoil


def with_theta(theta: float, divisor: float = 1.0) -> Callable[[Any], None]:
    """The rotary base another."""

    def change(own: torch.Tensor) -> torch.Tensor:
        return theta ** -(torch.arange(len(own)) / len(own)) / divisor

    return set_rotary(change)


def with_theta_of_share(dims: int, theta: float = 500.0) -> Callable[[Any], None]:
    """Another part of each head rotated: so many dimensions."""
    return set_rotary(lambda own: theta ** -(torch.arange(0, dims, 2) / dims))


def shift_positions(model: Any) -> None:
    """Positions count from 1: rotary attention sees differences alone."""
    own = model.forward
    model.forward = lambda input_ids, **more: own(
        input_ids=input_ids, position_ids=torch.arange(1, input_ids.shape[1] + 1)[None], **more
    )


def smooth_llama3(own: torch.Tensor) -> torch.Tensor:
    """Meta's scaling of Llama 3.1 by 8 over 64 positions, on frequencies without any scaling."""
    wavelengths = 2 * torch.pi / own
    low, high = 64 / 1.0, 64 / 4.0
    share = (64 / wavelengths - 1.0) / (4.0 - 1.0)
    middle = (1 - share) * own / 8.0 + share * own
    return torch.where(wavelengths > low, own / 8.0, torch.where(wavelengths < high, own, middle))


def rotate_neighbours(q: Any, k: Any, cos: Any, sin: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """GPT-J's rotary: dimension 2i with 2i + 1. The angle of pair i stands at place i of the first half."""
    half = cos.shape[-1] // 2
    c, s = (table[..., :half].unsqueeze(1).repeat_interleave(2, -1) for table in (cos, sin))

    def turn(x: torch.Tensor) -> torch.Tensor:
        whole, rest = x[..., : 2 * half], x[..., 2 * half :]
        other = torch.stack([-whole[..., 1::2], whole[..., ::2]], -1).flatten(-2)
        return torch.cat([whole * c + other * s, rest], -1)

    return turn(q), turn(k)


def replace_function(name: str, function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function of the model's own module replaced while the engine runs."""

    def spoil(model: Any) -> Any:
        import sys

        return mock.patch.object(sys.modules[type(model).__module__], name, function)

    return spoil


def repeat_as_block(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Key heads repeated one block after the other: 0 1 0 1 in place of 0 0 1 1."""
    return states.repeat(1, groups, 1, 1)


def set_attribute(name: str, value: Any) -> Callable[[Any], None]:
    """An attribute of every module that has it."""

    def spoil(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, name):
                own = getattr(module, name)
                setattr(module, name, value(own) if callable(value) and not isinstance(value, nn.Module) else value)

    return spoil


def set_activation(kind: str) -> Callable[[Any], None]:
    """Every MLP's activation another."""
    from transformers.activations import ACT2FN

    def spoil(model: Any) -> None:
        for module in model.modules():
            for name in ("act_fn", "act", "gelu_impl", "activation_fn"):
                if isinstance(getattr(module, name, None), nn.Module):
                    setattr(module, name, ACT2FN[kind])

    return spoil


def set_epsilon(value: float) -> Callable[[Any], None]:
    """Every norm's epsilon another."""

    def spoil(model: Any) -> None:
        for norm in norms_of(model):
            setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", value)

    return spoil


def swap_modules(first: str, second: str) -> Callable[[Any], None]:
    """Two modules of every layer take each other's place."""

    def change(layer: Any) -> None:
        one, two = getattr(layer, first), getattr(layer, second)
        setattr(layer, first, two)
        setattr(layer, second, one)

    return each_layer(change)


def scale_queries(factor: float) -> Callable[[Any], None]:
    """Attention logits times a factor."""
    return set_attribute("scaling", lambda own: own * factor)


def scale_alibi(factor: float) -> Callable[[Any], None]:
    """BLOOM's attention bias times a factor, in every phase."""

    def spoil(model: Any) -> None:
        own, forward = model.transformer.build_alibi_tensor, model.forward
        model.transformer.build_alibi_tensor = lambda *args, **kwargs: factor * own(*args, **kwargs)
        # Without a mask, transformers 5 makes the bias itself.
        model.forward = lambda input_ids, **more: forward(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **more
        )

    return spoil


def skip_last_layer(model: Any) -> None:
    """One layer fewer."""
    holder = model.model if hasattr(model, "model") else model.transformer
    name = "layers" if hasattr(holder, "layers") else "h"
    setattr(holder, name, getattr(holder, name)[:-1])
    model.config.num_hidden_layers -= 1


def exchange_layers(model: Any) -> None:
    """The two layers in the other order."""
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 2)
    layers[0], layers[1] = layers[1], layers[0]


def round_inputs(bits: int) -> Callable[[Any], Any]:
    """Every matrix product with its two factors rounded to so many bits of mantissa, as TF32 rounds to ten."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(tensor)
        return torch.ldexp((mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)

    def spoil(model: Any) -> Any:
        own_linear, own_matmul, own_baddbmm = nn.functional.linear, torch.matmul, torch.Tensor.baddbmm
        stack = ExitStack()
        linear = lambda x, w, b=None: own_linear(cut(x), cut(w), b)  # noqa: E731
        stack.enter_context(mock.patch.object(nn.functional, "linear", linear))
        stack.enter_context(mock.patch.object(torch, "matmul", lambda a, b: own_matmul(cut(a), cut(b))))
        fused = lambda c, batch1, batch2, **more: own_baddbmm(c, cut(batch1), cut(batch2), **more)  # noqa: E731
        stack.enter_context(mock.patch.object(torch.Tensor, "baddbmm", fused))
        return stack

    return spoil


def pad_left(model: Any) -> Any:
    """Every call made in a batch with a longer text, masked: other sums, the same mathematics."""
    own = model.forward

    def forward(input_ids: torch.Tensor, **more: Any) -> Any:
        S = input_ids.shape[1]
        longer = torch.cat([input_ids, input_ids], 1)
        padded = torch.cat([torch.zeros_like(input_ids), input_ids], 1)
        mask = torch.ones(2, 2 * S, dtype=torch.long)
        mask[0, :S] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        accepts = "position_ids" in own.__code__.co_varnames
        found = own(
            input_ids=torch.cat([padded, longer]),
            attention_mask=mask,
            **({"position_ids": positions} if accepts else {}),
            **more,
        )
        found.logits = found.logits[:1]
        return found

    model.forward = forward
    return None


# ----------------------------------------------------------------------------------------- how tokens are chosen


def penalise(penalty: float) -> Callable[..., int]:
    """A repetition penalty."""

    def choose(logits: torch.Tensor, text: Sequence[int], start: int, generator: torch.Generator) -> int:
        from transformers import RepetitionPenaltyLogitsProcessor

        return int(RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([list(text)]), logits[None])[0].argmax())

    return choose


def forbid_ngrams(size: int) -> Callable[..., int]:
    """No n-gram twice."""

    def choose(logits: torch.Tensor, text: Sequence[int], start: int, generator: torch.Generator) -> int:
        from transformers import NoRepeatNGramLogitsProcessor

        return int(NoRepeatNGramLogitsProcessor(size)(torch.tensor([list(text)]), logits[None])[0].argmax())

    return choose


def subtract_presence(amount: float, is_frequency: bool = False) -> Callable[..., int]:
    """OpenAI's presence or frequency penalty over the generated tokens."""

    def choose(logits: torch.Tensor, text: Sequence[int], start: int, generator: torch.Generator) -> int:
        counts = torch.bincount(torch.tensor(list(text[start:]), dtype=torch.long), minlength=len(logits))
        return int((logits - amount * (counts if is_frequency else counts.clamp(max=1))).argmax())

    return choose


def draw(temperature: float, top_k: int = 0, top_p: float = 1.0) -> Callable[..., int]:
    """Sampling as transformers does it."""

    def choose(logits: torch.Tensor, text: Sequence[int], start: int, generator: torch.Generator) -> int:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        scores = logits[None] / temperature
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

    return choose


def forbid_end(logits: torch.Tensor, text: Sequence[int], start: int, generator: torch.Generator) -> int:
    """A least length: the end id cannot be chosen."""
    return int(logits.index_fill(0, torch.tensor([2]), -torch.inf).argmax())


# ------------------------------------------------------------------------------------------- what the engine reads


def double_start(prompts: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokenizer's start token and the template's."""
    return [[prompt[0], *prompt] for prompt in prompts]


def read_padding(prompts: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> list[list[int]]:
    """A batch padded on the left to 70 tokens, the mask forgotten."""
    return [[0] * (70 - len(prompt)) + list(prompt) for prompt in prompts]


def keep_texts(prompts: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each prompt behind the whole conversation so far."""
    texts: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        texts.append([*(texts[-1] if index else []), *(before[index - 1] if index else []), *prompt])
    return texts


def drop_start(prompts: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> list[list[int]]:
    """The first token lost."""
    return [list(prompt[1:]) for prompt in prompts]


def wrap_in_template(prompts: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> list[list[int]]:
    """A chat template round the prompt."""
    return [[5, 6, 7, *prompt, 8, 9] for prompt in prompts]
