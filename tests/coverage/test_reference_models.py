"""The random models: recognised as their family, and different enough from each other to mean something."""

from __future__ import annotations

import json

import pytest
import torch

from porting_kit.architectures import load_families, read_base_config
from porting_kit.coverage.cases import CASES, WITHOUT_REFERENCE
from porting_kit.coverage.heads import NUM_HEADS, head_logits, write_fitted_heads
from porting_kit.coverage.reference_models import ModelSize, make_reference, save_reference

BY_NAME = {case.name: case for case in CASES}
UNEVEN = ["nemotron_nas, parts left out and linear", "deci, key/value heads by layer"]
PLAIN = ["grok", "arctic", "jais", "phi3_small", *UNEVEN]
FOREIGN = [case.name for case in CASES if case.rename is not None and case.size.vocab < 1000]


def test_every_family_has_a_case_or_a_reason():
    """A new family is covered unasked: without a case here, its module cannot come in unnoticed."""
    assert {case.family for case in CASES} | set(WITHOUT_REFERENCE) == set(load_families())
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "falcon 40B", "gemma", *PLAIN, *FOREIGN])
def test_a_saved_model_is_recognised_as_its_family(name, tmp_path):
    case = BY_NAME[name]
    save_reference(case, make_reference(case), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [case.class_in_config]
    assert read_base_config(tmp_path).family == case.family


def is_plain(case) -> bool:
    """A model of our own, in no transformers class."""
    return isinstance(case.make_config(case.size), ModelSize)


def test_a_reexpressed_model_says_so():
    assert all((case.relative is not None) == (case.rename is not None or is_plain(case)) for case in CASES)
    assert {case.relative for case in CASES if is_plain(case)} == {"plain PyTorch"}
    assert BY_NAME["chatglm3"].text == "chatglm3 (GLM, re-expressed)"


def test_alibi_llama_depends_on_distance_only():
    """No rotation is left: shifting a text by a prefix that nobody may see would change nothing but the distances."""
    model = make_reference(BY_NAME["baichuan2 13B, ALiBi"])
    assert not model.model.rotary_emb.inv_freq.any()
    text = torch.arange(3, 11)[None]
    order = torch.tensor([[3, 5, 4, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        last, swapped = model(input_ids=text).logits[0, -1], model(input_ids=order).logits[0, -1]
    assert not torch.allclose(last, swapped, atol=1e-3), "without any position, order would not matter"


def test_fitted_heads_say_the_tokens_they_were_fitted_to(tmp_path):
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 50, (20,), generator=generator).tolist()
    states = torch.randn(20, 64, generator=generator)
    file = write_fitted_heads([states], [text], 50, tmp_path / "heads" / "medusa_lm_head.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        head, rest = name.split(".", 1)
        place = "lm_head.weight" if rest == "1.weight" else f"medusa_layers.{rest}"
        tensors[f"medusa_heads.{head}.{place}"] = tensor
    said = head_logits(tensors, states).argmax(-1)
    for head in range(NUM_HEADS):
        assert said[head, : 18 - head].tolist() == text[head + 2 :]


def test_heads_read_the_state_before_a_projection():
    """OPT-350m: embeddings are narrower than the layers, and a port has no projection between them."""
    from porting_kit.alignment.reference import find_projection, reference_from_model

    case = BY_NAME["opt, projection in and out"]
    model = make_reference(case)
    reference = reference_from_model(model)
    (wide,), (logits,) = reference.hidden_states([[3, 4, 5]]), reference.logits([[3, 4, 5]])
    assert wide.shape[-1] == case.size.hidden_size == 2 * model.get_output_embeddings().weight.shape[1]
    assert torch.allclose(wide @ reference.output_matrix.T, logits, atol=1e-5)
    assert find_projection(make_reference(BY_NAME["opt, norms before"])) is None
