import json
import re
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from porting_kit.errors import TreeError
from porting_kit.medusa.named_trees import NAMED_CHOICES
from porting_kit.medusa.tree import MedusaTree, pack_mask, read_tree, unpack_mask
from porting_kit.medusa.tree_limits import MAX_DRAFT_NODES, check_tree, runtime_cautions, trim_tree
from tests.medusa.upstream_medusa_utils import set_up_upstream, upstream_files

SMALL = [[0], [0, 1], [0, 0], [0, 2], [1, 0, 0], [1, 0, 1], [0, 0, 0], [1], [1, 0], [1, 1]]


@st.composite
def choice_lists(draw, max_depth=4, max_rank=9, max_nodes=MAX_DRAFT_NODES):
    """Prefix-closed lists in random order whose first level has no gap."""
    width = draw(st.integers(1, max_rank + 1))
    nodes = [(rank,) for rank in range(width)]
    size = draw(st.integers(width, max_nodes))
    while len(nodes) < size:
        parent = draw(st.sampled_from([node for node in nodes if len(node) < max_depth] or nodes))
        child = (*parent, draw(st.integers(0, max_rank)))
        if len(parent) == max_depth or child in nodes:
            break
        nodes.append(child)
    return [list(node) for node in draw(st.permutations(nodes))]


def test_small_tree_by_hand():
    tree = MedusaTree.from_choices(SMALL)
    assert tree.choices() == [[0], [1], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [0, 0, 0], [1, 0, 0], [1, 0, 1]]
    assert tree.top_k_per_level == (2, 3, 2)
    assert tree.nodes_per_level == (2, 5, 3)
    assert tree.position_offsets.tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    assert tree.tree_ids.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 6, 6, 7]
    assert tree.paths.tolist() == [
        [0, 1, 3, 8],
        [0, 1, 4, -1],
        [0, 1, 5, -1],
        [0, 2, 6, 9],
        [0, 2, 6, 10],
        [0, 2, 7, -1],
    ]
    assert tree.padded_paths(4)[0].tolist() == [0, 1, 3, 8, -1]
    assert tree.packed_mask[:, 0].tolist() == [1, 3, 5, 11, 19, 35, 69, 133, 267, 581, 1093]
    assert [tree.position_offsets.dtype, tree.packed_mask.dtype, tree.mask.dtype] == [
        torch.int32,
        torch.int32,
        torch.bool,
    ]


@given(choice_lists())
@settings(max_examples=60, deadline=None)
def test_derived_tensors_follow_from_the_paths(choices):
    tree = MedusaTree.from_choices(choices)
    assert sorted(tree.choices()) == sorted(choices)
    assert not tree.added
    starts = [1 + sum(tree.top_k_per_level[:level]) for level in range(tree.depth)]
    for row, node in enumerate(tree.nodes):
        ancestors = {node[:depth] for depth in range(len(node) + 1)}
        assert {tree.nodes[column] for column in tree.mask[row].nonzero()[:, 0].tolist()} == ancestors
        assert tree.tree_ids[row] == (starts[len(node) - 1] + node[-1] if node else 0)
    assert torch.equal(unpack_mask(tree.packed_mask, tree.num_nodes), tree.mask)
    assert len(tree.leaf_paths) == sum(not any(other[:-1] == node for other in tree.nodes[1:]) for node in tree.nodes)


@given(st.integers(1, 100), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_packing_is_bit_b_of_word_b_over_32(num_nodes, seed):
    mask = torch.rand(num_nodes, num_nodes, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack_mask(mask)
    assert packed.shape == (num_nodes, -(-num_nodes // 32))
    for row in range(num_nodes):
        value = sum((int(word) & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(packed[row].tolist()))
        assert value == sum(1 << column for column in range(num_nodes) if mask[row, column])
    assert torch.equal(unpack_mask(packed, num_nodes), mask)


@pytest.mark.upstream
@pytest.mark.skipif(not upstream_files(), reason="TRTLLM_SOURCE names no checkout with runtime/medusa_utils.py")
@pytest.mark.parametrize("path", upstream_files(), ids=lambda path: path.parents[2].name)
class TestUpstream:
    @staticmethod
    def compare(path, choices, num_heads):
        upstream, tree = set_up_upstream(path, choices, num_heads), MedusaTree.from_choices(choices)
        assert torch.equal(upstream.medusa_packed_mask, tree.packed_mask)
        assert torch.equal(upstream.medusa_mask.bool(), tree.mask)
        assert torch.equal(upstream.medusa_position_offsets, tree.position_offsets.long())
        assert torch.equal(upstream.medusa_tree_ids, tree.tree_ids)
        assert torch.equal(upstream.medusa_paths, tree.padded_paths(num_heads))
        assert upstream.medusa_topks.tolist() == [*tree.top_k_per_level, *[0] * (num_heads - tree.depth)]

    @given(choice_lists(), st.integers(0, 2))
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    def test_random_trees_bit_for_bit(self, path, choices, spare_heads):
        assume(len(choices) != 32)  # see the next to last test of this class
        self.compare(path, choices, max(map(len, choices)) + spare_heads)

    @pytest.mark.parametrize("name", [*NAMED_CHOICES, "chain:4", "cartesian:4,3"])
    def test_named_trees_bit_for_bit(self, path, name):
        tree = read_tree(name)
        self.compare(path, tree.choices(), tree.depth)

    def test_path_only_list_bit_for_bit(self, path):
        self.compare(path, [[0, 0, 0], [1, 0], [0, 1]], 3)

    def test_a_first_level_gap_is_what_the_runtime_cannot_number(self, path):
        """Without our refusal the runtime would give two nodes of one path the same row."""
        gapped = set_up_upstream(path, [[0], [2], [2, 0]], 2)
        assert [0, 3, 3] in gapped.medusa_paths.tolist()

    def test_one_column_in_the_last_mask_word_is_what_the_python_runtime_cannot_pack(self, path):
        tree = trim_tree(read_tree("mc_sim_7b_63"), max_draft_len=32)
        assert "Python runtime" in runtime_cautions(tree)[0]
        version = (path.parents[1] / "version.py").read_text()
        if re.search(r'"0\.(8|9|10|11)\.', version):
            with pytest.raises(ValueError, match="invalid literal"):
                set_up_upstream(path, tree.choices(), 4)
        else:
            self.compare(path, tree.choices(), 4)


def test_path_only_and_mixed_lists_are_closed_under_prefixes():
    """Case 23."""
    tree = read_tree([[0, 0, 0], [1, 0]])
    assert tree.choices() == [[0], [1], [0, 0], [1, 0], [0, 0, 0]]
    assert set(tree.added) == {(0,), (0, 0), (1,)}
    assert "3 of them implied" in tree.describe()
    mixed = read_tree([[0], [0, 0], [1, 0]])
    assert mixed.num_drafts == 4
    assert mixed.added == ((1,),)
    with pytest.raises(TreeError, match="parent is not listed") as raised:
        MedusaTree.from_choices([[0], [0, 0], [1, 0]], expand=False)
    assert "[1]" in str(raised.value)


def test_every_spelling_of_one_tree(tmp_path):
    choices = [[0], [1], [0, 0]]
    spellings = {
        "tree.json": json.dumps(choices),
        "wrapped.json": json.dumps({"medusa_choices": choices}),
        "literal.txt": "[(0,), (1,), (0, 0)]\n",
        "original.py": f"# tuned on something\nmy_tree = {choices}\n",
        "annotated.py": f"medusa_choices: list[list[int]] = {choices}\n",
        "with_more.json": json.dumps({"note": None, "tuned": True, "pruned": False, "medusa_choices": choices}),
        "byte_order_mark.json": "\ufeff" + json.dumps(choices),
        "byte_order_mark.py": f"\ufeffmy_tree = {choices}\n",
    }
    expected = read_tree(choices)
    assert read_tree(str(choices)).nodes == expected.nodes
    assert read_tree(expected) is expected
    for name, text in spellings.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_tree(str(tmp_path / name)).nodes == read_tree(tmp_path / name).nodes == expected.nodes
    assert read_tree("cartesian:2,1").nodes == read_tree([[0], [1], [0, 0], [1, 0]]).nodes
    assert read_tree("chain:3").choices() == [[0], [0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [1", "neither JSON"),
        ("a = [[0]]\nb = [[1]]", "more than one tree"),
        ("{not json", "neither JSON"),
        ('{"other": 1}', "no key 'medusa_choices'"),
        ('{"choices": [[0]]}', "the keys 'choices'"),
        ("{}", "found: no key"),
        ("3", "no list of paths"),
        ("null", "found: None"),
        ('{"medusa_choices": null}', "no list of paths"),
        ("a: list", "no list of paths"),
        ('{"medusa_choices": [[true]]}', "entry 0: [True]"),
        ("[[0], [0, 0.5]]", "entry 1"),
        ("[]", "empty"),
        ("[[0], [0]]", "more than once"),
        ("[1, 7, 6]", "flat form"),
    ],
)
def test_unreadable_files(tmp_path, text, message):
    file = tmp_path / "tree"
    file.write_text(text)
    with pytest.raises(TreeError, match=re.escape(message)) as raised:
        read_tree(file)
    assert f"where: {file}" in str(raised.value)
    assert "in the port file" not in str(raised.value)


@pytest.mark.parametrize(
    ("choices", "message", "detail"),
    [
        ([], "empty", "small_2"),
        ([[]], "no path", "entry 0"),
        ([[0], [-1]], "no path", "entry 1: [-1]"),
        ([[0], [0, 1.0]], "no path", "entry 1"),
        ([[0], [True]], "no path", "entry 1"),
        ([[0], "1"], "no path", "entry 1"),
        ([[0], [0]], "more than once", "[0]"),
        ([[0], [2]], "skips ranks", "[1]"),
        ([[1, 0]], "skips ranks", "[0]"),
        ([[0], [10**15]], "skips ranks", "[10]"),
        ([1, 7, 6], "flat form", "cartesian:7,6 (49 draft nodes)"),
        ([1, 9, 9], "flat form", "63 is the most"),
        ([2, 3], "flat form", "one by one"),
        ("mc_sim_7b_64", "No tree has the name", "mc_sim_7b_63"),
        ("chain:0", "numbers cannot be read", "chain:H"),
        ("chain:64", "larger than any engine takes", "64 draft nodes"),
        ("cartesian:64,64", "larger than any engine takes", "4160 draft nodes"),
        ("cartesian:a", "numbers cannot be read", "cartesian"),
        (7, "no list of paths", "7"),
        ("[[0], [1", "no list of paths", "the tree's text"),
        ("[[0], 1]", "no path", "the tree's text"),
    ],
)
def test_unusable_choices_are_refused_with_the_way_out(choices, message, detail):
    with pytest.raises(TreeError, match=message) as raised:
        read_tree(choices)
    assert detail in str(raised.value)


def test_a_tree_that_no_engine_takes_is_refused_at_once():
    """Preflight answers within a second; building a chain of thousands of levels took a minute."""
    started = time.perf_counter()
    with pytest.raises(TreeError, match="larger than any engine takes"):
        read_tree("chain:1000000")
    with pytest.raises(TreeError, match="1200 levels deep") as raised:
        check_tree(read_tree([[0] * 1200]), num_heads=4)
    assert time.perf_counter() - started < 1
    assert "0, 0 ... (1200 in all)" in str(raised.value)


def test_the_flat_form_is_the_cartesian_tree():
    assert read_tree("cartesian:7,6").num_drafts == 7 + 7 * 6


def test_the_stock_tree():
    tree = read_tree("mc_sim_7b_63")
    check_tree(tree, num_heads=4)
    assert runtime_cautions(tree) == ()
    assert (tree.num_drafts, tree.depth, tree.packed_mask.shape) == (63, 4, (64, 2))
    assert tree.top_k_per_level == (10, 10, 10, 2)
    assert tree.packed_mask[31].tolist() == [-(2**31) + 17, 0]


def test_a_tree_deeper_than_the_heads_is_refused_with_the_trimmed_one():
    """Case 24."""
    tree = read_tree("mc_sim_7b_63")
    with pytest.raises(TreeError, match="4 levels deep, too deep for 3 heads") as raised:
        check_tree(tree, num_heads=3)
    assert "61 draft nodes" in str(raised.value)
    with pytest.raises(TreeError, match="too deep for 1 head\n  expected: paths of at most 1 rank\n"):
        check_tree(tree, num_heads=1)
    trimmed = trim_tree(tree, num_heads=3)
    check_tree(trimmed, num_heads=3)
    assert trimmed.nodes == tuple(node for node in tree.nodes if len(node) <= 3)


def test_only_the_draft_limit_is_exceeded():
    tree = read_tree("mc_sim_7b_63")
    with pytest.raises(TreeError, match="more than max_draft_len allows") as raised:
        check_tree(tree, num_heads=4, max_draft_len=15)
    assert "15 draft nodes" in str(raised.value)
    trimmed = trim_tree(tree, max_draft_len=15)
    check_tree(trimmed, num_heads=4, max_draft_len=15)
    assert set(trimmed.nodes[1:]) == set(NAMED_CHOICES["mc_sim_7b_63"][:15])
    with pytest.raises(TreeError, match="64 tokens a step"):
        check_tree(read_tree("cartesian:8,8"), max_draft_len=200)
    with pytest.raises(TreeError, match="Nothing is left"):
        trim_tree(tree, max_draft_len=0)
    with pytest.raises(TreeError, match="more than max_draft_len"):
        check_tree(tree, max_draft_len=0)


@given(choice_lists(), st.integers(1, 4), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_trimming_always_fits_and_wastes_nothing(choices, num_heads, limit):
    tree = MedusaTree.from_choices(choices)
    trimmed = trim_tree(tree, num_heads=num_heads, max_draft_len=limit)
    check_tree(trimmed, num_heads=num_heads, max_draft_len=limit)
    assert set(trimmed.nodes) <= set(tree.nodes)
    assert trimmed.num_drafts == min(limit, sum(0 < len(node) <= num_heads for node in tree.nodes))


def test_one_of_a_kind_is_called_so():
    assert read_tree([[0]]).describe() == "1 draft node (1 by depth), 1 path, longest [0]"
    assert read_tree([[0], [1]]).describe() == "2 draft nodes (2 by depth), 2 paths, longest [1]"
    with pytest.raises(TreeError, match=r"cartesian:1 \(1 draft node\)"):
        read_tree([1, 1])


def test_a_rank_the_cpp_runtime_cannot_pack():
    check_tree(read_tree([[rank] for rank in range(16)]))
    with pytest.raises(TreeError, match="cannot tell from its neighbour"):
        check_tree(read_tree([[rank] for rank in range(17)]))


def test_reading_and_checking_need_no_torch():
    code = (
        "import sys; from porting_kit.medusa.tree import read_tree; "
        "from porting_kit.medusa.tree_limits import check_tree; "
        "check_tree(read_tree('mc_sim_7b_63'), num_heads=4); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
