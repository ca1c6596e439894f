"""What the convert step and its proof read: the port's base, heads, tree and kernel fit, opened by their headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from porting_kit.architectures.base_config import BaseConfig
from porting_kit.architectures.release_needs import require_release
from porting_kit.conversion.base_checkpoint import CheckpointBase, plan_joining
from porting_kit.conversion.config_fields import build_config
from porting_kit.conversion.heads import HeadSet
from porting_kit.conversion.plan import plan_conversion
from porting_kit.conversion.planned import ConversionPlan
from porting_kit.conversion.tensor_source import TensorSource, open_tensor_source
from porting_kit.kernel_fit.plan import FitPlan
from porting_kit.medusa.tree import MedusaTree
from porting_kit.port import Port
from porting_kit.source_tree import SourceTree
from porting_kit.steps.fit import plan_port_fit
from porting_kit.steps.joined_base import follow_embedding, open_joined_base, plan_base, warn_of_unjudged_fields
from porting_kit.steps.preflight import (
    open_port_tree,
    read_port_base,
    read_port_heads,
    read_port_tree,
    target_profile,
    target_release,
)

TREE_FILE = "medusa_choices.json"


@dataclass(frozen=True)
class ConversionInputs:
    """The parts of one port's conversion.

    Args:
        source: the tensors that are converted or copied.
        joined: the base checkpoint that heads are added to, then `source` is its; None where the base is converted.
        base_plan: how the Hugging Face base would have been converted, and `base_source` its tensors; with `joined`.
    """

    port: Port
    source_tree: SourceTree
    release: str | None
    base: BaseConfig
    source: TensorSource
    heads: HeadSet
    tree: MedusaTree
    fit: FitPlan
    joined: CheckpointBase | None = None
    base_plan: ConversionPlan | None = None
    base_source: TensorSource | None = None

    @property
    def sources(self) -> tuple[TensorSource, ...]:
        """All catalogues that values come from."""
        return (self.source, self.heads.source)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be judged of a base checkpoint."""
        if self.joined is None:
            return ()
        return warn_of_unjudged_fields(self.joined, self.base_plan, self.source_tree)

    def plan(self, fit: Any = None) -> ConversionPlan:
        """The conversion as the port asks for it.

        Args:
            fit: what `FitPlan.for_conversion` gives; None plans without a fit.

        Raises:
            BaseModelError, HeadsError, ConversionError: see `plan_conversion`.
        """
        if self.joined is not None:
            return plan_joining(self.joined, self.source, self.heads)
        target = self.port.target
        ranks = {"tp_size": target.tp_size, "pp_size": target.pp_size}
        options = {"dtype": self.port.dtype, "heads": self.heads, "release": self.release, **ranks}
        plan = plan_conversion(self.base, self.source, **options)
        return plan if fit is None else fit.refit_plan(plan, build_config(plan.base, **options)[0])


def open_conversion(port: Port, *, check_values: bool = False) -> ConversionInputs:
    """Open a port's conversion; headers only, unless the heads' values are to be checked.

    Raises:
        BaseModelError, HeadsError, TreeError, SourceTreeError: unusable input.
        CheckpointError: the port's base checkpoint cannot be used, or is not what the port asks for.
    """
    source_tree = open_port_tree(port)
    profile = target_profile(port, source_tree)
    release = target_release(source_tree, profile)
    source = open_tensor_source(port.base_path)
    base = read_port_base(port, release, source)
    require_release(base, release, port.target.tp_size)
    heads = read_port_heads(port, base, check_values=check_values)
    fit = plan_port_fit(port, base, profile)
    joined = base_plan = base_source = None
    if port.base_checkpoint_path is not None:
        base_source = source
        joined, source = open_joined_base(port, base, base_source, fit, release, source_tree)
        base_plan = follow_embedding(plan_base(port, base, base_source, release), joined)
    return ConversionInputs(
        port=port,
        source_tree=source_tree,
        release=release,
        base=base,
        source=source,
        heads=heads,
        tree=read_port_tree(port, heads),
        fit=fit,
        joined=joined,
        base_plan=base_plan,
        base_source=base_source,
    )
