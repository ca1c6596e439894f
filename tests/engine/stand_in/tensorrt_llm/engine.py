"""What an engine file of the stand-in is: where the checkpoint and the patched class are; run by the emulator."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from porting_kit.emulator import open_emulator
from porting_kit.medusa.decoding import generate_greedy, generate_medusa
from porting_kit.medusa.tree import read_tree
from porting_kit.releases.kernels import kernel_profile
from porting_kit.source_tree import open_source_tree

FAULT = os.environ.get("STAND_IN_FAULT", "")
REFUSAL = (
    "RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: No available XQA kernels are found for speculative decoding "
    "mode. (/src/tensorrt_llm/cpp/tensorrt_llm/plugins/gptAttentionCommon/gptAttentionCommon.cpp:1445)"
)


class Engine:
    """An opened engine: decodes batches, with the fault that STAND_IN_FAULT names."""

    def __init__(self, folder, choices):
        content = json.loads((Path(folder) / "rank0.engine").read_text())
        self.config = json.loads((Path(folder) / "config.json").read_text())
        kernel = kernel_profile("exact")
        if FAULT == "alibi":
            kernel = replace(kernel, name="exact without ALiBi", alibi_in_generation=False)
        emulator = open_emulator(open_source_tree("bundled"), kernel=kernel)
        self.model = emulator.load_checkpoint(
            Path(content["checkpoint"]), module_file=Path(content["module_file"]), class_name=content["class_name"]
        )
        if FAULT == "causal mask":
            self.model = CausalTree(self.model)
        self.tree = None if choices is None else read_tree([list(path) for path in choices])
        self.build_config = self.config["build_config"]
        if self.tree is not None and self.tree.num_drafts > self.build_config["max_draft_len"]:
            raise AssertionError("num_draft_tokens <= self.max_draft_tokens")

    def decode(self, prompts, max_new_tokens, end_id):
        """Greedy answers of one call."""
        if FAULT == "refuse":
            raise RuntimeError(REFUSAL)
        if FAULT == "abort":
            print(REFUSAL, flush=True)
            os._exit(134)
        if FAULT == "second sequence" and len(prompts) > 1:
            raise RuntimeError("CUDA runtime error in cudaStreamSynchronize: an illegal memory access was encountered")
        if len(prompts) > self.build_config["max_batch_size"]:
            raise RuntimeError(f"Input batch size ({len(prompts)}) exceeds the engine or specified limit")
        ends = [] if end_id is None or end_id < 0 else [end_id]
        options = {"keep_logits": True}
        if self.tree is None:
            found = generate_greedy(self.model, prompts, max_new_tokens, ends, **options)
        else:
            found = generate_medusa(self.model, self.tree, prompts, max_new_tokens, ends, **options)
        if FAULT == "mixed rows" and len(prompts) > 1:
            found.tokens[0], found.tokens[1] = found.tokens[1], found.tokens[0]
        return found


class CausalTree:
    """Every node sees all nodes before it, as if the tree were a chain."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def decode(self, tokens, cache, *, position_offsets=None, packed_mask=None):
        if packed_mask is not None:
            nodes = tokens.shape[1]
            assert nodes <= 31, "this fault is written for one word a row"
            rows = torch.tensor([(1 << (row + 1)) - 1 for row in range(nodes)], dtype=torch.int32)
            packed_mask = rows[:, None].expand(packed_mask.shape[-2:]).expand(packed_mask.shape)
        return self.model.decode(tokens, cache, position_offsets=position_offsets, packed_mask=packed_mask)


print(f"[TensorRT-LLM] TensorRT-LLM version: {os.environ['STAND_IN_RELEASE']}", file=sys.stderr)
