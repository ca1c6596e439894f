"""Align a quantised checkpoint: Medusa on its 16-bit twin, and how far that lies from the base it was made of.

The twin is the judge of its own generation phase, as a fitted base is: heads, tree and cache must be right whatever
the precision. The distance to the original is bounded by the format's width, and the verdict is approximate.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from porting_kit.alignment.run import EMULATED, align_port_outputs
from porting_kit.conversion.dequantised import add_heads, write_dequantised
from porting_kit.conversion.quantised import read_quantised, require_consistent
from porting_kit.emulator import open_emulator
from porting_kit.errors import CheckpointError
from porting_kit.outcomes import StepOutcome
from porting_kit.run_folder import write_json
from porting_kit.steps.align import AlignResult
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.context import PortRun, Stopwatch
from porting_kit.steps.prerequisites import read_checkpoint_document, require_steps

RESULT_FILE = "quantised_alignment.json"
DISTANCE_BOUNDS = {
    8: {"near_tie_agreement": 0.95, "largest_margin": 1.0, "mean_divergence": 0.02, "largest_divergence": 0.5},
    4: {"near_tie_agreement": 0.8, "largest_margin": 4.0, "mean_divergence": 0.2, "largest_divergence": 3.0},
}
"""Agreement at least; margins in logits and divergences in nats at most. Chosen on bloom-mini, whose weights give
agreement 0.976 and mean divergence 0.003 in FP8, 0.998 and 0.0007 in INT8 SmoothQuant, 0.871 and 0.094 in INT4 with
groups of 32; larger models were not measured."""


def align_quantised(run: PortRun, checkpoint: Path) -> AlignResult:
    """Align a quantised checkpoint of the port's base; heads that it lacks are the port's, in 16 bit.

    Args:
        run: the run; patch and convert are run when they have not been.
        checkpoint: the quantised checkpoint's folder, one rank.

    Raises:
        CheckpointError: it contradicts itself, is sharded, or is not of this base.
    """
    require_steps(run, "patch", "convert")
    watch = Stopwatch()
    read = read_quantised(checkpoint)
    require_consistent(read)
    if read.algorithm is None or len(read.ranks) != 1:
        raise CheckpointError(
            "only a quantised checkpoint of one rank can be aligned",
            found="not quantised" if read.algorithm is None else f"{len(read.ranks)} ranks",
            where=checkpoint,
        )
    session = AlignmentSession(run)
    port_config = read_checkpoint_document(run)
    for name in ("architecture", "hidden_size", "num_hidden_layers", "vocab_size"):
        if read.config.get(name) != port_config.get(name):
            raise CheckpointError(
                f"the quantised checkpoint is of another base: {name}",
                expected=port_config.get(name),
                found=read.config.get(name),
                where=checkpoint,
            )
    module_file, class_name = session.module
    with tempfile.TemporaryDirectory(dir=run.folder.root) as place:
        joined = checkpoint
        if not read.config.get("num_medusa_heads"):
            limit = port_config["max_draft_len"]
            joined = add_heads(checkpoint, session.head_set, Path(place) / "joined", max_draft_len=limit)
        twin = write_dequantised(joined, Path(place) / "twin", dtype=run.port.dtype)
        model = open_emulator(session.source_tree, kernel=session.kernel).load_checkpoint(
            twin, module_file=module_file, class_name=class_name
        )
    options = replace(
        session.options,
        fit_notes=(f"weights in {read.algorithm.name}", *session.approximate_fit_notes),
        fit_bounds=DISTANCE_BOUNDS[read.algorithm.bits],
        covered=EMULATED,
    )
    # What heads accept is predicted on the base's own states, which 4 bit move by more than the gate allows for.
    heads = session.reference_heads if read.algorithm.bits == 8 else None
    result = align_port_outputs(session.reference, model, session.prompts, session.tree, heads=heads, options=options)
    write_json(run.folder.root / RESULT_FILE, result.as_dict())
    document = result.as_dict()
    outcome = StepOutcome(
        "quantised alignment",
        result.verdict,
        f"{read.algorithm.name}: {result.summary}",
        covered=result.covered,
        figures={name: document[name] for name in ("tokens_equal", "near_ties", "tokens_per_step", "approximate_fit")},
        products=(RESULT_FILE,),
        seconds=round(watch.seconds, 3),
        failing_gate=result.failing_gate,
    )
    return AlignResult(outcome, result, session.reference.tokenizer)
