"""The gates that are not about kernels: each passes on a good port and fails on its seeded fault."""

from types import SimpleNamespace

import pytest

from porting_kit.errors import PortFileError
from porting_kit.releases.facts import find_release_facts
from porting_kit.releases.port_gates import (
    batch_gate,
    dtype_gate,
    length_gate,
    max_num_tokens_gate,
    model_class_gate,
    model_need_gate,
    pipeline_parallel_gate,
    position_gate,
    tensor_parallel_gate,
    tree_gate,
    vocabulary_gate,
    window_gate,
)
from porting_kit.releases.resources import (
    GIB,
    count_parameters,
    disk_gate,
    estimate_memory,
    kv_bytes_per_token,
    memory_gate,
)
from porting_kit.releases.shape import attention_shape, find_sliding_layers, read_compute_capability


def position(kind, scaling, release):
    return position_gate(
        position_kind=kind, rope_scaling=scaling, facts=find_release_facts(release), release=release
    ).verdict


def test_tensor_parallel_sizes_divide_heads_and_list_the_possible_ones():
    good = tensor_parallel_gate(tp_size=4, query_heads=28, kv_heads=4, intermediate_size=18944)
    assert good.verdict == "pass"
    bad = tensor_parallel_gate(tp_size=3, query_heads=28, kv_heads=4, intermediate_size=18944)
    assert bad.verdict == "refused"
    assert bad.remedy == "possible sizes: 1, 2, 4"


def test_key_value_heads_may_be_replicated_but_not_cut():
    assert tensor_parallel_gate(tp_size=8, query_heads=8, kv_heads=2, intermediate_size=64).verdict == "pass"
    assert tensor_parallel_gate(tp_size=4, query_heads=12, kv_heads=3, intermediate_size=64).verdict == "refused"


def test_the_mlp_width_must_divide_too():
    assert tensor_parallel_gate(tp_size=4, query_heads=8, kv_heads=8, intermediate_size=66).verdict == "refused"


@pytest.mark.parametrize(("size", "verdict"), [(1, "pass"), (2, "silent"), (3, "refused")])
def test_pipeline_sizes(size, verdict):
    assert pipeline_parallel_gate(pp_size=size, num_layers=32).verdict == verdict


@pytest.mark.parametrize(
    ("vocab", "tp", "rows", "verdict"),
    [(160, 2, None, "pass"), (161, 2, 161, "mended"), (161, 2, 162, "mended"), (161, 2, 160, "refused")],
)
def test_vocabulary(vocab, tp, rows, verdict):
    assert vocabulary_gate(vocab_size=vocab, tp_size=tp, head_rows=rows).verdict == verdict


@pytest.mark.parametrize(
    ("drafts", "depth", "heads", "limit", "words"),
    [
        (63, 4, 4, 63, None),
        (63, 5, 4, 63, "needs head 5"),
        (63, 4, 4, 15, "48 nodes too many"),
        (63, 4, 4, 0, "without the Medusa mode"),
    ],
)
def test_tree_against_heads_and_limit(drafts, depth, heads, limit, words):
    gate = tree_gate(num_drafts=drafts, depth=depth, num_heads=heads, max_draft_len=limit)
    assert gate.verdict == ("pass" if words is None else "refused")
    assert words is None or words in gate.effect


def test_dtype_change():
    assert dtype_gate(source_dtype="bfloat16", dtype="bfloat16").verdict == "pass"
    assert dtype_gate(source_dtype="bfloat16", dtype="float16").verdict == "silent"
    assert dtype_gate(source_dtype="float32", dtype="float16", largest_weight=7e4).verdict == "refused"
    assert dtype_gate(source_dtype="float32", dtype="float16", largest_weight=6e4).verdict == "pass"


def test_position_kinds_by_release():
    assert position("rope_gpt_neox", None, "0.8.0") == "pass"
    assert position("long_rope", {"type": "su"}, "0.9.0") == "refused"
    assert position("long_rope", {"type": "longrope"}, "0.11.0") == "pass"
    assert position("rope_gpt_neox", {"rope_type": "llama3"}, "0.11.0.dev2024062500") == "refused"
    assert position("rope_gpt_neox", {"rope_type": "llama3"}, "0.12.0") == "pass"
    assert position("rope_gpt_neox", {"rope_type": "default"}, "0.8.0") == "pass"
    assert position("mrope", {"rope_type": "mrope"}, "0.15.0.dev2024110500") == "refused"


def test_lengths():
    def verdict(**changes):
        settings = {
            "max_seq_len": 2048,
            "max_input_len": 1024,
            "max_positions": 2048,
            "position_kind": "rope_gpt_neox",
        } | changes
        return length_gate(**settings).verdict

    assert verdict() == "pass"
    assert verdict(max_positions=None, max_seq_len=10**6) == "pass"
    assert verdict(max_seq_len=2049) == "silent"
    assert verdict(max_seq_len=2049, position_kind="learned_absolute") == "refused"
    assert verdict(max_seq_len=4096, scaling_factor=2.0) == "pass"
    assert verdict(max_input_len=2048) == "refused"


def test_a_window_that_sequences_outgrow_is_silent():
    gate = window_gate(window=512, max_seq_len=2048)
    assert (gate.verdict, gate.remedy) == ("silent", "set max_seq_len to 512 or less")


def test_a_fault_of_the_model_class_is_silent_and_names_the_release_without_it():
    fault = SimpleNamespace(name="a factor", effect="is lost", before="0.12.0", source="model.py")
    gate = model_class_gate(fault, "0.11.0")
    assert (gate.verdict, gate.remedy) == ("silent", "use 0.12.0 or later")


@pytest.mark.parametrize(("since", "remedy"), [("0.13.0", "use TensorRT-LLM 0.13.0 or later"), (None, "another model")])
def test_what_a_release_cannot_express_is_refused(since, remedy):
    gate = model_need_gate(SimpleNamespace(what="Phi on several ranks", since=since), "0.11.0")
    assert (gate.verdict, gate.value) == ("refused", "Phi on several ranks in 0.11.0")
    assert remedy in gate.remedy


def test_tokens_of_one_step():
    assert max_num_tokens_gate(max_batch_size=8, num_nodes=64, max_num_tokens=512).verdict == "pass"
    short = max_num_tokens_gate(max_batch_size=8, num_nodes=64, max_num_tokens=256)
    assert short.verdict == "refused"
    assert "512" in short.remedy


def test_batches_in_releases_with_the_python_session_only():
    for release, verdict in (("0.9.0", "silent"), ("0.11.0", "pass")):
        facts = find_release_facts(release)
        assert batch_gate(max_batch_size=2, release=release, facts=facts).verdict == verdict
        assert batch_gate(max_batch_size=1, release=release, facts=facts).verdict == "pass"


def test_kv_bytes_double_with_a_padded_head_and_do_not_fall_below_one_head_a_rank():
    sizes = {"num_layers": 30, "kv_heads": 3, "cache_dtype": "float16"}
    assert kv_bytes_per_token(head_size=64, **sizes) == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token(head_size=128, **sizes) == 2 * kv_bytes_per_token(head_size=64, **sizes)
    assert kv_bytes_per_token(head_size=64, tp_size=9, **sizes) == 2 * 30 * 1 * 64 * 2


def test_memory_and_disk_estimates_refuse_what_does_not_fit():
    estimate = estimate_memory(
        parameters=count_parameters([(4096, 4096), (4096,)]),
        dtype="float16",
        kv_token_bytes=1000,
        max_batch_size=2,
        max_seq_len=100,
        num_nodes=64,
        num_heads=4,
        vocab_size=1000,
        hidden_size=4096,
        intermediate_size=8192,
        max_num_tokens=128,
    )
    assert estimate.weights == 2 * (4096 * 4096 + 4096)
    assert estimate.kv_cache == 2 * 192 * 1000  # 164 tokens in blocks of 64
    assert estimate.logits == 5 * 2 * 64 * 1000 * 4
    assert memory_gate(estimate, card_bytes=None).verdict == "pass"
    assert memory_gate(estimate, card_bytes=estimate.total).verdict == "pass"
    assert memory_gate(estimate, card_bytes=estimate.total - 1).verdict == "refused"
    assert disk_gate(weight_bytes=GIB, free_bytes=3 * GIB).verdict == "pass"
    assert disk_gate(weight_bytes=GIB, free_bytes=2 * GIB).verdict == "refused"


def base(**changes):
    settings = {
        "head_size": 128,
        "num_heads": 32,
        "num_kv_heads": 8,
        "dtype": "bfloat16",
        "position_kind": "rope_gpt_neox",
        "q_scaling": 1.0,
        "attention_softcap": None,
        "sliding_window": None,
        "raw": {},
    } | changes
    return SimpleNamespace(**settings)


TARGET = SimpleNamespace(compute_capability="9.0", kv_cache_type="auto", tokens_per_block=64, max_seq_len=2048)


def test_the_attention_shape_follows_config_and_target():
    shape = attention_shape(base(), TARGET, dtype="float16")
    assert (shape.head_size, shape.query_heads, shape.kv_heads) == (128, 32, 8)
    assert (shape.dtype, shape.cache_dtype, shape.compute_capability) == ("float16", "float16", 90)
    assert attention_shape(base(), TARGET).dtype == "bfloat16"


def test_windows_are_read_as_the_model_uses_them():
    unused = attention_shape(base(sliding_window=4096, raw={"use_sliding_window": False}), TARGET)
    assert unused.sliding_window is None
    mixed = {"layer_types": ["sliding_attention", "full_attention"]}
    assert attention_shape(base(sliding_window=512, raw=mixed), TARGET).window_varies
    assert attention_shape(base(sliding_window=512, raw={"model_type": "gemma2"}), TARGET).window_varies
    same = attention_shape(base(sliding_window=512, raw={"layer_types": ["sliding_attention"] * 4}), TARGET)
    assert same.sliding_window == 512
    assert not same.window_varies


@pytest.mark.parametrize(
    ("raw", "slides"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, [False, True, False]),
        ({"model_type": "gemma2"}, [True, False, True]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, [True, True, False]),
        ({"model_type": "mistral"}, [True, True, True]),
    ],
)
def test_which_layers_slide_is_read_from_the_config(raw, slides):
    assert find_sliding_layers(raw, 3) == slides


@pytest.mark.parametrize("value", ["9.0", 90, "sm90", "sm_90", 9.0])
def test_compute_capabilities_are_read_in_every_spelling(value):
    assert read_compute_capability(value) == 90


def test_a_compute_capability_that_is_none_is_refused():
    assert read_compute_capability(None) is None
    with pytest.raises(PortFileError):
        read_compute_capability("hopper")
    with pytest.raises(PortFileError):
        read_compute_capability("9.²")
