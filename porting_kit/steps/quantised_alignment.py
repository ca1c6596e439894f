"""Align a quantised checkpoint: Medusa on its 16-bit twin, and how far that lies from the base it was made of.

The twin is the judge of its own generation phase, as a fitted base is: heads, tree and cache must be right whatever
the precision. The distance to the original may be what rounding explains: as large as that of the base rounded in the
same format to another grid. So the verdict is approximate. A single scale that is off by a little stays within that
distance, and so does a norm of another model; config and tensors are compared with the base's first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.run import EMULATED, align_port_outputs
from porting_kit.config_defaults import read_config_defaults
from porting_kit.conversion.dequantised import dequantise_rank, require_quantised
from porting_kit.conversion.quantised import require_consistent
from porting_kit.conversion.quantised_base import convert_base
from porting_kit.conversion.quantised_comparison import BaseComparison, compare_base
from porting_kit.conversion.quantised_config import STRUCTURE
from porting_kit.conversion.quantised_files import QuantisedCheckpoint, read_quantised
from porting_kit.conversion.quantised_heads import add_heads
from porting_kit.conversion.rank_joining import join_ranks
from porting_kit.conversion.rounded_base import round_ranks
from porting_kit.conversion.unquantised import HEADS
from porting_kit.emulator import EmulatedModel, open_emulator
from porting_kit.errors import CheckpointError
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.steps.align import AlignResult
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.context import PortRun, Stopwatch
from porting_kit.steps.prerequisites import read_checkpoint_document, require_steps
from porting_kit.steps.quantised import describe
from porting_kit.whole_files import write_json, write_tensors

RESULT_FILE = "quantised_alignment.json"


@dataclass(frozen=True)
class StoredOracle:
    """The logits of a checkpoint that is opened for the question and closed again: it is asked once.

    Args:
        open_model: opens it in the emulator.
        vocab_size: V.
    """

    open_model: Callable[[], EmulatedModel]
    vocab_size: int

    def logits(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[S, V] per text."""
        return ContextOracle(self.open_model()).logits(texts)


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
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_size"):
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
    base = convert_base(read, run.port.base_path, heads)
    release = read_config_defaults(session.source_tree, port_config["architecture"])
    plan, compared, count = base.plan, compare_base(read, base, release), range(len(read.ranks))
    _require_same_tensors(compared, checkpoint)
    wrong = [error for error in compared.errors if not error.passed]
    architecture = port_config["architecture"]
    module_file, class_name = session.module
    emulator = open_emulator(session.source_tree, kernel=session.kernel)
    with tempfile.TemporaryDirectory(dir=run.folder.root) as name:
        place, dtype = Path(name), run.port.dtype
        parts = [dequantise_rank(read, rank, dtype, compared.layout) for rank in count]
        twin = _write_one_rank(read, join_ranks(plan, parts, read.folder), place / "twin", dtype, architecture)
        if not has_heads:
            limit = port_config["max_draft_len"]
            twin = add_heads(twin, session.head_set, place / "joined", max_draft_len=limit)
        rounded = round_ranks(read, base, compared.layout)
        joined = join_ranks(plan, rounded, read.folder)
        alone = {key: value for key, value in joined.items() if not key.startswith(HEADS)}
        rounded_base = _write_one_rank(read, alone, place / "rounded", dtype, architecture)
        del base, parts, rounded, joined, alone
        model = emulator.load_checkpoint(twin, module_file=module_file, class_name=class_name)
        options = replace(
            session.options,
            fit_notes=(f"weights in {read.algorithm.name}", *session.approximate_fit_notes),
            rounded=StoredOracle(lambda: emulator.load_checkpoint(rounded_base), read.config["vocab_size"]),
            covered=EMULATED,
        )
        result = align_port_outputs(
            session.reference, model, session.prompts, session.tree, heads=session.reference_heads, options=options
        )
    write_json(run.folder.root / RESULT_FILE, result.as_dict())
    document = result.as_dict()
    summary, verdict, gate = result.summary, result.verdict, result.failing_gate
    if compared.differences:
        verdict, gate = Verdict.FAIL, compared.differences[0].kind
        summary = f"{len(compared.differences)} differences from the base, first {compared.differences[0].text}"
    elif wrong:
        verdict, gate = Verdict.FAIL, "weights"
        summary = f"{len(wrong)} matrices are not the base's, first {describe(wrong[0])}"
    outcome = StepOutcome(
        "quantised alignment",
        verdict,
        f"{read.algorithm.name}: {summary}",
        covered=result.covered if compared.passed else (),
        figures={name: document[name] for name in ("tokens_equal", "near_ties", "tokens_per_step", "approximate_fit")}
        | {"not_judged_fields": list(compared.unjudged)},
        products=(RESULT_FILE,),
        seconds=round(watch.seconds, 3),
        failing_gate=gate,
    )
    return AlignResult(outcome, result, session.reference.tokenizer)


def _require_same_tensors(compared: BaseComparison, checkpoint: Path) -> None:
    """Refuse what no twin can be made of. Raises CheckpointError: another structure, other tensors or shapes."""
    faults = [fault for fault in compared.differences if fault.kind in ("missing", "surplus", "shape")]
    faults += [fault for fault in compared.differences if fault.module in STRUCTURE]
    if faults:
        raise CheckpointError(
            f"the quantised checkpoint is of another base: {faults[0].text}",
            expected="config and tensors of the port's base",
            where=checkpoint,
            items=[f"{fault.module}: {fault.kind}" for fault in faults],
            next_step="name a checkpoint of this port's base",
        )


def _write_one_rank(
    read: QuantisedCheckpoint, tensors: Mapping[str, torch.Tensor], target: Path, dtype: str, architecture: str
) -> Path:
    """A checkpoint of one rank in floating point: an emulator in one process runs it, whatever the ranks were.

    Its logits are float32: rounding them, as ModelOpt's config asks for, would hide how near two phases are.
    """
    config = {**read.config, "architecture": architecture, "dtype": dtype, "logits_dtype": "float32"}
    config |= {"mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1}, "use_parallel_embedding": False}
    config |= {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    if not any(name.startswith(HEADS) for name in tensors):
        config = {name: value for name, value in config.items() if name not in ("num_medusa_heads", "max_draft_len")}
    target.mkdir()
    kind = getattr(torch, dtype)
    write_tensors(
        target / "rank0.safetensors", {name: tensor.to(kind).contiguous() for name, tensor in tensors.items()}
    )
    write_json(target / "config.json", config)
    return target
