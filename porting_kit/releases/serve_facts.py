"""What the trtllm-serve of a release takes, and what of it reaches a built engine with Medusa heads.

The command came with 0.15.0.dev2024111200 (commands/serve.py; the tree of 0.14.0.dev2024100800 has none). A build
option given to it never changes a built engine: before 1.0 as read, the option was dropped; later one above the
engine's own limit stops the server (llmapi/llm_args.py). The tree has no option of its own: it goes into the YAML file
of LLM options, as `speculative_config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from porting_kit.releases.facts import words
from porting_kit.releases.version import parse_release

PROGRAM = "trtllm-serve"
OPTION_FILES = ("extra_llm_api_options", "config")
"""Options that name a YAML file of LLM options."""
SAME_OPTION = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "free_gpu_memory_fraction": "kv_cache_free_gpu_memory_fraction",
}
"""Later names of an option beside its first one."""
SERVE_SWITCHES = frozenset(
    words("enable_chunked_prefill fail_fast_on_attention_window_too_large grpc trust_remote_code")
)
"""Options without a value in every version read."""
OTHER_COMMANDS = frozenset(("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve"))
"""Subcommands beside `serve`, which is also what is run where none is named (0.18 to 1.1, as far as read)."""
DEFAULT_LIMITS = {"max_batch_size": 2048, "max_num_tokens": 8192}
"""What an option that is left out stands for (builder.py 0.15.0.dev2024111200 to 0.17.0.dev2024121700; the first one
also printed by 1.1.0)."""
_FIRST = (
    "host kv_cache_free_gpu_memory_fraction max_batch_size max_beam_width max_num_tokens max_seq_len port pp_size "
    "tokenizer tp_size trust_remote_code"
)
_MIDDLE = f"{_FIRST} backend ep_size extra_llm_api_options gpus_per_node log_level num_postprocess_workers"
_LATER = "cluster_size fail_fast_on_attention_window_too_large metadata_server_config_file reasoning_parser server_role"

_LATEST = (
    "chat_template config context_parallel_size cp_size custom_module_dirs custom_tokenizer disagg_cluster_uri "
    "enable_chunked_prefill free_gpu_memory_fraction grpc media_io_kwargs moe_cluster_parallel_size "
    "moe_expert_parallel_size otlp_traces_endpoint pipeline_parallel_size revision served_model_name "
    "tensor_parallel_size tool_parser"
)


@dataclass(frozen=True)
class ServeFacts:
    """What is known about trtllm-serve of the releases from `since` up to, not including, `before`.

    Args:
        flags: options of every version read.
        maybe: options of some versions of the range, it is not known of which; none of them is called wrong.
        backends: the values of --backend that serve a built engine; None among them leaves it out.
        stops_above_limit: a build option above the engine's own limit stops the server, also one that was left out
            and stands for `DEFAULT_LIMITS`; False where it was dropped, or where it is not known.
        source: where it was read.
        inferred: what among it was concluded.
    """

    since: str
    before: str
    flags: tuple[str, ...]
    maybe: tuple[str, ...]
    backends: tuple[str | None, ...]
    stops_above_limit: bool
    source: str
    inferred: str = ""

    @property
    def known(self) -> frozenset[str]:
        """Every option that may be right."""
        return frozenset((*self.flags, *self.maybe))

    @property
    def takes_tree(self) -> bool:
        """Whether some option names a file that a tree can stand in."""
        return any(name in self.flags for name in OPTION_FILES)


SERVE = (
    ServeFacts(
        since="0.15.0.dev2024111200",
        before="0.17.0",
        flags=words(_FIRST),
        maybe=("backend",),
        backends=(None,),
        stops_above_limit=False,
        source="commands/serve.py and llmapi/llm_utils.py, 0.15.0.dev2024111200 to 0.17.0.dev2024121700",
    ),
    ServeFacts(
        since="0.17.0",
        before="0.19.0.dev0",
        flags=words(f"{_FIRST} backend"),
        maybe=words("ep_size extra_llm_api_options gpus_per_node log_level num_postprocess_workers"),
        backends=(None,),
        stops_above_limit=False,
        source="commands/trtllm-serve of the documentation of 0.18.2",
        inferred="that 0.17.0 to 0.18.1 are like 0.18.2; snapshots of 0.18 may have some of the later options",
    ),
    ServeFacts(
        since="0.19.0.dev0",
        before="1.0.0.dev0",
        flags=words(_MIDDLE),
        maybe=words(_LATER),
        backends=(None,),
        stops_above_limit=False,
        source=(
            "commands/serve.py and llmapi/llm_args.py, two stored versions of unknown number between 0.18 and 1.0; "
            "an example in the documentation of 0.20.0"
        ),
        inferred="that the options both versions have are in 0.19, 0.20 and 0.21; the later version stops above limits",
    ),
    ServeFacts(
        since="1.0.0.dev0",
        before="1.1.0.dev0",
        flags=words(_MIDDLE),
        maybe=words(f"{_LATER} {_LATEST}"),
        backends=("trt",),
        stops_above_limit=True,
        source=(
            "pull requests 5717 (July 2025) and 7829 (September 2025) of NVIDIA/TensorRT-LLM: pytorch became the "
            "default, and trt was renamed"
        ),
        inferred="the options, and that one above the limits stops: both are so in a version before and in 1.1.0",
    ),
    ServeFacts(
        since="1.1.0.dev0",
        before="1.3.0.dev0",
        flags=words(f"{_MIDDLE} {_LATER}"),
        maybe=words(_LATEST),
        backends=("tensorrt", "trt"),
        stops_above_limit=True,
        source=(
            "commands/trtllm-serve of the documentation of 1.1.0; commands/serve.py, two stored versions of 1.1 or "
            "later; what 1.1.0 printed at an engine of batch size 64"
        ),
        inferred="that 1.2 is like 1.1.0; candidates of 1.1 before September 2025 know trt alone",
    ),
)
"""Oldest first, without gaps."""


def find_serve_facts(release: str) -> ServeFacts | None:
    """The facts of the range a release lies in; None before the first release that has the command.

    Raises:
        PortFileError: no release number.
    """
    parsed = parse_release(release)
    known = [facts for facts in SERVE if parse_release(facts.since) <= parsed < parse_release(facts.before)]
    return known[0] if known else None
