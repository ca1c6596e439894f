"""Captured output files: what run.py writes comes back unchanged, and every other file is refused with its cause."""

import numpy as np
import pytest

from porting_kit.engine.captured import (
    read_captured_logits,
    read_captured_tokens,
    write_captured_logits,
    write_captured_tokens,
)
from porting_kit.errors import CapturedFileError

VOCAB = 160
END = 2
PROMPTS = [[10, 11, 12], [20, 21, 22, 23, 24], [30, 31, 32, 33]]
OUTPUTS = [[40, 41, END], [50, 51, 52, 53], [60, END]]
NEW_TOKENS = 4


def write(tmp_path, prompts=PROMPTS, outputs=OUTPUTS, name="output.npy", **options):
    return write_captured_tokens(tmp_path / name, prompts, outputs, **{"end_id": END, "length": 16} | options)


def read(file, prompts=PROMPTS, **options):
    settings = {"end_ids": [END], "vocab_size": VOCAB, "max_new_tokens": NEW_TOKENS} | options
    return read_captured_tokens(file, prompts, **settings)


@pytest.mark.parametrize("name", ["output.npy", "output.csv"])
def test_what_run_py_writes_is_read_back(tmp_path, name):
    sequences = read(write(tmp_path, name=name))
    assert [list(sequence.tokens) for sequence in sequences] == OUTPUTS
    assert [list(sequence.prompt) for sequence in sequences] == PROMPTS
    assert [sequence.ended_by for sequence in sequences] == [END, None, END]


def test_the_npy_file_has_the_format_of_run_py(tmp_path):
    table = np.load(write(tmp_path))
    assert table.dtype == np.int32
    assert table.shape == (3, 16)
    assert table[0].tolist() == [10, 11, 12, 40, 41, END, *[END] * 10]
    assert np.load(write(tmp_path, length=None)).shape == (3, 9)


def test_without_a_length_the_end_id_still_ends_a_row(tmp_path):
    sequences = read(write(tmp_path), max_new_tokens=None)
    assert list(sequences[0].tokens) == OUTPUTS[0]
    assert list(sequences[1].tokens) == [*OUTPUTS[1], END]  # fill and end cannot be told apart without the length


def test_an_end_id_as_first_last_and_only_token(tmp_path):
    outputs = [[END], [50, 51, 52, END], [60, 61, 62, 63]]
    sequences = read(write(tmp_path, outputs=outputs))
    assert [list(sequence.tokens) for sequence in sequences] == outputs


def test_several_end_ids_cut_at_the_first_and_say_that_the_engine_ran_past_it(tmp_path):
    outputs = [[40, 7, 41, END], [50, END], [60, 61, 62, 7]]
    sequences = read(write(tmp_path, outputs=outputs), end_ids=[END, 7], max_new_tokens=4)
    assert [list(sequence.tokens) for sequence in sequences] == [[40, 7], [50, END], [60, 61, 62, 7]]
    assert [sequence.ended_by for sequence in sequences] == [7, END, 7]
    assert [sequence.ran_past_end for sequence in sequences] == [True, False, False]


def test_a_run_with_another_end_id_is_read_when_it_is_stated(tmp_path):
    file = write(tmp_path, outputs=[[40, 7], [50, 51, 52, 53], [60, 7]], end_id=7)
    with pytest.raises(CapturedFileError, match="filled with 7"):
        read(file)
    sequences = read(file, end_ids=[END, 7], run_end_id=7)
    assert [list(sequence.tokens) for sequence in sequences] == [[40, 7], [50, 51, 52, 53], [60, 7]]


def test_the_python_session_may_leave_a_pad_id_behind_short_prompts(tmp_path):
    table = np.load(write(tmp_path))
    table[0, 6:10] = 0
    np.save(tmp_path / "padded.npy", table)
    with pytest.raises(CapturedFileError, match="go on behind"):
        read(tmp_path / "padded.npy")
    assert list(read(tmp_path / "padded.npy", pad_id=0)[0].tokens) == OUTPUTS[0]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[10, 11, 99], *PROMPTS[1:]], "differs from token 2"),
        ([[98, 99, 97], *PROMPTS[1:]], "another prompt, or generated ids only"),
        ([[9, 10, 11, 12], *PROMPTS[1:]], "first token is missing"),
        ([[7, 8, 9, 10, 11, 12], *PROMPTS[1:]], "first 3 tokens are missing"),
        ([[11, 12], *PROMPTS[1:]], "a token stands before the prompt"),
        ([PROMPTS[1], PROMPTS[0], PROMPTS[2]], "another order"),
        (PROMPTS[:2], "another number of prompts"),
        ([*PROMPTS, [1]], "another number of prompts"),
        ([PROMPTS[0], PROMPTS[1], list(range(30, 60))], "shorter than the prompt"),
    ],
)
def test_a_file_of_other_prompts_is_refused_with_its_cause(tmp_path, prompts, words):
    with pytest.raises(CapturedFileError, match=words):
        read(write(tmp_path), prompts=prompts)


def test_beams_are_named(tmp_path):
    doubled = [prompt for prompt in PROMPTS for _ in range(2)]
    file = write(tmp_path, prompts=doubled, outputs=[output for output in OUTPUTS for _ in range(2)])
    with pytest.raises(CapturedFileError) as raised:
        read(file)
    assert "2 beams a prompt?" in raised.value.found


@pytest.mark.parametrize("fill", [0, 3])
def test_another_fill_id_is_refused(tmp_path, fill):
    with pytest.raises(CapturedFileError, match=f"filled with {fill}"):
        read(write(tmp_path, end_id=fill))


def test_tokens_behind_the_end_are_refused(tmp_path):
    table = np.load(write(tmp_path))
    table[0, 7:9] = [90, 91]
    np.save(tmp_path / "longer.npy", table)
    with pytest.raises(CapturedFileError, match="go on behind"):
        read(tmp_path / "longer.npy")


@pytest.mark.parametrize("token", [-1, VOCAB, 10**6])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, token):
    with pytest.raises(CapturedFileError, match="outside the vocabulary") as raised:
        read(write(tmp_path, outputs=[[token], *OUTPUTS[1:]]))
    assert str(token) in raised.value.items


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\x93NUMPY\x01\x00", "cannot be read"),
        (b"1,2,x\n", "neither a .npy file nor rows of integers"),
        (b"\x89PNG\r\n", "neither a .npy file nor rows of integers"),
        (b"1,2,3\n1,2\n4,5,6\n", "different lengths"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_broken_files_are_refused(tmp_path, content, words):
    file = tmp_path / "output.npy"
    file.write_bytes(content)
    with pytest.raises(CapturedFileError, match=words) as raised:
        read(file)
    assert (raised.value.where, bool(raised.value.next_step)) == (str(file), True)


def test_a_cut_off_npy_file_is_refused(tmp_path):
    whole = write(tmp_path).read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-20])
    with pytest.raises(CapturedFileError, match="cannot be read"):
        read(tmp_path / "cut.npy")


def test_a_missing_file_and_missing_end_ids_are_refused(tmp_path):
    with pytest.raises(CapturedFileError, match="does not exist"):
        read(tmp_path / "nothing.npy")
    with pytest.raises(CapturedFileError, match="no end id"):
        read(write(tmp_path), end_ids=[])


def test_a_table_that_is_no_id_table_is_refused(tmp_path):
    np.save(tmp_path / "float.npy", np.zeros((3, 16), dtype=np.float32))
    with pytest.raises(CapturedFileError, match="not a table of token ids"):
        read(tmp_path / "float.npy")


def make_logits(columns=VOCAB):
    generator = np.random.default_rng(0)
    logits = [generator.normal(size=(len(output), columns)).astype(np.float32) for output in OUTPUTS]
    for array, output in zip(logits, OUTPUTS, strict=True):
        array[np.arange(len(output)), output] = 9.0
        array[:, VOCAB:] = 100.0  # padded columns must not take part
    return logits


@pytest.mark.parametrize("columns", [VOCAB, VOCAB + 2])
def test_logits_are_read_back_for_the_tokens_they_belong_to(tmp_path, columns):
    logits = make_logits(columns)
    write_captured_logits(tmp_path / "logits.npy", logits)
    assert (tmp_path / "logits_generation.npy").is_file()
    sequences = read_captured_logits(tmp_path / "logits.npy", read(write(tmp_path)), vocab_size=VOCAB)
    for sequence, expected in zip(sequences, logits, strict=True):
        np.testing.assert_array_equal(sequence.logits, expected)


def test_a_beam_dimension_of_one_is_dropped(tmp_path):
    file = write_captured_logits(tmp_path / "logits.npy", make_logits())
    np.save(file, np.load(file)[:, None])
    sequences = read_captured_logits(file, read(write(tmp_path)), vocab_size=VOCAB)
    assert sequences[0].logits.shape == (3, VOCAB)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table[:2], "do not fit"),
        (lambda table: table[:, :2], "do not fit"),
        (lambda table: table[..., : VOCAB - 1], "do not fit"),
        (lambda table: table.astype(np.float16), "do not fit"),
        (lambda table: np.where(table == 9.0, np.nan, table), "not finite"),
        (lambda table: np.where(table == 9.0, -9.0, table), "another run"),
    ],
)
def test_logits_that_do_not_belong_are_refused(tmp_path, change, words):
    file = write_captured_logits(tmp_path / "logits.npy", make_logits())
    table = change(np.load(file))
    np.save(file, table if table.dtype == np.float16 else table.astype(np.float32))
    with pytest.raises(CapturedFileError, match=words):
        read_captured_logits(file, read(write(tmp_path)), vocab_size=VOCAB)


def test_writing_refuses_what_run_py_could_not_have_written(tmp_path):
    with pytest.raises(CapturedFileError, match="differ in number"):
        write(tmp_path, outputs=OUTPUTS[:2])
    with pytest.raises(CapturedFileError, match="longer than the file is wide"):
        write(tmp_path, length=5)
    with pytest.raises(CapturedFileError, match="no common vocabulary"):
        write_captured_logits(tmp_path / "logits.npy", [np.zeros((1, 4)), np.zeros((1, 5))])


def test_rows_filled_with_a_later_end_id_are_read_by_it(tmp_path):
    """Llama 3's folders name three end ids; run.py fills with the tokenizer's, which is the last of them."""
    outputs = [[40, 41, 9], [50, 9], [60, 61, 62, 63]]
    for new_tokens in (4, None):
        file = write(tmp_path, outputs=outputs, end_id=9, length=None if new_tokens is None else 16)
        sequences = read(file, end_ids=[5, 7, 9], max_new_tokens=new_tokens)
        assert [sequence.ended_by for sequence in sequences[:2]] == [9, 9]
        assert not any(sequence.ran_past_end for sequence in sequences)
        assert [list(sequence.tokens) for sequence in sequences] == outputs


def test_a_file_of_prompts_alone_is_refused(tmp_path):
    table = np.load(write(tmp_path))[:, : max(map(len, PROMPTS))]
    np.save(tmp_path / "alone.npy", table)
    with pytest.raises(CapturedFileError, match="the prompts alone"):
        read(tmp_path / "alone.npy")


def test_a_run_that_was_asked_for_fewer_tokens_is_not_read_as_one_that_ended(tmp_path):
    """Every text of it seems to end at the same place, where the fill begins."""
    prompts, outputs = [[10, 11], [20, 21, 22, 23]], [[40, 41], [50, 51]]
    file = write(tmp_path, prompts=prompts, outputs=outputs, length=None)
    with pytest.raises(CapturedFileError, match="asked for fewer tokens") as caught:
        read(file, prompts=prompts, max_new_tokens=4)
    assert "new_tokens: 2" in caught.value.next_step
    assert [list(sequence.tokens) for sequence in read(file, prompts=prompts, max_new_tokens=2)] == outputs


def test_one_beam_may_have_its_own_dimension(tmp_path):
    table = np.load(write(tmp_path))
    np.save(tmp_path / "beams.npy", table[:, None])
    assert [list(sequence.tokens) for sequence in read(tmp_path / "beams.npy")] == OUTPUTS
    np.save(tmp_path / "beams.npy", np.stack([table, table], axis=1))
    with pytest.raises(CapturedFileError, match="not a table of token ids"):
        read(tmp_path / "beams.npy")


def test_logits_of_another_run_are_refused_and_those_of_sampled_tokens_are_not(tmp_path):
    generator = np.random.default_rng(0)
    sequences = read(write(tmp_path))
    count = sum(len(sequence.tokens) for sequence in sequences)
    logits = generator.standard_normal((len(PROMPTS), NEW_TOKENS, VOCAB)).astype(np.float32)
    np.save(tmp_path / "other.npy", logits)
    assert count >= 4
    with pytest.raises(CapturedFileError, match="another run"):
        read_captured_logits(tmp_path / "other.npy", sequences, vocab_size=VOCAB)
    for index, sequence in enumerate(sequences):
        for place, token in enumerate(sequence.tokens):
            logits[index, place, token] = np.sort(logits[index, place])[-VOCAB // 10]
    np.save(tmp_path / "sampled.npy", logits)
    assert read_captured_logits(tmp_path / "sampled.npy", sequences, vocab_size=VOCAB)[0].logits is not None
