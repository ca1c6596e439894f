"""Families that only a real source tree defines: engines made by hand against ports on that tree."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from porting_kit.diagnosis.search import Shelf
from porting_kit.source_tree import open_source_tree
from tests.alignment.tiny_ports import make_port
from tests.diagnosis import foreign_faults as by_hand
from tests.diagnosis.foreign_engines import (
    Engine,
    describe,
    diagnose_files,
    judge_diagnosis,
    run_engine,
    write_files,
)

SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if source]
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE names no TensorRT-LLM tree"),
]
FAMILIES = ("mistral", "gpt2", "opt", "falcon", "gemma", "phi", "gptj")


def transpose(weight: torch.Tensor) -> None:
    weight.data = weight.data.T.contiguous()


def shift_positions(model: Any) -> None:
    """OPT's own offset of two left out."""
    model.model.decoder.embed_positions.offset = 0


def unscale_embedding(model: Any) -> None:
    """Gemma's sqrt(E) left out, the tied output matrix as it is."""
    output = model.get_output_embeddings()
    output.weight = torch.nn.Parameter(output.weight.data.clone())
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.data / 8.0


def rotate_whole_heads(model: Any) -> None:
    """Phi's share of a half left out: all 16 dimensions of a head."""
    by_hand.with_theta_of_share(16, 1e4)(model)
    by_hand.set_attribute("rotary_ndims", 16)(model)


def lower_norms(model: Any) -> None:
    """Gemma's one, which its norms add, left out."""
    for norm in by_hand.norms_of(model):
        norm.weight.data = norm.weight.data - 1.0


ENGINES = (
    *(Engine(dtype, FAMILIES, (), dtype=dtype) for dtype in ("float32", "float16", "bfloat16")),
    Engine(
        "square matrix kept as Conv1D stores it",
        ("gpt2",),
        ("conv1d_not_transposed",),
        by_hand.each_layer(lambda layer: transpose(layer.attn.c_proj.weight)),
    ),
    Engine("erf gelu in place of tanh gelu", ("gpt2", "phi"), ("gelu_erf_for_tanh",), by_hand.set_activation("gelu")),
    Engine("positions two too early", ("opt",), ("learned_position_offset",), shift_positions),
    Engine("silu in place of relu", ("opt",), ("activation_variant",), by_hand.set_activation("silu")),
    Engine("embedding not scaled", ("gemma",), ("embedding_scale_wrong",), unscale_embedding),
    Engine("norms without their one", ("gemma",), ("norm_offset_wrong",), lower_norms),
    Engine("rotary base 10,000", ("mistral",), ("rope_base_lost",), by_hand.with_theta(1e4)),
    Engine(
        "whole heads rotated",
        ("phi",),
        ("rotary_share_ignored",),
        rotate_whole_heads,
    ),
    Engine(
        "neighbours rotated",
        ("phi", "mistral"),
        ("rotary_style_swapped",),
        by_hand.replace_function("apply_rotary_pos_emb", by_hand.rotate_neighbours),
    ),
    Engine(
        "attention output zero in one layer",
        FAMILIES,
        (None,),
        lambda model: by_hand.zero(
            by_hand.modules_named(by_hand.layers_of(model)[0], "o_proj", "out_proj", "attn.c_proj", "attention.dense",
                                  "self_attn.dense")[0].weight
        ),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A port and its models by family and dtype, on the first tree that is named."""
    known = {}

    def get(family, dtype):
        if open_source_tree(SOURCES[0]).release.startswith(("0.8", "0.9")) and family in ("opt", "phi", "gptj", "gpt2"):
            pytest.skip("this family's class of the release has another layout")
        if (family, dtype) not in known:
            port = make_port(tmp_path_factory.mktemp(family), family, seed=11, dtype=dtype, source=SOURCES[0])
            if family == "opt":
                table = port.reference.model.model.decoder.embed_positions.weight
                port.state = replace(port.state, leading_positions=table[:2].clone())
            known[family, dtype] = port, Shelf(port.state, keeps=True)
        return known[family, dtype]

    return get


@pytest.mark.parametrize(
    ("family", "engine"),
    [pytest.param(family, e, id=f"{family}: {e.name}") for family in FAMILIES for e in ENGINES if family in e.bases],
)
def test_what_is_said_of_a_foreign_engine_is_true(family, engine, opened, tmp_path):
    port, shelf = opened(family, engine.dtype)
    tokens, logits = write_files(port, run_engine(port, engine), tmp_path)
    found = diagnose_files(port, tokens, logits, dtype=engine.dtype, shelf=shelf)
    assert judge_diagnosis(engine, found) == "right", describe(found)
    alone = diagnose_files(port, tokens, dtype=engine.dtype, shelf=shelf)
    assert judge_diagnosis(engine, alone) not in ("wrong", "blamed"), describe(alone)
