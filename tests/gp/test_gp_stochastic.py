"""Fits by minibatches: their bound against gpjax and plain sums, the steps of q, rows of a file, the optimum found."""

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal.calibrators.rio import IOKernel, Points
from jaxcal.frames import unread
from jaxcal.functional import gp, kernels, linalg, sparse_gp
from jaxcal.gp import GaussianNoise, Sparse, Stochastic, model
from jaxcal.gp import fit as whole
from jaxcal.gp.inference import stochastic
from jaxcal.gp.kernels import SquaredExponential
from jaxcal.gp.model import Data, Model
from jaxcal.optimize import Result

pytestmark = [
    pytest.mark.contract_in_32_bits,
    pytest.mark.usefixtures("own_programs"),
    pytest.mark.filterwarnings("ignore:X is not of type float64", "ignore:y is not of type float64"),
]
KEY = jax.random.key(3)
NOISE, JITTER, PRIOR = 0.3, 1e-5, 1.7
ROWS, INDUCING = 600, 20


def tolerance(strict, loose):
    return strict if jax.config.jax_enable_x64 else loose


# The bound, at any q


class Case:
    """Rows, inducing points, targets, precisions and some q(v)."""

    def __init__(self, rng, n=40, m=7):
        self.x, self.y = jnp.asarray(rng.normal(size=(n, 3))), jnp.asarray(rng.normal(size=n))
        self.z = self.x[:m] + 0.1
        self.precisions = jnp.asarray(rng.uniform(0.5, 2, size=n))
        self.mean = jnp.asarray(rng.normal(size=m))
        self.root = jnp.tril(jnp.asarray(rng.uniform(0.1, 1, size=(m, m))))
        self.gram = linalg.add_diagonal(kernel(self.z, self.z), jnp.asarray(JITTER))
        self.noise = jnp.asarray(NOISE)

    def sums(self, rows=slice(None), precisions=None):
        x, y = self.x[rows], self.y[rows]
        precisions = None if precisions is None else precisions[rows]
        covariances = eqx.Partial(kernel, self.z)
        return sparse_gp.row_sums(
            covariances, linalg.inverse_factor(self.gram), x, jnp.full(len(y), PRIOR), y, precisions
        )


@pytest.fixture
def case(rng):
    return Case(rng)


@jax.jit
def kernel(a, b):
    return PRIOR * kernels.squared_exponential(a, b, jnp.asarray(1.3))


@pytest.mark.slow
def test_the_bound_at_any_q_is_that_of_gpjax(case):
    rbf = gpx.kernels.RBF(lengthscale=1.3, variance=PRIOR)
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=rbf, jitter=JITTER)
    oracle = prior * gpx.likelihoods.Gaussian(obs_stddev=np.sqrt(NOISE))
    data = gpx.Dataset(X=case.x, y=case.y[:, None])
    ours = sparse_gp.variational_bound(case.sums(), case.mean, case.root, case.noise)
    whitened = gpx.variational_families.WhitenedVariationalGaussian(oracle, case.z, case.mean[:, None], case.root)
    np.testing.assert_allclose(ours, gpx.objectives.elbo(whitened, data), rtol=tolerance(1e-5, 1e-4))
    # u = L v in plain coordinates.
    factor = jnp.linalg.cholesky(case.gram)
    plain = gpx.variational_families.VariationalGaussian(
        oracle, case.z, (factor @ case.mean)[:, None], factor @ case.root
    )
    np.testing.assert_allclose(ours, gpx.objectives.elbo(plain, data), rtol=tolerance(1e-5, 1e-4))


def test_the_bound_is_the_expected_likelihood_less_the_divergence(case):
    """Row by row, with precisions of their own, and twice as many rows as there are."""
    loadings = np.linalg.solve(np.linalg.cholesky(np.asarray(case.gram, float)), np.asarray(kernel(case.z, case.x)))
    mean, covariance = np.asarray(case.mean, float), np.asarray(case.root @ case.root.T, float)
    variances = NOISE / np.asarray(case.precisions)
    expected = 0
    for a, y, variance in zip(loadings.T, np.asarray(case.y), variances, strict=True):
        variance_of_f = PRIOR - a @ a + a @ covariance @ a
        expected -= 0.5 * (np.log(2 * np.pi * variance) + ((y - a @ mean) ** 2 + variance_of_f) / variance)
    divergence = 0.5 * (np.trace(covariance) + mean @ mean - len(mean) - np.linalg.slogdet(covariance)[1])
    ours = sparse_gp.variational_bound(case.sums(precisions=case.precisions), case.mean, case.root, case.noise, 2.0)
    np.testing.assert_allclose(ours, 2 * expected - divergence, rtol=tolerance(1e-9, 1e-4))


@pytest.mark.parametrize("equal_noise", [True, False])
def test_the_bound_at_the_optimal_q_is_the_collapsed_one(case, equal_noise):
    sums = case.sums(precisions=None if equal_noise else case.precisions)
    mean, root = stochastic.moments(stochastic.optimal(sums, case.noise))
    best = sparse_gp.collapsed_bound(sums, case.noise)
    np.testing.assert_allclose(
        sparse_gp.variational_bound(sums, mean, root, case.noise), best, rtol=tolerance(1e-9, 1e-4)
    )
    assert sparse_gp.variational_bound(sums, mean + 0.1, root, case.noise) < best
    assert sparse_gp.variational_bound(sums, mean, 0.9 * root, case.noise) < best


def test_the_bounds_of_equal_minibatches_average_to_that_of_all_rows(case):
    bound = lambda sums, scale: sparse_gp.variational_bound(sums, case.mean, case.root, case.noise, scale)
    batches = [case.sums(slice(i, i + 10), case.precisions) for i in range(0, 40, 10)]
    average = np.mean([float(bound(sums, 4.0)) for sums in batches])
    np.testing.assert_allclose(average, bound(case.sums(precisions=case.precisions), 1.0), rtol=tolerance(1e-9, 1e-4))


# The steps of q


def test_a_natural_step_follows_the_gradient_by_the_expectation_parameters(case):
    """With E[v] and E[v v'] for coordinates the gradient of the bound is that of the natural parameters."""
    sums, scale, size = case.sums(slice(0, 10)), 4.0, 0.2
    covariance = case.root @ case.root.T
    precision = jnp.linalg.inv(covariance)
    sites = stochastic.Sites(precision - jnp.eye(7), precision @ case.mean)

    def bound(first, second):
        root = jnp.linalg.cholesky(second - jnp.outer(first, first))
        return sparse_gp.variational_bound(sums, first, root, case.noise, scale)

    slopes = jax.jit(jax.grad(bound, (0, 1)))(case.mean, covariance + jnp.outer(case.mean, case.mean))
    stepped = stochastic.natural_step(sites, stochastic.optimal(sums, case.noise, scale), size)
    close = {"rtol": tolerance(1e-8, 2e-2), "atol": tolerance(1e-8, 2e-1)}
    np.testing.assert_allclose(stepped.shift - sites.shift, size * slopes[0], **close)
    symmetric = (slopes[1] + slopes[1].T) / 2
    np.testing.assert_allclose(-(stepped.precision - sites.precision) / 2, size * symmetric, **close)


def test_one_whole_natural_step_on_all_rows_is_the_optimal_q(case):
    sums, whiten = case.sums(precisions=case.precisions), linalg.inverse_factor(case.gram)
    start = stochastic.Sites(2 * jnp.eye(7), case.mean)
    mean, root = stochastic.moments(stochastic.natural_step(start, stochastic.optimal(sums, case.noise), 1.0))
    posterior = sparse_gp.posterior(sums, whiten, case.noise)
    close = {"rtol": tolerance(1e-8, 1e-3), "atol": tolerance(1e-8, 1e-3)}
    np.testing.assert_allclose(whiten.T @ mean, posterior.weights, **close)
    unknown = whiten.T @ root
    np.testing.assert_allclose(unknown @ unknown.T, posterior.widen.T @ posterior.widen, **close)


def test_transported_sites_are_the_same_likelihood_under_another_prior(case):
    """q(u) = p(u) t(u) / Z with the same t(u): its precision and shift differ from the prior's by the same amount."""
    sites = stochastic.optimal(case.sums(), case.noise)
    other = linalg.add_diagonal(
        2.5 * kernels.squared_exponential(case.z, case.z, jnp.asarray(0.8)), jnp.asarray(JITTER)
    )
    moved = stochastic.transported(sites, linalg.inverse_factor(case.gram), jnp.linalg.cholesky(other))

    def likelihood(sites, gram):
        mean, root = stochastic.moments(sites)
        factor = np.linalg.cholesky(np.asarray(gram, float))
        precision = np.linalg.inv(factor @ np.asarray(root @ root.T, float) @ factor.T)
        return precision - np.linalg.inv(np.asarray(gram, float)), precision @ factor @ np.asarray(mean, float)

    for before, after in zip(likelihood(sites, case.gram), likelihood(moved, other), strict=True):
        np.testing.assert_allclose(after, before, rtol=tolerance(1e-6, 5e-2), atol=tolerance(1e-6, 5e-2))


# Whole fits


def start(lengthscale, noise, logit_fraction=None):
    part = SquaredExponential(jnp.log(jnp.asarray(0.5)), jnp.log(jnp.asarray(lengthscale)))
    logit_fraction = None if logit_fraction is None else jnp.asarray(logit_fraction)
    return Model(IOKernel(part, part), jnp.log(jnp.asarray(noise)), logit_fraction)


def starts(sample):
    """One start, far from the optimum."""
    return jax.tree.map(lambda a: a[None], start(4.0, 0.9, None if sample.base_variance is None else 0.0))


def table(seed=5):
    """Columns: an input, the base's mean and its relative variance, the target; in the default precision."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=ROWS)
    base, variance = np.cos(x), np.exp(0.5 * x)
    y = np.sin(3 * x) + 0.5 * np.sqrt(variance) * rng.normal(size=ROWS)
    columns = np.column_stack([x, base, variance / variance.mean(), (y - y.mean()) / y.std()])
    return columns.astype(jax.dtypes.canonicalize_dtype(float))


class Reader:
    """Gives rows of the table, and remembers what it was asked for."""

    def __init__(self, columns, *, with_variance=False):
        self.columns, self.with_variance, self.asked = columns, with_variance, []

    def __call__(self, rows):
        self.asked.append(rows)
        columns = np.asarray(self.columns[rows])
        return Data(
            Points(jnp.asarray(columns[:, :1]), jnp.asarray(columns[:, 1:2])),
            columns[:, 3],
            columns[:, 2] if self.with_variance else None,
        )

    @property
    def all(self):
        return jax.tree.map(jnp.asarray, self(slice(0, len(self.columns))))


def fit(read, *, n=ROWS, key=KEY, epochs=30):
    """With a sample's fit that ends far from the optimum, so that the minibatches have something to do."""
    limits = {"tolerance": 0.0, "max_iterations": 1}
    asked = Stochastic(epochs=epochs, batch_size=64, num_inducing=INDUCING, ard=False, **limits)
    inference = asked.settled(n, GaussianNoise(), differentiable=False)
    return stochastic.maximize_bound(inference, starts, read, n, key=key)


@pytest.fixture(scope="module")
def fitted():
    return fit(Reader(table()))


@pytest.mark.slow
def test_it_reaches_the_optimum_of_the_collapsed_bound(fitted, monkeypatch):
    read, noise = Reader(table()), GaussianNoise()
    asked = Sparse(num_inducing=INDUCING, points="trained", ard=False, tolerance=0.0)
    way = whole.Way((asked.settled(ROWS, noise, differentiable=False),), noise)
    full = eqx.filter_jit(whole.maximize_evidence)(lambda data, noise: starts(data), read.all, way)
    monkeypatch.setattr(stochastic, "_LEARNING_RATE", 1e-6)
    barely = fit(read, epochs=1)
    assert barely.evidence < full.evidence - 0.1 * abs(full.evidence)  # the start is no solution
    assert fitted.evidence > full.evidence - 0.005 * abs(full.evidence)
    assert fitted.iterations == 30 * 10
    assert fitted.result == Result.STEP_LIMIT
    assert fitted.inference == "stochastic"


@pytest.mark.parametrize("with_variance", [pytest.param(False, marks=pytest.mark.slow), True])
def test_evidence_posterior_and_noise_are_those_of_all_rows(monkeypatch, with_variance):
    """In chunks that do not divide the rows."""
    monkeypatch.setattr(unread, "CHUNK_ROWS", 250)
    monkeypatch.setattr(stochastic, "_SAMPLE_ROWS", 100)
    read = Reader(table(), with_variance=with_variance)
    process = fit(read, epochs=2)
    assert (process.model.logit_fraction is not None) == with_variance
    if with_variance:
        assert process.model.logit_fraction != 0  # learned
    assert process.model.inducing is None
    assert process.points.inputs.shape == (INDUCING, 1)
    close = {"rtol": tolerance(1e-9, 1e-3), "atol": tolerance(1e-9, 1e-3)}
    sparse = eqx.tree_at(lambda m: m.inducing, process.model, process.points, is_leaf=lambda node: node is None)

    @jax.jit
    def of_all(rows):
        cross, prior = sparse.kernel(rows.points, process.points), sparse.kernel.diagonal(rows.points)
        latent = jax.vmap(gp.predict, (None, 0, 0))(model.posterior(sparse, rows, process.jitter), cross, prior)
        return model.evidence(sparse, rows, process.jitter), sparse.noise_variance(rows.points), latent

    evidence, noise_variance, expected = of_all(read.all)
    np.testing.assert_allclose(process.evidence, evidence, **close)
    np.testing.assert_allclose(process.noise_variance, noise_variance, **close)
    np.testing.assert_allclose(process(read.all.points), expected, atol=tolerance(1e-7, 1e-3))
    assert np.ptp(expected[0]) > 0.5


@pytest.mark.slow
def test_every_epoch_reads_equal_chunks_of_all_rows(monkeypatch):
    monkeypatch.setattr(unread, "CHUNK_ROWS", 250)
    monkeypatch.setattr(stochastic, "_SAMPLE_ROWS", 100)
    read = Reader(table()[:-1])
    fit(read, n=ROWS - 1, epochs=4)
    sample, *slices = read.asked
    assert len(np.unique(sample)) == 100
    assert (np.diff(sample) > 0).all()
    assert all(part.stop - part.start <= 250 for part in slices)
    counts = np.zeros(ROWS - 1, int)
    for part in slices:
        counts[part] += 1
    # 599 rows are three chunks of 199, two rows left out, in every epoch; and once more all of them at the end.
    assert counts.sum() == 4 * 3 * 199 + 599
    assert (counts[2:-2] == 5).all()
    assert counts.max() == 5
    epochs = {tuple(part.start // 199 for part in slices[3 * i : 3 * i + 3]) for i in range(4)}
    assert len(epochs) > 1  # not the same order in every epoch


def test_rows_of_a_file_are_those_of_an_array(fitted, tmp_path):
    np.save(tmp_path / "rows.npy", table())
    from_file = fit(Reader(np.load(tmp_path / "rows.npy", mmap_mode="r")))
    jax.tree.map(np.testing.assert_array_equal, eqx.filter(from_file, eqx.is_array), eqx.filter(fitted, eqx.is_array))


def test_the_key_decides(fitted):
    read = Reader(table())
    again, other = fit(read), fit(read, key=jax.random.key(4))
    assert again.evidence == fitted.evidence
    assert other.evidence != fitted.evidence


def test_rows_that_are_not_finite_are_reported(monkeypatch):
    monkeypatch.setattr(stochastic, "_SAMPLE_ROWS", 100)
    columns = table()
    columns[3, 3] = np.nan
    assert fit(Reader(columns), epochs=1).result == Result.NOT_FINITE


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"num_inducing": 0}, "num_inducing must be at least 1; got 0"),
    ],
)
def test_options_out_of_range(option, message):
    with pytest.raises(ValueError, match=message):
        Stochastic(**option)


def test_more_inducing_points_than_rows_to_choose_them_from(monkeypatch):
    monkeypatch.setattr(stochastic, "_SAMPLE_ROWS", 10)
    with pytest.raises(ValueError, match="num_inducing must be at most 10; got 20"):
        fit(Reader(table()))


def test_other_rows_than_asked_for():
    read = Reader(table())
    with pytest.raises(ValueError, match=r"the 600 rows asked for; got targets of shape \(599,\)"):
        fit(lambda rows: jax.tree.map(lambda a: a[:-1], read(rows)))
