"""Plots render, label their axes with units, and tell in words what they show."""

import io

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from porting_kit.display import plots
from porting_kit.display.plots import plot_accepted_lengths, plot_layer_errors, plot_margins, plot_tree
from porting_kit.medusa.tree import read_tree

TREE = read_tree([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
ERRORS = {"context": [1e-4, 2e-4, 0.0], "tree": [1e-4, 0.5, 0.6]}
MAKERS = {
    "tree": lambda: plot_tree(TREE, accepted=[0, 1, 3]),
    "large tree": lambda: plot_tree(read_tree("mc_sim_7b_63")),
    "lengths": lambda: plot_accepted_lengths([0.75, 0.25, 0.25], tokens_per_step=2.2),
    "no lengths": lambda: plot_accepted_lengths([]),
    "layers": lambda: plot_layer_errors(ERRORS, names=["embedding", "layers.0", "layers.1"], noise=1e-3),
    "margins": lambda: plot_margins([3.0, -0.01, -2.0], tolerance=0.05, near_ties=[1], wrong=[2]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_plot_is_a_picture_with_something_on_it(name):
    picture = MAKERS[name]()
    image = np.asarray(Image.open(io.BytesIO(picture.png)).convert("L"))
    assert image.shape[1] >= 900
    assert 0.002 < (image < 200).mean() < 0.8
    assert len(picture.alt) > 20


@pytest.mark.parametrize("name", MAKERS)
def test_axes_are_labelled(name, monkeypatch):
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, stream, **options: seen.extend(figure.axes))
    MAKERS[name]()
    assert seen[0].get_xlabel()
    assert seen[0].get_ylabel()


def test_nothing_global_changes():
    before = dict(matplotlib.rcParams)
    MAKERS["margins"]()
    assert dict(matplotlib.rcParams) == before


def test_the_accepted_path_is_visible():
    plain, marked = plot_tree(TREE), plot_tree(TREE, accepted=[0, 1, 3, -1])
    assert plain.png != marked.png
    assert "2 drafts drawn thick" in marked.alt


def test_shares_of_exact_lengths_come_from_those_of_at_least():
    assert "1: 25 %, 2: 50 %, 3: 0 %, 4: 25 %" in MAKERS["lengths"]().alt
    assert "mean 2.25" in plot_accepted_lengths([0.75, 0.25, 0.25]).alt


def test_words_name_the_worst_module():
    picture = MAKERS["layers"]()
    assert "tree: largest 6.0e-01 at layers.1" in picture.alt
    assert "1 differ, 1 near-ties, smallest margin -2" in MAKERS["margins"]().alt


def test_the_picture_carries_its_words_everywhere():
    picture = plots.Picture(b"png", 'a "b"')
    assert 'alt="a &quot;b&quot;"' in picture.to_html()
    assert "http" not in picture.to_html()
    data, metadata = picture._repr_mimebundle_()
    assert data["text/plain"] == '[plot] a "b"'
    assert metadata["image/png"]["alt"] == 'a "b"'
