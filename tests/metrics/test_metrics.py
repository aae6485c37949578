"""Metrics against loops written from the papers' formulas, on continuous distributions, atoms and ties."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncertainty_toolbox as toolbox
from scipy import stats

from jaxcal import metrics
from jaxcal.distributions import Empirical, Mixture, Normal, Point, Quantiles, StudentT

PERCENTS = np.arange(1, 100) / 100
# In 32 bits the examples of the docstrings are enough.
pytestmark = pytest.mark.contract_in_32_bits
N = 37  # one number of rows in most tests, so that few shapes are compiled


@pytest.fixture
def forecast(rng):
    """A normal forecast that is biased and too narrow: targets, means, stds."""
    mean, std = rng.normal(size=N), rng.uniform(0.5, 2, size=N)
    return mean + 0.3 + 1.4 * std * rng.normal(size=N), mean, std


@pytest.fixture
def tolerance():
    return 1e-9 if jax.config.read("jax_enable_x64") else 2e-5


stacked_normals = eqx.filter_vmap(Normal)


def distributions(rng, n=N):
    """One distribution of every class, with n rows."""
    mean, std = rng.normal(size=n), rng.uniform(0.5, 2, size=n)
    table = np.sort(rng.normal(size=20))
    members = stacked_normals(mean + rng.normal(size=(3, 1)), np.ones((3, 1)) * std)
    knots = mean[:, None] + np.array([-1.5, 0.0, 3.0])
    return {
        "normal": Normal(mean, std),
        "student": StudentT(np.full(n, 5.0), mean, std),
        "mixture": Mixture(members),
        "empirical": Empirical(mean, std, table),
        "crude": Empirical(mean, std, table, rule="crude"),
        "quantiles": Quantiles(np.array([0.05, 0.5, 0.95]), knots),
        "point": Point(mean),
    }


# Scores in the unit of y; the others but NLPD have none.
IN_THE_UNIT_OF_Y = ("rmse", "mae", "crps", "interval_score_90", "width_90", "sharpness", "mean_std")


def scaled(distribution, factor):
    """The distribution of factor * y; what has no unit, degrees of freedom, tables, weights and levels, stays."""
    where = {
        Normal: lambda distribution: (distribution.mean, distribution.std),
        Point: lambda distribution: (distribution.mean,),
        StudentT: lambda distribution: (distribution.loc, distribution.scale),
        Empirical: lambda distribution: (distribution.loc, distribution.scale),
        Quantiles: lambda distribution: (distribution.values,),
        Mixture: lambda distribution: (distribution.components.mean, distribution.components.std),
    }[type(distribution)]
    return eqx.tree_at(where, distribution, tuple(factor * leaf for leaf in where(distribution)))


# The formulas


def test_normal_forecast_against_loops_over_the_papers_formulas(forecast, tolerance):
    y, mean, std = forecast
    distribution, n = Normal(mean, std), len(y)

    def quantile(p):
        return [stats.norm.ppf(p, m, s) for m, s in zip(mean, std, strict=True)]

    def share(p):
        return sum(y_i < q_i for y_i, q_i in zip(y, quantile(p), strict=True)) / n

    def closed_fraction(p):
        return sum(y_i <= q_i for y_i, q_i in zip(y, quantile(p), strict=True)) / n

    def inside(t):
        ends = zip(quantile(t), y, quantile(1 - t), strict=True)
        return sum(low < y_i < high for low, y_i, high in ends) / n

    lower, upper = np.array(quantile(0.1)), np.array(quantile(0.9))
    expected = {
        metrics.rmse: np.sqrt(np.mean((y - mean) ** 2)),
        metrics.mae: np.mean(np.abs(y - mean)),
        metrics.nlpd: -np.mean(stats.norm.logpdf(y, mean, std)),
        metrics.sharpness: np.sqrt(np.mean(std**2)),
        metrics.mean_std: np.mean(std),
        metrics.ece: 100 / 99 * sum(abs(share(p) - p) for p in PERCENTS),
        metrics.tce: 100 / 4 * sum(abs(inside(t) - (1 - 2 * t)) for t in (0.05, 0.1, 0.15, 0.2)),
        metrics.calibration_rmse: np.sqrt(sum((share(j / 100) - j / 100) ** 2 for j in range(101)) / 100),
        metrics.calibration_sse: sum((closed_fraction(j / 20) - j / 20) ** 2 for j in range(21)),
        metrics.max_calibration_error: 100 * stats.kstest(stats.norm.cdf(y, mean, std), "uniform").statistic,
    }
    for metric, value in expected.items():
        np.testing.assert_allclose(metric(y, distribution), value, rtol=tolerance, err_msg=metric.__name__)

    at_80 = {
        metrics.coverage: np.mean((lower <= y) & (y <= upper)),
        metrics.mean_width: np.mean(upper - lower),
        metrics.interval_score: np.mean(
            upper - lower + 10 * np.where(y < lower, lower - y, 0) + 10 * np.where(y > upper, y - upper, 0)
        ),
    }
    for metric, value in at_80.items():
        np.testing.assert_allclose(
            metric(y, distribution, confidence_level=0.8), value, rtol=tolerance, err_msg=metric.__name__
        )


def test_normal_forecast_against_uncertainty_toolbox(forecast, tolerance):
    y, mean, std = forecast
    distribution, rows = Normal(mean, std), (mean, std, y)
    by_quantile = {"num_bins": 101, "prop_type": "quantile"}  # at the levels 0, 0.01, ..., 1
    levels, confidence_levels = np.linspace(0.01, 0.99, 99), np.linspace(0.1, 0.9, 5)
    at = {"start_p": 0.1, "end_p": 0.9, "resolution": 5}
    interval_scores = [metrics.interval_score(y, distribution, confidence_level=level) for level in confidence_levels]
    pairs = [
        (metrics.nlpd(y, distribution), toolbox.nll_gaussian(*rows)),
        (metrics.crps(y, distribution), toolbox.crps_gaussian(*rows)),
        (metrics.pinball(y, distribution, levels), toolbox.check_score(*rows)),
        (np.mean(interval_scores), toolbox.interval_score(*rows, **at)),
        (metrics.sharpness(y, distribution), toolbox.sharpness(std)),
        # CRUDE divides the 101 terms by 100; USNRT's levels are the 99 inner ones, in percent.
        (
            metrics.calibration_rmse(y, distribution),
            toolbox.root_mean_squared_calibration_error(*rows, **by_quantile) * np.sqrt(1.01),
        ),
        (metrics.ece(y, distribution), toolbox.mean_absolute_calibration_error(*rows, **by_quantile) * 100 * 101 / 99),
    ]
    for ours, expected in pairs:
        np.testing.assert_allclose(ours, expected, rtol=tolerance)

    # Its shares are mirrored: of the targets above the quantile of the other side.
    _, shares = toolbox.get_proportion_lists_vectorized(*rows, **by_quantile)
    np.testing.assert_allclose(metrics.observed_fractions(y, distribution, levels), 1 - shares[-2:0:-1], atol=tolerance)


def test_crps_is_twice_the_pinball_loss_over_all_levels(forecast):
    y, mean, std = forecast
    levels = (np.arange(2000) + 0.5) / 2000
    distribution = Normal(mean, std)
    np.testing.assert_allclose(2 * metrics.pinball(y, distribution, levels), metrics.crps(y, distribution), rtol=1e-4)


def test_pinball_at_the_median_is_half_the_absolute_error(forecast, tolerance):
    y, mean, std = forecast
    distribution = Normal(mean, std)
    np.testing.assert_allclose(metrics.pinball(y, distribution, 0.5), metrics.mae(y, distribution) / 2, rtol=tolerance)


def test_ence_against_bins_of_sorted_rows(forecast, tolerance):
    y, mean, std = forecast
    rows = np.argsort(std)
    gaps = []
    for i in range(10):
        members = [row for rank, row in enumerate(rows) if rank * 10 // N == i]
        spread = np.sqrt(np.mean(std[members] ** 2))
        gaps.append(abs(spread - np.sqrt(np.mean((y[members] - mean[members]) ** 2))) / spread)
    np.testing.assert_allclose(metrics.ence(y, Normal(mean, std)), np.mean(gaps), rtol=tolerance)
    # With more bins than rows every row is a bin.
    ratios = np.abs(std - np.abs(y - mean)) / std
    np.testing.assert_allclose(metrics.ence(y, Normal(mean, std), num_bins=1000), np.mean(ratios), rtol=10 * tolerance)


def test_ence_where_no_variance_is_predicted():
    right, wrong = np.array([1.0, 2.0]), np.array([1.0, 2.5])
    assert metrics.ence(right, Point(right)) == 0
    assert metrics.ence(wrong, Point(right)) == np.inf


def test_improvement_ratio_counts_ties_as_failures():
    y = np.zeros(4)
    before, after = Point(np.ones(4)), Point(np.array([0.5, -0.5, -1.0, 3.0]))
    assert metrics.improvement_ratio(y, before, after) == 0.5
    assert metrics.improvement_ratio(y, before, before) == 0


# Quantiles, atoms and ties


@pytest.mark.parametrize("name", ["normal", "student", "mixture", "empirical", "crude", "quantiles", "point"])
def test_observed_fractions_follow_the_quantiles_of_every_distribution(rng, name):
    distribution = distributions(rng)[name]
    y = np.asarray(distribution.mean) + rng.normal(size=N)
    levels = np.array([0.0, 0.05, 0.1, 0.29, 0.5, 0.57, 0.9, 0.95, 1.0])
    quantiles = np.stack([np.asarray(distribution.icdf(p)) for p in levels])
    below = metrics.observed_fractions(y, distribution, levels)
    np.testing.assert_allclose(below, np.mean(y < quantiles, axis=1), rtol=1e-6)


@pytest.mark.parametrize("distribution", ["empirical", "crude", "quantiles", "point"])
def test_a_target_on_an_atom_counts_only_where_the_formula_is_closed(rng, distribution):
    table = np.sort(rng.normal(size=20))
    distribution = {
        "empirical": Empirical(np.zeros(N), 1.0, table),
        "crude": Empirical(np.zeros(N), 1.0, table, rule="crude"),
        "quantiles": Quantiles(np.array([0.5, 0.9]), np.tile(table[:2], (N, 1))),
        "point": Point(rng.normal(size=N)),
    }[distribution]
    y = np.asarray(distribution.icdf(0.5))
    assert metrics.observed_fractions(y, distribution, np.array([0.5])) == 0
    assert metrics.observed_fractions(y, distribution, np.array([0.5]), closed=True) == 1


def test_ece_of_an_empirical_distribution_on_its_own_table(rng):
    # y = z_(i): y < z_(ceil(pL)) iff i < ceil(pL), so the strict share is (ceil(pL) - 1) / L.
    table = np.sort(rng.normal(size=50))
    distribution = Empirical(np.zeros(50), np.ones(50), table)
    ranks = np.ceil(np.arange(1, 100) * 50 / 100)
    expected = 100 * np.mean(np.abs((ranks - 1) / 50 - PERCENTS))
    np.testing.assert_allclose(
        metrics.ece(table.astype(np.asarray(distribution.mean).dtype), distribution), expected, rtol=1e-5
    )


def test_tce_intervals_are_open(tolerance):
    # All targets lie on the lower end of the 90 % interval, inside the other three no one lies.
    distribution = Quantiles(np.array([0.05, 0.95]), np.tile([0.0, 1.0], (8, 1)))
    np.testing.assert_allclose(metrics.tce(np.zeros(8), distribution), 75.0, rtol=tolerance)
    assert metrics.coverage(np.zeros(8), distribution) == 1  # a closed interval


def test_infinite_end_quantiles_add_nothing(rng, tolerance):
    y = 100 * rng.normal(size=N)  # cdfs round to 0 and 1
    for distribution in (Normal(np.zeros(N), 1.0), Mixture(stacked_normals(np.zeros((2, N)), np.ones((2, N))))):
        ends = metrics.observed_fractions(y, distribution, np.array([0.0, 1.0]))
        np.testing.assert_array_equal(ends, [0, 1])
        inner = metrics.observed_fractions(y, distribution, PERCENTS) - PERCENTS
        expected = np.sqrt(np.sum(np.asarray(inner) ** 2) / 100)
        np.testing.assert_allclose(metrics.calibration_rmse(y, distribution), expected, rtol=tolerance)


def test_max_calibration_error_looks_at_both_sides_of_a_jump():
    # All PIT values are .5: C jumps there from 0 to 1, so each side is off by one half.
    np.testing.assert_allclose(metrics.max_calibration_error(np.zeros(4), Normal(np.zeros(4), 1.0)), 50.0)
    # All are 1: C is 0 up to the end.
    np.testing.assert_allclose(metrics.max_calibration_error(np.ones(4), Point(np.zeros(4))), 100.0)


def test_a_point_has_neither_density_nor_width():
    y, distribution = np.arange(N), Point(np.arange(N) + 0.5)
    scores = metrics.evaluate(y, distribution)
    assert scores["coverage_90"] == 0
    assert scores["width_90"] == scores["sharpness"] == scores["mean_std"] == 0
    assert scores["nlpd"] == np.inf
    np.testing.assert_allclose(scores["crps"], scores["mae"])


# Why NLPD is infinite


def line_of_nlpd(scores):
    (line,) = [line for line in str(scores).splitlines() if line.split()[0] == "nlpd"]
    return " ".join(line.split())


def test_an_infinite_nlpd_says_why():
    y = np.array([0.0, 0.1, 9.0, 0.2, -9.0])
    ending = Quantiles(np.array([0.05, 0.5, 0.95]), np.tile([-1.0, 0.0, 1.0], (5, 1)))
    points = Mixture(eqx.filter_vmap(Point)(np.stack([y, y + 1])))
    with_a_point = Normal(0 * y, np.array([1.0, 1, 1, 0, 1]))
    found = {
        "inf: Point has no density": Point(y),
        "inf: Empirical has no density": Empirical(y, 1.0, np.array([-1.0, 1.0])),
        "inf: Mixture has no density": points,
        "inf: 2 of 5 targets lie at or beyond the outermost quantiles, the first at index 2": ending,
        "inf: 1 of 5 targets lie where there is no density, the first at index 3": with_a_point,
    }
    for reason, distribution in found.items():
        scores = metrics.evaluate(y, distribution)
        assert line_of_nlpd(scores) == f"nlpd {reason}"
        assert repr(scores) == str(scores)
        assert scores["nlpd"] == np.inf
    weighted = metrics.evaluate(y, ending, weights=np.array([1.0, 1, 0, 1, 1]))
    beyond = "targets lie at or beyond the outermost quantiles, the first at index"
    assert line_of_nlpd(weighted) == f"nlpd inf: 1 of 4 {beyond} 4"
    assert line_of_nlpd(metrics.evaluate(y, Normal(y, 1.0))) == "nlpd 0.9189"
    groups = metrics.evaluate(y, ending, by=["a", "b", "a", "b", "b"])
    assert line_of_nlpd(groups["a"]) == f"nlpd inf: 1 of 2 {beyond} 2"
    assert str(groups).splitlines()[:2] == ["a:", "  rows                   2"]


def test_scores_are_a_dict_for_transformations_too():
    y, distribution = np.array([0.0, 9.0]), Point(np.zeros(2))
    scores = metrics.evaluate(y, distribution)
    assert isinstance(scores, dict)
    assert list(jax.tree.map(float, scores)) == list(scores)
    jitted = jax.jit(lambda y: metrics.evaluate(y, distribution))(y)
    # What is known on the host alone says why; the numbers are the same.
    assert line_of_nlpd(jitted) == "nlpd inf"
    assert jax.tree.structure(jitted) == jax.tree.structure(scores)
    both = jax.tree.map(lambda *values: jnp.stack(values), scores, jitted)
    assert both["nlpd"].tolist() == [np.inf, np.inf]
    loaded = pickle.loads(pickle.dumps(scores))
    assert str(loaded) == str(scores)


def test_an_interval_beyond_the_quantiles_comes_with_one_warning():
    """Metrics that take the levels as they are, the 99 of a reliability curve, come without."""
    distribution = Quantiles(np.array([0.1, 0.5, 0.9]), np.tile([-1.0, 0.0, 1.0], (N, 1)))
    y = np.linspace(-2, 2, N)
    for metric in (metrics.evaluate, metrics.coverage, metrics.mean_width, metrics.interval_score):
        for _ in range(2):  # compiled already the second time
            with pytest.warns(UserWarning, match="at 0.05 and 0.95 the outermost of them is taken") as caught:
                metric(y, distribution)
            assert len(caught) == 1
    for metric in (metrics.ece, metrics.tce, metrics.calibration_rmse, metrics.calibration_sse, metrics.crps):
        metric(y, distribution)
    metrics.observed_fractions(y, distribution, PERCENTS)
    metrics.pinball(y, distribution, PERCENTS)


# A perfectly calibrated forecast has known floors


def test_floors_of_a_calibrated_forecast(rng):
    runs, n = 200, 500
    mean, std = rng.normal(size=(runs, n)), rng.uniform(0.5, 2, size=(runs, n))
    y = mean + std * rng.normal(size=(runs, n))
    scores = jax.vmap(lambda y, mean, std: metrics.evaluate(y, Normal(mean, std)))(y, mean, std)
    average = {name: float(jnp.mean(values)) for name, values in scores.items()}
    # E|share - p| = sqrt(2/pi) sqrt(p(1-p)/n), averaged over p; pi/8 is the integral of the root.
    np.testing.assert_allclose(average["ece"], 100 * np.sqrt(2 / np.pi) * np.pi / 8 / np.sqrt(n), rtol=0.1)
    # The sum of p(1-p)/n over 21 levels.
    np.testing.assert_allclose(average["calibration_sse"], 3.325 / n, rtol=0.15)
    # Kolmogorov's distribution has mean sqrt(pi/2) log 2 = .8687; ACCRUE's median is .83.
    np.testing.assert_allclose(average["max_calibration_error"], 86.87 / np.sqrt(n), rtol=0.05)
    np.testing.assert_allclose(average["coverage_90"], 0.9, atol=3 * np.sqrt(0.09 / (runs * n)))
    np.testing.assert_allclose(average["nlpd"], 0.5 * np.log(2 * np.pi * np.e) + np.mean(np.log(std)), atol=0.01)
    assert average["calibration_rmse"] < 1 / np.sqrt(6 * n)  # Jensen, for the mean of a root


# Rows that count differently, and groups of rows


def rows_of(distribution, rows):
    """Some rows of a normal forecast."""
    return Normal(np.asarray(distribution.mean)[rows], np.asarray(distribution.std)[rows])


def test_whole_weights_are_repeated_rows(forecast, tolerance, rng):
    y, mean, std = forecast
    weights = rng.permutation(np.arange(N) % 3)
    repeated, distribution = np.repeat(np.arange(N), weights), Normal(mean, std)
    expected = metrics.evaluate(y[repeated], rows_of(distribution, repeated))
    found = metrics.evaluate(y, distribution, weights=weights)
    for name in found.keys() - {"ence"}:  # its bins do not divide the weight of a row
        np.testing.assert_allclose(found[name], expected[name], rtol=10 * tolerance, err_msg=name)
    parameters = {
        metrics.pinball: {"levels": np.array([0.1, 0.7])},
        metrics.observed_fractions: {"levels": np.array([0.1, 0.7]), "closed": True},
        metrics.coverage: {"confidence_level": 0.6},
    }
    for metric, options in parameters.items():
        np.testing.assert_allclose(
            metric(y, distribution, **options, weights=weights),
            metric(y[repeated], rows_of(distribution, repeated), **options),
            rtol=10 * tolerance,
        )
    before = Point(mean + 1)
    np.testing.assert_allclose(
        metrics.improvement_ratio(y, before, distribution, weights=weights),
        metrics.improvement_ratio(y[repeated], Point(mean[repeated] + 1), rows_of(distribution, repeated)),
        rtol=tolerance,
    )


def test_equal_weights_change_nothing(forecast, tolerance):
    y, mean, std = forecast
    plain = metrics.evaluate(y, Normal(mean, std))
    for name, value in metrics.evaluate(y, Normal(mean, std), weights=np.full(N, 0.3)).items():
        np.testing.assert_allclose(value, plain[name], rtol=10 * tolerance, err_msg=name)


def test_a_row_of_weight_zero_does_not_count(forecast):
    y, mean, std = forecast
    weights, far = (np.arange(N) > 0).astype(float), np.where(np.arange(N) > 0, y, 1e30)
    assert np.isinf(metrics.nlpd(far, Normal(mean, std))) or metrics.nlpd(far, Normal(mean, std)) > 1e20
    for metric in (metrics.nlpd, metrics.crps, metrics.interval_score):
        expected = metric(np.where(np.arange(N) > 0, y, 0), Normal(mean, std), weights=weights)
        np.testing.assert_allclose(metric(far, Normal(mean, std), weights=weights), expected, rtol=1e-6)


def test_metrics_of_groups_are_those_of_their_rows(forecast, tolerance):
    y, mean, std = (part[:36] for part in forecast)
    labels = np.array(["odd", "even"])[(np.arange(36) % 2 == 0).astype(int)]
    distribution = Normal(mean, std)
    found = metrics.evaluate(y, distribution, by=labels)
    weighted = metrics.evaluate(y, distribution, by=labels.tolist(), weights=np.full(36, 0.7))
    assert found.keys() == weighted.keys() == {"odd", "even"}
    for label, scores in found.items():
        rows = np.flatnonzero(labels == label)
        assert scores.pop("rows") == weighted[label].pop("rows") == len(rows)
        expected = metrics.evaluate(y[rows], rows_of(distribution, rows))
        assert list(scores) == list(expected)
        for name, value in scores.items():
            np.testing.assert_allclose(value, expected[name], rtol=20 * tolerance, err_msg=name)
            np.testing.assert_allclose(weighted[label][name], value, rtol=20 * tolerance, err_msg=name)
    coverages = [scores["coverage_90"] for scores in found.values()]
    np.testing.assert_allclose(metrics.worst_group_coverage(y, distribution, labels), min(coverages), rtol=tolerance)


def test_wrong_weights_and_labels_are_quoted(forecast):
    y, mean, std = forecast
    score = lambda **options: metrics.evaluate(y, Normal(mean, std), **options)
    with pytest.raises(ValueError, match="weights must not be negative"):
        score(weights=np.arange(N) - 1.0)
    with pytest.raises(ValueError, match="weights are all 0"):
        score(weights=np.zeros(N))
    with pytest.raises(ValueError, match="weights has 3 rows where 37"):
        metrics.rmse(y, Normal(mean, std), weights=np.ones(3))
    with pytest.raises(ValueError, match=r"by must have shape \(37,\), a label for each row; got \(2,\)"):
        score(by=["a", "b"])
    with pytest.raises(ValueError, match="weights of group 1 are all 0"):
        score(by=np.arange(N) % 2, weights=1.0 - np.arange(N) % 2)
    with pytest.raises(TypeError, match="by is traced"):
        jax.jit(lambda by: score(by=by))(np.arange(N))


def test_the_worst_slab_is_found_and_measured_on_other_rows():
    """Noise that grows along a direction; an interval of one width covers 90 % on average, and less at its end."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 3))
    scale = np.exp(x @ [0.6, -0.6, 0.0])
    y = scale * rng.normal(size=2000)
    even, narrow = Normal(np.zeros(2000), scale), Normal(np.zeros(2000), np.quantile(np.abs(y), 0.9) / 1.6449)
    options = {"num_directions": 20, "key": jax.random.key(1)}
    np.testing.assert_allclose(metrics.worst_slab_coverage(x, y, even, **options), 0.9, atol=0.06)
    assert metrics.coverage(y, narrow) > 0.89
    assert metrics.worst_slab_coverage(x, y, narrow, **options) < 0.72
    with pytest.raises(ValueError, match="at least 10 are needed"):
        metrics.worst_slab_coverage(x[:8], y[:8], Normal(y[:8], 1.0), **options)


# Transformations and dtypes


def test_evaluate_holds_what_each_metric_says_and_jits(forecast, tolerance):
    y, mean, std = forecast
    distribution = Normal(mean, std)
    scores = metrics.evaluate(y, distribution)
    jitted = eqx.filter_jit(metrics.evaluate)(jnp.asarray(y), distribution)
    assert scores.keys() == jitted.keys()
    for name, value in scores.items():
        assert value.shape == ()
        np.testing.assert_allclose(jitted[name], value, rtol=tolerance, err_msg=name)
    for name in ("rmse", "nlpd", "crps", "ece", "tce", "calibration_rmse", "max_calibration_error", "ence"):
        np.testing.assert_allclose(scores[name], getattr(metrics, name)(y, distribution), rtol=tolerance, err_msg=name)
    np.testing.assert_allclose(scores["width_90"], metrics.mean_width(y, distribution), rtol=tolerance)


@pytest.mark.parametrize(
    "name",
    [
        "normal",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("student", "mixture", "quantiles")),
        "empirical",
        "point",
    ],
)
def test_evaluate_takes_every_distribution_without_nan(rng, name):
    distribution = distributions(rng)[name]
    y = np.asarray(distribution.mean) + rng.normal(size=N)
    for metric, value in metrics.evaluate(y, distribution).items():
        assert not np.isnan(value), metric


@pytest.mark.parametrize(
    "name",
    ["normal", "student", pytest.param("mixture", marks=pytest.mark.slow), "empirical", "quantiles", "point"],
)
def test_the_unit_of_y_does_not_matter(rng, name, tolerance):
    """Also where squares leave the range of the numbers: a silent RMSE of 0 or infinity would be the worst."""
    distribution = distributions(rng)[name]
    y = np.asarray(distribution.mean) + rng.normal(size=N)
    for factor in (1e-160, 1e160) if jax.config.read("jax_enable_x64") else (1e-25, 1e25):
        moved = metrics.evaluate(factor * y, scaled(distribution, factor))
        for metric, value in metrics.evaluate(y, distribution).items():
            if metric == "ence" and name == "quantiles":
                continue  # rounding sorts rows of equal std into bins
            if metric in IN_THE_UNIT_OF_Y:
                value = value * factor
            elif metric == "nlpd":
                value = value + np.log(factor)
            np.testing.assert_allclose(moved[metric], value, rtol=20 * tolerance, err_msg=metric)


def test_float32_stays_float32(rng):
    y, mean, std = (rng.uniform(1, 2, size=N).astype(np.float32) for _ in range(3))
    for name, value in metrics.evaluate(y, Normal(mean, std)).items():
        assert value.dtype == jnp.float32, name
    assert metrics.pinball(y, Normal(mean, std), 0.5).dtype == jnp.float32


def test_gradients_are_finite_where_the_forecast_is_exact():
    y = jnp.arange(3.0)
    for metric in (metrics.rmse, metrics.ence):
        gradient = jax.grad(lambda mean, metric=metric: metric(y, Normal(mean, jnp.ones(3))))(y)
        assert jnp.isfinite(gradient).all(), metric.__name__


def test_a_missing_prediction_is_not_scored_as_perfect():
    distribution = eqx.tree_at(
        lambda distribution: distribution.mean, Normal(np.zeros(N), 1.0), jnp.zeros(N).at[3].set(jnp.nan)
    )
    scores = metrics.evaluate(np.zeros(N), distribution)
    assert np.isnan(scores["rmse"])
    assert np.isnan(scores["ence"])


@pytest.mark.slow
def test_memory_of_many_levels_stays_linear_in_the_rows():
    n = 1_000_000
    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    scores = jax.jit(lambda y, mean, std: metrics.evaluate(y, Normal(mean, std)))
    memory = scores.lower(row, row, row).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 50 * n * 4  # 99 levels at once would be 99 rows' worth


# Bad input


@pytest.mark.parametrize("metric", [metrics.rmse, metrics.ece, metrics.coverage, metrics.evaluate, metrics.pit])
def test_targets_must_match_the_predictions(metric):
    distribution = Normal(np.zeros(3), 1.0)
    with pytest.raises(ValueError, match=r"y has 2 rows where 3"):
        metric(np.zeros(2), distribution)
    with pytest.raises(ValueError, match=r"got \(3, 1\): did you mean y\[:, 0\]"):
        metric(np.zeros((3, 1)), distribution)
    with pytest.raises(ValueError, match="1 values that are NaN or infinite, the first at index 2"):
        metric(np.array([0.0, 1.0, np.nan]), distribution)


def test_bad_levels_and_counts_are_quoted():
    y, distribution = np.zeros(3), Normal(np.zeros(3), 1.0)
    for metric in (metrics.coverage, metrics.mean_width, metrics.interval_score):
        with pytest.raises(ValueError, match=r"got 90: did you mean 0\.9\?"):
            metric(y, distribution, confidence_level=90)
    with pytest.raises(ValueError, match="levels must lie between 0 and 1; got 5"):
        metrics.pinball(y, distribution, np.array([0.1, 5.0]))
    with pytest.raises(ValueError, match="levels must lie between 0 and 1"):
        metrics.observed_fractions(y, distribution, np.array([-0.1]))
    with pytest.raises(ValueError, match="num_levels must be at least 2; got 1"):
        metrics.calibration_sse(y, distribution, num_levels=1)
    with pytest.raises(ValueError, match="num_bins must be at least 1; got 0"):
        metrics.ence(y, distribution, num_bins=0)


def test_a_negative_std_is_refused():
    distribution = eqx.tree_at(
        lambda distribution: distribution.std, Normal(np.zeros(3), np.ones(3)), jnp.array([1.0, -2.0, 1.0])
    )
    with pytest.raises(ValueError, match=r"negative in 1 rows, the first at index 1 \(-2\)"):
        metrics.evaluate(np.zeros(3), distribution)


def test_a_stack_of_runs_needs_vmap():
    with pytest.raises(ValueError, match=r"got \(2, 3\): use vmap"):
        metrics.rmse(np.zeros(3), stacked_normals(np.zeros((2, 3)), np.ones((2, 3))))
