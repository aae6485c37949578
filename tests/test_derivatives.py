"""Derivatives through fits, in every argument, are those of central differences; test_methods.py has more of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc
from jaxcal import Normal, Point, gaussian_process, rio
from jaxcal.calibrators import conformal, crude, gaussian_mle, isotonic, kmeans
from jaxcal.functional.quantiles import smoothed_table
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


def check(value, arguments, step=1e-5, *, compiled=True):
    """The gradient of a function of arrays by every one of them, along a direction, beside the central difference."""
    both = jax.value_and_grad(value, tuple(range(len(arguments))))
    both = jax.jit(both) if compiled else both
    arguments = [jnp.asarray(argument) for argument in arguments]
    gradients, directions = both(*arguments)[1], np.random.default_rng(1)
    for number, gradient in enumerate(gradients):
        direction = directions.normal(size=gradient.shape)
        moved = lambda s: [a + s * direction if i == number else a for i, a in enumerate(arguments)]  # noqa: B023
        difference = (both(*moved(step))[0] - both(*moved(-step))[0]) / (2 * step)
        np.testing.assert_allclose(difference, jnp.sum(gradient * direction), rtol=1e-4, atol=1e-6)


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

    check(value, (MEAN, STD, Y, WEIGHTS))


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
    y = MEAN + np.where(np.arange(40) < 20, 0.0, 1.0)

    @jax.jit
    def gradients(y):
        fits = crude.fit, conformal.fit, isotonic.fit, gaussian_mle.fit, partial(crude.fit, smoothing=0.1)
        value = lambda y, fit: reading(fit(None, Point(jnp.asarray(MEAN)), y)(None, Point(jnp.asarray(MEAN[:5]))))
        return [jax.grad(partial(value, fit=fit))(y) for fit in fits]

    for gradient in gradients(jnp.asarray(y)):
        assert np.isfinite(gradient).all()


def test_smoothed_table_is_the_mean_of_windows_that_shrink_towards_the_ends():
    table = np.sort(RNG.normal(size=23))
    reach = [min(4, k, 22 - k) for k in range(23)]
    expected = [table[k - r : k + r + 1].mean() for k, r in enumerate(reach)]
    smoothed = smoothed_table(jnp.asarray(table), 0.2)
    np.testing.assert_allclose(smoothed, expected, rtol=1e-12)
    line = jnp.linspace(-3, 5, 23)
    np.testing.assert_allclose(smoothed_table(line, 0.5), line, rtol=1e-12)


@pytest.mark.parametrize("fit", [crude.fit, conformal.fit, partial(conformal.fit, score="quantile")])
def test_a_smoothed_table_guarantees_nothing(fit):
    fitted = fit(None, Normal(MEAN, STD), Y, smoothing=0.1)
    with pytest.raises(ValueError, match="smoothed"):
        fitted.guarantee(0.8)
    with pytest.raises(ValueError, match="smoothing must lie between 0 and 1/2"):
        fit(None, Normal(MEAN, STD), Y, smoothing=0.6)
    with pytest.raises(ValueError, match="cannot go with weights"):
        fit(None, Normal(MEAN, STD), Y, smoothing=0.1, weights=WEIGHTS)


def rio_value(x, mean, y, **options):
    fitted = rio.fit(x, Point(mean), y, differentiable=True, **options)
    return reading(fitted(X[:5] + 0.1, Point(MEAN[:5])))


@pytest.mark.parametrize(
    "options",
    [
        {"ard": False},
        # Fewer inducing points would be other rows where the data move.
        pytest.param({"ard": False, "bound": "collapsed", "num_inducing": 40}, marks=pytest.mark.slow),
        pytest.param(
            {"ard": False, "bound": "collapsed", "inducing": "trained", "num_inducing": 5}, marks=pytest.mark.slow
        ),
        pytest.param({"bound": "nearest", "ard": False}, marks=pytest.mark.slow),
        pytest.param({"preset": "paper", "num_inducing": 4, "kernel": "input"}, marks=pytest.mark.slow),
    ],
    ids=["exact", "collapsed", "trained", "nearest", "paper"],
)
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_rio(options):
    check(partial(rio_value, **options), (X, MEAN, Y), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["squared_exponential", "nngp"])
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_gaussian_process_with_known_noise(kernel):
    def value(x, y, noise_variance):
        options = {"kernel": kernel, "noise_variance": noise_variance, "ard": False, "differentiable": True}
        return reading(gaussian_process.fit(x, y, **options)(X[:5] + 0.1))

    check(value, (X, Y, 0.1), 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_where_a_search_is_cut_short_the_derivative_is_nan_and_the_result_says_so():
    fit = partial(rio.fit, ard=False, max_iterations=1, differentiable=True)
    assert fit(X, Point(MEAN), Y).result == Result.STEP_LIMIT
    gradient = jax.jit(jax.grad(partial(rio_value, ard=False, max_iterations=1), 2))(X, MEAN, Y)
    assert np.isnan(gradient).all()


def test_what_has_no_optimum_refuses_to_be_differentiable():
    for options in ({"noise": "student_t"}, {"bound": "stochastic", "key": jax.random.key(0)}):
        with pytest.raises(ValueError, match="differentiable=True needs an optimum"):
            rio.fit(X, Point(MEAN), Y, differentiable=True, **options)
    with pytest.raises(TypeError, match="give differentiable=True"):
        jax.make_jaxpr(jax.grad(lambda y: rio.fit(X, Point(MEAN), y)(X, Point(MEAN)).mean.sum()))(jnp.asarray(Y))
