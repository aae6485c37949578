"""No call hangs: XLA's CPU client, with a pool of two threads, can hang for ever on a batched optimizer."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_precision

RUNS = """
import equinox as eqx, numpy as np
from jaxcal import Point, gp, rio
rng = np.random.default_rng(0)
x = rng.normal(size=(8, 60, 3))
mean = np.sin(x[..., 0])
y = mean + 0.3 * x[..., 1] + 0.1 * rng.normal(size=(8, 60))
fit = eqx.filter_jit(eqx.filter_vmap(lambda x, mean, y: rio.fit(x, Point(mean), y, inference=SETTING)))
nested = eqx.filter_vmap(fit)
print(nested(x.reshape(2, 4, 60, 3), mean.reshape(2, 4, 60), y.reshape(2, 4, 60)).result.shape)
"""
NEAREST = """
import numpy as np
from jaxcal import Point, gp, rio
rng = np.random.default_rng(0)
x = rng.normal(size=(90, 2))
y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=90)
for _ in range(5):
    fitted = rio.fit(x, Point(0.8 * np.sin(x[:, 0])), y, inference=gp.Nearest(), throw=False)
print(fitted.result.shape)
"""
GRADIENT = """
import jax, numpy as np
from jaxcal import Point, gp, rio
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 2))
mean = np.sin(x[:, 0])
y = mean + 0.3 * x[:, 1] + 0.2 * rng.normal(size=(3, 40))
fit = lambda y: rio.fit(x, Point(mean), y, inference=gp.Nearest(ard=False), differentiable=True, throw=False)
print(jax.jit(jax.vmap(jax.grad(lambda y: fit(y)(x, Point(mean)).mean.sum())))(y).shape)
"""
SETTINGS = {"exact": "gp.Exact(ard=False)", "default": "None", "sparse": "gp.Sparse(num_inducing=10)"}


@pytest.mark.parametrize(
    "setting",
    [SETTINGS["exact"], *(pytest.param(SETTINGS[name], marks=pytest.mark.slow) for name in ("default", "sparse"))],
    ids=SETTINGS,
)
def test_vmap_of_a_fit_ends(setting):
    assert printed_with_two_threads(RUNS.replace("SETTING", setting)) == "(2, 4)\n"


@pytest.mark.slow
def test_a_fit_with_many_small_factorizations_ends():
    assert printed_with_two_threads(NEAREST) == "()\n"


@pytest.mark.slow
def test_vmap_of_a_gradient_ends():
    assert printed_with_two_threads(GRADIENT) == "(3, 40)\n"


def printed_with_two_threads(code):
    command, env = [sys.executable, "-c", code], {**os.environ, "NPROC": "2"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True).stdout
