"""No call hangs: XLA's CPU client, with a pool of two threads, can hang for ever on a batched optimizer."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_precision

RUNS = """
import equinox as eqx, numpy as np
from jaxcal import Point, rio
rng = np.random.default_rng(0)
x = rng.normal(size=(8, 60, 3))
mean = np.sin(x[..., 0])
y = mean + 0.3 * x[..., 1] + 0.1 * rng.normal(size=(8, 60))
fit = eqx.filter_jit(eqx.filter_vmap(lambda x, mean, y: rio.fit(x, Point(mean), y, **SETTING)))
nested = eqx.filter_vmap(fit)
print(nested(x.reshape(2, 4, 60, 3), mean.reshape(2, 4, 60), y.reshape(2, 4, 60)).result.shape)
"""
COLLAPSED = {"bound": "collapsed", "num_inducing": 10}


@pytest.mark.parametrize("setting", [{}, pytest.param(COLLAPSED, marks=pytest.mark.slow)], ids=["exact", "collapsed"])
def test_vmap_of_a_fit_ends(setting):
    out = subprocess.run(
        [sys.executable, "-c", RUNS.replace("SETTING", repr(setting))],
        env={**os.environ, "NPROC": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert out.stdout == "(2, 4)\n"
