"""Faults of weights: what a converter gets wrong. Each function changes a healthy `PortState`."""

from __future__ import annotations

import torch

from porting_kit.diagnosis.port_state import PortState

QKV, DENSE, POSITIONS, HEAD = (
    ".attention.qkv.",
    ".attention.dense.weight",
    "transformer.position_embedding.weight",
    "lm_head.weight",
)


def drop_bias(state: PortState, *endings: str) -> PortState:
    """Zero every bias whose name ends so: what a converter leaves that never reads it."""
    return state.with_tensors(lambda name, tensor: torch.zeros_like(tensor) if name.endswith(endings) else tensor)


def missing_bias(state: PortState, *endings: str) -> str | None:
    """Why `drop_bias` would change nothing."""
    found = [tensor for name, tensor in state.tensors.items() if name.endswith(endings)]
    return None if any(bool(tensor.any()) for tensor in found) else f"no {endings[0]} that is not zero"


def interleave_qkv(state: PortState) -> PortState:
    """Rows of the fused projection stay head by head, as BLOOM, GPT-NeoX and Falcon store them."""
    H, K, D = head_counts(state)

    def interleave(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".attention.qkv." not in name:
            return tensor
        query, key, value = tensor.split([H * D, K * D, K * D])
        rest = tensor.shape[1:]
        groups = (query.reshape(K, H // K, D, *rest), key.reshape(K, 1, D, *rest), value.reshape(K, 1, D, *rest))
        return torch.cat(groups, dim=1).reshape(tensor.shape)

    return state.with_tensors(interleave)


def swap_key_and_value(state: PortState) -> PortState:
    """The key block and the value block of the fused projection change places."""
    H, K, D = head_counts(state)

    def swap(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".attention.qkv." not in name:
            return tensor
        query, key, value = tensor.split([H * D, K * D, K * D])
        return torch.cat([query, value, key])

    return state.with_tensors(swap)


def swap_gate_and_up(state: PortState) -> PortState:
    """The activated and the linear input matrix of a gated MLP change places."""
    tensors = dict(state.tensors)
    for name in state.tensors:
        if ".mlp.fc." in name:
            other = name.replace(".mlp.fc.", ".mlp.gate.")
            tensors[name], tensors[other] = state.tensors[other], state.tensors[name]
    return state.with_tensors(lambda name, _: tensors[name])


def lacks_gate(state: PortState) -> str | None:
    """Why there is nothing to swap."""
    return None if state.has_tensor(".mlp.gate.weight") else "the MLP has no gate"


def take_embedding_as_head(state: PortState) -> PortState:
    """The output matrix is replaced by the embedding, as if the two were tied."""
    embedding = state.tensors["transformer.vocab_embedding.weight"]

    def tie(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != "lm_head.weight":
            return tensor
        return torch.nn.functional.pad(embedding, (0, 0, 0, len(tensor) - len(embedding)))

    return state.with_tensors(tie)


def leave_head_empty(state: PortState) -> PortState:
    """A tied output matrix that nobody wrote: zeros, so that token 0 always wins."""
    return state.with_tensors(lambda name, tensor: torch.zeros_like(tensor) if name == "lm_head.weight" else tensor)


def is_tied(state: PortState) -> bool:
    """Whether the output matrix is the embedding."""
    embedding, head = state.tensors.get("transformer.vocab_embedding.weight"), state.tensors.get("lm_head.weight")
    return embedding is not None and head is not None and torch.equal(embedding, head[: len(embedding)])


def nudge_projection(state: PortState) -> PortState:
    """One matrix a little too large: too little to change many tokens, far beyond the rounding of the port's dtype."""
    factor = 1.002 if state.config.get("dtype") == "float32" else 1.1
    name = next(name for name in state.tensors if name.endswith(".attention.dense.weight"))
    return state.with_tensors(lambda other, tensor: tensor * factor if other == name else tensor)


def head_counts(state: PortState) -> tuple[int, int, int]:
    """H, K, D of the config."""
    H = int(state.config["num_attention_heads"])
    K = int(state.config.get("num_key_value_heads") or H)
    return H, K, int(state.config.get("head_size") or state.config["hidden_size"] // H)


def tile_grouped_heads(state: PortState) -> PortState:
    """Query head h reads key head h mod K, as if the heads were repeated as a block and not each for its group."""
    H, K, D = head_counts(state)

    def tile(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if QKV not in name:
            return tensor
        query, key, value = tensor.split([H * D, K * D, K * D])
        repeat = (H // K, *(1 for _ in tensor.shape[1:]))
        return torch.cat([query, key.repeat(repeat), value.repeat(repeat)])

    return state.with_tensors(tile).with_config(num_key_value_heads=H)


def lacks_groups(state: PortState) -> str | None:
    """Why heads cannot be grouped wrongly."""
    H, K, _ = head_counts(state)
    return None if 1 < K < H else f"{H} query heads over {K} key heads"


def transpose_square(state: PortState) -> PortState:
    """The square output projection keeps the order of the file, [in, out] in place of [out, in] or the reverse."""
    return state.with_tensors(lambda name, tensor: tensor.T.contiguous() if name.endswith(DENSE) else tensor)


def lacks_square(state: PortState) -> str | None:
    """Why a wrong transposition would be a shape error and not a silent fault."""
    shapes = {tuple(tensor.shape) for name, tensor in state.tensors.items() if name.endswith(DENSE)}
    return None if any(shape[0] == shape[1] for shape in shapes) else "the output projection is not square"


def scale_query(state: PortState, power: float) -> PortState:
    """Query rows times D ** power: 0.5 leaves the logits unscaled, -0.5 scales them twice."""
    H, K, D = head_counts(state)

    def scale(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if QKV not in name:
            return tensor
        query, rest = tensor.split([H * D, 2 * K * D])
        return torch.cat([query * D**power, rest])

    return state.with_tensors(scale)


NORM_PAIRS = ("post_layernorm", "post_attention_layernorm", "mlp_layernorm")


def swap_norms(state: PortState) -> PortState:
    """The layer's two norms change places."""
    tensors = dict(state.tensors)
    for name in state.tensors:
        for second in NORM_PAIRS:
            other = name.replace(".input_layernorm.", f".{second}.")
            if other != name and other in state.tensors:
                tensors[name], tensors[other] = state.tensors[other], state.tensors[name]
    return state.with_tensors(lambda name, _: tensors[name])


def lacks_second_norm(state: PortState) -> str | None:
    """Why norms cannot change places."""
    found = any(f".{name}." in tensor for tensor in state.tensors for name in NORM_PAIRS)
    return None if found else "one norm a layer"


COUNTS_FROM_ZERO = ("Gemma", "Nemotron")


def shift_norms(state: PortState) -> PortState:
    """Norm weights one too small where the file counts them from zero, one too large where it does not."""
    shift = -1.0 if str(state.config.get("architecture")).startswith(COUNTS_FROM_ZERO) else 1.0
    is_norm = lambda name: name.endswith(("layernorm.weight", "ln_f.weight"))  # noqa: E731
    return state.with_tensors(lambda name, tensor: tensor + shift if is_norm(name) else tensor)


def absorbs_scale(state: PortState) -> str | None:
    """Why a factor on the embedding would change nothing."""
    return "a norm follows the embedding" if state.has_tensor("ln_embed.weight") else None


def shift_positions(state: PortState) -> PortState:
    """OPT's table keeps its two leading rows: every position reads the row two places before its own."""

    def shift(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != POSITIONS:
            return tensor
        leading = tensor[-2:] if state.leading_positions is None else state.leading_positions.to(tensor)
        return torch.cat([leading, tensor[: -len(leading)]])

    return state.with_tensors(shift)


def lacks_positions(state: PortState) -> str | None:
    """Why no learned position can be wrong."""
    return None if POSITIONS in state.tensors else "positions are not learned"


def exchange_stages(state: PortState) -> PortState:
    """The second half of the layers runs first."""
    count = int(state.config["num_hidden_layers"])
    half = count // 2

    def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
        parts = name.split(".")
        if parts[:2] != ["transformer", "layers"]:
            return tensor
        parts[2] = str((int(parts[2]) + half) % count)
        return state.tensors[".".join(parts)]

    return state.with_tensors(moved)


def exchange_ranks(state: PortState) -> PortState:
    """Gathered outputs arrive with the two ranks' halves exchanged: the vocabulary, and the heads' hidden states."""

    def exchange(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith(HEAD) or name.startswith("medusa_heads."):
            return tensor.roll(len(tensor) // 2, 0)
        return tensor

    return state.with_tensors(exchange)


def lacks_halves(state: PortState) -> str | None:
    """Why two ranks could not hold this vocabulary's halves."""
    return "odd vocabulary" if int(state.config["vocab_size"]) % 2 else None


def cut_bias_straight(state: PortState) -> PortState:
    """Two ranks: the weight cut within query, key and value, the bias cut in the middle as it lies."""
    H, K, D = head_counts(state)
    sizes = [H * D // 2, K * D // 2, K * D // 2]

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.endswith(".attention.qkv.bias"):
            return tensor
        first, second = (half.split(sizes) for half in tensor.split(sum(sizes)))
        return torch.cat([part for pair in zip(first, second, strict=True) for part in pair])

    return state.with_tensors(cut)


def lacks_shardable_bias(state: PortState) -> str | None:
    """Why a bias cannot be cut wrongly."""
    H, K, _ = head_counts(state)
    if H % 2 or K % 2:
        return f"{H} and {K} heads cannot be cut in two"
    return missing_bias(state, ".attention.qkv.bias")
