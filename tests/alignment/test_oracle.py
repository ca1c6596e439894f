"""Judging tokens: near-ties, faults, end tokens, and that one bad token does not spoil the next."""

import pytest
import torch

from porting_kit.alignment.oracle import Status, judge_texts, token_margins

TABLE_V = 8


class TableOracle:
    """A base whose next token is (last + 1) % 8 with logit 2, (last + 2) % 8 with logit 2 - gap, everything else 0."""

    vocab_size = TABLE_V

    def __init__(self, gap=1.0):
        self.gap = gap
        self.seen = []

    def logits(self, texts):
        self.seen.append(texts)
        rows = []
        for text in texts:
            logits = torch.zeros(len(text), TABLE_V)
            last = torch.tensor(text)
            logits.scatter_(1, ((last + 2) % TABLE_V)[:, None], 2 - self.gap)
            logits.scatter_(1, ((last + 1) % TABLE_V)[:, None], 2.0)
            rows.append(logits)
        return rows


def judge(emitted, *, gap=1.0, tolerance=0.1, prompt=(0,), **options):
    return judge_texts(TableOracle(gap), [prompt], [emitted], tolerance, **options)[0]


def test_the_bases_own_text_is_all_top():
    text = judge([1, 2, 3, 4])
    assert text.positions(Status.TOP) == [0, 1, 2, 3]
    assert text.margins.tolist() == pytest.approx([1.0] * 4)
    assert text.first_divergence is None


def test_one_bad_token_does_not_cascade():
    text = judge([1, 2, 5, 6, 7])
    assert text.positions(Status.WRONG) == [2]
    assert text.describe_position(2) == {
        "position": 2,
        "emitted": 5,
        "preferred": 3,
        "margin": pytest.approx(-2.0),
        "kind": "wrong",
        "phase": None,
        "proposed_by": None,
    }


def test_the_tolerance_separates_near_ties_from_faults():
    """The same token, 0.05 logits behind: a near-tie at a tolerance of 0.1, a fault at 0.01."""
    assert judge([1, 3, 4], gap=0.05).positions(Status.NEAR_TIE) == [1]
    assert judge([1, 3, 4], gap=0.05, tolerance=0.01).positions(Status.WRONG) == [1]


def test_the_first_wrong_token_counts_before_an_earlier_near_tie():
    text = judge([2, 3, 7, 0], gap=0.05)
    assert text.positions(Status.NEAR_TIE) == [0]
    assert text.first_divergence == 2
    assert judge([2, 3, 4], gap=0.05).first_divergence == 0


def test_texts_are_cut_at_the_first_end_id():
    """Case 42."""
    text = judge([1, 2, 3, 3, 3], end_ids=(7, 3), asked_tokens=9)
    assert text.tokens == (1, 2, 3)
    assert (text.ended_by, text.discarded, text.stopped_early) == (3, 2, False)
    assert judge([1, 2], end_ids=(3,), asked_tokens=9).stopped_early
    assert not judge([1, 2], end_ids=(3,), asked_tokens=2).stopped_early
    assert not judge([1, 2], end_ids=(3,)).stopped_early, "how many were asked for is not known"


def test_an_id_outside_the_vocabulary_is_wrong_and_does_not_break_the_rest():
    text = judge([1, TABLE_V + 1, 1, 2])
    assert text.positions(Status.WRONG) == [1]
    assert text.margins[1] == -torch.inf
    assert judge([-1, 1]).positions(Status.WRONG) == [0]


def test_undefined_logits_are_wrong_not_right():
    oracle = TableOracle()
    oracle.logits = lambda texts: [torch.full((len(text), TABLE_V), torch.nan) for text in texts]
    text = judge_texts(oracle, [(0,)], [[1, 2]], 0.1)[0]
    assert text.positions(Status.WRONG) == [0, 1]


def test_an_empty_text_and_tensors_are_taken():
    texts = judge_texts(TableOracle(), [torch.tensor([0]), [1]], [torch.tensor([1, 2]), []], 0.1, asked_tokens=2)
    assert texts[0].tokens == (1, 2)
    assert texts[1].tokens == ()
    assert texts[1].stopped_early


def test_one_pass_over_prompt_and_text():
    oracle = TableOracle()
    judge_texts(oracle, [(0, 5, 0), (3,)], [[1, 2], [4]], 0.1)
    assert oracle.seen == [[[0, 5, 0, 1], [3]]]


def test_margins_and_ties():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 1.0, 2.0, 0.0]])
    margins, preferred = token_margins(logits, torch.tensor([2, 0]))
    assert margins.tolist() == [0.0, 3.0]
    assert preferred.tolist() == [1, 0], "of equals the lowest id"
