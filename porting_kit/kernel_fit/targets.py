"""A fit plan carried out inside a conversion: shapes and rank parts first, then values, one layer at a time.

The conversion stays in charge of files, ranks and accounts; it hands over its unfitted plan and its stream of targets
and gets both back fitted. The unfitted values are still proved against the source before they are changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.rules import QKV
from porting_kit.conversion.config_fields import FieldRow
from porting_kit.conversion.planned import FITTED_ORIGIN, ConversionPlan, PlannedTensor, plan_scalars
from porting_kit.conversion.sharding import cut_pieces, locate_target
from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.plan import FitPlan

if TYPE_CHECKING:
    import torch

    from porting_kit.kernel_fit.activations import HeadMoments
    from porting_kit.kernel_fit.note import FitNote

Target = tuple[PlannedTensor, "list[torch.Tensor]", "torch.Tensor"]


class TargetFit:
    """One plan on its way through one conversion.

    Args:
        plan: what to do.
        activations: moments of the unfitted model, where the plan needs them.
    """

    def __init__(self, plan: FitPlan, activations: Mapping[str, HeadMoments] | None = None) -> None:
        if plan.needs_activations and activations is None:
            raise ConversionError(
                "this fit needs activations of the unfitted model",
                expected="moments from measure_activations on calibration prompts",
                found="none",
                next_step="run the unfitted model on prompts first",
            )
        self.plan, self.activations = plan, activations
        self.notes: tuple[FitNote, ...] = ()
        self._layer_notes: list[tuple[FitNote, ...]] = []
        self.unfitted_plan: ConversionPlan | None = None
        self._fitted: dict[str, PlannedTensor] = {}
        self._config: dict[str, Any] = {}
        self._fitted_config: dict[str, Any] = {}

    def refit_plan(self, plan: ConversionPlan, config: Mapping[str, Any]) -> ConversionPlan:
        """The conversion's plan with the fitted shapes, and rank parts cut along the fitted heads.

        Args:
            plan: the unfitted plan.
            config: the unfitted config.json.

        Raises:
            ConversionError: the fitted heads do not divide over the ranks, the fit is for another model, or it writes
                positions and there are pipeline ranks.
        """
        self.unfitted_plan, self._config = plan, dict(config)
        self._require_same_model(plan)
        if not self.plan.steps:
            return plan
        if plan.base.layers:
            raise ConversionError(
                "a kernel fit changes all layers alike, and the layers of this model differ",
                expected="fit: off, or a model whose layers have the same heads",
                found=f"{plan.base.family}, steps {list(self.plan.names)}",
                next_step="set fit: off",
            )
        if "write_positions" in self.plan.names and plan.pp_size > 1:
            raise ConversionError(
                "write_positions needs the tokens' positions on every pipeline rank",
                expected="pp_size 1: later ranks are fed no position_ids",
                found=f"pp_size {plan.pp_size}",
                where="runtime/generation.py 0.11.0.dev2024062500 l.716",
                next_step="set target.pp_size: 1, or fit: [fold_alibi], whose positions are the kernel's own",
            )
        shape = self.plan.fitted
        dims = {**plan.dims, "H": shape.query_heads, "K": shape.kv_heads, "D": shape.head_size}
        tensors: list[PlannedTensor] = []
        for planned in plan.tensors:
            if planned.target.endswith("attention.qkv.weight"):
                tensors.append(self._refit(planned, (_rows(dims), planned.shape[1]), dims))
                if self._adds_bias(plan, planned):
                    bias = replace(planned, target=_bias_name(planned.target), sources=(), operations=(), shard=QKV)
                    tensors.append(self._refit(bias, (_rows(dims),), dims))
            elif planned.target.endswith("attention.qkv.bias"):
                tensors.append(self._refit(planned, (_rows(dims),), dims))
            elif planned.target.endswith("attention.dense.weight"):
                tensors.append(self._refit(planned, (planned.shape[0], dims["H"] * dims["D"]), dims))
            else:
                tensors.append(planned)
        self._fitted = {planned.target: planned for planned in tensors if planned.origin == FITTED_ORIGIN}
        return replace(plan, tensors=tuple(tensors), dims=dims)

    def looks_at(self, planned: PlannedTensor) -> bool:
        """Whether a target belongs to a layer's attention, which is fitted as one."""
        return bool(self.plan.steps) and _attention_prefix(planned.target) is not None

    def refit_targets(self, targets: Iterable[Target]) -> Iterator[Target]:
        """The conversion's stream of whole targets, the attention's fitted.

        Args:
            targets: (planned, sources, whole) of the unfitted plan, in its order.
        """
        if not self.plan.steps:
            yield from targets
            return
        expected = _attention_targets(self.unfitted_plan)
        waiting: dict[str, list[Target]] = {}
        for target in targets:
            prefix = _attention_prefix(target[0].target)
            if prefix is None:
                yield target
                continue
            waiting.setdefault(prefix, []).append(target)
            if len(waiting[prefix]) == expected[prefix]:
                yield from self._fit_layer(waiting.pop(prefix))
        if waiting:
            raise ConversionError(
                "attention targets were missing",
                expected="queries, keys, values and output projection of every layer",
                items=sorted(waiting),
                next_step="convert again; if it stays, the plan lacks a target of this family",
            )

    def finish_config(
        self, config: Mapping[str, Any], table: Sequence[FieldRow]
    ) -> tuple[dict[str, Any], tuple[FieldRow, ...]]:
        """The fitted config.json and its table; call it when all targets have passed."""
        if not self.plan.steps:
            return dict(config), tuple(table)
        from porting_kit.kernel_fit.fit import CONFIG_KEY, merge_notes, record_fit

        self.notes = merge_notes(self._layer_notes)
        changed = {
            key: value for key, value in self._fitted_config.items() if key not in config or config[key] != value
        }
        changed[CONFIG_KEY] = record_fit(self.plan, self.notes)
        names = ", ".join(self.plan.names)
        rows = [row for row in table if row.target not in changed]
        rows += [FieldRow(key, value, None, "derived", f"kernel fit: {names}") for key, value in changed.items()]
        return {**config, **changed}, tuple(rows)

    def _require_same_model(self, plan: ConversionPlan) -> None:
        shape = self.plan.shape
        own = (plan.dims["H"], plan.dims["K"], plan.dims["D"])
        if own != (shape.query_heads, shape.kv_heads, shape.head_size):
            raise ConversionError(
                "the fit was planned for another model",
                expected=f"{shape.query_heads} query heads, {shape.kv_heads} key/value heads of {shape.head_size} dims",
                found=f"{own[0]} query heads, {own[1]} key/value heads of {own[2]} dims",
                next_step="plan the fit for this base",
            )

    def _adds_bias(self, plan: ConversionPlan, weight: PlannedTensor) -> bool:
        needs = {"fold_alibi", "truncate_heads", "write_positions"} & set(self.plan.names)
        return bool(needs) and all(planned.target != _bias_name(weight.target) for planned in plan.tensors)

    def _refit(self, planned: PlannedTensor, shape: tuple[int, ...], dims: Mapping[str, int]) -> PlannedTensor:
        plan = self.unfitted_plan
        layer = next(int(part) for part in planned.target.split(".") if part.isdecimal())
        stage, name = locate_target(planned.target, layer, "layer", plan.base.num_layers, plan.pp_size)
        pieces = cut_pieces(name, stage, shape, planned.shard, dims, plan.tp_size)
        return replace(planned, shape=shape, pieces=pieces, origin=FITTED_ORIGIN)

    def _fit_layer(self, layer: list[Target]) -> Iterator[Target]:
        import torch

        from porting_kit.conversion.apply import build_target, cast_tensor
        from porting_kit.conversion.inverse import verify_target
        from porting_kit.kernel_fit.fit import apply_fit

        plan = self.unfitted_plan
        scalars = plan_scalars(plan)
        by_name = {planned.target: (planned, found) for planned, found, _ in layer}
        wide = {}
        for planned, found, whole in layer:
            verify_target(planned, whole, found, plan)
            # In float32, so that the fitted weights are rounded once.
            wide[planned.target] = build_target(replace(planned, dtype="float32"), found, plan.dims, scalars)
        fitted = apply_fit(self.plan, self._config, wide, activations=self.activations)
        self._layer_notes.append(fitted.notes)
        self._fitted_config = fitted.config
        for name, tensor in fitted.tensors.items():
            planned, found = by_name.get(name, (None, []))
            planned = self._fitted.get(name, planned)
            yield planned, found, cast_tensor(tensor, getattr(torch, planned.dtype), name)


def _attention_prefix(target: str) -> str | None:
    """`transformer.layers.3.` for a target that a fit of that layer looks at, None for others."""
    from porting_kit.kernel_fit.attention_tensors import DENSE_BIAS, FITTED_SUFFIXES

    suffix = next((suffix for suffix in (*FITTED_SUFFIXES, DENSE_BIAS) if target.endswith(suffix)), None)
    return None if suffix is None else target.removesuffix(suffix)


def _attention_targets(plan: ConversionPlan) -> Counter[str]:
    """Layer prefix -> how many of its targets a fit looks at."""
    prefixes = (_attention_prefix(planned.target) for planned in plan.tensors)
    return Counter(prefix for prefix in prefixes if prefix is not None)


def _rows(dims: Mapping[str, int]) -> int:
    return (dims["H"] + 2 * dims["K"]) * dims["D"]


def _bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
