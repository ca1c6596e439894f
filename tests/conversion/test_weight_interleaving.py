"""Weight-only checkpoints of upstream's own converters: read back from every layout they store weights in.

`store` builds a layout element by element from its description, without the code that takes it apart. The module's
inverse was also checked once against the function of a 1.x release, whose text this repository does not hold.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.conversion.quantised import find_faults
from porting_kit.conversion.quantised_files import read_quantised
from porting_kit.conversion.weight_interleaving import LAYOUTS, StoredLayout, undo_interleaving
from porting_kit.errors import CheckpointError
from porting_kit.outcomes import Verdict
from porting_kit.steps.quantised import check_quantised
from tests.conversion.test_quantised import QUANTISED, base, plain  # noqa: F401 (fixtures)

INPUTS, OUTPUTS = 128, 24


def place_of(row, column, layout: StoredLayout, bits):
    """Where the number of (input row, output column) lies among the stored elements of a matrix INPUTS x OUTPUTS."""
    block = 16 if bits == 8 else 32
    inside = row % block
    if layout.permuted:  # pairs of inputs of the 8-row fragments stand side by side
        pair, half = inside % 8 // 2, inside // 8
        inside = pair * (block // 4) + half * 2 + inside % 2
    row = row // block * block + inside
    if layout.tiled:
        together = 16 // bits
        tile = (column // together * (INPUTS // 64) + row // 64) * together + column % together
        place = tile * 64 + row % 64
    else:
        place = column * INPUTS + row
    if layout.permuted:  # the order inside a 32-bit word
        word, element = divmod(place, 32 // bits)
        order = {8: (0, 2, 1, 3), 4: (0, 4, 1, 5, 2, 6, 3, 7)}[bits]
        place = word * (32 // bits) + order[element]
    return place


def store(numbers, layout, bits):
    """int8 [in, out * bits / 8] from whole numbers [in, out]."""
    elements = torch.zeros(numbers.numel(), dtype=torch.int16)
    bias = 1 << (bits - 1) if layout.permuted else 0
    for row in range(INPUTS):
        for column in range(OUTPUTS):
            value = (int(numbers[row, column]) + bias) % (1 << bits)
            elements[place_of(row, column, layout, bits)] = value
    if bits == 4:
        elements = elements[0::2] | (elements[1::2] << 4)
    return elements.to(torch.uint8).view(torch.int8).reshape(INPUTS, OUTPUTS * bits // 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_number_comes_back_to_its_place(layout, bits):
    limit = 1 << (bits - 1)
    numbers = torch.randint(-limit, limit, (INPUTS, OUTPUTS), generator=torch.Generator().manual_seed(bits))
    stored = store(numbers, layout, bits)
    assert torch.equal(undo_interleaving(stored, layout, bits=bits), numbers.T.to(torch.int8))
    others = [other for other in LAYOUTS if other is not layout]
    assert not any(torch.equal(undo_interleaving(stored, other, bits=bits), numbers.T) for other in others)


def test_sizes_that_a_layout_cannot_have_are_refused():
    with pytest.raises(CheckpointError, match="sizes that its layout cannot have"):
        undo_interleaving(torch.zeros(40, 8, dtype=torch.int8), LAYOUTS[0], bits=8)


def interleave(numbers, layout, bits):
    """`store` for any size, by whole-tensor steps."""
    block, word = (16, 4) if bits == 8 else (32, 8)
    order = torch.tensor(
        [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
        if bits == 8
        else [8 * half + 2 * pair + one for pair in range(4) for half in range(4) for one in range(2)]
    )
    inputs, outputs = numbers.shape
    columns = numbers.T.to(torch.int16)
    if layout.permuted:
        columns = columns.reshape(outputs, -1, block)[:, :, order].reshape(outputs, inputs)
    if layout.tiled:
        together = 16 // bits
        columns = columns.reshape(outputs // together, together, inputs // 64, 64).transpose(1, 2)
    elements = columns.reshape(-1)
    if layout.permuted:
        inner = [0, 2, 1, 3] if bits == 8 else [0, 2, 4, 6, 1, 3, 5, 7]
        elements = elements.reshape(-1, word)[:, inner].reshape(-1) + (1 << (bits - 1))
    elements = elements % (1 << bits)
    if bits == 4:
        elements = elements[0::2] | (elements[1::2] << 4)
    return elements.to(torch.uint8).view(torch.int8).reshape(inputs, outputs * bits // 8)


def quantise_upstream(plain, folder, algorithm, layout):  # noqa: F811
    """A weight-only checkpoint as upstream's converters write it."""
    bits = 8 if algorithm == "W8A16" else 4
    tensors = load_file(plain / "rank0.safetensors")
    for name in [name for name in tensors if name.endswith(".weight") and name.split(".")[-2] in QUANTISED]:
        weight = tensors[name].float().T
        limit = 1 << (bits - 1)
        scale = weight.abs().amax(0) / limit
        numbers = (weight / scale).round().clamp(-limit, limit - 1)
        tensors[name] = interleave(numbers, layout, bits)
        tensors[f"{name.removesuffix('.weight')}.per_channel_scale"] = scale.half()
    folder.mkdir()
    save_file(tensors, folder / "rank0.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization"] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("bits", [8, 4])
def test_the_two_ways_to_store_agree(bits):
    limit = 1 << (bits - 1)
    numbers = torch.randint(-limit, limit, (INPUTS, OUTPUTS), generator=torch.Generator().manual_seed(bits))
    for layout in LAYOUTS:
        assert torch.equal(interleave(numbers, layout, bits), store(numbers, layout, bits)), layout


@pytest.mark.parametrize("algorithm", ["W8A16", "W4A16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_layout_is_told_by_the_base_and_the_weights_are_its(base, plain, tmp_path, algorithm, layout):  # noqa: F811
    folder = quantise_upstream(plain, tmp_path / "q", algorithm, layout)
    assert find_faults(read_quantised(folder)) == ()
    result = check_quantised(folder, base=base, dequantised=tmp_path / "twin")
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    twin, wanted = load_file(tmp_path / "twin" / "rank0.safetensors"), checkpoint_tensors(base, dtype="float16")[1]
    assert set(twin) == set(wanted)
    name = "transformer.layers.1.mlp.proj.weight"
    error = (twin[name].float() - wanted[name].float()).norm() / wanted[name].float().norm()
    assert 1e-4 < error < (0.02 if algorithm == "W8A16" else 0.2)


def test_without_a_base_interleaved_weights_are_checked_and_not_read_back(plain, tmp_path):  # noqa: F811
    folder = quantise_upstream(plain, tmp_path / "q", "W8A16", LAYOUTS[0])
    assert check_quantised(folder).outcome.verdict is Verdict.PASS
    with pytest.raises(CheckpointError, match="interleaved for a card") as caught:
        check_quantised(folder, dequantised=tmp_path / "twin")
    assert "--base" in caught.value.next_step
    assert not (tmp_path / "twin").exists()


def test_weights_of_another_base_fit_no_layout(base, plain, tmp_path):  # noqa: F811
    folder = quantise_upstream(plain, tmp_path / "q", "W8A16", LAYOUTS[0])
    tensors = load_file(folder / "rank0.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name in [name for name in tensors if tensors[name].dtype == torch.int8]:
        tensors[name] = torch.randint(-128, 128, tensors[name].shape, generator=generator).to(torch.int8)
    save_file(tensors, folder / "rank0.safetensors")
    with pytest.raises(CheckpointError, match="in none of the layouts"):
        check_quantised(folder, base=base)
