"""Prompts that a base makes itself: whole, new, the same for a seed, and refused where the base cannot give them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from porting_kit.errors import BaseModelError, HeadsError
from porting_kit.medusa import training
from porting_kit.medusa.self_chat import cut_turn, find_special_ids, sample_questions
from porting_kit.medusa.self_distillation import IGNORED, Frame, build_chat_frame, continue_greedily
from porting_kit.medusa.training import make_prompts, train_heads, train_on_continuations
from porting_kit.medusa.training_run import TrainingSettings

SPECIAL = ["<user>", "<end>", "<answer>", "<stop>"]
END, STOP = 1, 3
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}be kind<end>{% endif %}"
    "<{{ message.role }}>{{ message.content }}<end>{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
SMALL = TrainingSettings(
    num_heads=2,
    prompts=0,
    self_chat=24,
    self_chat_tokens=40,
    self_chat_temperature=1.5,
    self_chat_top_p=1.0,
    new_tokens=8,
    generation_rows=64,
    batch_positions=64,
    steps=4,
    held_out_rows=8,
    tree_nodes=4,
)
SAMPLING = {"seed": 0, "max_tokens": 40, "temperature": 1.5, "top_p": 1.0, "batch_rows": 64}


def say_nothing(line: str) -> None:
    return None


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a letter, and those of the template."""
    letters = [" ", *(chr(97 + place) for place in range(26)), "."]
    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<stop>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[:3]})
    fast.chat_template = template
    return fast


def make_model(*end_ids: int) -> BloomForCausalLM:
    """A random Bloom of the tokenizer's 32 tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "n_layer": 2, "n_head": 2, "tie_word_embeddings": False}
    model = BloomForCausalLM(BloomConfig(**sizes, initializer_range=0.3))
    model.generation_config.eos_token_id = list(end_ids) or None
    model.config.eos_token_id = end_ids[0] if end_ids else None
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> BloomForCausalLM:
    return make_model(STOP)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def sample(model, tokenizer, count: int = 24, **changed):
    return sample_questions(model, tokenizer, count, **{**SAMPLING, **changed}, report=say_nothing)


def test_questions_stand_in_the_template_and_are_new(model, tokenizer):
    found = sample(model, tokenizer)
    assert len(found.prompts) == len(set(found.prompts)) == 24
    special = find_special_ids(tokenizer)
    assert special == {0, 1, 2, 3}
    for prompt in found.prompts:
        text = tokenizer.decode(prompt).replace(" ", "")
        assert text.startswith("bekind<end><user>")
        assert text.endswith("<end><answer>")
        turn = prompt[9:-2]
        assert turn
        assert special.isdisjoint(turn)
        assert len(turn) < 40
    assert len({len(prompt) for prompt in found.prompts}) > 3


def test_a_turn_ends_at_a_stop_token_of_the_model_or_of_the_template():
    assert cut_turn([7, 8, STOP, 9, END], {STOP, END}, (END, 2)) == (7, 8)
    assert cut_turn([7, END, 9, STOP], {STOP, END}, (END, 2)) == (7,)
    # a template that ends a turn with plain words: all of them end it, the first alone does not
    assert cut_turn([7, 20, 9, 20, 21, 8], set(), (20, 21)) == (7, 20, 9)
    assert cut_turn([7, 20, 9], {STOP}, (20, 21)) is None
    assert cut_turn([7, 20, 9], {STOP}, ()) is None


def test_sampling_stops_at_every_end_token(tokenizer, monkeypatch):
    """A model of two stop tokens, and the template's, which the model does not name."""
    model, asked = make_model(STOP, 30), []
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda *a, **k: (asked.append(k["generation_config"].eos_token_id), generate(*a, **k))[1]
    )
    found = sample(model, tokenizer)
    assert {tuple(ends) for ends in asked} == {(END, STOP, 30)}
    assert not any(30 in prompt for prompt in found.prompts)


def test_the_same_seed_gives_the_same_questions(model, tokenizer):
    state = torch.random.get_rng_state()
    first = sample(model, tokenizer)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert sample(model, tokenizer) == first
    assert sample(model, tokenizer, seed=1).prompts != first.prompts
    torch.random.set_rng_state(state)


def test_what_is_no_question_is_dropped_and_counted(tokenizer):
    short = sample(make_model(STOP, *range(20, 32)), tokenizer, 40, max_tokens=3)
    assert len(set(short.prompts)) == 40
    assert short.dropped["repeated"] > 0
    assert short.dropped["without an end"] > 0
    assert short.dropped["empty"] > 0
    assert short.dropped["with a special token"] > 0
    assert sum(short.dropped.values()) + 40 <= short.sampled
    assert all(1 <= len(prompt) - 11 <= 2 for prompt in short.prompts)


def test_a_base_that_repeats_itself_is_refused(tokenizer):
    model, batches = make_model(), []
    before = tokenizer("be kind<end><user>", return_tensors="pt")["input_ids"]
    first = int(model(before).logits[0, -1].argmax())
    model.generation_config.eos_token_id = [token for token in range(32) if token != first]
    with pytest.raises(HeadsError, match="hardly any") as caught:
        sample_questions(model, tokenizer, 500, **{**SAMPLING, "temperature": 1e-4}, report=batches.append)
    assert "191 repeated" in caught.value.found
    assert "--data" in caught.value.next_step
    assert len(batches) == 3


def test_a_random_base_whose_turns_do_not_end_is_refused(tokenizer):
    with pytest.raises(HeadsError, match="hardly any") as caught:
        sample(make_model(STOP), tokenizer, max_tokens=2, temperature=0.5)
    assert "without an end" in caught.value.found


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}<end>{% endfor %}"])
def test_a_base_that_cannot_be_asked_is_refused_before_anything_is_computed(model, template, monkeypatch):
    monkeypatch.setattr(model, "generate", lambda *a, **k: pytest.fail("the base was asked"))
    with pytest.raises(HeadsError, match="chat template") as caught:
        sample(model, make_tokenizer(template))
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("template", "said", "found"),
    [
        ("{% for m in messages %}<user>{{ m.content }}<end>{{ m.content }}{% endfor %}", "once", "2 times"),
        ("{% for m in messages %}<user>fixed<end>{% endfor %}", "once", "0 times"),
        ("{% for m in messages %}<user>{{ m.content[0].text }}<end>{% endfor %}", "once", "0 times"),
        ("{% for m in messages %}<user>{{ m.content | tojson }}<end>{% endfor %}", "once", "0 times"),
        ("{% if bad", "fails", "TemplateSyntaxError"),
        ("{{ raise_exception('a system turn comes first') }}", "fails", "a system turn comes first"),
        ("{{ messages[0].content + 1 }}", "fails", "TypeError"),
    ],
)
def test_a_template_that_makes_no_frame_is_refused(template, said, found):
    with pytest.raises(HeadsError, match=said) as caught:
        build_chat_frame(make_tokenizer(template))
    assert found in caught.value.found
    assert "--data" in caught.value.next_step


def test_a_template_may_strip_what_is_around_the_words(tokenizer):
    trimmed = make_tokenizer(TEMPLATE.replace("message.content", "message.content | trim"))
    assert build_chat_frame(trimmed) == build_chat_frame(tokenizer) != Frame()


def test_turns_that_are_too_long_are_refused_by_their_own_option(model, tokenizer):
    with pytest.raises(HeadsError, match="do not fit") as caught:
        sample(model, tokenizer, max_tokens=10_000)
    assert caught.value.next_step == "ask for fewer (--self-chat-tokens)"


def test_a_template_of_another_base_is_refused_before_anything_is_computed(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model, "generate", lambda *a, **k: pytest.fail("the base was asked"))
    monkeypatch.setattr(model.config, "vocab_size", 8)
    with pytest.raises(BaseModelError, match="tokenizer does not belong"):
        sample(model, tokenizer)


# training


def texts() -> list[str]:
    rows = torch.randint(26, (40, 70), generator=torch.Generator().manual_seed(1))
    return ["".join(chr(97 + int(letter)) for letter in row) for row in rows]


def settings(**changed) -> TrainingSettings:
    return TrainingSettings(**{**vars(SMALL), **changed})


def test_prompts_of_texts_and_questions_are_mixed(model, tokenizer):
    both = settings(prompts=16, prompt_tokens=(20,))
    prompts, chat = make_prompts(model, tokenizer, texts(), both, report=say_nothing)
    assert len(prompts) == 40
    assert tuple(prompts[16:]) == chat.prompts
    only, none = make_prompts(model, tokenizer, texts(), settings(prompts=16, self_chat=0), report=say_nothing)
    assert (len(only), none) == (16, None)


def test_held_out_rows_are_of_both_kinds(model, tokenizer, monkeypatch):
    seen = []

    def keep_held_out(continuations, *arguments, **options):
        seen.append(continuations.tokens[: SMALL.held_out_rows].tolist())
        return train_on_continuations(continuations, *arguments, **options)

    monkeypatch.setattr(training, "train_on_continuations", keep_held_out)
    both = settings(prompts=16, prompt_tokens=(20,))
    prompts, _ = make_prompts(model, tokenizer, texts(), both, report=say_nothing)
    train_heads(model, tokenizer, texts(), both, report=say_nothing)
    said = [
        {tuple(continue_greedily(model, [prompt], new_tokens=8, batch_rows=1, report=say_nothing).tokens[0].tolist())}
        for prompt in prompts
    ]
    of_text, of_chat = set().union(*said[:16]), set().union(*said[16:])
    held_out = {tuple(row) for row in seen[0]}
    assert held_out & (of_text - of_chat)
    assert held_out & (of_chat - of_text)


def test_processes_sample_questions_of_their_own(model, tokenizer):
    both = settings(prompts=17, prompt_tokens=(20,), self_chat=9)
    shares = [
        make_prompts(model, tokenizer, texts(), both, report=say_nothing, rank=rank, world_size=2) for rank in (0, 1)
    ]
    assert [len(chat.prompts) for _, chat in shares] == [5, 4]
    assert [len(prompts) for prompts, _ in shares] == [14, 12]
    assert not set(shares[0][1].prompts) & set(shares[1][1].prompts)
    # seeded fault: with one seed they would be the same
    assert set(sample(model, tokenizer, 5).prompts) & set(sample(model, tokenizer, 4).prompts)


def test_a_process_without_a_share_samples_nothing(model, tokenizer):
    _, chat = make_prompts(model, tokenizer, [], settings(self_chat=1), report=say_nothing, rank=1, world_size=2)
    assert (chat.prompts, chat.sampled) == ((), 0)


def test_training_on_questions_alone_says_how_they_were_made(model, tokenizer):
    trained = train_heads(model, tokenizer, [], SMALL, report=say_nothing)
    chat = trained.as_dict()["self_chat"]
    assert {**chat, "sampled": 0} == {"asked": 24, "sampled": 0, "kept": 24, "temperature": 1.5, "top_p": 1.0}
    assert chat["sampled"] >= 24
    without = train_heads(model, tokenizer, texts(), settings(prompts=16, self_chat=0), report=say_nothing)
    assert "self_chat" not in without.as_dict()


@pytest.mark.parametrize("changed", [{"self_chat": 25}, {"self_chat_temperature": 1.4}, {"self_chat_top_p": 0.9}])
def test_a_checkpoint_of_other_questions_is_refused(model, tokenizer, tmp_path: Path, changed):
    options = {"checkpoint": tmp_path / "run.pt", "report": say_nothing}
    train_heads(model, tokenizer, [], SMALL, **options)
    train_heads(model, tokenizer, [], SMALL, **options)
    with pytest.raises(HeadsError, match="other settings"):
        train_heads(model, tokenizer, [], settings(**changed), **options)


def test_neither_texts_nor_questions_are_refused(capsys):
    with pytest.raises(HeadsError, match="nothing to train on"):
        settings(self_chat=0)
    with pytest.raises(SystemExit) as caught:
        training.main(["base", "out", "--prompts", "0"])
    assert caught.value.code == 2
    assert "--self-chat N" in capsys.readouterr().err


# continuing prompts of many lengths together


def make_prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(32, (length,), generator=generator).tolist() for length in lengths]


def by_first_states(continuations) -> dict[tuple[float, ...], list[int]]:
    rows = zip(continuations.hidden[:, 0, :4].tolist(), continuations.tokens.tolist(), strict=True)
    return {tuple(round(value, 3) for value in state): tokens for state, tokens in rows}


@pytest.mark.parametrize("has_ends", [False, True])
def test_prompts_of_many_lengths_say_together_what_each_says_alone(has_ends):
    """Also where a token ends the text that stands inside the prompts too."""
    model, prompts = make_model(), make_prompts_of([3, 4, 4, 6, 7, 9, 11, 12])
    if has_ends:
        said = continue_greedily(model, prompts, new_tokens=4, batch_rows=8, report=say_nothing).tokens
        prompts[-1][-2] = prompts[-3][-1] = int(said[0, 3])
        model.generation_config.eos_token_id = [int(said[0, 3]), STOP]
    together = continue_greedily(model, prompts, new_tokens=12, batch_rows=8, report=say_nothing)
    alone = [continue_greedily(model, [prompt], new_tokens=12, batch_rows=8, report=say_nothing) for prompt in prompts]
    expected = {key: row for one in alone for key, row in by_first_states(one).items()}
    assert by_first_states(together) == expected
    assert len(expected) == len(prompts)
    said = [tuple(row) for row in expected.values()]
    assert len(set(said)) > 4
    assert any(IGNORED in row for row in said) == has_ends


def test_hidden_states_of_many_lengths_are_those_the_tokens_were_chosen_from(model):
    found = continue_greedily(model, make_prompts_of([3, 5, 9]), new_tokens=6, batch_rows=8, report=say_nothing)
    chosen = (found.hidden @ model.get_output_embeddings().weight.T).argmax(-1)
    known = found.tokens[:, :-1] != IGNORED
    assert torch.equal(chosen[known], found.tokens[:, :-1][known])


@pytest.mark.parametrize(
    ("lengths", "rows", "steps"),
    [
        ([5, 5, 5, 5], 4, [6]),
        ([5, 6, 7, 8], 4, [9]),
        ([5, 6, 7, 8], 2, [7, 7]),
        ([5, 6, 11, 12], 4, [12, 6]),  # 12 is more than six tokens from 5: a further call is cheaper
    ],
)
def test_batches_take_lengths_that_lie_close(model, monkeypatch, lengths, rows, steps):
    taken, generate = [], model.generate
    monkeypatch.setattr(
        model, "generate", lambda *a, **k: (taken.append(k["generation_config"].max_new_tokens), generate(*a, **k))[1]
    )
    found = continue_greedily(model, make_prompts_of(lengths), new_tokens=6, batch_rows=rows, report=say_nothing)
    assert taken == steps
    assert found.rows == len(lengths)
