"""Each way a row can end, each with a tree that makes it end so."""

from __future__ import annotations

import math

import pytest

from porting_kit.coverage.cases import CASES
from porting_kit.coverage.matrix import BOUND, Findings, RowFailed, cover_tree, require_bound, require_tokens
from porting_kit.coverage.planned import plan_rows
from porting_kit.coverage.row import Row
from porting_kit.errors import SourceTreeError
from porting_kit.source_tree import open_source_tree

NEOX, BLOOM, LLAMA = "GPTNeoXForCausalLM", "BloomForCausalLM", "LlamaForCausalLM"
NEOX_FILE = "models/gptneox/model.py"
ATTENTION = "layers/attention.py"
OFFSETS = "spec_decoding_position_offsets=tree.spec_decoding_position_offsets,"


def cover(root, *architectures: str, cases=CASES) -> dict[str, Row]:
    """case -> row."""
    tree = open_source_tree(root)
    return {row.case: row for row in cover_tree(tree, plan_rows(tree, architectures, cases))}


def test_a_broken_model_fails_its_own_row_only(make_tree):
    root = make_tree((NEOX_FILE, "self.post_attention_layernorm(hidden_states)", "self.norm_that_is_not_there(x)"))
    rows = cover(root, NEOX, BLOOM)
    neox, bloom = rows["gptneox, rope base 30000"], rows["bloom"]
    assert neox.status == "failed"
    assert "norm_that_is_not_there" in neox.reason
    assert neox.reason.count("\n") == 0
    assert (neox.patched, neox.tokens_equal) == ("patched", None)
    assert (bloom.status, bloom.patched, bloom.tokens_equal, bloom.reason) == ("aligned", "patched", True, None)
    assert max(bloom.context_error, bloom.tree_error, bloom.heads_error) <= BOUND
    assert bloom.tokens_per_step > 1


def test_a_model_that_computes_something_else_fails_in_the_context(make_tree):
    root = make_tree((NEOX_FILE, "attention_output + feed_forward_output + hidden", "attention_output + hidden"))
    (row,) = cover(root, NEOX).values()
    assert row.status == "failed"
    assert row.reason.startswith("context logits of the unmodified model differ")
    assert row.context_error > 100 * BOUND
    assert row.tree_error is None


def test_a_tree_without_its_positions_fails_at_the_nodes(make_tree):
    root = make_tree((ATTENTION, OFFSETS, f"{OFFSETS[:-1]} and tree.spec_decoding_position_offsets * 0,"))
    (row,) = cover(root, NEOX).values()
    assert row.status == "failed"
    assert row.reason.startswith("logits at the nodes of a tree differ")
    assert row.context_error <= BOUND < row.tree_error


def test_a_file_that_is_no_python_fails(make_tree):
    (row,) = cover(make_tree((NEOX_FILE, "class GPTNeoXModel(Module):", "class GPTNeoXModel(Module:")), NEOX).values()
    assert (row.status, row.patched) == ("failed", None)
    assert "a file of the source tree cannot be read (found: SyntaxError" in row.reason


def test_what_the_project_does_not_know_is_refused(make_tree):
    entry = '"BloomForCausalLM": BloomForCausalLM,'
    root = make_tree(("models/__init__.py", entry, f'{entry}\n    "StrangeForCausalLM": BloomForCausalLM,'))
    tree = open_source_tree(root)
    strange, medusa = cover_tree(tree, plan_rows(tree, ["StrangeForCausalLM", "MedusaForCausalLM"]))[::-1]
    twin = "its class BloomForCausalLM is compared as BloomForCausalLM"
    assert (strange.status, strange.reason) == ("refused", f"no architectures/ file; {twin}")
    assert (medusa.status, medusa.patched) == ("refused", "refused")
    assert "no decoder layer" in medusa.reason


def test_a_recurrent_state_is_refused_before_anything_runs(make_tree):
    signature = "attention_params=None,\n    ):\n        attention_output"
    root = make_tree((NEOX_FILE, signature, f"conv_state=None,\n        {signature}"))
    (row,) = cover(root, NEOX).values()
    assert (row.status, row.patched, row.context_error) == ("refused", "refused", None)
    assert "recurrent state" in row.reason


def test_a_release_whose_shared_classes_know_no_tree_is_refused(make_tree):
    root = make_tree(
        (
            "models/modeling_utils.py",
            "lora_params=None,\n        spec_decoding_params=None,\n    ):\n        # Handed",
            "lora_params=None,\n    ):\n        # Handed",
        )
    )
    (row,) = cover(root, BLOOM).values()
    assert (row.status, row.context_error) == ("refused", None)
    assert "does not pass the tree of draft tokens through" in row.reason


def test_every_case_without_its_architecture_has_a_row_and_a_reason():
    tree = open_source_tree("bundled")
    planned = plan_rows(tree)
    assert {row.case.name for row in planned if row.case} == {case.name for case in CASES}
    absent = [row for row in planned if row.arch not in tree.model_names()]
    rows = cover_tree(tree, absent)
    assert len(rows) > 30
    assert {row.status for row in rows} == {"refused"}
    assert all(row.reason.endswith(f"has no architecture {row.arch}") for row in rows)


def test_a_release_that_cannot_express_a_variant_refuses_it(make_tree):
    root = make_tree(("version.py", '"bundled-1"', '"0.9.0.dev2024022700"'))
    rows = cover(root, LLAMA, cases=[case for case in CASES if "head_dim" in case.name or "llama3" in case.name])
    assert {row.status for row in rows.values()} == {"refused"}
    assert "a head size of 16" in rows["llama, head_dim"].reason
    assert "rope scaling of kind 'llama3'" in rows["llama, llama3 rope scaling"].reason


def test_an_unknown_architecture_is_the_users_mistake():
    with pytest.raises(SourceTreeError, match="no architecture 'BlomForCausalLM'"):
        plan_rows(open_source_tree("bundled"), ["BlomForCausalLM"])


@pytest.mark.parametrize("error", [2 * BOUND, math.nan, math.inf])
def test_an_error_beyond_the_bound_fails(error):
    require_bound("logits", BOUND)
    with pytest.raises(RowFailed, match="logits differ"):
        require_bound("logits", error)


@pytest.mark.parametrize(("equal", "per_step", "said"), [(False, 3.0, "greedy tokens"), (True, 1.0, "ever accepted")])
def test_tokens_that_prove_nothing_fail(equal, per_step, said):
    require_tokens(Findings(tokens_equal=True, tokens_per_step=1.5))
    with pytest.raises(RowFailed, match=said):
        require_tokens(Findings(tokens_equal=equal, tokens_per_step=per_step))
