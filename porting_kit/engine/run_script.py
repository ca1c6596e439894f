"""The exact command that runs an engine with upstream's `examples/run.py` and writes files `engine.captured` reads.

Rules that changed under the user: 0.8 and 0.9 demand temperature 0 and the Python session; 0.10 demands temperature 1
and still the Python session; from 0.11 on temperature 1 and either session (examples/run.py of each release). From 1.0
on its own flag asks for generation logits, and a file name for them alone gets none.
Prompts go in as token ids (a .csv file), so that no tokenizer setting can come between the two sides.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from porting_kit.engine.argument_check import check_arguments
from porting_kit.engine.build_parser import read_run_parser
from porting_kit.engine.command import CommandPlan, PlannedFlag
from porting_kit.errors import CapturedFileError
from porting_kit.releases.build_flags import known_run_flags, require_flag
from porting_kit.releases.facts import find_release_facts
from porting_kit.source_tree import SourceTree

SCRIPT = "run.py"


def write_prompt_file(path: Path, prompts: Sequence[Sequence[int]]) -> Path:
    """Write prompts as rows of token ids, the form `--input_file NAME.csv` reads.

    Raises:
        CapturedFileError: no prompt, or an empty one.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise CapturedFileError(
            "there is an empty prompt",
            expected="at least one token in each of at least one prompt",
            found=f"{len(prompts)} prompts, {sum(not len(prompt) for prompt in prompts)} of them empty",
            where=path,
            next_step="correct alignment.prompts",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(prompts)
    return path


def plan_inference(
    *,
    engine_dir: Path,
    tokenizer_dir: Path,
    prompt_file: Path,
    longest_prompt: int,
    new_tokens: int,
    choices: Sequence[Sequence[int]],
    output_npy: Path,
    release: str,
    world_size: int = 1,
    end_id: int | None = None,
    output_logits_npy: Path | None = None,
    tree: SourceTree | None = None,
    use_py_session: bool = False,
) -> CommandPlan:
    """Plan one greedy Medusa run over a file of prompts.

    Args:
        engine_dir: the engine's folder.
        tokenizer_dir: the base's folder; run.py loads a tokenizer whatever its input is.
        prompt_file: token ids, from `write_prompt_file`.
        longest_prompt: tokens; run.py cuts prompts at 923 unless told otherwise.
        new_tokens: output tokens a prompt.
        choices: the tree, every node listed (upstream takes a list that mixes notations for a full one).
        output_npy: where prompt and output ids go.
        release: the release the engine was built with.
        world_size: ranks.
        end_id: the end token; from the tokenizer where the release has no flag for it.
        output_logits_npy: where logits go, for an engine built with --gather_generation_logits.
        tree: a checkout whose examples/run.py to check against; its examples folder stands beside the package.
        use_py_session: force the Python session.

    Raises:
        PortFileError: a release outside the known ranges.
        SourceTreeError: the tree's run.py would refuse the command.
    """
    facts = find_release_facts(release).run
    known = known_run_flags(release)
    flags = [
        PlannedFlag("engine_dir", str(engine_dir), "the engine"),
        PlannedFlag("tokenizer_dir", str(tokenizer_dir), "loaded in any case; the prompts are token ids already"),
        PlannedFlag("input_file", str(prompt_file), "prompts as token ids: nothing is tokenised twice"),
        PlannedFlag("max_input_length", str(longest_prompt), "run.py cuts longer prompts, at 923 by default"),
        PlannedFlag("max_output_len", str(new_tokens), "new tokens a prompt"),
        PlannedFlag("medusa_choices", _choices_text(choices), "the tree, every node listed"),
        PlannedFlag("temperature", facts.temperature, f"the one value {release} accepts with Medusa; greedy"),
        PlannedFlag("top_k", "1", "greedy"),
        PlannedFlag("num_beams", "1", "Medusa takes no beams"),
        PlannedFlag("output_npy", str(output_npy), "prompt and output ids, int32"),
    ]
    remarks = []
    if facts.needs_py_session or use_py_session:
        flags.append(PlannedFlag("use_py_session", None, "Medusa runs in the Python session only in this release"))
    if end_id is not None and "end_id" in known:
        flags.append(PlannedFlag("end_id", str(end_id), "ends a sequence, and fills the rows behind it"))
    elif end_id is not None:
        remarks.append(f"{release} has no --end_id: the tokenizer's end token must be {end_id}")
    if output_logits_npy is not None:
        flags.append(PlannedFlag("output_logits_npy", str(output_logits_npy), "the engine keeps generation logits"))
        if "output_generation_logits" in known:
            flags.append(PlannedFlag("output_generation_logits", None, "the executor keeps none unless it is asked to"))
    if not facts.complete:
        remarks.append(f"the flags of {facts.source} stand in for this release: check them against its source tree")
    for flag in flags:
        require_flag(flag.name, release, known, SCRIPT)
    script, checked = Path("examples") / SCRIPT, "the flags kept for this release"
    if tree is not None and (tree.root / script).is_file():
        script = tree.root / script
        arguments = [word for flag in flags for word in flag.arguments]
        parser = read_run_parser(script.parent)
        check_arguments(arguments, parser, program=SCRIPT, where=script, guards=(script, ("main",)))
        checked = str(script)
    launcher = ("mpirun", "-n", str(world_size), "--allow-run-as-root") if world_size > 1 else ()
    return CommandPlan((*launcher, "python", str(script)), release, tuple(flags), checked, tuple(remarks))


def _choices_text(choices: Sequence[Sequence[int]]) -> str:
    return "[" + ", ".join("[" + ", ".join(str(int(rank)) for rank in path) + "]" for path in choices) + "]"
