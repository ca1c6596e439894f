"""The patch step: the base's model.py with the speculative-decoding arguments in every attention call, as two products.

`patched/medusa_<model>.py` is for `trtllm-build --model_cls_file`, `patched/port.patch` for `git apply`.
The source tree itself is never edited.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.errors import PatchError
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.patching import MedusaModule, build_medusa_module, write_patch
from porting_kit.steps.context import PortRun, finish_step, running_step
from porting_kit.steps.fit import describe_fit, plan_port_fit
from porting_kit.steps.preflight import open_port_tree, read_port_base, target_profile, target_release


@dataclass(frozen=True)
class PatchResult:
    """What the patch step made. `module_file` and `patch_file` are None when the model was refused."""

    outcome: StepOutcome
    module: MedusaModule | None
    module_file: Path | None
    patch_file: Path | None

    @property
    def diff(self) -> str:
        """The unified diff against the source tree, empty when there is none."""
        return self.module.diff if self.module else ""

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return self.outcome.as_dict()


def patch_port(run: PortRun) -> PatchResult:
    """Patch the base's model.py of the port's source tree and write both products.

    Raises:
        SourceTreeError: the tree has no such architecture.
        BaseModelError: the base's config cannot be read.
    """
    with running_step(run, "patch") as watch:
        tree = open_port_tree(run.port)
        profile = target_profile(run.port, tree)
        base = read_port_base(run.port, target_release(tree, profile))
        architecture = base.architecture
        fit = plan_port_fit(run.port, base, profile)
        try:
            module = build_medusa_module(tree, architecture, fit=fit if fit.steps else None)
        except PatchError as error:
            outcome = StepOutcome(
                "patch", Verdict.REFUSED, error.subject, figures=error.as_dict(), failing_gate="patch"
            )
            return PatchResult(finish_step(run, outcome, watch), None, None, None)
        files = write_patch(module, run.folder.patched)
        outcome = StepOutcome(
            step="patch",
            verdict=Verdict.PASS,
            summary=_describe(module, architecture, tree.release),
            covered=(),
            figures={
                "architecture": architecture,
                "release": tree.release,
                "source_kind": tree.kind,
                "spec_arguments": list(tree.spec_arguments),
                "status": module.outcome.status,
                "edits": len(module.outcome.edits),
                "class_name": module.class_name,
                "fit": describe_fit(fit),
            },
            products=tuple(str(file.relative_to(run.folder.root)) for file in files),
        )
        module_file, patch_file = files
        return PatchResult(finish_step(run, outcome, watch), module, module_file, patch_file)


def _describe(module: MedusaModule, architecture: str, release: str) -> str:
    if module.outcome.status == "already_accepts":
        return f"{architecture} of TensorRT-LLM {release} already passes the arguments; {module.class_name} added"
    return f"{architecture} of TensorRT-LLM {release}: {len(module.outcome.edits)} edits, {module.class_name} added"


def format_patch(result: PatchResult) -> str:
    """The diff and a closing line, for a terminal."""
    lines = [result.diff] if result.diff else []
    lines.append(f"patch: {result.outcome.said}")
    lines += [f"  {file}" for file in (result.module_file, result.patch_file) if file is not None]
    return "\n".join(lines)
