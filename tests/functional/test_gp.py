"""Gaussian-process algebra, against gpjax and textbook formulas in NumPy."""

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpjax.objectives import collapsed_elbo, conjugate_mll, elbo

from jaxcal.functional import conditional_variance, gp, kernels, linalg, sparse_gp

NOISE, JITTER = 0.3, 1e-6
X64 = jax.config.jax_enable_x64
pytestmark = [
    pytest.mark.contract_in_32_bits,
    pytest.mark.filterwarnings("ignore:X is not of type float64", "ignore:y is not of type float64"),
]


@pytest.fixture
def problem(rng):
    """Rows, inducing points, new points and targets; float64 where it is on."""
    x = jnp.asarray(rng.normal(size=(40, 3)))
    return x, x[:7] + 0.1, jnp.asarray(rng.normal(size=(5, 3))), jnp.sin(x[:, 0]) + x[:, 1]


@jax.jit
def kernel(a, b):
    return 1.7 * kernels.squared_exponential(a, b, jnp.asarray(1.3))


def oracle():
    rbf = gpx.kernels.RBF(lengthscale=1.3, variance=1.7)
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=rbf, jitter=JITTER)
    return prior * gpx.likelihoods.Gaussian(obs_stddev=np.sqrt(NOISE))


def moments(distribution):
    """The means and variances of a distribution of gpjax."""
    return distribution.mean, jnp.diagonal(distribution.covariance())


def row_sums(x, z, y, jitter, **options):
    """The inverse factor of the covariance at z, and the sums over the rows x."""
    whiten = linalg.inverse_factor(linalg.add_diagonal(kernel(z, z), jnp.asarray(jitter)))
    return whiten, sparse_gp.row_sums(eqx.Partial(kernel, z), whiten, x, jnp.full(len(y), 1.7), y, **options)


@pytest.fixture
def streamed(rng):
    """As `problem`, with more rows than a chunk takes and no multiple of it; their precisions; no new points."""
    x = jnp.asarray(rng.normal(size=(700, 3)))
    y = jnp.sin(x[:, 0]) + x[:, 1] + np.sqrt(NOISE) * rng.normal(size=700)
    return x, x[:12] + 0.1, y, jnp.asarray(rng.uniform(0.2, 3, size=700))


class Covariances(eqx.Module):
    """The covariances of inducing points with rows; what is differentiated by are its arrays."""

    inducing: jax.Array
    log_lengthscale: jax.Array
    log_variance: jax.Array

    def __call__(self, rows):
        return kernels.squared_exponential(
            self.inducing, rows, jnp.exp(self.log_lengthscale), jnp.exp(self.log_variance)
        )


@jax.jit
def predictions(posterior, new, conditioning):
    """The latent means and variances at new points."""
    return jax.vmap(lambda k: gp.predict(posterior, k, jnp.asarray(1.7)))(kernel(new, conditioning))


def tolerance(x, strict, loose):
    return strict if x.dtype == jnp.float64 else loose


def test_squared_exponential_is_that_of_gpjax(problem):
    x, z, _, _ = problem
    lengthscales = jnp.asarray([0.5, 1.0, 2.0])
    expected = gpx.kernels.RBF(lengthscale=lengthscales).cross_covariance(x, z)
    np.testing.assert_allclose(
        kernels.squared_exponential(x, z, lengthscales), expected, atol=tolerance(x, 1e-13, 2e-6)
    )


def test_squared_exponential_far_from_the_origin(problem):
    x, z, _, _ = problem
    near = kernels.squared_exponential(x, z, jnp.asarray(1.0))
    far = kernels.squared_exponential(x + 1024, z + 1024, jnp.asarray(1.0))
    np.testing.assert_allclose(near, far, atol=tolerance(x, 1e-11, 2e-3))


def test_exact_likelihood_and_prediction_are_those_of_gpjax(problem):
    x, _, new, y = problem
    gram = linalg.add_diagonal(kernel(x, x), jnp.asarray(NOISE + JITTER))
    data = gpx.Dataset(X=x, y=y[:, None])
    tight = tolerance(x, 1e-9, 1e-4)
    likelihood = jax.jit(lambda: conjugate_mll(oracle(), data))()
    np.testing.assert_allclose(jax.jit(gp.log_likelihood)(gram, y), likelihood, rtol=tight)

    mean, variance = predictions(jax.jit(gp.posterior)(gram, y), new, x)
    expected, expected_variance = jax.jit(lambda: moments(oracle().condition(data)(new)))()
    np.testing.assert_allclose(mean, expected, atol=tolerance(x, 1e-9, 1e-4))
    # gpjax adds its jitter to the predicted variances as well.
    np.testing.assert_allclose(variance, expected_variance - JITTER, atol=tolerance(x, 1e-9, 1e-4))


def test_collapsed_bound_and_prediction_are_those_of_gpjax(problem):
    x, z, new, y = problem
    family = gpx.variational_families.CollapsedVariationalGaussian(model=oracle(), inducing_inputs=z)
    data = gpx.Dataset(X=x, y=y[:, None])

    @jax.jit
    def ours():
        whiten, sums = row_sums(x, z, y, JITTER)
        posterior = sparse_gp.posterior(sums, whiten, jnp.asarray(NOISE))
        return sparse_gp.collapsed_bound(sums, jnp.asarray(NOISE)), predictions(posterior, new, z)

    bound, (mean, variance) = ours()
    np.testing.assert_allclose(bound, jax.jit(lambda: collapsed_elbo(family, data))(), rtol=tolerance(x, 1e-9, 1e-4))
    expected, expected_variance = jax.jit(lambda: moments(family.condition(data)(new)))()
    np.testing.assert_allclose(mean, expected, atol=tolerance(x, 1e-6, 1e-3))
    np.testing.assert_allclose(variance, expected_variance - JITTER, atol=tolerance(x, 1e-6, 1e-3))


def test_collapsed_bound_is_exact_with_every_row_inducing(problem):
    x, z, _, y = problem
    exact = gp.log_likelihood(linalg.add_diagonal(kernel(x, x), jnp.asarray(NOISE)), y)

    def bound(points):
        _, sums = row_sums(x, points, y, tolerance(x, 1e-10, 1e-5))
        return sparse_gp.collapsed_bound(sums, jnp.asarray(NOISE))

    np.testing.assert_allclose(bound(x), exact, rtol=tolerance(x, 1e-7, 1e-3))
    assert bound(z) < exact


def test_sparse_prediction_with_precisions_is_the_exact_one_with_every_row_inducing(problem, rng):
    x, _, new, y = problem
    precisions = jnp.asarray(rng.uniform(0.2, 3, size=40))
    exact = gp.posterior(linalg.add_diagonal(kernel(x, x), NOISE / precisions), y)
    whiten, sums = row_sums(x, x, y, tolerance(x, 1e-10, 1e-5), precisions=precisions)
    sparse = sparse_gp.posterior(sums, whiten, jnp.asarray(NOISE))
    for ours, expected in zip(predictions(sparse, new, x), predictions(exact, new, x), strict=True):
        np.testing.assert_allclose(ours, expected, atol=tolerance(x, 1e-8, 2e-4))


@pytest.mark.skipif(not X64, reason="at fewer rows than a chunk takes it is tested in float32 as well")
@pytest.mark.slow
def test_streamed_bound_is_that_of_gpjax_and_of_its_svgp_at_the_optimal_q(streamed):
    x, z, y, _ = streamed
    data = gpx.Dataset(X=x, y=y[:, None])
    _, sums = row_sums(x, z, y, JITTER)
    bound = sparse_gp.collapsed_bound(sums, jnp.asarray(NOISE))
    collapsed = gpx.variational_families.CollapsedVariationalGaussian(model=oracle(), inducing_inputs=z)
    expected = eqx.filter_jit(collapsed_elbo)(collapsed, data)
    np.testing.assert_allclose(bound, expected, rtol=1e-11)

    # Titsias (2009), eq. 10: q(u) = N(K_zz C K_zx y / noise, K_zz C K_zz), C = (K_zz + K_zx K_xz / noise)^-1.
    gram, cross = np.asarray(kernel(z, z), float) + JITTER * np.eye(12), np.asarray(kernel(z, x), float)
    weights = np.linalg.solve(gram + cross @ cross.T / NOISE, np.column_stack([cross @ y / NOISE, gram]))
    mean, covariance = gram @ weights[:, :1], gram @ weights[:, 1:]
    svgp = gpx.variational_families.VariationalGaussian(
        model=oracle(),
        inducing_inputs=z,
        variational_mean=jnp.asarray(mean, x.dtype),
        variational_root_covariance=jnp.asarray(np.linalg.cholesky((covariance + covariance.T) / 2), x.dtype),
    )
    # gpjax adds its jitter to the variance of every row as well.
    expected = eqx.filter_jit(elbo)(svgp, data) + 700 * JITTER / (2 * NOISE)
    np.testing.assert_allclose(bound, expected, rtol=1e-11)


@pytest.mark.parametrize(
    ("used", "learned"),
    [
        (("outer", "cross"), (0, 1, 2, 3, 4)),
        (("outer",), (0,)),
        (("cross",), (1,)),
        (("outer", "cross"), (2,)),
        (("outer", "cross"), (3,)),
    ],
    ids=["all", "covariances", "whiten", "precisions", "rows"],
)
def test_gradients_of_the_streamed_sums_are_those_of_autodiff(streamed, rng, used, learned):
    x, z, y, precisions = streamed
    covariances = Covariances(z, jnp.asarray(0.3), jnp.asarray(0.5))
    whiten = linalg.inverse_factor(linalg.add_diagonal(covariances(z), JITTER))
    slopes = {"outer": jnp.asarray(rng.normal(size=(12, 12))), "cross": jnp.asarray(rng.normal(size=12))}

    def streaming(covariances, whiten, precisions, x, y):
        sums = sparse_gp.row_sums(covariances, whiten, x, jnp.ones(700), y, precisions)
        return sum(jnp.sum(slopes[name] * getattr(sums, name)) for name in used)

    def plain(covariances, whiten, precisions, x, y):
        root = whiten @ covariances(x)
        sums = {"outer": (root * precisions[None]) @ root.T, "cross": root @ (precisions * y)}
        return sum(jnp.sum(slopes[name] * sums[name]) for name in used)

    ours, theirs = (
        jax.tree.leaves(jax.jit(jax.grad(fun, learned))(covariances, whiten, precisions, x, y))
        for fun in (streaming, plain)
    )
    assert len(ours) == sum((3, 1, 1, 1, 1)[argument] for argument in learned)
    for slope, expected in zip(ours, theirs, strict=True):
        assert jnp.linalg.norm(slope - expected) < tolerance(x, 1e-11, 1e-4) * jnp.linalg.norm(expected)


def textbook_bound(inducing, log_lengthscale, log_variance, log_noise, precisions, x, y):
    """Titsias (2009), eq. 9, with the covariance of all rows written out."""

    def covariance(a, b):
        distances = jnp.sum((a[:, None] - b[None]) ** 2, axis=-1)
        return jnp.exp(log_variance - distances / (2 * jnp.exp(log_lengthscale) ** 2))

    gram, cross = covariance(inducing, inducing) + JITTER * jnp.eye(len(inducing)), covariance(inducing, x)
    known, noise = cross.T @ jnp.linalg.solve(gram, cross), jnp.exp(log_noise) / precisions
    fit = jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros_like(y), known + jnp.diag(noise))
    return fit - jnp.sum((jnp.exp(log_variance) - jnp.diagonal(known)) / noise) / 2


@pytest.mark.skipif(not X64, reason="the textbook formula needs float64")
@pytest.mark.parametrize(("dtype", "close"), [(jnp.float64, 1e-10), (jnp.float32, 1e-4)], ids=["float64", "float32"])
def test_streamed_bound_with_precisions_and_its_gradients_are_the_textbooks(streamed, dtype, close):
    x, z, y, precisions = streamed

    def bound(inducing, log_lengthscale, log_variance, log_noise, precisions, x, y):
        covariances = Covariances(inducing, log_lengthscale, log_variance)
        whiten = linalg.inverse_factor(linalg.add_diagonal(covariances(inducing), JITTER))
        prior = jnp.full_like(y, jnp.exp(log_variance))
        return sparse_gp.collapsed_bound(
            sparse_gp.row_sums(covariances, whiten, x, prior, y, precisions), jnp.exp(log_noise)
        )

    # So long a lengthscale that in float32 the order of products decides about one digit or four.
    arguments = z, jnp.asarray(0.8), jnp.asarray(0.5), jnp.log(jnp.asarray(NOISE)), precisions, x, y
    value, slopes = jax.jit(jax.value_and_grad(bound, tuple(range(5))))(*(a.astype(dtype) for a in arguments))
    expected_value, expected = jax.jit(jax.value_and_grad(textbook_bound, tuple(range(5))))(*arguments)
    assert {a.dtype for a in (value, *slopes)} == {jnp.dtype(dtype)}
    np.testing.assert_allclose(value, expected_value, rtol=close / 10)
    for slope, of_textbook in zip(slopes, expected, strict=True):
        assert jnp.linalg.norm(slope - of_textbook) < close * jnp.linalg.norm(of_textbook)


def test_gradient_of_the_exact_likelihood_is_that_of_autodiff(problem):
    x, _, _, y = problem

    def gram(log_lengthscale):
        return linalg.add_diagonal(
            1.7 * kernels.squared_exponential(x, x, jnp.exp(log_lengthscale)), jnp.asarray(NOISE)
        )

    def plain(log_lengthscale, y):
        return jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros(40), gram(log_lengthscale))

    def ours(log_lengthscale, y):
        return gp.log_likelihood(gram(log_lengthscale), y)

    at = jnp.asarray(0.2)
    close = tolerance(x, 1e-9, 2e-3)
    for argument in (0, 1):
        np.testing.assert_allclose(
            jax.jit(jax.grad(ours, argument))(at, y), jax.jit(jax.grad(plain, argument))(at, y), rtol=close, atol=close
        )
    forward = jax.jit(lambda at: jax.jvp(lambda t: ours(t, y), (at,), (at,))[1])(at)
    np.testing.assert_allclose(forward, at * jax.jit(jax.grad(ours))(at, y), rtol=1e-4)


def brute_force_greedy(gram, m):
    """The row of largest conditional variance, by a full solve at each step."""
    rows = []
    for _ in range(m):
        known = gram[np.ix_(rows, rows)]
        cross = gram[:, rows]
        variance = (
            np.diag(gram) - np.einsum("ij,ji->i", cross, np.linalg.solve(known, cross.T)) if rows else np.diag(gram)
        )
        variance = np.where(np.isin(np.arange(len(gram)), rows), -np.inf, variance)
        rows.append(int(np.argmax(variance)))
    return rows


def test_greedy_rows_are_those_of_largest_conditional_variance(problem):
    x, _, _, _ = problem
    gram = kernel(x, x) + jnp.outer(x[:, 0], x[:, 0])  # rows of different variances
    rows = sparse_gp.greedy_rows(lambda row: gram[row], jnp.diagonal(gram), 9)
    assert rows.tolist() == brute_force_greedy(np.asarray(gram, float), 9)


def test_greedy_rows_are_distinct_among_duplicates():
    x = jnp.repeat(jnp.arange(3.0), 4)[:, None]
    gram = kernel(x, x)
    rows = sparse_gp.greedy_rows(lambda row: gram[row], jnp.diagonal(gram), 12)
    assert sorted(rows.tolist()) == list(range(12))
    assert len(set(x[rows[:3], 0].tolist())) == 3


# ------------------------------------------------------------------ rows left out


def without(i, *arrays):
    return [jnp.delete(array, i, axis=0) for array in arrays]


def test_rows_left_out_exactly_are_those_of_a_refit(problem):
    x, _, _, y = problem
    gram = linalg.add_diagonal(kernel(x, x), NOISE)
    found = gp.leave_one_out(gp.posterior(gram, y))
    np.testing.assert_allclose(
        found.variance, conditional_variance.leave_one_out_variance(gram), rtol=1e-9 if X64 else 1e-4
    )
    for i in (0, 17, 39):
        x_rest, y_rest = without(i, x, y)
        cross = np.asarray(kernel(x_rest, x[i : i + 1]))[:, 0]
        weights = np.linalg.solve(np.asarray(kernel(x_rest, x_rest)) + NOISE * np.eye(39), cross)
        np.testing.assert_allclose(found.error[i], y[i] - weights @ y_rest, rtol=1e-9 if X64 else 1e-3)
        np.testing.assert_allclose(found.variance[i], 1.7 + NOISE - weights @ cross, rtol=1e-9 if X64 else 1e-3)


def test_rows_left_out_of_a_sparse_posterior_are_those_of_a_refit(problem):
    x, z, _, y = problem
    noise, jitter = jnp.asarray(NOISE), 1e-4
    whiten, sums = row_sums(x, z, y, jitter)
    posterior = sparse_gp.posterior(sums, whiten, noise)
    for i in (0, 17, 39):
        cross, prior = kernel(z, x[i : i + 1])[:, 0], jnp.asarray(1.7)
        x_rest, y_rest = without(i, x, y)
        refit = sparse_gp.posterior(row_sums(x_rest, z, y_rest, jitter)[1], whiten, noise)
        mean, variance = gp.predict(refit, cross, prior)
        found = sparse_gp.leave_one_out(posterior, cross, y[i], prior, noise)
        np.testing.assert_allclose(found.error, y[i] - mean, rtol=1e-8 if X64 else 1e-2)
        np.testing.assert_allclose(found.variance, variance + NOISE, rtol=1e-8 if X64 else 1e-3)


def test_triangular_matrices_of_many_rows_are_inverted_solved_and_multiplied_by_parts(rng):
    factor = np.tril(rng.normal(size=(300, 300)) / 20, -1) + np.diag(rng.uniform(1, 2, size=300))
    right = rng.normal(size=(300, 3))
    exact = {"rtol": 1e-9, "atol": 1e-9} if X64 else {"rtol": 1e-3, "atol": 1e-4}
    given = jnp.asarray(factor), jnp.asarray(right)
    np.testing.assert_allclose(linalg.inverse_triangular(given[0]), np.linalg.inv(factor), **exact)
    np.testing.assert_allclose(linalg.crossproduct(given[0]), factor.T @ factor, **exact)
    np.testing.assert_allclose(linalg.solve_lower(*given), np.linalg.solve(factor, right), **exact)
    np.testing.assert_allclose(linalg.solve_lower(*given, transposed=True), np.linalg.solve(factor.T, right), **exact)
