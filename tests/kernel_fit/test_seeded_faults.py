"""Every gate and every transform has a test in which a planted fault shows; a new one must be given its own here."""

from __future__ import annotations

import importlib
import inspect

import pytest

from porting_kit.kernel_fit.fit import TRANSFORMS
from porting_kit.releases import port_gates, resources

# transform -> the tests in which damaging what it does makes the comparison with the base fail
TRANSFORM_FAULTS = {
    "fold_scale": ("test_exact_transforms.test_folded_scale_gives_the_same_logits",),
    "truncate_heads": ("test_truncation.test_activations_of_another_model_lose_more",),
    "write_positions": (
        "test_written_positions.test_a_fault_in_the_patched_source_shows",
        "test_written_positions.test_without_the_trees_depths_the_nodes_are_wrong",
        "test_written_positions.test_lost_slopes_show",
    ),
    "fold_alibi": (
        "test_alibi.test_dropping_alibi_is_far_outside",
        "test_alibi.test_wrong_base_is_far_outside",
    ),
    "pad_head_size": (
        "test_exact_transforms.test_forgotten_query_factor_would_be_seen",
        "test_exact_transforms.test_rotary_share_left_as_it_was_would_be_seen",
    ),
    "pad_query_groups": ("test_exact_transforms.test_zero_heads_in_the_wrong_place_would_be_seen",),
}
# gate of the port -> the test in which a bad port does not pass it; the kernel gates have theirs in test_kernels.py
GATE_FAULTS = {
    "tensor_parallel_gate": "test_tensor_parallel_sizes_divide_heads_and_list_the_possible_ones",
    "pipeline_parallel_gate": "test_pipeline_sizes",
    "vocabulary_gate": "test_vocabulary",
    "tree_gate": "test_tree_against_heads_and_limit",
    "dtype_gate": "test_dtype_change",
    "position_gate": "test_position_kinds_by_release",
    "length_gate": "test_lengths",
    "max_num_tokens_gate": "test_tokens_of_one_step",
    "batch_gate": "test_batches_in_releases_with_the_python_session_only",
    "model_class_gate": "test_a_fault_of_the_model_class_is_silent_and_names_the_release_without_it",
    "model_need_gate": "test_what_a_release_cannot_express_is_refused",
    "window_gate": "test_a_window_that_sequences_outgrow_is_silent",
    "memory_gate": "test_memory_and_disk_estimates_refuse_what_does_not_fit",
    "disk_gate": "test_memory_and_disk_estimates_refuse_what_does_not_fit",
}


def test_every_transform_has_a_planted_fault():
    assert set(TRANSFORM_FAULTS) == set(TRANSFORMS)


@pytest.mark.parametrize("place", [place for places in TRANSFORM_FAULTS.values() for place in places])
def test_the_transforms_tests_are_there(place):
    module, name = place.split(".")
    assert callable(getattr(importlib.import_module(f"tests.kernel_fit.{module}"), name))


def test_every_gate_of_a_port_has_a_planted_fault():
    gates = {
        name
        for module in (port_gates, resources)
        for name, function in vars(module).items()
        if name.endswith("_gate") and inspect.isfunction(function) and function.__module__ == module.__name__
    }
    assert set(GATE_FAULTS) == gates
    tests = importlib.import_module("tests.releases.test_port_gates")
    assert [name for name in GATE_FAULTS.values() if not callable(getattr(tests, name, None))] == []
