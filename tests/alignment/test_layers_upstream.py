"""Layer by layer over every family of a real tree: each healthy model agrees in every part that is compared."""

import os

import pytest

from porting_kit.alignment.inherent import choose_differences, matched_to_library
from porting_kit.alignment.layer_parts import pair_modules
from porting_kit.alignment.layers import compare_layers
from porting_kit.alignment.reference import find_projection, reference_from_model
from porting_kit.architectures.base_config import read_base_config
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.conversion.plan import plan_conversion
from porting_kit.conversion.planned import plan_scalars
from porting_kit.conversion.tensor_source import open_tensor_source
from porting_kit.coverage.comparison import compare_context, draw_prompts
from porting_kit.coverage.matrix import RowRefused, is_before, require_expressible
from porting_kit.coverage.planned import plan_rows
from porting_kit.coverage.reference_models import make_reference, save_reference
from porting_kit.emulator import open_emulator
from porting_kit.errors import PortingKitError
from porting_kit.patching import patch_architecture
from porting_kit.source_tree import open_source_tree

SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if source]
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE names no TensorRT-LLM tree"),
]


def compare(tree, emulator, planned, folder):
    """The report of one row's unmodified model, or None where the tree cannot run it."""
    model = make_reference(planned.case)
    save_reference(planned.case, model, folder)
    base, reference = read_base_config(folder), reference_from_model(model)
    try:
        require_expressible(base, tree.release)
    except RowRefused:
        return None
    defect = planned.case.defect
    if find_projection(model) is not None or (defect is not None and is_before(tree.release, defect.until)):
        return None
    config, tensors = checkpoint_tensors(folder, dtype="float32", release=tree.release)
    plan = plan_conversion(base, open_tensor_source(folder), dtype="float32", release=tree.release)
    port = emulator.build_model({**config, "architecture": planned.arch}, tensors)
    prompts = draw_prompts(reference.vocab_size)
    _, logits = compare_context(port, reference, prompts)
    with matched_to_library(reference, choose_differences(reference, base.definition.differences, prompts, logits)):
        pairs = pair_modules(plan.tensors, reference)
        return compare_layers(port, reference, pairs, prompts[0], [], dims=plan.dims, scalars=plan_scalars(plan))


@pytest.mark.parametrize("source", SOURCES)
def test_every_part_of_every_family_agrees(source, tmp_path):
    tree = open_source_tree(source)
    emulator = open_emulator(tree)
    seen, wrong, parts = 0, [], {}
    for place, planned in enumerate(plan_rows(tree)):
        if planned.case is None or planned.position_batch or planned.arch not in tree.model_names():
            continue
        if patch_architecture(tree, planned.arch).status == "refused":
            continue
        try:
            report = compare(tree, emulator, planned, tmp_path / str(place))
        except PortingKitError as error:
            wrong.append(f"{planned.arch} {planned.text}: {error}")
            continue
        if report is None:
            continue
        seen += 1
        if report.first is not None:
            wrong.append(f"{planned.arch} {planned.text}: {report.sentence}")
        compared = {error.module.split(".", 3)[-1] for error in report.errors if ".layers." in error.module}
        parts[planned.text] = sorted(compared & {"attention.keys", "attention.context", "residual", "mlp"})
    print(f"\n{tree.release}: {seen} models, {parts}")
    assert not wrong, "\n".join(wrong)
    assert seen >= 15
    assert sum("residual" in found for found in parts.values()) > seen / 2
    assert sum("attention.keys" in found for found in parts.values()) > seen / 3
