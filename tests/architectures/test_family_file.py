"""A family in a file of the user's: the how-to page's own example, run from the page, and the mistakes it speaks of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from porting_kit.architectures import find_family, load_families, use_family_file
from porting_kit.architectures.family import EXTRA_FAMILIES
from porting_kit.conversion import convert_checkpoint
from porting_kit.conversion.plan import MissingTensors, SurplusTensors
from porting_kit.errors import BaseModelError

PAGE = Path(__file__).parents[2] / "notebooks" / "howto" / "a_family_nobody_listed.md"
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 96, "vocab_size": 120, "max_position_embeddings": 256, "head_dim": 16}


@pytest.fixture(autouse=True)
def forget_families():
    """What one test makes known, another must not find."""
    yield
    EXTRA_FAMILIES.clear()
    load_families.cache_clear()


def write_family(folder: Path, *edits: tuple[str, str]) -> Path:
    """The page's example as a file, with edits."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    file = folder / "seed_oss.py"
    file.write_text(source, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random Seed-OSS and its heads, as their users have them."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "SeedOssConfig"):
        pytest.skip("this transformers has no Seed-OSS")
    from porting_kit.coverage.reference_models import randomise_weights

    folder = tmp_path_factory.mktemp("seed")
    config = transformers.SeedOssConfig(**SIZES, eos_token_id=2, pad_token_id=1, bos_token_id=0)
    reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomise_weights(reference.requires_grad_(False))
    reference.save_pretrained(folder / "base")
    heads = {f"{h}.0.linear.weight": torch.zeros(64, 64) + 0.01 * torch.eye(64) for h in range(2)}
    heads |= {f"{h}.0.linear.bias": torch.zeros(64) for h in range(2)}
    heads |= {f"{h}.1.weight": 0.1 * torch.randn(120, 64) for h in range(2)}
    (folder / "heads").mkdir()
    save_file(heads, folder / "heads" / "medusa_lm_head.safetensors")
    return folder


def test_the_package_does_not_have_the_family_of_the_example():
    assert "seed_oss" not in load_families()
    with pytest.raises(BaseModelError, match="no known model family") as caught:
        find_family({"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"})
    assert "architecture_file" in caught.value.next_step


def align(model: Path, folder: Path, family_file: Path):
    from porting_kit.steps.align import align_port
    from porting_kit.steps.context import open_port_run
    from porting_kit.steps.convert import convert_port
    from porting_kit.steps.patch import patch_port
    from porting_kit.steps.preflight import preflight_port

    port = {"name": "seed", "base": str(model / "base"), "heads": str(model / "heads"), "dtype": "float32"}
    port |= {"architecture_file": str(family_file), "tree": [[0], [0, 0], [1]]}
    port |= {"alignment": {"new_tokens": 8}}
    file = folder / "port.yaml"
    file.write_text(yaml.safe_dump(port), encoding="utf-8")
    run = open_port_run(file, run_folder=folder / "run")
    for step in (preflight_port, patch_port, convert_port):
        step(run)
    return align_port(run)


def test_a_wrong_name_is_told_with_the_nearest_one(model, tmp_path):
    file = write_family(tmp_path, ('gated_mlp(f"{LAYER}.mlp")', 'gated_mlp(f"{LAYER}.mlpp")'))
    use_family_file(file)
    with pytest.raises(MissingTensors) as caught:
        convert_checkpoint(model / "base", tmp_path / "out", dtype="float32")
    assert any("nearest in the source: model.layers.0.mlp.gate_proj.weight" in item for item in caught.value.items)
    assert not (tmp_path / "out").exists()


def test_a_tensor_without_a_rule_is_told(model, tmp_path):
    use_family_file(write_family(tmp_path, ('        *norm("model.norm", "transformer.ln_f", pipeline="last"),\n', "")))
    with pytest.raises(SurplusTensors, match="have no place"):
        convert_checkpoint(model / "base", tmp_path / "out", dtype="float32")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FAMILY = 3\n", "defines no family"),
        ("x = 1\n", "defines no family"),
        ("import nowhere\n", "cannot be executed"),
        ("raise SystemExit(0)\n", "cannot be executed"),
        ("def (:\n", "cannot be executed"),
        ("from porting_kit.architectures.families.llama import FAMILY\n", "has already"),
    ],
)
def test_files_that_are_no_family_are_refused(text, said, tmp_path):
    file = tmp_path / "family.py"
    file.write_text(text)
    with pytest.raises(BaseModelError, match=said) as caught:
        use_family_file(file)
    assert str(file) in str(caught.value)
    assert not EXTRA_FAMILIES


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(BaseModelError, match="no such family file"):
        use_family_file(tmp_path / "gone.py")


def test_a_file_may_be_named_again_after_a_change(tmp_path):
    first = use_family_file(write_family(tmp_path))
    second = use_family_file(write_family(tmp_path, ('"residual_dropout",', '"residual_dropout", "pretraining_tp",')))
    assert load_families()["seed_oss"] is second is not first


@pytest.mark.slow
def test_the_example_of_the_page_aligns(model, tmp_path):
    result = align(model, tmp_path, write_family(tmp_path))
    assert result.outcome.verdict.value == "pass", result.outcome.summary
    assert "architecture file" in open_run_inputs(tmp_path)


def open_run_inputs(folder: Path) -> dict[str, str]:
    from porting_kit.steps.context import open_port_run

    return open_port_run(folder / "port.yaml", run_folder=folder / "run").inputs("convert")


@pytest.mark.slow
def test_swapped_branches_are_found_in_the_mlp_of_the_first_layer(model, tmp_path):
    swapped = 'gated_mlp(f"{LAYER}.mlp", names=("up_proj", "gate_proj", "down_proj"))'
    result = align(model, tmp_path, write_family(tmp_path, ('gated_mlp(f"{LAYER}.mlp")', swapped)))
    assert result.outcome.verdict.value == "fail"
    assert result.outcome.figures["cause"]["name"] == "gate and up projections of the MLP swapped"
    assert "first parts from the base at transformer.layers.0.mlp.proj" in result.outcome.figures["cause"]["verdict"]
    page = PAGE.read_text(encoding="utf-8")
    assert "transformer.layers.0.mlp.proj" in page
    assert "gate and up projections of the MLP swapped" in page
