"""Noise that is not equal and normal: its formulas against integrals, outliers, heavy tails, noise that grows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from jaxcal import Normal, Point, StudentT, gaussian_process, metrics, rio
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import gp, noise
from jaxcal.gp import Exact, GaussianNoise, InputNoise, Nearest, Sparse, Stochastic, StudentTNoise
from jaxcal.gp import model as models
from jaxcal.gp.kernels import SquaredExponential
from jaxcal.gp.model import Data, Model

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
ROWS = 120


# The formulas


def test_what_student_t_noise_adds_is_the_expected_log_weight_less_the_divergence():
    df, weights = 3.3, np.array([0.7, 2.0])
    shape, prior = (df + 1) / 2, scipy.stats.gamma(df / 2, scale=2 / df)
    expected = 0.0
    for weight in weights:
        q = scipy.stats.gamma(shape, scale=weight / shape)
        log = scipy.integrate.quad(lambda w, q=q: q.pdf(w) * np.log(w), 0, np.inf)[0]
        divergence = scipy.integrate.quad(lambda w, q=q: q.pdf(w) * (q.logpdf(w) - prior.logpdf(w)), 0, 60)[0]
        expected += (log - np.log(weight)) / 2 - divergence
    found = noise.student_t_bound(jnp.asarray(weights), jnp.asarray(df))
    np.testing.assert_allclose(found, expected, rtol=1e-6 if X64 else 1e-4)


def test_the_bound_of_a_single_row_rises_with_its_updates_and_stays_below_the_evidence():
    prior, scale, df, target = 1.3, 0.4, 3.3, 2.1
    integrand = lambda f: (
        scipy.stats.norm.pdf(f, 0, np.sqrt(prior)) * scipy.stats.t.pdf(target, df, loc=f, scale=np.sqrt(scale))
    )
    exact = np.log(scipy.integrate.quad(integrand, -40, 40)[0])
    weight, bounds = 1.0, []
    for _ in range(20):
        total, own = prior + scale / weight, scale / weight
        mean, variance = prior * target / total, prior * own / total
        square = jnp.asarray([((target - mean) ** 2 + variance) / scale])
        weight = float(noise.student_t_weights(square, jnp.asarray(df))[0])
        normal = scipy.stats.norm.logpdf(target, 0, np.sqrt(prior + scale / weight))
        bounds.append(normal + float(noise.student_t_bound(jnp.asarray([weight]), jnp.asarray(df))))
    assert (np.diff(bounds) > (-1e-10 if X64 else -1e-5)).all()
    assert exact - 0.25 < bounds[-1] < exact


@pytest.mark.parametrize(("ratio", "close"), [(0.1, 0.003), (0.3, 0.006), (1.0, 0.011)])
def test_the_sum_of_student_t_and_normal_covers_as_often_as_it_says(ratio, close):
    for df in (2.1, 4.0, 50.0):
        own_df, scale = (float(a) for a in noise.student_t_sum(jnp.asarray(1.0), jnp.asarray(df), jnp.asarray(ratio)))
        for level in (0.68, 0.9, 0.99):
            edge = scipy.stats.t.ppf(0.5 + level / 2, own_df, scale=np.sqrt(scale))
            below = lambda f, df=df, edge=edge: (
                scipy.stats.norm.pdf(f, 0, np.sqrt(ratio)) * scipy.stats.t.cdf(edge - f, df)
            )
            covered = 2 * scipy.integrate.quad(below, -9 * np.sqrt(ratio), 9 * np.sqrt(ratio))[0] - 1
            assert abs(covered - level) < close


def test_degrees_of_freedom_are_those_of_the_errors():
    for df in (2.5, 5.0):
        errors = scipy.stats.t.ppf((np.arange(4000) + 0.5) / 4000, df)
        np.testing.assert_allclose(noise.student_t_df(jnp.asarray(errors**2)), df, rtol=0.1)
    normal = scipy.stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    assert noise.student_t_df(jnp.asarray(normal**2)) > 50


def test_log_noise_responses_are_unbiased(rng):
    responses = np.asarray(noise.log_noise_responses(jnp.asarray(rng.normal(size=200_000)), 2.0))
    np.testing.assert_allclose(responses.mean(), np.log(2), atol=0.02)
    np.testing.assert_allclose(responses.var(), noise.LOG_SQUARE_VARIANCE, rtol=0.02)


def test_the_greatest_error_is_exceeded_as_often_as_it_says(rng):
    z = rng.normal(size=(100_000, 20))
    z /= np.sqrt(np.mean(z**2, axis=1, keepdims=True))  # at the best scale
    exceeded = np.mean(np.abs(z).max(axis=1) > noise.greatest_error(20, 0.01))
    assert 0.007 < exceeded < 0.011  # Bonferroni's correction errs on the safe side


@pytest.mark.parametrize("n", [2, 3, 10, 100, 10_000])
def test_a_usual_error_is_never_too_great(n):
    """What the normal distribution lets pass Grubbs' test lets pass, and of many rows nearly nothing more."""
    t = scipy.stats.t.isf(1e-4 / (2 * n), n - 1)
    np.testing.assert_allclose(noise.greatest_error(n), t * np.sqrt(n / (n - 1 + t**2)), rtol=1e-6)
    errors = np.linspace(0, np.sqrt(n), 1000)
    usual = np.array([noise.is_usual(error, n) for error in errors.tolist()])
    assert (errors[usual] <= noise.greatest_error(n)).all()
    if n == 10_000:
        assert usual[errors < 0.99 * noise.greatest_error(n)].all()


def test_squares_and_errors_of_the_rows_are_those_of_the_textbook(rng):
    """With noise of their own, exactly and through inducing points that are all rows."""
    x, y = jnp.asarray(rng.normal(size=(25, 2))), jnp.asarray(rng.normal(size=25))
    data = Data(x, y, relative_noise=jnp.asarray(rng.uniform(0.3, 3, size=25)))
    model = Model(SquaredExponential(jnp.asarray(0.3), jnp.asarray(0.1)), jnp.log(jnp.asarray(0.2)))
    prior = np.asarray(model.kernel(x, x), float)
    covariance = prior + np.diag(np.asarray(models.row_noise(model, data), float))
    mean = prior @ np.linalg.solve(covariance, y)
    squares = (y - mean) ** 2 + np.diag(prior - prior @ np.linalg.solve(covariance, prior))
    others = [np.delete(np.arange(25), i) for i in range(25)]
    errors = [
        y[i] - covariance[i, rest] @ np.linalg.solve(covariance[np.ix_(rest, rest)], y[rest])
        for i, rest in enumerate(others)
    ]
    close = {"rtol": 1e-5 if X64 else 1e-2, "atol": 1e-6 if X64 else 2e-3}
    sparse = Model(model.kernel, model.log_noise, inducing=x)
    for each, jitter in ((model, 0.0), (sparse, 1e-10 if X64 else 1e-6)):

        @jax.jit
        def found(each=each, jitter=jitter):
            after = models.posterior(each, data, jitter)
            return models.expected_squares(each, after, data), models.leave_one_out(each, after, data).error

        np.testing.assert_allclose(found()[0], squares, **close)
        np.testing.assert_allclose(found()[1], errors, **close)


def test_a_robust_scale_ignores_outliers(rng):
    values = rng.normal(3, 2, size=4001)
    values[:40] = 1e6
    scaler = Standardizer.robust(jnp.asarray(values))
    np.testing.assert_allclose([scaler.loc, scaler.scale], [3, 2], rtol=0.1)
    two = jnp.asarray([0.0] * 90 + [1.0] * 10)
    assert Standardizer.robust(two).scale == Standardizer.of(two).scale


# Whole fits


def rows(rng, std, number=ROWS):
    """Inputs in order, a smooth function and targets with noise of this std."""
    x = np.linspace(-3, 3, number)
    f = np.sin(2 * x)
    return x, f, f + std * rng.normal(size=number)


@pytest.fixture(scope="module")
def spoiled():
    """Targets of which one is wrong by far, and the function behind them."""
    x, f, y = rows(np.random.default_rng(3), 0.3)
    y[7] = 1e3
    return x, f, y


def test_an_outlier_raises_a_warning_that_names_its_row(spoiled):
    x, _, y = spoiled
    with pytest.warns(UserWarning, match=r"row 7 lies .* noise=jaxcal.gp.StudentTNoise\(\) keeps single rows"):
        gaussian_process.fit(x, y)


def test_an_outlier_does_not_decide_a_fit_with_student_t_noise(spoiled):
    x, f, y = spoiled
    fit = gaussian_process.fit(x, y, noise=StudentTNoise())
    after = fit(x)
    assert isinstance(after, StudentT)
    assert fit.result != 2
    assert np.sqrt(np.mean((np.asarray(after.loc) - f) ** 2)) < 0.15
    assert isinstance(fit(x, include_noise=False), Normal)


def test_several_outputs_with_student_t_noise_are_student_t_on_the_host_and_in_a_program(rng):
    x = rng.normal(size=(40, 2))
    y = np.stack([np.sin(2 * x[:, 0]), x[:, 1] ** 2], axis=1) + 0.1 * rng.standard_t(3, size=(40, 2))
    base = Point(0.8 * y)
    fitted = rio.fit(x, base, y, noise=StudentTNoise())
    assert fitted.evidence.dtype == fitted.process.noise_variance.dtype
    on_host, in_program = fitted(x, base), jax.jit(lambda mean: fitted(x, Point(mean)))(base.mean)
    for one in (on_host, in_program):
        assert isinstance(one, StudentT)
        assert one.df.shape == y.shape
    for name in ("df", "loc", "scale"):
        np.testing.assert_allclose(getattr(on_host, name), getattr(in_program, name), rtol=1e-4 if X64 else 0.02)


def test_student_t_noise_is_normal_where_the_noise_is(rng):
    x, _, y = rows(rng, 0.3)
    normal, heavy = gaussian_process.fit(x, y), gaussian_process.fit(x, y, noise=StudentTNoise())
    assert heavy.process.model.student_t.df > 20
    np.testing.assert_allclose(heavy(x).mean, normal(x).mean, atol=0.05)
    np.testing.assert_allclose(heavy(x).std, normal(x).std, rtol=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_noise_that_grows_is_followed(rng):
    std = 0.3 * np.exp(0.6 * np.linspace(-3, 3, ROWS))
    x, f, y = rows(rng, std)
    fit, constant = gaussian_process.fit(x, y, noise=InputNoise()), gaussian_process.fit(x, y)
    new = f + std * rng.normal(size=(200, ROWS))
    found = fit(x)
    assert np.corrcoef(np.log(found.std), np.log(std))[0, 1] > 0.8
    score = lambda after: np.mean([metrics.nlpd(y, after) for y in new])
    assert score(found) < score(constant(x)) - 0.2


@pytest.mark.slow
def test_noise_that_does_not_depend_on_the_inputs_stays_constant(rng):
    x, _, y = rows(rng, 0.3)
    fit, constant = gaussian_process.fit(x, y, noise=InputNoise()), gaussian_process.fit(x, y)
    np.testing.assert_allclose(fit(x).std, constant(x).std, rtol=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StudentTNoise(), InputNoise()], ids=["student_t", "input"])
def test_rio_and_sparse_processes_take_either_noise(kind):
    def fit(number, **options):
        x, f, y = rows(np.random.default_rng(number), 0.3)
        return rio.fit(x, Point(0.5 * f), y, noise=kind, **options)(x, Point(0.5 * f))

    differences = []
    for number in range(5):
        exact, sparse = fit(number), fit(number, inference=Sparse(num_inducing=40))
        np.testing.assert_allclose(sparse.mean, exact.mean, atol=0.15)
        differences.append(np.max(np.abs(sparse.std / exact.std - 1)))
    # In about one draw of eight the exact process follows a noise that is not there: the median is compared.
    assert np.median(differences) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StudentTNoise(), InputNoise()], ids=["student_t", "input"])
def test_either_noise_takes_scaled_and_shifted_targets(kind, rng):
    x, f, y = rows(rng, 0.3)
    base, shifted = Point(0.5 * f), Point(5 - f)
    one = rio.fit(x, base, y, noise=kind)(x, base)
    other = rio.fit(x, shifted, 5 - 2 * y, noise=kind)(x, shifted)
    np.testing.assert_allclose((other.mean - 5) / -2, one.mean, atol=1e-3 if X64 else 3e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:row .* lies")
def test_heavy_tails_are_covered_as_often_as_said():
    covered = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        x = np.linspace(-3, 3, 200)
        fit = gaussian_process.fit(x, np.sin(2 * x) + 0.3 * rng.standard_t(3, size=200), noise=StudentTNoise())
        new = np.sin(2 * x) + 0.3 * rng.standard_t(3, size=200)
        covered.append([metrics.coverage(new, fit(x), confidence_level=level) for level in (0.68, 0.9)])
    np.testing.assert_allclose(np.mean(covered, axis=0), [0.68, 0.9], atol=0.03)


@pytest.mark.parametrize("kind", [StudentTNoise(), InputNoise()], ids=["student_t", "input"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"inference": Nearest()}, "Nearest goes with Gaussian noise; for {} take Exact or Sparse"),
        ({"inference": Stochastic()}, "Stochastic goes with Gaussian noise; for {} take Exact or Sparse"),
        ({"inference": Exact(learning_rate=0.01)}, "Exact goes with {} without Adam: leave learning_rate out"),
        ({"differentiable": True}, "differentiable=True goes with Gaussian noise; got {}"),
    ],
    ids=["nearest", "stochastic", "adam", "differentiable"],
)
def test_pairs_of_an_inference_and_a_noise_that_are_refused(kind, option, message):
    x = np.linspace(0, 1, 20)
    for fit in (gaussian_process.fit, lambda x, y, **options: rio.fit(x, Point(0.5 * x), y, **options)):
        with pytest.raises(ValueError, match=message.format(type(kind).__name__)):
            fit(x, np.sin(x), noise=kind, key=jax.random.key(0), **option)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: gaussian_process.fit(x, y, noise=InputNoise(), preset="crude"), "'crude' has Gaussian noise"),
        (lambda x, y: gaussian_process.fit(x, y, noise=StudentTNoise(), preset="nngp"), "'nngp' has Gaussian noise"),
        (lambda x, y: rio.fit(x, Point(y - 1 + x), y, noise=InputNoise(), preset="paper"), "'paper' has Gaussian"),
        (
            lambda x, y: rio.fit(x, Point(y - 1 + x), y, noise=GaussianNoise(variance=0.1), preset="paper"),
            "'paper' has Gaussian noise of a variance that is learned",
        ),
        (lambda x, y: rio.fit(x, Normal(x, 1.0), y, noise=InputNoise()), "base has a std of its own"),
    ],
)
def test_noise_that_does_not_go_with_another_option(call, message):
    x = np.linspace(0, 1, 20)
    with pytest.raises(ValueError, match=message):
        call(x, np.sin(x))


def test_errors_of_right_models_raise_no_warning():
    """In 200 samples of a process with known hyperparameters."""
    rng = np.random.default_rng(1)
    kernel = SquaredExponential(jnp.asarray(0.0), jnp.asarray(0.0))
    x = jnp.asarray(rng.normal(size=(30, 2)))
    covariance = np.asarray(kernel(x, x), float) + 0.1 * np.eye(30)
    samples = rng.multivariate_normal(np.zeros(30), covariance, size=200)
    whole = jax.vmap(lambda y: gp.leave_one_out(gp.posterior(jnp.asarray(covariance), y)))(jnp.asarray(samples))
    greatest = np.abs(whole.error / np.sqrt(whole.variance)).max(axis=1)
    assert (greatest < noise.greatest_error(30)).all()
    assert greatest.max() > 3
