"""A user's own distribution: every calibrator, metric and plot takes it, since none asks for a class."""

import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

import jaxcal as jc
from jaxcal import calibrators, metrics, plots

once = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="does not depend on the precision")
N = 60
RNG = np.random.default_rng(8)
X = RNG.uniform(-1, 1, (N, 1))
SCALE = 1 + X[:, 0] ** 2
KEY = jax.random.key(0)


class Laplace(jc.Distribution):
    """All rows have one shape."""

    mean: jax.Array
    scale: jax.Array
    is_location_scale = True

    @property
    def std(self):
        return 2**0.5 * self.scale

    def cdf(self, y):
        z = (y - self.mean) / self.scale
        tail = jnp.exp(-jnp.abs(z)) / 2
        return jnp.where(z < 0, tail, 1 - tail)

    def log_prob(self, y):
        return -jnp.abs(y - self.mean) / self.scale - jnp.log(2 * self.scale)

    def crps(self, y):
        z = jnp.abs(y - self.mean) / self.scale
        return self.scale * (z + jnp.exp(-z) - 0.75)

    def quantile(self, p):
        return self.mean - self.scale * jnp.sign(p - 0.5) * jnp.log1p(-2 * jnp.abs(p - 0.5))


class Exponential(jc.Distribution):
    """Skewed, with a shape that is not known to be that of all rows, and quantiles that are worth to avoid."""

    mean: jax.Array
    has_closed_quantiles = False

    @property
    def std(self):
        return self.mean

    def cdf(self, y):
        return -jnp.expm1(-jnp.maximum(y, 0) / self.mean)

    def log_prob(self, y):
        return jnp.where(y >= 0, -y / self.mean - jnp.log(self.mean), -jnp.inf)

    def crps(self, y):
        """|y| - 3/2 mean + 2 mean exp(-y / mean) for y >= 0."""
        return jnp.abs(y) - 1.5 * self.mean + jnp.where(y >= 0, 2 * self.mean * jnp.exp(-y / self.mean), 2 * self.mean)

    def quantile(self, p):
        return -self.mean * jnp.log1p(-p)


FORECASTS = {
    "laplace": (Laplace(jnp.zeros(N), jnp.asarray(SCALE)), SCALE * RNG.laplace(size=N)),
    "exponential": (Exponential(jnp.asarray(SCALE)), SCALE * RNG.exponential(size=N)),
}
OPTIONS = {
    "accrue": [{"key": KEY, "restarts": 1}],
    "conditional_conformal": [{}],
    "conformal": [{}, {"score": "quantile"}, {"score": "absolute"}, {"score": "cdf", "rule": "linear"}],
    "crude": [{}, {"score": "cdf"}],
    "gaussian_mle": [{}],
    "isotonic": [{}],
    "kmeans": [{"key": KEY, "num_clusters": 2}],
    "neural_quantiles": [{"key": KEY, "max_epochs": 5, "pretraining_epochs": 50}],
    "rio": [{}],
    "sharp_gp": [{"x_train": X[::3], "y_train": SCALE[::3], "kernel": jc.sharp_gp.KernelAndNoise(1.0, 0.1)}],
}


@pytest.fixture(params=FORECASTS)
def forecast(request):
    return FORECASTS[request.param]


@once
def test_every_calibrator_is_here():
    assert set(OPTIONS) == {name for _, name, _ in pkgutil.iter_modules(calibrators.__path__) if name[0] != "_"}


@once
@pytest.mark.parametrize("name", OPTIONS)
def test_calibrators_take_it(forecast, name):
    base, y = forecast
    for options in OPTIONS[name]:
        calibrate = getattr(jc, name).fit(X, base, y, **options)
        calibrated = calibrate(X, base)
        assert isinstance(calibrated, jc.Distribution)
        assert np.isfinite(calibrated.mean).all()
        assert np.isfinite(calibrated.std).all()
        assert 0.75 <= metrics.coverage(y, calibrated) <= 1


@once
def test_shapes_are_kept_unless_all_rows_have_one(forecast):
    base, y = forecast
    by_cdf = jc.isotonic.fit(None, base, y)(None, base)
    assert isinstance(by_cdf, jc.ScaledQuantiles if base.is_location_scale else jc.Recalibrated)


@once
def test_metrics_are_those_of_the_same_quantiles(forecast):
    """Read from a fine table of them: a class of jaxcal, which has another path through each metric."""
    base, y = forecast
    levels = np.linspace(0.0005, 0.9995, 1000)
    table = jc.Quantiles(levels, base.icdf(levels))
    own, other = metrics.evaluate(y, base), metrics.evaluate(y, table)
    for name in set(own) - {"nlpd", "rmse", "mae"}:
        np.testing.assert_allclose(own[name], other[name], rtol=0.02, atol=1e-3, err_msg=name)
    assert own["rmse"] == pytest.approx(float(np.sqrt(np.mean((y - base.mean) ** 2))))
    assert own["nlpd"] == pytest.approx(float(-base.log_prob(y).mean()))


# What is taken besides y and the distribution, and metrics of something else.
ARGUMENTS = {
    "observed_fractions": (np.array([0.1, 0.9]),),
    "pinball": (0.3,),
    "improvement_ratio": (jc.Point(np.full(N, 5.0)),),
    "worst_group_coverage": (np.arange(N) % 2,),
}
OTHERS = {"calibrated_ece", "worst_slab_coverage"}


def functions_of(module):
    return {name for name in dir(module) if inspect.isfunction(getattr(module, name))}


@once
def test_metrics_take_it():
    """Those that `evaluate` does not have."""
    base, y = FORECASTS["exponential"]
    for name in functions_of(metrics) - OTHERS - set(metrics.evaluate(y, base)):
        found = getattr(metrics, name)(y, base, *ARGUMENTS.get(name, ()))
        assert all(np.isfinite(value).all() for value in jax.tree.leaves(found)), name


@once
def test_worst_slab_coverage_takes_it():
    base, y = FORECASTS["exponential"]
    assert 0 <= metrics.worst_slab_coverage(X, y, base, key=KEY) <= 1


def draw(plot, base, y, ax):
    """A plot of one forecast, by the arguments that it has."""
    given = {"y": y, "x": X[:, 0], "by": np.arange(N) % 2, "distribution": base, "distributions": {"own": base}}
    names = inspect.signature(plot).parameters
    return plot(**{name: value for name, value in given.items() if name in names}, ax=ax)


@once
@pytest.mark.parametrize("name", sorted(functions_of(plots) - {"tree"}))
def test_plots_take_it(name, plt):
    ax = draw(getattr(plots, name), *FORECASTS["exponential"], plt.subplots()[1])
    ax.figure.canvas.draw()
    assert ax.lines or ax.collections or ax.patches


@once
def test_what_jaxcal_adds(forecast):
    """Rows, intervals and samples, from the formulas of the class; and the formulas are right."""
    base, y = forecast
    law = stats.laplace(0, SCALE[3]) if isinstance(base, Laplace) else stats.expon(0, SCALE[3])
    np.testing.assert_allclose(base[3].interval(0.8), np.array(law.interval(0.8))[:, None])
    samples = base.sample(KEY, (4000,))
    assert samples.shape == (4000, N)
    assert stats.kstest(samples[:, 3], law.cdf).pvalue > 0.001
    assert len(jc.concatenate([base[:2], base[[5]]])) == 3
    by_parts = integrate.quad(lambda t: law.cdf(t) ** 2, -60, y[3])[0]
    by_parts += integrate.quad(lambda t: law.sf(t) ** 2, y[3], 60)[0]
    np.testing.assert_allclose(base.crps(y)[3], by_parts, rtol=1e-6)


@once
def test_levels_beyond_its_reach_come_with_a_warning():
    class Bounded(Laplace):
        @property
        def reach(self):
            return jc.distributions.Reach(0.05, 0.95)

    bounded = Bounded(jnp.zeros(3), jnp.ones(3))
    bounded.interval(0.9)
    with pytest.warns(UserWarning, match="at levels from 0.05 to 0.95; at 0.99 the outermost of them is taken"):
        bounded.icdf(np.array([0.5, 0.99]))
