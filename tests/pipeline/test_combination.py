"""Several predictors as one: their weights, the scale of the errors, densities, and the coverage that is measured."""

import sys

import jax
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

import jaxcal as jc
from jaxcal.pipeline.combination import combine, weights_of
from jaxcal.pipeline.errors import quantiles_of, resolution_of

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)


def folds_of(number, rng, folds=5):
    return np.array_split(rng.permutation(number), folds)


def combined(rng, *, number=400, noise=lambda x: 0.3, shift=0.0):
    """Two predictors of rows out of fold, each with errors of its own; the rows, and what combines them."""
    x = rng.uniform(-1, 1, number)
    y = x + noise(x) * rng.normal(size=number)
    means = [x + 0.2 * rng.normal(size=number), x + 0.4 * rng.normal(size=number) + shift]
    return x, y, means, combine(x[:, None], [jc.Point(mean) for mean in means], y, folds_of(number, rng))


def test_weights_are_the_least_absolute_errors_on_the_simplex(rng):
    """As scipy's linear programs find them, but for a little shrinkage."""
    y = rng.standard_t(3, size=200)
    errors = y - np.stack([y + scale * rng.normal(size=200) for scale in (0.5, 1.0, 1.5)])
    k, n = errors.shape
    # In w, and in what each weighted error is above and below 0.
    cost = np.concatenate([np.zeros(k), np.full(2 * n, 1 / n)])
    equal = np.block([[errors.T, -np.eye(n), np.eye(n)], [np.ones((1, k)), np.zeros((1, 2 * n))]])
    best = scipy.optimize.linprog(cost, A_eq=equal, b_eq=np.append(np.zeros(n), 1))
    weights = weights_of(errors)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= 0).all()
    assert np.mean(abs(weights @ errors)) < 1.01 * best.fun
    # One that is worse in every row has no weight, and equal ones share theirs.
    assert weights_of(np.stack([errors[0], 3 * errors[0]]))[1] == 0
    np.testing.assert_allclose(weights_of(np.stack([errors[0]] * 2)), 0.5)


def test_a_combination_is_better_than_its_parts_and_tells_what_each_adds(rng):
    _, y, means, found = combined(rng)
    error = np.mean(abs(y - found.combiner.weights @ np.stack(means)))
    assert error < min(np.mean(abs(y - mean)) for mean in means)
    assert found.kept == [0, 1]
    assert found.gains[0] > found.gains[1] > 0


def test_a_bad_predictor_has_no_say_in_the_weights_of_the_others(rng):
    x = rng.normal(size=150)
    y = x + 0.3 * rng.normal(size=150)
    good = [x + 0.05 * rng.normal(size=150), 0.7 * x, np.zeros(150)]
    folds = folds_of(150, rng)
    of_good = combine(x[:, None], [jc.Point(mean) for mean in good], y, folds)
    for bad in (np.full(150, 300.0), np.where(np.arange(150) == 3, 1e5, x)):
        found = combine(x[:, None], [*(jc.Point(mean) for mean in good), jc.Point(bad)], y, folds)
        assert found.kept == of_good.kept
        np.testing.assert_allclose(found.combiner.weights, of_good.combiner.weights, atol=0.02)


def test_outliers_move_no_other_row(rng):
    """Also where they are so far off that their levels are 0 or 1."""
    x = rng.normal(size=(150, 2))
    y = x[:, 0] + 0.3 * rng.normal(size=150)
    line = lambda slope: lambda x, y: lambda x: slope * x[:, 0]
    pairs = [(line(1.05), ()), (line(0.9), ())]
    new = rng.normal(size=(200, 2))
    for method in ("folds", "split"):
        plain = jc.pipeline.fit(x, y, predictor=pairs, method=method, key=KEY)(new)
        for outlier in (30.0, -1e5):
            wild = jc.pipeline.fit(
                x, np.where(np.arange(150) == 5, outlier, y), predictor=pairs, method=method, key=KEY
            )
            forecast = wild(new)
            assert abs(forecast.icdf(0.5) - plain.icdf(0.5)).max() < 0.2
            lower, upper = forecast.interval(0.8)
            assert np.median(upper - lower) < 2 * np.median(plain.interval(0.8)[1] - plain.interval(0.8)[0])


def test_a_predictor_without_weight_is_not_kept(rng):
    x, _, means, found = combined(rng, shift=20.0)
    assert found.kept == [0]
    assert found.gains == (np.inf,)
    forecast = found.combiner(x[:, None], [jc.Point(means[0])])
    assert len(forecast) == 400


def test_the_scale_follows_the_errors_where_that_helps(rng):
    _, _, _, plain = combined(rng, number=1500)
    x, _, means, found = combined(rng, number=1500, noise=lambda x: np.where(x > 0, 0.6, 0.05))
    assert found.combiner.errors.scale.power > 0
    forecast = found.combiner(x[:, None], [jc.Point(mean) for mean in means])
    assert np.median(forecast.std[x > 0.3]) > 1.5 * np.median(forecast.std[x < -0.3])
    spread = lambda each: np.ptp(np.log(np.asarray(each.out_of_fold.std)))
    assert spread(found) > spread(plain)


def test_without_scikit_learn_the_scale_is_constant(rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    x, _, means, found = combined(rng)
    assert found.combiner.errors.scale.power == 0
    np.testing.assert_allclose(found.combiner(x[:, None], [jc.Point(mean) for mean in means]).std.std(), 0, atol=1e-6)


@pytest.mark.parametrize("number", [50, 200, 1000])
def test_what_is_measured_out_of_fold_is_what_new_rows_have(number):
    """On pure noise and on heteroscedastic rows, in the mean over draws."""
    differences = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        noise = (lambda x: 1.0) if seed % 2 else (lambda x: 0.2 + abs(x))
        _, y, _, found = combined(rng, number=number, noise=noise)
        lower, upper = found.out_of_fold.interval(0.9)
        measured = np.mean((lower <= y) & (y <= upper))
        again = np.random.default_rng(seed + 1000)
        x, target, of_new, _ = combined(again, number=1000, noise=noise)
        lower, upper = found.combiner(x[:, None], [jc.Point(of_new[k]) for k in found.kept]).interval(0.9)
        differences.append(measured - np.mean((lower <= target) & (target <= upper)))
    error = np.std(differences, ddof=1) / np.sqrt(len(differences))
    assert abs(np.mean(differences)) < 0.01 + 2 * error


def test_densities_are_finite_and_never_sharper_than_targets_are_recorded(rng):
    x = rng.uniform(-1, 1, 300)
    y = np.round(2 * x + 0.5 * rng.normal(size=300))  # whole numbers
    assert resolution_of(y) == 1
    assert resolution_of(x) == pytest.approx(1e-6 * x.std())
    found = combine(x[:, None], [jc.Point(2 * x)], y, folds_of(300, rng))
    forecast = found.combiner(x[:, None], [jc.Point(2 * x)])
    for target in (y, y + 100.0, y - 1000.0):
        log_density = np.asarray(forecast.log_prob(target))
        assert np.isfinite(log_density).all()
        assert (log_density < 1e-6).all()
    # A constant that is predicted exactly has a density as well.
    exact = combine(x[:, None], [jc.Point(2 * x)], 2 * x, folds_of(300, rng))
    assert np.isfinite(exact.combiner(x[:, None], [jc.Point(2 * x)]).log_prob(2 * x)).all()


def test_no_row_is_far_worse_than_under_one_normal_for_all(rng):
    x = rng.uniform(-1, 1, 500)
    y = x + 0.01 * rng.standard_t(2, size=500)
    found = combine(x[:, None], [jc.Point(x)], y, folds_of(500, rng))
    new = rng.uniform(-1, 1, 2000)
    target = new + 0.01 * rng.standard_t(1.5, size=2000)
    log_density = np.asarray(found.combiner(new[:, None], [jc.Point(new)]).log_prob(target))
    under_one = np.asarray(jc.Normal(np.full(2000, y.mean()), y.std()).log_prob(target))
    assert (under_one - log_density).max() < 20


def test_quantiles_of_errors_are_in_the_scores_of_student_t(rng):
    z = scipy.stats.t.ppf((np.arange(1, 2000)) / 2000, 4)
    np.testing.assert_allclose(quantiles_of(z, 4.0)[[0, 7, -1]], scipy.stats.t.ppf([0.01, 0.5, 0.99], 4), atol=1e-3)
    few = quantiles_of(rng.normal(size=12), 4.0)
    assert (np.diff(few) > 0).all()


def test_a_pipeline_of_several_repeats_saves_and_prints(rng, tmp_path):
    x = rng.uniform(-2, 2, size=(150, 1))
    y = np.sin(2 * x[:, 0]) + (0.05 + 0.2 * abs(x[:, 0])) * rng.normal(size=150)
    models = jc.pipeline.candidates(["gaussian_process", "boosted_trees"])
    fitted = jc.pipeline.fit(x, y, predictor=models, method=jc.pipeline.Folds(folds=4), key=KEY)
    assert [step.name for step in fitted.steps] == ["combined"]
    lines = str(fitted).splitlines()
    weights = [line.split() for line in lines[lines.index("each by itself:") - 1 - len(fitted.chain.names) :]]
    assert sum(float(words[1]) for words in weights[: len(fitted.chain.names)]) == pytest.approx(1, abs=0.02)
    forecast = fitted(x)
    assert np.isfinite(forecast.log_prob(y)).all()
    again = jc.pipeline.fit(x, y, predictor=fitted.recipe, method=jc.pipeline.Folds(folds=4), key=KEY)
    np.testing.assert_array_equal(again(x).mean, forecast.mean)
    jc.save(tmp_path / "model", fitted)
    back = jc.load(tmp_path / "model")
    np.testing.assert_allclose(back(x).icdf(0.9), forecast.icdf(0.9), rtol=1e-5, atol=1e-6)


def test_many_rows_are_set_aside_and_each_predictor_is_fitted_twice(rng):
    fits = []

    def line(slope):
        def fit(x, y):
            fits.append(len(y))
            return lambda x: slope * x[:, 0]

        return fit

    x = rng.uniform(-2, 2, size=(10_000, 1))
    y = x[:, 0] + 0.1 * rng.normal(size=len(x))
    fitted = jc.pipeline.fit(x, y, predictor=[(line(1.1), ()), (line(0.9), ())], key=KEY)
    assert sorted(fits) == [6000, 6000, 8000, 8000]
    assert fitted.method == "split"
    assert fitted.guarantee(0.9).num_calibration == 2000
    assert fitted.guarantee(0.9).coverage == pytest.approx(0.9, abs=0.001)


def test_with_rows_set_aside_the_guarantee_is_that_of_the_last_step(rng):
    x = rng.uniform(-2, 2, size=(160, 1))
    y = x[:, 0] + 0.1 * rng.normal(size=160)
    line = lambda slope: lambda x, y: lambda x: slope * x[:, 0]
    pairs = [(line(1.1), ()), (line(0.9), ())]
    fitted = jc.pipeline.fit(x, y, predictor=pairs, method="split", key=KEY)
    assert [step.name for step in fitted.steps] == ["combined", "recalibrated_levels"]
    assert fitted.guarantee(0.9).num_calibration == 40
    np.testing.assert_allclose(np.sum(fitted.chain.combiner.weights * [1.1, 0.9]), 1, atol=0.03)
