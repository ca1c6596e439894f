"""A kernel profile as the emulator's attention sees it: what it leaves out, and what it refuses for a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KernelView:
    """A profile bound to one model.

    Args:
        profile: a KernelProfile.
        dtype: the config's type name.
        tp_size: ranks that share the heads: a gate judges the whole model's heads.
        kv_dtype: type of the KV cache.
    """

    profile: Any
    dtype: str
    tp_size: int = 1
    kv_dtype: str | None = None
    _passed: set[tuple] = field(default_factory=set)

    @classmethod
    def of(cls, profile: Any, config: dict[str, Any]) -> KernelView | None:
        """The view of a profile on a checkpoint; None for exact arithmetic."""
        if profile is None or profile.name == "exact":
            return None
        mapping = config.get("mapping") or {}
        algorithm = str((config.get("quantization") or {}).get("kv_cache_quant_algo") or "").lower()
        return cls(profile, str(config["dtype"]), int(mapping.get("tp_size", 1)), algorithm or None)

    @property
    def alibi_in_generation(self) -> bool:
        return self.profile.alibi_in_generation

    @property
    def softcap_in_generation(self) -> bool:
        return self.profile.softcap_in_generation

    @property
    def one_position_id_per_request(self) -> bool:
        return self.profile.one_position_id_per_request

    @property
    def attend_tree(self) -> Any:
        """The real kernel that attends in a tree step, None where the emulator's own arithmetic stands for it."""
        return self.profile.attend_tree

    def refuse_layer(self, setting: Any, arguments: dict[str, Any]) -> None:
        """Ask the profile whether its kernels take this layer in a generation step with a tree.

        Raises:
            KernelRefusal: they stop, with the library's message.
        """
        from porting_kit.releases.shape import AttentionShape

        shape = AttentionShape(
            head_size=setting.head_size,
            query_heads=setting.query_heads * self.tp_size,
            kv_heads=setting.kv_heads * self.tp_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            position_kind=arguments["position_embedding_type"].name,
            q_scaling=float(arguments["q_scaling"]),
            softcap=setting.softcap or None,
            sliding_window=setting.window,
        )
        if shape not in self._passed:
            self.profile.refuse(shape)
            self._passed.add(shape)
