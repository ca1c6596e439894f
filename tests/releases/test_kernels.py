"""Kernel gates: one broken condition per gate, the release boundaries, and the profiles."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

from porting_kit.errors import KernelRefusal, PortFileError
from porting_kit.releases.enforced_gates import ENFORCED_GATES
from porting_kit.releases.facts import load_release_ranges
from porting_kit.releases.kernels import AttentionShape, evaluate_gates, kernel_profile
from porting_kit.releases.silent_gates import SILENT_GATES

GOOD = AttentionShape(
    head_size=128, query_heads=32, kv_heads=32, dtype="float16", compute_capability=90, max_seq_len=2048
)
# The oldest and the newest release of every range, and the boundaries within 0.10, 0.12, 0.15 and 0.16.
RELEASES = (
    "0.8.0",
    "0.9.0",
    "0.10.0.dev2024043000",
    "0.10.0.dev2024050700",
    "0.11.0.dev2024051400",
    "0.11.0.dev2024062500",
    "0.12.0.dev2024071600",
    "0.12.0.dev2024080600",
    "0.13.0.dev2024090300",
    "0.14.0.dev2024100800",
    "0.15.0.dev2024110500",
    "0.15.0",
    "0.16.0.dev2024112600",
    "0.16.0",
    "0.18.0.dev2025031100",
    "0.20.0",
    "1.0.0",
    "1.2.1",
)
# gate -> (a release that has it, the one thing that breaks it, the verdict)
SEEDED = {
    "data type": ("0.11.0", {"dtype": "float32"}, "refused"),
    "cross attention": ("0.11.0", {"cross_attention": True}, "refused"),
    "head counts": ("0.11.0", {"query_heads": 33, "kv_heads": 2}, "refused"),
    "query group": ("0.10.0", {"query_heads": 28, "kv_heads": 4}, "refused"),
    "multi-block mode": ("0.11.0", {"multi_block_mode": True}, "refused"),
    "head size": ("0.11.0", {"head_size": 64}, "refused"),
    "q scaling": ("0.11.0", {"q_scaling": 8.0}, "refused"),
    "mask": ("0.11.0", {"mask": "block_sparse"}, "refused"),
    "tokens per block": ("0.11.0", {"tokens_per_block": 16}, "refused"),
    "beam width": ("0.11.0", {"beam_width": 2}, "refused"),
    "window per layer": ("0.11.0", {"sliding_window": 512, "window_varies": True}, "refused"),
    "sink tokens": ("0.11.0", {"sink_tokens": 4}, "refused"),
    "compute capability": ("0.11.0", {"compute_capability": 75}, "refused"),
    "run-time kernel: positions": ("0.20.0", {"kv_dtype": "fp8", "position_kind": "none"}, "refused"),
    "run-time kernel: sizes": ("0.20.0", {"kv_dtype": "fp8", "head_size": 72}, "refused"),
    "ALiBi": ("0.11.0", {"position_kind": "alibi"}, "silent"),
    "positions outside the kernel": ("0.11.0", {"position_kind": "learned_absolute"}, "silent"),
    "logit soft-cap": ("0.13.0", {"softcap": 30.0}, "silent"),
    "relative attention bias": ("0.11.0", {"relative_bias": True}, "silent"),
    "KV-cache scale": ("0.10.0", {"kv_dtype": "int8"}, "silent"),
    "sliding window": ("0.11.0", {"sliding_window": 1024}, "silent"),
}


def verdicts(shape, release, fitted=None):
    results = evaluate_gates(shape, kernel_profile(f"release:{release}"), fitted=fitted)
    return {result.name: result.verdict for result in results}


def test_every_gate_has_a_seeded_fault():
    assert set(SEEDED) == {gate.name for gate in (*ENFORCED_GATES, *SILENT_GATES)}


@pytest.mark.parametrize("release", RELEASES)
def test_a_shape_within_every_limit_passes_everywhere(release):
    assert set(verdicts(GOOD, release).values()) == {"pass"}
    kernel_profile(f"release:{release}").refuse(GOOD)


@pytest.mark.parametrize(("gate", "release", "fault", "verdict"), [(name, *seed) for name, seed in SEEDED.items()])
def test_a_broken_condition_fails_its_gate_and_no_other(gate, release, fault, verdict):
    found = verdicts(replace(GOOD, **fault), release)
    assert {name: result for name, result in found.items() if result != "pass"} == {gate: verdict}


@pytest.mark.parametrize(("gate", "release", "fault", "verdict"), [(name, *seed) for name, seed in SEEDED.items()])
def test_refuse_raises_the_library_message_for_enforced_gates_only(gate, release, fault, verdict):
    profile = kernel_profile(f"release:{release}")
    shape = replace(GOOD, **fault)
    if verdict == "silent":
        profile.refuse(shape)
        return
    with pytest.raises(KernelRefusal) as raised:
        profile.refuse(shape)
    message = next(item for item in profile.gates if item.name == gate).message(profile.limits)
    assert raised.value.subject == message
    assert raised.value.next_step


@pytest.mark.parametrize(
    ("release", "head_size", "card", "verdict"),
    [
        ("0.11.0.dev2024062500", 128, 80, "pass"),
        ("0.11.0.dev2024062500", 64, 90, "refused"),
        ("0.11.0.dev2024062500", 80, 90, "refused"),
        ("0.11.0.dev2024062500", 96, 90, "refused"),
        ("0.11.0.dev2024062500", 256, 90, "refused"),  # passes the dispatcher, has no compiled kernel
        ("0.15.0.dev2024110500", 64, 90, "refused"),
        ("0.15.0.dev2024111200", 64, 90, "pass"),
        ("0.15.0.dev2024111200", 64, 86, "refused"),  # compiled for compute capability 9.0 only
        ("0.16.0.dev2024112600", 64, 86, "refused"),
        ("0.16.0.dev2024120300", 64, 86, "pass"),
        ("0.18.0.dev2025031100", 64, 86, "pass"),
        ("1.2.1", 256, 90, "refused"),
        ("1.2.1", 72, 90, "refused"),
    ],
)
def test_head_sizes_by_release_and_card(release, head_size, card, verdict):
    shape = replace(GOOD, head_size=head_size, compute_capability=card)
    assert verdicts(shape, release)["head size"] == verdict


def test_head_size_64_wants_the_block_its_kernel_was_compiled_for():
    shape = replace(GOOD, head_size=64, tokens_per_block=128)
    assert verdicts(shape, "0.16.0")["head size"] == "refused"
    assert verdicts(replace(shape, tokens_per_block=64), "0.16.0")["head size"] == "pass"


@pytest.mark.parametrize(
    ("release", "block", "verdict"),
    [
        ("0.11.0", 64, "pass"),
        ("0.11.0", 128, "pass"),
        ("0.11.0", None, "pass"),
        ("0.11.0", 32, "refused"),
        ("0.16.0", 32, "refused"),
        ("0.18.0", 32, "pass"),
        ("1.2.1", 8, "refused"),
    ],
)
def test_blocks_by_release(release, block, verdict):
    assert verdicts(replace(GOOD, tokens_per_block=block), release)["tokens per block"] == verdict


@pytest.mark.parametrize("group", [(32, 32), (32, 8), (9, 3), (28, 4), (33, 1), (4, 4)])
@pytest.mark.parametrize("release", ["0.8.0", "0.9.0", "0.10.0", "0.11.0.dev2024051400", "0.14.0", "1.2.1"])
def test_query_groups_must_be_powers_of_two_up_to_0_10(group, release):
    shape = replace(GOOD, query_heads=group[0], kv_heads=group[1])
    expected = "refused" if release in ("0.8.0", "0.9.0", "0.10.0") and group in ((9, 3), (28, 4), (33, 1)) else None
    found = verdicts(shape, release).get("query group")
    assert found == (expected or ("pass" if release in ("0.8.0", "0.9.0", "0.10.0") else None))


@pytest.mark.parametrize(
    ("release", "has_gate"),
    [("0.10.0", False), ("0.11.0", True), ("0.12.0.dev2024071600", True), ("0.12.0.dev2024072300", False)],
)
def test_multi_block_mode_is_refused_only_where_the_library_does_not_turn_it_off(release, has_gate):
    assert ("multi-block mode" in verdicts(GOOD, release)) == has_gate


@pytest.mark.parametrize(
    ("release", "message"),
    [
        ("0.9.0", "No available XQA kernels are found for medusa mode."),
        ("0.10.0.dev2024043000", "No available XQA kernels are found for medusa mode."),
        ("0.10.0.dev2024050700", "No available XQA kernels are found for speculative decoding mode."),
        ("0.13.0", "No available XQA kernels are found for speculative decoding mode."),
    ],
)
def test_the_refusal_has_the_words_of_its_release(release, message):
    with pytest.raises(KernelRefusal) as raised:
        kernel_profile(f"release:{release}").refuse(replace(GOOD, head_size=80))
    assert raised.value.subject == message
    assert "pad_head_size" in raised.value.next_step


@pytest.mark.parametrize("card", [75, 87, 100, 120])
@pytest.mark.parametrize("release", ["0.8.0", "0.13.0", "1.2.1"])
def test_cards_without_compiled_kernels_are_refused(card, release):
    assert verdicts(replace(GOOD, compute_capability=card), release)["compute capability"] == "refused"


def test_an_fp8_cache_wants_ada_or_hopper():
    assert verdicts(replace(GOOD, kv_dtype="fp8", compute_capability=86), "0.13.0")["compute capability"] == "refused"
    assert verdicts(replace(GOOD, kv_dtype="fp8", compute_capability=89), "0.13.0")["compute capability"] == "pass"


def test_alibi_is_silent_until_the_run_time_kernel_refuses_it():
    alibi = replace(GOOD, position_kind="alibi")
    assert verdicts(alibi, "0.20.0")["ALiBi"] == "silent"
    found = verdicts(replace(alibi, kv_dtype="fp8"), "0.20.0")
    assert found["run-time kernel: positions"] == "refused"
    assert "run-time kernel: positions" not in verdicts(replace(alibi, kv_dtype="fp8"), "0.18.0")


def test_a_window_that_is_never_reached_is_no_fault():
    window = replace(GOOD, sliding_window=4096, max_seq_len=4096)
    assert set(verdicts(window, "0.13.0").values()) == {"pass"}
    assert set(verdicts(replace(window, window_varies=True), "0.13.0").values()) == {"pass"}
    assert verdicts(replace(window, max_seq_len=4097), "0.13.0")["sliding window"] == "silent"
    assert verdicts(replace(window, max_seq_len=None), "0.13.0")["sliding window"] == "silent"


def test_a_fitted_shape_turns_refusals_and_silent_faults_into_mended():
    bloom = replace(GOOD, head_size=64, position_kind="alibi")
    fitted = replace(bloom, head_size=128, position_kind="rope_gpt_neox")
    results = {r.name: r for r in evaluate_gates(bloom, kernel_profile("release:0.11.0"), fitted=fitted)}
    assert results["head size"].verdict == results["ALiBi"].verdict == "mended"
    assert results["head size"].value == "64 -> 128"
    assert results["head size"].mended_by == ("pad_head_size",)
    assert results["ALiBi"].mended_by == ("write_positions", "fold_alibi")
    assert results["mask"].verdict == "pass"


def test_a_fit_that_breaks_another_gate_is_judged_on_the_fitted_shape():
    results = evaluate_gates(GOOD, kernel_profile("release:0.11.0"), fitted=replace(GOOD, head_size=160))
    assert next(r for r in results if r.name == "head size").verdict == "refused"


def test_no_transform_is_offered_where_none_helps():
    results = {r.name: r for r in evaluate_gates(replace(GOOD, head_size=256), kernel_profile("release:0.11.0"))}
    assert results["head size"].mended_by == ()
    assert results["head size"].remedy.startswith("none")


def test_positions_computed_in_the_graph_mend_learned_positions():
    learned = replace(GOOD, position_kind="learned_absolute")
    fitted = replace(learned, positions_in_graph=True)
    assert verdicts(learned, "0.11.0", fitted)["positions outside the kernel"] == "mended"


def test_profiles_say_what_the_generation_phase_leaves_out():
    exact = kernel_profile("exact")
    assert exact.alibi_in_generation
    assert exact.softcap_in_generation
    assert not exact.one_position_id_per_request
    assert exact.gates == ()
    assert evaluate_gates(replace(GOOD, dtype="float32"), exact) == ()
    exact.refuse(replace(GOOD, head_size=80, dtype="float32"))
    old, new = kernel_profile("release:0.10.0"), kernel_profile("release:0.11.0")
    assert not old.alibi_in_generation
    assert not new.alibi_in_generation
    assert new.one_position_id_per_request
    assert not old.kv_scale_in_generation
    assert new.kv_scale_in_generation


@pytest.mark.parametrize("name", ["release:0.7.1", "release:0.8.0.dev20240123", "release:1.3.0rc1", "release:2.0"])
def test_releases_outside_the_known_ranges_name_the_known_range(name):
    with pytest.raises(PortFileError) as raised:
        kernel_profile(name)
    assert "0.8 to 1.2" in raised.value.message


def test_the_real_kernels_profile_has_no_gates_and_leaves_out_what_every_release_leaves_out():
    profile = kernel_profile("xqa")
    assert (profile.gates, profile.limits, profile.attend_tree) == ((), None, None)
    assert not profile.alibi_in_generation
    assert profile.one_position_id_per_request


@pytest.mark.parametrize("name", ["XQA", "release", "0.11.0", ""])
def test_other_profile_names_are_refused(name):
    with pytest.raises(PortFileError):
        kernel_profile(name)


def test_ranges_meet_and_cite_their_sources():
    ranges = load_release_ranges()
    for earlier, later in itertools.pairwise(ranges):
        assert earlier.before == later.since
    for facts in ranges:
        assert facts.kernel.source
        assert facts.build.source
        assert facts.run.source
        assert facts.build.complete or facts.kernel.inferred
    for gate in (*ENFORCED_GATES, *SILENT_GATES):
        assert gate.source
        assert gate.effect
        assert gate.remedy(GOOD, ranges[0].kernel)


def test_an_impossible_shape_is_refused():
    with pytest.raises(PortFileError, match="head_size"):
        replace(GOOD, head_size=0)


def test_the_package_imports_without_heavy_packages():
    code = (
        "import sys; before = set(sys.modules)\n"
        "import porting_kit.releases.kernels, porting_kit.releases.port_gates, porting_kit.releases.pinning\n"
        "import porting_kit.releases.build_flags, porting_kit.releases.resources\n"
        "porting_kit.releases.kernels.kernel_profile('release:0.12.0')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'tensorrt_llm'} & (set(sys.modules) - before)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
