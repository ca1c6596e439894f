import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from porting_kit.errors import TreeError
from porting_kit.medusa.acceptance import accept_greedy, cut_at_end, draft_tokens, top_tokens
from porting_kit.medusa.tree import MedusaTree, read_tree

TREE = read_tree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])  # nodes 1 .. 6 after the root 0


def walk(node_tokens, target_tokens, tree):
    """The rule, one token at a time: go to the child whose token the base chose, until there is none."""
    rows, tokens = [0], [target_tokens[0]]
    while True:
        children = [node for node, parent in enumerate(tree.parents) if parent == rows[-1]]
        matching = [node for node in children if node_tokens[node] == tokens[-1]]
        if not matching:
            return rows, tokens
        rows.append(matching[0])
        tokens.append(target_tokens[matching[0]])


def test_by_hand():
    #                  root  [0] [1] [0,0] [0,1] [1,0] [0,0,0]
    nodes = torch.tensor([[9, 5, 6, 7, 8, 7, 3], [9, 5, 6, 7, 8, 7, 3], [9, 5, 6, 7, 8, 7, 3], [9, 5, 6, 7, 8, 7, 3]])
    target = torch.tensor([[5, 7, 0, 3, 0, 0, 4], [6, 7, 7, 3, 0, 2, 4], [5, 8, 7, 3, 1, 0, 4], [4, 7, 0, 3, 0, 0, 4]])
    accepted = accept_greedy(nodes, target, TREE)
    assert accepted.rows.tolist() == [[0, 1, 3, 6], [0, 2, 5, -1], [0, 1, 4, -1], [0, -1, -1, -1]]
    assert accepted.tokens.tolist() == [[5, 7, 3, 4], [6, 7, 2, -1], [5, 8, 1, -1], [4, -1, -1, -1]]
    assert accepted.lengths.tolist() == [4, 3, 3, 1]
    assert accepted.last_rows.tolist() == [6, 5, 4, 0]
    assert accepted.last_tokens.tolist() == [4, 2, 1, 4]


@given(st.sampled_from(["mc_sim_7b_63", "small_3", "cartesian:3,2,2", "chain:4"]), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_equals_the_walk_on_random_batches(name, seed):
    tree, generator = read_tree(name), torch.Generator().manual_seed(seed)
    width = max(tree.top_k_per_level)
    logits = torch.randn(tree.depth, 5, width + 1, generator=generator)  # a small vocabulary makes long runs likely
    root = torch.randint(0, width + 1, (5, 1), generator=generator)
    nodes = torch.cat([root, draft_tokens(logits, tree, width + 1)], 1)
    target = torch.randint(0, width + 1, (5, tree.num_nodes), generator=generator)
    accepted = accept_greedy(nodes, target, tree)
    for b in range(5):
        rows, tokens = walk(nodes[b].tolist(), target[b].tolist(), tree)
        assert accepted.lengths[b] == len(rows)
        assert accepted.rows[b].tolist() == rows + [-1] * (tree.depth + 1 - len(rows))
        assert accepted.tokens[b].tolist() == tokens + [-1] * (tree.depth + 1 - len(rows))


def test_the_first_path_wins_when_siblings_hold_one_token():
    tree = MedusaTree.from_choices([[0], [1]])
    accepted = accept_greedy(torch.tensor([[9, 4, 4]]), torch.tensor([[4, 1, 2]]), tree)
    assert accepted.rows.tolist() == [[0, 1]]


def test_padding_columns_never_win_and_are_never_drafted():
    """Columns from V on hold the largest logits."""
    logits = torch.zeros(2, 3, 8)
    logits[..., 6:] = 9.0
    logits[..., 4] = 1.0
    assert top_tokens(logits, 6).tolist() == [[4, 4, 4], [4, 4, 4]]
    assert top_tokens(logits, 8).max() >= 6, "the control: counted as vocabulary they do win"
    drafts = draft_tokens(logits, read_tree("cartesian:3,2"), 6)
    assert drafts.shape == (3, 9)
    assert drafts.max() < 6
    assert draft_tokens(logits, read_tree("cartesian:3,2"), 8).max() >= 6


def test_drafts_are_the_ranked_candidates_of_each_head():
    order = torch.tensor([[3, 1, 0, 2], [2, 0, 3, 1]])  # [M, V], best first
    logits = torch.empty(2, 1, 4)
    logits.scatter_(2, order[:, None], torch.tensor([4.0, 3.0, 2.0, 1.0]).expand(2, 1, 4))
    tree = MedusaTree.from_choices([[0], [1], [2], [0, 0], [0, 3], [2, 1]])
    assert draft_tokens(logits, tree, 4).tolist() == [[3, 1, 0, 2, 1, 0]]
    shallow = MedusaTree.from_choices([[0], [1]])
    assert draft_tokens(logits, shallow, 4).tolist() == [[3, 1]], "a tree may use fewer levels than there are heads"
    with pytest.raises(TreeError, match="3 levels deep but the model has 2 heads"):
        draft_tokens(logits, read_tree("chain:3"), 4)


@pytest.mark.parametrize(
    ("tokens", "budget", "length", "ended"),
    [
        ([7, 1, 2, 4], 9, 1, True),  # first of the run
        ([1, 7, 2, 4], 9, 2, True),
        ([1, 2, 4, 7], 9, 4, True),  # last of the run
        ([1, 3, 7, 4], 9, 2, True),  # the second end id comes first
        ([1, 2, 4, 5], 9, 4, False),
        ([1, 2, 4, 7], 3, 3, True),  # the limit comes before the end token
        ([1, 2, 7, 5], 3, 3, True),  # both at once
        ([1, 2, -1, -1], 9, 2, False),
    ],
)
def test_runs_are_cut_at_the_first_end_token_or_the_limit(tokens, budget, length, ended):
    lengths = torch.tensor([sum(token >= 0 for token in tokens)])
    cut, has_ended = cut_at_end(torch.tensor([tokens]), lengths, [3, 7], torch.tensor([budget]))
    assert cut.tolist() == [length]
    assert has_ended.tolist() == [ended]


def test_without_end_ids_only_the_limit_ends_a_run():
    cut, ended = cut_at_end(torch.tensor([[1, 2]]), torch.tensor([2]), [], torch.tensor([5]))
    assert (cut.tolist(), ended.tolist()) == ([2], [False])


def test_the_end_token_after_the_accepted_run_does_not_count():
    cut, ended = cut_at_end(torch.tensor([[1, 2, 7]]), torch.tensor([2]), [7], torch.tensor([5]))
    assert (cut.tolist(), ended.tolist()) == ([2], [False])
