"""Heads are called what they are: fitting, random, untrained, foreign, shifted, another activation; NaN is refused."""

from __future__ import annotations

import math

import pytest
import torch

from porting_kit.errors import HeadsError
from porting_kit.medusa.head_fit import _Asked, _judge, measure_spread, read_fit
from porting_kit.medusa.head_ranks import measure_ranks
from porting_kit.medusa.heads import MedusaHeads
from porting_kit.medusa.self_distillation import Continuations

V = E = 64
ROWS, C, M = 60, 24, 3


class Tensors:
    """Heads as `HeadSet` gives them."""

    def __init__(self, heads: MedusaHeads) -> None:
        self.num_heads, self.num_layers, self.own_output = heads.num_heads, heads.num_layers, heads.variant == "v1"
        self.values = {}
        for name, tensor in heads.state_dict().items():
            head, layer, *rest = name.split(".")
            if rest[0] == "linear":
                self.values[f"medusa_heads.{head}.medusa_layers.{layer}.linear.{rest[1]}"] = tensor
            else:
                self.values[f"medusa_heads.{head}.lm_head.weight"] = tensor

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]


class Base:
    """A base that counts in strides: each row adds its own stride, which the hidden state tells, modulo V."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.matrix = torch.nn.Linear(E, V, bias=False).requires_grad_(False)
        torch.nn.init.orthogonal_(self.matrix.weight, gain=4.0)
        self.order = torch.randperm(V)
        start = torch.arange(ROWS).unsqueeze(1) % V
        self.tokens = self.order[(start + torch.arange(C)) % V]
        self.continuations = Continuations(self.matrix.weight[self.tokens[:, :-1]] / 4, self.tokens)

    def train(self, activation=torch.nn.functional.silu, shift: int = 0, steps: int = 100) -> MedusaHeads:
        """Heads trained on this base, naming the token `shift` places beyond theirs."""
        heads = MedusaHeads(E, V, num_heads=M, variant="v2")
        optimizer = torch.optim.Adam(heads.parameters(), lr=3e-2)
        hidden = self.continuations.hidden.flatten(0, 1)
        for _ in range(steps):
            loss = torch.zeros(())
            for m, head in enumerate(heads):
                layer = head[0].linear
                states = hidden + activation(layer(hidden))
                ahead = self.tokens[:, :-1] if m + 1 + shift == 0 else self.tokens.roll(-(m + 1 + shift), 1)[:, :-1]
                logits = self.matrix(states).view(ROWS, C - 1, V)[:, : C - 1 - M - 2]
                loss = loss + torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), ahead[:, : C - 1 - M - 2].flatten()
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return heads.requires_grad_(False)

    def later(self, places: int) -> torch.Tensor:
        """For each token the one so many places later."""
        return self.order[(self.order.argsort() + places) % V]

    def read(self, heads: MedusaHeads):
        return read_fit(Tensors(heads), self.continuations, self.matrix)


@pytest.fixture(scope="module")
def base() -> Base:
    return Base()


@pytest.fixture(scope="module")
def trained(base: Base) -> MedusaHeads:
    return base.train()


def verdicts(fit) -> list[str]:
    return [reading.verdict for reading in fit.readings]


def test_heads_of_this_base_fit(base: Base, trained: MedusaHeads):
    fit = base.read(trained)
    assert fit.fits
    assert verdicts(fit) == ["fits"] * M
    assert all(reading.top1 > 0.9 > reading.chance1 for reading in fit.readings)
    assert torch.equal(fit.ranks, measure_ranks(trained, base.continuations, base.matrix))


@pytest.mark.parametrize("size", [0.3, 3.0])
def test_random_heads_are_called_random(base: Base, size: float):
    torch.manual_seed(9)
    heads = MedusaHeads(E, V, num_heads=M, variant="v1")
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=size)
    fit = base.read(heads.requires_grad_(False))
    assert verdicts(fit) == ["random"] * M
    assert all(reading.top1 <= reading.chance1 + 0.06 for reading in fit.readings)


def test_heads_of_another_base_are_called_foreign(base: Base):
    """Layers with few strong directions, as training leaves them, and none of them this base's."""
    torch.manual_seed(4)
    heads = MedusaHeads(E, V, num_heads=M, variant="v2")
    for head in heads:
        head[0].linear.weight.data = torch.randn(E, 4) @ torch.randn(4, E)
        head[0].linear.bias.data = torch.randn(E)
    assert verdicts(base.read(heads.requires_grad_(False))) == ["foreign"] * M


def test_untrained_heads_are_called_untrained(base: Base):
    assert verdicts(base.read(MedusaHeads(E, V, num_heads=M, variant="v2"))) == ["untrained"] * M


def test_hardly_trained_heads_are_not_called_shifted_or_foreign(base: Base):
    """After two steps they still name the base's own next token, which shifted heads do at the first head alone."""
    fit = base.read(base.train(steps=2))
    assert verdicts(fit) == ["untrained"] * M
    assert all("it was hardly trained" in reading.sentence for reading in fit.readings)
    assert fit.readings[0].by_offset[0] > 0.9


def test_layers_of_zeros_whose_output_matrix_was_trained_fit(base: Base):
    heads = MedusaHeads(E, V, num_heads=M, variant="v1")
    for m, head in enumerate(heads):
        head[-1].weight.data = base.matrix.weight[base.later(-(m + 1))].clone()
    assert verdicts(base.read(heads.requires_grad_(False))) == ["fits"] * M


def test_few_positions_cannot_call_trained_heads_foreign(base: Base):
    few = Continuations(base.continuations.hidden[:1, :7], base.tokens[:1, :8].clone())
    torch.manual_seed(4)
    heads = MedusaHeads(E, V, num_heads=M, variant="v2")
    for head in heads:
        head[0].linear.weight.data = torch.randn(E, 4) @ torch.randn(4, E)
    few.tokens[0, 2:] = few.tokens[0, 2:4].repeat(3)
    fit = read_fit(Tensors(heads.requires_grad_(False)), few, base.matrix)
    assert set(verdicts(fit)) == {"undecided"}
    assert not fit.fits
    assert fit.wrong == ()


def test_a_text_that_repeats_its_tokens_shifts_no_head(base: Base):
    """The token after the next is the next one: a head that is right names both."""
    order = base.tokens[:, :1].expand(ROWS, C).clone()
    still = Continuations(base.matrix.weight[order[:, :-1]] / 4, order)
    heads = MedusaHeads(E, V, num_heads=M, variant="v1")
    for head in heads:
        torch.nn.init.normal_(head[0].linear.weight, std=1e-3)
        head[-1].weight.data = base.matrix.weight.clone()
    assert verdicts(read_fit(Tensors(heads.requires_grad_(False)), still, base.matrix)) == ["fits"] * M


def test_another_activation_that_is_a_little_better_is_a_remark():
    asked = _Asked(torch.arange(900), 0.9, (0.1, 0.5, 0.1, 0.1), {"silu": 0.5, "none": 0.57, "gelu": 0.5, "relu": 0.4})
    layers = [(torch.randn(8, 2) @ torch.randn(2, 8), torch.ones(8))]
    reading = _judge(0, asked, layers, torch.arange(900))
    assert reading.verdict == "fits"
    assert "with none in place of SiLU it agrees in 57.0%" in reading.sentence
    asked.by_activation["none"] = 0.8
    assert _judge(0, asked, layers, torch.arange(900)).verdict == "wrong activation"


@pytest.mark.parametrize(("shift", "said"), [(1, "the token that head 2"), (-1, "the base's own next token")])
def test_shifted_heads_are_called_shifted(base: Base, shift: int, said: str):
    fit = base.read(base.train(shift=shift))
    assert verdicts(fit) == ["shifted"] * M
    assert said in fit.readings[0].sentence


def test_another_activation_is_named(base: Base):
    """Heads that add W x as it is: with SiLU, which halves small values, the old token weighs as much as the new."""
    heads = MedusaHeads(E, V, num_heads=M, variant="v2")
    tokens, hidden = base.tokens, base.matrix.weight / 4
    for m, head in enumerate(heads):
        moved = torch.zeros(V, E)
        moved[tokens[:, : C - M - 1].flatten()] = hidden[tokens[:, m + 1 : C - M + m].flatten()]
        head[0].linear.weight.data = (moved.T - hidden.T) @ torch.linalg.inv(hidden.T)
    fit = base.read(heads.requires_grad_(False))
    assert set(verdicts(fit)) == {"wrong activation"}
    assert "with none in place of SiLU" in fit.readings[0].sentence


def test_values_that_are_not_finite_are_refused(base: Base, trained: MedusaHeads):
    tensors = Tensors(trained)
    tensors.values["medusa_heads.1.medusa_layers.0.linear.bias"] = torch.full((E,), math.nan)
    with pytest.raises(HeadsError, match="head 2 gives logits that are not finite"):
        read_fit(tensors, base.continuations, base.matrix)


def test_heads_that_share_layers_are_noted(base: Base):
    torch.manual_seed(1)
    heads = MedusaHeads(E, V, num_heads=2, variant="v1")
    torch.nn.init.normal_(heads[0][0].linear.weight)
    heads[1][0].linear.weight.data.copy_(heads[0][0].linear.weight)
    assert base.read(heads.requires_grad_(False)).notes == ("heads 1 and 2 share their residual layers",)


def test_texts_that_are_too_short_are_refused(base: Base, trained: MedusaHeads):
    short = Continuations(base.continuations.hidden[:, :2], base.tokens[:, :3])
    with pytest.raises(HeadsError, match="too short to ask") as caught:
        read_fit(Tensors(trained), short, base.matrix)
    assert caught.value.expected.startswith("at least 4 tokens")
    enough = Continuations(base.continuations.hidden[:, :3], base.tokens[:, :4])
    assert read_fit(Tensors(trained), enough, base.matrix).readings[M - 1].positions == ROWS


def test_the_spread_of_noise_is_one_and_of_a_learnt_matrix_is_not():
    torch.manual_seed(0)
    noise = torch.randn(200, 200)
    assert measure_spread([(noise, noise[0])]) == pytest.approx(1.0, abs=0.05)
    learnt = torch.randn(200, 3) @ torch.randn(3, 200)
    assert measure_spread([(learnt, learnt[0])]) > 3
