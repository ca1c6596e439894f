"""Is the run's checkpoint what the rules make of its base? Field by field, and tensor by tensor through the inverse
rules, as `convert --verify` proves it; also where another converter made it (`base_checkpoint`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from porting_kit.conversion.config_fields import FieldRow, build_config, find_changed_fields, set_fields
from porting_kit.conversion.output_folder import CONFIG
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor
from porting_kit.conversion.proof import prove_fitted, prove_targets
from porting_kit.conversion.shard_faults import Cutting, read_cutting
from porting_kit.conversion.stream import default_workers
from porting_kit.conversion.tensor_source import TensorSource, open_tensor_source
from porting_kit.conversion.weight_files import read_header
from porting_kit.diagnosis.changes import Change
from porting_kit.diagnosis.port_state import PortState
from porting_kit.errors import CheckpointError, PortingKitError
from porting_kit.kernel_fit.fit import CONFIG_KEY
from porting_kit.steps.context import PortRun
from porting_kit.steps.conversion_inputs import ConversionInputs, open_conversion
from porting_kit.steps.fit import measure_port_activations
from porting_kit.steps.prerequisites import read_checkpoint_document
from porting_kit.steps.proof import read_receipt

SAME = 1e-6
"""Another converter may have read a float in float32."""


@dataclass
class CheckpointCheck:
    """One checkpoint against its base; each part is read when it is first asked for.

    Args:
        run: the run; its convert step has finished.
    """

    run: PortRun
    right: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    """The tensors that were changed, as the rules make them; filled by `tensors`, for one rank and no kernel fit."""
    held: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    """The same as they are in the file."""

    @cached_property
    def inputs(self) -> ConversionInputs:
        """What the checkpoint was made of; the Hugging Face base where heads were added to a base checkpoint."""
        inputs = open_conversion(self.run.port)
        if inputs.joined is None:
            return inputs
        return replace(inputs, joined=None, source=open_tensor_source(self.run.port.base_path))

    @cached_property
    def plan(self) -> ConversionPlan:
        """The conversion, without a kernel fit."""
        return self.inputs.plan()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json that is there."""
        return read_checkpoint_document(self.run)

    @cached_property
    def rows(self) -> list[FieldRow]:
        """The fields that the rules write; those of a fitted checkpoint are known from its receipt."""
        if self.inputs.fit.steps:
            return [FieldRow(**row) for row in read_receipt(self.run)["fields"]]
        port = self.run.port
        ranks = {"tp_size": port.target.tp_size, "pp_size": port.target.pp_size}
        options = {"dtype": port.dtype, "heads": self.inputs.heads, "release": self.inputs.release, **ranks}
        return list(build_config(self.plan.base, **options)[1])

    @property
    def is_joined(self) -> bool:
        """Another converter made the base's part."""
        return self.run.port.base_checkpoint_path is not None

    @cached_property
    def _changed_rows(self) -> list[tuple[FieldRow, Any]]:
        """Rows of which config.json holds another value, with that value; None where the field is missing."""
        changed = find_changed_fields(self.config, self.rows)
        return [pair for pair in changed if not self.is_joined or _is_wrong_elsewhere(*pair)]

    @cached_property
    def _unknown_fields(self) -> list[str]:
        """Fields that no rule writes; another converter may have its own."""
        known = {row.target.partition(".")[0] for row in self.rows if row.target} | {CONFIG_KEY}
        return [] if self.is_joined else sorted(self.config.keys() - known)

    @cached_property
    def fields(self) -> tuple[Change, ...]:
        """Fields that hold other values, are missing, or that no rule writes; no weights are read."""
        changes = [self._field(row.target, json.dumps(row.value), found) for row, found in self._changed_rows]
        return (*changes, *(self._field(name, "no such field", self.config[name]) for name in self._unknown_fields))

    @property
    def right_config(self) -> dict[str, Any]:
        """The config with these undone."""
        config = json.loads(json.dumps(self.config))
        for name in self._unknown_fields:
            del config[name]
        return set_fields(config, [row for row, _ in self._changed_rows])

    @property
    def changes(self) -> tuple[Change, ...]:
        """Fields, then tensors."""
        return (*self.fields, *self.tensors)

    @property
    def is_correctable(self) -> bool:
        """Whether what the rules make is known for all changed tensors: not of a fitted port, nor on several ranks."""
        return not self.tensors or len(self.right) >= sum(len(change.tensors) for change in self.tensors)

    def set_right(self, state: PortState) -> PortState:
        """The port with its checkpoint as the rules make it."""
        return replace(state, config=self.right_config, tensors={**state.tensors, **self.right})

    def _field(self, name: str, expected: str, found: Any) -> Change:
        said = "no such field" if found is None and name not in self.config else json.dumps(found)
        made = f"set {name} to {expected}" if expected != "no such field" else f"take {name} out"
        return Change(f"{CONFIG}: {name}", expected, said, f"{made} in the checkpoint's {CONFIG}, or convert again")

    @property
    def _place(self) -> str:
        return "the base checkpoint's" if self.is_joined else "the checkpoint's"

    @cached_property
    def tensors(self) -> tuple[Change, ...]:
        """Tensors that do not lead back to the base; reads both sides."""
        return self._prove_fitted() if self.inputs.fit.steps else self._prove()

    @property
    def misfits(self) -> tuple[Change, ...]:
        """Tensors that are missing, or of another dtype or shape; reads headers alone, and none of a fitted port."""
        if self.inputs.fit.steps:
            return ()
        found = {planned.target: _describe_misfit(planned, self._entries) for planned in self.plan.tensors}
        return self._group({target: misfit for target, misfit in found.items() if misfit is not None})

    @cached_property
    def _entries(self) -> list[dict[str, Any]]:
        folder, ranks = self.run.folder.checkpoint, range(self.plan.world_size)
        return [read_header(folder / f"rank{rank}.safetensors", CheckpointError) for rank in ranks]

    def _prove(self) -> tuple[Change, ...]:
        plan, folder, entries = self.plan, self.run.folder.checkpoint, self._entries
        readers = [TensorSource(one, folder, CheckpointError).read for one in entries]
        there = [planned for planned in plan.tensors if _describe_misfit(planned, entries) is None]
        absent = {planned.target: _describe_misfit(planned, entries) for planned in plan.tensors}
        inputs = self.inputs
        failures = prove_targets(plan, inputs.source, inputs.heads, readers, default_workers(), there).failures
        wrong = {failure.target for failure in failures}
        said = {target: misfit for target, misfit in absent.items() if misfit is not None}
        for planned in there:
            if planned.target in wrong:
                cutting = read_cutting(plan, planned, inputs.source, inputs.heads, readers)
                said[planned.target] = ("the base's values", cutting.describe_first().partition(": ")[2])
                self._keep(cutting)
        return self._group(said)

    def _keep(self, cutting: Cutting) -> None:
        if cutting.ranks == 1:
            self.right[cutting.planned.pieces[0].name] = cutting.expected[0]
            self.held[cutting.planned.pieces[0].name] = cutting.found[0]

    def _prove_fitted(self) -> tuple[Change, ...]:
        inputs = self.inputs
        fit = inputs.fit.for_conversion(measure_port_activations(self.run.port, inputs.source_tree, inputs.fit))
        plan, folder = inputs.plan(fit), self.run.folder.checkpoint
        readers = [
            TensorSource(read_header(folder / f"rank{rank}.safetensors", CheckpointError), folder, CheckpointError).read
            for rank in range(plan.world_size)
        ]
        failures = prove_fitted(plan, inputs.source, inputs.heads, readers, fit).failures
        return self._group({failure.target: ("what the kernel fit makes", failure.message) for failure in failures})

    def _group(self, said: dict[str, tuple[str, str]]) -> tuple[Change, ...]:
        """One change for all layers' tensors of one kind, with what is said of the first."""
        groups: dict[str, list[str]] = {}
        for target in said:
            groups.setdefault(_without_numbers(target), []).append(target)
        fix = f"convert again, or correct these tensors in {self._place} rank files"
        return tuple(
            Change(name if len(targets) > 1 else targets[0], *said[targets[0]], fix, tuple(targets))
            for name, targets in groups.items()
        )


def _is_wrong_elsewhere(row: FieldRow, found: Any) -> bool:
    """Another converter may write fewer fields, and floats as float32 holds them; what the base states must be."""
    if found is None:
        return row.kind == "kept"
    floats = isinstance(row.value, float) and isinstance(found, int | float)
    return not (floats and math.isclose(row.value, found, rel_tol=SAME))


def _describe_misfit(planned: PlannedTensor, entries: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """(expected, found) of the first rank's part that is missing, or of another dtype or shape."""
    for piece in planned.pieces:
        held = entries[piece.rank].get(piece.name)
        if held is None or (held.dtype, tuple(held.shape)) != (planned.dtype, tuple(piece.shape)):
            found = "no such tensor" if held is None else f"{held.dtype} {list(held.shape)}"
            return f"{planned.dtype} {list(piece.shape)}", found
    return None


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


MODEL_ERRORS = (RuntimeError, TypeError, ValueError, KeyError, AttributeError)


@contextmanager
def naming_changes(
    check: CheckpointCheck, caught: tuple[type[Exception], ...] = (PortingKitError, *MODEL_ERRORS)
) -> Iterator[None]:
    """While open, an error of the model names what of its checkpoint was changed, where anything was.

    Args:
        check: of the checkpoint that the model is built from.
        caught: errors that a changed checkpoint can be behind.

    Raises:
        CheckpointError: in place of the library's own error.
    """
    try:
        yield
    except caught as error:
        try:
            changes = check.fields or check.misfits
        except PortingKitError:  # a file that cannot be read, which the first error says
            changes = ()
        if not changes:
            raise
        first, folder = changes[0], check.run.folder.checkpoint
        raise CheckpointError(
            f"no model can run from this {CONFIG if check.fields else 'checkpoint'}, and it is not what the rules make "
            "of the base",
            expected=f"{first.name}: {first.expected}",
            found=f"{first.found}; the model says: {str(error).splitlines()[0] if str(error) else repr(error)}",
            where=folder / CONFIG if check.fields else folder,
            items=[change.describe() for change in changes],
            next_step=first.fix,
        ) from error
