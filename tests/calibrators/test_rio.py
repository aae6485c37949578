"""RIO: against gpjax and scipy, its equivariance, its batching, its answers to bad input."""

from functools import partial

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from jaxcal import Point, metrics, rio
from jaxcal.calibrators._base import check_base
from jaxcal.functional import gp, kernels, linalg
from jaxcal.gp import Exact, Nearest, Sparse, Stochastic

pytestmark = [
    pytest.mark.contract_in_32_bits,
    pytest.mark.filterwarnings("ignore:X is not of type float64", "ignore:y is not of type float64"),
]
X64 = jax.config.jax_enable_x64
# Where there is no noise, 32 bits warn of rounding.
without_noise = pytest.mark.filterwarnings("ignore:the uncertainty is hardly greater")
VARIANTS = [(kernel, target) for kernel in ("io", "input", "output") for target in ("residual", "outcome")]


# With one lengthscale for all inputs, unless ARD matters: what is compiled is shared.
fit_isotropic = partial(rio.fit, inference=Exact(ard=False))


def draw(seed):
    """Rows x [60, 2], a model that misses a part of the truth, and targets with noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(60, 2))
    model = 3 + np.sin(x[:, 0])
    y = model + 0.5 * x[:, 1] * model + 0.1 * rng.normal(size=60)
    return x, Point(model), y


@pytest.fixture(scope="module")
def data():
    return draw(7)


@pytest.fixture(scope="module")
def fitted(data):
    return fit_isotropic(*data)


def scaled(fit, x, base):
    """The features as the kernel takes them, [n, d + 1]."""
    return jnp.column_stack([fit.x_scaler(jnp.asarray(x, float)), fit.output_scaler(base.mean)])


def in_gpjax(fit, noise, jitter):
    """The model of gpjax with the hyperparameters of a fit."""
    columns = {"input": [0, 1], "output": [2]}
    parts = [
        gpx.kernels.RBF(
            active_dims=columns[name],
            lengthscale=jnp.exp(part.log_lengthscale),
            variance=jnp.exp(part.log_variance),
        )
        for name, part in (("input", fit.kernel.input), ("output", fit.kernel.output))
    ]
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=parts[0] + parts[1], jitter=jitter)
    return prior * gpx.likelihoods.Gaussian(obs_stddev=jnp.sqrt(noise))


@pytest.mark.skipif(not X64, reason="gpjax needs float64 for six digits")
@pytest.mark.slow
@pytest.mark.parametrize("inference", [Exact(), Sparse(num_inducing=15)], ids=["exact", "sparse"])
def test_bound_and_prediction_are_those_of_gpjax(data, inference):
    x, base, y = data
    fit = rio.fit(x, base, y, inference=inference)
    variances = float(jnp.exp(fit.kernel.input.log_variance) + jnp.exp(fit.kernel.output.log_variance))
    # gpjax refuses a jitter of zero; the exact fit needed none.
    jitter = float(fit.jitter) * variances or 1e-12
    model = in_gpjax(fit, fit.scaled_noise, jitter)
    targets = fit.target_scaler(jnp.asarray(y) - base.mean)
    train = gpx.Dataset(X=scaled(fit, x, base), y=targets[:, None])
    new_x, new_base = x[:5] + 0.1, Point(base.mean[:5] + 0.05)
    if fit.inference == "exact":
        evidence = gpx.objectives.conjugate_mll(model, train)
        expected = model.condition(train)(scaled(fit, new_x, new_base))
    else:
        inducing = jnp.column_stack(jax.tree.leaves(fit.points))
        family = gpx.variational_families.CollapsedVariationalGaussian(model=model, inducing_inputs=inducing)
        evidence = gpx.objectives.collapsed_elbo(family, train)
        expected = family.condition(train)(scaled(fit, new_x, new_base))
    np.testing.assert_allclose(fit.evidence, evidence, rtol=1e-6)

    mean = new_base.mean + fit.target_scaler.inverse(expected.mean)
    latent = fit(new_x, new_base, include_noise=False)
    np.testing.assert_allclose(latent.mean, mean, rtol=1e-6)
    variance = fit.target_scaler.scale**2 * (jnp.diagonal(expected.covariance()) - jitter)
    np.testing.assert_allclose(latent.variance, variance, rtol=1e-6, atol=1e-6)
    observed = fit(new_x, new_base)
    np.testing.assert_allclose(observed.variance, latent.variance + fit.noise_variance, rtol=1e-6)


@pytest.mark.skipif(not X64, reason="scipy works in float64")
def test_optimum_is_that_of_scipy():
    """Of data whose optimum lies within the bounds of the search."""
    x, base, y = draw(9)
    fit = rio.fit(x, base, y, inference=Exact(ard=False, tolerance=0.0))
    points = scaled(fit, x, base)
    targets = fit.target_scaler(jnp.asarray(y) - base.mean)

    @jax.jit
    @jax.value_and_grad
    def loss(p):
        v_in, l_in, v_out, l_out, noise = jnp.exp(p)
        gram = v_in * kernels.squared_exponential(points[:, :2], points[:, :2], l_in)
        gram = gram + v_out * kernels.squared_exponential(points[:, 2:], points[:, 2:], l_out)
        return -gp.log_likelihood(linalg.add_diagonal(gram, noise), targets)

    parts = fit.kernel.input, fit.kernel.output
    ours = [value for part in parts for value in (part.log_variance, part.log_lengthscale)]
    ours = np.array([float(value) for value in (*ours, jnp.log(fit.scaled_noise))])
    usual = np.log([0.5, np.sqrt(2), 0.5, 1, 0.1])
    from_ours, from_usual = (
        -scipy.optimize.minimize(lambda p: [np.asarray(v) for v in loss(p)], start, jac=True, method="L-BFGS-B").fun
        for start in (ours, usual)
    )
    np.testing.assert_allclose(fit.evidence, from_ours, rtol=1e-5)
    assert fit.evidence > from_usual * (1 - 1e-5)


def test_the_default_tolerance_costs_no_more_than_it_says(data, fitted):
    """No more than 0.1 nats, and no prediction that differs."""
    x, base, y = data
    converged = rio.fit(x, base, y, inference=Exact(ard=False, tolerance=0.0))
    # In 32 bits rounding may end both.
    assert fitted.iterations < converged.iterations or not X64
    assert converged.evidence - 0.1 < fitted.evidence <= converged.evidence + (1e-6 if X64 else 1e-2)
    difference = np.asarray(fitted(x, base).mean - converged(x, base).mean)
    assert np.sqrt(np.mean(difference**2)) < 0.1 * np.mean(converged(x, base).std)


@pytest.mark.parametrize(
    ("kernel", "target"),
    # One of each kind in `make test`.
    [pytest.param(*each, marks=pytest.mark.slow) if i not in (0, 5) else each for i, each in enumerate(VARIANTS)],
)
def test_every_row_of_table_1(data, kernel, target):
    x, base, y = data
    fit = fit_isotropic(x if kernel != "output" else None, base, y, kernel=kernel, target=target)
    after = fit(x if kernel != "output" else None, base)
    assert metrics.rmse(y, after) < metrics.rmse(y, Point(np.full(60, y.mean())))
    if target == "residual":
        assert metrics.rmse(y, after) <= metrics.rmse(y, base)
    assert 0.8 < metrics.coverage(y, after, confidence_level=0.9) <= 1


def test_learns_what_the_model_misses(data, fitted):
    x, base, y = data
    after = fitted(x, base)
    assert fitted.converged
    assert metrics.rmse(y, after) < 0.2 * metrics.rmse(y, base)
    np.testing.assert_allclose(fitted.noise_variance, 0.01, rtol=0.6)  # the noise of the data: std 0.1


@pytest.mark.parametrize(
    ("setting", "number"),
    [
        ({"inference": Sparse(num_inducing=25, ard=False, tolerance=0.0)}, 25),
        pytest.param({"preset": "paper"}, 50, marks=pytest.mark.slow),
    ],
    ids=["sparse", "paper"],
)
def test_sparse_bounds_approach_the_exact_evidence_from_below(data, setting, number):
    x, base, y = data
    exact, sparse = (rio.fit(x, base, y, **each) for each in ({"inference": Exact(ard=False, tolerance=0.0)}, setting))
    assert sparse.points.inputs.shape == (number, 2)
    assert metrics.rmse(sparse(x, base).mean, Point(exact(x, base).mean)) < 0.1
    if "preset" not in setting:  # whose target is in other units
        assert sparse.evidence < exact.evidence + 1e-2
        np.testing.assert_allclose(sparse.evidence, exact.evidence, atol=2.5)


@pytest.mark.slow
def test_ard_finds_the_column_that_matters(rng):
    x = rng.normal(size=(80, 3))
    base, y = Point(np.zeros(80)), np.sin(2 * x[:, 1]) + 0.05 * rng.normal(size=80)
    fit = rio.fit(x, base, y, kernel="input", inference=Exact(ard=True))
    lengthscales = jnp.exp(fit.kernel.input.log_lengthscale)
    assert lengthscales.shape == (3,)
    assert jnp.argmin(lengthscales) == 1
    assert lengthscales[1] < 0.3 * jnp.sort(lengthscales)[1]


@pytest.mark.slow
def test_gpjax_kernels_in_place_of_ours():
    x, base, y = draw(9)
    ours = rio.fit(x, base, y, inference=Exact(ard=False))
    # From near the optimum: there are others.
    pair = tuple(
        gpx.kernels.RBF(lengthscale=1.2 * jnp.exp(part.log_lengthscale), variance=0.7 * jnp.exp(part.log_variance))
        for part in (ours.kernel.input, ours.kernel.output)
    )
    theirs = rio.fit(x, base, y, kernel=pair)
    np.testing.assert_allclose(theirs.evidence, ours.evidence, rtol=1e-3)
    mixed = rio.fit(x, base, y, kernel=(gpx.kernels.Matern52(), gpx.kernels.Linear()))
    assert metrics.rmse(y, mixed(x, base)) < 0.5 * metrics.rmse(y, base)
    alone = rio.fit(None, base, y, kernel=(None, gpx.kernels.Matern32()))
    assert alone(None, base).mean.shape == (60,)


def test_gradients_of_predictions(data, fitted):
    x, base, _ = data
    rows = jnp.asarray(x[:4], float)

    # The output's lengthscale is short: in 32 bits it moves by less than the inputs.
    step, by_output = (1e-5, 1.0) if X64 else (1e-2, 0.1)

    def total(shift, column):
        moved = fitted(rows.at[:, column].add(shift), Point(base.mean[:4] + by_output * shift))
        return jnp.sum(moved.mean + moved.std)

    for column in (0, 1):
        slope = jax.grad(total)(0.0, column)
        numeric = (total(step, column) - total(-step, column)) / (2 * step)
        np.testing.assert_allclose(slope, numeric, rtol=1e-5 if X64 else 2e-2)


@pytest.mark.slow
def test_vmap_gives_what_one_run_at_a_time_gives(data):
    x, base, y = data
    xs, means, ys = (
        jnp.stack([x[:40], x[20:]]),
        jnp.stack([base.mean[:40], base.mean[20:]]),
        jnp.stack([y[:40], y[20:]]),
    )
    fits = eqx.filter_vmap(lambda x, mean, y: rio.fit(x, Point(mean), y))(xs, means, ys)
    together = eqx.filter_vmap(lambda fit, x, mean: fit(x, Point(mean)))(fits, xs, means)
    for run in range(2):
        alone = rio.fit(xs[run], Point(means[run]), ys[run])(xs[run], Point(means[run]))
        np.testing.assert_allclose(together.mean[run], alone.mean, atol=1e-3 if X64 else 2e-2)


@pytest.mark.slow
def test_vmap_is_one_batch_on_an_accelerator_and_a_loop_on_a_cpu():
    xs, ys = jnp.zeros((8, 60, 3)), jnp.zeros((8, 60))
    traced = jax.jit(jax.vmap(lambda x, mean, y: rio.fit(x, Point(mean), y).evidence)).trace(xs, ys, ys)
    for platform, batched in (("cpu", False), ("cuda", True), ("tpu", True)):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("8x60x60" in program) == batched, platform


@pytest.mark.slow
def test_degenerate_columns_are_without_effect(data, fitted):
    x, base, y = data
    wider = np.column_stack([x, np.full(60, 0.1)])
    np.testing.assert_allclose(fit_isotropic(wider, base, y)(wider, base).mean, fitted(x, base).mean, atol=2e-2)
    doubled = np.column_stack([x, x])
    assert np.isfinite(fit_isotropic(doubled, base, y)(doubled, base).std).all()


@pytest.mark.slow
@without_noise
@pytest.mark.parametrize("inference", [Exact(), Sparse(num_inducing=40)], ids=["exact", "sparse"])
def test_duplicated_rows_and_no_noise(inference):
    x = np.repeat(np.linspace(-1, 1, 6), 10)
    base, y = Point(np.zeros(60)), x**2
    fit = rio.fit(x, base, y, inference=inference)
    after = fit(x, base)
    np.testing.assert_allclose(after.mean, y, atol=2e-2)
    assert np.isfinite(after.std).all()


def test_a_covariance_that_no_jitter_mends_is_reported():
    class Indefinite(gpx.kernels.RBF):
        def __call__(self, x, y):
            return -10.0 * super().__call__(x, y) + (x == y).all()

    x = np.linspace(-1, 1, 20)
    with pytest.raises(FloatingPointError, match="could not be factorized"):
        rio.fit(x, Point(np.zeros(20)), x, kernel=(Indefinite(), None))
    fit = rio.fit(x, Point(np.zeros(20)), x, kernel=(Indefinite(), None), throw=False)
    assert not fit.converged


def test_noise_that_rounding_hides_is_warned_of(data):
    x, base, _ = data
    y = base.mean + jnp.sin(3 * x[:, 0])
    single = [jnp.asarray(a, jnp.float32) for a in (x, base.mean, y)]
    with pytest.warns(UserWarning, match="rounding in float32"):
        fit_isotropic(single[0], Point(single[1]), single[2])
    if X64:
        fit_isotropic(x, base, y)


def test_a_noise_variance_out_of_range_is_warned_of(data):
    x, base, y = data
    large = 1e160 if X64 else 1e25
    fitted = fit_isotropic(x, Point(large * base.mean), large * y)
    with pytest.warns(UserWarning, match="squared units"):
        assert np.isinf(fitted.noise_variance)


@without_noise
def test_integers_and_one_column():
    x = np.arange(20)
    fit = rio.fit(x, Point(10 * x), x**2)
    assert metrics.rmse(x**2, fit(x, Point(10 * x))) < 10


@pytest.mark.slow
def test_more_inducing_points_than_rows(data):
    x, base, y = data
    with pytest.warns(UserWarning, match="400, but there are 60 rows"):
        fit = rio.fit(x, base, y, inference=Sparse(num_inducing=400))
    assert fit.points.inputs.shape == (60, 2)


NAN_AT_3 = np.where(np.arange(60) == 3, np.nan, 1.0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": NAN_AT_3}, ValueError, "y holds 1 values that are NaN or infinite, the first at index 3"),
        (
            {"x": NAN_AT_3},
            ValueError,
            r"x holds 1 values that are NaN or infinite, the first at index \(3, 0\)",
        ),
        ({"y": np.ones((60, 1))}, ValueError, r"did you mean y\[:, 0\]"),
        ({"y": np.ones(59)}, ValueError, "base.mean has 60 rows where 59 are expected"),
        ({"x": np.ones((59, 2))}, ValueError, "x has 59 rows where 60 are expected"),
        ({"x": np.ones((60, 0))}, ValueError, "no columns"),
        ({"x": None}, ValueError, "x is None, but the kernel depends on the inputs"),
        ({"y": np.ones(0)}, ValueError, "y is empty"),
        (
            {"y": np.ones(1), "base": Point(np.ones(1)), "x": np.ones((1, 1))},
            ValueError,
            "at least 2 are needed",
        ),
        ({"y": np.full(60, 1j)}, ValueError, "y must hold real numbers; got dtype complex"),
        ({"kernel": "both"}, ValueError, "kernel must be one of 'io', 'input', 'output'; got 'both'"),
        ({"kernel": (None, None)}, ValueError, "pair of gpjax kernels"),
        ({"kernel": ("io", None)}, TypeError, "each kernel must be a kernel of gpjax; got str"),
        ({"preset": "svgp"}, ValueError, "preset must be one of None, 'paper'; got 'svgp'"),
        ({"target": "error"}, ValueError, "target must be one of"),
    ],
)
def test_bad_input(data, change, error, message):
    x, base, y = data
    arguments = {"x": x, "base": base, "y": y, **change}
    with pytest.raises(error, match=message):
        rio.fit(**arguments)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_iterations": 0}, "max_iterations must be at least 1; got 0"),
        ({"tolerance": -1.0}, "tolerance must not be negative; got -1.0"),
    ],
)
@pytest.mark.parametrize("inference", [Exact, Sparse, Nearest, Stochastic])
def test_options_of_an_inference_out_of_range(inference, option, message):
    with pytest.raises(ValueError, match=message):
        inference(**option)


def test_predictions_must_come_as_a_distribution():
    with pytest.raises(TypeError, match=r"got ndarray. Wrap point predictions as jaxcal.Point\(mean\)"):
        check_base(np.ones(60))


@without_noise
def test_constant_residuals_and_outcomes(data):
    x, base, _ = data
    with pytest.raises(ValueError, match=r"residuals y - base.mean are constant \(3\)"):
        rio.fit(x, base, np.asarray(base.mean) + 3)
    with pytest.raises(ValueError, match=r"y is constant \(2\)"):
        rio.fit(x, base, np.full(60, 2.0), target="outcome")
    assert fit_isotropic(x, base, np.full(60, 2.0)).converged


def test_prediction_on_other_columns(data, fitted):
    x, base, _ = data
    with pytest.raises(ValueError, match="x has 1 columns; the fit had 2"):
        fitted(x[:, 0], base)
    with pytest.raises(ValueError, match="x has 5 rows where 60 are expected"):
        fitted(x[:5], base)
