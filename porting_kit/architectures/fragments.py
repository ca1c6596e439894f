"""Groups of weight rules that several families share: LLaMA-shaped layers, GPT-2's transposed ones, experts.

A fragment is a function of names that returns rules; it adds no meaning of its own. Source layers are written as the
Hugging Face names, targets as TensorRT-LLM's. TensorRT-LLM's `fc` is the activated branch of a gated MLP (gate_proj),
its `gate` the linear one (up_proj): tensorrt_llm/layers/mlp.py 0.11.0.dev2024062500, class GatedMLP.
"""

from __future__ import annotations

from porting_kit.architectures.family import Switch
from porting_kit.architectures.names import TensorSpec
from porting_kit.architectures.operations import Concatenate, Operation, Stack, Transpose, Ungroup
from porting_kit.architectures.rules import (
    COLUMN,
    EXPERTS_DOWN,
    EXPERTS_UP,
    QKV,
    REPLICATED,
    ROW,
    Drop,
    Rule,
    Shard,
    linear,
    only_when,
    rename,
    transform,
)

LAYER = "model.layers.{i}"
TARGET = "transformer.layers.{i}"
HEAD_BY_HEAD = Ungroup("H", ("1", "1", "1"))
GROUP_BY_GROUP = Ungroup("K", ("H//K", "1", "1"))
QKV_ROWS = "H*D+2*K*D"


def separate_qkv(
    source: str, *, bias: bool | str = False, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
) -> list[Rule]:
    """Three projections joined to Q; K; V by their real head counts, weight and bias alike."""
    rows = ("H*D", "K*D", "K*D")
    weights = tuple(TensorSpec(f"{source}.{n}.weight", (r, "E")) for n, r in zip(names, rows, strict=True))
    rules = [Rule(f"{TARGET}.attention.qkv.weight", weights, (Concatenate(0),), shard=QKV)]
    if bias:
        biases = tuple(TensorSpec(f"{source}.{n}.bias", (r,)) for n, r in zip(names, rows, strict=True))
        when = bias if isinstance(bias, str) else None
        rules.append(Rule(f"{TARGET}.attention.qkv.bias", biases, (Concatenate(0),), shard=QKV, when=when))
    return rules


def fused_qkv(source: str, *operations: Operation, bias: bool | str = False, when: str | None = None) -> list[Rule]:
    """One projection for queries, keys and values, put into the order Q; K; V by `operations`."""
    weight = TensorSpec(f"{source}.weight", (QKV_ROWS, "E"))
    rules = [Rule(f"{TARGET}.attention.qkv.weight", (weight,), operations, shard=QKV, when=when)]
    if bias:
        terms = [term for term in (when, bias if isinstance(bias, str) else None) if term]
        spec = TensorSpec(f"{source}.bias", (QKV_ROWS,))
        rules.append(
            Rule(f"{TARGET}.attention.qkv.bias", (spec,), operations, shard=QKV, when=" & ".join(terms) or None)
        )
    return rules


def dense(source: str, *, bias: bool | str = False) -> list[Rule]:
    """The attention's output projection."""
    return linear(source, f"{TARGET}.attention.dense", "E,H*D", shard=ROW, bias=bias)


def zero_dense_bias(source: str, when: str) -> Rule:
    """The output projection's bias, zeros where the model has biases on queries, keys and values only."""
    spec = TensorSpec(f"{source}.bias", ("E",))
    return Rule(f"{TARGET}.attention.dense.bias", (spec,), shard=REPLICATED, when=when, zeros_when_absent=("E",))


def plain_mlp(up: str, down: str, *, bias: bool | str = False) -> list[Rule]:
    """Two linear layers."""
    return [
        *linear(up, f"{TARGET}.mlp.fc", "I,E", shard=COLUMN, bias=bias),
        *linear(down, f"{TARGET}.mlp.proj", "E,I", shard=ROW, bias=bias),
    ]


def gated_mlp(
    source: str,
    *,
    bias: bool | str = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    width: str = "I",
) -> list[Rule]:
    """Three linear layers, the first one activated."""
    gate, up, down = (f"{source}.{name}" for name in names)
    return [
        *linear(gate, f"{TARGET}.mlp.fc", f"{width},E", shard=COLUMN, bias=bias),
        *linear(up, f"{TARGET}.mlp.gate", f"{width},E", shard=COLUMN, bias=bias),
        *linear(down, f"{TARGET}.mlp.proj", f"E,{width}", shard=ROW, bias=bias),
    ]


def experts(
    router: str,
    source: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    target: str = f"{TARGET}.mlp",
) -> list[Rule]:
    """A router in float32 and the experts stacked: [up; gate] in `fc`, down in `proj`.

    Source: tensorrt_llm/models/llama/convert.py 0.11.0.dev2024062500 (w3 before w1), layers/moe.py (router).
    """
    gate, up, down = (f"{source}.{{e}}.{name}.weight" for name in names)
    return [
        rename(f"{router}.weight [X,E]", f"{target}.router.weight", dtype="float32"),
        Rule(
            f"{target}.fc.weight",
            (TensorSpec(up, ("J", "E")), TensorSpec(gate, ("J", "E"))),
            (Concatenate(0), Stack()),
            shard=EXPERTS_UP,
        ),
        Rule(f"{target}.proj.weight", (TensorSpec(down, ("E", "J")),), (Stack(),), shard=EXPERTS_DOWN),
    ]


# layers/moe.py: names 0.10.0.dev2024041600 and 0.10.0.dev2024042300, router 0.9.0.dev2024030500 and 0.9.0.dev2024031200
EXPERT_SWITCHES = {
    "numbered_experts": Switch(until="0.10.0.dev2024042300"),
    "split_router": Switch(until="0.9.0.dev2024031200"),
}


def named_by_release(rules: list[Rule]) -> list[Rule]:
    """Rules of experts under the names and splits of every release; the family takes `EXPERT_SWITCHES` in.

    Until 0.10.0.dev2024042300 the weights are called experts_weight_1 and experts_weight_2; in the first releases the
    router is split over the ranks along its input.
    """
    numbered = {".fc.weight": ".experts_weight_1", ".proj.weight": ".experts_weight_2"}
    found = []
    for rule in rules:
        if rule.target.endswith(".router.weight"):
            found += [*only_when([rule], "split_router", shard=ROW), *only_when([rule], "!split_router")]
            continue
        ending = next(ending for ending in numbered if rule.target.endswith(ending))
        older = rule.target.removesuffix(ending) + numbered[ending]
        found += [*only_when([rule], "numbered_experts", target=older), *only_when([rule], "!numbered_experts")]
    return found


def conv1d(source: str, target: str, rows: str, columns: str, *, shard: Shard, bias_shard: Shard) -> list[Rule]:
    """GPT-2's linear layer: its weight is [in, out]."""
    return [
        transform(f"{source}.weight [{columns},{rows}]", f"{target}.weight", Transpose(), shard=shard),
        rename(f"{source}.bias [{rows}]", f"{target}.bias", shard=bias_shard),
    ]


def recomputed_frequencies(attention: str = f"{LAYER}.self_attn") -> Drop:
    """Rotary frequencies that old checkpoints carry."""
    return Drop(f"{attention}.rotary_emb.inv_freq", "rotary frequencies are computed again from the base")


def built_in_masks(attention: str) -> tuple[Drop, Drop]:
    """Causal masks that old checkpoints carry as buffers."""
    reason = "the causal mask is built in"
    return Drop(f"{attention}.bias", reason), Drop(f"{attention}.masked_bias", reason)
