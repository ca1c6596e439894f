"""The exact `trtllm-build` command for a Medusa checkpoint, with only flags the release knows and a reason for each.

The plan never asks for context logits: with draft tokens the builder refuses them (RuntimeError "Gather context logits
is not support with draft len > 0", commands/build.py 0.10.0.dev2024050700 to 0.16.0.dev2024121000).

This module runs nothing; `engine.run` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from porting_kit.engine.argument_check import check_arguments
from porting_kit.engine.build_parser import read_build_parser
from porting_kit.engine.command import CommandPlan, PlannedFlag
from porting_kit.errors import CheckpointError, PortFileError, SourceTreeError, TreeError
from porting_kit.releases.build_flags import draft_limit_key, known_build_flags, require_flag
from porting_kit.releases.facts import find_release_facts
from porting_kit.source_tree import SourceTree

PROGRAM = "trtllm-build"
# The library's own default from 0.11 on (commands/build.py 0.11.0.dev2024062500): enough for several prompts a step.
DEFAULT_NUM_TOKENS = 8192


def plan_build(
    config: Mapping[str, Any],
    *,
    checkpoint_dir: Path,
    output_dir: Path,
    target: Any,
    num_nodes: int,
    release: str | None = None,
    module_file: Path | None = None,
    class_name: str | None = None,
    tree: SourceTree | None = None,
    gather_generation_logits: bool = False,
    max_num_tokens: int | None = None,
) -> CommandPlan:
    """Plan the build of a Medusa checkpoint.

    Args:
        config: the checkpoint's config.json.
        checkpoint_dir: its folder.
        output_dir: where the engine goes.
        target: the port file's target: tokens_per_block, max_batch_size, max_input_len, max_seq_len, tp_size, pp_size.
        num_nodes: N of the tree that will be used, the root included.
        release: the release to plan for; the tree's own when None.
        module_file: the patched model module for --model_cls_file, None when the release's own class serves.
        class_name: the class in it.
        tree: the source tree to check the flags against; the list kept for the release when None or bundled.
        gather_generation_logits: keep logits of accepted tokens, for the comparison of margins.
        max_num_tokens: tokens of one step; chosen when None.

    Raises:
        PortFileError: no usable release, lengths that contradict each other, half a module.
        CheckpointError: the config lacks a Medusa field, or was made for other parallel sizes.
        TreeError: the tree has more drafts than the checkpoint allows.
        SourceTreeError: the tree is another release, or its parser would refuse the command.
    """
    release = _settle_release(release, tree)
    known = known_build_flags(release)
    _check_config(config, target, num_nodes, release)
    if (module_file is None) != (class_name is None):
        raise PortFileError(
            "a module file and a class name belong together",
            expected="both, or neither",
            found=f"{module_file}, {class_name}",
            next_step="give the other one, or leave both out",
        )
    tokens = max_num_tokens or _choose_num_tokens(target, num_nodes)
    if tokens < max(target.max_batch_size * num_nodes, target.max_input_len):
        raise PortFileError(
            "max_num_tokens is too small",
            expected=f"at least {max(target.max_batch_size * num_nodes, target.max_input_len)}: a verification step of "
            f"{target.max_batch_size} x {num_nodes} tokens, and a prompt of {target.max_input_len}",
            found=tokens,
            next_step="leave max_num_tokens out, or raise it",
        )
    flags = [
        PlannedFlag("checkpoint_dir", str(checkpoint_dir), "base and heads in one checkpoint"),
        PlannedFlag("output_dir", str(output_dir), "where the engine goes"),
        *_module_flags(module_file, class_name),
        *_plugin_flags(config, target, known),
        *_size_flags(target, tokens, num_nodes, known),
        *_medusa_flags(config, release, known, num_nodes),
        *_worker_flags(config),
    ]
    if gather_generation_logits:
        flags.append(PlannedFlag("gather_generation_logits", None, "logits of the accepted tokens, to judge near-ties"))
    for flag in flags:
        require_flag(flag.name, release, known, PROGRAM)
    checked = _check_against_tree(flags, tree)
    return CommandPlan((PROGRAM,), release, tuple(flags), checked, _remarks(config, release, module_file))


def _settle_release(release: str | None, tree: SourceTree | None) -> str:
    real_tree = tree if tree is not None and tree.kind != "bundled" else None
    if release is None:
        if real_tree is None:
            raise PortFileError(
                "a build is planned for one release, and none is stated",
                expected="trtllm.release, or a TensorRT-LLM source tree",
                found="neither",
                next_step="set trtllm.release to the release you will build with",
            )
        release = real_tree.release
    find_release_facts(release)
    if real_tree is not None and real_tree.release != release:
        raise SourceTreeError(
            "the source tree is another release than the one planned for",
            expected=release,
            found=real_tree.release,
            where=real_tree.root,
            next_step="set trtllm.release to auto, or name the other tree",
        )
    return release


def _check_config(config: Mapping[str, Any], target: Any, num_nodes: int, release: str) -> None:
    for key in ("architecture", "dtype", "num_medusa_heads"):
        if key not in config:
            raise CheckpointError(
                "the checkpoint's config.json lacks a Medusa field",
                expected=key,
                found=", ".join(sorted(config)) or "nothing",
                next_step="convert base and heads together: porting-kit convert",
            )
    key = draft_limit_key(release)
    limit = config.get(key)
    if not isinstance(limit, int) or limit < 1:
        raise CheckpointError(
            f"TensorRT-LLM {release} reads the draft limit from {key}",
            expected=f"{key}: {num_nodes - 1} in config.json",
            found=limit,
            next_step=f"convert for release {release}",
        )
    if num_nodes - 1 > limit:
        raise TreeError(
            f"the tree has {num_nodes - 1} drafts and the checkpoint allows {limit}",
            expected=f"at most {limit}",
            found=num_nodes - 1,
            next_step="convert again with this tree, or trim the tree",
        )
    mapping = config.get("mapping") or {}
    for name in ("tp_size", "pp_size"):
        if mapping.get(name, 1) != getattr(target, name):
            raise CheckpointError(
                f"the checkpoint was made for another {name}",
                expected=f"{name} {getattr(target, name)} (the port's target)",
                found=mapping.get(name, 1),
                next_step="convert again for these sizes",
            )
    if target.max_input_len >= target.max_seq_len:
        raise PortFileError(
            "there is no room for output",
            expected=f"max_seq_len above {target.max_input_len}",
            found=target.max_seq_len,
            next_step="raise target.max_seq_len, or lower target.max_input_len",
        )


def _choose_num_tokens(target: Any, num_nodes: int) -> int:
    """Enough for a full verification step and one whole prompt; up to the library's default where prompts fill it."""
    step = target.max_batch_size * num_nodes
    prompts = min(target.max_batch_size * target.max_input_len, DEFAULT_NUM_TOKENS)
    return max(step, target.max_input_len, prompts)


def _module_flags(module_file: Path | None, class_name: str | None) -> list[PlannedFlag]:
    if module_file is None:
        return []
    return [
        PlannedFlag("model_cls_file", str(module_file), "the patched model: the release's own passes no tree on"),
        PlannedFlag("model_cls_name", str(class_name), "base with Medusa heads; config.json keeps the base's name"),
    ]


def _plugin_flags(config: Mapping[str, Any], target: Any, known: frozenset[str]) -> list[PlannedFlag]:
    dtype = str(config["dtype"])
    flags = [
        PlannedFlag(
            "gpt_attention_plugin",
            dtype,
            f"the checkpoint's dtype is {dtype}; attention without the plugin ignores the tree mask",
        ),
        PlannedFlag("gemm_plugin", dtype, "half-precision matrix products as in upstream's Medusa example"),
        PlannedFlag("remove_input_padding", "enable", "the tree's tokens are packed: one row a request would pad them"),
    ]
    algorithm = (config.get("quantization") or {}).get("quant_algo")
    if algorithm == "FP8" and "strongly_typed" in known:
        # examples/llama/README.md 0.8.0 and 0.10.0.dev2024043000: FP8 checkpoints are built so; later always on.
        flags.append(
            PlannedFlag("strongly_typed", None, "an FP8 checkpoint; this release does not switch it on itself")
        )
    paged = target.tokens_per_block is not None
    if "kv_cache_type" not in known:
        flags.append(
            PlannedFlag(
                "paged_kv_cache",
                "enable" if paged else "disable",
                "how the tree's rows are kept: " + ("in blocks" if paged else "the port asks for a contiguous cache"),
            )
        )
    elif not paged:
        flags.append(PlannedFlag("kv_cache_type", "continuous", "a contiguous cache was asked for"))
    if paged:
        flags.append(
            PlannedFlag("tokens_per_block", str(target.tokens_per_block), "a block size the XQA kernel is compiled for")
        )
    return flags


def _size_flags(target: Any, num_tokens: int, num_nodes: int, known: frozenset[str]) -> list[PlannedFlag]:
    flags = [
        PlannedFlag("max_batch_size", str(target.max_batch_size), "sequences at a time, from the port's target"),
        PlannedFlag("max_input_len", str(target.max_input_len), "longest prompt in tokens, from the port's target"),
    ]
    if "max_seq_len" in known:
        flags.append(
            PlannedFlag(
                "max_seq_len",
                str(target.max_seq_len),
                "prompt and output, from the port's target; the builder adds the draft tokens",
            )
        )
    else:
        output = target.max_seq_len - target.max_input_len
        flags.append(PlannedFlag("max_output_len", str(output), "max_seq_len less max_input_len in this release"))
    flags += [
        PlannedFlag("max_beam_width", "1", "Medusa verifies one greedy sequence"),
        PlannedFlag(
            "max_num_tokens",
            str(num_tokens),
            f"the largest of: a step's {target.max_batch_size} x {num_nodes} tree tokens, one prompt of "
            f"{target.max_input_len}, and a batch of prompts up to {DEFAULT_NUM_TOKENS}",
        ),
    ]
    return flags


def _medusa_flags(config: Mapping[str, Any], release: str, known: frozenset[str], num_nodes: int) -> list[PlannedFlag]:
    facts = find_release_facts(release).build
    flags = []
    if facts.medusa_switch == "speculative_decoding_mode":
        # From 0.15.0.dev2024102900 on the builder no longer turns the mode on because the config has max_draft_len.
        flags.append(PlannedFlag("speculative_decoding_mode", "medusa", "the runtime reads the mode from the engine"))
    if "max_draft_len" in known:
        flags.append(
            PlannedFlag(
                "max_draft_len",
                str(config["max_draft_len"]),
                f"as config.json states; the tree uses {num_nodes - 1} (its {num_nodes} nodes less the root)",
            )
        )
    return flags


def _worker_flags(config: Mapping[str, Any]) -> list[PlannedFlag]:
    mapping = config.get("mapping") or {}
    world = mapping.get("tp_size", 1) * mapping.get("pp_size", 1)
    return (
        [
            PlannedFlag(
                "workers",
                str(world),
                f"one process a rank: tp {mapping.get('tp_size', 1)} x pp {mapping.get('pp_size', 1)}",
            )
        ]
        if world > 1
        else []
    )


def _check_against_tree(flags: list[PlannedFlag], tree: SourceTree | None) -> str:
    if tree is None or tree.kind == "bundled":
        return "the flags kept for this release"
    parser = read_build_parser(tree)
    arguments = [word for flag in flags for word in flag.arguments]
    file = tree.package / "commands" / "build.py"
    check_arguments(arguments, parser, program=PROGRAM, where=file, guards=(file, ("parse_arguments", "main")))
    return f"commands/build.py and plugin/plugin.py of {tree.root}"


def _remarks(config: Mapping[str, Any], release: str, module_file: Path | None) -> tuple[str, ...]:
    facts = find_release_facts(release).build
    remarks = ["no context logits: the builder refuses them together with draft tokens"]
    if facts.medusa_switch == "config":
        remarks.append("0.8 has no Medusa flag: the builder reads max_medusa_token_len from config.json")
    if not facts.complete:
        remarks.append(f"the flags of {facts.source} stand in for this release: check them against its source tree")
    if module_file is not None and config["architecture"] == "MedusaForCausalLM":
        remarks.append(
            "config.json names MedusaForCausalLM, so the LLaMA config class is used with the patched model; "
            "keep the base's own architecture name"
        )
    return tuple(remarks)
