"""The names under which a Hugging Face config states the dtype of its weights."""

from __future__ import annotations

from porting_kit.errors import BaseModelError, suggest_nearest

DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32"}
DTYPES |= {"float": "float32", "float64": "float64", "double": "float64"}


def read_dtype(stated: object, where: str) -> str:
    """The dtype that a config states, as torch names it. Raises BaseModelError: an unknown name."""
    name = str(stated).removeprefix("torch.")
    if name not in DTYPES:
        near = suggest_nearest(name, sorted(DTYPES))
        raise BaseModelError(
            f"the config states an unknown dtype {stated!r}",
            expected=f"one of {sorted(set(DTYPES.values()))}",
            found=repr(stated),
            where=where,
            next_step=f"the nearest is {near}; correct the key" if near else "correct torch_dtype or dtype",
        )
    return DTYPES[name]
