"""How many programs a method compiles: none for a second fit, nearby numbers of rows, or another number as an option.

The sizes lie in one bucket. On a CPU it is so of all methods but `isotonic` of predictions that differ in shape, whose
programs are those of its numbers of rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations

import jaxcal as jc
from jaxcal._numpy import stacked
from jaxcal.functional.scores import accrue_loss

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)
# Of a fit, and of two predictions by each.
SIZES, NEW = (242, 250), ((37, 33), (100, 99))


def rows(n):
    rng = np.random.default_rng(n)
    x = rng.uniform(-1, 1, (n, 3))
    return x, x[:, 0] + 0.3 * (1.5 + x[:, 1]) * rng.normal(size=n)


def of_predictor(fit, **options):
    """A fit to so many rows, and a prediction of others."""

    def call(n, new, **more):
        x, y = rows(n)
        fitted = fit(x, y, **options, **more)
        return [fitted(rows(m)[0]) for m in new]

    return call


def of_calibrator(fit, base, **options):
    def call(n, new, **more):
        x, y = rows(n)
        fitted = fit(x, base(x), y, **options, **more)
        return [fitted(rows(m)[0], base(rows(m)[0])) for m in new]

    return call


def of_first_column(fit):
    """A method of one input, for calls with more."""

    def call(x, base, y, **options):
        fitted = fit(x[:, 0], base, y, **options)
        return lambda x, base: fitted(x[:, 0], base)

    return call


def with_power(fit):
    """A fit by a loss with a number, one value a row."""

    def loss(errors, std, power):
        return abs(errors / std) ** power + jnp.log(std)

    return lambda *args, power=1.0, **options: fit(*args, loss=partial(loss, power=power), **options)


def student_t(n, new):
    return [jc.StudentT(np.linspace(3, 9, m), np.zeros(m), np.ones(m)) for m in (n, *new)]


def of_two_members(member):
    """Mixtures for so many rows, and for others."""

    def call(n, new):
        return [jc.Mixture(stacked([member(np.linspace(k, 1, m)) for k in range(2)])) for m in (n, *new)]

    return call


POINT = lambda x: jc.Point(0.9 * x[:, 0])
NORMAL = lambda x: jc.Normal(0.9 * x[:, 0], 0.2 + 0.1 * np.abs(x[:, 1]))
SHORT = {"key": KEY, "max_epochs": 2}

# Each with another value of a number among its options.
CASES = {
    "gaussian_process": (of_predictor(jc.gaussian_process.fit), {}),
    "mlp": (of_predictor(jc.mlp.fit, **SHORT), {"learning_rate": 0.002}),
    "variance_network": (of_predictor(jc.variance_network.fit, **SHORT), {"weight_decay": 0.01}),
    "alternating": (
        of_predictor(jc.variance_network.fit, form="alternating", **SHORT),
        {"weight_decay": 0.01},
    ),
    "usnrt": (of_predictor(jc.usnrt.fit, min_leaf=60, **SHORT), {"splits": jc.usnrt.Splits(significance=0.02)}),
    "deep_ensemble": (of_predictor(jc.deep_ensemble.fit, num_members=2, **SHORT), {"learning_rate": 0.002}),
    "dropout": (of_predictor(jc.dropout.fit, num_samples=3, **SHORT), {"rate": 0.2}),
    "concrete dropout": (of_predictor(jc.dropout.fit, num_samples=3, rate="concrete", **SHORT), {"length_scale": 0.02}),
    "evidential": (of_predictor(jc.evidential.fit, **SHORT), {"penalty": 0.02}),
    "neural_process": (
        of_predictor(jc.neural_process.fit, key=KEY, width=16, batch_size=4, max_iterations=2),
        {"learning_rate": 0.002, "patience": 3},
    ),
    "forests": (of_predictor(jc.forests.fit, num_trees=5, preset="usnrt", key=KEY), {}),
    "rio": (of_calibrator(jc.rio.fit, POINT), {}),
    "rio of a normal base": (of_calibrator(jc.rio.fit, NORMAL), {"noise": jc.gp.GaussianNoise(variance=0.1)}),
    "conformal": (of_calibrator(jc.conformal.fit, POINT), {}),
    "crude": (of_calibrator(jc.crude.fit, NORMAL), {}),
    "neural_quantiles": (
        of_calibrator(jc.neural_quantiles.fit, NORMAL, pretraining_epochs=2, **SHORT),
        {"learning_rate": 0.002},
    ),
    "isotonic": (of_calibrator(jc.isotonic.fit, NORMAL), {}),
    "isotonic of points": (of_calibrator(jc.isotonic.fit, POINT), {}),
    "student t": (student_t, {}),
    "mixture of normals": (of_two_members(lambda mean: jc.Normal(mean, 1.0)), {}),
    "mixture of points": (of_two_members(jc.Point), {}),
    "mixture of student t": (of_two_members(lambda loc: jc.StudentT(5.0, loc, 1.0)), {}),
    "kmeans": (of_calibrator(jc.kmeans.fit, POINT, key=KEY), {}),
    "gaussian_mle": (of_calibrator(jc.gaussian_mle.fit, NORMAL), {}),
    "accrue": (
        of_calibrator(jc.accrue.fit, POINT, key=KEY),
        {"loss": partial(accrue_loss, beta=0.5), "patience": 5},
    ),
    "accrue by another loss": (of_calibrator(with_power(jc.accrue.fit), POINT, key=KEY), {"power": 1.5}),
    "accrue of a polynomial": (
        of_calibrator(of_first_column(jc.accrue.fit), POINT, key=KEY, model="polynomial"),
        {"max_iterations": 50},
    ),
    "accrue by steps": (of_calibrator(jc.accrue.fit, NORMAL, key=KEY, steps=3), {"learning_rate": 0.02}),
}


def use(predictions):
    """What is usually asked of them."""
    for each in predictions:
        _ = each.mean, each.std, each.interval(0.9), each.crps(each.mean)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_compiled_anew(name):
    call, option = CASES[name]
    use(call(SIZES[0], NEW[0]))
    use(call(SIZES[0], NEW[1]))
    with compilations() as compiled:
        use(call(SIZES[0], NEW[0]))  # again
        use(call(SIZES[1], [m + 3 for m in NEW[0]]))  # another size in the bucket
        use(call(SIZES[1], [m + 3 for m in NEW[1]], **option))
    assert compiled == []
