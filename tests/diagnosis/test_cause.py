"""Causes are named from what a faulty port emits, with and without logits; healthy ports and unknown faults are not."""

import json
from dataclasses import replace

import pytest
import torch

from porting_kit.alignment.run import AlignmentOptions, align_port_outputs
from porting_kit.diagnosis import Observation, name_cause, observe, seed_fault
from porting_kit.diagnosis.catalogue import CATALOGUE, find_fault
from porting_kit.diagnosis.decision import LONGER, decide_ties
from porting_kit.diagnosis.fault import LOGITS_FILE, STEPS_FILE
from porting_kit.diagnosis.hypotheses import Hypothesis
from porting_kit.diagnosis.search import SHORTEST_BEGINNING, Search
from porting_kit.diagnosis.weight_faults import nudge_projection
from porting_kit.medusa.decoding import generate_medusa
from porting_kit.outcomes import Verdict
from porting_kit.releases.kernels import kernel_profile

RELEASE = "release:0.11.0.dev2024062500"
NEW_TOKENS = 12
TOLERANCE = 1e-4

PLANTED = [
    ("bloom", "alibi_dropped_in_generation"),
    ("bloom", "qkv_bias_dropped"),
    ("bloom", "qkv_not_deinterleaved"),
    ("bloom", "key_and_value_swapped"),
    ("qwen2", "qkv_bias_dropped"),
    ("qwen2", "rope_base_lost"),
    ("llama", "gate_and_up_swapped"),
    ("llama", "position_offsets_ignored"),
    ("llama", "mask_bits_reversed"),
    ("llama", "mask_transposed"),
    ("llama", "accepted_kv_not_moved"),
    ("llama", "heads_shifted_by_one"),
    ("llama", "head_taken_from_embedding"),
]


def run(port, model, *, with_logits=True, with_steps=True):
    prompts = port.prompts[1:3]
    generation = generate_medusa(model, port.state.tree, prompts, NEW_TOKENS, keep_logits=True)
    return Observation(
        prompts,
        generation.tokens,
        TOLERANCE,
        accepted_lengths=generation.accepted_lengths if with_steps else None,
        logits=generation.logits if with_logits else None,
        logits_noise=1e-4,
    )


@pytest.mark.parametrize(("family", "fault"), PLANTED)
def test_a_planted_fault_is_named(family, fault, port_of):
    port = port_of(family)
    _, faulty = seed_fault(fault, port.state)
    diagnosis = name_cause(port.state, run(port, faulty.build()))
    assert diagnosis.cause is find_fault(fault), diagnosis.verdict
    assert diagnosis.ties == ()
    best = diagnosis.hypotheses[0]
    assert best.unexplained == 0
    assert best.explained == diagnosis.to_explain > 0


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("bloom", "alibi_dropped_in_generation"),
        ("qwen2", "qkv_bias_dropped"),
        ("llama", "accepted_kv_not_moved"),
    ],
)
def test_tokens_alone_name_the_cause(family, fault, port_of):
    """What a captured engine run gives: neither logits nor steps."""
    port = port_of(family)
    _, faulty = seed_fault(fault, port.state)
    diagnosis = name_cause(port.state, run(port, faulty.build(), with_logits=False, with_steps=False))
    assert diagnosis.cause is find_fault(fault), diagnosis.verdict
    assert len(diagnosis.ties) <= 1


def test_a_tie_is_said_and_what_would_decide_it(port_of):
    """Two names for one change of the model cannot be told apart."""
    port = port_of("llama")
    fault = find_fault("mask_transposed")
    double = replace(fault, name="another_name", title="the same under another name")
    diagnosis = name_cause(port.state, run(port, fault.apply(port.state).build()), (fault, double))
    assert {diagnosis.cause, *(tie.fault for tie in diagnosis.ties)} == {fault, double}
    assert "explaining it equally well" in diagnosis.verdict
    assert "the two compute the same logits" in diagnosis.as_dict()["decided_by"]


def test_a_tie_of_tokens_is_decided_by_the_logits(port_of):
    """Token 0 for ever: an empty output matrix, or an overflow."""
    port = port_of("llama")
    embedding = port.state.tensors["transformer.vocab_embedding.weight"]
    tied = replace(port.state, tensors={**port.state.tensors, "lm_head.weight": embedding.clone()})
    faulty = find_fault("tied_head_left_empty").apply(tied).build()
    alone = name_cause(tied, run(port, faulty, with_logits=False, with_steps=False))
    assert {alone.cause.name, *(tie.name for tie in alone.ties)} == {"tied_head_left_empty", "fp16_overflow"}
    assert "output_logits_npy" in alone.decided_by
    with_logits = name_cause(tied, run(port, faulty, with_steps=False))
    assert (with_logits.cause.name, with_logits.ties) == ("tied_head_left_empty", ())


@pytest.mark.parametrize(
    ("names", "logits", "steps", "asked"),
    [
        (("padding_read_as_text", "state_left_from_previous_call"), None, None, LOGITS_FILE),
        (("padding_read_as_text", "state_left_from_previous_call"), [], None, STEPS_FILE),
        (("padding_read_as_text", "state_left_from_previous_call"), [], [], LONGER),
        (("ngrams_forbidden", "qkv_bias_dropped"), None, None, LOGITS_FILE),
        (("ngrams_forbidden", "repetition_penalty_applied"), None, None, LONGER),
    ],
)
def test_no_file_is_asked_for_that_is_there_or_would_not_decide(names, logits, steps, asked):
    """Two ways of choosing from the same logits differ in the tokens alone."""
    search = Search(None, Observation([], [], TOLERANCE, accepted_lengths=steps, logits=logits))
    best, tie = (Hypothesis((find_fault(name),)) for name in names)
    assert decide_ties(search, best, [tie]) == asked


def test_a_healthy_port_has_nothing_to_explain(port_of):
    port = port_of("llama")
    diagnosis = name_cause(port.state, run(port, port.state.build()))
    assert diagnosis.cause is None
    assert diagnosis.to_explain == 0
    assert "nothing to explain" in diagnosis.verdict


@pytest.mark.parametrize("with_steps", [True, False])
def test_an_end_that_is_wrong_is_counted_among_ends(with_steps, port_of):
    port = port_of("llama")
    observed = replace(run(port, port.state.build(), with_steps=with_steps), overrun=[True, False])
    diagnosis = name_cause(port.state, observed)
    lists = [observed.tokens, *([observed.accepted_lengths] if with_steps else [])]
    total = sum(len(row) for rows in lists for row in rows) + len(observed.overrun)
    assert (diagnosis.to_explain, diagnosis.observed) == (1, total)
    assert diagnosis.evidence[0].endswith(f"does not explain 1 of {total} observed tokens, steps and ends of texts")


def scramble(state):
    generator = torch.Generator().manual_seed(4)
    return state.with_tensors(
        lambda name, tensor: tensor[torch.randperm(len(tensor), generator=generator)] if "mlp.proj" in name else tensor
    )


TWO = [
    ("llama", ("gate_and_up_swapped", "mask_transposed"), True),
    ("llama", ("gate_and_up_swapped", "mask_transposed"), False),
    ("qwen2", ("qkv_bias_dropped", "rope_base_lost"), True),
    ("qwen2", ("qkv_bias_dropped", "rope_base_lost"), False),
    ("bloom", ("qkv_bias_dropped", "alibi_dropped_in_generation"), True),
]


@pytest.mark.parametrize(("family", "faults", "with_logits"), TWO)
def test_two_faults_at_once_are_both_named(family, faults, with_logits, port_of):
    """The second pair is what a conversion written for LLaMA does to Qwen2."""
    port = port_of(family)
    first, second = (find_fault(name) for name in faults)
    faulty = second.apply(first.apply(port.state)).build()
    diagnosis = name_cause(port.state, run(port, faulty, with_logits=with_logits, with_steps=False))
    assert {fault.name for fault in diagnosis.causes} == set(faults), diagnosis.verdict
    document = diagnosis.as_dict()
    assert first.fix in document["fix"]
    assert second.fix in document["fix"]


@pytest.mark.parametrize("with_logits", [True, False])
def test_a_fault_that_is_not_in_the_catalogue_is_not_given_a_name(with_logits, port_of):
    port = port_of("llama")
    observed = run(port, scramble(port.state).build(), with_logits=with_logits)
    diagnosis = name_cause(port.state, observed, pair_seconds=2)
    assert diagnosis.cause is None, diagnosis.verdict
    tried = [one for one in diagnosis.hypotheses if len(one.faults) == 1 and one.error is None]
    assert f"none of the {len(tried)} faults tried" in diagnosis.verdict
    assert len(tried) < len(diagnosis.hypotheses) - 1, "those ruled out, and two at once, do not count"
    assert diagnosis.evidence


def test_a_model_without_an_opinion_explains_nothing(port_of):
    """All logits equal: every emitted token would be 'as good as the best'."""
    port = port_of("bloom")
    fault = replace(find_fault("tied_head_left_empty"), applies=lambda state: None)
    observed = run(port, seed_fault("qkv_not_deinterleaved", port.state)[1].build(), with_logits=False)
    diagnosis = name_cause(port.state, observed, (fault,))
    assert diagnosis.cause is None
    (tried,) = [hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.fault is fault]
    assert tried.unexplained_tokens == SHORTEST_BEGINNING
    assert tried.explained < diagnosis.to_explain / 2


def test_a_small_change_of_the_logits_is_not_blamed_on_the_catalogue(port_of):
    port = port_of("llama")
    observed = run(port, nudge_projection(port.state).build())
    assert name_cause(port.state, observed, pair_seconds=1).cause is None


def test_hypotheses_that_cannot_run_are_listed_with_the_reason(port_of):
    port = port_of("llama")

    def break_shape(state):
        return state.with_tensors(lambda name, tensor: tensor[:-1] if name == "transformer.ln_f.weight" else tensor)

    broken = replace(find_fault("mask_transposed"), name="broken", apply=break_shape)
    diagnosis = name_cause(port.state, run(port, seed_fault("mask_causal", port.state)[1].build()), (broken,))
    assert diagnosis.hypotheses[-1].name == "broken"
    assert diagnosis.hypotheses[-1].error
    assert diagnosis.cause is None


def test_only_faults_that_the_port_can_have_are_tried(port_of):
    diagnosis = name_cause(
        port_of("llama").state, run(port_of("llama"), seed_fault("tokens", port_of("llama").state)[1].build())
    )
    assert diagnosis.skipped["alibi_dropped_in_generation"] == "positions are rope_gpt_neox"
    tried = {hypothesis.name for hypothesis in diagnosis.hypotheses}
    assert tried | set(diagnosis.skipped) == {fault.name for fault in CATALOGUE} | {"no fault"}


@pytest.fixture(scope="module")
def bloom_under_release(port_of):
    """BLOOM with head size 128 in float16 as the 0.11 kernels run it."""
    port = port_of("bloom-128", "float16")
    model = replace(port.state, kernel=kernel_profile(RELEASE)).build()
    options = AlignmentOptions(new_tokens=NEW_TOKENS, batch_sizes=(1,), differences=port.differences)
    return port, align_port_outputs(
        port.reference, model, port.prompts, port.state.tree, heads=port.heads, options=options
    )


def test_bloom_under_release_kernels_fails_and_the_cause_is_the_dropped_alibi_bias(bloom_under_release):
    port, result = bloom_under_release
    assert result.verdict is Verdict.FAIL
    assert result.context_error < 10 * result.noise.relative_error < result.tree_error
    assert result.first_divergence["phase"] != "context"
    diagnosis = name_cause(port.state, result)
    assert diagnosis.verdict == "ALiBi bias dropped in the generation phase"
    assert "fold_alibi" in diagnosis.cause.fix
    document = json.loads(json.dumps(diagnosis.as_dict()))
    assert document["fault"] == "alibi_dropped_in_generation"
    assert document["to_explain"] > 0
    assert "healthy port does not explain" in document["evidence"][0]


def test_the_same_port_under_exact_kernels_passes(bloom_under_release):
    port, _ = bloom_under_release
    options = AlignmentOptions(new_tokens=NEW_TOKENS, batch_sizes=(1,), differences=port.differences)
    result = align_port_outputs(
        port.reference, port.state.build(), port.prompts, port.state.tree, heads=port.heads, options=options
    )
    assert result.verdict is Verdict.PASS, result.summary


def test_an_alignment_is_an_observation(bloom_under_release):
    _, result = bloom_under_release
    observed = observe(result)
    assert observed.tolerance == result.noise.near_tie_tolerance
    assert [len(row) for row in observed.tokens] == [len(logits) for logits in observed.logits]


def test_tokens_alone_do_not_tell_rounding_from_a_small_fault(port_of):
    """The erf form of GELU moves logits as far as TF32 does; their file shows which it is."""
    port = port_of("gptneox")
    state = port.state.with_config(hidden_act="gelu_new")
    faulty = find_fault("gelu_erf_for_tanh").apply(state).build()
    seen = run(port, faulty, with_steps=False)
    assert name_cause(state, seen).cause is find_fault("gelu_erf_for_tanh")
    tokens = [list(row) for row in seen.tokens]
    margins = torch.cat(seen.logits).topk(2).values
    closest = int((margins[:, 0] - margins[:, 1]).argmin())
    prompt, place = divmod(closest, NEW_TOKENS)
    tokens[prompt] = [*tokens[prompt][:place], int(seen.logits[prompt][place].topk(2).indices[1])]
    flipped = Observation(seen.prompts, tokens, TOLERANCE)
    found = name_cause(state, flipped)
    assert found.rounding is not None, found.verdict
    assert "tokens alone do not tell" in found.verdict
    assert found.decided_by == LOGITS_FILE
