"""What the pictures hold: curves, bands, marks, numbers and trees."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxcal import metrics, plots
from jaxcal.distributions import Empirical, Normal, Point, Quantiles
from jaxcal.predictors._tree import Branch, Node

pytestmark = [pytest.mark.any_precision, pytest.mark.usefixtures("plt")]

N = 60


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


def arrows(ax):
    """Where the arrows of infinite intervals stand, those that point up and those that point down."""
    found = {line.get_marker(): np.column_stack(line.get_data()) for line in ax.lines if line.get_marker() in (6, 7)}
    return found.get(6, np.empty((0, 2))), found.get(7, np.empty((0, 2)))


@pytest.mark.filterwarnings("ignore:15 calibration rows are too few")
def test_infinite_intervals_end_at_arrows(rng):
    scale = np.array([0.0, 1.0, 2.0])
    finite, tau = Normal(np.zeros(3), scale), np.array([0.5, 0.01, 0.99])
    z = np.sort(rng.normal(size=15))
    ax = plots.intervals(np.zeros(3), Empirical(np.zeros(3), scale, z, rule="randomized", tau=tau), order=scale)
    up, down = arrows(ax)
    # Row 0 is finite; the randomized quantiles of row 1 have no upper end, those of row 2 no lower one.
    assert up[:, 0] == [1]
    assert down[:, 0] == [2]
    bars = ax.containers[0]
    assert bars[1].get_y() + bars[1].get_height() == pytest.approx(up[0, 1])
    assert bars[2].get_y() == pytest.approx(down[0, 1])
    assert "infinite, 2 rows" in labels(ax)
    assert not any("infinite" in label for label in labels(plots.intervals(np.zeros(3), finite)))


def test_intervals_that_are_all_infinite_are_counted(rng):
    distribution = Empirical(np.zeros(50), 1.0, np.sort(rng.normal(size=4)), rule="conformal")
    with pytest.warns(UserWarning, match="at least 19"):
        ax = plots.intervals(rng.normal(size=50), distribution, max_rows=20)
    assert [len(points) for points in arrows(ax)] == [20, 20]
    assert "infinite, 50 rows" in labels(ax)


def test_levels_that_no_interval_reaches_are_said_once():
    distribution = Quantiles(np.array([0.4, 0.6]), np.tile([-1.0, 1.0], (5, 1)))
    for draw in (partial(plots.intervals, np.zeros(5)), partial(plots.prediction_band, np.arange(5.0))):
        with pytest.warns(UserWarning, match=r"at 0\.05 and 0\.95 the outermost of them is taken") as said:
            draw(distribution)
        assert len(said) == 1


def test_prediction_band_is_sorted_by_x(forecast, rng):
    y, distribution = forecast
    x = rng.permutation(N) / 10
    ax = plots.prediction_band(x, distribution, y=y, confidence_levels=(0.5, 0.9))
    order = np.argsort(x)
    for band, level in zip(ax.collections, (0.9, 0.5), strict=True):
        corners = band.get_paths()[0].vertices
        for place, lower, upper in zip(x, *distribution.interval(level), strict=True):
            heights = np.unique(corners[np.isclose(corners[:, 0], place), 1])
            np.testing.assert_allclose([heights[0], heights[-1]], [lower, upper], rtol=1e-6)
    places, mean = curve(ax, "predicted mean")
    np.testing.assert_allclose(places, x[order])
    np.testing.assert_allclose(mean, distribution.mean[order])
    lower, upper = distribution.interval(0.9)
    outside = (y < lower) | (y > upper)
    np.testing.assert_allclose(curve(ax, "outside"), [x[order][outside[order]], y[order][outside[order]]], rtol=1e-6)
    assert f"90 % interval, holds {100 * np.mean(~outside):.1f} %" in labels(ax)


def test_a_prediction_band_of_many_rows_draws_some_targets_and_arrows(rng):
    x, y = rng.uniform(size=(2, 2500))
    with pytest.warns(UserWarning, match="at least 19"):
        ax = plots.prediction_band(x, Empirical(y, 1.0, np.arange(4.0), rule="conformal"), y=y)
    places, _ = curve(ax, "truth, 1000 of 2500")
    np.testing.assert_allclose([places[0], places[-1]], [x.min(), x.max()], rtol=1e-6)
    assert "infinite, 2500 rows" in labels(ax)
    up, down = arrows(ax)
    assert 10 <= len(up) == len(down) <= 50
    # The band is cut where the arrows stand.
    corners = ax.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose([corners[:, 1].max(), corners[:, 1].min()], [up[0, 1], down[0, 1]])


@pytest.mark.filterwarnings("ignore:15 calibration rows are too few")
def test_widths_are_fractions_of_the_rows_with_those_at_infinity():
    std = np.arange(1.0, 11.0)
    tau = np.where(std > 7, 0.01, 0.5)
    some = Empirical(np.zeros(10), std, np.linspace(-1, 1, 15), rule="randomized", tau=tau)
    ax = plots.widths({"finite": Normal(np.zeros(10), std), "some": some}, bins=5)
    finite, infinite = (np.asarray(patch.get_data().values) for patch in ax.patches[:2])
    assert finite.sum() == pytest.approx(1)
    assert infinite.sum() == pytest.approx(0.7)
    (bar,) = ax.patches[2:]
    assert bar.get_height() == pytest.approx(0.3)
    assert bar.get_x() > ax.patches[0].get_data().edges[-1]
    assert [tick.get_text() for tick in ax.get_xticklabels(minor=True)] == ["∞"]
    lower, upper = (np.asarray(end) for end in Normal(np.zeros(10), std).interval(0.9))
    assert labels(ax)[0] == f"finite, mean {np.mean(upper - lower):.3g}"
    lower, upper = (np.asarray(end) for end in some.interval(0.9))
    assert labels(ax)[1] == f"some, median {np.median(upper - lower):.3g} (3 infinite)"


@pytest.mark.parametrize("bins", [2, 30, 31])
def test_widths_that_are_equal_but_for_rounding_are_a_line(rng, bins):
    mean = (1000 * rng.normal(size=N)).astype(np.float32)
    ax = plots.widths(Normal(mean, np.float32(1.0)), bins=bins)
    assert np.ptp(np.subtract(*Normal(mean, np.float32(1.0)).interval(0.9))) > 0
    assert not ax.patches
    np.testing.assert_allclose(curve(ax, "mean 3.29")[0], 2 * stats.norm.ppf(0.95), rtol=1e-4)
    assert labels(plots.widths(Point(mean))) == ["mean 0"]


def test_every_width_is_in_a_bin(rng):
    for scale in (1e-3, 1.0, 1e5):
        ax = plots.widths({"a": Normal(np.zeros(N), scale * rng.uniform(1, 1.05, N))}, bins=7)
        assert np.sum(ax.patches[0].get_data().values) == pytest.approx(1)


def test_width_against_coverage(forecast):
    y, distribution = forecast
    wide = Normal(distribution.mean, 3 * distribution.std)
    ax = plots.width_against_coverage(y, {"right": distribution, "wide": wide}, confidence_levels=(0.9, 0.5))
    for name, forecast in (("right", distribution), ("wide", wide)):
        coverages, widths = curve(ax, name)
        for k, level in enumerate((0.5, 0.9)):
            options = {"confidence_level": level}
            expected = metrics.coverage(y, forecast, **options), metrics.mean_width(y, forecast, **options)
            np.testing.assert_allclose([coverages[k], widths[k]], expected, rtol=1e-6)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("coverage", "mean width")


@pytest.mark.filterwarnings("ignore:15 calibration rows are too few")
def test_width_against_coverage_takes_medians_of_all_where_some_are_infinite(forecast):
    y, distribution = forecast
    z = np.linspace(-1, 1, 15)
    some = Empirical(np.zeros(N), 1.0, z, rule="randomized", tau=np.where(np.arange(N) < 12, 0.01, 0.5))
    most = Empirical(np.zeros(N), 1.0, z, rule="randomized", tau=np.where(np.arange(N) < 42, 0.01, 0.5))
    ax = plots.width_against_coverage(y, {"normal": distribution, "some": some, "most": most})
    assert ax.get_ylabel() == "median width"
    assert labels(ax)[-3:] == ["normal", "some (12 infinite)", "most (42 infinite)"]
    for name, forecast in (("normal", distribution), ("some", some)):
        lower, upper = (np.asarray(end) for end in forecast.interval(0.9))
        np.testing.assert_allclose(curve(ax, name)[1], np.median(upper - lower), rtol=1e-6)
    ((_, height),) = arrows(ax)[0]
    np.testing.assert_allclose(curve(ax, "most")[1], height, rtol=1e-6)
    assert height > curve(ax, "normal")[1]


def test_residuals(forecast):
    y, distribution = forecast
    ax = plots.residuals(y, distribution)
    scores = np.abs((y - np.asarray(distribution.mean)) / np.asarray(distribution.std))
    assert labels(ax) == [f"{100 * np.mean(scores > 1.96):.1f} % beyond ±1.96"]
    assert ax.get_ylim()[1] > scores.max()
    with pytest.raises(ValueError, match="need a positive, finite std; 60 rows have none"):
        plots.residuals(y, Point(y))


@pytest.mark.parametrize(
    "plot",
    [
        plots.reliability_diagram,
        plots.pit_histogram,
        plots.z_scores,
        plots.residuals,
        plots.intervals,
        plots.width_against_coverage,
        lambda y, distribution: plots.coverage_by(y, distribution, ["a"] * len(y)),
        lambda y, distribution: plots.prediction_band(np.zeros(N), distribution, y=y),
    ],
)
def test_lengths_and_shapes_must_match(forecast, plot):
    y, distribution = forecast
    with pytest.raises(ValueError, match="y has 59 rows where 60"):
        plot(y[1:], distribution)
    with pytest.raises(ValueError, match=r"of shape \(n,\); got \(60, 2\)"):
        plot(y, Normal(np.zeros((N, 2)), np.ones((N, 2))))


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
    (shortened,) = (text for text in texts if "…" in text)
    begin, end = shortened.split("…")
    assert name.startswith(begin)
    assert end.endswith(" <= 0.2")
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
