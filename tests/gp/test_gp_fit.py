"""The fit of Gaussian processes: the exact evidence and its curvature, the climb, what makes no sense, the options."""

from typing import NamedTuple

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcal import Point, gaussian_process, rio
from jaxcal.functional import gp, gp_host, sparse_gp
from jaxcal.gp import Exact, Sparse, newton
from jaxcal.gp import fit as gp_fit
from jaxcal.gp import model as models
from jaxcal.gp.inference import sparse
from jaxcal.gp.kernels import SquaredExponential, gram
from jaxcal.gp.model import Data, Model
from jaxcal.optimize import Result
from jaxcal.optimize.iterate import iterate

pytestmark = [pytest.mark.contract_in_32_bits, pytest.mark.usefixtures("own_programs")]

X64 = jax.config.jax_enable_x64
N = 60


@pytest.fixture(scope="module")
def rows():
    """Inputs [60, 2], the base and targets."""
    rng = np.random.default_rng(5)
    x = rng.uniform(-2, 2, size=(N, 2))
    base = np.sin(2 * x[:, 0])
    return x, Point(base), base + 0.5 * np.cos(2 * x[:, 1]) + 0.2 * rng.normal(size=N)


# The exact evidence


@jax.jit
def noisy(log_hyperparameters, x):
    log_variance, log_lengthscale, log_noise = log_hyperparameters
    return gram(SquaredExponential(log_variance, log_lengthscale), x, jnp.exp(log_noise))


def test_exact_terms_are_those_of_numpy(rng):
    x, y = jnp.asarray(rng.normal(size=(30, 2))), rng.normal(size=30)
    covariance = noisy(jnp.log(jnp.asarray([1.3, 0.8, 0.2])), x)
    terms, inverse = (
        jax.jit(gp.likelihood_terms)(covariance, jnp.asarray(y)),
        np.linalg.inv(np.asarray(covariance, float)),
    )
    close = {"rtol": 1e-9 if X64 else 1e-3, "atol": 1e-9 if X64 else 1e-3}
    expected = scipy.stats.multivariate_normal(np.zeros(30), np.asarray(covariance, float)).logpdf(y)
    np.testing.assert_allclose(terms.value, expected, **close)
    np.testing.assert_allclose(terms.value, gp.log_likelihood(covariance, jnp.asarray(y)), rtol=1e-5)
    np.testing.assert_allclose(terms.weights, inverse @ y, **close)
    np.testing.assert_allclose(terms.inverse.T @ terms.inverse, inverse, **close)
    np.testing.assert_allclose(terms.grad_gram, (np.outer(inverse @ y, inverse @ y) - inverse) / 2, **close)


def test_gradients_and_average_information_are_written_out(rng):
    x, y = jnp.asarray(rng.normal(size=(30, 2))), jnp.asarray(rng.normal(size=30))
    place = jnp.log(jnp.asarray([1.3, 0.8, 0.2]))
    terms = jax.jit(gp.likelihood_terms)(noisy(place, x), y)
    derivatives = jnp.moveaxis(jax.jit(jax.jacfwd(lambda place: noisy(place, x)))(place), -1, 0)
    slope = jax.jit(jax.grad(lambda place: gp.log_likelihood(noisy(place, x), y)))(place)
    close = 1e-9 if X64 else 2e-3
    np.testing.assert_allclose(jnp.sum(derivatives * terms.grad_gram[None], axis=(1, 2)), slope, rtol=close)

    covariance, derivatives = np.asarray(noisy(place, x), float), np.asarray(derivatives, float)
    weights = np.linalg.solve(covariance, np.asarray(y))
    moved = [derivative @ weights for derivative in derivatives]
    expected = [[one @ np.linalg.solve(covariance, other) / 2 for one in moved] for other in moved]
    found = gp.average_information(terms.inverse, (derivatives @ terms.weights).T)
    np.testing.assert_allclose(found, expected, rtol=close)


def test_no_targets_have_a_greater_likelihood(rng):
    greatest = gp.greatest_log_likelihood(30, 0.2)
    close = 1e-12 if X64 else 1e-5
    np.testing.assert_allclose(greatest, 30 * scipy.stats.norm(scale=np.sqrt(0.2)).logpdf(0), rtol=close)
    alone = 0.2 * jnp.eye(30)
    np.testing.assert_allclose(gp.log_likelihood(alone, jnp.zeros(30)), greatest, rtol=close)
    more = alone + gram(SquaredExponential(jnp.asarray(-3.0), jnp.asarray(0.0)), jnp.asarray(rng.normal(size=(30, 2))))
    assert gp.log_likelihood(more, jnp.zeros(30)) < greatest


def test_inducing_points_never_know_more_than_there_is(rng):
    """Rounding makes the trace of what they explain exceed the variance there is: the gap is zero, not negative."""
    root = jnp.asarray(rng.normal(size=(7, 40)))
    outer, targets = root @ root.T, jnp.asarray(rng.normal(size=40))
    everything = sparse_gp.RowSums(outer, root @ targets, jnp.trace(outer), targets @ targets, jnp.zeros(()), 40)
    bound = jax.jit(sparse_gp.collapsed_bound)
    exact = bound(everything, jnp.asarray(1e-3))
    rounded = everything._replace(prior=everything.prior * (1 - 1e-4))
    assert bound(rounded, jnp.asarray(1e-3)) == exact
    assert bound(everything._replace(prior=everything.prior * (1 + 1e-4)), jnp.asarray(1e-3)) < exact


# The climb


class End(NamedTuple):
    """Where an ascent ended."""

    place: np.ndarray
    value: float
    steps: int
    converged: bool


@pytest.fixture(params=["host", "traced"])
def ascend(request):
    """An ascent from one place, by the host or within a compiled program."""
    on_host = request.param == "host"

    def climb(evaluate, start, *, tolerance=1e-3, max_iterations=1000):
        at_places = jax.jit(jax.vmap(evaluate))
        going = lambda ascents: ~ascents.done & (ascents.steps < max_iterations) & ~jnp_or_np.isnan(ascents.local.value)
        jnp_or_np = np if on_host else jnp
        limit = jnp_or_np.full(1, tolerance)

        def advance(xp, ascents, found):
            return newton.advance(xp, ascents, found, going(ascents), limit)

        def found(ascents):
            there = at_places(jnp.asarray(ascents.asked))
            return newton.Local(*map(np.asarray, there)) if on_host else there

        run = lambda place: iterate(
            found, advance, newton.Ascents.at(jnp_or_np, place), lambda ascents: going(ascents).any(), on_host=on_host
        )
        place = np.asarray(start, float)[None]
        end = run(place) if on_host else jax.jit(run)(jnp.asarray(place))
        return End(*(np.asarray(part)[0] for part in (end.place, end.local.value, end.steps, end.done)))

    return climb


def local(value, gradient, information):
    return newton.Local(value, gradient, information, jnp.asarray(True))


def least_squares(residuals):
    """Minus a sum of squares, with the information of Gauss and Newton."""

    def evaluate(place):
        values, slopes = residuals(place), jax.jacfwd(residuals)(place)
        return local(-values @ values, -2 * slopes.T @ values, 2 * slopes.T @ slopes)

    return evaluate


def test_top_of_a_quadratic_is_found(rng, ascend):
    root, top = jnp.asarray(rng.normal(size=(4, 4))), jnp.asarray([1.0, -5.0, 3.0, 0.5])
    end = ascend(least_squares(lambda place: root @ (place - top)), np.zeros(4), tolerance=1e-8)
    assert end.converged
    assert end.steps < 20
    np.testing.assert_allclose(end.place, top, atol=1e-3)
    np.testing.assert_allclose(end.value, 0, atol=1e-7)


@pytest.mark.parametrize("steepness", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("start", [(-1.2, 1.0), (3.0, -8.0), (0.0, 0.0)])
def test_a_curved_ridge_is_followed(steepness, start, ascend):
    residuals = lambda place: jnp.stack([1 - place[0], steepness * (place[1] - place[0] ** 2)])
    end = ascend(least_squares(residuals), start, tolerance=1e-6)
    assert end.converged
    np.testing.assert_allclose(end.place, 1, atol=1e-2)


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_values_never_fall(factor, ascend):
    """Even where the information is a bad approximation: a tenth of the curvature, or ten times it."""

    def evaluate(place):
        curvature = jnp.cosh(place - 1)
        return local(-jnp.sum(curvature), -jnp.sinh(place - 1), factor * jnp.diag(curvature))

    values = [ascend(evaluate, [4.0, -3.0], tolerance=0.0, max_iterations=limit).value for limit in range(0, 20, 4)]
    assert (np.diff(values) >= 0).all()
    assert values[-1] > values[0] + 1


def test_a_step_to_where_there_is_no_value_is_shortened(ascend):
    """The top lies just before the edge, and the information lets every step go too far."""

    def evaluate(place):
        value = jnp.where(place[0] > 1, jnp.nan, -jnp.sum((place - 0.9) ** 2))
        return local(value, -2 * (place - 0.9), 0.2 * jnp.eye(2))

    end = ascend(evaluate, [0.0, 0.0], tolerance=1e-6)
    assert end.converged
    np.testing.assert_allclose(end.place, 0.9, atol=2e-3)


def test_a_gradient_that_is_not_a_number_is_no_place_to_be(ascend):
    def evaluate(place):
        slope = jnp.where(place > 1, jnp.nan, -2 * (place - 0.9))
        return local(-jnp.sum((place - 0.9) ** 2), slope, 0.2 * jnp.eye(1))

    end = ascend(evaluate, [0.0], tolerance=1e-6)
    assert end.converged
    np.testing.assert_allclose(end.place, 0.9, atol=2e-3)


def test_an_initial_value_without_a_loss_ends_at_once(ascend):
    nowhere = lambda place: local(jnp.asarray(jnp.nan), place, jnp.eye(2))
    end = ascend(nowhere, [1.0, 2.0])
    assert np.isnan(end.value)
    assert not end.converged
    assert end.steps == 0


def test_a_hyperparameter_without_effect_does_not_shorten_the_steps_of_the_others(ascend):
    """A variance on its way to zero, whose Newton step grows without end."""

    def evaluate(place):
        variance = jnp.exp(place[1])
        value = -((place[0] - 20) ** 2) / 2 - 5 * variance
        return local(value, jnp.stack([20 - place[0], -5 * variance]), jnp.diag(jnp.stack([1, 5 * variance**2])))

    end = ascend(evaluate, [0.0, 0.0], tolerance=0.02)
    assert end.converged
    # Ten steps of two, and some to the end.
    assert end.steps <= 14
    np.testing.assert_allclose(end.place[0], 20, atol=0.2)
    assert end.value > -0.05


def test_a_limit_of_steps_is_kept(ascend):
    end = ascend(least_squares(lambda place: place - 50), [0.0], max_iterations=3)
    assert end.steps == 3
    assert not end.converged


# What makes no sense


def model(variance=1.0, noise=0.1):
    kernel = SquaredExponential(jnp.log(jnp.asarray(variance)), jnp.zeros(()))
    return Model(kernel, jnp.log(jnp.asarray(noise)))


def test_only_evidence_that_the_noise_allows_makes_sense(rng):
    targets = jnp.asarray(rng.normal(size=30))
    data = Data(jnp.asarray(rng.normal(size=(30, 2))), targets)
    greatest = gp.greatest_log_likelihood(30, model().noise_variance(data.points))
    sane = lambda model, value: bool(models.is_sane(model, jnp.asarray(value), data))
    assert sane(model(), -40.0)
    assert sane(model(), greatest - 1)
    assert not sane(model(), greatest + 1)
    assert not sane(model(), np.inf)
    assert not sane(model(), np.nan)
    assert sane(model(variance=1e3), -40.0)
    assert not sane(model(variance=1e7), -100.0)
    assert not sane(model(noise=1e7), -300.0)


def test_the_least_noise_of_all_rows_decides_what_makes_sense(rng):
    base_variance = jnp.asarray(np.repeat([1e-3, 2 - 1e-3], 15))
    data = Data(jnp.asarray(rng.normal(size=(30, 2))), jnp.asarray(rng.normal(size=30)), base_variance)
    follows = Model(model().kernel, jnp.log(jnp.asarray(0.1)), jnp.asarray(5.0))
    noise = follows.noise_variance(data.points) * follows.relative_noise(base_variance)
    of_rows = -0.5 * jnp.sum(jnp.log(2 * jnp.pi * noise))
    assert models.is_sane(follows, of_rows, data)
    assert not models.is_sane(follows, gp.greatest_log_likelihood(30, jnp.min(noise)) + 1, data)


@pytest.mark.parametrize("method", ["rio", pytest.param("gaussian_process", marks=pytest.mark.slow)])
def test_an_evidence_out_of_rounding_is_no_optimum(rows, method, monkeypatch):
    """The old code took any evidence that was finite; here one that is a thousand nats too great."""
    plain = gp_host.likelihood_terms
    too_great = lambda terms: terms and terms._replace(value=terms.value + 1000)
    monkeypatch.setattr(gp_host, "likelihood_terms", lambda *given: too_great(plain(*given)))
    # Rows of a number that no other test has: what is compiled here must serve none.
    x, base, y = rows[0][:-3], Point(rows[1].mean[:-3]), rows[2][:-3]
    given = (x, base, y) if method == "rio" else (x, y)
    options = {"inference": Exact(ard=False, max_iterations=7)}
    fitter = rio.fit if method == "rio" else gaussian_process.fit
    found = fitter(*given, throw=False, **options)
    assert found.result == Result.NOT_FINITE
    with pytest.raises(FloatingPointError, match="make no sense"):
        fitter(*given, **options)


@pytest.mark.parametrize("method", ["rio", "gaussian_process"])
def test_variances_far_beyond_the_targets_are_no_optimum(rows, method):
    x, base, y = rows
    kernel = gpx.kernels.RBF(lengthscale=1.0, variance=1e9)
    if method == "rio":
        found = rio.fit(x, base, y, kernel=(kernel, None), inference=Exact(max_iterations=1), throw=False)
    else:
        found = gaussian_process.fit(x, y, kernel=kernel, inference=Exact(max_iterations=1), throw=False)
    assert found.result == Result.NOT_FINITE


# The order of rows, and options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "inference"),
    [
        (N, Exact()),
        # With the exact bound's tolerance: the order is not to decide where in the last nat a fit ends.
        pytest.param(N, Sparse(num_inducing=15, tolerance=0.005), marks=pytest.mark.slow),
        pytest.param(300, Exact(ard=False), marks=pytest.mark.slow),  # more than the first climbs look at
    ],
    ids=["exact", "sparse", "many"],
)
def test_the_order_of_the_rows_does_not_matter(n, inference):
    rng = np.random.default_rng(6)
    x = rng.uniform(-2, 2, size=(n, 2))
    base = np.sin(2 * x[:, 0])
    y = base + 0.5 * np.cos(2 * x[:, 1]) + 0.2 * rng.normal(size=n)
    order = rng.permutation(n)
    one, other = (rio.fit(x[rows], Point(base[rows]), y[rows], inference=inference) for rows in (np.arange(n), order))
    one, other = one(x + 0.1, Point(base + 0.1)), other(x + 0.1, Point(base + 0.1))
    assert np.max(np.abs(one.mean - other.mean) / one.std) < 0.02
    assert np.max(np.abs(one.std - other.std) / one.std) < 0.02


def test_points_are_as_many_as_asked_for(rows):
    x, base, y = rows
    fitted = rio.fit(x, base, y, kernel="output", inference=Sparse(num_inducing=10))
    assert fitted.points.output.shape == (10, 1)
    assert fitted.process.posterior.widen.shape == (10, 10)


@pytest.mark.slow
def test_of_many_rows_some_decide_on_the_hyperparameters_and_all_on_the_prediction(rng, monkeypatch):
    monkeypatch.setattr(sparse, "_MANY_ROWS", 100)
    x = jnp.asarray(rng.uniform(-3, 3, 211))  # a shape of its own: what is compiled here is for this test alone
    y = jnp.sin(2 * x) + 0.1 * rng.normal(size=211)
    fitted = gaussian_process.fit(x, y, inference=Sparse(num_inducing=20))
    data = Data(fitted.x_scaler(x[:, None]), fitted.y_scaler(y))
    model = eqx.tree_at(lambda m: m.inducing, fitted.process.model, fitted.points, is_leaf=lambda node: node is None)

    @jax.jit
    def of_all(data):
        after = models.posterior(model, data, fitted.jitter)
        return models.evidence(model, data, fitted.jitter), models.predict(
            model.kernel, after, fitted.points, data.points
        )

    evidence, (mean, _) = of_all(data)
    np.testing.assert_allclose(fitted.evidence, evidence, rtol=1e-5 if X64 else 1e-4)
    np.testing.assert_allclose(fitted.process(data.points)[0], mean, atol=0.01)

    @jax.jit
    def slope(data):
        with_noise = lambda log_noise: eqx.tree_at(lambda m: m.log_noise, model, log_noise)
        return abs(jax.grad(lambda log: models.evidence(with_noise(log), data, fitted.jitter))(model.log_noise))

    assert slope(models.some_rows(data, 100)) < slope(data) / 3


# As published


def test_initial_values_of_the_preset_are_those_of_the_paper(rows, monkeypatch):
    """All hyperparameters one, the first 50 rows inducing points."""
    given = []
    monkeypatch.setattr(gp_fit, "maximize_evidence", lambda *arguments: given.extend(arguments) or 1 / 0)
    with jax.disable_jit(), pytest.raises(ZeroDivisionError):
        rio.fit(*rows, preset="paper")
    starts, data, way = given
    starts = starts if isinstance(starts, Model) else starts(data, None)
    for part in (starts.kernel.input, starts.kernel.output):
        np.testing.assert_array_equal(part.log_variance, [0.0])
        np.testing.assert_array_equal(part.log_lengthscale, [0.0])
    np.testing.assert_array_equal(starts.log_noise, [0.0])
    taken = way.inference
    assert isinstance(taken, Sparse)
    assert (taken.points, taken.num_inducing, taken.ard, taken.tolerance) == ("trained", 50, False, 0.0)
    only = jax.tree.map(lambda leaf: leaf[0], starts)
    inducing = taken.with_inducing_points(only, data).inducing
    np.testing.assert_array_equal(inducing.inputs, data.points.inputs[:50])
    np.testing.assert_array_equal(inducing.output, data.points.output[:50])
    # Neither predictions nor residuals are scaled.
    np.testing.assert_allclose(data.points.output[:, 0], rows[1].mean, rtol=1e-6)
    np.testing.assert_allclose(data.targets, rows[2] - np.asarray(rows[1].mean), rtol=1e-5, atol=1e-6)
