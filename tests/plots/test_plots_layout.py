"""Where things lie in the pictures: legends and texts inside their axes, whatever the figure is, and off the data."""

from types import SimpleNamespace

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

from jaxcal import plots
from jaxcal.distributions import Empirical, Normal
from jaxcal.predictors._tree import Branch, Node

pytestmark = [pytest.mark.any_precision, pytest.mark.usefixtures("plt")]

N = 50
LONG = "random_forest_of_500_trees_with_conformal_calibration_of_groups"


def named(name):
    x = np.linspace(-2, 2, N)
    infinite = Empirical(np.sin(x), 1.0, np.linspace(-2, 2, 15), rule="randomized", tau=np.linspace(0, 1, N))
    return {f"{name}_a": Normal(np.sin(x), 1 + x**2), f"{name}_b": infinite}


def grown(depth, condition):
    parts = tuple(grown(depth - 1, f"{'long_name_' * 4}{k} > {depth}") for k in range(2)) if depth else ()
    own = vars(Node.new(2**depth, 1, np.dtype("float32")))
    branch = Branch(**own, condition=condition, path="", rmse=jnp.asarray(1.0), below=parts)
    return branch.updated(statistic=99.9, std_ratio=10.0, std_ratio_interval=[9.99, 10.01])


X = np.linspace(-2, 2, N)
Y = np.sin(X) + np.random.default_rng(0).normal(size=N)
# Every picture with a legend, on `ax`, of forecasts whose names begin so.
PICTURES = {
    "reliability_diagram": lambda ax, name: plots.reliability_diagram(Y, named(name), ax=ax),
    "pit_histogram": lambda ax, name: plots.pit_histogram(Y, named(name), ax=ax),
    "coverage_by": lambda ax, name: plots.coverage_by(Y, named(name), np.resize([name, "b"], N), ax=ax),
    "z_scores": lambda ax, name: plots.z_scores(Y, named(name), ax=ax),
    "residuals": lambda ax, name: plots.residuals(Y, named(name)[f"{name}_a"], ax=ax),
    "intervals": lambda ax, name: plots.intervals(Y, named(name)[f"{name}_b"], ax=ax),
    "prediction_band": lambda ax, name: plots.prediction_band(X, named(name)[f"{name}_b"], y=Y, ax=ax),
    "widths": lambda ax, name: plots.widths(named(name), ax=ax),
    "width_against_coverage": lambda ax, name: plots.width_against_coverage(Y, named(name), ax=ax),
}
LEGENDS_AT_THE_BEST_PLACE = ("reliability_diagram", "z_scores")


def boxes(ax):
    """The places of the axes, of the legend and of the texts inside, as they are drawn."""
    ax.figure.canvas.draw()
    texts = [text.get_window_extent() for text in ax.texts if text.get_text()]
    return ax.get_window_extent(), ax.get_legend().get_window_extent(), texts


def lies_in(inner, outer):
    return bool(np.all(inner.min >= outer.min - 1) and np.all(inner.max <= outer.max + 1))


@pytest.mark.filterwarnings("ignore:15 calibration rows are too few")
@pytest.mark.parametrize("name", ["name", LONG])
@pytest.mark.parametrize("setting", ["own", "plain", "small"])
@pytest.mark.parametrize("picture", PICTURES)
def test_legends_and_texts_lie_inside_and_off_the_data(plt, picture, setting, name):
    ax = {"own": lambda: None, "plain": lambda: plt.subplots()[1], "small": lambda: plt.subplots(2, 3)[1][1, 1]}[
        setting
    ]()
    ax = PICTURES[picture](ax, name)
    axes, legend, texts = boxes(ax)
    assert lies_in(legend, axes)
    for k, text in enumerate(texts):
        assert lies_in(text, axes)
        assert not text.overlaps(legend)
        assert not any(text.overlaps(other) for other in texts[:k])
    if picture not in LEGENDS_AT_THE_BEST_PLACE:
        drawn = [line for line in ax.lines if len(line.get_xdata())] + [*ax.patches, *ax.collections]
        assert max(artist.get_window_extent().y1 for artist in drawn) <= legend.y0


@pytest.mark.filterwarnings("ignore:15 calibration rows are too few")
def test_names_are_cut_only_where_they_must_and_in_their_middle(plt):
    def names(ax):
        return [text.get_text() for text in plots.pit_histogram(Y, named(LONG), ax=ax).get_legend().get_texts()]

    assert names(plt.subplots()[1]) == ["calibrated, 95 %", f"{LONG}_a", f"{LONG}_b"]
    _, *cut = names(plt.subplots(2, 3)[1][0, 2])
    for whole, name in zip((f"{LONG}_a", f"{LONG}_b"), cut, strict=True):
        begin, end = name.split("…")
        assert whole.startswith(begin)
        assert whole.endswith(end)
    assert len({*cut}) == 2


@pytest.mark.filterwarnings("ignore:15 calibration rows are too few")
def test_numbers_after_a_name_are_not_cut(plt):
    ax = plots.reliability_diagram(Y, named(LONG), ax=plt.subplots(2, 3)[1][0, 0])
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert all("…" in text and ", ECE" in text and text.endswith(" %") for text in texts[1:])


def test_axes_that_share_their_limits_show_the_data_of_each(plt):
    _, axes = plt.subplots(1, 3, sharey=True)
    for ax, std in zip(axes, (1.0, 9.0, 2.0), strict=True):
        plots.intervals(Y, Normal(np.zeros(N), std), ax=ax)
    bottom, top = axes[0].get_ylim()
    for ax, std in zip(axes, (1.0, 9.0, 2.0), strict=True):
        assert bottom < -1.6 * std < 1.6 * std < top
        bars = [bar.get_window_extent() for bar in ax.containers[0]]
        assert not any(bar.overlaps(ax.get_legend().get_window_extent()) for bar in bars)
    assert top < 30  # the room for the legends does not add up


@pytest.mark.parametrize("setting", ["own", "plain", "small"])
def test_lines_of_a_tree_lie_inside_and_do_not_overlap(plt, setting):
    ax = {"own": lambda: None, "plain": lambda: plt.subplots()[1], "small": lambda: plt.subplots(2, 3)[1][0, 0]}[
        setting
    ]()
    ax = plots.tree(SimpleNamespace(root=lambda names, member: grown(4, "")), ax=ax)
    ax.figure.canvas.draw()
    texts = [text.get_window_extent() for text in ax.texts if text.get_text()]
    assert len(texts) > 16 + 3 * 15
    for k, text in enumerate(texts):
        assert lies_in(text, ax.get_window_extent())
        assert not any(text.overlaps(other) for other in texts[:k])


def test_conditions_of_a_tree_are_cut_only_where_there_is_no_room(plt):
    conditions = lambda ax: [text.get_text() for text in ax.texts if " > " in text.get_text()]
    fitted = SimpleNamespace(root=lambda names, member: grown(1, ""))
    assert conditions(plots.tree(fitted)) == [f"{'long_name_' * 4}{k} > 1" for k in range(2)]
    for k, text in enumerate(conditions(plots.tree(fitted, ax=plt.subplots(2, 3)[1][0, 0]))):
        assert "…" in text
        assert text.endswith(f"{k} > 1")


@pytest.mark.filterwarnings("ignore:15 calibration rows are too few")
@pytest.mark.parametrize("picture", PICTURES)
def test_a_given_ax_is_drawn_on_and_nothing_global_changes(picture, tmp_path):
    from matplotlib.figure import Figure

    before = dict(mpl.rcParams)
    # Not made by pyplot, and part of another figure.
    ax = Figure(figsize=(6.6, 2.6), layout="constrained").subfigures(1, 2)[1].subplots()
    assert PICTURES[picture](ax, "name") is ax
    ax.figure.figure.savefig(tmp_path / "a.pdf")
    own = PICTURES[picture](None, "name")
    assert own is not ax
    own.figure.savefig(tmp_path / "b.png")
    assert dict(mpl.rcParams) == before
