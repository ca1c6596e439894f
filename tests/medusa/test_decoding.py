import pytest
import torch

from porting_kit.errors import EmulatorError, TreeError
from porting_kit.medusa.decoding import generate_greedy, generate_medusa, replay
from porting_kit.medusa.tree import MedusaTree, read_tree
from tests.medusa.reference_model import (
    ReferenceCache,
    ReferenceModel,
    SelectableCache,
    V,
    continue_without_cache,
    fit_heads,
)

TREES = ["small_3", "chain:3", "chain:1", "cartesian:3,2,2", [[0], [0, 0], [1, 0], [1, 0, 0], [1, 0, 1]]]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, V, (length,), generator=generator) for length in (3, 17, 1, 9)]


@pytest.fixture(scope="module")
def fitted(prompts):
    model = ReferenceModel()
    fit_heads(model, prompts, NEW_TOKENS + 8)
    return model


@pytest.fixture(scope="module")
def expected(fitted, prompts):
    return [continue_without_cache(fitted, prompt, NEW_TOKENS) for prompt in prompts]


def test_greedy_is_the_continuation_without_a_cache(fitted, prompts, expected):
    run = generate_greedy(fitted, prompts, NEW_TOKENS)
    assert run.tokens == expected
    assert 0 < run.context_seconds < run.seconds


@pytest.mark.parametrize("error", [RuntimeError("differs"), EmulatorError("recording is not provided")])
def test_steps_that_cannot_be_written_down_run_one_by_one(error, fitted, prompts, expected, monkeypatch):
    """Rotation that depends on the length (longrope, dynamic) has no written-down form."""
    given_up = []

    def fail(*arguments):
        raise error

    monkeypatch.setattr("porting_kit.medusa.decoding.decode_fused", fail)
    monkeypatch.setattr(ReferenceModel, "open_decoder", lambda self, *arguments: "a decoder", raising=False)
    decoders = type("Decoders", (), {"give_up": lambda self, decoder, reason: given_up.append((decoder, reason))})()
    monkeypatch.setattr(ReferenceModel, "decoders", decoders, raising=False)
    assert generate_medusa(fitted, read_tree("small_3"), prompts, NEW_TOKENS).tokens == expected
    assert given_up == [("a decoder", error)]


@pytest.mark.parametrize("spec", TREES, ids=str)
@pytest.mark.parametrize("heads", ["random", "fitted"])
def test_medusa_emits_the_greedy_tokens_whatever_the_heads(spec, heads, fitted, prompts, expected):
    model = fitted if heads == "fitted" else ReferenceModel()
    generation = generate_medusa(model, read_tree(spec), prompts, NEW_TOKENS)
    assert generation.tokens == expected
    if heads == "fitted":
        assert generation.tokens_per_step > 1.5
    for row, origins, lengths in zip(generation.tokens, generation.origins, generation.accepted_lengths, strict=True):
        assert len(row) == NEW_TOKENS == len(origins.step)
        assert len(row) - 1 <= sum(lengths) < len(row) + read_tree(spec).depth
        assert int(origins.step.max()) == len(lengths)


def test_a_batch_equals_its_requests_run_alone(fitted, prompts):
    tree = read_tree("small_3")
    together = generate_medusa(fitted, tree, prompts, NEW_TOKENS, keep_margins=True)
    for index, prompt in enumerate(prompts):
        alone = generate_medusa(fitted, tree, [prompt], NEW_TOKENS, keep_margins=True)
        assert alone.tokens[0] == together.tokens[index]
        assert alone.accepted_lengths[0] == together.accepted_lengths[index]
        assert torch.equal(alone.origins[0].head, together.origins[index].head)
        torch.testing.assert_close(alone.margins[0], together.margins[index])


@pytest.mark.parametrize("cache_class", [SelectableCache, ReferenceCache])
def test_ended_requests_leave_the_batch_or_stay_idle(cache_class, prompts, expected):
    model = ReferenceModel(cache_class=cache_class)
    fit_heads(model, prompts, NEW_TOKENS + 8)
    end = expected[0][4]
    generation = generate_medusa(model, read_tree("small_3"), prompts, NEW_TOKENS, [end])
    for row, full, ended_by in zip(generation.tokens, expected, generation.ended_by, strict=True):
        wanted = full[: full.index(end) + 1] if end in full else full
        assert row == wanted
        assert ended_by == (end if end in full else None)
    assert len({len(row) for row in generation.tokens}) > 1
    assert (min(model.decode_batches) < len(prompts)) == (cache_class is SelectableCache)


def test_the_end_token_is_found_anywhere_in_an_accepted_run(fitted, prompts, expected):
    """Case 42: as first, inner and last token of an accepted group, with several end ids."""
    tree = read_tree("small_3")
    open_ended = generate_medusa(fitted, tree, prompts, NEW_TOKENS)
    seen = set()
    for index, (row, origins) in enumerate(zip(open_ended.tokens, open_ended.origins, strict=True)):
        for position, token in enumerate(row):
            if row.index(token) != position:
                continue
            cut = generate_medusa(
                fitted, tree, [prompts[index]], NEW_TOKENS, [V - 1 if V - 1 not in row else token, token]
            )
            assert cut.tokens[0] == row[: position + 1]
            assert cut.ended_by[0] == token
            seen.add((origins.phase(position), origins.proposer(position)))
    assert {("context", "base"), ("root", "head 0"), ("depth 1", "head 1"), ("depth 2", "head 2")} <= seen
    assert any(phase.startswith("depth") and proposer == "base" for phase, proposer in seen)


def test_origins_name_the_node_and_the_head(fitted, prompts):
    generation = generate_medusa(fitted, read_tree("small_3"), prompts, NEW_TOKENS)
    for origins, lengths in zip(generation.origins, generation.accepted_lengths, strict=True):
        assert origins.phase(0) == "context"
        position = 1
        for step, length in enumerate(lengths, start=1):
            for depth in range(min(length, NEW_TOKENS - position)):
                assert origins.step[position] == step
                assert origins.phase(position) == ("root" if depth == 0 else f"depth {depth}")
                assert origins.proposer(position) == (f"head {depth}" if depth < length - 1 else "base")
                position += 1
        assert position == NEW_TOKENS


def test_accepted_paths_are_paths_of_the_tree(fitted, prompts):
    tree = read_tree("small_3")
    generation = generate_medusa(fitted, tree, prompts, NEW_TOKENS)
    for origins, lengths in zip(generation.origins, generation.accepted_lengths, strict=True):
        paths = origins.accepted_paths()
        assert [len(path) for path in paths[:-1]] == lengths[:-1]
        for path in paths:
            assert path[0] == 0
            assert [tree.parents[node] for node in path[1:]] == path[:-1]
        assert max(map(max, paths)) > 0


def test_margins_and_logits_belong_to_the_tokens(fitted, prompts):
    generation = generate_medusa(fitted, read_tree("small_3"), prompts, NEW_TOKENS, keep_margins=True, keep_logits=True)
    for row, margins, logits in zip(generation.tokens, generation.margins, generation.logits, strict=True):
        assert logits.shape == (NEW_TOKENS, V)
        assert logits.argmax(-1).tolist() == row
        best = logits.topk(2).values
        torch.testing.assert_close(margins, (best[:, 0] - best[:, 1]).float())


def test_acceptance_by_depth_counts_steps(fitted, prompts):
    generation = generate_medusa(fitted, read_tree("chain:3"), prompts, NEW_TOKENS)
    lengths = [length for row in generation.accepted_lengths for length in row]
    assert generation.accepted_by_depth[0] == pytest.approx(sum(length > 1 for length in lengths) / len(lengths))
    assert generation.accepted_by_depth == sorted(generation.accepted_by_depth, reverse=True)


class RowsNotMoved(SelectableCache):
    def keep(self, rows):
        self.lengths += (rows >= 0).sum(1)


class LastRowDropped(SelectableCache):
    def keep(self, rows):
        super().keep(torch.where(rows == rows.max(1, keepdim=True).values, -1, rows) if (rows > 0).any() else rows)


@pytest.mark.parametrize("cache_class", [RowsNotMoved, LastRowDropped])
def test_a_cache_that_keeps_the_wrong_rows_is_noticed(cache_class, fitted, prompts, expected):
    model = ReferenceModel(cache_class=cache_class)
    model.load_state_dict(fitted.state_dict())
    generation = generate_medusa(model, read_tree("small_3"), prompts, NEW_TOKENS)
    assert generation.tokens != expected


@pytest.mark.parametrize("broken", ["mask", "offsets"])
def test_a_tree_with_a_wrong_mask_or_wrong_offsets_is_noticed(broken, fitted, prompts, expected):
    tree = read_tree("small_3")
    wrong = MedusaTree(tree.nodes, tree.listed)
    if broken == "mask":
        wrong.__dict__["packed_mask"] = tree.packed_mask.flip(0)
    else:
        wrong.__dict__["position_offsets"] = torch.zeros_like(tree.position_offsets)
    assert generate_medusa(fitted, wrong, prompts, NEW_TOKENS).tokens != expected


def test_unusable_input_is_refused(fitted, prompts):
    tree = read_tree("small_3")
    with pytest.raises(EmulatorError, match="nothing to generate"):
        generate_medusa(fitted, tree, [prompts[0], torch.zeros(0)], 4)
    with pytest.raises(EmulatorError, match="nothing to generate"):
        generate_greedy(fitted, prompts, 0)
    with pytest.raises(EmulatorError, match="without heads"):
        generate_medusa(ReferenceModel(num_heads=0), tree, prompts, 4)
    with pytest.raises(TreeError, match="3 levels deep but the model has 2 heads"):
        generate_medusa(ReferenceModel(num_heads=2), tree, prompts, 4)
    with pytest.raises(TreeError, match="more candidates"):
        generate_medusa(fitted, read_tree([[rank] for rank in range(V + 1)]), prompts, 4)


def logits_without_a_cache(model, prompt, tokens):
    text = torch.cat([prompt, torch.tensor(tokens)])
    return torch.cat(
        [model.prefill([text[:end]], model.new_cache(1, end)).logits[:, :V] for end in range(len(prompt), len(text))]
    )


@pytest.mark.parametrize("spec", [None, "small_3", "chain:2"])
@pytest.mark.parametrize("cache_class", [SelectableCache, ReferenceCache])
def test_replay_emits_the_given_tokens_and_keeps_the_models_own_logits(spec, cache_class, prompts, expected):
    """Tokens of unequal number, one of them not the model's choice: the logits are those of the given history."""
    model = ReferenceModel(cache_class=cache_class)
    fit_heads(model, prompts, NEW_TOKENS + 8)
    tokens = [row[: 7 + 5 * index] for index, row in enumerate(expected)]
    tokens[1][4] = (tokens[1][4] + 1) % V
    replayed = replay(model, prompts, tokens, None if spec is None else read_tree(spec))
    assert replayed.tokens == tokens
    for prompt, row, logits in zip(prompts, tokens, replayed.logits, strict=True):
        torch.testing.assert_close(logits, logits_without_a_cache(model, prompt, row))
    if spec is not None:
        assert replayed.tokens_per_step > 1.2


def test_replaying_a_run_repeats_its_steps(fitted, prompts):
    tree = read_tree("small_3")
    generation = generate_medusa(fitted, tree, prompts, NEW_TOKENS)
    replayed = replay(fitted, prompts, generation.tokens, tree)
    for origins, again in zip(generation.origins, replayed.origins, strict=True):
        assert torch.equal(origins.step, again.step)
        assert torch.equal(origins.depth, again.depth)
