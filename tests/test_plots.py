"""What the pictures hold: curves, bands, marks, numbers and trees; that they leave matplotlib as it was."""

import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from scipy import stats

from jaxcal import metrics, plots
from jaxcal.distributions import Empirical, Normal, Point
from jaxcal.predictors._tree import Branch, Node

pytestmark = pytest.mark.any_precision

N = 60


@pytest.fixture(autouse=True)
def _agg():
    """Draw without a screen, and close what was drawn."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


@pytest.fixture
def forecast(rng):
    mean, std = rng.normal(size=N), rng.uniform(0.5, 2, size=N)
    return mean + std * rng.normal(size=N), Normal(mean, std)


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def curve(ax, label):
    """The points of the line whose label begins so: x and y."""
    line = next(line for line in ax.lines if str(line.get_label()).startswith(label))
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def test_reliability_diagram(forecast):
    y, distribution = forecast
    ax = plots.reliability_diagram(y, {"wide": Normal(distribution.mean, 3 * distribution.std), "right": distribution})
    levels, shares = curve(ax, "right")
    np.testing.assert_allclose(shares, metrics.observed_fractions(y, distribution, levels))
    assert labels(ax)[-1] == f"right, ECE {metrics.ece(y, distribution):.1f} %"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("expected fraction", "observed fraction")
    # Too wide: below the diagonal at low levels, above it at high ones, steep in the middle.
    levels, shares = curve(ax, "wide")
    assert shares[20] < levels[20]
    assert shares[80] > levels[80]


def test_band_holds_95_percent_of_calibrated_curves(rng):
    ax = plots.reliability_diagram(np.zeros(N), Normal(np.zeros(N), 1.0))
    corners = np.asarray(ax.collections[0].get_paths()[0].vertices)
    for level in (0.1, 0.5, 0.9):
        low, high = np.sort(corners[np.isclose(corners[:, 0], level), 1])[[0, -1]]
        counts = np.arange(N + 1)
        inside = (counts / N >= low - 1e-9) & (counts / N <= high + 1e-9)
        # The counts are discrete: the band is the narrowest central one that holds at least 95 %.
        assert 0.95 <= stats.binom.pmf(counts, N, level)[inside].sum() < 0.99


def test_one_forecast_needs_no_name(forecast):
    y, distribution = forecast
    assert labels(plots.reliability_diagram(y, distribution))[-1] == f"ECE {metrics.ece(y, distribution):.1f} %"


def test_intervals_sort_rows_and_mark_misses(forecast):
    y, distribution = forecast
    ax = plots.intervals(y, distribution)
    lower, upper = (np.asarray(bound) for bound in distribution.interval(0.9))
    order, outside = np.argsort(distribution.mean), (y < lower) | (y > upper)
    np.testing.assert_allclose(curve(ax, "outside")[1], y[order][outside[order]], rtol=1e-6)
    np.testing.assert_allclose(curve(ax, "truth")[1], y[order][~outside[order]], rtol=1e-6)
    widest = ax.containers[0]
    np.testing.assert_allclose([bar.get_height() for bar in widest], (upper - lower)[order], rtol=1e-5)
    for level in (0.9, 0.5):
        share = metrics.coverage(y, distribution, confidence_level=level)
        assert f"{100 * level:g} % interval, holds {100 * share:.1f} %" in labels(ax)
    assert ax.get_xlabel() == "rows, sorted by predicted mean"


def test_intervals_of_many_rows_draw_some_and_count_all(forecast):
    y, distribution = forecast
    ax = plots.intervals(y, distribution, order=-y, confidence_levels=(0.8,), max_rows=20)
    assert len(ax.containers[0]) == 20
    assert ax.get_xlabel() == "20 of 60 rows, in the given order"
    share = metrics.coverage(y, distribution, confidence_level=0.8)
    assert f"80 % interval, holds {100 * share:.1f} %" in labels(ax)


def test_infinite_intervals_end_at_the_frame(rng):
    distribution = Empirical(np.zeros(5), 1.0, np.sort(rng.normal(size=4)), rule="conformal")
    with pytest.warns(UserWarning, match="at least 19"):
        ax = plots.intervals(rng.normal(size=5), distribution)
    for bar in ax.containers[0]:
        np.testing.assert_allclose(bar.get_y() + bar.get_height(), ax.get_ylim()[1], rtol=1e-5)


def test_residuals(forecast):
    y, distribution = forecast
    ax = plots.residuals(y, distribution)
    scores = np.abs((y - np.asarray(distribution.mean)) / np.asarray(distribution.std))
    assert labels(ax) == [f"{100 * np.mean(scores > 1.96):.1f} % beyond ±1.96"]
    assert ax.get_ylim()[1] > scores.max()
    with pytest.raises(ValueError, match="need a positive std; 60 rows have none"):
        plots.residuals(y, Point(y))


@pytest.mark.parametrize("plot", [plots.reliability_diagram, plots.intervals, plots.residuals])
def test_a_given_ax_is_drawn_on_and_nothing_global_changes(forecast, plot, tmp_path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.3, 2.6), layout="constrained")
    before = dict(mpl.rcParams)
    ax = figure.subplots()
    assert plot(*forecast, ax=ax) is ax
    figure.savefig(tmp_path / "a.pdf")
    own = plot(*forecast)
    assert own is not ax
    own.figure.savefig(tmp_path / "b.png")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("plot", [plots.reliability_diagram, plots.intervals, plots.residuals])
def test_lengths_must_match(forecast, plot):
    y, distribution = forecast
    with pytest.raises(ValueError, match="y has 59 rows where 60"):
        plot(y[1:], distribution)


def test_bad_options(forecast):
    y, distribution = forecast
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.reliability_diagram(y, {})
    with pytest.raises(ValueError, match=r"got 95: did you mean 0\.95\?"):
        plots.intervals(y, distribution, confidence_levels=(95.0,))


def test_the_library_imports_without_matplotlib_and_says_what_to_install():
    program = (
        "import sys; sys.modules['matplotlib'] = None; import numpy as np, jaxcal.plots as plots\n"
        "from jaxcal.distributions import Normal\n"
        "try: plots.residuals(np.zeros(2), Normal(np.zeros(2), 1.0))\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "jaxcal[plots]" in result.stdout


def test_tree_shows_every_node():
    blank = vars(Node.new(0, 1, np.dtype("float32")))
    branch = lambda rows, condition, rmse, below: Branch(
        **blank, condition=condition, path=condition, rmse=jnp.asarray(rmse), below=below
    ).updated(num_rows=rows)
    name = "a_name_that_is_much_too_long_to_be_drawn_in_one_line_with_the_rest_of_the_tree"
    leaves = [branch(240, f"{name} <= 0.2", 0.1, ()), branch(160, "b > 0.2", 0.4, ())]
    leaves = [leaf.updated(leaf=number) for number, leaf in enumerate(leaves)]
    root = branch(400, "", np.nan, tuple(leaves))
    root = root.updated(statistic=12.34, std_ratio=3.5, std_ratio_interval=[3.0, 4.08])
    asked = []
    fitted = SimpleNamespace(root=lambda names, member: asked.append((names, member)) or root)
    ax = plots.tree(fitted, ["a", "b"], member=2)
    assert asked == [(["a", "b"], 2)]
    texts = [text.get_text() for text in ax.texts]
    assert {"400", "240", "160", "12.3", "3.50 (3.00 to 4.08)", "0", "1", "0.1", "0.4", "b > 0.2"} <= {*texts}
    (shortened,) = (text for text in texts if text.endswith("…"))
    assert name.startswith(shortened[:-1])
    widths = [bar.get_width() for bar in ax.patches]
    assert widths[0] / widths[1] == pytest.approx(0.25)


def test_lines_of_a_tree_of_16_leaves_do_not_overlap():
    def grow(depth, condition):
        parts = tuple(grow(depth - 1, f"{'long_name_' * 4}{k} > {depth}") for k in range(2)) if depth else ()
        own = vars(Node.new(2**depth, 1, np.dtype("float32")))
        branch = Branch(**own, condition=condition, path="", rmse=jnp.asarray(1.0), below=parts)
        return branch.updated(statistic=99.9, std_ratio=10.0, std_ratio_interval=[9.99, 10.01])

    ax = plots.tree(SimpleNamespace(root=lambda names, member: grow(4, "")))
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    assert len(boxes) > 16 + 3 * 15
    for k, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:k])
