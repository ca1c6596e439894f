"""Everything an alignment needs, opened once: the base in Hugging Face, the port in the emulator, prompts, tree, heads.

The align step and its notebook share it, so that the notebook can go on asking (a seeded fault, another prompt)
without loading anything again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.head_oracle import ReferenceHeads, read_reference_heads
from porting_kit.alignment.inherent import matched_to_library
from porting_kit.alignment.layer_parts import pair_modules
from porting_kit.alignment.layers import compare_layers
from porting_kit.alignment.reference import Reference, load_reference, resolve_dtype
from porting_kit.alignment.result import AlignmentResult
from porting_kit.alignment.run import EMULATED, AlignmentOptions, align_captured_outputs, align_port_outputs
from porting_kit.architectures.base_config import BaseConfig
from porting_kit.architectures.family import Difference
from porting_kit.architectures.release_needs import find_differences
from porting_kit.conversion.heads import HeadSet
from porting_kit.conversion.plan import plan_conversion
from porting_kit.conversion.planned import ConversionPlan, plan_scalars, read_skipped_rows
from porting_kit.conversion.tensor_source import TensorSource, open_tensor_source
from porting_kit.diagnosis import Diagnosis, Observation, PortState, read_port_state
from porting_kit.emulator import EmulatedModel, open_emulator
from porting_kit.emulator.xqa import open_xqa_kernel
from porting_kit.engine.captured import (
    CapturedSequence,
    read_captured_logits,
    read_captured_tokens,
    write_captured_tokens,
)
from porting_kit.engine.captured_runs import is_capture_file, read_capture_file
from porting_kit.kernel_fit.fit import CONFIG_KEY, require_length
from porting_kit.medusa.tree import MedusaTree, read_tree
from porting_kit.outcomes import Coverage, Verdict
from porting_kit.releases.kernels import KernelProfile, kernel_profile
from porting_kit.releases.shape import AttentionShape, attention_shape, find_reached_window
from porting_kit.source_tree import SourceTree
from porting_kit.steps.captured_alignment import align_capture
from porting_kit.steps.checkpoint_check import MODEL_ERRORS, CheckpointCheck, naming_changes
from porting_kit.steps.context import PortRun
from porting_kit.steps.convert import TREE_FILE
from porting_kit.steps.explanation import diagnose_session
from porting_kit.steps.preflight import (
    open_port_tree,
    read_port_base,
    read_port_heads,
    target_profile,
    target_release,
)
from porting_kit.steps.prerequisites import read_checkpoint_document
from porting_kit.steps.prompt_lengths import keep_below, note_lengths
from porting_kit.steps.prompts import tokenize_prompts


def current_rank() -> int:
    """The rank of this process under torchrun, 0 without it."""
    return int(os.environ.get("RANK", "0"))


@dataclass
class AlignmentSession:
    """The opened parts of one alignment; heavy parts load when they are first asked for.

    Args:
        run: the port and its folder.
        keeps_prompts: take the prompts as they are, because an engine has answered them; otherwise they are cut where
            they would cross a length threshold of the base.
    """

    run: PortRun
    keeps_prompts: bool = False

    @cached_property
    def reference(self) -> Reference:
        """The base in float32."""
        return load_reference(self.run.port.base_path)

    @cached_property
    def source(self) -> TensorSource:
        """The base's weight files."""
        return open_tensor_source(self.run.port.base_path)

    @cached_property
    def release(self) -> str | None:
        """The release the checkpoint is for, None when the port names none."""
        return target_release(self.source_tree, target_profile(self.run.port, self.source_tree))

    @cached_property
    def base(self) -> BaseConfig:
        """The base's normalised config."""
        return read_port_base(self.run.port, self.release, self.source)

    @cached_property
    def head_set(self) -> HeadSet:
        """The heads the port names."""
        return read_port_heads(self.run.port, self.base)

    @cached_property
    def plan(self) -> ConversionPlan:
        """The conversion, which says what base module each module of the port came from."""
        return plan_conversion(
            self.base, self.source, dtype=self.run.port.dtype, heads=self.head_set, release=self.release
        )

    @cached_property
    def tree(self) -> MedusaTree:
        """The tree that was written beside the checkpoint."""
        return read_tree(self.run.folder.checkpoint / TREE_FILE)

    @cached_property
    def _tokenized(self) -> tuple[list[list[int]], str]:
        port = self.run.port
        prompts, said = tokenize_prompts(port, self.reference.tokenizer, self.reference.vocab_size)
        if self.keeps_prompts or port.engine == "captured":
            return prompts, said
        prompts, cut = keep_below(prompts, port.alignment.new_tokens, self.base.length_threshold, self.tree.num_drafts)
        return prompts, f"{said}; {cut}" if cut else said

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids."""
        return self._tokenized[0]

    @property
    def prompt_note(self) -> str:
        """Where the prompts came from, and on which side they lie of each length at which the base changes."""
        scaling = self.base.rope_scaling or {}
        changes = {
            "the sliding window acts": self._attention_shape.sliding_window,
            f"{scaling.get('type')} scaling of the rotary factors acts": self.base.length_threshold,
        }
        noted = note_lengths(self.prompts, self.run.port.alignment.new_tokens, changes)
        return self._tokenized[1] if noted is None else f"{self._tokenized[1]}; {noted}"

    @cached_property
    def kernel(self) -> KernelProfile:
        """Whose attention arithmetic the emulator uses; for `xqa` with the real kernel in it."""
        profile = kernel_profile(self.run.port.kernel)
        if profile.name != "xqa" or self.run.port.engine == "captured":  # an engine brings its own kernels
            return profile
        return replace(profile, attend_tree=open_xqa_kernel(self.run.port.target.tokens_per_block))

    @cached_property
    def source_tree(self) -> SourceTree:
        """The TensorRT-LLM tree whose code runs."""
        return open_port_tree(self.run.port)

    @cached_property
    def module(self) -> tuple[Path, str]:
        """The patched module's file and the class in it."""
        patch = self.run.folder.outcome("patch")
        file = next(product for product in patch.products if product.endswith(".py"))
        return self.run.folder.root / file, patch.figures["class_name"]

    @cached_property
    def model(self) -> EmulatedModel:
        """The port in the emulator: the checkpoint under the patched class, with the port's kernel profile."""
        module_file, class_name = self.module
        emulator = open_emulator(self.source_tree, kernel=self.kernel)
        with naming_changes(self.checkpoint_check):
            return emulator.load_checkpoint(
                self.run.folder.checkpoint, module_file=module_file, class_name=class_name, rank=current_rank()
            )

    @cached_property
    def checkpoint_check(self) -> CheckpointCheck:
        """The checkpoint against what the rules make of the base."""
        return CheckpointCheck(self.run)

    @cached_property
    def port_state(self) -> PortState:
        """The healthy port, into which faults are planted."""
        module_file, class_name = self.module
        state = read_port_state(
            self.source_tree, self.run.folder.checkpoint, tree=self.tree, module_file=module_file, class_name=class_name
        )
        skipped = read_skipped_rows(self.plan, self.source)
        return replace(state.with_window(self.attention_window), leading_positions=skipped)

    @cached_property
    def _attention_shape(self) -> AttentionShape:
        return attention_shape(self.base, self.run.port.target)

    @property
    def attention_window(self) -> int | tuple[int, ...] | None:
        """The window of the base's layers, where texts outgrow it, one a layer where they differ; a checkpoint cannot
        hold it."""
        longest = max(map(len, self.prompts)) + self.run.port.alignment.new_tokens
        return find_reached_window(self._attention_shape, self.base.raw, self.base.num_layers, longest)

    @cached_property
    def reference_heads(self) -> ReferenceHeads:
        """The heads in float32."""
        return read_reference_heads(self.head_set, self.reference)

    @property
    def approximate_fit_notes(self) -> tuple[str, ...]:
        """What an approximate kernel fit did to the checkpoint; empty when there is none or it is exact."""
        record = self._fit_record
        if not record or record["exact"]:
            return ()
        return tuple(f"{note['transform']}: {note['what']}" for note in record["notes"])

    @property
    def fit_in_effect(self) -> str | None:
        """The transforms that the checkpoint was changed by, in order; None for the model as it is."""
        record = self._fit_record
        if not record:
            return None
        return ", ".join(
            f"{note['transform']} ({'exact' if note['exact'] else 'approximate'})" for note in record["notes"]
        )

    @property
    def _fit_record(self) -> dict[str, Any] | None:
        """What the checkpoint's config says of its kernel fit."""
        return read_checkpoint_document(self.run).get(CONFIG_KEY)

    def require_fitted_length(self) -> None:
        """Stop before anything is run when a prompt and its new tokens outgrow what the kernel fit is right for.

        Raises:
            CheckpointError: they do.
        """
        config = read_checkpoint_document(self.run)
        require_length(config, max(map(len, self.prompts)) + self.run.port.alignment.new_tokens)

    @property
    def options(self) -> AlignmentOptions:
        """What to run and how strictly, from the port file."""
        wanted = self.run.port.alignment
        return AlignmentOptions(
            new_tokens=wanted.new_tokens,
            batch_sizes=tuple(wanted.batch_sizes) if wanted.batch_sizes else None,
            near_tie_tolerance=wanted.near_tie_tolerance,
            differences=self._differences,
            fit_notes=self.approximate_fit_notes,
            covered=(*EMULATED, Coverage.KERNEL_ARITHMETIC) if self.kernel.attend_tree is not None else None,
        )

    @property
    def _differences(self) -> tuple[Difference, ...]:
        return find_differences(self.base, self.release, self.run.port.dtype)

    def align(self, model: Any = None, tree: MedusaTree | None = None) -> AlignmentResult:
        """Align a model (the port's own when None), with the port's tree unless another is given."""
        with naming_changes(self.checkpoint_check, MODEL_ERRORS):
            return align_port_outputs(
                self.reference,
                model or self.model,
                self.prompts,
                tree or self.tree,
                heads=self.reference_heads,
                options=self.options,
            )

    def read_captured(
        self, file: Path, logits_file: Path | None = None, *, padded_to: int = 1
    ) -> tuple[CapturedSequence, ...]:
        """What an engine answered to the port's prompts: files of TensorRT-LLM's run script.

        Args:
            file: `--output_npy` or `--output_csv`.
            logits_file: `--output_logits_npy`, None when there is none.
            padded_to: ids up to the next multiple of this are read too: padding of the vocabulary, a fault of its own.
        """
        vocab_size = self.reference.vocab_size
        sequences = read_captured_tokens(
            file,
            self.prompts,
            end_ids=self.reference.settings.end_ids,
            vocab_size=-(-vocab_size // padded_to) * padded_to,
            max_new_tokens=self.run.port.alignment.new_tokens,
        )
        if logits_file is None:
            return sequences
        return read_captured_logits(logits_file, sequences, vocab_size=vocab_size)

    def align_captured(self, sequences: Sequence[CapturedSequence] | None = None) -> AlignmentResult:
        """Align what an engine answered; the file that the port names (the capture script's or run.py's) when None."""
        port = self.run.port
        if sequences is None:
            file = port.resolve_path(port.alignment.captured)
            if is_capture_file(file):
                return align_capture(self, read_capture_file(file))
            sequences = self.read_captured(file)
        emitted = [list(sequence.tokens) for sequence in sequences]
        return align_captured_outputs(
            self.reference,
            self.prompts,
            emitted,
            resolve_dtype(port.dtype),
            fitted=ContextOracle(self.model) if self.approximate_fit_notes else None,
            options=self.options,
        )

    def explain(self, result: AlignmentResult) -> AlignmentResult:
        """The result with the layers compared, and with a cause when it failed."""
        result = replace(result, layers=self.compare_layers(result))
        if result.verdict is Verdict.PASS:
            return result
        if self.run.port.target.tp_size * self.run.port.target.pp_size > 1:
            return result
        return replace(result, cause=self.diagnose(result).as_dict())

    def diagnose(self, result: AlignmentResult, observation: Observation | None = None) -> Diagnosis:
        """The cause of what was observed; where the port itself is another model than its base, what would mend it.

        Args:
            result: the alignment of what was observed.
            observation: the same with more than the alignment holds, None when it holds everything.
        """
        return diagnose_session(self, result, observation)

    def compare_layers(self, result: AlignmentResult) -> Any:
        """Layer by layer on the longest prompt; None for an engine's captured tokens, which have no layers."""
        if self.run.port.engine == "captured":
            return None
        place = max(range(len(self.prompts)), key=lambda index: len(self.prompts[index]))
        with self.matched(result):
            return compare_layers(
                self.model,
                self.reference,
                pair_modules(self.plan.tensors, self.reference),
                self.prompts[place],
                result.texts[place].tokens,
                dims=self.plan.dims,
                scalars=plan_scalars(self.plan),
                noise_dtype=self.model.dtype,
            )

    def matched(self, result: AlignmentResult) -> AbstractContextManager[None]:
        """The base with the differences that the library makes anyway, so that what is left is the port's."""
        shown = {difference.name for difference in result.inherent if difference.applies}
        return matched_to_library(self.reference, [item for item in self._differences if item.name in shown])

    def write_tokens(self, path: Path, result: AlignmentResult) -> None:
        """Write the emitted tokens in the format of TensorRT-LLM's run script (`--output_npy`)."""
        rows = [np.asarray(text.tokens, dtype=np.int32) for text in result.texts]
        end_id = self.reference.settings.end_ids[0] if self.reference.settings.end_ids else 0
        write_captured_tokens(path, result.prompts, rows, end_id=end_id)
