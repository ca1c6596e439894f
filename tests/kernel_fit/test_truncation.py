"""Truncation: nothing lost where there is nothing, least lost where there is, refused where it is too much."""

import pytest
import torch

from porting_kit.emulator import open_emulator
from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.activations import measure_activations, sample_prompts
from porting_kit.kernel_fit.fit import apply_fit
from porting_kit.kernel_fit.truncation import choose_basis, truncate_heads
from tests.emulator.toy_models import ToySize
from tests.kernel_fit.fitted_models import RELEASE, context_error, fit_toy, random_tokens, tree_error

SIZE = ToySize(hidden_size=256, heads=2, kv_heads=2, positions=160)


def low_rank(tensors, rank):
    """Queries of rank `rank` in each head: a truncation to as many dims loses nothing."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith(("attention.qkv.weight", "attention.qkv.bias")):
            heads = tensor[:256].view(2, 128, -1)
            basis = torch.linalg.qr(torch.randn(2, 128, rank, generator=generator)).Q
            heads.copy_(basis @ (basis.transpose(1, 2) @ heads))


def measure(config, tensors, tree):
    model = open_emulator(tree).build_model(config, tensors)
    return measure_activations(model, [random_tokens(150, seed) for seed in range(7)])


@pytest.fixture(scope="module")
def model():
    return fit_toy("bloom", SIZE, wanted="off")


@pytest.fixture(scope="module")
def moments(model):
    return measure(model.config, model.tensors, model.tree)


def test_low_rank_heads_lose_nothing():
    fitted = fit_toy("bloom", SIZE, activations=lambda c, t, s: (low_rank(t, 100), measure(c, t, s))[1])
    assert fitted.plan.names == ("truncate_heads", "fold_alibi")
    assert fitted.fitted.notes[0].figures["discarded_share_worst"] < 1e-9
    reference = open_emulator(fitted.tree).build_model(fitted.config, fitted.tensors)
    tokens = random_tokens(150)
    expected = reference.prefill([tokens], reference.new_cache(1, 150), all_logits=True).logits[0]
    emulated = fitted.emulate(f"release:{RELEASE}")
    found = emulated.prefill([tokens], emulated.new_cache(1, 150), all_logits=True).logits[0]
    assert float((found - expected).abs().max()) < 5e-3


def test_chosen_basis_beats_plain_truncation():
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(0, -2, 32, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64)).Q
    queries = torch.randn(4000, 32, generator=generator, dtype=torch.float64) * spread @ turn
    keys = torch.randn(4000, 32, generator=generator, dtype=torch.float64) @ turn
    keys = keys - keys.mean(0)
    basis = choose_basis(queries.T @ queries / 4000, keys.T @ keys / 4000, 16)
    whole = queries @ keys.T
    error = ((queries @ basis.query.T) @ (keys @ basis.key.T).T - whole).square().mean().sqrt() / 32**0.5
    assert float(error) == pytest.approx(basis.logit_error_nats, rel=0.05)
    plain = (queries[:, :16] @ keys[:, :16].T - whole).square().mean().sqrt() / 32**0.5
    assert float(error) < 0.2 * float(plain)


def test_loss_is_reported_and_refused_above_the_bound(model, moments):
    _, _, note = truncate_heads(model.config, model.tensors, keep=96, activations=moments, bound_nats=10)
    assert 0 < note.figures["discarded_share_mean"] <= note.figures["discarded_share_worst"] < 0.3
    with pytest.raises(ConversionError, match="would lose too much"):
        truncate_heads(
            model.config,
            model.tensors,
            keep=96,
            activations=moments,
            bound_nats=0.5 * note.figures["logit_error_nats_worst"],
        )


def test_more_dims_lose_less(model, moments):
    notes = [
        truncate_heads(model.config, model.tensors, keep=keep, activations=moments, bound_nats=10)[2]
        for keep in (64, 96, 112)
    ]
    losses = [note.figures["logit_error_nats_worst"] for note in notes]
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[0] / 2


def test_values_keep_all_dims(model, moments):
    name = "transformer.layers.1.attention.qkv.weight"
    _, changed, _ = truncate_heads(model.config, model.tensors, keep=96, activations=moments, bound_nats=10)
    assert torch.equal(changed[name][512:], model.tensors[name][512:])
    assert not changed[name][:256].view(2, 128, -1)[:, 96:].any()


def test_activations_of_another_model_lose_more(model, moments):
    other = dict(moments)
    first, second = list(moments)[:2]
    other[first] = moments[second]
    _, right, _ = truncate_heads(model.config, model.tensors, keep=96, activations=moments, bound_nats=10)
    _, wrong, _ = truncate_heads(model.config, model.tensors, keep=96, activations=other, bound_nats=10)

    def error(tensors):
        emulated = open_emulator(model.tree).build_model(model.config | {"attention_qkv_bias": True}, tensors)
        return context_error(model, emulated)

    assert error(wrong) > 1.2 * error(right)


def test_too_few_tokens_and_missing_layers_are_refused(model, moments):
    emulated = open_emulator(model.tree).build_model(model.config, model.tensors)
    with pytest.raises(ConversionError, match="too few calibration tokens"):
        measure_activations(emulated, [random_tokens(50)])
    partial = dict(list(moments.items())[:1])
    with pytest.raises(ConversionError, match="no activations of"):
        truncate_heads(model.config, model.tensors, keep=96, activations=partial, bound_nats=10)


def test_a_plan_that_truncates_wants_activations(model):
    plan = fit_toy("bloom", SIZE, activations=measure_loosely).plan
    with pytest.raises(ConversionError, match="needs activations"):
        apply_fit(plan, model.config, model.tensors)


def measure_loosely(config, tensors, tree):
    low_rank(tensors, 60)
    return measure(config, tensors, tree)


def test_sampled_prompts_start_as_told_and_repeat(model):
    emulated = open_emulator(model.tree).build_model(model.config, model.tensors)
    starts = [[1, 2, 3], [4]]
    first, again = (sample_prompts(emulated, starts, sequences=3, length_tokens=12) for _ in range(2))
    assert first == again
    assert [len(prompt) for prompt in first] == [12, 12, 12]
    assert [prompt[: len(start)] for prompt, start in zip(first, [*starts, starts[0]], strict=True)] == [
        *starts,
        starts[0],
    ]
    assert first[0] != first[2]


def test_truncated_tree_agrees_with_its_own_context():
    fitted = fit_toy("bloom", SIZE, activations=measure_loosely)
    emulated = fitted.emulate(f"release:{RELEASE}")

    class Own:
        """The fitted model as its own reference."""

        def __call__(self, tokens):
            run = emulated.prefill([tokens[0]], emulated.new_cache(1, tokens.shape[1]), all_logits=True)
            return type("Output", (), {"logits": run.logits[0][None, :, :99]})

    fitted.reference = Own()
    assert tree_error(fitted, emulated) < 1e-4
