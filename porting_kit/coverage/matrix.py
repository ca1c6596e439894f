"""Measure a tree: one row after the other, each ended by a result, a refusal with its reason, or a failure with its."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from porting_kit.alignment.remembered import RememberedOracle
from porting_kit.architectures.base_config import BaseConfig, read_base_config
from porting_kit.architectures.family import load_families
from porting_kit.architectures.releases import release_key
from porting_kit.coverage.cases import WITHOUT_REFERENCE
from porting_kit.coverage.comparison import (
    NEW_TOKENS,
    compare_context,
    compare_model,
    compare_tokens,
    continue_greedily,
    coverage_tree,
    draw_prompts,
    draw_trees,
    list_tree_paths,
)
from porting_kit.coverage.heads import write_fitted_heads
from porting_kit.coverage.planned import PlannedRow
from porting_kit.coverage.positions import (
    compare_steps,
    describe_control,
    with_single_positions,
    without_computed_positions,
)
from porting_kit.coverage.precision import BOUND, Bounds, measure_bounds
from porting_kit.coverage.reference_models import ModelSize, ReferenceCase, make_reference, save_reference
from porting_kit.coverage.row import Row, ShardedRun
from porting_kit.coverage.sharded import RankGroups, Sharding, Subject
from porting_kit.coverage.unlisted import UNLISTED
from porting_kit.errors import BaseModelError, EnvironmentMissing, PortFileError, PortingKitError
from porting_kit.patching import MedusaModule, PatchOutcome, ReleaseTooOld, build_medusa_module, patch_architecture
from porting_kit.source_tree import SourceTree

NO_FAMILY = "no architectures/ file"


class RowRefused(Exception):
    """The release, the class or the family cannot do this; the text is the row's reason."""


class RowFailed(Exception):
    """A comparison did not come out; the text is the row's reason."""


@dataclass
class Findings:
    """What is known of a row so far: kept when the row ends early."""

    patched: str | None = None
    context_error: float | None = None
    tree_error: float | None = None
    heads_error: float | None = None
    tokens_equal: bool | None = None
    tokens_per_step: float | None = None
    inherent: tuple[str, ...] = ()
    note: str | None = None
    bound: float | None = None
    heads_bound: float | None = None
    sharded: tuple[ShardedRun, ...] = ()


@dataclass
class TreeCoverage:
    """One tree while it is measured. Patches, models and the tree's imported code are kept from row to row.

    Args:
        tree: the tree; its Python code is executed.
        folder: where models are saved.
        dtype: of the checkpoints.
        shardings: run every aligned row on these ranks as well.
    """

    tree: SourceTree
    folder: Path
    dtype: str = "float32"
    shardings: Sequence[Sharding] = ()
    _emulator: Any = None
    _patches: dict[str, tuple[PatchOutcome, MedusaModule | None]] = field(default_factory=dict)
    _models: dict[tuple[str, str | None], tuple[Path, Any]] = field(default_factory=dict)
    _groups: RankGroups | None = None

    def measure_row(self, planned: PlannedRow) -> Row:
        """One row. Whatever goes wrong is the row's reason; nothing is raised but an interrupt."""
        started, found, status, reason = time.perf_counter(), Findings(), "aligned", None
        try:
            self._measure(planned, found)
        except RowRefused as refusal:
            status, reason = "refused", str(refusal)
        except RowFailed as failure:
            status, reason = "failed", str(failure)
        except (Exception, SystemExit) as error:
            status, reason = "failed", describe_error(error)
        seconds = time.perf_counter() - started
        return Row(planned.arch, planned.text, status, reason=reason, seconds=seconds, **vars(found))

    def _measure(self, planned: PlannedRow, found: Findings) -> None:
        arch, case = planned.arch, planned.case
        if arch not in self.tree.model_names():
            raise RowRefused(f"TensorRT-LLM {self.tree.release} has no architecture {arch}")
        outcome, module = self._patch(arch)
        found.patched = outcome.status
        if module is None:
            raise RowRefused(outcome.reason)
        if case is None:
            raise RowRefused(explain_no_case(arch) + name_compared_twin(self.tree, arch))
        base, folder, reference = self._open_model(planned, case)
        require_expressible(base, self.tree.release)
        is_defective = case.defect is not None and is_before(self.tree.release, case.defect.until)
        if is_defective:
            case.defect.give(reference.model)
        if planned.position_batch:
            self._compare_positions(planned, folder, reference, module, found)
        else:
            self._compare(planned, base, folder, reference, module, found)
        if is_defective:
            raise RowRefused(f"{case.defect.what}; with the reference changed so, everything else agrees")

    def _compare(
        self, planned: PlannedRow, base: BaseConfig, folder: Path, reference: Any, module: MedusaModule, found: Findings
    ) -> None:
        """Unmodified model, patched model with heads, Medusa's tokens, against the reference."""
        from porting_kit.alignment.inherent import choose_differences, matched_to_library

        prompts = draw_prompts(reference.vocab_size)
        plain = self.emulator.build_model(*self._convert(planned, folder))
        _, logits = compare_context(plain, reference, prompts)
        applying = choose_differences(reference, base.definition.differences, prompts, logits)
        found.inherent = tuple(difference.name for difference in applying)
        with matched_to_library(reference, applying):
            known = RememberedOracle(reference)
            found.context_error, _ = compare_context(plain, known, prompts)
            heads, texts = self._fit_heads(folder, known, prompts)
            config, tensors = self._convert(planned, folder, heads)
            paths = list_tree_paths(prompts, draw_trees(reference.vocab_size)[0])
            bounds = measure_bounds(reference, [*texts, *paths], self.dtype, tensors)
            found.bound, found.heads_bound = bounds.logits, bounds.heads
            require_bound("context logits of the unmodified model", found.context_error, bounds.logits)
            model = self._build_medusa(config, tensors, module.source, module)
            errors = compare_model(model, known, prompts, tensors)
            found.context_error = max(found.context_error, errors.context)
            found.tree_error, found.heads_error = errors.tree, errors.heads
            found.tokens_equal, found.tokens_per_step = compare_tokens(model, known, prompts, texts, bounds)
            require_bound("context logits", found.context_error, bounds.logits)
            require_bound("logits at the nodes of a tree", found.tree_error, bounds.logits)
            require_bound("logits of the Medusa heads", found.heads_error, bounds.heads)
            require_tokens(found)
            if self.shardings:
                found.sharded = self.ranks.measure(
                    Subject(
                        convert=lambda sharding: self._convert_ranks(planned, folder, heads, sharding),
                        source=module.source,
                        class_name=module.class_name,
                        reference=known,
                        prompts=prompts,
                        tensors=tensors,
                        bounds=bounds,
                        compare_tokens=lambda model: compare_tokens(model, known, prompts, texts, bounds),
                    )
                )

    def _compare_positions(
        self, planned: PlannedRow, folder: Path, reference: Any, module: MedusaModule, found: Findings
    ) -> None:
        """The patched model where the runtime feeds one position id per request, and a control without the patch."""
        try:
            emulator = with_single_positions(self.emulator, self.tree.release)
        except PortFileError as error:
            raise RowRefused(error.subject) from error
        prompts = draw_prompts(reference.vocab_size)[: planned.position_batch]
        known = RememberedOracle(reference)
        heads, texts = self._fit_heads(folder, known, prompts)
        config, tensors = self._convert(planned, folder, heads)
        model = self._build_medusa(config, tensors, module.source, module, emulator)
        found.context_error, _ = compare_context(model, known, prompts)
        found.tree_error = compare_steps(model, known, prompts)
        found.tokens_equal, found.tokens_per_step = compare_tokens(model, known, prompts, texts, Bounds())
        require_bound("context logits", found.context_error)
        require_bound("logits at the nodes of a tree", found.tree_error)
        require_tokens(found)
        without = without_computed_positions(module.source)
        found.note = describe_control(
            emulator, lambda limited: self._build_medusa(config, tensors, without, module, limited), known, prompts
        )
        if found.note is None:
            raise RowFailed("the model is right without computed positions too, so this case shows nothing")

    @property
    def emulator(self) -> Any:
        """The tree's own code, imported at the first use."""
        from porting_kit.emulator import open_emulator

        if self._emulator is None:
            self._emulator = open_emulator(self.tree)
        return self._emulator

    @property
    def ranks(self) -> RankGroups:
        """The processes of the shardings, started when a row first needs them."""
        if self._groups is None:
            self._groups = RankGroups(self.tree.root, self.shardings)
        return self._groups

    def close(self) -> None:
        """End the ranks' processes."""
        if self._groups is not None:
            self._groups.close()

    def _patch(self, arch: str) -> tuple[PatchOutcome, MedusaModule | None]:
        """Patch the class's file once, whatever names it has in MODEL_MAP."""
        model = self.tree.find_model(arch)
        key = f"{model.file}:{model.class_name}"
        if key not in self._patches:
            outcome = patch_architecture(self.tree, arch)
            try:
                module = None if outcome.status == "refused" else build_medusa_module(self.tree, arch)
            except ReleaseTooOld as error:
                raise RowRefused(error.subject) from error
            self._patches[key] = outcome, module
        return self._patches[key]

    def _open_model(self, planned: PlannedRow, case: ReferenceCase) -> tuple[BaseConfig, Path, Any]:
        from porting_kit.alignment.reference import reference_from_model

        key = case.name, planned.hugging_face_class
        if key not in self._models:
            try:
                model = make_reference(case, size_for(case, self.dtype))
            except EnvironmentMissing as error:
                raise RowRefused(error.subject) from error
            folder = self.folder / f"model{len(self._models)}"
            save_reference(case, model, folder, hugging_face_class=planned.hugging_face_class)
            reference = reference_from_model(model)
            self._models[key] = folder, reference
        folder, reference = self._models[key]
        return read_base_config(folder), folder, reference

    def _convert(self, planned: PlannedRow, folder: Path, heads: Path | None = None) -> tuple[dict[str, Any], Any]:
        config, (tensors,) = self._convert_ranks(planned, folder, heads, Sharding())
        return config, tensors

    def _convert_ranks(
        self, planned: PlannedRow, folder: Path, heads: Path | None, sharding: Sharding
    ) -> tuple[dict[str, Any], list[Any]]:
        """A checkpoint's config and each rank's tensors."""
        from porting_kit.conversion import checkpoint_ranks

        config, ranks = checkpoint_ranks(
            folder,
            heads,
            dtype=self.dtype,
            max_draft_len=coverage_tree().num_drafts,
            release=self.tree.release,
            tp_size=sharding.tp_size,
            pp_size=sharding.pp_size,
        )
        return {**config, "architecture": planned.arch}, ranks

    def _fit_heads(
        self, folder: Path, reference: Any, prompts: Sequence[Sequence[int]]
    ) -> tuple[Path, list[list[int]]]:
        """Heads that are fitted to the reference's own greedy texts, and those texts."""
        texts = continue_greedily(reference, prompts, NEW_TOKENS)
        states = reference.hidden_states(texts)
        file = folder / "heads" / "medusa_lm_head.safetensors"
        return write_fitted_heads(states, texts, reference.vocab_size, file), texts

    def _build_medusa(
        self, config: dict[str, Any], tensors: Any, source: str, module: MedusaModule, emulator: Any = None
    ) -> Any:
        builder = self.emulator if emulator is None else emulator
        return builder.build_model(config, tensors, module_source=source, class_name=module.class_name)


def cover_tree(
    tree: SourceTree,
    planned_rows: Iterable[PlannedRow],
    progress: Callable[[Row], None] | None = None,
    dtype: str = "float32",
    shardings: Sequence[Sharding] = (),
) -> tuple[Row, ...]:
    """Measure every planned row of a tree.

    Args:
        tree: the tree; its Python code is executed.
        planned_rows: of `plan_rows`.
        progress: called with each row when it is done.
        dtype: of the checkpoints; in half precision rows on single positions are left out.
        shardings: run every aligned row on these ranks as well.
    """
    import transformers  # noqa: F401 - so that the first row's seconds are its own

    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="porting-kit-coverage-") as folder,
        contextlib.closing(TreeCoverage(tree, Path(folder), dtype, shardings)) as coverage,
    ):
        for planned in planned_rows:
            if not is_measured(planned, dtype):
                continue
            rows.append(coverage.measure_row(planned))
            if progress is not None:
                progress(rows[-1])
    return tuple(rows)


def is_measured(planned: PlannedRow, dtype: str) -> bool:
    """Rows on single positions are left out in half precision: what they show does not depend on the dtype."""
    return dtype == "float32" or not planned.position_batch


def explain_no_case(arch: str) -> str:
    """Why an architecture has no case: an unknown family, or a known one without a reference model."""
    for family in load_families().values():
        if arch in (*family.architectures, *family.architectures.values()):
            why = WITHOUT_REFERENCE.get(family.name, "none of its cases has this name")
            return f"no random reference model of the family {family.name}: {why}"
    return UNLISTED.get(arch, NO_FAMILY)


def name_compared_twin(tree: SourceTree, arch: str) -> str:
    """Where the same class is compared under another name of MODEL_MAP; empty when it is not."""
    classes = {name: (model.file, model.class_name) for name, model in tree.model_classes().items()}
    served = {name for family in load_families().values() for name in family.architectures.values()}
    twins = sorted(name for name in served & classes.keys() if name != arch and classes[name] == classes.get(arch))
    return f"; its class {classes[arch][1]} is compared as {twins[0]}" if twins else ""


def size_for(case: ReferenceCase, dtype: str) -> ModelSize:
    """In half precision every token is sent to all four experts: a choice between two may hang on a rounding.

    The choice itself is compared in float32. Phi-3.5 MoE's sparse mixer can choose two only.
    """
    is_mixed = case.family != "phimoe"
    return replace(case.size, experts_chosen=4) if dtype != "float32" and is_mixed else case.size


def require_expressible(base: BaseConfig, release: str) -> None:
    """Raise RowRefused when the release or the class cannot express the model."""
    from porting_kit.architectures.release_needs import require_release

    try:
        require_release(base, release)
        base.for_release(release).require_supported()
    except BaseModelError as error:
        since = f" ({error.expected})" if error.expected else ""
        raise RowRefused(f"{error.subject}{since}") from error


def require_bound(what: str, error: float | None, bound: float = BOUND) -> None:
    """Raise RowFailed unless an error is a number within the bound."""
    if error is None or not error <= bound:
        raise RowFailed(f"{what} differ from Hugging Face by {error:.2g} of the largest logit (bound {bound:.2g})")


def require_tokens(found: Findings) -> None:
    """Raise RowFailed unless Medusa emitted the base's tokens, and accepted drafts on the way."""
    if not found.tokens_equal:
        raise RowFailed("Medusa's tokens are not the base's greedy tokens")
    if not found.tokens_per_step > 1:
        raise RowFailed("no draft was ever accepted, so acceptance was not tested")


def is_before(release: str, other: str) -> bool:
    """Whether a release number lies before another; no for texts that are no release number."""
    key = release_key(release)
    return key is not None and key < release_key(other)


def describe_error(error: BaseException) -> str:
    """Kind and first line of an exception; of this package's own also what was found."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    if isinstance(error, PortingKitError) and error.found:
        text = f"{text} (found: {error.found.splitlines()[0]})"
    return f"{type(error).__name__}: {text}"
