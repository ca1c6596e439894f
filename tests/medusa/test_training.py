"""Training of heads: data, learning, figures, resuming; and the demo's own weights."""

from __future__ import annotations

import itertools
import json
import math
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM, PhiConfig, PhiForCausalLM

from porting_kit.errors import BaseModelError, HeadsError, TreeError
from porting_kit.medusa.head_fit import read_fit
from porting_kit.medusa.head_ranks import UNKNOWN_RANK, measure_accuracy, measure_ranks, replay_steps
from porting_kit.medusa.heads import HEADS_FILE, MedusaHeads, load_heads
from porting_kit.medusa.self_distillation import (
    IGNORED,
    WINDOW_TOKENS,
    Continuations,
    Frame,
    continue_greedily,
    cut_prompts,
)
from porting_kit.medusa.training import (
    TrainingSettings,
    held_out_loss,
    train_heads,
    train_on_continuations,
    write_trained_heads,
)
from porting_kit.medusa.training_run import TrainingRun
from porting_kit.medusa.tree_choice import choose_paths

DEMO = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini"
SMALL = TrainingSettings(
    num_heads=2,
    prompt_tokens=(4, 6),
    prompts=64,
    new_tokens=12,
    generation_rows=32,
    batch_positions=256,
    steps=150,
    learning_rates=(3e-3,),
    warmup_steps=5,
    held_out_rows=32,
    tree_nodes=6,
)


class LetterTokenizer:
    """One token a letter: all that cutting prompts needs."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [3 + (ord(letter) - 97) % 26 for letter in text if letter.isalpha()]}


def make_model(end_id: int | None = None) -> BloomForCausalLM:
    """A random Bloom whose large weights make its greedy text vary with the prompt."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.3)
    model = BloomForCausalLM(config).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = end_id
    return model


def make_texts(count: int = 60) -> list[str]:
    letters = torch.randint(26, (count, 9), generator=torch.Generator().manual_seed(1))
    return ["".join(chr(97 + int(letter)) for letter in row) for row in letters]


@pytest.fixture(scope="module")
def model() -> BloomForCausalLM:
    return make_model()


@pytest.fixture(scope="module")
def continuations(model) -> Continuations:
    prompts = cut_prompts(LetterTokenizer(), make_texts(), lengths_tokens=(4, 6), limit=64, seed=0)
    return continue_greedily(model, prompts, new_tokens=12, batch_rows=32, report=lambda line: None)


def train_quietly(continuations, model, settings=SMALL, **options):
    return train_on_continuations(
        continuations, model.get_output_embeddings(), settings, report=lambda line: None, **options
    )


def test_continuations_are_the_bases_greedy_tokens(model, continuations):
    matrix = model.get_output_embeddings().weight
    torch.testing.assert_close((continuations.hidden @ matrix.detach().T).argmax(-1), continuations.tokens[:, :-1])


def test_targets_lie_one_further_for_each_head():
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, IGNORED, IGNORED]])
    targets = Continuations(torch.zeros(2, 3, 1), tokens).targets(2)
    assert targets[..., 0].tolist() == [[11, 12, 13], [21, IGNORED, IGNORED]]
    assert targets[..., 1].tolist() == [[12, 13, IGNORED], [IGNORED, IGNORED, IGNORED]]


def test_nothing_is_learnt_behind_an_end_token(model, continuations):
    end = int(continuations.tokens[0, 3])
    ending = make_model(end)
    prompts = cut_prompts(LetterTokenizer(), make_texts(), lengths_tokens=(4, 6), limit=64, seed=0)
    tokens = continue_greedily(ending, prompts, new_tokens=12, batch_rows=32, report=lambda line: None).tokens
    ended = (tokens == end).nonzero().tolist()
    assert ended
    for row, column in ended:
        assert (tokens[row, column + 1 :] == IGNORED).all()
        assert (tokens[row, :column] != IGNORED).all()


def test_prompts_have_the_asked_lengths_and_frames():
    frame = Frame(before=(1, 2), after=(0,))
    prompts = cut_prompts(LetterTokenizer(), make_texts(), lengths_tokens=(4, 6), limit=40, seed=3, frames=(frame,))
    assert len(prompts) == 40
    assert {len(prompt) for prompt in prompts} == {7, 9}
    assert all(prompt[:2] == [1, 2] and prompt[-1] == 0 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


def test_texts_too_short_for_a_prompt_are_refused():
    with pytest.raises(HeadsError, match="no training prompt"):
        cut_prompts(LetterTokenizer(), ["abc"], lengths_tokens=(4,), limit=10, seed=0)


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_heads_learn_what_the_base_will_say(model, variant):
    settings = TrainingSettings(**{**vars(SMALL), "variant": variant})
    trained = train_heads(model, LetterTokenizer(), make_texts(), settings, report=lambda line: None)
    assert trained.losses[-1][1] < 0.5 * trained.losses[0][1]
    assert trained.accuracy[0].top1 > 0.5
    assert trained.tokens_per_step > 1.4
    assert set(trained.seconds) == {"prompts", "continuing", "training"}


class Cycle:
    """Continuations of a base that counts: each token follows from the one before, none follows itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.output_matrix = torch.nn.Linear(32, 32, bias=False)
        torch.nn.init.orthogonal_(self.output_matrix.weight, gain=2.0)
        self.output_matrix.requires_grad_(False)
        self.tokens = (torch.arange(128).unsqueeze(1) + torch.arange(12)) % 32
        self.hidden = self.output_matrix.weight[self.tokens[:, :-1]]

    def train(self, tokens: torch.Tensor):
        settings = TrainingSettings(**{**vars(SMALL), "variant": "v1", "learning_rates": (1e-2,)})
        continuations = Continuations(self.hidden, tokens)
        return train_on_continuations(continuations, self.output_matrix, settings, report=lambda line: None)

    def top1_of(self, heads) -> list[float]:
        ranks = measure_ranks(heads, Continuations(self.hidden, self.tokens), self.output_matrix)
        return [head.top1 for head in measure_accuracy(ranks)]


def test_heads_learn_to_count():
    cycle = Cycle()
    trained = cycle.train(cycle.tokens)
    assert min(cycle.top1_of(trained.heads)) > 0.95
    assert trained.tokens_per_step > 2.5


def test_shuffled_targets_fail_the_accuracy_test():
    """Seeded fault: the same words on the wrong rows."""
    cycle = Cycle()
    mixed = cycle.tokens[torch.randperm(128, generator=torch.Generator().manual_seed(5))]
    assert max(cycle.top1_of(cycle.train(mixed).heads)) < 0.3


def test_targets_of_the_neighbouring_head_fail_the_accuracy_test():
    """Seeded fault: heads trained to name the token before theirs, the off-by-one of every Medusa port."""
    cycle = Cycle()
    early = (cycle.tokens - 1) % 32
    assert max(cycle.top1_of(cycle.train(early).heads)) < 0.3


def test_the_base_is_left_as_it_was(model, continuations):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train_quietly(continuations, model, TrainingSettings(**{**vars(SMALL), "steps": 5, "variant": "v1"}))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_base_with_nan_is_refused():
    broken = make_model()
    with torch.no_grad():
        broken.transformer.h[1].mlp.dense_h_to_4h.weight[0, 0] = math.nan
    with pytest.raises(BaseModelError, match="not finite"):
        continue_greedily(broken, [[3, 4, 5, 6]], new_tokens=4, batch_rows=1, report=lambda line: None)


def test_a_diverging_run_is_refused(model, continuations):
    exploded = Continuations(continuations.hidden * math.inf, continuations.tokens)
    with pytest.raises(HeadsError, match="diverged"):
        train_quietly(exploded, model)


def test_weights_that_cannot_be_stored_are_refused_while_training_runs(model, continuations):
    settings = TrainingSettings(**{**vars(SMALL), "steps": 200, "learning_rates": (1e9,)})
    lines = []
    with pytest.raises(HeadsError, match="diverged") as caught:
        train_on_continuations(continuations, model.get_output_embeddings(), settings, report=lines.append)
    assert caught.value.expected == "weights that float16 can hold"
    assert "--learning-rate" in caught.value.next_step
    assert not any(line.startswith("step 200/") for line in lines)
    tried = TrainingSettings(**{**vars(SMALL), "steps": 5, "trial_steps": 5, "learning_rates": (1e6, 3e-3)})
    assert train_quietly(continuations, model, tried).learning_rate == 3e-3


def test_a_diverged_run_leaves_nothing_to_go_on_from(model, continuations, tmp_path: Path):
    settings, file = TrainingSettings(**{**vars(SMALL), "steps": 20}), tmp_path / "run.pt"

    class Poisoned(TrainingRun):
        def _take_step(self) -> torch.Tensor:
            assert self.step < 10 or file.exists()
            return super()._take_step() * (math.nan if self.step >= 9 else 1.0)

    run = Poisoned(continuations, model.get_output_embeddings(), settings, 1e-3, 20)
    with pytest.raises(HeadsError, match="diverged"):
        run.train(checkpoint=file, report=lambda line: None)
    assert not file.exists()


def test_a_continuation_beyond_the_bases_positions_is_refused(model):
    window = WINDOW_TOKENS  # a Bloom's config names no positions
    with pytest.raises(HeadsError, match="positions") as caught:
        continue_greedily(model, [[1, 2, 3]], new_tokens=window, batch_rows=1)
    assert str(window) in str(caught.value)


def test_a_tokenizer_of_another_base_is_refused(model):
    vocab_size = model.config.vocab_size
    continue_greedily(model, [[3, vocab_size - 1]], new_tokens=2, batch_rows=1, report=lambda line: None)
    with pytest.raises(BaseModelError, match="tokenizer does not belong") as caught:
        continue_greedily(model, [[3, 4], [3, vocab_size]], new_tokens=2, batch_rows=1)
    assert caught.value.found == f"token id {vocab_size}"


def test_an_interrupted_run_ends_like_a_whole_one(model, continuations, tmp_path: Path):
    settings = TrainingSettings(**{**vars(SMALL), "steps": 20})
    whole = train_quietly(continuations, model, settings)
    file, lines = tmp_path / "state" / "run.pt", []

    def stop_half_way(line: str) -> None:
        if line.startswith("step 12/"):
            raise KeyboardInterrupt
        lines.append(line)

    with pytest.raises(KeyboardInterrupt):
        train_on_continuations(
            continuations, model.get_output_embeddings(), settings, checkpoint=file, report=stop_half_way
        )
    resumed = train_on_continuations(
        continuations, model.get_output_embeddings(), settings, checkpoint=file, report=lines.append
    )
    assert "continuing from step 12" in lines
    assert resumed.losses == whole.losses
    for name, tensor in resumed.heads.state_dict().items():
        torch.testing.assert_close(tensor, whole.heads.state_dict()[name])
    with pytest.raises(HeadsError, match="other settings"):
        train_quietly(continuations, model, TrainingSettings(**{**vars(SMALL), "steps": 21}), checkpoint=file)


def test_an_interrupt_in_the_middle_of_a_step_takes_effect_behind_it(model, continuations, tmp_path: Path):
    """Ctrl-C when the optimizer has moved the heads and the step is not yet counted."""
    settings, file = TrainingSettings(**{**vars(SMALL), "steps": 20}), tmp_path / "run.pt"

    def start() -> TrainingRun:
        return TrainingRun(continuations, model.get_output_embeddings(), settings, 3e-3, 20)

    whole, broken, resumed = start(), start(), start()
    whole.train(report=lambda line: None)
    broken.optimizer.register_step_post_hook(
        lambda *given: signal.raise_signal(signal.SIGINT) if broken.step == 6 else None
    )
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        broken.train(checkpoint=file, report=lambda line: None)
    assert signal.getsignal(signal.SIGINT) is handler
    lines = []
    resumed.train(checkpoint=file, report=lines.append)
    assert lines[0] == "continuing from step 7"
    for name, tensor in resumed.heads.state_dict().items():
        assert torch.equal(tensor, whole.heads.state_dict()[name])


def test_a_training_outside_the_main_thread_needs_no_signals(model, continuations):
    settings = TrainingSettings(**{**vars(SMALL), "steps": 2})
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train_quietly, continuations, model, settings).result().losses


@pytest.mark.parametrize("kept_share", [0.0, 0.5, 0.99])
def test_damaged_progress_is_said_and_kept(model, continuations, tmp_path: Path, kept_share):
    file = tmp_path / "run.pt"
    settings = TrainingSettings(**{**vars(SMALL), "steps": 2})
    train_quietly(continuations, model, settings, checkpoint=file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept_share * len(whole))])
    with pytest.raises(HeadsError, match="progress of an earlier training cannot be read") as caught:
        train_quietly(continuations, model, settings, checkpoint=file)
    assert "--restart" in caught.value.next_step
    assert caught.value.where == str(file)
    assert file.exists()  # what is in it, the user decides
    file.write_bytes(whole)
    train_quietly(continuations, model, settings, checkpoint=file)


def test_of_several_learning_rates_the_better_one_is_used(model, continuations):
    settings = TrainingSettings(**{**vars(SMALL), "learning_rates": (1e-6, 3e-3), "trial_steps": 20, "steps": 20})
    trained = train_quietly(continuations, model, settings)
    assert trained.learning_rate == 3e-3
    assert trained.trials[3e-3] < trained.trials[1e-6]


def test_the_same_seed_gives_the_same_heads(model, continuations):
    settings = TrainingSettings(**{**vars(SMALL), "steps": 10})
    first, second = (train_quietly(continuations, model, settings).heads.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ranks_count_the_tokens_a_head_prefers(model, continuations):
    heads = train_quietly(continuations, model, TrainingSettings(**{**vars(SMALL), "steps": 10})).heads
    ranks = measure_ranks(heads, continuations, model.get_output_embeddings())
    targets = continuations.targets(2)
    logits = heads(continuations.hidden, model.get_output_embeddings())
    for row, column, head in itertools.product((0, 7), (0, 5), (0, 1)):
        order = logits[head, row, column].argsort(descending=True).tolist()
        assert order.index(int(targets[row, column, head])) == ranks[row, column, head]
    assert (ranks[:, -1, 1] == UNKNOWN_RANK).all()


def test_replay_counts_accepted_tokens_by_hand():
    # one row, two heads; steps start at positions 0, 3 and 4
    ranks = torch.tensor([[[0, 1], [5, 5], [5, 5], [2, 0], [1, 0], [0, UNKNOWN_RANK]]])
    paths = ((0,), (1,), (0, 1))
    # 0: (0, 1) accepted, 3 tokens; 3: rank 2 is no node, 1 token; 4: (1,) accepted, (1, 0) is no node, 2 tokens
    assert replay_steps(ranks, paths) == pytest.approx(6 / 3)
    assert replay_steps(ranks, ((0,),)) == pytest.approx((2 + 1 + 1 + 1 + 2) / 5)


def test_the_chosen_tree_is_the_best_of_its_size():
    ranks = torch.randint(0, 3, (40, 5, 2), generator=torch.Generator().manual_seed(2))
    every = [*itertools.product(range(3)), *itertools.product(range(3), range(3))]
    trees = [t for t in itertools.combinations(every, 3) if all(len(p) == 1 or p[:1] in t for p in t)]

    def worth(tree):
        return sum(tuple(row[: len(path)]) == path for path in tree for row in ranks.flatten(0, 1).tolist())

    chosen = choose_paths(ranks, num_nodes=4)
    assert worth(chosen) == max(map(worth, trees))
    assert all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    with pytest.raises(TreeError, match="besides its root"):
        choose_paths(ranks, num_nodes=1)


def test_written_heads_carry_their_card_and_tree(model, continuations, tmp_path: Path):
    trained = train_quietly(continuations, model)
    write_trained_heads(trained, SMALL, tmp_path, base_name="tiny")
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["base"] == "tiny"
    assert card["accuracy"][0]["top1"] == trained.accuracy[0].top1
    assert json.loads((tmp_path / "tree.json").read_text()) == [list(path) for path in trained.paths]
    back = load_heads(tmp_path)
    rows = continuations.take(slice(8))
    loss = held_out_loss(back, rows, model.get_output_embeddings())
    assert loss == pytest.approx(held_out_loss(trained.heads, rows, model.get_output_embeddings()), rel=1e-2)


def test_too_few_prompts_are_refused(model, continuations):
    with pytest.raises(HeadsError, match="too few continuations"):
        train_quietly(continuations.take(slice(2)), model)


def test_continuations_that_end_at_once_are_refused(model, continuations):
    ended = torch.full_like(continuations.tokens, IGNORED)
    ended[:, 0] = 5
    with pytest.raises(HeadsError, match="nothing to learn from"):
        train_quietly(Continuations(continuations.hidden, ended), model)


class HeadsOf:
    """v2 heads of the module as `HeadSet` gives them."""

    def __init__(self, heads) -> None:
        self.num_heads, self.num_layers, self.own_output = heads.num_heads, heads.num_layers, False
        self.state = {name: tensor.detach() for name, tensor in heads.state_dict().items()}

    def read(self, name: str) -> torch.Tensor:
        _, head, _, layer, linear, part = name.split(".")
        return self.state[f"{head}.{layer}.{linear}.{part}"]


def test_heads_leave_out_the_bias_that_a_base_adds_to_its_logits():
    """As TensorRT-LLM's do. Phi's output matrix has one; here it decides much of what the base says."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    model = PhiForCausalLM(PhiConfig(**sizes, num_hidden_layers=1, eos_token_id=None)).eval().requires_grad_(False)
    output = model.get_output_embeddings()
    torch.nn.init.normal_(output.weight)
    torch.nn.init.normal_(output.bias, std=8.0)
    prompts = torch.randint(32, (16, 4)).tolist()
    said = continue_greedily(model, prompts, new_tokens=6, batch_rows=16, report=lambda line: None)
    heads = MedusaHeads(32, 32, num_heads=2).requires_grad_(False)
    for head in heads:
        torch.nn.init.normal_(head[0].linear.weight, std=0.3)

    targets = said.targets(2)

    def rank(logits: torch.Tensor) -> torch.Tensor:
        own = logits.gather(-1, targets.movedim(-1, 0).clamp(min=0).unsqueeze(-1))
        return (logits > own).sum(-1).movedim(0, -1).masked_fill(targets == IGNORED, UNKNOWN_RANK)

    states = torch.stack([head(said.hidden) for head in heads])
    logits = states @ output.weight.T
    assert not torch.equal(rank(logits), rank(logits + output.bias))  # seeded fault
    assert torch.equal(measure_ranks(heads, said, output), rank(logits))
    assert torch.equal(read_fit(HeadsOf(heads), said, output).ranks, rank(logits))
    flat = logits.flatten(1, 2).transpose(0, 1).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED)
    assert held_out_loss(heads, said, output) == pytest.approx(expected.item(), rel=1e-5)


def test_demo_heads_are_accepted_and_alibi_matters():
    """The shipped weights: two tokens a step and more; without its ALiBi slopes the base says something else."""
    model = BloomForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    heads = load_heads(DEMO / "heads")
    assert (heads.num_heads, heads.num_layers, heads.variant) == (4, 1, "v2")
    lines = (DEMO / "prompts.txt").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer(line)["input_ids"] for line in lines[:7]]
    said = continue_greedily(model, prompts, new_tokens=32, batch_rows=8, report=lambda line: None)
    ranks = measure_ranks(heads, said, model.get_output_embeddings())
    paths = json.loads((DEMO / "heads" / "tree.json").read_text())
    assert replay_steps(ranks, paths) > 1.8
    heads_swapped = ranks.flip(-1)  # seeded fault: the heads in the wrong order
    assert replay_steps(heads_swapped, paths) < replay_steps(ranks, paths) - 0.2

    turn = torch.linalg.qr(torch.randn(384, 384, generator=torch.Generator().manual_seed(0)))[0]
    for head in heads:  # seeded fault: the same heads for a base whose hidden states are turned
        head[0].linear.weight.data = turn @ head[0].linear.weight.data @ turn.T
    fit = read_fit(HeadsOf(heads), said, model.get_output_embeddings())
    assert {reading.verdict for reading in fit.readings} == {"foreign"}

    with pytest.MonkeyPatch.context() as patch:
        import transformers.models.bloom.modeling_bloom as bloom

        zero = bloom.build_alibi_tensor
        patch.setattr(bloom, "build_alibi_tensor", lambda *a, **k: torch.zeros_like(zero(*a, **k)))
        if hasattr(bloom, "_get_alibi_slopes"):  # newer releases of transformers read the slopes alone
            patch.setattr(bloom, "_get_alibi_slopes", lambda heads, device: torch.zeros(heads, device=device))
        without = continue_greedily(model, prompts, new_tokens=32, batch_rows=8, report=lambda line: None)
    same = {tuple(row) for row in said.tokens.tolist()} & {tuple(row) for row in without.tokens.tolist()}
    assert len(same) <= 1
    assert (DEMO / "heads" / HEADS_FILE).stat().st_size + (DEMO / "base" / "model.safetensors").stat().st_size < 18e6
