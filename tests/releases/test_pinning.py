"""Which release is pinned for a shape, and what changed between two."""

import pytest

from porting_kit.errors import PortFileError
from porting_kit.releases.build_flags import (
    compare_releases,
    draft_limit_key,
    known_build_flags,
    known_run_flags,
    require_flag,
)
from porting_kit.releases.kernels import AttentionShape
from porting_kit.releases.pinning import pin_release

SMOLLM2 = AttentionShape(head_size=64, query_heads=9, kv_heads=3, dtype="float16", compute_capability=86)
LLAMA = AttentionShape(head_size=128, query_heads=32, kv_heads=32, dtype="float16", compute_capability=90)
BLOOM = AttentionShape(
    head_size=128, query_heads=32, kv_heads=32, dtype="float16", position_kind="alibi", compute_capability=90
)


def test_an_unfitted_small_model_is_pinned_where_its_head_size_has_a_kernel():
    pin = pin_release(SMOLLM2)
    assert pin.usable
    assert not {"0.8", "0.9", "0.10", "0.11", "0.15"} & {pin.candidate.facts.name}
    refused = {other.facts.name: other.refused[0].name for other in pin.others if other.refused}
    assert refused["0.11"] == "head size"
    assert refused["0.10"] == "query group"
    assert refused["0.15"] == "head size"  # compiled for compute capability 9.0 only


def test_facts_that_were_read_win_over_inferred_ones():
    assert pin_release(LLAMA).candidate.facts.name == "0.15 snapshots"
    assert not pin_release(LLAMA).candidate.inferred


def test_the_choice_can_be_limited_to_what_is_there():
    pin = pin_release(LLAMA, available=("0.9.0", "0.11.0"))
    assert pin.candidate.facts.name == "0.11"
    assert [other.facts.name for other in pin.others] == ["0.9"]


def test_a_silent_fault_is_not_called_usable():
    pin = pin_release(BLOOM)
    assert not pin.usable
    assert pin.candidate.silent[0].name == "ALiBi"
    assert "wrong without a message" in pin.reason


@pytest.mark.parametrize(
    ("flag", "release", "known"),
    [
        ("max_draft_len", "0.8.0", False),
        ("max_draft_len", "0.9.0.dev2024020600", False),
        ("max_draft_len", "0.9.0", True),
        ("speculative_decoding_mode", "0.10.0.dev2024043000", False),
        ("speculative_decoding_mode", "0.10.0", True),
        ("max_output_len", "0.11.0.dev2024061100", True),
        ("max_seq_len", "0.11.0.dev2024061100", False),
        ("max_seq_len", "0.11.0.dev2024061800", True),
        ("max_output_len", "0.12.0.dev2024071600", False),
        ("paged_kv_cache", "0.12.0", True),
        ("kv_cache_type", "0.12.0", False),
        ("kv_cache_type", "0.13.0", True),
        ("multi_block_mode", "0.12.0", False),
        ("model_cls_file", "0.8.0", True),
        ("model_cls_file", "1.2.1", True),
        ("dora_plugin", "0.19.0", True),
        ("fuse_fp4_quant", "1.2.0", True),
        ("cluster_key", "1.2.0rc0", True),
        ("cluster_key", "1.2.0", False),
    ],
)
def test_flags_by_release(flag, release, known):
    assert (flag in known_build_flags(release)) == known


def test_the_draft_limit_key_changed_with_the_flag():
    assert draft_limit_key("0.8.0") == draft_limit_key("0.9.0.dev2024020600") == "max_medusa_token_len"
    assert draft_limit_key("0.9.0") == draft_limit_key("1.2.1") == "max_draft_len"


def test_a_flag_that_came_went_and_came_back():
    assert "return_all_generated_tokens" in known_run_flags("0.12.0.dev2024070200")
    assert "return_all_generated_tokens" not in known_run_flags("0.12.0.dev2024070900")
    assert "return_all_generated_tokens" in known_run_flags("0.12.0.dev2024071600")


@pytest.mark.parametrize(
    ("flag", "releases"),
    [("prompt_lookup_config", {"0.19.0"}), ("ngram_config", {"1.0.0", "1.2.0"}), ("min_p", {"1.0.0", "1.2.0"})],
)
def test_run_flags_of_late_releases(flag, releases):
    assert {release for release in ("0.19.0", "1.0.0", "1.2.0") if flag in known_run_flags(release)} == releases


def test_an_unknown_flag_names_the_nearest_one():
    with pytest.raises(PortFileError) as raised:
        require_flag("max_output_len", "0.13.0", known_build_flags("0.13.0"), "trtllm-build")
    assert raised.value.expected.startswith("--max_")


def test_the_differences_between_two_releases_are_listed():
    subjects = {item.subject: (item.first, item.second) for item in compare_releases("0.9.0", "1.2.1")}
    assert subjects["run.py's --temperature with Medusa"] == ("0.0", "1.0")
    assert subjects["run.py needs --use_py_session"] == ("True", "False")
    assert subjects["--max_output_len"] == ("known", "unknown")
    assert subjects["query group"] == ("a power of two", "any")
    assert compare_releases("0.11.0.dev2024062500", "0.11.0.dev2024062500") == ()
