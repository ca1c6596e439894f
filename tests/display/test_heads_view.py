"""Pictures of heads: PNG bytes, and words that carry the figures."""

from __future__ import annotations

from porting_kit.display.heads_view import plot_head_agreement, plot_node_shares, plot_tree_choice
from porting_kit.medusa.tree import read_tree

PNG = b"\x89PNG"
HEADS = [{"top1": 0.6, "top5": 0.9, "chance1": 0.1}, {"top1": 0.31, "top5": 0.58, "chance1": 0.1}]


def test_agreement_by_head_is_drawn_and_told():
    picture = plot_head_agreement(HEADS)
    assert picture.png.startswith(PNG)
    assert "head 1 60 % and 90 %; head 2 31 % and 58 %" in picture.alt


def test_the_shares_of_nodes_add_up_to_tokens_per_step():
    tree = read_tree([[0], [1], [0, 0]])
    picture = plot_node_shares(tree, {(0,): 0.5, (1,): 0.25, (0, 0): 0.25})
    assert picture.png.startswith(PNG)
    assert "2.00 tokens a step" in picture.alt
    assert plot_node_shares(tree, {(0,): 0.9}).png != picture.png


def test_the_curve_ends_where_it_ends():
    rows = [{"nodes": n, "tokens_per_step": 1 + n / 50} for n in (2, 8, 40)] + [{"nodes": 64, "tokens_per_step": 1.5}]
    picture = plot_tree_choice(rows, {8: 1.2})
    assert picture.png.startswith(PNG)
    assert "1.80 with 40; the stock tree gives 1.50" in picture.alt
    assert plot_tree_choice(rows).png != picture.png
