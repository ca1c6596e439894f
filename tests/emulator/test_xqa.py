"""The real kernel's call: blocks, mask bits, lengths and scale, on a stand-in that reads them as flashinfer documents.

The kernel itself runs in the tests marked so, on a machine with a GPU and flashinfer-python.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch

from porting_kit.emulator import open_emulator
from porting_kit.emulator.xqa import KernelBuild, XqaKernel, open_xqa_kernel, pack_mask
from porting_kit.errors import EnvironmentMissing, KernelRefusal
from porting_kit.medusa.tree import read_tree
from porting_kit.releases.kernels import kernel_profile
from tests.emulator.kernel_accuracy import (
    errors,
    measure_geometry,
    reference_attention,
    tree_tensors,
    visible_rows,
)
from tests.emulator.patched import patch_model
from tests.emulator.toy_models import ToySize, build_case

BUILD = KernelBuild("0.7.4", "77039051b0be", "a stand-in", "9.0", "13.0")
HAS_KERNEL = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU and flashinfer-python (the extra gpu)")


def stand_in(q, k_cache, v_cache, table, lengths, output, scratch, counters, kv_heads, size, **options):
    """What flashinfer.xqa.xqa says it computes, row by row of the cache and bit by bit of the mask, in float64."""
    assert options["kv_layout"] == "HND"
    assert counters.dtype is torch.uint32
    assert not bool(counters.view(torch.int32).any())
    assert scratch.dtype is torch.uint8
    N = options.get("q_seq_len", 1)
    B, H, D = q.shape[0], q.shape[-2], q.shape[-1]
    queries, outputs = q.reshape(B, N, H, D), output.view(B, N, H, D)
    for b in range(B):
        length = int(lengths.view(torch.int32)[b, 0])
        places = [(int(table[b, row // size]), row % size) for row in range(length)]
        blocks, slots = (torch.tensor(part) for part in zip(*places, strict=True))
        scale = options.get("kv_scale", 1.0)
        keys, values = (
            scale * cache.float()[blocks, :, slots].double().repeat_interleave(H // kv_heads, 1)
            for cache in (k_cache, v_cache)
        )
        seen = torch.ones(N, length, dtype=torch.bool)
        for node in range(N if N > 1 else 0):
            words = options["mask"][b, node].view(torch.int16).tolist()
            for bit in range(N):
                seen[node, length - N + bit] = bool((words[bit // 16] >> (bit % 16)) & 1)
        logits = torch.einsum("nhd,lhd->hnl", queries[b].double(), keys) * options["q_scale"] / math.sqrt(D)
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
        outputs[b] = torch.einsum("hnl,lhd->nhd", weights, values).to(output.dtype)


def make_kernel(function=stand_in, tokens_per_block: int = 16) -> XqaKernel:
    return XqaKernel(function, tokens_per_block=tokens_per_block, device=torch.device("cpu"), build=BUILD)


def make_inputs(nodes: str = "small_3", pasts=(21, 5), group: int = 3, dtype: torch.dtype = torch.float16):
    torch.manual_seed(3)
    tree, _ = tree_tensors(read_tree(nodes), len(pasts), torch.device("cpu"))
    N, K, D = tree.shape[1], 2, 16
    rows = max(pasts) + N
    shapes = ((len(pasts), N, K * group, D), (len(pasts), K, rows, D), (len(pasts), K, rows, D))
    query, keys, values = (torch.randn(shape).to(dtype) for shape in shapes)
    return query, keys, values, torch.tensor(pasts)[:, None], tree


@pytest.mark.parametrize(("nodes", "group"), [("small_3", 3), ("mc_sim_7b_63", 1), ([[0]], 4)])
def test_blocks_mask_and_lengths_say_what_the_emulator_means(nodes, group):
    query, keys, values, pasts, tree = make_inputs(nodes, group=group)
    found = make_kernel()(query, keys, values, pasts, tree, 0.3)
    allowed = visible_rows(tree, pasts, keys.shape[2])
    wanted = reference_attention(query.double() * 0.3 * 4, keys.double(), values.double(), allowed, None)
    assert errors(found, wanted)["relative_error"] < 1e-3
    causal = visible_rows(torch.ones_like(tree).tril(), pasts, keys.shape[2])
    ignoring = reference_attention(query.double() * 0.3 * 4, keys.double(), values.double(), causal, None)
    assert len(tree[0]) == 2 or errors(found, ignoring)["relative_error"] > 0.03


def test_a_cache_of_eight_bits_is_stored_and_scaled():
    query, keys, values, pasts, tree = make_inputs()
    allowed = visible_rows(tree, pasts, keys.shape[2])
    for stored, scale in ((2.0**-4, 2.0**-4), (2.0**-4, 2.0**-5)):
        call = make_kernel().prepare(query, keys, values, pasts, tree, 0.25, cache_scale=stored)
        call.launch.keywords["kv_scale"] = scale
        call.launch()
        rounded = [(part / stored).to(torch.float8_e4m3fn).double() * stored for part in (keys, values)]
        wanted = reference_attention(query.double(), *rounded, allowed, None)
        gap = errors(call.output[:, 0], wanted)["relative_error"]
        assert gap < 1e-3 if stored == scale else gap > 0.1


@pytest.mark.parametrize("fault", ["mask", "table", "length", "scale"])
def test_a_wrong_word_to_the_kernel_shows(fault):
    def faulty(q, k, v, table, lengths, *rest, **options):
        if fault == "mask":
            options["mask"] = options["mask"].view(torch.int16).flip(1).view(torch.uint16)
        elif fault == "scale":
            options["q_scale"] *= 1.5
        table = table.flip(1) if fault == "table" else table
        lengths = (lengths.view(torch.int32) - 1).view(torch.uint32) if fault == "length" else lengths
        stand_in(q, k, v, table, lengths, *rest, **options)

    arguments = make_inputs()
    assert errors(make_kernel(faulty)(*arguments, 0.25), make_kernel()(*arguments, 0.25))["relative_error"] > 0.03


def test_the_mask_is_packed_in_half_words_that_fill_whole_words():
    tree = torch.zeros(1, 33, 33, dtype=torch.bool)
    tree[0, 2, [0, 15, 16, 32]] = True
    packed = pack_mask(tree)
    assert packed.shape == (1, 33, 4)
    assert packed[0, 2].view(torch.int16).tolist() == [1 - 32768, 1, 1, 0]
    assert torch.equal(packed.view(torch.int32)[0], read_words(tree[0]))


def read_words(tree: torch.Tensor) -> torch.Tensor:
    from porting_kit.medusa.tree import pack_mask as pack_words

    return pack_words(tree)


def test_rows_behind_a_sequence_are_not_zero():
    # A kernel that read past the end would otherwise go unnoticed.
    pool, table = make_kernel()._store_blocks(torch.zeros(2, 1, 1, 17, 16))
    assert bool((pool[0][table[0, 1], 0, 1:] == 1).all())
    assert table.tolist() != [[0, 1]] or len(table[0]) == 2


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.float32, 16), (torch.float16, 24), (torch.float16, 272)])
def test_what_the_kernel_does_not_have_is_refused(dtype, head_size):
    query = torch.zeros(1, 2, 2, head_size, dtype=dtype)
    keys = torch.zeros(1, 2, 4, head_size, dtype=dtype)
    with pytest.raises(KernelRefusal, match="XQA has no kernel for this"):
        make_kernel()(query, keys, keys, torch.tensor([[2]]), torch.ones(1, 2, 2, dtype=torch.bool), 1.0)


def test_a_kernel_that_does_not_compile_says_what_is_missing():
    def broken(*_, **__):
        raise RuntimeError("Ninja build failed\nlong log")

    with pytest.raises(EnvironmentMissing) as raised:
        make_kernel(broken)(*make_inputs(), 1.0)
    assert raised.value.exit_code == 3
    assert raised.value.found == "Ninja build failed"
    assert "12 nodes" in raised.value.where


def test_without_a_card_the_message_names_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentMissing, match="needs a GPU") as raised:
        open_xqa_kernel()
    assert "release:<x>" in raised.value.next_step
    with pytest.raises(KernelRefusal, match="cache block"):
        open_xqa_kernel(tokens_per_block=48)


def test_an_old_card_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    with pytest.raises(EnvironmentMissing, match="not for this card") as raised:
        open_xqa_kernel()
    assert raised.value.found == "NVIDIA A10, 8.6"


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_tree_steps_of_an_emulated_model_go_through_the_kernel(bundled, family):
    kernel = make_kernel()
    _, config, tensors = build_case(family, ToySize(hidden_size=128), dtype="float16")
    patched = patch_model(bundled, config["architecture"])
    exact, real = kernel_profile("exact"), replace(kernel_profile("xqa"), attend_tree=kernel)
    prompts, tree = [torch.arange(1, 10), torch.arange(3, 7)], read_tree("small_2")
    logits = []
    for profile in (exact, real):
        model = open_emulator(bundled, kernel=profile).build_model(config, tensors, **patched)
        cache = model.new_cache(2, 64)
        model.prefill(prompts, cache)
        nodes = (torch.arange(2 * tree.num_nodes) % 50).view(2, -1)
        output = model.decode(nodes, cache, position_offsets=tree.position_offsets, packed_mask=tree.packed_mask)
        logits.append(output.logits)
    assert kernel.calls == model.num_local_layers
    # The kernel never receives ALiBi's slopes; everything else comes out as the emulator's own arithmetic has it.
    gap = errors(logits[1], logits[0])["relative_error"]
    assert gap > 0.02 if family == "bloom" else 0 < gap < 4e-3


def test_a_step_on_the_kernel_is_never_recorded(bundled):
    from porting_kit.emulator.program import StepProgram

    _, config, tensors = build_case("llama", ToySize(hidden_size=128), dtype="float16")
    profile = replace(kernel_profile("xqa"), attend_tree=make_kernel())
    model = open_emulator(bundled, kernel=profile).build_model(
        config, tensors, **patch_model(bundled, config["architecture"])
    )
    tree, cache = read_tree("small_2"), model.new_cache(1, 32)
    model.prefill([torch.arange(1, 10)], cache)
    with pytest.raises(RuntimeError, match="called at every step"):
        StepProgram(model, cache, tree.num_nodes, 32, tree.position_offsets, tree.packed_mask)


@needs_kernel
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("group", [1, 7])
def test_the_kernel_itself_attends_to_the_tree(size, group):
    row = measure_geometry(open_xqa_kernel(), size, group, 16, 1200, torch.float16)
    assert row["relative_error"] < 1e-3
    assert row["causal_instead_of_tree"] > 0.05
