"""The base checkpoint that heads are added to, held against what the port says of its base. Reads headers only."""

from __future__ import annotations

from porting_kit.architectures.base_config import BaseConfig
from porting_kit.conversion.base_checkpoint import CheckpointBase, open_base_checkpoint
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.errors import CheckpointError
from porting_kit.kernel_fit.plan import FitPlan
from porting_kit.port import Port


def open_joined_base(port: Port, base: BaseConfig, fit: FitPlan | None) -> tuple[CheckpointBase, TensorSource]:
    """The port's base checkpoint, when it is what the port would have converted.

    Args:
        port: names the base checkpoint.
        base: the Hugging Face base, for the release the checkpoint is for.
        fit: the port's kernel fit; None for none.

    Raises:
        CheckpointError: it cannot be used, is of another base, dtype or ranks, or the port needs a kernel fit.
    """
    joined, source = open_base_checkpoint(port.base_checkpoint_path)
    wanted = (
        base.architecture,
        base.hidden_size,
        base.vocab_size,
        port.dtype,
        port.target.tp_size,
        port.target.pp_size,
    )
    found = (joined.architecture, joined.hidden_size, joined.vocab_size, joined.dtype, *joined.ranks)
    if wanted != found:
        names = ("architecture", "hidden size", "vocabulary", "dtype", "tp_size", "pp_size")
        unlike = [name for name, one, two in zip(names, wanted, found, strict=True) if one != two]
        raise CheckpointError(
            f"the base checkpoint is of another {' and '.join(unlike)} than the port",
            expected=", ".join(map(str, wanted)),
            found=", ".join(map(str, found)),
            where=joined.where,
            next_step="correct the port file, or convert the base again",
        )
    if fit is not None and fit.steps:
        raise CheckpointError(
            "a kernel fit changes the base's attention, so the base must be converted here",
            expected="fit: off, or no base_checkpoint",
            found=f"fit: {fit}",
            where=joined.where,
        )
    return joined, source
