"""What the library's messages mean: a small catalogue from text in a log to cause and next step.

The patterns are short literals of TensorRT-LLM 0.8 to 1.2 (build and run); `source` names where each is raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LibraryMessage:
    """One message and its meaning.

    Args:
        name: a short name.
        pattern: regular expression searched in each log line.
        cause: what is behind it.
        next_step: what to do.
        source: where the library says it.
        fatal: False for a warning that matters.
    """

    name: str
    pattern: str
    cause: str
    next_step: str
    source: str
    fatal: bool = True

    def __post_init__(self) -> None:
        re.compile(self.pattern)


@dataclass(frozen=True)
class RecognisedMessage:
    """A catalogue entry found in a log: the entry, the line, and its number from 1."""

    message: LibraryMessage
    line: str
    line_number: int


CATALOGUE: tuple[LibraryMessage, ...] = (
    LibraryMessage(
        "no multi-query kernel",
        r"No available XQA kernels are found",
        "no kernel verifies several tokens for this head size, card, block or scaling; there is no fallback",
        "run porting-kit preflight: it names the gate and the transform that mends it",
        "gptAttentionCommon.cpp 0.8 to 0.16, common/attentionOp.cpp later",
    ),
    LibraryMessage(
        "query group",
        r"numQHeadsPerKV should be power of 2",
        "this release takes query groups of a power of two only",
        "apply pad_query_groups, or build with 0.11 or later",
        "gptAttentionCommon.cpp 0.8 to 0.10",
    ),
    LibraryMessage(
        "multi-block mode",
        r"Medusa doesn't support multi-block mode",
        "multi_block_mode is on",
        "build without it",
        "gptAttentionCommon.cpp 0.11.0.dev2024051400 and later",
    ),
    LibraryMessage(
        "data type",
        r"(Medusa|Speculative decoding) mode doesn't support the data type or cross attention",
        "the attention plugin runs in float32, or the layer attends to an encoder",
        "convert and build in float16 or bfloat16",
        "gptAttentionCommon.cpp",
    ),
    LibraryMessage(
        "unpatched model",
        r"unexpected keyword argument '(spec_decoding_\w+|medusa_\w+)'",
        "the model's code does not take the tree on: one of its levels lacks the argument",
        "run porting-kit patch and build with --model_cls_file",
        "models/<arch>/model.py called by models/modeling_utils.py",
    ),
    LibraryMessage(
        "activation scales",
        r"Required but not provided tensors.*activation_scaling_factor",
        "the checkpoint was quantised without calibration: activation scales are absent",
        "quantise again with calibration samples, or use weight-only quantisation",
        "models/modeling_utils.py load",
    ),
    LibraryMessage(
        "missing tensors",
        r"Required but not provided tensors",
        "the checkpoint lacks tensors the model class expects",
        "convert again for this class: porting-kit convert; compare the names in the log with its table",
        "models/modeling_utils.py load",
    ),
    LibraryMessage(
        "surplus tensors",
        r"Provided but not expected tensors",
        "the checkpoint holds tensors the model class does not know: the library goes on without them",
        "check the class: a plain base class drops the Medusa heads this way",
        "models/modeling_utils.py load",
        fatal=False,
    ),
    LibraryMessage(
        "shape mismatch",
        r"The value updated is not the same shape as the original",
        "a tensor of the checkpoint has another shape than the class: padded vocabulary, head size or parallel size",
        "convert again with the same tp_size and kernel fit that the config states",
        "parameter.py",
    ),
    LibraryMessage(
        "unknown architecture",
        r"Unsupported model architecture|KeyError: '\w+ForCausalL[mM]'",
        "config.json names an architecture this release has no config class for",
        "keep the base's own architecture name in config.json and pass the Medusa class with --model_cls_name",
        "commands/build.py, models/modeling_utils.py PretrainedConfig.from_dict",
    ),
    LibraryMessage(
        "relative import",
        r"attempted relative import with no known parent package",
        "the file given to --model_cls_file has relative imports",
        "use the module that porting-kit patch writes: its imports are absolute",
        "commands/build.py (SourceFileLoader)",
    ),
    LibraryMessage(
        "unknown flag",
        r"unrecognized arguments:|invalid choice:",
        "the command is for another release",
        "plan the build for the installed release",
        "argparse in commands/build.py and examples/run.py",
    ),
    LibraryMessage(
        "context logits",
        r"Gather context logits is not support",
        "context logits cannot be kept together with draft tokens",
        "build without --gather_context_logits and --gather_all_token_logits",
        "commands/build.py 0.10.0.dev2024050700 and later",
    ),
    LibraryMessage(
        "engine without Medusa",
        r"max_medusa_tokens is 0",
        "the engine was built without the Medusa mode",
        "build with the planned command: --speculative_decoding_mode medusa and --max_draft_len",
        "runtime/model_runner.py",
    ),
    LibraryMessage(
        "tree above the limit",
        r"num_draft_tokens <= self\.max_draft_tokens",
        "the tree has more nodes than the engine's max_draft_len",
        "use the tree that was built for, or rebuild with a larger limit",
        "runtime/generation.py _init_medusa",
    ),
    LibraryMessage(
        "session",
        r"Medusa is only supported by py_session",
        "this release runs Medusa in the Python session only",
        "add --use_py_session",
        "examples/run.py 0.8 to 0.10",
    ),
    LibraryMessage(
        "temperature",
        r"Medusa should use temperature ==",
        "the one temperature Medusa accepts changed from 0 to 1 between 0.9 and 0.10",
        "use the planned command for this release",
        "examples/run.py",
    ),
    LibraryMessage(
        "illegal memory access",
        r"illegal memory access",
        "an early release with more than one sequence, or an engine and a plugin library of different builds",
        "run one prompt alone; if that works, use a later release",
        "CUDA runtime",
    ),
    LibraryMessage(
        "device memory",
        r"CUDA out of memory|OutOfMemory|out of memory",
        "weights, KV cache or the builder's workspace exceed the card",
        "fewer sequences, shorter sequences, more ranks, or a smaller --max_num_tokens",
        "CUDA runtime, TensorRT builder",
    ),
    LibraryMessage(
        "TensorRT library",
        r"libnvinfer|No module named 'tensorrt'",
        "TensorRT itself is not installed for this Python",
        "install the TensorRT version this TensorRT-LLM release requires",
        "import of tensorrt",
    ),
    LibraryMessage(
        "no tensorrt_llm",
        r"No module named 'tensorrt_llm'",
        "the script runs with a Python that has no tensorrt_llm",
        "run it in the environment TensorRT-LLM is installed in",
        "import of tensorrt_llm",
    ),
)


def recognise_messages(lines: Iterable[str]) -> tuple[RecognisedMessage, ...]:
    """Every catalogue entry found in a log, once each, in order of appearance.

    A line that several entries match belongs to the first in the catalogue: special entries precede general ones.
    """
    found: dict[str, RecognisedMessage] = {}
    for number, line in enumerate(lines, start=1):
        for message in CATALOGUE:
            if re.search(message.pattern, line):
                found.setdefault(message.name, RecognisedMessage(message, line.strip(), number))
                break
    return tuple(found.values())
