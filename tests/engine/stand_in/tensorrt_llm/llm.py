"""LLM over a built engine: requests are batched by the runtime, answers hold new tokens only."""

from types import SimpleNamespace

from . import signatures
from .engine import Engine


class LLM:
    def __init__(self, *args, **kwargs):
        given = signatures.bind("LLM.__init__", args, kwargs)
        if not given.get("skip_tokenizer_init"):
            raise RuntimeError("an engine folder brings no tokenizer")
        config = given.get("speculative_config")
        self.keeps_logits = given.get("gather_generation_logits", False) or not signatures.is_from((0, 20))
        self.engine = Engine(given["model"], None if config is None else config.medusa_choices)

    def generate(self, *args, **kwargs):
        given = signatures.bind("LLM.generate", args, kwargs)
        params = given["sampling_params"]
        found = self.engine.decode(given["inputs"], params.max_tokens, params.end_id)
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=list(row),
                        generation_logits=logits if self.keeps_logits and params.return_generation_logits else None,
                    )
                ]
            )
            for row, logits in zip(found.tokens, found.logits, strict=True)
        ]

    def generate_async(self, *args, **kwargs):
        given = signatures.bind("LLM.generate_async", args, kwargs)
        params = given["sampling_params"]
        found = self.engine.decode([given["inputs"]], params.max_tokens, params.end_id)
        (row,), (accepted,) = found.tokens, found.accepted_lengths
        seen = 1
        for length in [0, *accepted]:
            seen = min(seen + length, len(row))
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(row[:seen]))])
