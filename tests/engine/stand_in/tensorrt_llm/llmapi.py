"""The classes of the LLM API that take the tree and the sampling settings."""

from types import SimpleNamespace

from . import signatures


class _Recorded:
    def __init__(self, **kwargs):
        vars(self).update(signatures.bind(type(self).__name__, (), kwargs))


class MedusaDecodingConfig(_Recorded):
    """A pydantic model from 0.17 on, a dataclass before."""

    model_fields = (
        dict.fromkeys(signatures.RECORDED["MedusaDecodingConfig"].split()) if signatures.is_from((0, 17)) else None
    )
    __dataclass_fields__ = dict.fromkeys(signatures.RECORDED["MedusaDecodingConfig"].split())


class SamplingParams(_Recorded):
    """Every setting has a default."""


if signatures.is_from((0, 20)):
    llm_args = SimpleNamespace(TrtLlmArgs=SimpleNamespace(model_fields={"gather_generation_logits": None}))
