"""ModelRunner and ModelRunnerCpp: what each returns, as runtime/model_runner.py and model_runner_cpp.py return it."""

import torch

from . import signatures
from .engine import Engine

PYTHON_BINDINGS = True
SAMPLING = [word for entry in ("SamplingConfig", "ModelRunnerCpp.sampling") for word in signatures.words_of(entry)]


class _Runner:
    def __init__(self, given):
        self.limits = given
        self.engine = Engine(given["engine_dir"], given.get("medusa_choices"))
        self.gather_generation_logits = bool(self.engine.build_config.get("gather_generation_logits"))

    def _read(self, name, args, kwargs):
        given = signatures.bind(name, args, kwargs)
        strangers = set(given) - set(signatures.signature_of(name).parameters) - set(SAMPLING) - {"num_beams"}
        if strangers:
            raise TypeError(f"ignored without a word by this release: {sorted(strangers)}")
        prompts = [prompt.tolist() for prompt in given["batch_input_ids"]]
        return given, prompts, self.engine.decode(prompts, given["max_new_tokens"], given["end_id"])

    def _outputs(self, given, prompts, rows, counted):
        """int32 [B, 1, length], prompt first, filled up with the end id."""
        length = max(map(len, prompts)) + given["max_new_tokens"]
        table = torch.full((len(rows), 1, length), given["end_id"], dtype=torch.int32)
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            table[index, 0, : len(prompt) + len(row)] = torch.tensor([*prompt, *row], dtype=torch.int32)
        lengths = [[len(prompt) + count] for prompt, count in zip(prompts, counted, strict=True)]
        return {"output_ids": table, "sequence_lengths": torch.tensor(lengths, dtype=torch.int32)}


class ModelRunner(_Runner):
    """The Python session: one dictionary, with the number of steps from 0.12 on."""

    @classmethod
    def from_dir(cls, *args, **kwargs):
        return cls(signatures.bind("ModelRunner.from_dir", args, kwargs))

    def generate(self, *args, **kwargs):
        given, prompts, found = self._read("ModelRunner.generate", args, kwargs)
        if given.get("streaming"):
            raise RuntimeError("streaming of Medusa is not offered by the Python session")
        if (given.get("medusa_choices") is None) != (self.engine.tree is None):
            raise AssertionError("medusa_choices belongs to from_dir and to generate")
        outputs = self._outputs(given, prompts, found.tokens, [len(row) for row in found.tokens])
        if signatures.RELEASE.startswith(("0.13", "0.16")):
            outputs["steps_to_finish"] = max(map(len, found.accepted_lengths))
        return outputs


class ModelRunnerCpp(_Runner):
    """The C++ session: the end token is not counted; a stream gives one dictionary a step."""

    @classmethod
    def from_dir(cls, *args, **kwargs):
        return cls(signatures.bind("ModelRunnerCpp.from_dir", args, kwargs))

    def generate(self, *args, **kwargs):
        given, prompts, found = self._read("ModelRunnerCpp.generate", args, kwargs)
        if max(map(len, prompts)) > self.limits["max_input_len"]:
            raise RuntimeError("Maximum input length exceeds the engine or specified limit")
        ends = [1 if ended is not None else 0 for ended in found.ended_by]
        if given.get("streaming"):
            return self._stream(given, prompts, found)
        counted = [len(row) - end for row, end in zip(found.tokens, ends, strict=True)]
        outputs = self._outputs(given, prompts, found.tokens, counted)
        if self._keeps_logits(given):
            longest = max(len(rows) for rows in found.logits)
            table = torch.zeros(len(prompts), 1, longest, found.logits[0].shape[-1])
            for index, rows in enumerate(found.logits):
                table[index, 0, : len(rows)] = rows
            outputs["generation_logits"] = table
        return outputs

    def _keeps_logits(self, given):
        """From 0.20 on the executor must be opened for it, and asked with every call or by the engine."""
        if "gather_generation_logits" not in signatures.words_of("ModelRunnerCpp.from_dir"):
            return self.gather_generation_logits
        asked = self.gather_generation_logits or given.get("output_generation_logits")
        return bool(self.limits.get("gather_generation_logits") and asked)

    def _stream(self, given, prompts, found):
        (row,), (accepted,) = found.tokens, found.accepted_lengths
        seen = 1
        yield self._outputs(given, prompts, [row[:1]], [1])
        for length in accepted:
            seen = min(seen + length, len(row))
            yield self._outputs(given, prompts, [row[:seen]], [seen])


for _class in (ModelRunner, ModelRunnerCpp):
    for _name in ("from_dir", "generate"):
        if f"{_class.__name__}.{_name}" in signatures.RECORDED:
            _function = getattr(_class, _name)
            _target = getattr(_function, "__func__", _function)
            _target.__signature__ = signatures.signature_of(f"{_class.__name__}.{_name}").replace(
                parameters=[
                    signatures.inspect.Parameter("self", signatures.FIRST, default=None),
                    *signatures.signature_of(f"{_class.__name__}.{_name}").parameters.values(),
                ]
            )

if not signatures.offers("ModelRunner"):
    raise ImportError("this release's runtime is not recorded here")
