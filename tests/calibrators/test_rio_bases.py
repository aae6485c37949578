"""RIO on bases of several outputs, with a std of their own, or that explain little of what there is to explain."""

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal import Normal, Point, metrics, rio
from jaxcal.frames import unread
from jaxcal.gp import Exact, Sparse, Stochastic, model
from jaxcal.gp.inference import stochastic

pytestmark = [pytest.mark.contract_in_32_bits, pytest.mark.usefixtures("own_programs")]

X64 = jax.config.jax_enable_x64
# Equal numbers of rows and columns everywhere: what is compiled is shared.
ROWS = 80
needs_float64 = pytest.mark.skipif(not X64, reason="optima are told apart by digits that float32 lacks")

# Without its stds the noise of these data has heavy tails, and the fit says so.
has_outliers = pytest.mark.filterwarnings("ignore:row .* standard deviations from what the other rows say")


def fit_to_the_optimum(x, base, y, **options):
    """With one lengthscale for all inputs."""
    return rio.fit(x, base, y, inference=Exact(ard=False, tolerance=0.0), **options)


def noisy(rng, num_rows, *, follows_std):
    """Inputs, a base with stds that differ by factors, and targets with noise of these stds, or of 0.2 throughout."""
    x = rng.uniform(-2, 2, size=(num_rows, 2))
    mean, std = np.sin(x[:, 0]), 0.2 * np.exp(0.8 * rng.normal(size=num_rows))
    y = mean + 0.3 * x[:, 1] + (std if follows_std else 0.2) * rng.normal(size=num_rows)
    return x, Normal(mean, std), y


@pytest.fixture(scope="module")
def data():
    """A training and a test set whose noise the base knows."""
    rng = np.random.default_rng(2)
    return noisy(rng, ROWS, follows_std=True), noisy(rng, 400, follows_std=True)


@pytest.fixture(scope="module")
def fitted(data):
    return fit_to_the_optimum(*data[0])


def fraction(fit):
    return float(jax.nn.sigmoid(fit.process.model.logit_fraction))


def nlpd(fit, base, x, y):
    return float(-jnp.mean(fit(x, base).log_prob(y)))


@pytest.mark.slow
@has_outliers
def test_noise_follows_a_std_that_is_right(data, fitted):
    (x, base, y), (new_x, new_base, new_y) = data
    alone = fit_to_the_optimum(x, Point(base.mean), y)
    assert alone.process.model.logit_fraction is None
    assert fraction(fitted) > 0.95  # it starts at a half
    assert fitted.evidence > alone.evidence + 0.4 * ROWS
    assert nlpd(fitted, new_base, new_x, new_y) < nlpd(alone, Point(new_base.mean), new_x, new_y) - 0.3
    # Each row has the noise that it was drawn with.
    distribution, latent = fitted(new_x, new_base), fitted(new_x, new_base, include_noise=False)
    noise = jnp.sqrt(distribution.variance - latent.variance)
    np.testing.assert_allclose(noise, new_base.std, rtol=0.1)


@pytest.mark.slow
def test_noise_ignores_a_std_that_tells_nothing():
    rng = np.random.default_rng(0)
    x, base, y = noisy(rng, ROWS, follows_std=False)
    new_x, new_base, new_y = noisy(rng, 400, follows_std=False)
    fit, alone = fit_to_the_optimum(x, base, y), fit_to_the_optimum(x, Point(base.mean), y)
    assert fraction(fit) < 0.05
    assert fit.evidence > alone.evidence - (1e-4 if X64 else 1e-2)
    difference = nlpd(fit, new_base, new_x, new_y) - nlpd(alone, Point(new_base.mean), new_x, new_y)
    assert abs(difference) < 1e-3


@needs_float64
def test_sparse_process_with_every_row_inducing_is_the_exact_one(data, fitted):
    (_, base, y), (new_x, new_base, _) = data
    targets, base_variance = fitted.target_scaler(jnp.asarray(y) - base.mean), base.variance / jnp.mean(base.variance)
    rows = model.Data(fitted.points, targets, base_variance)
    is_none = lambda node: node is None
    through_all = eqx.tree_at(lambda m: m.inducing, fitted.process.model, fitted.points, is_leaf=is_none)
    np.testing.assert_allclose(jax.jit(model.evidence)(through_all, rows, 1e-9), fitted.evidence, rtol=1e-6)
    sparse_posterior = jax.jit(model.posterior)(through_all, rows, 1e-9)
    assert sparse_posterior.widen is not None
    sparse = eqx.tree_at(lambda fit: fit.process.posterior, fitted, sparse_posterior)
    ours, exact = sparse(new_x, new_base), fitted(new_x, new_base)
    np.testing.assert_allclose(ours.mean, exact.mean, atol=1e-6)
    np.testing.assert_allclose(ours.std, exact.std, atol=1e-6)


@pytest.mark.parametrize(("factor", "shift"), [(1e-9, 0), (1e9, 0), (-2.0, 5.0)])
def test_equivariance_with_a_std(data, fitted, factor, shift):
    (x, base, y), _ = data
    moved = Normal(factor * base.mean + shift, abs(factor) * base.std)
    before, after = fitted(x, base), fit_to_the_optimum(x, moved, factor * y + shift)(x, moved)
    tolerance = 1e-4 if X64 else 2e-2
    np.testing.assert_allclose((after.mean - shift) / factor, before.mean, atol=tolerance)
    np.testing.assert_allclose(after.std / abs(factor), before.std, rtol=tolerance, atol=tolerance)


@has_outliers
def test_prediction_asks_for_the_kind_of_base_that_was_fitted(data, fitted):
    (x, base, y), _ = data
    with pytest.raises(
        ValueError, match="base is Point, without a std of its own; RIO was fitted to a base with a std"
    ):
        fitted(x, Point(base.mean))
    with pytest.raises(
        ValueError, match="base is Normal, with a std of its own; RIO was fitted to a base without a std"
    ):
        fit_to_the_optimum(x, Point(base.mean), y)(x, base)


def test_gradients_of_predictions_in_inputs_means_and_stds(data, fitted):
    _, (x, base, _) = data

    @jax.jit
    def total(shifts):
        distribution = fitted(x + shifts[:2][None], Normal(base.mean + shifts[2], base.std * jnp.exp(shifts[3])))
        return jnp.sum(distribution.mean + distribution.std)

    step = 1e-5 if X64 else 1e-2
    slopes = jax.jit(jax.grad(total))(jnp.zeros(4))
    steps = step * jnp.eye(4)
    numeric = jnp.stack([total(s) - total(-s) for s in steps]) / (2 * step)
    np.testing.assert_allclose(slopes, numeric, rtol=1e-6 if X64 else 2e-2)
    assert (jnp.abs(slopes) > 1).all()


def both(x, base, y):
    """The data with a second output, of another size and another noise."""
    means, stds = jnp.stack([base.mean, 30 * base.mean**2], axis=1), jnp.stack([base.std, 9 * base.std[::-1]], axis=1)
    return means, stds, np.stack([y, 30 * np.asarray(base.mean) ** 2 + 5 * y**2], axis=1)


@has_outliers
@pytest.mark.slow
@needs_float64
def test_several_outputs_are_as_many_fits(data):
    (x, base, y), (new_x, new_base, new_y) = data
    means, stds, ys = both(x, base, y)
    new_means, new_stds, _ = both(new_x, new_base, new_y)
    fit = fit_to_the_optimum(x, Normal(means, stds), ys)
    assert fit.evidence.shape == fit.noise_variance.shape == fit.converged.shape == (2,)
    distribution = fit(new_x, Normal(new_means, new_stds))
    assert distribution.mean.shape == distribution.std.shape == (400, 2)
    for column in range(2):
        alone = fit_to_the_optimum(x, Normal(means[:, column], stds[:, column]), ys[:, column])
        expected = alone(new_x, Normal(new_means[:, column], new_stds[:, column]))
        np.testing.assert_allclose(fit.evidence[column], alone.evidence, rtol=1e-9)
        # An optimum is known to the root of what its evidence is known to.
        scale = float(alone.target_scaler.scale)
        np.testing.assert_allclose(distribution.mean[:, column], expected.mean, atol=1e-5 * scale)
        np.testing.assert_allclose(distribution.std[:, column], expected.std, rtol=1e-5)


@has_outliers
@pytest.mark.slow
def test_several_outputs_as_published(data):
    (x, base, y), _ = data
    means, _, ys = both(x, base, y)
    inference = Sparse(num_inducing=10, points="trained", ard=False, tolerance=0.0, max_iterations=10)
    setting = {"preset": "paper", "kernel": "output", "inference": inference}
    distribution = rio.fit(None, Point(means), ys, **setting)(None, Point(means))
    assert distribution.mean.shape == distribution.std.shape == (ROWS, 2)
    for column in range(2):
        alone = Point(means[:, column])
        expected = rio.fit(None, alone, ys[:, column], **setting)(None, alone)
        np.testing.assert_allclose(distribution.mean[:, column], expected.mean, rtol=1e-6)
        np.testing.assert_allclose(distribution.std[:, column], expected.std, rtol=1e-6)


@needs_float64
@pytest.mark.slow
def test_initial_values_find_what_a_fit_from_the_truth_finds():
    rng = np.random.default_rng(0)
    position = rng.uniform(-2, 2, size=ROWS)
    x, wave = np.column_stack([position, position]), np.sin(12 * position)
    base = Point(x @ [0.5, -0.3])
    y = base.mean + wave + 0.1 * rng.normal(size=ROWS)

    def from_gpjax(lengthscale, variance):
        """A fit that starts at this lengthscale and variance of the inputs' kernel, and at next to no output kernel."""
        pair = (
            gpx.kernels.RBF(lengthscale=jnp.asarray(lengthscale), variance=jnp.asarray(variance)),
            gpx.kernels.RBF(lengthscale=jnp.asarray(1.0), variance=jnp.asarray(0.01)),
        )
        return fit_to_the_optimum(x, base, y, kernel=pair)

    found = fit_to_the_optimum(x, base, y)
    # On two equal columns distances are sqrt(2) times as long.
    truth, naive = from_gpjax(np.sqrt(2) / 12 / position.std(), 1.0), from_gpjax(np.sqrt(2), 0.5)
    assert found.evidence > truth.evidence - 1e-3
    assert found.evidence > naive.evidence - 3
    # The wave is found: what is left of it is less than the noise.
    assert metrics.rmse(base.mean + wave, found(x, base)) < 0.1


@pytest.mark.slow
@needs_float64
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_weak_signal_in_many_columns_is_found(seed):
    """Rows far from each other, on which a kernel too short to relate them explains noise as well as any."""
    rng = np.random.default_rng(seed)
    x, weights = rng.normal(size=(3000, 64)), rng.normal(size=64) / 8
    signal = 0.3 * x @ weights
    y, base = signal + rng.normal(size=3000), Point(np.zeros(1500))
    fitted = rio.fit(x[:1500], base, y[:1500], kernel="input", inference=Sparse(num_inducing=50))
    before, after = (metrics.rmse(signal[1500:], distribution) for distribution in (base, fitted(x[1500:], base)))
    # The linear model that the rows come from leaves 0.55 to 0.6 of it, a process of noise alone all.
    assert after < 0.9 * before


class Memory(np.ndarray):
    """Counts the rows that are read of it at most at once."""

    most = 0

    def __getitem__(self, part):
        rows = np.asarray(super().__getitem__(part))
        Memory.most = max(Memory.most, len(rows))
        return rows


@needs_float64
@pytest.mark.slow
def test_the_stochastic_bound_reads_parts_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(unread, "CHUNK_ROWS", 150)
    monkeypatch.setattr(stochastic, "_SAMPLE_ROWS", 150)
    x, base, y = noisy(np.random.default_rng(4), 600, follows_std=True)
    np.save(tmp_path / "x.npy", 100 + 10 * x)
    file = np.load(tmp_path / "x.npy", mmap_mode="r").view(Memory)
    by_parts = Stochastic(epochs=60, num_inducing=20, ard=False)
    fitted = rio.fit(file, base, y, inference=by_parts, key=jax.random.key(0))
    assert Memory.most <= 150
    collapsed = rio.fit(100 + 10 * x, base, y, inference=Sparse(num_inducing=20, ard=False))
    assert fitted.evidence > collapsed.evidence - 0.005 * abs(collapsed.evidence)
    np.testing.assert_allclose(fitted.noise_variance, collapsed.noise_variance, rtol=0.1)
    new_x, new_base, new_y = noisy(np.random.default_rng(5), 400, follows_std=True)
    distributions = [model(100 + 10 * new_x, new_base) for model in (fitted, collapsed)]
    assert metrics.nlpd(new_y, distributions[0]) < metrics.nlpd(new_y, distributions[1]) + 0.02
    assert metrics.nlpd(new_y, distributions[0]) < metrics.nlpd(new_y, new_base) - 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": None}, "needs a key"),
        ({"x": np.ones((ROWS - 1, 2))}, f"x has {ROWS - 1} rows where {ROWS} are expected"),
        ({"x": np.full((ROWS, 2), np.nan)}, "NaN or infinite"),
        ({"y": np.eye(ROWS)[:, :2], "base": Point(np.zeros((ROWS, 2)))}, "one output; y has 2"),
    ],
)
def test_bad_input_to_the_stochastic_bound(data, change, message):
    x, base, y = data[0]
    arguments = {"x": x, "base": base, "y": y, "key": jax.random.key(0), "inference": Stochastic(num_inducing=20)}
    with pytest.raises(ValueError, match=message):
        rio.fit(**(arguments | change))
