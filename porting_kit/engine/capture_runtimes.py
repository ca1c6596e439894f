"""The three ways TensorRT-LLM runs a Medusa engine, each behind one function of prompt numbers.

A part of the capture script: `capture_kit` joins it with the others into one file for the build machine. tensorrt_llm
is imported when an engine is opened. Sampling is greedy everywhere.

- `ModelRunnerCpp` takes a tree from 0.11.0.dev2024051400 on, and still in 1.2.0; before, Medusa runs in
  `ModelRunner` only;
- `LLM` with MedusaDecodingConfig from 0.16.0.dev2024121000 on, under `tensorrt_llm._tensorrt_engine` from 1.0 on
  (runtime/model_runner.py, runtime/model_runner_cpp.py, llmapi/llm.py of those releases).

From 0.20.0 on the executor keeps generation logits only when it is asked to, whatever the engine was built with: once
when the engine is opened, and once with every call.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path


def choose_api(wanted: str) -> str:
    """The runtime that this release runs Medusa with: the C++ session wherever it takes a tree."""
    if wanted != "auto":
        return wanted
    try:
        from tensorrt_llm import runtime
    except ImportError:
        return "LLM"
    cpp = getattr(runtime, "ModelRunnerCpp", None)
    if cpp is not None and "medusa_choices" in inspect.signature(cpp.from_dir).parameters:
        return "ModelRunnerCpp"
    return "ModelRunner" if hasattr(runtime, "ModelRunner") else "LLM"


def open_runner_cpp(folder: Path, kind: str, rank: int, request: dict, keep_logits: bool = False):
    """The C++ session behind `tensorrt_llm.runtime.ModelRunnerCpp`."""
    from tensorrt_llm.runtime import ModelRunnerCpp

    lengths = [len(prompt) for prompt in request["prompts"]]
    options = {
        "engine_dir": str(folder),
        "rank": rank,
        "max_batch_size": max(len(group) for groups in request["groups"].values() for group in groups),
        "max_input_len": max(lengths),
        "max_output_len": request["new_tokens"],
        "max_beam_width": 1,
    }
    if kind == "medusa":
        options["medusa_choices"] = request["medusa_choices"]
    if keep_logits and "gather_generation_logits" in inspect.signature(ModelRunnerCpp.from_dir).parameters:
        options["gather_generation_logits"] = True
    return open_runner(ModelRunnerCpp, options, {}, rank, request)


def open_runner_python(folder: Path, kind: str, rank: int, request: dict, keep_logits: bool = False):
    """The Python session behind `tensorrt_llm.runtime.ModelRunner`; it wants the tree with every call as well."""
    from tensorrt_llm.runtime import ModelRunner

    options, call = {"engine_dir": str(folder), "rank": rank}, {}
    if "max_output_len" in inspect.signature(ModelRunner.from_dir).parameters:
        options["max_output_len"] = request["new_tokens"]
    if kind == "medusa":
        options["medusa_choices"] = request["medusa_choices"]
        call["medusa_choices"] = request["medusa_choices"]
    return open_runner(ModelRunner, options, call, rank, request)


def open_runner(runner_class, options: dict, call_options: dict, rank: int, request: dict):
    """A function (prompt numbers, options, keep logits) -> tokens, lengths, accepted, steps and logits of one call."""
    import torch

    runner = runner_class.from_dir(**options)
    asks_for_logits = "output_generation_logits" in inspect.signature(runner_class.generate).parameters

    def run(group: list, run_options: dict, keep_logits: bool) -> dict:
        prompts = [request["prompts"][index] for index in group]
        is_streamed = run_options.get("streamed", False)
        wanted = keep_logits and not is_streamed
        with torch.no_grad():
            outputs = runner.generate(
                [torch.tensor(prompt, dtype=torch.int32) for prompt in prompts],
                max_new_tokens=request["new_tokens"],
                end_id=request["end_id"],
                pad_id=request["pad_id"],
                temperature=1.0,
                top_k=1,
                num_beams=1,
                streaming=is_streamed,
                output_sequence_lengths=True,
                return_dict=True,
                **({"output_generation_logits": True} if wanted and asks_for_logits else {}),
                **call_options,
            )
            chunks = list(outputs) if is_streamed else [outputs]
        if rank != 0 or not chunks or not chunks[-1]:
            return {}
        answer = read_outputs(chunks[-1], prompts, request)
        if is_streamed:
            lengths = [read_outputs(chunk, prompts, request)["lengths"] for chunk in chunks]
            answer["accepted"] = count_accepted(lengths, prompts)
        if wanted:
            answer["logits"] = read_logits(chunks[-1].get("generation_logits"), answer["tokens"])
        return answer

    return run


def read_outputs(outputs: dict, prompts: list, request: dict) -> dict:
    """Tokens behind each prompt, cut behind the first end id; the lengths and steps the runtime states."""
    rows = outputs["output_ids"].tolist()
    stated = outputs.get("sequence_lengths")
    stated = stated.tolist() if stated is not None else [[None]] * len(rows)
    limit, end_ids = request["new_tokens"], request["end_ids"]
    tokens = [cut_at_end(row[0][len(prompt) :][:limit], end_ids) for row, prompt in zip(rows, prompts, strict=False)]
    steps = outputs.get("steps_to_finish")
    return {
        "tokens": tokens,
        "lengths": [length[0] for length in stated],
        "steps": None if steps is None else int(steps),
    }


def cut_at_end(tokens: list, end_ids: list) -> list:
    """Up to and with the first end id: behind it the runtime fills up with the one it was given."""
    for place, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: place + 1]
    return tokens


def close_at_end(tokens: list, request: dict) -> list:
    """The same for the LLM API, which may leave the end id out: an answer shorter than asked for ended with it."""
    tokens = cut_at_end(tokens, request["end_ids"])
    is_short = len(tokens) < request["new_tokens"]
    if is_short and request["end_ids"] and not (tokens and tokens[-1] in request["end_ids"]):
        return [*tokens, request["end_id"]]
    return tokens


def count_accepted(lengths: list, prompts: list) -> list:
    """Tokens that each generation step added, from the lengths after each chunk of a stream; the first chunk is the
    context phase's. A chunk may hold more than one step when the runtime is faster than the reader."""
    rows = []
    for row, prompt in enumerate(prompts):
        seen = [chunk[row] for chunk in lengths if chunk[row] is not None]
        grown = [new - old for old, new in zip([len(prompt), *seen], seen, strict=False)]
        rows.append([step for step in grown if step > 0][1:])
    return rows


def read_logits(logits, tokens: list) -> list | None:
    """float32 [tokens, Vp] for each row; None when the runtime returned another shape."""
    import torch

    if isinstance(logits, (list, tuple)):
        try:
            logits = torch.stack(list(logits))
        except (RuntimeError, TypeError):
            return None
    if logits is None or logits.ndim not in (3, 4) or len(logits) != len(tokens):
        return None
    logits = logits[:, 0] if logits.ndim == 4 else logits
    if logits.shape[1] < max(map(len, tokens)):
        return None
    return [logits[row, : len(tokens[row])].float().cpu().numpy() for row in range(len(tokens))]


def open_llm(folder: Path, kind: str, rank: int, request: dict, keep_logits: bool = False):
    """The LLM API on a built engine, TensorRT backend."""
    try:
        from tensorrt_llm._tensorrt_engine import LLM
    except ImportError:
        from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import MedusaDecodingConfig, SamplingParams

    options = {"model": str(folder), "skip_tokenizer_init": True}
    if keep_logits and "gather_generation_logits" in llm_fields():
        options["gather_generation_logits"] = True
    if kind == "medusa":
        settings = {"medusa_choices": request["medusa_choices"], "num_medusa_heads": request["num_medusa_heads"]}
        fields = getattr(MedusaDecodingConfig, "model_fields", None)
        fields = fields or getattr(MedusaDecodingConfig, "__dataclass_fields__", {})
        if "max_draft_len" in fields:
            settings["max_draft_len"] = request["max_draft_len"]
        options["speculative_config"] = MedusaDecodingConfig(**settings)
    llm = LLM(**options)

    def run(group: list, run_options: dict, keep_logits: bool) -> dict:
        prompts = [request["prompts"][index] for index in group]
        params = SamplingParams(
            max_tokens=request["new_tokens"],
            end_id=request["end_id"],
            pad_id=request["pad_id"],
            top_k=1,
            return_generation_logits=keep_logits and not run_options.get("streamed", False),
        )
        if run_options.get("streamed"):
            lengths, found = [], []
            for prompt in prompts:
                stream = llm.generate_async(prompt, params, streaming=True)
                chunks = [list(part.outputs[0].token_ids) for part in stream]
                lengths.append([[len(prompt) + len(chunk)] for chunk in chunks])
                found.append(close_at_end(chunks[-1], request))
            accepted = [count_accepted(rows, [prompt])[0] for rows, prompt in zip(lengths, prompts, strict=False)]
            return {"tokens": found, "accepted": accepted}
        results = llm.generate(prompts, params)
        outputs = [result.outputs[0] for result in results]
        answer = {"tokens": [close_at_end(list(output.token_ids), request) for output in outputs]}
        kept = [getattr(output, "generation_logits", None) for output in outputs]
        if keep_logits and all(logits is not None for logits in kept):
            rows = [read_logits(logits[None], [tokens]) for logits, tokens in zip(kept, answer["tokens"], strict=False)]
            answer["logits"] = None if None in rows else [row[0] for row in rows]
        return answer

    return run


def llm_fields() -> set:
    """Settings that LLM takes beyond its signature: it hands them on to a class of its arguments."""
    try:
        from tensorrt_llm.llmapi import llm_args
    except ImportError:
        return set()
    arguments = getattr(llm_args, "TrtLlmArgs", None) or getattr(llm_args, "LlmArgs", None)
    return set(getattr(arguments, "model_fields", None) or ())


OPENERS = {"ModelRunnerCpp": open_runner_cpp, "ModelRunner": open_runner_python, "LLM": open_llm}


def current_rank() -> int:
    """This process's rank among the engine's."""
    try:
        import tensorrt_llm

        return int(tensorrt_llm.mpi_rank())
    except (ImportError, AttributeError):
        return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
