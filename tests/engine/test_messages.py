"""The catalogue of the library's messages: each recognised in a log, and each standing in the library's own sources."""

import os
from functools import lru_cache
from pathlib import Path

import pytest
from test_run import RECORDED_LOG

from porting_kit.engine.messages import CATALOGUE, read_log, read_log_lines, recognise_messages
from porting_kit.errors import CapturedFileError

EXAMPLES = {
    "no multi-query kernel": "Assertion failed: No available XQA kernels are found for speculative decoding mode.",
    "query group": "Assertion failed: numQHeadsPerKV should be power of 2 for Medusa, mNumHeads=28, mNumKVHeads=4.",
    "multi-block mode": "Assertion failed: Medusa doesn't support multi-block mode.",
    "data type": "Speculative decoding mode doesn't support the data type or cross attention.",
    "unpatched model": "TypeError: forward() got an unexpected keyword argument 'medusa_packed_mask'",
    "activation scales": "RuntimeError: Required but not provided tensors:{'lm_head.activation_scaling_factor'}",
    "missing tensors": "RuntimeError: Required but not provided tensors:{'medusa_heads.0.lm_head.weight'}",
    "surplus tensors": "[W] Provided but not expected tensors: {'medusa_heads.0.lm_head.weight'}",
    "shape mismatch": "AssertionError: The value updated is not the same shape as the original. Updated: (160, 64)",
    "unknown architecture": "KeyError: 'MedusaBloomForCausalLM'",
    "relative import": "ImportError: attempted relative import with no known parent package",
    "unknown flag": "trtllm-build: error: unrecognized arguments: --max_output_len 64",
    "context logits": "RuntimeError: Gather context logits is not support with draft len > 0.",
    "engine without Medusa": 'AssertionError: "medusa_choice is specified but model_config.max_medusa_tokens is 0."',
    "tree above the limit": "assert self.num_draft_tokens > 0 and self.num_draft_tokens <= self.max_draft_tokens",
    "session": "AssertionError: Medusa is only supported by py_session",
    "temperature": "AssertionError: Medusa should use temperature == 1.0",
    "illegal memory access": "CUDA runtime error in cudaStreamSynchronize: an illegal memory access was encountered",
    "device memory": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "TensorRT library": "ImportError: libnvinfer.so.10: cannot open shared object file",
    "no tensorrt_llm": "ModuleNotFoundError: No module named 'tensorrt_llm'",
    "heads and ranks": "AssertionError: num_attention_heads must be divisible by tp_size",
    "layers and stages": "AssertionError: num_layers 30 must be a multiple of pipeline parallelism size 4",
    "world size": "ValueError: world_size must equal to pp_size * cp_size * tp_size, but got 2 != 1 * 1 * 4",
    "auto parallel": "AssertionError: You must convert to full model with TP=1&&PP=1 to use auto parallel planner",
    "profiles and opt tokens": "RuntimeError: multiple_profiles is enabled, while opt_num_tokens is set. They are not",
    "plugin value": "AssertionError: Plugin gemm_plugin expects values in ['auto', 'float16'], got fp16",
    "streaming LLM": "AssertionError: StreamingLLM is only supported in the llama model.",
    "int8 cache with paged context": "RuntimeError: Paged Context FMHA doesn't work with int8 kv cache currently.",
    "fp8 context attention": "FP8 Paged Context FMHA only works with fp8 quantization workflow currently.",
    "unknown quantisation": "ValueError: Unsupported quant algo: W4A4",
    "smooth quant without plugin": "TypeError: Smooth Quant GEMM is only supported with plugin",
    "int4 without plugin": "TypeError: Int4 Weight-only Quant MatMul is only supported with plugin",
    "quantised experts": "ValueError: Quantization for expert parallelism is not supported",
    "weights cannot be read": "RuntimeError: Encounter error 'shape' for parameter 'lm_head.weight'",
    "shared embedding": "NotImplementedError: Embedding table cannot be shared for pipeline parallelism",
    "position kind": "ValueError: Unsupported position embedding type: yarn_2",
    "activation": "ValueError: unsupported activation function: gelu_10",
    "mode overwritten": "[W] speculative_decoding_mode is not Medusa for Medusa model. Overwriting",
    "long positions": "[W] max_seq_len 4096 is larger than max_position_embeddings 2048 * rotary scaling 1, the model",
    "input clipped": "[W] max_input_len is 4096 is larger than max_seq_len 2048, clipping it to max_seq_len",
    "build failed": "AssertionError: Engine building failed, please check error log.",
    "rank count": "RuntimeError: Engine world size (2 * 1) != Runtime world size (1)",
    "rank count in C++": "[TensorRT-LLM][ERROR] Assertion failed: MPI size 1 != TP size 2 * PP size 1",
    "tensors of the engine": "Tensor names in engine are not the same as expected, to use this Generation",
    "batch above the limit": "RuntimeError: Input batch size (16) exceeds the engine or specified limit (8)",
    "prompt above the limit": "Maximum input length (900) + maximum new tokens (200) exceeds the engine or",
    "beams": "AssertionError: Medusa should use num_beams == 1",
    "step failed": "RuntimeError: Executing TRT engine failed step=3!",
    "streaming": "RuntimeError: Streaming is not supported in C++ session.",
    "profiles": "AssertionError: Python runtime only support 1 or 2 optimization profiles, set --multiple_profiles",
    "no card": "AssertionError: GPU is required for inference.",
    "engine file": "[TensorRT-LLM][ERROR] Assertion failed: Error opening engine file: engine/rank0.engine",
    "engine of another TensorRT": "Error Code 1: The engine plan file is not compatible "
    "with this version of TensorRT, expecting library version 10.0.1 got 9.2.0",
    "engine of another card": "[W] Using an engine plan file across different models of devices; incompatible device",
    "kernel code path": "[TensorRT-LLM][ERROR] Assertion failed: Medusa should take XQA Precompiled codepath.",
    "heads and groups": "Assertion failed: mNumHeads should be multiples of mNumKVHeads.",
    "Medusa fields of the engine": "Both num_medusa_heads and max_draft_len have to be provided for Medusa model",
    "tree deeper than the heads": "Assertion failed: Choices require larger maxPathLen than the engine was built with.",
    "Medusa buffers": "[TensorRT-LLM][ERROR] Assertion failed: Draft ids must be provided for MedusaDecoding",
    "drafts above the limit": "Draft tokens length (56) exceeds maximum draft tokens length (0).",
    "tensor outside its range": "Tensor 'input_ids' has invalid shape (9000), expected in range min (1), max (8192)",
    "packed input": "Assertion failed: Padding removal requires max_num_tokens to be set.",
    "output shortened": "[W] Prompt length + number of requested output tokens + draft tokens per step (9 + 9 + 9) "
    "exceeds maximum sequence length (20). Number of requested output tokens is changed to (2).",
}


def test_every_message_of_the_catalogue_has_an_example():
    assert set(EXAMPLES) == {message.name for message in CATALOGUE}


def test_there_are_more_than_thirty_messages_of_the_library_itself():
    assert sum(bool(message.literals) for message in CATALOGUE) >= 30


@pytest.mark.parametrize(("name", "line"), EXAMPLES.items())
def test_messages_are_recognised_as_themselves(name, line):
    (found,) = recognise_messages(["unrelated", line, line])
    assert (found.message.name, found.line_number) == (name, 2)
    assert found.message.cause
    assert found.message.next_step


def test_ordinary_lines_are_no_messages():
    assert recognise_messages(RECORDED_LOG.splitlines()) == ()


class TestLogs:
    """Whole logs, from anywhere, cut anywhere."""

    def test_a_finished_build(self):
        reading = read_log_lines(RECORDED_LOG.splitlines())
        assert (reading.is_complete, reading.summary, reading.next_step) == (True, "the build finished", None)
        assert reading.release == "0.11.0.dev2024062500"

    def test_a_log_cut_in_the_middle_says_how_far_it_got(self, tmp_path):
        whole = RECORDED_LOG.encode()
        for length in range(1, len(whole) - 1, 7):
            (tmp_path / "cut.log").write_bytes(whole[:length])
            reading = read_log(tmp_path / "cut.log")
            assert "breaks off" in reading.summary or reading.is_complete
            assert reading.messages == ()
        reading = read_log_lines(RECORDED_LOG.splitlines()[:4])
        assert reading.phases[-1] == "engine built"
        assert "after 'engine built'" in reading.summary
        assert "dmesg" in reading.next_step

    def test_an_unknown_exception_is_no_log_that_breaks_off(self):
        start = RECORDED_LOG.splitlines()[:1]
        end = [
            "Traceback (most recent call last):",
            '  File "a.py", line 3, in build',
            "    x['type']",
            "KeyError: 'type'",
        ]
        reading = read_log_lines([*start, *end])
        assert "KeyError: 'type' (line 5)" in reading.summary
        assert "traceback" in reading.next_step
        assert read_log_lines([*start, end[-1]]).exception is None

    def test_a_cut_behind_the_message_still_names_it(self, tmp_path):
        text = RECORDED_LOG.splitlines()[0] + "\n" + EXAMPLES["unpatched model"] + "\nTraceb"
        (tmp_path / "build.log").write_text(text)
        assert read_log(tmp_path / "build.log").summary.startswith("unpatched model, line 2")

    def test_bytes_that_are_no_text_do_not_hide_a_message(self, tmp_path):
        (tmp_path / "build.log").write_bytes(b"\xff\xfe progress\r\n" + EXAMPLES["build failed"].encode())
        assert read_log(tmp_path / "build.log").summary.startswith("build failed")

    @pytest.mark.parametrize(
        ("content", "said"),
        [(b"", "empty"), (b" \n", "empty"), (b"\x00\x01engine", "no log"), (None, "does not exist")],
    )
    def test_files_that_are_no_logs(self, tmp_path, content, said):
        if content is not None:
            (tmp_path / "build.log").write_bytes(content)
        with pytest.raises(CapturedFileError, match=said):
            read_log(tmp_path / "build.log")


def trees():
    return [Path(root) for root in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if root]


@lru_cache(maxsize=1)
def read_sources():
    """Everything the given trees say: Python and C++, string literals that are broken over lines joined."""
    texts = []
    for root in trees():
        for folder in ("tensorrt_llm", "examples", "cpp"):
            for file in (root / folder).rglob("*"):
                if file.suffix in (".py", ".cpp", ".h") and "cubin" not in str(file):
                    texts.append(file.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts)


def has_cpp():
    return any((root / "cpp").is_dir() for root in trees())


@pytest.mark.upstream
@pytest.mark.skipif(not trees(), reason="TRTLLM_SOURCE names no TensorRT-LLM checkout")
@pytest.mark.parametrize("message", [entry for entry in CATALOGUE if entry.literals], ids=lambda entry: entry.name)
def test_the_message_stands_in_the_library_s_sources(message):
    if any(part in message.source for part in (".cpp", ".h")) and ".py" not in message.source and not has_cpp():
        pytest.skip("none of the trees has its C++ sources")
    assert any(literal in read_sources() for literal in message.literals)
