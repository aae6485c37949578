"""Pictures of calibration in numbers: PIT histograms, coverage of groups, quantiles of standardized residuals."""

import numpy as np
import pytest
from scipy import stats

from jaxcal import metrics, plots
from jaxcal.distributions import Empirical, Normal, Point, StudentT

pytestmark = [pytest.mark.any_precision, pytest.mark.usefixtures("plt")]

N = 60


def heights(ax):
    """Those of every histogram."""
    return [np.asarray(patch.get_data().values) for patch in ax.patches]


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def mass(low, high, rows, level):
    """The probability that a binomial fraction of so many rows lies between the two, and on them."""
    counts = np.arange(rows + 1)
    inside = (counts / rows >= low - 1e-9) & (counts / rows <= high + 1e-9)
    return stats.binom.pmf(counts, rows, level)[inside].sum()


def test_pit_histogram_is_a_density_beside_its_band(forecast):
    y, distribution = forecast
    wide = Normal(distribution.mean, 3 * distribution.std)
    ax = plots.pit_histogram(y, {"right": distribution, "wide": wide}, bins=5)
    for found, (mean, std) in zip(heights(ax), ((0, 1), (0, 3)), strict=True):
        values = stats.norm.cdf((y - np.asarray(distribution.mean)) / np.asarray(distribution.std), mean, std)
        np.testing.assert_allclose(found, np.histogram(values, 5, range=(0, 1), density=True)[0])
    low, high = np.sort(np.unique(ax.collections[0].get_paths()[0].vertices[:, 1]))
    assert 0.95 <= mass(low / 5, high / 5, N, 0.2) < 0.99
    assert labels(ax) == ["calibrated, 95 %", "right", "wide"]


@pytest.mark.parametrize("bins", [2, 7, 10])
def test_rows_with_an_atom_at_their_target_count_by_its_parts(bins):
    # A third of the targets is 0, the rest 1, as predicted.
    coins = Empirical(np.zeros(3), 1.0, np.array([0.0, 1.0, 1.0]))
    (found,) = heights(plots.pit_histogram(np.array([0.0, 1.0, 1.0]), coins, bins=bins))
    np.testing.assert_allclose(found, 1, rtol=1e-6)  # 1/3 of a bin, in 32 bits
    # A point that hits its target has all levels; one that is too low or too high has the level 1 or 0.
    (found,) = heights(plots.pit_histogram(np.array([1.0, 2.0, 3.0, 3.0]), Point(np.full(4, 2.0)), bins=bins))
    np.testing.assert_allclose(found, [bins / 4 + 0.25, *[0.25] * (bins - 2), bins / 2 + 0.25])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_at_the_edges_of_bins_lie_in_the_upper_one(dtype):
    # F(y) is k / 10 in row k: each bin begins with one of them, whatever 0.7 is rounded to.
    y = np.arange(10, dtype=dtype) - dtype(0.5)
    distribution = Empirical(np.zeros(10, dtype), dtype(1), np.arange(10, dtype=dtype))
    (found,) = heights(plots.pit_histogram(y, distribution, bins=10))
    np.testing.assert_allclose(found, 1)


@pytest.mark.parametrize("by", [["left", "mid", "right"], [3, 1, 2], [True, False], [0.5, 1.5]])
def test_coverage_by_labels(forecast, rng, by):
    y, distribution = forecast
    by = np.resize(by, N)
    expected = metrics.evaluate(y, distribution, by=by)
    ax = plots.coverage_by(y, {"a": distribution, "b": distribution}, by)
    assert len(ax.lines) == 2
    for line in ax.lines:
        found = [float(scores["coverage_90"]) for scores in expected.values()]
        np.testing.assert_allclose(line.get_xdata(), found, rtol=1e-6)
    texts = [text.get_text() for text in ax.texts]
    assert texts[: len(expected)] == [str(label) for label in expected]
    assert texts[len(expected) : -1] == [str(scores["rows"]) for scores in expected.values()]
    for bar, scores in zip(ax.patches, expected.values(), strict=True):
        assert 0.95 <= mass(bar.get_x(), bar.get_x() + bar.get_width(), scores["rows"], 0.9) <= 1
    assert labels(ax)[0] == f"a, {100 * metrics.coverage(y, distribution):.1f} % of all rows"


def test_coverage_by_bins_of_a_column(forecast):
    y, distribution = forecast
    x = np.repeat([1995.2, 1995.4, 1996.0, 2010.0, 2011.5, 2012.0], 10)
    ax = plots.coverage_by(y, distribution, x, bins=3, confidence_level=0.5)
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["up to 1995", "1995 to 2010", "above 2010", "20", "20", "20", "rows"]
    lower, upper = (np.asarray(end) for end in distribution.interval(0.5))
    np.testing.assert_allclose(ax.lines[0].get_xdata(), ((lower <= y) & (y <= upper)).reshape(3, 20).mean(1))
    assert ax.get_xlabel() == "coverage of the 50 % interval"
    # Edges that are the same to three digits have as many as make them different.
    near = plots.coverage_by(y, distribution, 1 + 1e-5 * np.arange(N), bins=3)
    assert near.texts[1].get_text() == "1.0002 to 1.0004"


def test_coverage_by_takes_labels_as_they_are(forecast, tmp_path):
    y, distribution = forecast
    ax = plots.coverage_by(y, distribution, np.resize(["$1_{", "100 %", "a\\b$"], N))
    ax.figure.savefig(tmp_path / "a.png")
    assert [text.get_text() for text in ax.texts[:3]] == ["$1_{", "100 %", "a\\b$"]


def test_bad_groups_and_bins(forecast):
    y, distribution = forecast
    with pytest.raises(ValueError, match="1 labels that are NaN"):
        plots.coverage_by(y, distribution, np.where(np.arange(N) == 3, np.nan, 0))
    with pytest.raises(ValueError, match="by holds 1 values that are NaN or infinite"):
        plots.coverage_by(y, distribution, np.where(np.arange(N) == 3, np.inf, np.arange(N)))
    with pytest.raises(ValueError, match=r"by must have shape \(60,\)"):
        plots.coverage_by(y, distribution, np.arange(5))
    with pytest.raises(ValueError, match="bins must be at least 2; got 1"):
        plots.coverage_by(y, distribution, y, bins=1)
    with pytest.raises(ValueError, match="bins must be at least 2; got 1"):
        plots.pit_histogram(y, distribution, bins=1)
    with pytest.raises(ValueError, match=r"got 90: did you mean 0\.9\?"):
        plots.coverage_by(y, distribution, y, confidence_level=90.0)


def test_z_scores_are_sorted_above_normal_quantiles(forecast):
    y, distribution = forecast
    ax = plots.z_scores(y, {"shifted": Normal(distribution.mean - 1.0, distribution.std), "right": distribution})
    diagonal, shifted, right = (np.column_stack(line.get_data()) for line in ax.lines)
    z = np.sort((y - np.asarray(distribution.mean)) / np.asarray(distribution.std))
    np.testing.assert_allclose(right[:, 0], stats.norm.ppf((np.arange(N) + 0.5) / N))
    np.testing.assert_allclose(right[:, 1], z, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(diagonal[:, 0], diagonal[:, 1])
    assert (shifted[:, 1] > right[:, 1]).all()
    assert labels(ax)[-1] == f"right, std of z {z.std():.2f}"


def test_band_of_z_scores_holds_95_percent_of_calibrated_ones_at_each_point(rng):
    ax = plots.z_scores(np.arange(20.0), Normal(np.zeros(20), 1.0))
    corners = ax.collections[0].get_paths()[0].vertices
    places = ax.lines[0].get_xdata()
    ends = [corners[np.isclose(corners[:, 0], place), 1] for place in places]
    low, high = [end.min() for end in ends], [end.max() for end in ends]
    drawn = np.sort(rng.normal(size=(4000, 20)), axis=1)
    inside = (np.tile(low, (4000, 1)) <= drawn) & (drawn <= np.tile(high, (4000, 1)))
    # 4000 samples: the standard error of each fraction is 0.35 %.
    np.testing.assert_allclose(inside.mean(0), 0.95, atol=0.013)


def test_z_scores_of_many_rows_draw_some_with_the_outermost(rng):
    y = rng.normal(size=20_000)
    (_, line) = plots.z_scores(y, Normal(np.zeros(y.size), 1.0)).lines
    drawn = np.asarray(line.get_ydata())
    assert 200 < drawn.size <= 400
    np.testing.assert_allclose([drawn[0], drawn[-1]], [y.min(), y.max()])


@pytest.mark.parametrize("plot", [plots.z_scores, plots.residuals])
def test_standardized_residuals_need_a_std(plot):
    with pytest.raises(ValueError, match="need a positive, finite std; 3 rows have none"):
        plot(np.zeros(3), Point(np.zeros(3)))
    with pytest.raises(ValueError, match="need a positive, finite std; 1 rows have none"):
        plot(np.zeros(2), StudentT(np.array([2.0, 3.0]), np.zeros(2), 1.0))
