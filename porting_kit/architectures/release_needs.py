"""What a model needs of a TensorRT-LLM release before a checkpoint of it makes sense.

Only what the checkpoint format itself must express: the family's class and the kind of rotary scaling. Kernels and
build flags have their own facts. A release text that is not a version number (the bundled definitions) needs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from porting_kit.architectures.releases import release_key
from porting_kit.architectures.rope import ROPE_KINDS
from porting_kit.errors import BaseModelError

if TYPE_CHECKING:
    from porting_kit.architectures.base_config import BaseConfig
    from porting_kit.architectures.family import Difference


@dataclass(frozen=True)
class Need:
    """Something a release before `since` does not have; None when no release has it."""

    what: str
    since: str | None


def find_unmet_needs(base: BaseConfig, release: str | None, tp_size: int = 1) -> tuple[Need, ...]:
    """The needs of a base that a release does not meet; none when the release is None or no version number."""
    if release is None or release_key(release) is None:
        return ()
    needs = [Need(f"{base.architecture} (its model class)", base.definition.first_release)]
    if base.head_size * base.num_heads != base.hidden_size:
        what = f"a head size of {base.head_size} at {base.num_heads} heads on {base.hidden_size}"
        needs.append(Need(what, base.definition.head_size_since))
    if tp_size > 1 and base.definition.ranks_since is not None:
        needs.append(Need(f"{base.architecture} on several ranks", base.definition.ranks_since))
    if base.rope_scaling is not None:
        kind = str(base.rope_scaling["type"])
        what = f"rope scaling of kind {kind!r} in {base.architecture}"
        dates = (ROPE_KINDS[kind][1], base.definition.rope_scaling_since)
        needs += [Need(what, since) for since in dates if since is not None]
    for setting in base.definition.settings_since:
        if base.raw.get(setting.key) in setting.values:
            needs.append(Need(setting.what, setting.since))
    asked = release_key(release)
    for first, sound, why in base.definition.broken:
        if release_key(first) <= asked < release_key(sound):
            needs.append(Need(f"{base.architecture} ({why})", sound))
    return tuple(need for need in needs if need.since is None or asked < release_key(need.since))


def require_release(base: BaseConfig, release: str | None, tp_size: int = 1) -> None:
    """Raise BaseModelError when a TensorRT-LLM release cannot express this base; None asks nothing."""
    unmet = find_unmet_needs(base, release, tp_size)
    since = [need.since for need in unmet]
    if unmet:
        raise BaseModelError(
            f"TensorRT-LLM {release} cannot express this model: {unmet[0].what}",
            expected=f"{unmet[0].since} or later" if unmet[0].since else "no release takes this",
            found=release,
            where=base.where,
            items=[need.what for need in unmet[1:]],
            next_step=f"use TensorRT-LLM {max(since, key=release_key)} or later"
            if all(since)
            else "the model cannot be ported as it is",
        )


def find_release_faults(base: BaseConfig, release: str | None) -> tuple[Difference, ...]:
    """What a release's model class computes wrongly for this base, where a later release is right.

    A release text that is not a version number has none.
    """
    asked = None if release is None else release_key(release)
    if asked is None:
        return ()
    return tuple(
        difference
        for difference in base.definition.differences
        if difference.before is not None and asked < release_key(difference.before) and _has_positions(base, difference)
    )


def find_differences(base: BaseConfig, release: str | None, dtype: str) -> tuple[Difference, ...]:
    """Those of its family's differences that a port of this base can show.

    Args:
        release: whose model class it runs; one that is None or no version number mends none of them.
        dtype: what the port computes in.
    """
    asked = None if release is None else release_key(release)
    return tuple(
        difference
        for difference in base.definition.differences
        if _has_positions(base, difference)
        and not (difference.half_only and dtype == "float32")
        and not (asked and difference.before is not None and asked >= release_key(difference.before))
    )


def _has_positions(base: BaseConfig, difference: Difference) -> bool:
    return base.position_kind.startswith(difference.position_kind or "")
