"""Serving settings that go with an engine, and the contradictions found in files a user already has."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from test_record import CHOICES, write_engine

from porting_kit.engine.engine_config import read_engine_config
from porting_kit.engine.server_files import (
    FoundCommand,
    find_commands,
    read_pbtxt,
    read_serving_file,
    read_text_file,
)
from porting_kit.engine.serving import (
    check_commands,
    check_server_settings,
    make_server_settings,
    write_llm_snippet,
    write_pbtxt,
)
from porting_kit.errors import CapturedFileError

# The shape of tensorrtllm_backend's file, shortened; values as people wrote them.
PBTXT = """\
name: "tensorrt_llm"
backend: "tensorrtllm"
max_batch_size: 8
model_transaction_policy {
  decoupled: false
}
# parameters: { key: "decoding_mode" value: { string_value: "top_k" } }
parameters: {
  key: "max_beam_width"
  value: {
    string_value: "1"
  }
}
parameters: {
  key: "gpt_model_type"
  value: { string_value: "inflight_fused_batching" }
}
parameters {
  key: "decoding_mode"
  value { string_value: "" }
}
parameters: {
  key: "medusa_choices"
  value: {
    string_value: "{0}, {0, 0}, {1}"
  }
}
"""


def problems(text, folder, end_ids=(), **build):
    engine = read_engine_config(write_engine(folder, **build))
    gates = check_server_settings(read_pbtxt(text), engine, CHOICES, end_ids)
    return {gate.name: gate for gate in gates if gate.verdict != "pass"}


def test_a_fitting_file_has_no_problem(tmp_path):
    assert problems(PBTXT, tmp_path) == {}


def test_a_tree_in_another_order_is_the_same_tree(tmp_path):
    """The record holds the runtime's order; people keep the order in which a tree is listed."""
    assert problems(PBTXT.replace("{0}, {0, 0}, {1}", "{1}, {0,0}, {0}"), tmp_path) == {}
    assert "server tree" in problems(PBTXT.replace("{0}, {0, 0}, {1}", "{1}, {1, 0}, {0}"), tmp_path)


def test_what_we_write_is_read_back_and_fits(tmp_path):
    engine = read_engine_config(write_engine(tmp_path))
    settings = make_server_settings(engine, CHOICES, "/engines/bloom")
    assert read_pbtxt(write_pbtxt(settings)) == settings
    assert problems(write_pbtxt(settings), tmp_path) == {}


def test_comments_are_no_settings():
    """Also where nothing behind the comment says otherwise; a # within quotes begins none."""
    comment = next(line for line in PBTXT.splitlines() if line.startswith("#"))
    assert read_pbtxt(f'{comment}\nmax_batch_size: 8 # "{{0}}"\n# decoupled: true }}') == {"max_batch_size": "8"}
    kept = comment.removeprefix("# ").replace("top_k", "#1")
    assert read_pbtxt(f"{kept} {comment}") == {"decoding_mode": "#1"}


@pytest.mark.parametrize(
    ("old", "new", "gate"),
    [
        ('value { string_value: "" }', 'value { string_value: "top_k" }', "decoding mode"),
        ('value { string_value: "" }', 'value { string_value: "top_k_top_p" }', "decoding mode"),
        ('string_value: "1"', 'string_value: "4"', "beams"),
        ("max_batch_size: 8", "max_batch_size: 64", "batch"),
        ("inflight_fused_batching", "V1", "batching"),
        ("{0}, {0, 0}, {1}", "{0}, {1}", "server tree"),
        ("{0}, {0, 0}, {1}", "${medusa_choices}", "template filled in"),
    ],
)
def test_contradictions_are_flagged(tmp_path, old, new, gate):
    assert old in PBTXT
    found = problems(PBTXT.replace(old, new), tmp_path)
    assert gate in found
    assert found[gate].effect
    assert found[gate].remedy


def test_an_engine_without_the_mode_is_named_before_the_first_request(tmp_path):
    found = problems(PBTXT, tmp_path, max_draft_len=0, speculative_decoding_mode=1)
    assert "without the Medusa mode" in found["engine built for Medusa"].remedy
    assert "3 draft tokens against 0" in found["engine built for Medusa"].effect


def test_a_tree_above_the_engines_limit_is_flagged_with_both_numbers(tmp_path):
    nodes = ", ".join(f"{{{rank}}}" for rank in range(16))
    found = problems(PBTXT.replace("{0}, {0, 0}, {1}", nodes), tmp_path, max_draft_len=15)
    assert "16 against 15" in found["draft limit"].effect


def test_an_end_token_of_another_model_is_flagged(tmp_path):
    text = PBTXT + 'parameters: { key: "end_id" value: { string_value: "50256" } }\n'
    assert "end token" in problems(text, tmp_path, end_ids=(2,))
    assert problems(text.replace("50256", "2"), tmp_path, end_ids=(2,)) == {}


def test_a_window_shorter_than_the_sequences_is_flagged(tmp_path):
    text = PBTXT + 'parameters: { key: "max_attention_window_size" value: { string_value: "1024" } }\n'
    assert "attention window" in problems(text, tmp_path)


def test_streaming_from_an_early_server_is_flagged(tmp_path):
    text = PBTXT.replace("decoupled: false", "decoupled: true")
    assert "streaming" in problems(text, tmp_path, version="0.9.0")
    assert problems(text, tmp_path) == {}


SCRIPT = """\
#!/bin/bash
# trtllm-build --nonsense
export CUDA_VISIBLE_DEVICES=0
trtllm-build --checkpoint_dir ckpt \\
    --output_dir engine \\
    --max_output_len 64 2>&1 | tee log
mpirun -n 2 python3 examples/run.py --engine_dir engine --max_output_len 64 \\
    --medusa_choices "[[0], [1]]" --temperature 0.0 && echo done
"""


def refused(release):
    return {gate.name: gate for gate in check_commands(find_commands(SCRIPT), release) if gate.verdict != "pass"}


def test_commands_are_found_with_their_lines():
    build, run = find_commands(SCRIPT)
    assert (build.program, build.line, build.arguments[-2:]) == ("trtllm-build", 4, ("--max_output_len", "64"))
    assert (run.program, run.line, run.arguments[-1]) == ("run.py", 7, "0.0")


def test_rules_that_changed_under_the_user_are_told():
    early, late = refused("0.9.0"), refused("0.13.0")
    assert set(early) == {"session of run.py, line 7"}
    assert set(late) == {"flags of trtllm-build, line 4", "temperature of run.py, line 7"}
    assert "now --max_seq_len" in late["flags of trtllm-build, line 4"].value


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("trtllm-build --max_batch_size --output_dir engine", "--max_batch_size lacks its value"),
        ("trtllm-build --output_dir", "--output_dir lacks its value"),
        ("trtllm-build --output_dir engine --strip_plan yes", "--strip_plan takes no value"),
        ("python3 run.py --engine_dir --medusa_choices '[[0]]'", "--engine_dir lacks its value"),
        ("python3 run.py --use_py_session 1", "--use_py_session takes no value"),
    ],
)
def test_a_flag_without_its_value_is_flagged(command, said):
    found = {gate.name: gate for gate in check_commands(find_commands(command), "0.13.0")}
    (gate,) = [gate for name, gate in found.items() if name.startswith("values of")]
    assert (gate.verdict, gate.value) == ("refused", said)


@pytest.mark.parametrize(
    ("release", "words", "said"),
    [
        ("0.13.0", "--speculative_decoding_mode medus", "medusa or explicit_draft_tokens"),
        ("0.13.0", "--speculative_decoding_mode eagle", "explicit_draft_tokens"),
        ("0.17.0", "--speculative_decoding_mode eagle", None),
        ("0.11.0", "--gemm_plugin=nvfp4", "disable"),
        ("1.2.0", "--gemm_plugin=nvfp4", None),
    ],
)
def test_a_value_that_the_release_does_not_take_is_flagged_with_those_it_takes(release, words, said):
    flag, value = re.split("[ =]", words)
    found = {g.name: g for g in check_commands(find_commands(f"trtllm-build --output_dir engine {words}"), release)}
    gate = found[f"{flag} of trtllm-build, line 1"]
    assert (gate.verdict, gate.value) == ("pass" if said is None else "refused", value)
    assert said is None or gate.expected.endswith(said)
    assert said is None or (gate.effect, gate.remedy) == (
        "the command ends at once: invalid choice",
        f"give one of these to {flag}, or leave it out",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--input_text '--hello there' --engine_dir engine", None),  # argparse: a word with a blank is a value
        ("--input_text --hello --engine_dir engine", "--hello"),
        ("'--input_text=--hello there' --engine_dir engine", None),
    ],
)
def test_a_value_may_begin_with_dashes_where_it_holds_a_blank(words, said):
    gates = check_commands(find_commands(f"python3 run.py {words}"), "0.13.0")
    assert [gate.value for gate in gates if gate.name.startswith("flags") and gate.verdict != "pass"] == (
        [said] if said else []
    )


@pytest.mark.parametrize(
    ("text", "line", "arguments"),
    [
        ('spec:\n  command: ["trtllm-build", "--x", "a b"]', 2, ("--x", "a b")),
        ('command: [ "/usr/bin/trtllm-build" , "--x" ]', 1, ("--x",)),
        ("a:\n- command:\n  - trtllm-build\n  args:\n  - --x\n  - 64", 3, ("--x", "64")),
        ("services:\n  s:\n    command: [--x, '1']\n    entrypoint: [trtllm-build]", 4, ("--x", "1")),
        ("args:\n- |\n  set -e\n  trtllm-build --x \\\n    1 && echo\n", 4, ("--x", "1")),
        ('command: [sh, -c, "cd /w; trtllm-build --x 1; echo"]', 1, ("--x", "1")),
        ("command: trtllm-build --x 1\nother: [1, {a: b}]", 1, ("--x", "1")),
        ("a: 1\n---\nb:\n  command: [trtllm-build, --x]", 4, ("--x",)),
        ('FROM base\nCMD ["trtllm-build", "--x", "1"]', 2, ("--x", "1")),
        ('a: {{ .Values.a }}\ncommand: ["trtllm-build", "--x"]  # of a template', 2, ("--x",)),
    ],
)
def test_commands_given_as_lists_are_found(text, line, arguments):
    assert find_commands(text) == [FoundCommand("trtllm-build", arguments, line)]


ENGINE_PARAMETERS = "max_batch_size: 8\nkv_cache_config:\n  free_gpu_memory_fraction: 0.9\n"
BUILD = "trtllm-build --output_dir engine\n"
OTHER_MODEL = "a config.pbtxt of another model than the engine's"
AROUND = 'max_batch_size: 64\nparameters { key: "tokenizer_dir" value { string_value: "t" } }\n'
CONFIG_MAP = "data:\n  config.pbtxt: |\n" + "".join(f"    {line}\n" for line in PBTXT.splitlines())
CONFIG_MAP += "  preprocessing.pbtxt: |\n" + "".join(f"    {line}\n" for line in AROUND.splitlines())


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("config.pbtxt", PBTXT, "settings"),
        ("config.pbtxt.template", "max_batch_size: 8\n", "settings"),
        ("config.txt", PBTXT, "settings"),
        ("config.pbtxt", f'backend: "tensorrtllm"\n{AROUND}', "settings"),
        ("model", 'backend: "tensorrtllm"\nmax_batch_size: 8\n', "settings"),
        ("map.yaml", CONFIG_MAP, "settings"),
        ("start.yaml", f"max_batch_size: 8\ncommand: {BUILD}", "commands"),
        ("start.sh", f"cat > e.yaml <<E\nmax_batch_size: 8\nE\n{BUILD}", "commands"),
        ("Dockerfile", f"RUN {BUILD}", "commands"),
        ("Dockerfile", 'CMD ["trtllm-serve", "engine"]', "commands"),
        ("extra.yaml", ENGINE_PARAMETERS, "options"),
        ("extra", ENGINE_PARAMETERS, "options"),
        ("job", f"max_batch_size: 8\ncommand: {BUILD}", "commands"),
    ],
)
def test_a_file_is_read_as_what_it_is_by_its_name_or_its_text(tmp_path, name, text, form):
    (tmp_path / name).write_text(text)
    found = read_serving_file(tmp_path / name)
    assert [key for key, value in vars(found).items() if value] == [form]
    if text in (PBTXT, CONFIG_MAP):
        assert found.settings == (read_pbtxt(PBTXT),)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.pbtxt", f'backend: "python"\n{AROUND}', OTHER_MODEL),
        ("config.pbtxt", 'platform: "ensemble"\nmax_batch_size: 64\n', OTHER_MODEL),
        ("values.yaml", "replicas: 2\nimage: {tag: 1}\n", "YAML with replicas, image at its top"),
        ("values", "replicas: 2\nimage: {tag: 1}\n", "YAML with replicas, image at its top"),
        ("list.yml", "- 1\n- 2\n", "YAML without such commands"),
        ("config.pbtxt", 'name: "ensemble"\n', "a config.pbtxt without parameters"),
        ("config.pbtxt", "", "0 bytes"),
        ("start.sh", "max_batch_size: 8\n", "a script without such commands"),
        ("start.sh", "trtllm-serve disaggregated -c c.yaml\n", "a script without such commands"),
        ("notes.txt", "nothing of ours", "a text without such commands"),
    ],
)
def test_a_file_that_is_neither_is_refused_with_what_it_is(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(CapturedFileError, match=r"nothing to check|is empty") as caught:
        read_serving_file(tmp_path / name)
    assert caught.value.found == said


@pytest.mark.parametrize("text", ["a: &a [*a]", "[" * 5000, "command: [serve, --x]", "CMD ['a', 3]"])
def test_what_holds_no_command_is_read_to_its_end(text):
    assert find_commands(text) == []


def test_a_flag_of_another_release_is_flagged_in_a_list_too():
    text = "command: [trtllm-build]\nargs: [--checkpoint_dir, ckpt, --max_output_len, '64']"
    found = {gate.name: gate for gate in check_commands(find_commands(text), "0.13.0") if gate.verdict != "pass"}
    assert "now --max_seq_len" in found["flags of trtllm-build, line 1"].value


def test_switches_and_values_in_their_places_pass():
    command = "trtllm-build --output_dir=engine --strip_plan --max_batch_size $BATCH --use_fused_mlp --gemm_plugin auto"
    gates = check_commands(find_commands(command), "0.13.0")
    assert {gate.verdict for gate in gates} == {"pass"}


@pytest.mark.parametrize("release", ["0.16.0.dev2024121000", "0.17.0", "1.0.0", "1.2.1"])
def test_the_llm_snippet_is_python_for_its_release(release):
    text = write_llm_snippet(release, CHOICES, num_heads=4, max_draft_len=63, engine_dir="engine")
    ast.parse(text)
    assert ("_tensorrt_engine" in text) == (release >= "1.0")
    assert ("max_draft_len" in text) == (not release.startswith("0.16"))
    assert "[[0], [0, 0], [1]]" in text
    assert 'tokenizer="tokenizer"' in text


RECORDED = json.loads((Path(__file__).parent / "stand_in" / "recorded.json").read_text())


def recorded_class(release, name, entry, opened):
    """A class that takes the keywords recorded for a release, no others, and counts how often it is made."""
    names = RECORDED[release][entry].split()

    def make(self, **given):
        strangers = set(given) - set(names)
        if strangers and "**" not in names:
            raise TypeError(f"{name} of {release} takes no {sorted(strangers)}")
        opened.append(name)

    def generate(self, inputs, sampling_params):
        return [SimpleNamespace(outputs=[SimpleNamespace(text="and the sky")]) for _ in inputs]

    return type(name, (), {"__init__": make, "generate": generate})


@pytest.mark.parametrize("release", ["0.16.0.dev2024121000", "0.20.0", "1.0.0", "1.1.0rc6", "1.2.0"])
def test_the_llm_snippet_runs_on_the_recorded_signatures_and_only_as_the_main_file(
    release, tmp_path, monkeypatch, capsys
):
    """LLM starts worker processes, and each imports the main file under another name: it must open nothing there."""
    opened = []
    package, place, llmapi = (ModuleType(f"tensorrt_llm{tail}") for tail in ("", "._tensorrt_engine", ".llmapi"))
    (place if release >= "1.0" else package).LLM = recorded_class(release, "LLM", "LLM.__init__", opened)
    for name in ("MedusaDecodingConfig", "SamplingParams"):
        setattr(llmapi, name, recorded_class(release, name, name, opened))
    for module in (package, place, llmapi):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    file = tmp_path / "serve.py"
    file.write_text(write_llm_snippet(release, CHOICES, num_heads=4, max_draft_len=63, engine_dir="engine"))
    runpy.run_path(str(file), run_name="__mp_main__")
    assert opened == []
    runpy.run_path(str(file), run_name="__main__")
    assert opened == ["MedusaDecodingConfig", "LLM", "SamplingParams"]
    assert capsys.readouterr().out == "and the sky\n"


def test_releases_whose_llm_takes_no_tree_have_no_snippet():
    assert write_llm_snippet("0.13.0", CHOICES, num_heads=4, max_draft_len=63, engine_dir="engine") is None


@pytest.mark.parametrize(("content", "said"), [(None, "does not exist"), (b"", "empty"), (b"\xff\xfe\x00", "no text")])
def test_files_that_cannot_be_read(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.pbtxt").write_bytes(content)
    with pytest.raises(CapturedFileError, match=said):
        read_text_file(tmp_path / "config.pbtxt")
