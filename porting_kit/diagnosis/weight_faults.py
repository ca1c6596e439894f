"""Faults of weights and config: what a converter gets wrong. Each function changes a healthy `PortState`."""

from __future__ import annotations

import torch

from porting_kit.diagnosis.port_state import PortState

DEFAULT_ROPE_BASE = 10000.0
ROPE_BASE_KEYS = ("rotary_base", "rotary_emb_base")


def drop_bias(state: PortState, ending: str) -> PortState:
    """Zero every bias whose name ends so: what a converter leaves that never reads it."""
    return state.with_tensors(lambda name, tensor: torch.zeros_like(tensor) if name.endswith(ending) else tensor)


def missing_bias(state: PortState, ending: str) -> str | None:
    """Why `drop_bias` would change nothing."""
    found = [tensor for name, tensor in state.tensors.items() if name.endswith(ending)]
    return None if any(bool(tensor.any()) for tensor in found) else f"no {ending} that is not zero"


def lose_rope_base(state: PortState) -> PortState:
    """The rotary base falls back to 10,000."""
    return state.with_config(**{key: DEFAULT_ROPE_BASE for key in ROPE_BASE_KEYS if key in state.config})


def keeps_default_rope_base(state: PortState) -> str | None:
    """Why losing the base would change nothing."""
    bases = [state.config[key] for key in ROPE_BASE_KEYS if state.config.get(key) is not None]
    if not bases or "rope" not in str(state.config.get("position_embedding_type")):
        return "no rotary base in the config"
    return None if any(float(base) != DEFAULT_ROPE_BASE for base in bases) else "the base is 10,000"


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


def shift_heads(state: PortState) -> PortState:
    """Head h gets the weights of head h + 1, the last those of the first."""
    count = int(state.config["num_medusa_heads"])

    def shifted(name: str, tensor: torch.Tensor) -> torch.Tensor:
        parts = name.split(".")
        if parts[0] != "medusa_heads":
            return tensor
        parts[1] = str((int(parts[1]) + 1) % count)
        return state.tensors[".".join(parts)]

    return state.with_tensors(shifted)


def lacks_heads(state: PortState, at_least: int = 1) -> str | None:
    """Why no fault of the heads applies."""
    count = int(state.config.get("num_medusa_heads") or 0)
    return None if count >= at_least and state.tree is not None else f"fewer than {at_least} heads, or no tree"


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
