"""Which flags of trtllm-build and of examples/run.py a release knows.

The lists are read from the releases' own parsers (see the `source` of each range in `data/`). Where a source tree is at
hand, `engine.build_parser` reads that tree's parser instead, which is always right; these lists serve the case without
one, and the comparison of two releases.
"""

from __future__ import annotations

from dataclasses import dataclass

from porting_kit.errors import PortFileError, suggest_nearest
from porting_kit.releases.facts import BuildFacts, ReleaseFacts, RunFacts, find_release_facts, words
from porting_kit.releases.version import parse_release

SWITCHES = frozenset(
    words(
        "cuda_graph_mode debug_mode dry_run eagle_use_dynamic_tree enable_chunked_context "
        "enable_context_fmha_fp32_acc enable_debug_output fail_fast_on_attention_window_too_large fast_build "
        "gather_all_token_logits gather_context_logits gather_generation_logits hf_device_map_auto "
        "kv_cache_enable_block_reuse monitor_memory no-kv_cache_enable_block_reuse no_add_special_tokens "
        "no_prompt_template output_generation_logits return_all_generated_tokens run_profiling streaming strip_plan "
        "strongly_typed use_py_session weight_sparsity weight_streaming"
    )
)
"""Flags that take no value in any release from 0.8 to 0.16, nor in 0.19 to 1.2 (commands/build.py, examples/run.py and
examples/utils.py as far as `data/` says they were read)."""
SWITCHES_OR_VALUES = frozenset(("multi_block_mode", "use_fused_mlp", "visualize_network"))
"""Switches in some releases, with a value in others."""


def known_build_flags(release: str) -> frozenset[str]:
    """Names, without dashes, of the flags the release's trtllm-build takes.

    Raises:
        PortFileError: a release outside the known ranges.
    """
    return _known(find_release_facts(release).build, release)


def known_build_choices(release: str) -> dict[str, tuple[str, ...]]:
    """The values that the release's trtllm-build takes for flags that matter here. Raises PortFileError."""
    facts = find_release_facts(release).build
    return {"gemm_plugin": facts.plugin_types, "speculative_decoding_mode": facts.speculative_modes}


def known_run_flags(release: str) -> frozenset[str]:
    """Names, without dashes, of the flags the release's examples/run.py takes. Raises PortFileError."""
    return _known(find_release_facts(release).run, release)


def _known(facts: BuildFacts | RunFacts, release: str) -> frozenset[str]:
    parsed = parse_release(release)
    return frozenset(facts.flags) | {flag.name for flag in facts.partial if flag.known_to(parsed)}


def draft_limit_key(release: str) -> str:
    """The checkpoint key that holds the number of draft tokens.

    `max_medusa_token_len` in 0.8 and in the first snapshots of 0.9, which have no --max_draft_len either; later
    `max_draft_len`. Raises PortFileError.
    """
    facts = find_release_facts(release).build
    return facts.draft_limit_key if "max_draft_len" in known_build_flags(release) else "max_medusa_token_len"


def require_flag(name: str, release: str, known: frozenset[str], program: str) -> None:
    """Refuse a flag the release does not know.

    Raises:
        PortFileError: unknown flag; names the nearest known one.
    """
    if name not in known:
        near = suggest_nearest(name, known)
        raise PortFileError(
            f"{program} of TensorRT-LLM {release} has no --{name}",
            expected=f"--{near}" if near else f"one of {len(known)} flags",
            found=f"--{name}",
            next_step=f"correct the flag, or leave it out for {release}",
        )


@dataclass(frozen=True)
class ReleaseDifference:
    """One thing that changed between two releases: what, in the one, in the other."""

    subject: str
    first: str
    second: str


def compare_releases(first: str, second: str, flags: tuple[str, ...] = ()) -> tuple[ReleaseDifference, ...]:
    """What a user of one release must know about the other.

    Args:
        first: the release something was planned or built for.
        second: the release that is there.
        flags: trtllm-build flags in use; only their differences are listed (all flags when empty).

    Raises:
        PortFileError: a release outside the known ranges.
    """
    one, two = find_release_facts(first), find_release_facts(second)
    known_one, known_two = known_build_flags(first), known_build_flags(second)
    names = sorted((known_one ^ known_two) & (set(flags) if flags else known_one | known_two))
    differences = [
        ReleaseDifference(
            f"--{name}", "known" if name in known_one else "unknown", "known" if name in known_two else "unknown"
        )
        for name in names
    ]
    pairs = (
        ("what turns Medusa on", one.build.medusa_switch, two.build.medusa_switch),
        ("checkpoint key of the draft limit", draft_limit_key(first), draft_limit_key(second)),
        ("run.py needs --use_py_session", one.run.needs_py_session, two.run.needs_py_session),
        ("run.py's --temperature with Medusa", one.run.temperature, two.run.temperature),
        ("head sizes with a kernel", _head_sizes(one), _head_sizes(two)),
        ("query group", _group(one), _group(two)),
        ("blocks of the KV cache", _blocks(one), _blocks(two)),
    )
    differences += [ReleaseDifference(subject, str(a), str(b)) for subject, a, b in pairs if a != b]
    return tuple(differences)


def _head_sizes(facts: ReleaseFacts) -> str:
    return ", ".join(
        f"{kernels.head_size} (compute capability {', '.join(map(str, kernels.compute_capabilities))})"
        for kernels in facts.kernel.compiled
    )


def _group(facts: ReleaseFacts) -> str:
    return "a power of two" if facts.kernel.group_power_of_two else "any"


def _blocks(facts: ReleaseFacts) -> str:
    return ", ".join("contiguous" if block is None else str(block) for block in facts.kernel.blocks)
