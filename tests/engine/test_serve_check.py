"""trtllm-serve commands and files of LLM options, against a Medusa engine: batch 8, 8192 tokens, length 2111, tp 2."""

import itertools
import os
import re
from pathlib import Path

import pytest
import yaml
from test_record import CHOICES, write_engine

from porting_kit.engine.engine_config import read_engine_config
from porting_kit.engine.serve_check import check_llm_options, check_serve_command
from porting_kit.engine.server_files import find_commands
from porting_kit.medusa.tree import read_tree
from porting_kit.releases.serve_facts import SERVE, find_serve_facts
from porting_kit.releases.version import parse_release
from porting_kit.source_tree import open_source_tree

LIMITS = "--max_batch_size 8 --max_num_tokens 8192"
FILE = "--extra_llm_api_options tree.yaml"
LATE = f"trtllm-serve serve --host h --port 80 --backend tensorrt {LIMITS} {FILE} --tokenizer base engine"
RUNTIME = read_tree("mc_sim_7b_63").choices()
OPTIONS = {
    "max_batch_size": 8,
    "kv_cache_config": {"free_gpu_memory_fraction": 0.8},
    "speculative_config": {
        "decoding_type": "Medusa",
        "num_medusa_heads": 4,
        "max_draft_len": 63,
        "medusa_choices": CHOICES,
    },
}


def refused(command, release, folder, choices=CHOICES):
    (found,) = find_commands(command)
    gates = check_serve_command(found, read_engine_config(write_engine(folder, version=release)), choices)
    return {re.sub("( of )?trtllm-serve, line 1(: )?", "", gate.name): gate for gate in gates if gate.verdict != "pass"}


@pytest.mark.parametrize(("release", "backend"), [("1.0.0", "trt"), ("1.1.0", "tensorrt"), ("1.2.1", "tensorrt")])
def test_a_fitting_command_has_no_problem(release, backend, tmp_path):
    assert refused(LATE.replace("tensorrt", backend), release, tmp_path) == {}


@pytest.mark.parametrize(
    ("old", "new", "gates"),
    [
        (LIMITS, "", {"--max_batch_size"}),  # 2048 where it is left out: what 1.1.0 stops at
        ("_size 8", "_size 9", {"--max_batch_size"}),
        ("_size 8", "_size eight", {"--max_batch_size"}),
        ("_size 8", "_size", {"values"}),
        ("engine", "engine --max_seq_len", {"values"}),
        ("_size 8", "_size $BATCH", set()),
        ("8192", "8193", {"--max_num_tokens"}),
        ("engine", "engine --max_seq_len 4096", {"--max_seq_len"}),
        ("engine", "engine --max_beam_width=4", {"--max_beam_width"}),
        ("engine", "engine --max_beam_width 1", set()),
        ("engine", "engine --tp_size 4", {"--tp_size"}),
        ("engine", "engine --tensor_parallel_size 4", {"--tp_size"}),
        ("engine", "engine --tp_size 2 --pp_size 1", set()),
        ("engine", "engine --pp_size 2", {"--pp_size"}),
        ("engine", "engine --kv_cache_free_gpu_memory_fraction 90", {"--kv_cache_free_gpu_memory_fraction"}),
        ("--backend tensorrt", "", {"backend"}),
        ("--backend tensorrt", "--backend pytorch", {"backend"}),
        ("--backend tensorrt", "--backend trt", set()),
        ("--extra_llm_api_options tree.yaml", "", {"tree"}),
        ("--extra_llm_api_options", "--config", set()),
        ("engine", "engine --medusa_choices [[0]]", {"flags"}),
        ("base engine", "base --trust_remote_code engine", set()),
    ],
)
def test_contradictions_of_a_command_are_flagged(old, new, gates, tmp_path):
    assert old in LATE
    found = refused(LATE.replace(old, new, 1), "1.1.0", tmp_path)
    assert set(found) == gates
    assert all(gate.effect and gate.remedy and gate.source for gate in found.values())


@pytest.mark.parametrize(
    ("release", "command", "gates"),
    [
        ("0.14.0", "trtllm-serve engine", {"release"}),
        ("0.15.0", "trtllm-serve engine", {"tree"}),
        ("0.16.0", "trtllm-serve engine --extra_llm_api_options tree.yaml", {"flags"}),
        ("0.16.0", "trtllm-serve engine --max_batch_size 64", {"tree", "--max_batch_size"}),
        ("0.18.2", "trtllm-serve engine --backend pytorch", {"tree", "backend"}),
        ("0.20.0", "trtllm-serve engine --extra_llm_api_options tree.yaml", set()),
        ("0.20.0", "trtllm-serve engine --extra_llm_api_options tree.yaml --backend pytorch", {"backend"}),
        ("1.0.0", LATE, {"backend"}),
        ("1.0.0", f"trtllm-serve engine --backend trt {FILE}", {"--max_batch_size"}),
    ],
)
def test_each_releases_own_rules_are_asked(release, command, gates, tmp_path):
    assert set(refused(command, release, tmp_path)) == gates


def test_the_runtimes_own_tree_need_not_be_given(tmp_path):
    command = "trtllm-serve engine"
    assert refused(command, "0.16.0", tmp_path, RUNTIME) == {}
    assert refused(command, "0.16.0", tmp_path, RUNTIME[:-1])["tree"].value == "none given, which is mc_sim_7b_63"
    assert "takes no tree" in refused(command, "0.16.0", tmp_path)["tree"].remedy
    assert "--extra_llm_api_options" in refused(command, "0.20.0", tmp_path)["tree"].remedy


def check_options(folder, release="1.1.0", choices=CHOICES, **changes):
    options = yaml.safe_load(yaml.safe_dump({**OPTIONS, **changes}))
    gates = check_llm_options(options, read_engine_config(write_engine(folder, version=release)), choices)
    return {re.sub("( of )?the LLM options(: )?", "", gate.name) for gate in gates if gate.verdict != "pass"}


@pytest.mark.parametrize(
    ("changes", "gates"),
    [
        ({}, set()),
        ({"max_batch_size": 9}, {"max_batch_size"}),
        ({"max_beam_width": 2}, {"max_beam_width"}),
        ({"tensor_parallel_size": 4}, {"tp_size"}),
        ({"backend": "pytorch"}, {"backend"}),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 80}}, {"kv_cache_free_gpu_memory_fraction"}),
        ({"speculative_config": None}, {"tree"}),
        ({"speculative_config": {**OPTIONS["speculative_config"], "medusa_choices": CHOICES[::-1]}}, set()),
        ({"speculative_config": {**OPTIONS["speculative_config"], "medusa_choices": CHOICES[1:]}}, {"tree"}),
        ({"speculative_config": {**OPTIONS["speculative_config"], "medusa_choices": 3}}, {"tree"}),
        ({"speculative_config": {**OPTIONS["speculative_config"], "decoding_type": "Eagle"}}, {"decoding_type"}),
        ({"speculative_config": {**OPTIONS["speculative_config"], "num_medusa_heads": 5}}, {"num_medusa_heads"}),
        ({"speculative_config": {**OPTIONS["speculative_config"], "max_draft_len": None}}, {"max_draft_len"}),
    ],
)
def test_contradictions_of_llm_options_are_flagged(changes, gates, tmp_path):
    assert check_options(tmp_path, **changes) == gates


def test_options_that_no_flag_of_the_release_names_are_flagged(tmp_path):
    assert check_options(tmp_path, "0.16.0") == {"use"}
    assert check_options(tmp_path, "0.13.0") == {"release"}


def test_the_ranges_have_no_gap_and_no_overlap():
    for earlier, later in itertools.pairwise(SERVE):
        assert earlier.before == later.since
    assert all(parse_release(facts.since) < parse_release(facts.before) for facts in SERVE)
    assert not any(set(facts.flags) & set(facts.maybe) for facts in SERVE)
    assert find_serve_facts("0.14.0") is None
    assert find_serve_facts("1.0.0rc6").backends == ("trt",)


@pytest.mark.upstream
def test_the_options_are_those_of_the_releases_own_command():
    trees = os.environ.get("TRTLLM_SOURCE")
    if not trees:
        pytest.skip("TRTLLM_SOURCE is unset")
    for tree in map(open_source_tree, map(Path, trees.split(os.pathsep))):
        file, facts = tree.package / "commands" / "serve.py", find_serve_facts(tree.release)
        assert file.is_file() == (facts is not None), tree.release
        if facts is not None:
            options = set(re.findall(r"click.option\(\s*[\"']--(\w+)", file.read_text(encoding="utf-8")))
            assert set(facts.flags) <= options <= facts.known, tree.release
