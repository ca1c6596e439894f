"""The whole alignment on small ports of every bundled family, and that each gate can fail."""

import json

import pytest
import torch

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.run import AlignmentOptions, align_captured_outputs, align_port_outputs
from porting_kit.diagnosis.controls import GATE_FAULTS, seed_fault
from porting_kit.medusa.decoding import generate_medusa
from porting_kit.outcomes import Coverage, Verdict
from tests.alignment.tiny_ports import V

NEW_TOKENS = 24


def align(port, model=None, **options):
    return align_port_outputs(
        port.reference,
        model or port.state.build(),
        port.prompts,
        port.state.tree,
        heads=port.heads,
        options=AlignmentOptions(
            **{"new_tokens": NEW_TOKENS, "batch_sizes": (1, 4), "differences": port.differences, **options}
        ),
    )


@pytest.mark.parametrize("family", ["bloom", "llama", "qwen2", "gptneox"])
def test_a_healthy_port_aligns_to_rounding(family, port_of):
    result = align(port_of(family))
    assert result.verdict is Verdict.PASS, result.summary
    assert [gate.name for gate in result.gates] == [
        "tokens",
        "logits",
        "medusa equals greedy",
        "batches",
        "repeat",
        "heads",
    ]
    assert result.tokens_equal
    assert (result.near_ties, result.wrong_tokens, result.first_divergence) == (0, 0, None)
    assert max(result.context_error, result.tree_error) < 5e-6
    assert result.tokens_per_step > 1.3
    assert result.tokens_per_step == pytest.approx(result.predicted_tokens_per_step, rel=0.2)
    assert [list(text.tokens) for text in result.texts] == hugging_face_texts(port_of(family))


def hugging_face_texts(port):
    from porting_kit.alignment.inherent import matched_to_library

    with matched_to_library(port.reference, port.differences):
        return port.reference.generate(port.prompts, NEW_TOKENS)


def test_a_half_precision_port_aligns_within_measured_noise(port_of):
    result = align(port_of("llama", "float16"))
    assert result.verdict is Verdict.PASS, result.summary
    assert result.noise.dtype == "float16"
    assert 1e-5 < result.noise.near_tie_tolerance < 0.2
    assert result.tree_error < 10 * result.noise.relative_error


@pytest.mark.parametrize("gate", GATE_FAULTS)
def test_each_gate_fails_when_its_fault_is_planted(gate, port_of):
    port = port_of("qwen2")
    name, faulty = seed_fault(gate, port.state)
    result = align(port, faulty.build())
    assert result.verdict is Verdict.FAIL
    failed = [found.name for found in result.gates if found.passed is False]
    assert gate in failed, f"{name} left {gate} green: {failed}"
    if gate in ("logits", "batches", "repeat", "heads"):
        assert result.failing_gate == gate, "the fault shows in this gate first"


def test_the_document_has_the_keys_others_rely_on(port_of):
    document = json.loads(json.dumps(align(port_of("llama")).as_dict()))
    assert document["verdict"] == "pass"
    assert document["covered"] == ["weights", "model code", "tree and acceptance"]
    assert document["not_covered"] == ["kernel arithmetic", "engine"]
    assert {"tokens_equal", "near_ties", "first_divergence", "tokens_per_step", "approximate_fit"} <= document.keys()
    assert document["approximate_fit"] is None
    assert len(document["rows"]) == 4
    assert document["rows"][0]["prompt_tokens"] == 3


def test_a_failure_says_where_and_by_how_much(port_of):
    port = port_of("qwen2")
    _, faulty = seed_fault("qkv_bias_dropped", port.state)
    found = align(port, faulty.build()).first_divergence
    assert found["kind"] == "wrong"
    assert found["margin"] < 0
    assert found["emitted"] != found["preferred"]
    assert found["phase"] in ("context", "root", "depth 1", "depth 2", "depth 3")


def test_without_a_tree_plain_decoding_is_checked(port_of):
    port = port_of("llama")
    result = align_port_outputs(
        port.reference, port.state.build(), port.prompts, options=AlignmentOptions(new_tokens=8)
    )
    assert result.verdict is Verdict.PASS
    assert Coverage.TREE_AND_ACCEPTANCE not in result.covered
    assert [gate.name for gate in result.gates] == ["tokens", "logits", "batches", "repeat"]


def test_unequal_progress_and_a_prompt_that_ends_at_once(port_of):
    """Case 33: alone, in pairs and together; one text ends with its first token."""
    port = port_of("llama", eos_token_id=int(hugging_face_texts(port_of("llama"))[1][0]))
    result = align(port, batch_sizes=None)
    assert result.verdict is Verdict.PASS, result.summary
    assert len(result.texts[1].tokens) == 1
    assert result.texts[1].ended_by == port.reference.settings.end_ids[0]
    assert not any(text.stopped_early for text in result.texts)
    assert {"medusa batch 1", "medusa batch 2", "medusa batch 4", "greedy", "repeat"} == set(result.runs)


@pytest.fixture(scope="module")
def emitted(port_of):
    port = port_of("llama")
    return generate_medusa(port.state.build(), port.state.tree, port.prompts, NEW_TOKENS, [2]).tokens


class TestCaptured:
    """Tokens that came from elsewhere."""

    @staticmethod
    def judge(port, emitted, **options):
        return align_captured_outputs(
            port.reference,
            port.prompts,
            emitted,
            torch.float16,
            options=AlignmentOptions(new_tokens=NEW_TOKENS, **options),
        )

    def test_right_tokens_pass_and_cover_no_more_than_they_show(self, port_of, emitted):
        result = self.judge(port_of("llama"), emitted)
        assert result.verdict is Verdict.PASS
        assert result.covered == (Coverage.WEIGHTS, Coverage.MODEL_CODE)
        assert result.as_dict()["tokens_per_step"] is None

    def test_one_wrong_token_is_counted_once(self, port_of, emitted):
        changed = [list(row) for row in emitted]
        changed[2][5] = (changed[2][5] + 7) % V
        result = self.judge(port_of("llama"), changed)
        assert result.verdict is Verdict.FAIL
        assert result.first_divergence["prompt"] == 2
        assert result.first_divergence["position"] == 5
        assert result.first_divergence["phase"] is None

    def test_a_padding_column_that_won_is_wrong(self, port_of, emitted):
        """Case 10: an id that the vocabulary does not have."""
        changed = [list(row) for row in emitted]
        changed[0][3] = V + 1
        result = self.judge(port_of("llama"), changed)
        assert result.first_divergence["emitted"] == V + 1
        assert result.verdict is Verdict.FAIL

    def test_a_text_that_stops_without_reason_fails(self, port_of, emitted):
        result = self.judge(port_of("llama"), [row[:-3] for row in emitted])
        assert result.verdict is Verdict.FAIL
        assert "stopped after" in result.summary

    def test_tokens_after_the_end_do_not_count(self, port_of, emitted):
        port = port_of("llama", eos_token_id=emitted[0][4])
        result = self.judge(port, [row[:NEW_TOKENS] for row in emitted])
        assert len(result.texts[0].tokens) == emitted[0].index(emitted[0][4]) + 1
        assert result.texts[0].discarded == NEW_TOKENS - len(result.texts[0].tokens)
        assert result.verdict is Verdict.PASS


class TestApproximateFit:
    """A base that was changed a little on purpose: judged by itself, and compared with the original."""

    @staticmethod
    def changed(port, amount):
        name = "transformer.layers.0.mlp.proj.weight"
        return port.state.with_tensors(lambda other, tensor: tensor * (1 + amount) if other == name else tensor)

    def test_a_close_fit_passes_and_says_so(self, port_of):
        port = port_of("llama")
        result = align(port, self.changed(port, 1e-4).build(), fit_notes=("projection scaled for the test",))
        assert result.verdict is Verdict.PASS, result.summary
        assert result.summary.startswith("pass, approximate fit")
        document = result.as_dict()["approximate_fit"]
        assert document["passed"]
        assert document["near_tie_agreement"] > 0.98
        assert document["mean_divergence"] > 0
        assert document["notes"] == ["projection scaled for the test"]

    def test_a_loose_fit_fails_at_its_own_gate(self, port_of):
        port = port_of("llama")
        result = align(port, self.changed(port, 0.5).build(), fit_notes=("scaled too far",))
        assert result.verdict is Verdict.FAIL
        assert result.failing_gate == "fit"

    def test_a_fault_in_the_tree_is_still_seen(self, port_of):
        port = port_of("llama")
        _, faulty = seed_fault("mask_transposed", self.changed(port, 1e-4))
        result = align(port, faulty.build(), fit_notes=("scaled",))
        assert result.failing_gate == "tokens"

    def test_captured_tokens_of_a_fitted_port(self, port_of):
        port = port_of("llama")
        model = self.changed(port, 1e-4).build()
        emitted = generate_medusa(model, port.state.tree, port.prompts, NEW_TOKENS, [2]).tokens
        result = align_captured_outputs(
            port.reference,
            port.prompts,
            emitted,
            torch.float32,
            fitted=ContextOracle(model),
            options=AlignmentOptions(new_tokens=NEW_TOKENS, fit_notes=("scaled",)),
        )
        assert result.verdict is Verdict.PASS
        assert result.approximate_fit.passed
