"""Align a quantised checkpoint: Medusa on its 16-bit twin, and how far that lies from the base it was made of.

The twin is the judge of its own generation phase, as a fitted base is: heads, tree and cache must be right whatever
the precision. The distance to the original is bounded by the format's width, and the verdict is approximate. A single
scale that is off by a little stays within that distance; it is found by comparing the weights, which comes first.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from porting_kit.alignment.run import EMULATED, align_port_outputs
from porting_kit.architectures.base_config import read_base_config
from porting_kit.conversion.convert import checkpoint_ranks
from porting_kit.conversion.dequantised import dequantise_rank, require_quantised
from porting_kit.conversion.heads import HeadSet
from porting_kit.conversion.plan import plan_conversion
from porting_kit.conversion.planned import ConversionPlan
from porting_kit.conversion.quantised import require_consistent
from porting_kit.conversion.quantised_comparison import compare_ranks, find_layout
from porting_kit.conversion.quantised_files import QuantisedCheckpoint, read_quantised
from porting_kit.conversion.quantised_heads import add_heads
from porting_kit.conversion.rank_joining import join_ranks
from porting_kit.conversion.tensor_source import open_tensor_source
from porting_kit.conversion.weight_interleaving import StoredLayout
from porting_kit.emulator import open_emulator
from porting_kit.errors import CheckpointError
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.run_folder import write_json
from porting_kit.steps.align import AlignResult
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.context import PortRun, Stopwatch
from porting_kit.steps.prerequisites import read_checkpoint_document, require_steps
from porting_kit.steps.quantised import describe

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
        checkpoint: the quantised checkpoint's folder, any ranks: they are joined to one.

    Raises:
        CheckpointError: it contradicts itself, is not quantised, or is not of this base.
    """
    require_steps(run, "patch", "convert")
    watch = Stopwatch()
    read = read_quantised(checkpoint)
    require_consistent(read)
    require_quantised(read)
    session = AlignmentSession(run)
    port_config = read_checkpoint_document(run)
    for name in ("architecture", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_size"):
        stated = read.config.get(name, port_config.get(name))
        if stated != port_config.get(name):
            raise CheckpointError(
                f"the quantised checkpoint is of another base: {name}",
                expected=port_config.get(name),
                found=stated,
                where=checkpoint,
                next_step="name a checkpoint of this port's base; a port with a kernel fit is quantised after it",
            )
    has_heads = bool(read.config.get("num_medusa_heads"))
    heads = session.head_set if has_heads else None
    ranks = checkpoint_ranks(run.port.base_path, heads, read.dtype, tp_size=read.tp_size, pp_size=read.pp_size)[1]
    layout = find_layout(read, ranks)
    wrong = [error for error in compare_ranks(read, ranks, layout) if not error.passed]
    del ranks
    module_file, class_name = session.module
    with tempfile.TemporaryDirectory(dir=run.folder.root) as place:
        plan = _plan_ranks(run, read, heads)
        twin = _write_twin(read, plan, layout, Path(place) / "twin", dtype=run.port.dtype)
        if not has_heads:
            limit = port_config["max_draft_len"]
            twin = add_heads(twin, session.head_set, Path(place) / "joined", max_draft_len=limit)
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
    summary, verdict, gate = result.summary, result.verdict, result.failing_gate
    if wrong:
        verdict, gate = Verdict.FAIL, "weights"
        summary = f"{len(wrong)} matrices are not the base's, first {describe(wrong[0])}"
    outcome = StepOutcome(
        "quantised alignment",
        verdict,
        f"{read.algorithm.name}: {summary}",
        covered=() if wrong else result.covered,
        figures={name: document[name] for name in ("tokens_equal", "near_ties", "tokens_per_step", "approximate_fit")},
        products=(RESULT_FILE,),
        seconds=round(watch.seconds, 3),
        failing_gate=gate,
    )
    return AlignResult(outcome, result, session.reference.tokenizer)


def _plan_ranks(run: PortRun, read: QuantisedCheckpoint, heads: HeadSet | None) -> ConversionPlan:
    """How the port's base is cut over the checkpoint's ranks."""
    source = open_tensor_source(run.port.base_path)
    base = read_base_config(run.port.base_path, source.names())
    return plan_conversion(base, source, tp_size=read.tp_size, pp_size=read.pp_size, dtype=read.dtype, heads=heads)


def _write_twin(
    read: QuantisedCheckpoint, plan: ConversionPlan, layout: StoredLayout | None, target: Path, *, dtype: str
) -> Path:
    """The 16-bit checkpoint of one rank: an emulator in one process runs it, whatever the ranks it was cut for."""
    from safetensors.torch import save_file

    parts = [dequantise_rank(read, rank, dtype, layout) for rank in range(len(read.ranks))]
    joined = join_ranks(plan, parts, read.folder)
    config = {**read.config, "dtype": dtype, "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1}}
    config |= {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}, "use_parallel_embedding": False}
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in joined.items()}, target / "rank0.safetensors")
    write_json(target / "config.json", config)
    return target
