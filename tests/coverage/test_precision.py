"""Half precision: bounds come from measured rounding, and a fault larger than rounding still fails."""

from __future__ import annotations

import pytest

from porting_kit.alignment.reference import reference_from_model
from porting_kit.coverage.cases import CASES
from porting_kit.coverage.comparison import continue_greedily, draw_prompts
from porting_kit.coverage.matrix import cover_tree
from porting_kit.coverage.planned import plan_rows
from porting_kit.coverage.precision import BOUND, Bounds, emit_nearly_best, measure_bounds
from porting_kit.coverage.reference_models import make_reference
from porting_kit.errors import PortFileError
from porting_kit.source_tree import open_source_tree
from porting_kit.steps.coverage import check_coverage

NEOX, NEOX_FILE = "GPTNeoXForCausalLM", "models/gptneox/model.py"


@pytest.fixture(scope="module")
def reference():
    return reference_from_model(make_reference(next(case for case in CASES if case.name == "llama")))


def test_bounds_follow_the_dtype(reference):
    texts = draw_prompts(reference.vocab_size)
    exact, half, brain = (measure_bounds(reference, texts, dtype) for dtype in ("float32", "float16", "bfloat16"))
    assert exact == Bounds(BOUND, BOUND)
    assert BOUND < half.logits < 0.05, "float16 keeps eleven bits"
    assert 2 * half.logits < brain.logits < 0.4, "bfloat16 keeps eight"
    again = measure_bounds(reference, texts, "float32")
    assert again == exact, "the reference is as it was"


def test_a_token_that_rounding_cannot_explain_is_found(reference):
    prompts = draw_prompts(reference.vocab_size)
    texts = continue_greedily(reference, prompts, 4)
    emitted = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert emit_nearly_best(reference, prompts, emitted, 0.0)
    row = reference.logits([prompts[1]])[0][-1]
    second, worst = row.topk(2).indices[1], row.argmin()
    share = float(row.max() - row[second]) / float(row.abs().max())
    assert emit_nearly_best(reference, prompts[1:2], [[int(second)]], 0.51 * share)
    assert not emit_nearly_best(reference, prompts[1:2], [[int(second)]], 0.49 * share)
    assert not emit_nearly_best(reference, prompts[1:2], [[int(worst)]], 0.01)


def test_an_unknown_dtype_is_the_users_mistake():
    with pytest.raises(PortFileError, match="unknown dtype"):
        check_coverage("bundled", dtype="float8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_in_half_precision(dtype, make_tree):
    tree = open_source_tree("bundled")
    (row,) = cover_tree(tree, plan_rows(tree, [NEOX]), dtype=dtype)
    assert (row.status, row.tokens_equal) == ("aligned", True), row.reason
    assert row.context_error > BOUND, "it was not computed in half precision"
    assert row.context_error <= row.bound < {"float16": 0.05, "bfloat16": 0.4}[dtype]
    assert row.heads_error <= row.heads_bound
    broken = open_source_tree(
        make_tree((NEOX_FILE, "attention_output + feed_forward_output + hidden", "attention_output + hidden"))
    )
    (row,) = cover_tree(broken, plan_rows(broken, [NEOX]), dtype=dtype)
    assert row.status == "failed"
    assert row.reason.startswith("context logits of the unmodified model differ")
