"""Derivatives through fits, in every argument, are those of central differences; test_methods.py has more of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import check_gradients
from jax import lax

import jaxcal as jc
from jaxcal import Normal, Point, gaussian_process, rio
from jaxcal.calibrators import conformal, crude, gaussian_mle, isotonic, kmeans
from jaxcal.functional import gp, normal_tail
from jaxcal.functional.linalg import snapped
from jaxcal.functional.quantiles import interpolate_monotone, smoothed_table
from jaxcal.gp import Exact, GaussianNoise, Nearest, Sparse, Stochastic, StudentTNoise
from jaxcal.gp.inference import automatic
from jaxcal.optimize import Result

X64 = jax.config.jax_enable_x64
pytestmark = [
    pytest.mark.any_precision,
    pytest.mark.skipif(not X64, reason="differences need 64 bits"),
]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2))
MEAN, STD = np.sin(X[:, 0]), np.exp(0.2 * X[:, 1])
Y = MEAN + 0.5 * MEAN**2 + 0.3 * X[:, 1] + 0.2 * RNG.normal(size=40)
WEIGHTS = RNG.uniform(0.5, 2, size=40)
SLOPES = jnp.asarray(RNG.normal(size=(5, 5)))


def reading(distribution):
    """Means, stds and three quantiles of five rows, as one number."""
    moments = SLOPES[0] @ distribution.mean + SLOPES[1] @ distribution.std
    return moments + jnp.sum(SLOPES[2:].T * distribution.icdf(jnp.array([0.1, 0.4, 0.9])))


check = partial(check_gradients, atol=1e-6)


@pytest.mark.parametrize(
    "fit",
    [
        crude.fit,
        conformal.fit,
        partial(conformal.fit, rule="linear"),
        partial(conformal.fit, score="quantile", confidence_levels=(0.5, 0.8)),
        isotonic.fit,
    ],
    ids=["crude", "conformal", "linear", "quantile", "isotonic"],
)
def test_tables_in_weights(fit):
    def value(mean, std, y, weights):
        fitted = fit(None, Normal(mean, std), y, weights=weights)
        return reading(fitted(None, Normal(mean[:5], std[:5]), weights=weights[:5]))

    check(value, (MEAN, STD, Y, WEIGHTS))


@pytest.mark.parametrize("shift", ["auto", "scaled"])
def test_gaussian_mle_in_weights(shift):
    def value(mean, std, y, weights):
        fitted = gaussian_mle.fit(None, Normal(mean, std), y, weights=weights, shift=shift)
        return reading(fitted(None, Normal(mean[:5], std[:5])))

    # Equal weights are each the greatest, and rows of weight 0 do not count: both have derivatives all the same.
    for weights in (WEIGHTS, np.ones(40), WEIGHTS * (np.arange(40) % 4 > 0)):
        check(value, (MEAN, STD, Y, weights))


@pytest.mark.parametrize(
    "fit",
    [crude.fit, conformal.fit, partial(conformal.fit, score="quantile"), isotonic.fit],
    ids=["crude", "conformal", "quantile", "isotonic"],
)
def test_smoothed_tables(fit):
    def value(mean, std, y):
        fitted = fit(None, Normal(mean, std), y, smoothing=0.1)
        return reading(fitted(None, Normal(mean[:5], std[:5])))

    check(value, (MEAN, STD, Y))


@pytest.mark.parametrize(
    "fit",
    [pytest.param(isotonic.fit, marks=pytest.mark.slow), partial(crude.fit, score="cdf")],
    ids=["isotonic", "crude"],
)
def test_tables_of_probabilities(fit):
    def value(mean, std, y):
        fitted = fit(None, jc.StudentT(jnp.full(40, 5.0), mean, std), y)
        return reading(fitted(None, jc.StudentT(jnp.full(5, 5.0), mean[:5], std[:5])))

    check(value, (MEAN, STD, Y))


def test_whitened_errors():
    correlation = jnp.array([[1.0, 0.3], [0.3, 1.0]])

    def value(mean, std, y):
        base = jc.MultivariateNormal(mean, std[:, None, None] * correlation[None])
        after = crude.fit(None, base, y)(None, jc.MultivariateNormal(mean[:5], std[:5, None, None] * correlation[None]))
        return jnp.sum(SLOPES[:, :2] * after.mean) + jnp.sum(after.covariance)

    check(value, (X, STD, np.column_stack([Y, MEAN * Y])))


def test_stds_of_clusters_eagerly():
    def value(mean, y, weights):
        fitted = kmeans.fit(X, Point(mean), y, key=jax.random.key(0), weights=weights)
        return SLOPES[0] @ fitted(X[:5], Point(mean[:5])).std

    check(value, (MEAN, Y, WEIGHTS), compiled=False)


def test_ties_and_errors_of_zero_have_finite_derivatives():
    @jax.jit
    def gradients(y):
        fits = crude.fit, conformal.fit, isotonic.fit, gaussian_mle.fit, partial(crude.fit, smoothing=0.1)
        value = lambda y, fit: reading(fit(None, Point(jnp.asarray(MEAN)), y)(None, Point(jnp.asarray(MEAN[:5]))))
        return [jax.grad(partial(value, fit=fit))(y) for fit in fits]

    for error in (np.where(np.arange(40) < 20, 0.0, 1.0), np.zeros(40)):
        for gradient in gradients(jnp.asarray(MEAN + error)):
            assert np.isfinite(gradient).all()


def test_weights_of_zero_have_finite_derivatives():
    fits = crude.fit, conformal.fit, isotonic.fit
    base, new = Normal(MEAN, STD), Normal(MEAN[:5], STD[:5])

    @jax.jit
    def gradients(weights):
        value = lambda weights, fit: reading(fit(None, base, Y, weights=weights)(None, new, weights=weights[:5]))
        return [jax.grad(partial(value, fit=fit))(weights) for fit in fits]

    outermost = np.argsort((Y - MEAN) / STD)[[0, 1, 2, -1]]
    weights = np.where(np.isin(np.arange(40), [*range(5), *outermost]), 0.0, WEIGHTS)
    for gradient in gradients(jnp.asarray(weights)):
        assert np.isfinite(gradient).all()


@pytest.mark.filterwarnings("ignore:8 calibration rows are too few")
def test_an_infinite_quantile_has_derivative_0():
    def quantiles(y):
        base, new, group = Point(MEAN[:8]), Point(MEAN[:1]), np.zeros(1)
        tables = [fit(None, base, y)(None, new) for fit in (crude.fit, conformal.fit)]
        grouped = crude.fit(None, base, y, by=np.zeros(8))(None, new, by=group)
        return jnp.stack([distribution.icdf(0.99)[0] for distribution in (*tables, grouped)])

    value, derivative = jax.jit(lambda y: (quantiles(y), jax.jacrev(quantiles)(y)))(jnp.asarray(Y[:8]))
    assert np.isinf(value).all()
    assert not derivative.any()


def test_crps_of_the_calibration_rows_themselves():
    """Each lies on a value of its own table, the outermost ones where the tails begin."""

    def value(mean, std, y):
        base = Normal(mean, std)
        fits = crude.fit, isotonic.fit, partial(conformal.fit, rule="linear")
        return sum(jnp.mean(fit(None, base, y)(None, base).crps(y)) for fit in fits)

    check(value, (MEAN, STD, Y))


def test_second_derivatives_vmap_and_32_bits():
    def value(y, dtype=jnp.float64):
        mean, std = MEAN.astype(dtype), STD.astype(dtype)
        fitted = conformal.fit(None, Normal(mean, std), y, rule="linear")
        distribution = fitted(None, Normal(mean[:5], std[:5]))
        return jnp.sum(distribution.std * distribution.crps(jnp.ones(5, dtype)))

    gradient, y = jax.jit(jax.grad(value)), jnp.asarray(Y)
    direction = jnp.cos(jnp.arange(40.0))
    curvature = jax.jit(lambda y: jax.jvp(jax.grad(value), (y,), (direction,))[1])(y)
    difference = (gradient(y + 1e-5 * direction) - gradient(y - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose(curvature, difference, rtol=1e-5, atol=1e-7)
    both = jax.jit(jax.vmap(jax.grad(value)))(jnp.stack([y, 2 * y]))
    np.testing.assert_allclose(both, jnp.stack([gradient(y), gradient(2 * y)]), rtol=1e-10, atol=1e-12)
    short = jax.jit(jax.grad(partial(value, dtype=jnp.float32)))(y.astype(jnp.float32))
    assert short.dtype == jnp.float32
    np.testing.assert_allclose(short, gradient(y), rtol=1e-3, atol=1e-5)


def test_second_derivatives_of_what_is_snapped_in_a_loop():
    """A loop would not keep a rule of `jax.custom_jvp` for them."""

    def value(t):
        bounded = lambda s: snapped(jnp.sin(s * t), lax.stop_gradient(jnp.minimum(jnp.sin(s * t), 1))) ** 2
        return jnp.sum(lax.map(jax.jit(bounded), jnp.arange(1.0, 4.0)))

    exact = sum(2 * s**2 * jnp.cos(2 * s * 0.3) for s in range(1, 4))
    np.testing.assert_allclose(jax.grad(jax.grad(value))(0.3), exact, rtol=1e-12)


def test_derivatives_at_the_ends_of_tails_and_at_knots():
    at = jnp.array(0.7)
    hazard = jnp.exp(normal_tail.log_prob(at, at))
    np.testing.assert_allclose(jax.grad(normal_tail.survival)(at, at), -hazard, rtol=1e-12)
    square, step = normal_tail.square_of_survival, 1e-5
    difference = (square(jnp.array(step)) - square(jnp.array(-step))) / (2 * step)
    np.testing.assert_allclose(jax.grad(square)(jnp.array(0.0)), difference, rtol=1e-6)
    curve = partial(interpolate_monotone, xp=jnp.array([0.0, 1.0, 3.0]), fp=jnp.array([0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(jax.vmap(jax.grad(curve))(jnp.array([0.0, 1.0, 3.0])), [1.0, 0.5, 0.0])


def test_under_an_eager_gradient_isotonic_decides_as_it_does_without():
    y = np.append(Y[:-1], 1e200)

    def mean(y):
        fitted = isotonic.fit(None, jc.StudentT(jnp.full(40, 5.0), MEAN, STD), y)
        assert not fitted.uses_cdf
        return fitted(None, Normal(MEAN[:1], STD[:1])).mean[0]

    for run in (mean, jax.grad(mean)):
        with pytest.warns(UserWarning, match="PIT values are 0 or 1"):
            assert np.isfinite(run(jnp.asarray(y))).all()


def test_smoothed_table_is_the_mean_of_windows_that_shrink_towards_the_ends():
    table = np.sort(RNG.normal(size=23))
    reach = [min(4, k, 22 - k) for k in range(23)]
    expected = [table[k - r : k + r + 1].mean() for k, r in enumerate(reach)]
    smoothed = smoothed_table(jnp.asarray(table), 0.2)
    np.testing.assert_allclose(smoothed, expected, rtol=1e-12)
    line = jnp.linspace(-3, 5, 23)
    np.testing.assert_allclose(smoothed_table(line, 0.5), line, rtol=1e-12)
    # In 32 bits, far from 0 and of many ties: still in order, and between the ends.
    many = np.sort(RNG.integers(5, size=2000) + 1000).astype(np.float32)
    smoothed = np.asarray(smoothed_table(many, 0.01))
    assert smoothed.dtype == np.float32
    assert (np.diff(smoothed) >= 0).all()
    assert (smoothed[0], smoothed[-1]) == (many[0], many[-1])
    expected = np.convolve(many.astype(float), np.full(41, 1 / 41), "valid")
    np.testing.assert_allclose(smoothed[20:-20], expected, rtol=3e-7)


def test_smoothing_spreads_the_derivative_over_the_window():
    table = jnp.asarray(np.sort(RNG.normal(size=23)))
    by_values = jax.jacobian(smoothed_table)(table, 0.2)
    np.testing.assert_allclose(by_values[11], np.where(np.abs(np.arange(23) - 11) <= 4, 1 / 9, 0), atol=1e-12)
    np.testing.assert_allclose(by_values[2], np.where(np.arange(23) <= 4, 1 / 5, 0), atol=1e-12)
    # Where floating point says 28.999999999999996 the window is of 29 ranks.
    np.testing.assert_allclose(jax.jacobian(smoothed_table)(jnp.arange(100.0), 0.29)[50].max(), 1 / 59)


@pytest.mark.parametrize("fit", [crude.fit, conformal.fit, partial(conformal.fit, score="quantile")])
def test_a_smoothed_table_guarantees_nothing(fit):
    fitted = fit(None, Normal(MEAN, STD), Y, smoothing=0.1)
    with pytest.raises(ValueError, match="smoothed"):
        fitted.guarantee(0.8)
    with pytest.raises(ValueError, match="smoothing must lie between 0 and 1/2"):
        fit(None, Normal(MEAN, STD), Y, smoothing=0.6)
    with pytest.raises(ValueError, match="cannot go with weights"):
        fit(None, Normal(MEAN, STD), Y, smoothing=0.1, weights=WEIGHTS)


def test_smoothing_is_for_one_table_of_numbers():
    with pytest.raises(ValueError, match="cannot go with neighbors"):
        crude.fit(X, Normal(MEAN, STD), Y, smoothing=0.1, neighbors=5)
    with pytest.raises(ValueError, match=r"with smoothing=0\.1: vector targets"):
        crude.fit(None, jc.MultivariateNormal(X, np.broadcast_to(np.eye(2), (40, 2, 2))), X, smoothing=0.1)
    with pytest.raises(ValueError, match="cannot go with by"):
        isotonic.fit(None, Normal(MEAN, STD), Y, smoothing=0.1, by=np.arange(40) % 2)


def test_second_derivatives_of_a_prediction_from_few_rows():
    """They pass through a linear solve in place of the factorization."""
    gram, step = (jnp.asarray(part @ part.T) for part in (X[:8] @ SLOPES[:2], X[8:16]))
    cross, targets, prior = jnp.asarray(MEAN[:8]), jnp.asarray(Y[:8]), jnp.asarray(9.0)

    def value(t):
        noisy = gram + jnp.eye(8) + t**2 * step
        mean, variance = lax.map(
            lambda s: gp.conditional(noisy, s * t * cross, targets + t, prior), jnp.arange(1.0, 3.0)
        )
        return jnp.sum(mean**2 + jnp.sin(variance))

    slope, h = jax.jit(jax.grad(value)), 1e-5
    np.testing.assert_allclose(slope(0.3), (value(0.3 + h) - value(0.3 - h)) / (2 * h), rtol=1e-7)
    for second in (jax.grad(jax.grad(value)), lambda t: jax.jvp(jax.grad(value), (t,), (1.0,))[1]):
        np.testing.assert_allclose(second(0.3), (slope(0.3 + h) - slope(0.3 - h)) / (2 * h), rtol=1e-7)


def rio_value(x, mean, y, **options):
    fitted = rio.fit(x, Point(mean), y, differentiable=True, **options)
    return reading(fitted(X[:5] + 0.1, Point(MEAN[:5])))


@pytest.mark.parametrize(
    "options",
    [
        {"inference": Exact(ard=False)},
        # Fewer inducing points would be other rows where the data move.
        pytest.param({"inference": Sparse(num_inducing=40, ard=False)}, marks=pytest.mark.slow),
        pytest.param({"inference": Sparse(num_inducing=5, points="trained", ard=False)}, marks=pytest.mark.slow),
        pytest.param({"inference": Sparse(points=np.arange(0, 40, 5), ard=False)}, marks=pytest.mark.slow),
        pytest.param({"inference": Nearest(ard=False)}, marks=pytest.mark.slow),
        pytest.param(
            {"preset": "paper", "inference": Sparse(4, "trained", ard=False, tolerance=0.0), "kernel": "input"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["exact", "sparse", "trained", "points", "nearest", "paper"],
)
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_rio(options):
    check(partial(rio_value, **options), (X, MEAN, Y), 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_what_is_better_of_points_and_rows(monkeypatch, own_programs):
    """As of more than 5000 rows, or of more than 2000 that are traced."""
    monkeypatch.setattr(automatic, "_EXACT_ROWS", 30)
    monkeypatch.setattr(automatic, "_EXACT_ROWS_BY_LAPACK", 30)
    check(lambda y: rio_value(X, MEAN, y, kernel="input"), (Y,), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["squared_exponential", "nngp"])
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_gaussian_process_with_known_noise(kernel):
    def value(x, y, variance):
        noise = GaussianNoise(variance=variance)
        options = {"kernel": kernel, "noise": noise, "inference": Exact(ard=False), "differentiable": True}
        return reading(gaussian_process.fit(x, y, **options)(X[:5] + 0.1))

    check(value, (X, Y, 0.1), 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_where_a_search_is_cut_short_the_derivative_is_nan_and_the_result_says_so():
    short = Exact(ard=False, max_iterations=1)
    fit = partial(rio.fit, inference=short, differentiable=True)
    assert fit(X, Point(MEAN), Y).result == Result.STEP_LIMIT
    gradient = jax.jit(jax.grad(partial(rio_value, inference=short), 2))(X, MEAN, Y)
    assert np.isnan(gradient).all()


def test_what_has_no_optimum_refuses_to_be_differentiable():
    with pytest.raises(ValueError, match="differentiable=True goes with Gaussian noise; got StudentTNoise"):
        rio.fit(X, Point(MEAN), Y, noise=StudentTNoise(), differentiable=True)
    for inference in (Stochastic(), Exact(learning_rate=0.01)):
        with pytest.raises(ValueError, match="differentiable=True needs an optimum"):
            rio.fit(X, Point(MEAN), Y, inference=inference, differentiable=True, key=jax.random.key(0))
    for fit in (partial(rio.fit, X, Point(MEAN)), partial(gaussian_process.fit, X)):
        with pytest.raises(TypeError, match="fit does not run under jit, vmap or grad"):
            jax.grad(lambda y, fit=fit: fit(y, inference=Stochastic(), key=jax.random.key(0)).evidence)(jnp.asarray(Y))
    with pytest.raises(TypeError, match="give differentiable=True"):
        jax.make_jaxpr(jax.grad(lambda y: rio.fit(X, Point(MEAN), y)(X, Point(MEAN)).mean.sum()))(jnp.asarray(Y))
