"""What the capture script is to run for one port: prompts, batches and tree, from the run folder and the port file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.alignment.comparison import group_prompts
from porting_kit.alignment.reference import read_reference_settings
from porting_kit.engine.capture_kit import digest_checkpoint, fill_batch, make_request
from porting_kit.engine.command import CommandPlan
from porting_kit.engine.run_script import plan_inference
from porting_kit.errors import PortFileError
from porting_kit.source_tree import SourceTree
from porting_kit.steps.context import PortRun
from porting_kit.steps.convert import TREE_FILE
from porting_kit.steps.prerequisites import read_checkpoint_document
from porting_kit.steps.prompts import tokenize_prompts

MOST_FILLED = 64
"""A batch is filled up to the engine's maximum, but not beyond this: more of the same prompts shows nothing new."""


@dataclass(frozen=True)
class CaptureRequest:
    """A request for the capture script, and what the user should know of it.

    Args:
        request: JSON-ready.
        remarks: one sentence each.
    """

    request: dict[str, Any]
    remarks: tuple[str, ...]


def make_capture_request(run: PortRun, release: str) -> CaptureRequest:
    """The request for a run's checkpoint.

    Batches of 1, of 2 and of the target's maximum, each mixing short and long prompts; the largest is filled with the
    prompts again from the front.

    Raises:
        PortFileError: no prompt fits into the engine's lengths, or the prompts cannot be tokenised.
        BaseModelError: the base's config cannot be read.
    """
    port, target = run.port, run.port.target
    config = read_checkpoint_document(run)
    choices = read_checkpoint_document(run, TREE_FILE)
    settings, tokenizer = read_reference_settings(port.base_path)
    prompts, _ = tokenize_prompts(port, tokenizer, config["vocab_size"])
    longest = min(target.max_input_len, target.max_seq_len - port.alignment.new_tokens)
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if not fitting:
        raise PortFileError(
            "no prompt fits into the engine's lengths",
            expected=f"at most {longest} tokens (max_input_len, and max_seq_len less the new tokens)",
            found=f"{min(map(len, prompts))} tokens or more",
            next_step="raise target.max_seq_len, or shorten alignment.prompts",
        )
    remarks = []
    if len(fitting) < len(prompts):
        remarks.append(f"{len(prompts) - len(fitting)} prompts are longer than the engine takes and are left out")
    mapping = config["mapping"]
    request = make_request(
        port=port.name,
        release=release,
        prompts=fitting,
        groups=_groups(fitting, target.max_batch_size),
        new_tokens=port.alignment.new_tokens,
        choices=choices,
        end_ids=settings.end_ids,
        pad_id=getattr(tokenizer, "pad_token_id", None),
        vocab_size=config["vocab_size"],
        num_heads=config["num_medusa_heads"],
        max_draft_len=config["max_draft_len"],
        world_size=mapping["tp_size"] * mapping["pp_size"],
        checkpoint=digest_checkpoint(run.folder.checkpoint),
    )
    if target.max_batch_size > MOST_FILLED:
        remarks.append(f"the largest batch is captured with {MOST_FILLED} sequences, not {target.max_batch_size}")
    return CaptureRequest(request, tuple(remarks))


def _groups(prompts: list[list[int]], max_batch_size: int) -> dict[int, list[list[int]]]:
    """Batch size -> calls: 1, 2, and one call of the maximum."""
    groups = {size: [list(call) for call in group_prompts(prompts, size)] for size in (1, 2) if size <= max_batch_size}
    largest = min(max_batch_size, MOST_FILLED)
    if largest > 2:
        (everything,) = group_prompts(prompts, len(prompts))
        calls = [list(everything[start : start + largest]) for start in range(0, len(prompts), largest)]
        calls[-1] = fill_batch(calls[-1] if len(calls) == 1 else [*calls[-1], *everything], largest)
        groups[largest] = calls
    return groups


def plan_run_script(request: dict[str, Any], tree: SourceTree | None, tokenizer_dir: Path) -> CommandPlan:
    """The command for TensorRT-LLM's own examples/run.py that answers the same prompts, paths in the run folder."""
    return plan_inference(
        engine_dir=Path("engine/trtllm"),
        tokenizer_dir=tokenizer_dir,
        prompt_file=Path("engine/prompts.csv"),
        longest_prompt=max(map(len, request["prompts"])),
        new_tokens=request["new_tokens"],
        choices=request["medusa_choices"],
        output_npy=Path("engine/tokens.npy"),
        release=request["release"],
        world_size=request["world_size"],
        end_id=request["end_id"] if request["end_ids"] else None,
        tree=tree,
    )
