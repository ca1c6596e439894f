"""Build and run plans: golden commands per release, refusals, and the trees' own parsers."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from plans import CHOICES, PORTS, build, build_port_plan, config, inference, target
from upstream_parser import parse_with_upstream, upstream_trees

from porting_kit.engine.argument_check import check_arguments
from porting_kit.engine.build_parser import read_build_parser, read_run_parser
from porting_kit.engine.run_script import write_prompt_file
from porting_kit.errors import CapturedFileError, CheckpointError, PortFileError, SourceTreeError, TreeError
from porting_kit.releases.build_flags import known_build_flags, known_run_flags
from porting_kit.source_tree import open_source_tree

GOLDEN = Path(__file__).parent / "golden"
RELEASES = (
    "0.8.0",
    "0.9.0",
    "0.10.0.dev2024043000",
    "0.10.0",
    "0.11.0.dev2024061100",
    "0.11.0.dev2024062500",
    "0.12.0",
    "0.13.0.dev2024090300",
    "0.16.0",
    "1.2.1",
)
upstream = pytest.mark.upstream
needs_trees = pytest.mark.skipif(not upstream_trees(), reason="TRTLLM_SOURCE names no TensorRT-LLM checkout")


@pytest.mark.parametrize("release", RELEASES)
def test_commands_are_the_golden_ones(release):
    """UPDATE_GOLDEN=1 writes them anew; read the difference before committing it."""
    text = build(release).shell + "\n" + inference(release).shell
    file = GOLDEN / f"{release}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("release", RELEASES)
def test_every_planned_flag_is_known_to_the_release(release):
    assert {flag.name for flag in build(release).flags} <= known_build_flags(release)
    assert {flag.name for flag in inference(release).flags} <= known_run_flags(release)


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("release", RELEASES)
def test_ten_ports_are_planned_with_known_flags(release, port):
    plan = build_port_plan(port, release=release)
    assert {flag.name for flag in plan.flags} <= known_build_flags(release)


@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_has_a_reason_and_context_logits_are_never_asked_for(release):
    plan = build(release, gather_generation_logits=True)
    assert all(flag.reason for flag in plan.flags)
    names = {flag.name for flag in plan.flags}
    assert "gather_generation_logits" in names
    assert not names & {"gather_context_logits", "gather_all_token_logits"}


def test_the_medusa_mode_is_switched_on_the_way_the_release_wants_it():
    assert build("0.8.0").value("max_draft_len") is None
    assert build("0.9.0").value("max_draft_len") == "63"
    assert build("0.9.0").value("speculative_decoding_mode") is None
    assert build("0.10.0").value("speculative_decoding_mode") == "medusa"


def test_lengths_are_named_as_the_release_names_them():
    assert build("0.10.0").value("max_output_len") == "1024"
    assert build("0.11.0.dev2024062500").value("max_seq_len") == "2048"


def test_one_step_of_a_full_batch_fits():
    plan = build(target=target(max_batch_size=64, max_input_len=10, max_seq_len=20))
    assert plan.value("max_num_tokens") == str(64 * 64)
    with pytest.raises(PortFileError, match="max_num_tokens"):
        build(max_num_tokens=511)
    with pytest.raises(PortFileError, match="max_num_tokens"):
        build(target=target(max_batch_size=1), max_num_tokens=1000)


def test_a_contiguous_cache_is_asked_for_in_the_words_of_the_release():
    contiguous = target(tokens_per_block=None)
    assert build("0.11.0", target=contiguous).value("paged_kv_cache") == "disable"
    assert build("0.13.0", target=contiguous).value("kv_cache_type") == "continuous"
    assert build("0.13.0", target=contiguous).value("tokens_per_block") is None


def test_a_single_rank_needs_no_workers_and_no_launcher():
    single = {"config": config(mapping={"tp_size": 1, "pp_size": 1}), "target": target(tp_size=1)}
    assert build(**single).value("workers") is None
    assert inference(world_size=1).command[0] == "python"
    assert build().value("workers") == "2"
    assert inference().command[:3] == ("mpirun", "-n", "2")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"release": None}, PortFileError, "one release"),
        ({"release": "0.7.0"}, PortFileError, "outside the known"),
        ({"class_name": None}, PortFileError, "belong together"),
        ({"num_nodes": 65}, TreeError, "64 drafts"),
        ({"target": target(tp_size=4)}, CheckpointError, "another tp_size"),
        ({"target": target(max_seq_len=1024)}, PortFileError, "no room for output"),
        ({"config": {"dtype": "float16"}}, CheckpointError, "lacks a Medusa field"),
        ({"config": config() | {"max_draft_len": 0}}, CheckpointError, "draft limit"),
    ],
)
def test_unusable_input_is_refused(changes, error, words):
    with pytest.raises(error, match=words):
        build(**changes)


def test_a_checkpoint_made_for_another_release_lacks_its_draft_limit():
    with pytest.raises(CheckpointError, match="max_medusa_token_len"):
        build("0.8.0", config=config("0.9.0"))
    with pytest.raises(CheckpointError, match="max_draft_len"):
        build("0.9.0", config=config("0.8.0"))


def test_a_bundled_tree_is_no_release_to_build_for():
    bundled = open_source_tree("bundled")
    with pytest.raises(PortFileError, match="one release"):
        build(release=None, tree=bundled)
    assert build("0.11.0", tree=bundled).checked_against == "the flags kept for this release"


def test_the_shell_text_survives_a_shell():
    import shlex

    plan = build(output_dir=Path("my engines/a 'b'"))
    text = plan.shell.split("\n", 1)[1].replace("\\\n", " ")
    assert shlex.split(text) == list(plan.command)


def test_releases_differ_in_session_temperature_and_end_id():
    assert inference("0.9.0").value("temperature") == "0.0"
    assert inference("0.10.0").value("temperature") == "1.0"
    sessions = {
        release: any(flag.name == "use_py_session" for flag in inference(release).flags) for release in RELEASES
    }
    assert sessions == {release: release.startswith(("0.8", "0.9", "0.10")) for release in RELEASES}
    assert inference("0.13.0").value("end_id") == "2"
    old = inference("0.11.0")
    assert old.value("end_id") is None
    assert any("end token must be 2" in remark for remark in old.remarks)


@pytest.mark.parametrize("release", ["0.16.0", "1.0.0", "1.2.0"])
def test_late_run_scripts_are_asked_for_logits_by_a_flag_of_their_own(release):
    """Without it their executor is opened for none, and the file that is named stays unwritten."""
    plan = inference(release, output_logits_npy=Path("logits.npy"))
    assert plan.value("output_logits_npy") == "logits.npy"
    assert ("--output_generation_logits" in plan.arguments) == (release != "0.16.0")
    assert "--output_generation_logits" not in inference(release).arguments


def test_the_tree_is_written_as_run_py_reads_it():
    import ast

    assert ast.literal_eval(inference().value("medusa_choices")) == CHOICES


def test_prompts_are_written_as_rows_of_ids(tmp_path):
    file = write_prompt_file(tmp_path / "prompts.csv", [[1, 2, 3], [4]])
    assert file.read_text() == "1,2,3\n4\n"
    with pytest.raises(CapturedFileError, match="empty prompt"):
        write_prompt_file(tmp_path / "none.csv", [[1], []])


@upstream
@needs_trees
@pytest.mark.parametrize("tree", upstream_trees(), ids=lambda tree: tree.release)
class TestUpstreamParsers:
    def test_the_tree_s_own_parser_accepts_the_plan(self, tree):
        plan = build(None, config=config(tree.release), tree=tree, gather_generation_logits=True)
        parsed = vars(parse_with_upstream(tree, plan.arguments))
        for flag in plan.flags:
            expected = True if flag.value is None else flag.value
            assert str(parsed[flag.name]) == str(expected)

    def test_what_was_read_by_parsing_is_what_the_parser_takes(self, tree):
        for name, flag in read_build_parser(tree).items():
            value = flag.choices[0] if flag.choices else "1"
            if name in ("cluster_key", "lora_target_modules", "log_level") or flag.choices == ():
                continue  # their choices are computed from other modules
            words = [f"--{name}", value] if flag.takes_value else [f"--{name}"]
            parse_with_upstream(tree, words)

    def test_wrong_plans_are_refused_by_both(self, tree, capsys):
        parser = read_build_parser(tree)
        for words in (["--max_draft_length", "63"], ["--gpt_attention_plugin", "fp16"], ["--max_batch_size", "many"]):
            with pytest.raises(SourceTreeError):
                check_arguments(words, parser, program="trtllm-build", where=tree.root)
            with pytest.raises(SystemExit):
                parse_with_upstream(tree, words)
        capsys.readouterr()

    def test_a_plan_for_another_release_is_refused(self, tree):
        other = "0.9.0" if not tree.release.startswith("0.9") else "0.13.0"
        with pytest.raises(SourceTreeError, match="another release"):
            build(other, tree=tree)

    def test_the_kept_flags_are_the_tree_s(self, tree):
        assert known_build_flags(tree.release) == set(read_build_parser(tree))
        examples = tree.root / "examples"
        if (examples / "run.py").is_file():
            assert known_run_flags(tree.release) == set(read_run_parser(examples))

    def test_the_run_script_accepts_its_plan(self, tree):
        if not (tree.root / "examples" / "run.py").is_file():
            pytest.skip("the tree has no examples/run.py")
        plan = inference(tree.release, tree=tree, output_logits_npy=Path("logits.npy"))
        assert plan.checked_against.endswith("run.py")
        wrong = replace(plan, flags=plan.flags[:1])
        with pytest.raises(SourceTreeError, match=r"run\.py has no"):
            check_arguments(
                [*wrong.arguments, "--medusa_choice", "[]"],
                read_run_parser(tree.root / "examples"),
                program="run.py",
                where=tree.root,
            )
