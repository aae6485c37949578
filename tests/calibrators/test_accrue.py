"""ACCRUE: the std that it finds, the loss that it minimizes, and the baseline of clusters."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from differences import check_gradients

import jaxcal as jc
from jaxcal.functional import normal, scores
from jaxcal.functional.scores import accrue_loss
from jaxcal.networks import FeedForward
from jaxcal.optimize import Result

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
KEY = jax.random.key(0)
DATA = jc.datasets.heteroscedastic("g", 400, seed=0)
BASE = jc.Point(DATA.mean)
GRID = np.linspace(0, 1, 21)


@pytest.fixture(scope="module", params=["network", "polynomial"])
def fitted(request):
    return jc.accrue.fit(DATA.x, BASE, DATA.y, key=KEY, model=request.param)


def test_it_recovers_a_std_that_varies(fitted):
    np.testing.assert_allclose(fitted.std(GRID), (GRID + 1) / 2, atol=0.2)
    constant = np.abs(0.75 - (GRID + 1) / 2).mean()
    assert np.abs(fitted.std(GRID) - (GRID + 1) / 2).mean() < constant / 2


def test_the_distribution_is_normal_around_the_base(fitted):
    distribution = fitted(DATA.x[:5], jc.Normal(DATA.mean[:5], 7.0))
    assert isinstance(distribution, jc.Normal)
    np.testing.assert_array_equal(distribution.mean, jnp.asarray(DATA.mean[:5]))
    np.testing.assert_array_equal(distribution.std, fitted.std(DATA.x[:5, 0]))


def test_the_polynomial_minimizes_the_loss_of_all_rows():
    fitted = jc.accrue.fit(DATA.x, BASE, DATA.y, key=KEY, model="polynomial")
    scale = DATA.y.std(ddof=1)
    errors, std = (DATA.y - DATA.mean) / scale, fitted.std(DATA.x) / scale
    np.testing.assert_allclose(fitted.beta, scores.accrue_beta(errors), rtol=1e-5)
    np.testing.assert_allclose(fitted.loss, scores.accrue_loss(errors, std, fitted.beta), rtol=1e-5)
    for factor in (0.97, 1.03):
        assert scores.accrue_loss(errors, factor * std, fitted.beta) > fitted.loss
    # Positive far beyond the data, too.
    assert (fitted.std(np.linspace(-5, 5, 41)) > 0).all()


def test_beta_one_is_the_crps_alone():
    fitted = jc.accrue.fit(DATA.x, BASE, DATA.y, key=KEY, model="polynomial", loss=partial(accrue_loss, beta=1.0))
    crps = jc.metrics.crps(DATA.y, fitted(DATA.x, BASE)) / DATA.y.std(ddof=1)
    np.testing.assert_allclose(fitted.loss, crps, rtol=1e-5)


@pytest.mark.parametrize("model", [pytest.param("network", marks=pytest.mark.slow), "polynomial"])
@pytest.mark.parametrize("weights", [None, 0.5 + DATA.x[:, 0]], ids=["equal", "weighted"])
def test_a_loss_of_its_own_is_as_good_as_the_built_in_one(model, weights):
    """Equation 11 written anew, with a known weight of the CRPS; the CRPS alone is also one value a row."""

    def written_anew(errors, std, weights=None, beta=0.3):
        crps = jnp.average(normal.crps(errors, 0.0, std), weights=weights)
        return beta * crps + (1 - beta) * scores.reliability_score(errors, std, weights=weights)

    options = {"key": KEY, "model": model, "weights": weights}
    fit = lambda loss: jc.accrue.fit(DATA.x, BASE, DATA.y, loss=loss, **options, **few(model))
    crps = lambda errors, std: normal.crps(errors, 0.0, std)
    for own, beta in ((written_anew, 0.3), (partial(written_anew, beta=0.6), 0.6), (crps, 1.0)):
        fitted, built_in = fit(own), fit(partial(accrue_loss, beta=beta))
        np.testing.assert_allclose(fitted.loss, built_in.loss, rtol=1e-5)
        np.testing.assert_allclose(fitted.std(GRID), built_in.std(GRID), rtol=1e-6 if X64 else 2e-2)
        assert fitted.beta is None
        np.testing.assert_allclose(built_in.beta, beta, rtol=1e-6)


def few(model):
    """Few steps of a network: rounding grows with every step, and sums in another order round differently."""
    return {"restarts": 2, "max_iterations": 5} if model == "network" else {}


def test_another_loss_finds_another_std():
    # The Laplace distribution's negative log likelihood is least at std = mean |error|.
    laplace = lambda errors, std: abs(errors) / std + jnp.log(std)
    fitted = jc.accrue.fit(DATA.x, BASE, DATA.y, key=KEY, model=LogLinear(jnp.zeros(()), jnp.zeros(())), loss=laplace)
    ratio = fitted.std(GRID) / ((GRID + 1) / 2)
    np.testing.assert_allclose(ratio, np.sqrt(2 / np.pi), rtol=0.15)


class LogLinear(eqx.Module):
    """A model of log std that is linear in the input."""

    weight: jax.Array
    intercept: jax.Array

    def __call__(self, x):
        return self.intercept + self.weight * x[0]


@pytest.mark.slow
def test_any_module_of_log_std():
    initial = LogLinear(jnp.zeros(()), jnp.zeros(()))
    fitted = jc.accrue.fit(DATA.x, BASE, DATA.y, key=KEY, model=initial)
    np.testing.assert_allclose(fitted.std(GRID), (GRID + 1) / 2, atol=0.15)
    assert fitted.model.weight > 0


@pytest.mark.slow
def test_the_best_restart_is_kept():
    # The first of the five has the same initial weights as the only one.
    losses = [jc.accrue.fit(DATA.x, BASE, DATA.y, key=KEY, restarts=n).loss for n in (1, 5)]
    assert losses[1] <= losses[0] + 1e-6


def test_mean_and_std_train_jointly():
    mean = FeedForward(1, (20,), "scalar", key=KEY, activation=jnp.tanh)
    initial = jc.accrue.fit(DATA.x, jc.Point(np.zeros(400)), DATA.y, key=KEY, model="polynomial")
    x, y = jnp.asarray(DATA.x, float), jnp.asarray(DATA.y, float)
    params, fixed = eqx.partition((mean, initial.model), eqx.is_inexact_array)

    def parts(params):
        mean, model = eqx.combine(params, fixed)
        return jax.vmap(mean)(x), eqx.tree_at(lambda fitted: fitted.model, initial, model).std(x)

    def loss(params):
        mean, std = parts(params)
        return scores.accrue_loss(y - mean, std, initial.beta)

    optimizer = optax.adam(0.02)

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    (trained, _), _ = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), length=1500))(params)
    assert loss(trained) < 0.8 * loss(params)
    mean, std = parts(trained)
    assert np.abs(mean - DATA.mean).mean() < 0.3
    assert np.abs(std - DATA.std).mean() < 0.2


def test_a_std_that_is_right_but_for_its_scale_is_only_scaled():
    # A std that jumps up and down, which no polynomial follows.
    rng = np.random.default_rng(4)
    std = np.where(np.arange(300) % 7 < 3, 0.2, 2.0)
    x, y = rng.uniform(size=300), std * rng.standard_t(3, size=300) / np.sqrt(3)
    base, new = jc.Normal(np.zeros(300), std / 3), jc.Normal(np.zeros(2), np.array([0.1, 1.0]))
    fit = lambda relative: jc.accrue.fit(x, base, y, key=KEY, model="polynomial", relative=relative)
    fitted = fit(True)
    factors = np.asarray(fitted.std(np.array([0.2, 0.8])))
    assert (abs(factors / 3 - 0.8) < 0.3).all()  # of t3 errors the CRPS wants three quarters of the std
    np.testing.assert_allclose(fitted(np.array([0.2, 0.8]), new).std, factors * new.std, rtol=1e-6)
    own, plain = (jc.metrics.nlpd(y, module(x, base)) for module in (fitted, fit(False)))
    assert own < plain - 0.3
    with pytest.raises(ValueError, match="base is a Point, but errors are measured in predicted stds"):
        fitted(x, jc.Point(np.zeros(300)))
    with pytest.raises(ValueError, match="base is a Point, but errors are measured in predicted stds"):
        jc.accrue.fit(x, jc.Point(np.zeros(300)), y, key=KEY, relative=True)


def test_a_factor_on_a_constant_std_is_the_std():
    base = jc.Normal(DATA.mean, 5.0)
    fits = [jc.accrue.fit(DATA.x, base, DATA.y, key=KEY, model="polynomial", relative=value) for value in (True, False)]
    stds = [fitted(DATA.x, base).std for fitted in fits]
    np.testing.assert_allclose(*stds, rtol=1e-4 if X64 else 5e-2)


def test_inputs_of_any_unit_give_the_same_std():
    plain, moved = (
        jc.accrue.fit(a * DATA.x + b, BASE, DATA.y, key=KEY, restarts=2) for a, b in ((1.0, 0.0), (1e4, 3e4))
    )
    np.testing.assert_allclose(moved.std(1e4 * GRID + 3e4), plain.std(GRID), rtol=1e-3 if X64 else 0.1)


def test_one_outlier_does_not_spoil_the_std():
    y = DATA.y.copy()
    y[17] += 1e6
    for model in ("network", "polynomial"):
        std = jc.accrue.fit(DATA.x, BASE, y, key=KEY, model=model).std(DATA.x)
        assert np.isfinite(std).all()
        assert (std > 0).all()


@pytest.mark.slow
def test_a_validation_set_is_used_and_errors_of_training_rows_give_a_warning():
    given = [a[:200] for a in (DATA.x, DATA.mean, DATA.y)], [a[200:] for a in (DATA.x, DATA.mean, DATA.y)]
    (x, mean, y), (x_new, mean_new, y_new) = given
    validation = x_new, jc.Point(mean_new), y_new
    fitted = jc.accrue.fit(x, jc.Point(mean), y, key=KEY, validation=validation)
    np.testing.assert_allclose(fitted.std(GRID), (GRID + 1) / 2, atol=0.3)
    errors, std = (y_new - mean_new) / DATA.y.std(ddof=1), fitted.std(x_new) / DATA.y.std(ddof=1)
    np.testing.assert_allclose(fitted.loss, scores.accrue_loss(errors, std, fitted.beta), rtol=1e-5)
    remembered = jc.Point(y + 0.2 * (mean - y))
    with pytest.warns(UserWarning, match="the model was trained on these"):
        jc.accrue.fit(x, remembered, y, key=KEY, validation=validation)
    with pytest.warns(UserWarning, match="50 of 50 rows of validation are among the rows"):
        jc.accrue.fit(x, jc.Point(mean), y, key=KEY, validation=(x[:50], jc.Point(mean[:50]), y[:50]))


@pytest.mark.slow
def test_recalibration_composes():
    loss = partial(accrue_loss, beta=1.0)
    distribution = jc.accrue.fit(DATA.x, BASE, DATA.y, key=KEY, model="polynomial", loss=loss)(DATA.x, BASE)
    recalibrated = jc.isotonic.fit(None, distribution, DATA.y)(None, distribution)
    assert jc.metrics.max_calibration_error(DATA.y, recalibrated) < jc.metrics.max_calibration_error(
        DATA.y, distribution
    )


def test_weights_that_are_equal_or_zero_are_none():
    rest = np.arange(400) % 8 != 3
    fit = lambda rows, **options: jc.accrue.fit(
        DATA.x[rows], jc.Point(DATA.mean[rows]), DATA.y[rows], key=KEY, model="polynomial", **options
    )
    for weights in (np.full(400, 0.3), lambda x: np.full(len(x), 3)):
        equal, none = (fit(np.arange(400), weights=w).std(GRID) for w in (weights, None))
        np.testing.assert_array_equal(equal, none)
    np.testing.assert_array_equal(fit(np.arange(400), weights=2.0 * rest).std(GRID), fit(rest).std(GRID))


@pytest.mark.slow
def test_whole_weights_count_as_repeated_rows():
    times = 1 + np.arange(400) % 2 * (DATA.x[:, 0] > 0.5)
    rows = np.repeat(np.arange(400), times)
    options = {"key": KEY, "model": "polynomial", "loss": partial(accrue_loss, beta=0.5)}
    weighted = jc.accrue.fit(DATA.x, BASE, DATA.y, weights=7 * times, **options)
    repeated = jc.accrue.fit(DATA.x[rows], jc.Point(DATA.mean[rows]), DATA.y[rows], **options)
    np.testing.assert_allclose(weighted.std(GRID), repeated.std(GRID), rtol=1e-3 if X64 else 2e-2)
    # The divisor n - 1 of the targets' variance is that of the effective rows.
    np.testing.assert_allclose(weighted.loss, repeated.loss, rtol=3e-3)


@pytest.mark.parametrize("relative", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_of_the_validation_set_is_weighted(relative):
    weights, base = np.exp(2 * DATA.x[:, 0]), jc.Normal(DATA.mean, 0.5 + DATA.x[:, 0] ** 2)
    part = lambda rows: (DATA.x[rows], jc.Normal(base.mean[rows], base.std[rows]), DATA.y[rows])
    first, last = np.arange(200), np.arange(200, 400)
    fitted = jc.accrue.fit(
        *part(first),
        key=KEY,
        restarts=2,
        relative=relative,
        weights=weights[first],
        validation=(*part(last), 5 * weights[last]),
    )
    each = np.concatenate([w / w.mean() for w in (weights[first], weights[last])])
    scale = np.sqrt(np.cov(DATA.y, aweights=each))
    errors, std = (DATA.y - DATA.mean) / scale, fitted(DATA.x, base).std / scale
    beta = scores.accrue_beta(errors[first], weights=weights[first])
    np.testing.assert_allclose(fitted.beta, beta, rtol=1e-5)
    loss = scores.accrue_loss(errors[last], std[last], beta, weights=weights[last])
    np.testing.assert_allclose(fitted.loss, loss, rtol=1e-4)
    with pytest.raises(ValueError, match=r"give both, validation=\(x, base, y, weights\)"):
        jc.accrue.fit(*part(first), key=KEY, weights=weights[first], validation=part(last))


SMALL = DATA.x[:12], DATA.mean[:12], DATA.y[:12]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": SMALL[1]}, "y equals base.mean in every row"),
        ({"y": np.ones(12)}, "y is constant"),
        ({"y": np.append(SMALL[2][:11], np.nan)}, "y holds 1 values that are NaN"),
        ({"x": np.full((12, 1), np.nan)}, "x holds 12 values that are NaN"),
        ({"mean": np.append(SMALL[1][:11], np.inf)}, "mean holds 1 values"),
        ({"x": DATA.x[:11]}, "y has 12 rows where 11 are expected"),
        ({"x": np.ones((12, 2)), "model": "polynomial"}, "x has 2 columns: use model='network'"),
        ({"differentiable": True}, "for model='polynomial': give steps="),
        ({"loss": partial(accrue_loss, smoothing=0.0)}, "smoothing must be positive; got 0.0"),
        ({"model": "forest"}, "model must be one of 'network', 'polynomial'; got 'forest'"),
        ({"loss": partial(accrue_loss, beta=1.5)}, "beta must be one number between 0 and 1; got 1.5"),
        ({"loss": lambda errors, std: std[:-1]}, "loss must return one value a row, .* or one number; got shape"),
        ({"loss": lambda errors, std: std[0], "weights": np.arange(1.0, 13.0)}, "with weights it must take weights="),
        ({"restarts": 0}, "restarts must be at least 1"),
        ({"validation_fraction": 0.99}, "leaves 0 of 12 rows to train on"),
        ({"model": "polynomial", "validation": (SMALL[0], BASE, SMALL[2])}, "takes no validation"),
        ({"model": "polynomial", "steps": 3}, "fitted to its optimum, and takes no steps"),
    ],
)
def test_mistakes_are_named(change, message):
    given = {"x": SMALL[0], "mean": SMALL[1], "y": SMALL[2]} | change
    x, mean, y = (given.pop(name) for name in ("x", "mean", "y"))
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        jc.accrue.fit(x, jc.Point(mean), y, key=KEY, **given)


# A derivative through the fit of the polynomial


def std_of_polynomial(x, mean, y, weights, beta=1, smoothing=None, **options):
    numbers = {name: value for name, value in (("beta", beta), ("smoothing", smoothing)) if value is not None}
    options |= {"model": "polynomial", "loss": partial(accrue_loss, **numbers), "weights": weights}
    fitted = jc.accrue.fit(x, jc.Point(mean), y, key=KEY, **options)
    return fitted.std(np.array([0.1, 0.8])).sum()


FEW = DATA.x[::8, 0], DATA.mean[::8], DATA.y[::8], 1 + DATA.x[::8, 0]


@pytest.mark.skipif(not X64, reason="differences need float64")
@pytest.mark.parametrize(
    "options",
    [{"beta": 1}, pytest.param({"beta": None, "smoothing": 0.1}, marks=pytest.mark.slow)],
    ids=["crps", "smoothed"],
)
def test_the_polynomial_moves_with_its_rows(options):
    check_gradients(partial(std_of_polynomial, differentiable=True, **options), FEW)


@pytest.mark.slow
@pytest.mark.skipif(not X64, reason="differences need float64")
def test_smoothed_the_derivative_holds_over_wide_steps():
    """Steps of a tenth of the errors' size, over which many of them change places."""
    value = partial(std_of_polynomial, differentiable=True, beta=0.5, smoothing=0.3)
    move = 0.1 * np.std(FEW[2] - FEW[1]) * np.cos(np.arange(len(FEW[2])))
    both = jax.jit(jax.value_and_grad(lambda y: value(*FEW[:2], y, FEW[3])))
    change = both(FEW[2] + move)[0] - both(FEW[2] - move)[0]
    np.testing.assert_allclose(2 * both(FEW[2])[1] @ move, change, rtol=0.1)


@pytest.mark.slow
@pytest.mark.skipif(not X64, reason="takes an optimum to the last digits")
def test_where_the_steps_are_cut_short_the_derivative_is_nan():
    def fit(y):
        options = {"key": KEY, "model": "polynomial", "max_iterations": 1, "differentiable": True}
        fitted = jc.accrue.fit(FEW[0], jc.Point(FEW[1]), y, loss=partial(accrue_loss, beta=1), **options)
        return fitted.std(FEW[0]).sum(), fitted.training.result

    (value, result), derivative = jax.jit(jax.value_and_grad(fit, has_aux=True))(FEW[2])
    assert np.isfinite(value)
    assert result == Result.STEP_LIMIT
    assert np.isnan(derivative).all()


@pytest.mark.slow
@pytest.mark.skipif(not X64, reason="takes an optimum to the last digits")
def test_derivatives_of_many_runs():
    derivative = jax.grad(partial(std_of_polynomial, differentiable=True), argnums=2)
    y = np.stack([FEW[2], FEW[2][::-1]])
    runs = jax.jit(jax.vmap(derivative, in_axes=(None, None, 0, None)))(*FEW[:2], y, FEW[3])
    np.testing.assert_allclose(runs, [derivative(*FEW[:2], one, FEW[3]) for one in y], rtol=1e-8, atol=1e-12)


@pytest.mark.any_precision
def test_no_derivative_passes_unless_asked_for():
    for number in range(5):
        with pytest.raises(TypeError, match=r"through accrue\.fit: give differentiable=True"):
            jax.grad(std_of_polynomial, argnums=number)(*FEW, 0.6)
    with pytest.raises(ValueError, match="beta=1 in the loss, or with smoothing"):
        std_of_polynomial(*FEW, beta=None, differentiable=True)


def test_nine_rows_are_too_few():
    with pytest.raises(ValueError, match="at least 10 are needed"):
        jc.accrue.fit(DATA.x[:9], jc.Point(DATA.mean[:9]), DATA.y[:9], key=KEY)


# Clusters


def test_clusters_have_the_error_of_their_rows(rng):
    centers = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    label = rng.integers(3, size=90)
    x, y = centers[label] + rng.normal(size=(90, 2)), (1 + label) * rng.normal(size=90)
    fitted = jc.kmeans.fit(x, jc.Point(np.zeros(90)), y, key=KEY, num_clusters=3)
    expected = [np.sqrt(np.mean(y[label == k] ** 2)) for k in range(3)]
    np.testing.assert_allclose(fitted(centers, jc.Point(np.zeros(3))).std, expected, rtol=1e-5)


def test_fewer_different_rows_than_clusters():
    x, y = np.repeat([1.0, 2.0], 5), np.repeat([1.0, -3.0], 5)
    fitted = jc.kmeans.fit(x, jc.Point(np.zeros(10)), y, key=KEY, num_clusters=4)
    np.testing.assert_allclose(fitted(x, jc.Point(np.zeros(10))).std, np.abs(y), rtol=1e-6)


def test_columns_of_any_unit_make_the_same_clusters():
    # The second column decides the error; in its own unit it is too small to be noticed beside the first.
    rng = np.random.default_rng(0)
    label = np.arange(80) % 2
    x = np.column_stack([rng.normal(size=80), 3.0 * label])
    y = (1 + 4 * label) * rng.normal(size=80)
    fit = lambda x: jc.kmeans.fit(x, jc.Point(np.zeros(80)), y, key=KEY, num_clusters=2)
    for unit in (np.ones(2), np.array([1e4, 1e-3])):
        fitted = fit(unit * x + 5)
        expected = [np.sqrt(np.mean(y[label == k] ** 2)) for k in range(2)]
        np.testing.assert_allclose(
            fitted(unit * np.array([[0.0, 0.0], [0.0, 3.0]]) + 5, jc.Point(np.zeros(2))).std, expected, rtol=1e-5
        )


def test_a_cluster_without_errors_gives_a_warning():
    x, y = np.repeat([1.0, 5.0], 5), np.repeat([0.0, -3.0], 5)
    with pytest.warns(UserWarning, match="y equals base.mean in every row of 1 of 2 clusters: their std is 0"):
        fitted = jc.kmeans.fit(x, jc.Point(np.zeros(10)), y, key=KEY, num_clusters=2)
    np.testing.assert_allclose(fitted(x, jc.Point(np.zeros(10))).std, np.abs(y), rtol=1e-6)


def test_weights_of_clusters():
    # Three clusters that are far from each other, whatever the weights.
    rng = np.random.default_rng(1)
    label = np.arange(60) % 3
    x, y, times = 10.0 * label + rng.normal(size=60), (1 + label) * rng.normal(size=60), rng.integers(0, 4, size=60)
    rows = np.repeat(np.arange(60), times)
    fit = lambda rows, **options: jc.kmeans.fit(
        x[rows], jc.Point(np.zeros(len(rows))), y[rows], key=KEY, num_clusters=3, **options
    )
    predict = lambda fitted: np.asarray(fitted(10.0 * np.arange(3), jc.Point(np.zeros(3))).std)
    weighted = fit(np.arange(60), weights=times)
    expected = [np.sqrt(np.average(y[label == k] ** 2, weights=times[label == k])) for k in range(3)]
    np.testing.assert_allclose(predict(weighted), expected, rtol=1e-5)
    np.testing.assert_allclose(predict(fit(rows)), expected, rtol=1e-5)
    centers = [np.sort(f.x_scaler.inverse(f.centers)[:, 0]) for f in (weighted, fit(rows))]
    np.testing.assert_allclose(*centers, rtol=1e-5, atol=1e-5)
    counted = np.flatnonzero(times)
    same = fit(np.arange(60), weights=0.1 * (times > 0)), fit(counted)
    np.testing.assert_array_equal(*map(predict, same))
    with pytest.raises(ValueError, match="weights must not be negative"):
        fit(np.arange(60), weights=times - 1)


def test_clusters_are_not_traced():
    fit = lambda y: jc.kmeans.fit(DATA.x, BASE, y, key=KEY).cluster_std
    with pytest.raises(TypeError, match="scikit-learn"):
        jax.jit(fit)(DATA.y)
    with pytest.raises(ValueError, match="num_clusters must be at least 1"):
        jc.kmeans.fit(DATA.x, BASE, DATA.y, key=KEY, num_clusters=0)
