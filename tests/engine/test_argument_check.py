"""Command lines against a parser that is read, never run: what argparse and the lines behind it would refuse."""

import re
from pathlib import Path

import pytest
from plans import PORTS, build_port_plan, inference
from upstream_parser import parse_with_upstream, upstream_trees

from porting_kit.engine.argument_check import check_arguments
from porting_kit.engine.build_parser import read_build_parser, read_run_parser
from porting_kit.engine.parser_guards import find_guard_fault
from porting_kit.errors import SourceTreeError

SCRIPT = """
import argparse

def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine_dir", type=str, default="engine")
    parser.add_argument("--tokens", "--max_tokens", dest="tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--mode", choices=["medusa", "eagle"], default=None)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--all_logits", action="store_true", default=False)
    parser.add_argument("--logits", action="store_true", default=False)
    parser.add_argument("--texts", nargs="+")
    parser.add_argument("--cache", default=argparse.SUPPRESS)
    parser.add_argument("--reuse", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()

def main(args):
    if args.all_logits:
        args.logits = True
    if args.logits and args.mode is not None:
        raise RuntimeError("no logits with drafts")
    if MACHINE and not args.quiet:
        raise RuntimeError("depends on the machine")
    if args.mode == "medusa":
        assert args.temperature == 1.0, "a temperature of one"
        assert args.tokens in (8, 16)
    if hasattr(args, "cache"):
        raise ValueError(f"the cache {args.cache}")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    return tmp_path / "run.py"


def check(script, *words):
    check_arguments(
        words, read_run_parser(script.parent), program="run.py", where=script, guards=(script, ("main",))
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens", "8"],
        ["--max_tokens=8", "--mode", "medusa"],
        ["--tokens", "8", "--temperature", "0.5"],
        ["--tokens", "8", "--texts", "one", "two", "--quiet"],
        ["--tokens", "8", "--logits"],
        ["--tokens", "8", "--reuse", "--quiet"],
        ["--tokens", "8", "--no-reuse", "--quiet"],
    ],
)
def test_a_right_command_passes(script, words):
    check(script, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "8", "--token", "8"], "has no --token"),
        (["--tokens", "8", "--max_tokens", "8"], "given twice"),
        (["--mode", "medusa"], "needs --tokens"),
        (["--tokens"], "lacks its value"),
        (["--tokens", "8", "9"], "takes one value"),
        (["--tokens", "many"], "takes a whole number"),
        (["--tokens", "8", "--temperature", "warm"], "takes a number"),
        (["--tokens", "8", "--quiet", "yes"], "is a switch"),
        (["--tokens", "8", "--reuse", "yes"], "is a switch"),
        (["--tokens", "8", "--mode", "medusas"], "does not take this value"),
        (["8", "--tokens", "8"], "a value without a flag"),
        (["--tokens", "8", "--mode", "eagle", "--all_logits"], "no logits with drafts"),
        (["--tokens", "8", "--mode", "medusa", "--temperature", "0"], "a temperature of one"),
        (["--tokens", "9", "--mode", "medusa"], r"args\.tokens in \(8, 16\)"),
        (["--tokens", "8", "--cache", "x"], "the cache"),
    ],
)
def test_a_wrong_command_is_refused_with_its_word(script, words, said):
    with pytest.raises(SourceTreeError, match=said):
        check(script, *words)


def test_a_line_that_needs_the_machine_refuses_nothing(script):
    assert find_guard_fault(script, ("main",), {"quiet": False, "mode": None}) is None
    script.write_text(SCRIPT.replace("if MACHINE and", "if True and"))
    fault = find_guard_fault(script, ("main",), {"quiet": False, "mode": None})
    assert (fault.message, fault.source.rsplit(" ", 1)[0]) == ("depends on the machine", f"{script.parent.name}/run.py")


# ---------------------------------------------------------------- real trees

# name of the wrong plan -> how it is made of a right one, the word that must be said, whether argparse itself refuses
WRONG = {
    "unknown flag": (lambda words, _: [*words, "--max_draft_length", "63"], "has no --max_draft_length", True),
    "flag of another release": (lambda words, tree: _foreign_flag(words, tree), "that flag belongs to", True),
    "plugin type": (lambda words, _: _set(words, "gpt_attention_plugin", "fp16"), "does not take this value", True),
    "truth value": (lambda words, _: _set(words, "remove_input_padding", "true"), "enable, disable", True),
    "word for a number": (lambda words, _: _set(words, "max_batch_size", "many"), "takes a whole number", True),
    "surplus value": (lambda words, _: [*words, "--gather_context_logits", "yes"], "is a switch", True),
    "value forgotten": (lambda words, _: [*words, "--log_level"], "lacks its value", True),
    "class without its file": (lambda words, _: _drop(words, "model_cls_file"), "lacks its companion", False),
    "file without its class": (lambda words, _: _drop(words, "model_cls_name"), "--model_cls_name", False),
    "given twice": (lambda words, _: [*words, "--max_beam_width", "4"], "given twice", False),
    "abbreviated": (lambda words, _: _rename(words, "max_beam_width", "max_beam"), "has no --max_beam", False),
    "two values": (lambda words, _: [*words, "--log_level", "info", "verbose"], "takes one value", True),
}


def _set(words, name, value):
    place = words.index(f"--{name}")
    return [*words[: place + 1], value, *words[place + 2 :]]


def _drop(words, name):
    place = words.index(f"--{name}")
    return [*words[:place], *words[place + 2 :]]


def _rename(words, name, other):
    return [f"--{other}" if word == f"--{name}" else word for word in words]


def _foreign_flag(words, tree):
    """A flag that other releases have and this one has not."""
    known = read_build_parser(tree)
    foreign = ("max_output_len", "max_seq_len", "kv_cache_type", "strongly_typed")
    return [*words, f"--{next(name for name in foreign if name not in known)}", "64"]


upstream = pytest.mark.upstream
needs_trees = pytest.mark.skipif(not upstream_trees(), reason="TRTLLM_SOURCE names no TensorRT-LLM checkout")


def check_build(tree, words):
    file = tree.package / "commands" / "build.py"
    guards = (file, ("parse_arguments", "main"))
    check_arguments(words, read_build_parser(tree), program="trtllm-build", where=file, guards=guards)


@upstream
@needs_trees
@pytest.mark.parametrize("tree", upstream_trees(), ids=lambda tree: tree.release)
class TestUpstreamPlans:
    @pytest.mark.parametrize("port", PORTS)
    def test_every_flag_of_ten_ports_is_accepted(self, tree, port):
        plan = build_port_plan(port, tree)
        check_build(tree, plan.arguments)
        parsed = vars(parse_with_upstream(tree, plan.arguments))
        assert {flag.name for flag in plan.flags} <= set(parsed)

    @pytest.mark.parametrize("wrong", WRONG)
    def test_wrong_plans_are_refused_with_their_word(self, tree, wrong, capsys):
        make, said, refused_by_argparse = WRONG[wrong]
        words = make(build_port_plan("bloom-7b1", tree).arguments, tree)
        with pytest.raises(SourceTreeError, match=re.escape(said)):
            check_build(tree, words)
        if refused_by_argparse:
            with pytest.raises(SystemExit):
                parse_with_upstream(tree, words)
        else:
            parse_with_upstream(tree, words)
        capsys.readouterr()

    def test_context_logits_beside_drafts_are_refused_where_the_tree_refuses_them(self, tree):
        words = [*build_port_plan("bloom-7b1", tree).arguments, "--gather_context_logits"]
        try:
            parse_with_upstream(tree, words)
        except RuntimeError as error:
            with pytest.raises(SourceTreeError, match=str(error).split(".", maxsplit=1)[0]):
                check_build(tree, words)
        else:
            source = (tree.package / "commands" / "build.py").read_text()
            if "Gather context logits is not support" not in source:
                check_build(tree, words)
                return
            with pytest.raises(SourceTreeError, match="Gather context logits is not support"):
                check_build(tree, words)

    def test_a_draft_limit_without_the_mode_is_refused_where_there_is_a_mode(self, tree):
        words = build_port_plan("bloom-7b1", tree).arguments
        if "--speculative_decoding_mode" not in words:
            pytest.skip("this release has no mode")
        with pytest.raises(SourceTreeError, match="lacks its companion --speculative_decoding_mode"):
            check_build(tree, _drop(words, "speculative_decoding_mode"))
        with pytest.raises(SourceTreeError, match="does not take this value for --speculative_decoding_mode"):
            check_build(tree, _set(words, "speculative_decoding_mode", "medusa_tree"))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda words: _set(words, "temperature", "0.7"), "Medusa should use temperature"),
            (lambda words: _set(words, "num_beams", "2"), "num_beams == 1"),
            (lambda words: _drop(words, "max_output_len"), "needs --max_output_len"),
            (lambda words: _rename(words, "max_input_length", "max_input_len"), "has no --max_input_len"),
        ],
    )
    def test_wrong_runs_are_refused_with_their_word(self, tree, change, said):
        script = tree.root / "examples" / "run.py"
        words = inference(tree.release, tree=tree).arguments
        parser, options = read_run_parser(script.parent), {"program": "run.py", "where": script}
        check_arguments(words, parser, **options, guards=(script, ("main",)))
        with pytest.raises(SourceTreeError, match=said):
            check_arguments(change(words), parser, **options, guards=(script, ("main",)))

    def test_a_run_without_the_python_session_is_refused_where_it_must_be(self, tree):
        script = tree.root / "examples" / "run.py"
        words = inference(tree.release, tree=tree).arguments
        if "--use_py_session" not in words:
            pytest.skip("either session runs Medusa in this release")
        if "only supported by py_session" not in Path(script).read_text():
            pytest.skip("this snapshot does not say so itself")
        words.remove("--use_py_session")
        with pytest.raises(SourceTreeError, match="only supported by py_session"):
            check_arguments(
                words, read_run_parser(script.parent), program="run.py", where=script, guards=(script, ("main",))
            )
