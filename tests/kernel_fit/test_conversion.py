"""A fit on its way through a conversion: shapes, ranks, accounts, config, and what is on the disk."""

import json

import pytest
import torch
from safetensors.torch import load_file

from porting_kit.conversion import convert_checkpoint
from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.fit import apply_fit, require_length
from porting_kit.kernel_fit.plan import plan_fit
from porting_kit.releases.kernels import kernel_profile
from tests.emulator.toy_models import ToySize, make_reference
from tests.kernel_fit.fitted_models import shape_of

GROUPS_RELEASE = "0.9.0.dev2024022700"
SIZES = {
    "bloom": ToySize(hidden_size=256, heads=4, kv_heads=4),
    "llama": ToySize(hidden_size=6 * 64, heads=6, kv_heads=2),
}


@pytest.fixture(scope="module", params=SIZES)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_reference(request.param, SIZES[request.param]).save_pretrained(folder / "base")
    plain = convert_checkpoint(folder / "base", folder / "plain", dtype="float32")
    tensors = load_file(folder / "plain" / "rank0.safetensors")
    profile = kernel_profile(f"release:{GROUPS_RELEASE}")
    plan = plan_fit(shape_of(plain.config), profile, config=plain.config)
    return folder, plain, tensors, plan


def test_streamed_fit_equals_the_pure_functions(saved):
    folder, plain, tensors, plan = saved
    fitted = apply_fit(plan, plain.config, tensors)
    outcome = convert_checkpoint(folder / "base", folder / "one", dtype="float32", fit=plan.for_conversion())
    written = load_file(folder / "one" / "rank0.safetensors")
    assert set(written) == set(fitted.tensors)
    assert all(torch.equal(written[name], fitted.tensors[name]) for name in written)
    config = json.loads((folder / "one" / "config.json").read_text())
    assert config == json.loads(json.dumps(fitted.config))
    assert outcome.verified == len(outcome.targets)


def test_ranks_are_cut_along_the_fitted_heads(saved):
    folder, _, _, plan = saved
    convert_checkpoint(folder / "base", folder / "whole", dtype="float32", fit=plan.for_conversion())
    convert_checkpoint(folder / "base", folder / "two", dtype="float32", tp_size=2, fit=plan.for_conversion())
    whole = load_file(folder / "whole" / "rank0.safetensors")
    parts = [load_file(folder / "two" / f"rank{rank}.safetensors") for rank in range(2)]
    shape, name = plan.fitted, "transformer.layers.0.attention.qkv.weight"
    rows = [heads * shape.head_size for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)]
    blocks = [part[name].split([size // 2 for size in rows]) for part in parts]
    joined = torch.cat([torch.cat([first, second]) for first, second in zip(*blocks, strict=True)])
    assert torch.equal(joined, whole[name])
    dense = "transformer.layers.0.attention.dense.weight"
    assert torch.equal(torch.cat([part[dense] for part in parts], 1), whole[dense])


def test_account_names_the_fit(saved):
    folder, _, _, plan = saved
    outcome = convert_checkpoint(folder / "base", folder / "table", dtype="float32", fit=plan.for_conversion())
    rows = {row.target: row for row in outcome.field_table if row.note.startswith("kernel fit")}
    assert rows["head_size"].value == 128
    assert "kernel_fit" in rows
    assert {target.name for target in outcome.targets if target.origin == "fitted"} >= {
        "transformer.layers.0.attention.qkv.weight",
        "transformer.layers.1.attention.dense.weight",
    }


def test_damaged_fitted_tensor_is_seen(saved, monkeypatch):
    from porting_kit.conversion.checkpoint import RankFile

    folder, _, _, plan = saved
    write = RankFile.write

    def damage(self, name, tensor, place=0):
        write(self, name, tensor + 1 if name.endswith("layers.1.attention.dense.weight") else tensor, place)

    monkeypatch.setattr(RankFile, "write", damage)
    with pytest.raises(ConversionError, match="not what the kernel fit made"):
        convert_checkpoint(folder / "base", folder / "damaged", dtype="float32", fit=plan.for_conversion())


def test_only_the_attention_is_made_whole(saved, monkeypatch):
    """All else is streamed by rows, as without a fit."""
    from porting_kit.conversion import convert, spans

    folder, _, _, plan = saved
    whole, streamed = [], []
    build, write = convert.iterate_targets, spans.SpanMaker.write

    def watch(chosen, *rest):
        whole.extend(planned.target for planned in chosen.tensors)
        return build(chosen, *rest)

    monkeypatch.setattr(convert, "iterate_targets", watch)
    monkeypatch.setattr(spans.SpanMaker, "write", lambda self, span, to: streamed.append(span) or write(self, span, to))
    again = convert_checkpoint(folder / "base", folder / "again", dtype="float32", fit=plan.for_conversion())
    assert whole
    assert all(".attention." in name for name in whole)
    assert {span.planned.target for span in streamed if span.rows is not None} >= {"lm_head.weight"}
    assert not {span.planned.target for span in streamed} & set(whole)
    assert again.verified == len(again.targets)


def test_fit_of_another_model_is_refused(saved):
    folder, plain, _, _ = saved
    shape = shape_of({**plain.config, "num_attention_heads": 12, "num_key_value_heads": 4})
    plan = plan_fit(shape, kernel_profile(f"release:{GROUPS_RELEASE}"))
    with pytest.raises(ConversionError, match="planned for another model"):
        convert_checkpoint(folder / "base", folder / "other", dtype="float32", fit=plan.for_conversion())


def test_sequences_beyond_the_fit_are_refused(saved):
    from porting_kit.errors import CheckpointError

    _, plain, tensors, plan = saved
    config = apply_fit(plan, plain.config, tensors).config
    require_length(plain.config, 10**6)
    if plan.length_tokens is None:
        require_length(config, 10**6)
        return
    require_length(config, plan.length_tokens)
    with pytest.raises(CheckpointError, match="longer than the kernel fit reaches"):
        require_length(config, plan.length_tokens + 1)
