"""How tokens were chosen, read off logits and tokens alone; and how sure a name is."""

import pytest
import torch

from porting_kit.diagnosis.catalogue import find_fault
from porting_kit.diagnosis.cause import is_supported
from porting_kit.diagnosis.choice_faults import (
    allow_any,
    choose_round,
    estimate_amount,
    estimate_repetition,
    forbid_ngrams,
    penalise_repetition,
    subtract_penalty,
)
from porting_kit.diagnosis.hypotheses import Hypothesis
from porting_kit.diagnosis.observation import Observation

V, STEPS = 24, 40
PROMPT = [3, 5, 7, 9, 11]


def choose(rescore, seed=0):
    """Tokens that the rule chooses from random logits, which depend on nothing."""
    logits = torch.randn(STEPS, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens = []
    for _ in range(STEPS):
        tokens.append(int(rescore(None, logits[: len(tokens) + 1], PROMPT, [*tokens, 0])[-1].argmax()))
    return logits, Observation([PROMPT], [tokens], 1e-6)


@pytest.mark.parametrize(
    ("planted", "estimate"),
    [
        (penalise_repetition(1.13), estimate_repetition),
        (penalise_repetition(2.0), estimate_repetition),
        (subtract_penalty(0.37, by_count=False, with_prompt=False), estimate_amount(False, False)),
        (subtract_penalty(0.37, by_count=True, with_prompt=False), estimate_amount(True, False)),
        (subtract_penalty(0.8, by_count=True, with_prompt=True), estimate_amount(True, True)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_penalty_is_read_off_the_choices(planted, estimate, seed):
    logits, observed = choose(planted, seed)
    assert (logits.argmax(-1) != torch.tensor(observed.tokens[0])).any()
    found = estimate([logits], observed)
    chosen = found.rescore(None, logits, PROMPT, observed.tokens[0]).argmax(-1)
    assert chosen.tolist() == observed.tokens[0]
    assert "penalty of" in found.words


def test_greedy_choices_ask_for_no_penalty():
    logits, observed = choose(lambda state, rows, prompt, tokens: rows)
    assert estimate_repetition([logits], observed) is None
    assert estimate_amount(True, True)([logits], observed) is None


def test_random_choices_are_explained_by_no_penalty():
    logits, observed = choose(lambda state, rows, prompt, tokens: rows)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    observed = Observation([PROMPT], [[int(order[token]) for token in observed.tokens[0]]], 1e-6)
    for estimate in (estimate_repetition, estimate_amount(False, False), estimate_amount(True, True)):
        found = estimate([logits], observed)
        if found is not None:
            chosen = found.rescore(None, logits, PROMPT, observed.tokens[0]).argmax(-1)
            assert (chosen != torch.tensor(observed.tokens[0])).double().mean() > 0.5


def test_an_ngram_is_forbidden_where_it_would_come_again():
    logits = torch.zeros(3, V, dtype=torch.float64)
    changed = forbid_ngrams(2)(None, logits, [4, 6, 4], [8, 4, 1])
    assert changed[0].isinf().nonzero()[:, 0].tolist() == [6]  # 4 6 stands already
    assert not changed[1].isinf().any()
    assert changed[2].isinf().nonzero()[:, 0].tolist() == [6, 8]


def test_any_token_may_be_drawn_but_none_outside_the_vocabulary():
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    changed = allow_any(None, logits, PROMPT, [5, V + 1])
    assert int(changed[0].argmax()) == 5
    assert torch.equal(changed[1], logits[1])


def test_bounds_give_a_value_between_them():
    assert choose_round(1.13, 1.19) == 1.16
    assert choose_round(0.2, 0.9) == 0.6
    assert 1.2 < choose_round(1.2, 1.1) < 1.21


@pytest.mark.parametrize(
    ("name", "explained", "error", "is_sure"),
    [
        ("norm_epsilon_wrong", 2, None, False),
        ("norm_epsilon_wrong", 3, None, True),
        ("norm_epsilon_wrong", 2, 1e-6, True),
        ("ngrams_forbidden", 2, 1e-6, False),
    ],
)
def test_few_tokens_make_no_sure_name(name, explained, error, is_sure):
    """Logits are matched by no chance; how a token was chosen is told by tokens alone."""
    found = Hypothesis((find_fault(name),), explained=explained, logit_error=error)
    assert is_supported(found) is is_sure
    assert is_supported(Hypothesis((find_fault(name),), explained=1, explained_ends=1))
