"""What a fit takes by itself: the exact process, inducing points or the nearest rows; which pairs are refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from gpjax.kernels import Matern32

from jaxcal import Normal, Point, gaussian_process, gp, metrics, rio
from jaxcal.gp import Exact, GaussianNoise, InputNoise, Nearest, Sparse, Stochastic, StudentTNoise
from jaxcal.gp.fit import Way, check_objects
from jaxcal.gp.inference import automatic, sparse

pytestmark = [pytest.mark.contract_in_32_bits, pytest.mark.usefixtures("own_programs")]

X64 = jax.config.jax_enable_x64
KEY = jax.random.key(0)


def rows_of(n, d=2, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, d))
    return x, np.sin(3 * x[:, 0]) * np.cos(2 * x[:, -1]) + noise * rng.normal(size=n)


# By the number of rows


@pytest.mark.parametrize(
    ("n", "noise", "is_known", "in_numpy", "taken"),
    [
        (2000, GaussianNoise(), True, True, ["Exact"]),
        (2001, GaussianNoise(), True, True, ["Exact", "Nearest"]),
        (5000, GaussianNoise(), True, True, ["Exact", "Nearest"]),
        (5001, GaussianNoise(), True, True, ["Sparse", "Nearest"]),
        (250_000, GaussianNoise(variance=0.1), True, True, ["Sparse", "Nearest"]),
        (250_001, GaussianNoise(), True, True, ["Sparse"]),
        # Kernels that NumPy does not know.
        (2000, GaussianNoise(), True, False, ["Exact"]),
        (2001, GaussianNoise(), True, False, ["Sparse", "Nearest"]),
        # Traced rows.
        (2000, GaussianNoise(), False, True, ["Exact"]),
        (2001, GaussianNoise(), False, True, ["Sparse"]),
        (2000, StudentTNoise(), True, True, ["Exact"]),
        (2001, StudentTNoise(), True, True, ["Sparse"]),
        (2001, InputNoise(), True, True, ["Sparse"]),
    ],
)
def test_what_is_taken_of_so_many_rows(n, noise, is_known, in_numpy, taken):
    about = {"ard": True, "inputs": 3, "is_known": is_known, "in_numpy": in_numpy, "differentiable": False}
    way = Way.of(n, None, noise, **about)
    assert [type(inference).__name__ for inference in way.inferences] == taken
    assert all(inference.ard is True for inference in way.inferences)
    # What the user names is taken, whatever the number of rows.
    named = Way.of(n, Sparse(ard=False), noise, **about)
    assert [(type(inference).__name__, inference.ard) for inference in named.inferences] == [("Sparse", False)]


@pytest.mark.parametrize(("memory", "most"), [(4, 2000), (15, 12_000), (139, 42_000)])
def test_the_memory_of_an_accelerator_decides(monkeypatch, memory, most):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": memory * 2**30}

    monkeypatch.setattr(jax, "default_backend", lambda: "accelerator")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    for n, exact in ((most, True), (most + 1, False)):
        taken = automatic.chosen(n, GaussianNoise(), is_known=True, in_numpy=True)
        assert isinstance(taken[0], Exact) == exact


def test_defaults_follow_the_number_of_rows_and_the_inference():
    settled = lambda inference, n: inference.settled(n, GaussianNoise(), differentiable=False)
    assert (settled(Exact(), 2000).tolerance, settled(Exact(), 2001).tolerance) == (0.005, 0.5)
    assert settled(Exact(tolerance=0.1), 3000).tolerance == 0.1
    assert (settled(Sparse(), 100).num_inducing, settled(Sparse(), 9000).num_inducing) == (100, 800)
    assert settled(Stochastic(), 9000).num_inducing == 400
    assert {settled(each, 100).tolerance for each in (Sparse(), Nearest(), Stochastic())} == {1.0}
    assert settled(Sparse(points=np.arange(7)), 100).num_inducing is None


# What was taken


@pytest.fixture
def few(monkeypatch):
    """The exact process up to 40 rows, and asked up to 50 by LAPACK; no more than 15 inducing points by default."""
    monkeypatch.setattr(automatic, "_EXACT_ROWS", 40)
    monkeypatch.setattr(automatic, "_EXACT_ROWS_BY_LAPACK", 50)
    monkeypatch.setattr(sparse, "_NUM_INDUCING", 15)


def test_the_fit_says_what_it_took(few):
    x, y = rows_of(60)
    by_gpjax = {"kernel": Matern32(active_dims=[0, 1])}
    assert gaussian_process.fit(x[:40], y[:40]).inference == "exact"
    assert gaussian_process.fit(x[:50], y[:50]).inference in ("exact", "nearest")
    assert gaussian_process.fit(x[:40], y[:40], **by_gpjax).inference == "exact"
    assert gaussian_process.fit(x[:41], y[:41], **by_gpjax).inference in ("sparse", "nearest")
    traced = lambda n: eqx.filter_jit(lambda x, y: gaussian_process.fit(x, y))(x[:n], y[:n]).inference
    assert (traced(40), traced(41)) == ("exact", "sparse")
    assert gaussian_process.fit(x[:41], y[:41], noise=StudentTNoise()).inference == "sparse"


@pytest.mark.parametrize(
    ("inference", "name"),
    [
        (Exact(), "exact"),
        (Exact(learning_rate=0.1, max_iterations=2), "exact"),
        (Sparse(num_inducing=10), "sparse"),
        (Sparse(num_inducing=40), "sparse"),
        (Nearest(neighbors=10), "nearest"),
        (Stochastic(epochs=1, num_inducing=10), "stochastic"),
    ],
)
def test_the_fit_names_what_the_user_asked_for(inference, name):
    x, y = rows_of(40)
    assert gaussian_process.fit(x, y, inference=inference, key=KEY).inference == name
    assert rio.fit(x, Point(0.5 * y), y, kernel="input", inference=inference, key=KEY).inference == name


@pytest.mark.slow
def test_a_rough_function_asks_the_nearest_rows(few):
    x, y = rows_of(160, noise=0.02)
    found, alone = gaussian_process.fit(x, y), gaussian_process.fit(x, y, inference=Nearest())
    assert found.inference == "nearest"
    new_x, new_y = rows_of(200, noise=0.02, seed=1)
    np.testing.assert_allclose(found(new_x).mean, alone(new_x).mean, atol=1e-6 if X64 else 1e-3)
    assert metrics.rmse(new_y, found(new_x)) < 0.3


@pytest.mark.slow
def test_a_weak_signal_in_many_columns_asks_the_inducing_points(few, monkeypatch):
    """All rows together tell it; the nearest to a point do not."""
    monkeypatch.setattr(automatic, "Nearest", lambda: Nearest(neighbors=8))
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(320, 10)), rng.normal(size=10) / 3
    y = x @ weights + 2 * rng.normal(size=320)
    train, new, base = slice(160), slice(160, 320), Point(np.zeros(160))
    found = rio.fit(x[train], base, y[train], kernel="input")
    assert found.inference == "sparse"
    alone = rio.fit(x[train], base, y[train], kernel="input", inference=Sparse(num_inducing=15))
    np.testing.assert_allclose(found(x[new], base).mean, alone(x[new], base).mean, atol=1e-5)


def test_several_outputs_take_one_inference_and_stack(few):
    """The one that is better in the mean over outputs; every output then is as if it were alone."""
    x, y = rows_of(160, noise=0.02)
    std = 0.1 + np.abs(x[:, 0])
    ys = np.stack([y, 30 * y + 5], axis=1)
    base = lambda part: Normal(np.zeros((len(std[part]), 2)), np.stack([std[part], 30 * std[part]], axis=1))
    every, new = slice(160), slice(7)
    found = rio.fit(x, base(every), ys, kernel="input")
    assert found.inference in ("sparse", "nearest")
    inference = Nearest() if found.inference == "nearest" else Sparse()
    assert found.evidence.shape == found.result.shape == found.noise_variance.shape == (2,)
    predicted = found(x[new], base(new))
    assert predicted.mean.shape == predicted.std.shape == (7, 2)
    for k in range(2):
        own = lambda part, k=k: Normal(base(part).mean[:, k], base(part).std[:, k])
        alone = rio.fit(x, own(every), ys[:, k], kernel="input", inference=inference)
        np.testing.assert_allclose(found.evidence[k], alone.evidence, rtol=1e-6 if X64 else 1e-2)
        np.testing.assert_allclose(predicted.mean[:, k], alone(x[new], own(new)).mean, rtol=1e-4 if X64 else 5e-2)


def test_neither_is_taken_where_it_failed():
    """The CRPS of a fit that is not finite is infinite."""
    x, y = rows_of(40)
    scores = []
    for inference in (Sparse(num_inducing=10), Nearest(neighbors=10)):
        fitted = gaussian_process.fit(x, y, inference=inference)
        data = automatic.Data(fitted.x_scaler(jnp.asarray(x)), fitted.y_scaler(jnp.asarray(y)))
        scores.append(jax.jit(automatic.leave_one_out_crps)(fitted.process, data))
        failed = eqx.tree_at(lambda process: process.result, fitted.process, jnp.int32(2))
        assert np.isinf(jax.jit(automatic.leave_one_out_crps)(failed, data))
    assert 0.05 < min(scores) < max(scores) < 1  # of targets of variance one


# The choice of points


def test_points_may_be_given_by_the_numbers_of_rows():
    x, y = rows_of(60)
    numbers = np.array([3, 50, 17, 8, 21])
    for points in (numbers, jnp.asarray(numbers), numbers.astype(np.uint8)):
        fitted = gaussian_process.fit(x, y, inference=Sparse(points=points))
        np.testing.assert_allclose(fitted.points, fitted.x_scaler(x[numbers]), rtol=1e-6)
        assert fitted.inference == "sparse"
    base = Point(0.5 * y)
    calibrator = rio.fit(x, base, y, inference=Sparse(points=numbers))
    np.testing.assert_allclose(calibrator.points.inputs, calibrator.x_scaler(x[numbers]), rtol=1e-6)
    np.testing.assert_allclose(calibrator.points.output[:, 0], calibrator.output_scaler(base.mean[numbers]), rtol=1e-6)


@pytest.mark.slow
def test_given_points_are_as_good_as_the_same_by_another_name():
    """All rows, in another order, give the exact process; under jit and vmap as without."""
    x, y = rows_of(60)
    exact = gaussian_process.fit(x, y, inference=Exact(tolerance=0.0))
    order = np.random.default_rng(0).permutation(60)
    found = gaussian_process.fit(x, y, inference=Sparse(points=order, tolerance=0.0))
    np.testing.assert_allclose(found.evidence, exact.evidence, atol=1e-3 if X64 else 5e-2)
    few = lambda y, points: gaussian_process.fit(x, y, inference=Sparse(points=points)).evidence
    alone = few(y, order[:10])
    np.testing.assert_allclose(eqx.filter_jit(few)(y, order[:10]), alone, rtol=1e-3)
    both = jax.vmap(lambda points: few(y, points))(jnp.stack([order[:10], order[10:20]]))
    np.testing.assert_allclose(both, [alone, few(y, order[10:20])], rtol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n: Sparse(points=np.array([0, n])), "points must be numbers of the 60 rows, 0 to 59; got 0 to 60"),
        (lambda n: Sparse(points=jnp.array([-1, 3])), "points must be numbers of the 60 rows, 0 to 59; got -1 to 3"),
        (lambda n: Sparse(points=np.eye(2, dtype=int)), r"points must be .* an array \[m\] of the rows' numbers"),
        (lambda n: Sparse(points=np.ones(3)), r"points must be .* an array \[m\] of the rows' numbers"),
        (lambda n: Sparse(points="all"), "points must be one of 'greedy', 'trained'; got 'all'"),
        (lambda n: Sparse(num_inducing=5, points=np.arange(5)), "leave num_inducing out"),
    ],
)
def test_points_that_are_no_rows_are_refused(call, message):
    x, y = rows_of(60)
    with pytest.raises(ValueError, match=message):
        gaussian_process.fit(x, y, inference=call(60))


# What does not go together


@pytest.mark.parametrize(
    ("inference", "message"),
    [
        (Exact(learning_rate=0.01), "differentiable=True needs an optimum, where Adam does not end"),
        (Stochastic(), "differentiable=True needs an optimum, where minibatches do not end"),
        (
            Sparse(mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), "a")),
            "differentiable=True goes with rows on one device: leave mesh out",
        ),
    ],
    ids=["adam", "stochastic", "mesh"],
)
def test_pairs_of_an_inference_and_derivatives_that_are_refused(inference, message):
    x, y = rows_of(30)
    with pytest.raises(ValueError, match=message):
        gaussian_process.fit(x, y, inference=inference, differentiable=True, key=KEY)
    with pytest.raises(ValueError, match=message):
        rio.fit(x, Point(0.5 * y), y, inference=inference, differentiable=True, key=KEY)


def test_a_kernel_of_gpjax_has_its_own_lengthscales():
    x, y = rows_of(30)
    for ard in (True, "auto"):
        with pytest.raises(ValueError, match="ard has no effect on kernels of gpjax"):
            rio.fit(x, Point(0.5 * y), y, kernel=(Matern32(), None), inference=Exact(ard=ard))


@pytest.mark.parametrize("wrong", ["exact", Exact, 0.1, GaussianNoise()])
def test_what_is_no_inference_is_refused(wrong):
    with pytest.raises(TypeError, match=r"inference must be an object of jaxcal.gp, Exact\(\), say; got"):
        check_objects(wrong, GaussianNoise())
    x, y = rows_of(30)
    with pytest.raises(TypeError, match="inference"):
        gaussian_process.fit(x, y, inference=wrong)


@pytest.mark.parametrize("wrong", ["gaussian", InputNoise, 0.1, Exact(), None])
def test_what_is_no_noise_is_refused(wrong):
    with pytest.raises(TypeError, match=r"noise must be an object of jaxcal.gp, GaussianNoise\(\), say; got"):
        check_objects(None, wrong)


# Known noise


@pytest.mark.parametrize("inference", [Exact(), Sparse(num_inducing=10), Nearest(neighbors=10)], ids=repr)
def test_noise_that_is_known_stays(inference):
    x, y = rows_of(40)
    noise = GaussianNoise(variance=0.09)
    for fitted in (
        gaussian_process.fit(x, y, inference=inference, noise=noise),
        rio.fit(x, Point(0.5 * y), y, inference=inference, noise=noise),
    ):
        # The floor of the noise, and rounding, are added.
        np.testing.assert_allclose(fitted.noise_variance, 0.09, rtol=1e-4 if X64 else 1e-3)


def test_rio_takes_known_noise_as_the_process_does():
    """A base that says nothing leaves the outcome, and with it the process of the outcome."""
    x, y = rows_of(40)
    noise = GaussianNoise(variance=0.25)
    process = gaussian_process.fit(x, y, inference=Exact(ard=True), noise=noise)
    base = Point(np.zeros(40))
    calibrator = rio.fit(x, base, y, kernel="input", target="outcome", inference=Exact(ard=True), noise=noise)
    np.testing.assert_allclose(calibrator.evidence, process.evidence, rtol=1e-6)
    new = Point(np.zeros(5))
    np.testing.assert_allclose(calibrator(x[:5] + 0.1, new).std, process(x[:5] + 0.1).std, rtol=1e-5)
    learned = rio.fit(x, base, y, kernel="input", target="outcome", inference=Exact(ard=True))
    assert learned.evidence > calibrator.evidence
    # Of several outputs it is the same for each, in their own units.
    both = rio.fit(x, Point(np.zeros((40, 2))), np.stack([y, 3 * y], 1), kernel="input", noise=noise)
    np.testing.assert_allclose(both.noise_variance, 0.25, rtol=1e-4 if X64 else 1e-3)


@pytest.mark.slow
def test_derivatives_pass_through_rio_in_known_noise():
    x, y = rows_of(40)
    base = Point(0.5 * y)

    def value(variance):
        noise = GaussianNoise(variance=variance)
        fitted = rio.fit(x, base, y, inference=Exact(ard=False), noise=noise, differentiable=True)
        return fitted(x[:5] + 0.1, Point(0.5 * y[:5])).std.sum()

    slope = jax.grad(value)(0.2)
    step = 1e-5 if X64 else 1e-2
    np.testing.assert_allclose(slope, (value(0.2 + step) - value(0.2 - step)) / (2 * step), rtol=1e-4 if X64 else 0.1)


# What is compiled


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Exact(), Exact(tolerance=0.1, max_iterations=50)),
        (
            Exact(learning_rate=0.01, max_iterations=3),
            Exact(learning_rate=0.02, max_iterations=4),
        ),
        (Sparse(num_inducing=10), Sparse(num_inducing=10, tolerance=0.5, max_iterations=50)),
        (Sparse(points=np.arange(10)), Sparse(points=np.arange(10, 20))),
        (Nearest(neighbors=10), Nearest(neighbors=10, tolerance=0.5, max_iterations=50)),
    ],
    ids=["exact", "adam", "sparse", "points", "nearest"],
)
def test_another_number_compiles_nothing(one, other):
    """Neither another tolerance, limit or learning rate, nor another variance of the noise."""
    x, y = rows_of(40)
    gaussian_process.fit(x, y, inference=one, noise=GaussianNoise(variance=0.1))
    with compilations() as compiled:
        gaussian_process.fit(x, y, inference=other, noise=GaussianNoise(variance=0.2))
    assert compiled == []


def test_another_number_compiles_no_program_of_traced_rows():
    x, y = rows_of(40)

    @eqx.filter_jit
    def evidence(y, inference, noise):
        return gaussian_process.fit(x, y, inference=inference, noise=noise).evidence

    as_arrays = lambda tolerance: Exact(tolerance=jnp.asarray(tolerance), max_iterations=jnp.asarray(30))
    one = evidence(y, as_arrays(0.1), GaussianNoise(variance=jnp.asarray(0.1)))
    with compilations() as compiled:
        other = evidence(y, as_arrays(0.001), GaussianNoise(variance=jnp.asarray(0.2)))
    assert compiled == []
    assert one != other


def test_the_objects_are_public():
    assert {gp.Exact, gp.Sparse, gp.Nearest, gp.Stochastic} == {Exact, Sparse, Nearest, Stochastic}
    assert {gp.GaussianNoise, gp.StudentTNoise, gp.InputNoise} == {GaussianNoise, StudentTNoise, InputNoise}
