"""`porting-kit convert --verify`: read the checkpoint and its sources again and prove every tensor.

The rules are run backwards from the files of all ranks to the source; a tensor that does not lead back is named, with
the ranks that hold it. Attention that a kernel fit changed has no way back: it is made again and compared. Where heads
were added to a base checkpoint, its tensors are compared with it and led back to the Hugging Face base as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from porting_kit.conversion.config_fields import FieldRow, find_changed_fields
from porting_kit.conversion.output_folder import CONFIG, RECEIPT
from porting_kit.conversion.proof import Failure, Proof, ReadTensor, open_ranks, prove_fitted, prove_targets
from porting_kit.conversion.shard_faults import OTHER_VALUES, ShardFault, explain_failures
from porting_kit.conversion.source_digests import SourceDigests
from porting_kit.errors import CheckpointError
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.steps.context import PortRun
from porting_kit.steps.conversion_inputs import ConversionInputs, open_conversion
from porting_kit.steps.convert import convert_port
from porting_kit.steps.fit import measure_port_activations
from porting_kit.steps.prerequisites import read_checkpoint_document
from porting_kit.whole_files import explain_problem, read_json

STEP = "convert"
OTHER_BASE = "convert the base checkpoint again, or name as base the model that it was made of"


@dataclass(frozen=True)
class ProofResult:
    """What the proof found.

    Args:
        outcome: pass, or fail with the tensors named.
        proof: counts and failures.
        changed_files: source files that are not those of the receipt.
        mistakes: what explains the failures: a known way of cutting wrongly, or other values.
    """

    outcome: StepOutcome
    proof: Proof
    changed_files: tuple[str, ...]
    mistakes: tuple[ShardFault, ...] = ()

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        failures = [failure.__dict__ for failure in self.proof.failures]
        mistakes = [mistake.__dict__ for mistake in self.mistakes]
        return {
            **self.outcome.as_dict(),
            "failures": failures,
            "unproved_by": mistakes,
            "changed_files": list(self.changed_files),
        }


def prove_port(run: PortRun, *, workers: int | None = None) -> ProofResult:
    """Prove the run's checkpoint; it is converted first where that has not been done.

    Raises:
        RunFolderError: the checkpoint was made from other inputs.
        CheckpointError: a file is missing, damaged, or holds other tensors than the port asks for.
    """
    from porting_kit.conversion.stream import default_workers

    if run.folder.outcome(STEP) is None:
        convert_port(run, verify=False, workers=workers)
    earlier = run.folder.require(STEP, run.inputs(STEP))
    inputs = open_conversion(run.port)
    with SourceDigests(inputs.sources) as digests:
        proof, mistakes = _prove(run, inputs, workers or default_workers())
        changed = _find_changed_files(run, digests)
    outcome = _judge(earlier, proof, mistakes, changed)
    run.folder.finish(outcome)
    return ProofResult(outcome, proof, changed, mistakes)


def _prove(run: PortRun, inputs: ConversionInputs, workers: int) -> tuple[Proof, tuple[ShardFault, ...]]:
    folder = run.folder.checkpoint
    fit = None
    if inputs.fit.steps:
        fit = inputs.fit.for_conversion(measure_port_activations(run.port, inputs.source_tree, inputs.fit))
    plan = inputs.plan(fit)
    readers = open_ranks(plan, folder)
    mistakes: tuple[ShardFault, ...] = ()
    if fit is None:
        proof = prove_targets(plan, inputs.source, inputs.heads, readers, workers)
        mistakes = explain_failures(plan, inputs.source, inputs.heads, readers, proof)
        if inputs.joined is not None:
            led_back, unlike = _prove_base(inputs, readers, proof, workers)
            mistakes = (*mistakes, *unlike)
            proof = Proof(proof.proved + led_back.proved, (*proof.failures, *led_back.failures))
    else:
        proof = prove_fitted(plan, inputs.source, inputs.heads, readers, fit)
    mapping = read_checkpoint_document(run).get("mapping", {})
    if mapping.get("tp_size") != plan.tp_size or mapping.get("pp_size") != plan.pp_size:
        failure = Failure(CONFIG, (), f"the mapping says {mapping}, the files are of {plan.tp_size} x {plan.pp_size}")
        proof = replace(proof, failures=(*proof.failures, failure))
    return replace(proof, failures=(*proof.failures, *_find_changed_fields(run))), mistakes


def _prove_base(
    inputs: ConversionInputs, readers: Sequence[ReadTensor], copied: Proof, workers: int
) -> tuple[Proof, tuple[ShardFault, ...]]:
    """Lead the tensors that were copied from a base checkpoint back to the Hugging Face base; what failed stays so."""
    failed = {failure.target.partition("/")[2] for failure in copied.failures}
    plan, source = inputs.base_plan, inputs.base_source
    chosen = [one for one in plan.tensors if not failed & {piece.name for piece in one.pieces}]
    proof = prove_targets(plan, source, None, readers, workers, chosen)
    mistakes = explain_failures(plan, source, None, readers, proof)
    return proof, tuple(replace(one, fix=OTHER_BASE) if one.name == OTHER_VALUES else one for one in mistakes)


def _find_changed_fields(run: PortRun) -> list[Failure]:
    """Fields of config.json that are not what the conversion wrote: the library reads them without a question."""
    rows = [FieldRow(**row) for row in read_receipt(run)["fields"] if row["target"] != "mapping"]
    return [
        Failure(f"{CONFIG}: {row.target}", (), f"{row.target} is {found!r}, the conversion wrote {row.value!r}")
        for row, found in find_changed_fields(read_checkpoint_document(run), rows)
    ]


def _find_changed_files(run: PortRun, digests: SourceDigests) -> tuple[str, ...]:
    """Source files whose SHA-256 is not that of the receipt."""
    stated = {file["path"]: file["sha256"] for file in read_receipt(run)["files"]}
    return tuple(file.path for file in digests.collect() if stated.get(file.path, file.sha256) != file.sha256)


def read_receipt(run: PortRun) -> dict[str, Any]:
    """The conversion's receipt. Raises CheckpointError when it cannot be read."""
    try:
        receipt = read_json(run.folder.checkpoint / RECEIPT)
        _ = [file["path"] + file["sha256"] for file in receipt["files"]], [FieldRow(**row) for row in receipt["fields"]]
        return receipt
    except (OSError, ValueError, KeyError, TypeError) as problem:
        is_other = isinstance(problem, (KeyError, TypeError))
        raise CheckpointError(
            "the conversion's receipt cannot be read",
            expected=f"{RECEIPT} as convert writes it",
            found="fields that are missing or of another kind" if is_other else explain_problem(problem),
            where=run.folder.checkpoint / RECEIPT,
            next_step="convert again",
        ) from None


def _judge(
    earlier: StepOutcome, proof: Proof, mistakes: tuple[ShardFault, ...], changed: tuple[str, ...]
) -> StepOutcome:
    """The convert outcome with the proof in it: a checkpoint that fails must not be used by later steps."""
    figures = {**earlier.figures, "verified": proof.proved, "source_files_changed": list(changed)}
    if not proof.failures:
        figures.pop("unproved", None)
        summary = f"{proof.proved} tensors proved by the inverse rules, both sides read again"
        if changed:
            summary += f"; {len(changed)} source files have changed since, their tensors have not"
        return replace(earlier, verdict=Verdict.PASS, summary=summary, figures=figures, failing_gate=None)
    first = proof.failures[0]
    figures |= {
        "unproved": [failure.target for failure in proof.failures],
        "next_step": mistakes[0].fix if mistakes else "convert again; if it stays, the disk or the memory is faulty",
    }
    message = f"{mistakes[0].what}: {mistakes[0].evidence}" if mistakes else first.message
    summary = f"{len(proof.failures)} of {proof.proved + len(proof.failures)} tensors fail; {message}"
    return replace(
        earlier,
        verdict=Verdict.FAIL,
        summary=summary,
        covered=(Coverage.WEIGHTS,),
        figures=figures,
        failing_gate="inverse rules",
    )


def format_proof(result: ProofResult) -> str:
    """One line per failure, then the verdict."""
    lines = [
        f"FAIL  {failure.target} (ranks {', '.join(map(str, failure.ranks)) or '-'}): {failure.message}"
        for failure in result.proof.failures[:20]
    ]
    if len(result.proof.failures) > 20:
        lines.append(f"... {len(result.proof.failures)} in all")
    lines += [f"warning: {file} changed since the conversion" for file in result.changed_files]
    lines.append(f"convert --verify: {result.outcome.said}")
    return "\n".join(lines)
