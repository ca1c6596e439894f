"""`porting-kit diagnose` on files that do not belong, and on files that do: exit codes, causes, the page."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from porting_kit.cli import app
from porting_kit.diagnosis import seed_fault
from porting_kit.diagnosis.catalogue import find_fault
from porting_kit.engine.captured import write_captured_logits, write_captured_tokens
from porting_kit.medusa.decoding import generate_medusa
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.context import open_port_run
from porting_kit.steps.prerequisites import require_steps
from tests.cli.conftest import PortFolder
from tests.steps.sharded_port import write_port

NEW_TOKENS = 8
END_ID = 2


def diagnose(opened, *arguments):
    """Exit code, JSON document."""
    command = ["diagnose", opened.file, "--out", opened.out, "--observed", *arguments, "--json"]
    result = CliRunner().invoke(app, list(map(str, command)))
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture(scope="module")
def opened(pristine_port, tmp_path_factory):
    """A port that was patched and converted, its healthy tokens, and where to write."""
    folder = tmp_path_factory.mktemp("diagnose") / "port"
    shutil.copytree(pristine_port, folder)
    port = PortFolder(folder)
    out = folder / "run"
    for command in ("patch", "convert"):
        assert CliRunner().invoke(app, [command, str(port.file), "--out", str(out)]).exit_code == 0
    session = AlignmentSession(open_port_run(port.file, run_folder=out))
    healthy = generate_medusa(session.port_state.build(), session.tree, session.prompts, NEW_TOKENS, keep_logits=True)
    return SimpleNamespace(file=port.file, out=out, session=session, healthy=healthy)


def write(opened, path, prompts=None, tokens=None):
    return write_captured_tokens(
        path, prompts or opened.session.prompts, tokens or opened.healthy.tokens, end_id=END_ID
    )


def spoil_ids(opened, path):
    write(opened, path, tokens=[[row[0], 90000, *row[2:]] for row in opened.healthy.tokens])


def spoil_prompts(opened, path):
    write(opened, path, prompts=[[7] * len(prompt) for prompt in opened.session.prompts])


def spoil_batch(opened, path):
    write(opened, path, prompts=opened.session.prompts[:1], tokens=opened.healthy.tokens[:1])


def drop_prompts(opened, path):
    rows = [np.asarray(row, dtype=np.int32) for row in opened.healthy.tokens]
    np.save(path, np.stack(rows))


def cut_rows(opened, path):
    write(opened, path)
    np.save(path, np.load(path)[:, :2])


def cut_prompts(opened, path):
    write(opened, path, prompts=[prompt[1:] for prompt in opened.session.prompts])


def cut_file(opened, path):
    write(opened, path)
    path.write_bytes(path.read_bytes()[:-20])


def pad_with_another_id(opened, path):
    write(opened, path)
    rows = np.load(path)
    short = min(range(len(rows)), key=lambda index: len(opened.session.prompts[index]))
    start = len(opened.session.prompts[short]) + len(opened.healthy.tokens[short])
    rows[short, start:] = 5
    np.save(path, rows)


def keep_two_tokens(opened, path):
    """One new token fewer than each prompt has: rows end inside the longest prompt."""
    write(opened, path)
    longest = max(map(len, opened.session.prompts))
    np.save(path, np.load(path)[:, :longest])


def write_nothing(opened, path):
    path.write_bytes(b"")


def write_only_blank_lines(opened, path):
    path.write_text("\n\n")


def write_no_file(opened, path):
    pass


def make_folder(opened, path):
    path.mkdir()


def write_text_of_the_answer(opened, path):
    path.write_text("Once upon a time, there was a king.\n")


def write_json(opened, path):
    path.write_text(json.dumps([list(map(int, row)) for row in opened.healthy.tokens]))


def write_image(opened, path):
    path.write_bytes(bytes(range(256)) * 8)


def write_foreign_archive(opened, path):
    with path.open("wb") as file:
        np.savez(file, output_ids=np.zeros((3, 3), dtype=np.int32))


def write_floats(opened, path):
    write(opened, path)
    np.save(path, np.load(path).astype(np.float32))


def write_pickle(opened, path):
    np.save(path, np.array([[1, 2], [3]], dtype=object), allow_pickle=True)


def write_beams(opened, path):
    write(opened, path)
    np.save(path, np.repeat(np.load(path), 2, axis=0))


def write_rows_in_another_order(opened, path):
    write(opened, path)
    np.save(path, np.load(path)[::-1])


def pad_on_the_left(opened, path):
    write(opened, path)
    rows = np.load(path)
    np.save(path, np.pad(rows, ((0, 0), (2, 0)), constant_values=END_ID))


def write_uneven_rows(opened, path):
    rows = [[*prompt, *row] for prompt, row in zip(opened.session.prompts, opened.healthy.tokens, strict=True)]
    rows[0] = rows[0][:-1]
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))


def write_pointer(opened, path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (keep_two_tokens, "the prompts alone"),
        (write_nothing, "empty"),
        (write_only_blank_lines, "blank lines"),
        (write_no_file, "does not exist"),
        (make_folder, "is a folder"),
        (write_text_of_the_answer, "neither a .npy file nor rows of integers"),
        (write_json, "JSON"),
        (write_image, "neither a .npy file nor rows of integers"),
        (write_foreign_archive, "not an archive of the capture script"),
        (write_floats, "not a table of token ids"),
        (write_pickle, "cannot be read"),
        (write_beams, "2 beams a prompt"),
        (write_rows_in_another_order, "in another order"),
        (pad_on_the_left, "before the prompt"),
        (write_uneven_rows, "rows of different lengths"),
        (write_pointer, "Git LFS pointer"),
        (spoil_ids, "outside the vocabulary"),
        (spoil_prompts, "another prompt"),
        (spoil_batch, "another number of prompts"),
        (drop_prompts, "generated ids only"),
        (cut_rows, "shorter than the prompt"),
        (cut_prompts, "the prompt was cut"),
        (cut_file, "cannot be read"),
        (pad_with_another_id, "filled with 5"),
    ],
)
def test_a_file_that_does_not_belong_is_unusable_input(spoil, words, opened, tmp_path):
    path = tmp_path / "observed.npy"
    spoil(opened, path)
    code, document = diagnose(opened, path)
    assert code == 2, document
    assert words in json.dumps(document["error"]), document["error"]
    assert {"subject", "expected", "found"} <= set(document["error"])


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.csv"])
def test_the_files_of_the_run_script_are_read_by_the_names_it_was_given(name, opened, tmp_path):
    """`--output_logits_npy logits.npy` writes logits_generation.npy."""
    tokens = write(opened, tmp_path / name)
    write_captured_logits(tmp_path / "logits.npy", [rows.numpy() for rows in opened.healthy.logits])
    code, document = diagnose(opened, tokens, "--logits", tmp_path / "logits.npy")
    assert (code, document["verdict"]) == (0, "pass"), document


def test_ids_of_a_session_with_its_beams_are_read(opened, tmp_path):
    tokens = write(opened, tmp_path / "tokens.npy")
    np.save(tokens, np.load(tokens)[:, None])
    assert diagnose(opened, tokens)[0] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[:, :-1], "do not fit the tokens"),
        (lambda rows: rows[:1], "do not fit the tokens"),
        (lambda rows: rows[..., :-1], "do not fit the tokens"),
        (lambda rows: rows.astype(np.float64), "float64"),
        (lambda rows: -rows, "belong to another run"),
        (None, "does not exist"),
    ],
    ids=["steps", "batch", "vocabulary", "dtype", "another run", "missing"],
)
def test_logits_that_do_not_belong_are_unusable_input(change, words, opened, tmp_path):
    tokens = write(opened, tmp_path / "tokens.npy")
    logits = tmp_path / "logits_generation.npy"
    if change is not None:
        write_captured_logits(tmp_path / "logits.npy", [rows.numpy() for rows in opened.healthy.logits])
        np.save(logits, change(np.load(logits)))
    code, document = diagnose(opened, tokens, "--logits", logits)
    assert code == 2, document
    assert words in json.dumps(document["error"]), document["error"]


def test_logits_with_padding_columns_are_cut_and_broken_ones_refused(opened, tmp_path):
    tokens = write(opened, tmp_path / "tokens.npy")
    padded = [np.pad(rows.numpy(), ((0, 0), (0, 9)), constant_values=1e9) for rows in opened.healthy.logits]
    logits = write_captured_logits(tmp_path / "logits.npy", padded)
    code, document = diagnose(opened, tokens, "--logits", logits)
    assert (code, document["to_explain"]) == (0, 0), document
    padded[0][1, 3] = np.nan
    broken = write_captured_logits(tmp_path / "broken.npy", padded)
    code, document = diagnose(opened, tokens, "--logits", broken)
    assert code == 2
    assert "not finite" in json.dumps(document["error"])


def test_an_id_in_the_padding_of_the_vocabulary_is_a_fault_with_a_name(opened, tmp_path):
    V = opened.session.reference.vocab_size
    assert V % 64, "this port's vocabulary needs padding"
    tokens = [[*row[:4], V, *row[5:]] for row in opened.healthy.tokens]
    code, document = diagnose(opened, write(opened, tmp_path / "padding.npy", tokens=tokens))
    assert (code, document["fault"]) == (1, "padding_column_wins"), document


def test_the_page_says_cause_and_fix_and_loads_nothing(opened, tmp_path):
    fault, state = seed_fault("qkv_bias_dropped", opened.session.port_state)
    tokens = generate_medusa(state.build(), opened.session.tree, opened.session.prompts, NEW_TOKENS).tokens
    code, document = diagnose(opened, write(opened, tmp_path / "faulty.npy", tokens=tokens))
    assert (code, document["fault"]) == (1, fault)
    assert document["passes"]["context"] > 0
    page = (opened.out / "diagnosis.html").read_text(encoding="utf-8")
    assert document["name"] in page
    assert "attention.qkv.bias" in page
    assert "data:image/png;base64" in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A Qwen2 port, and what an engine says that was converted as a LLaMA: no biases, base 10,000."""
    folder = tmp_path_factory.mktemp("qwen2")
    place = SimpleNamespace(file=write_port(folder), out=folder / "run")
    run = open_port_run(place.file, run_folder=place.out)
    require_steps(run, "patch", "convert")
    session = AlignmentSession(run, keeps_prompts=True)
    engine = find_fault("rope_base_lost").apply(find_fault("qkv_bias_dropped").apply(session.port_state)).build()
    said = generate_medusa(engine, session.tree, session.prompts, NEW_TOKENS, [END_ID], keep_logits=True)
    tokens = write_captured_tokens(folder / "tokens.npy", session.prompts, said.tokens, end_id=END_ID)
    logits = write_captured_logits(folder / "logits.npy", [rows.numpy() for rows in said.logits])
    return place, tokens, logits


@pytest.mark.parametrize("with_logits", [True, False])
def test_a_qwen2_converted_as_a_llama_has_two_faults_with_names(with_logits, qwen2):
    place, tokens, logits = qwen2
    code, document = diagnose(place, tokens, *(["--logits", logits] if with_logits else []))
    assert (code, document["fault"]) == (1, "qkv_bias_dropped + rope_base_lost"), document["conclusion"]
    assert document["sure"]
    assert document["ties"] == []
    assert "attn_bias: true" in document["fix"]
    assert "rotary_base" in document["fix"]


def test_texts_of_an_alignment_that_cut_its_prompts_are_recognised(tmp_path):
    """Beyond 64 tokens this base is another function: `align` cuts the prompts that would get there."""
    import transformers
    import yaml
    from safetensors.torch import save_file

    from tests.cli.conftest import make_heads

    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "heads").mkdir()
    save_file(make_heads(32, 2), tmp_path / "heads" / "medusa_lm_head.safetensors")
    port = {"name": "tiny", "base": "base", "heads": "heads", "dtype": "float32", "tree": "cartesian:2,2"}
    port["alignment"] = {"new_tokens": NEW_TOKENS, "batch_sizes": [2]}
    (tmp_path / "port.yaml").write_text(yaml.safe_dump(port))
    place = SimpleNamespace(file=tmp_path / "port.yaml", out=tmp_path / "run")
    aligned = CliRunner().invoke(app, ["align", str(place.file), "--out", str(place.out), "--json"])
    assert aligned.exit_code == 0, aligned.output
    assert "cut to their last" in json.loads((place.out / "align" / "outcome.json").read_text())["figures"]["prompts"]
    code, document = diagnose(place, place.out / "alignment" / "output_ids.npy")
    assert (code, document["verdict"]) == (0, "pass")
