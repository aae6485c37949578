"""Rows distributed over a mesh give what one device gives; over four pretended devices, in a process of their own."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_precision

COMMON = """
import json
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxcal import Point, gaussian_process, rio
from jaxcal.functional import kernels, linalg, sparse_gp

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
devices = np.array(jax.devices())
line, square, typed = Mesh(devices, "a"), Mesh(devices.reshape(2, 2), ("a", "b")), jax.make_mesh((4,), ("a",))
rng = np.random.default_rng(0)

def spread(arrays):
    return jax.device_put(arrays, NamedSharding(line, PartitionSpec("a")))

def compare(ours, alone):
    ours, alone = jax.tree.leaves(ours), jax.tree.leaves(alone)
    (num_devices,) = {len(a.sharding.device_set) for a in ours}
    errors = [np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b) for a, b in zip(ours, alone, strict=True)]
    return num_devices, len(errors), float(max(errors))
"""
SUMS = """
class Covariances(eqx.Module):
    inducing: jax.Array
    lengthscale: jax.Array

    def __call__(self, rows):
        return kernels.squared_exponential(self.inducing, rows, self.lengthscale)

def bound(learned, x, y, mesh):
    covariances, noise, precisions = learned
    whiten = linalg.inverse_factor(linalg.add_diagonal(covariances(covariances.inducing), 1e-6))
    sums = sparse_gp.row_sums(covariances, whiten, x, jnp.ones(len(y)), y, precisions, mesh)
    return sparse_gp.collapsed_bound(sums, noise)

x, y, precisions = map(jnp.asarray, (rng.normal(size=(701, 2)), rng.normal(size=701), rng.uniform(0.5, 2, 701)))
learned, noise = Covariances(x[:12], jnp.asarray(0.7)), jnp.asarray(0.3)
gradients = eqx.filter_jit(jax.value_and_grad(bound))
alone = gradients((learned, noise, precisions), x, y, None)
found = {"not jitted": compare(jax.value_and_grad(bound)((learned, noise, precisions), x, y, line), alone)}
for name, mesh in {"square": square, "typed": typed}.items():
    found[name] = compare(gradients((learned, noise, precisions), x, y, mesh), alone)
alone = gradients((learned, noise, precisions[:700]), x[:700], y[:700], None)
there = spread([precisions[:700], x[:700], y[:700]])
found["spread"] = compare(gradients((learned, noise, there[0]), *there[1:], line), alone)
print(json.dumps(found))
"""
ROWS = """
x = rng.normal(size=(404, 2))
mean = np.sin(x[:, 0])
y = mean + 0.3 * np.cos(2 * x[:, 1]) + 0.3 * mean**2 + 0.1 * rng.normal(size=404)
"""
RIO = """

def fit(x, mean, y, mesh):
    fit = rio.fit(x, Point(mean), y, bound="collapsed", num_inducing=12, mesh=mesh, **SETTING)
    distribution = fit(x[:48] + 0.1, Point(mean[:48]))
    return fit.evidence, distribution.mean, distribution.std

print(json.dumps({"fit": compare(fit(*spread([x, mean, y]), line), fit(x, mean, y, None))}))
"""
PROCESS = """
def fit(x, y, mesh):
    fit = gaussian_process.fit(x, y, num_inducing=12, mesh=mesh)
    distribution = fit(x[:48] + 0.1)
    return fit.evidence, distribution.mean, distribution.std

print(json.dumps({"fit": compare(fit(*spread([x, y]), line), fit(x, y, None))}))
"""


def on_four_devices(script):
    """What the script prints, {name: (devices, arrays, largest relative difference)}."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    out = subprocess.run(
        [sys.executable, "-c", COMMON + script],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return json.loads(out.stdout)


def test_bound_and_gradients_of_distributed_rows():
    found = on_four_devices(SUMS)
    assert list(found) == ["not jitted", "square", "typed", "spread"]
    for num_devices, num_arrays, difference in found.values():
        # The bound, and its gradients by inducing points, lengthscale, noise and precisions.
        assert (num_devices, num_arrays) == (4, 5)
        assert difference < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [RIO.replace("**SETTING", "preset='paper', kernel='output'"), RIO.replace("**SETTING", ""), PROCESS],
    ids=["rio paper", "rio", "gaussian process"],
)
def test_fit_of_distributed_rows(script):
    ((num_devices, num_arrays, difference),) = on_four_devices(ROWS + script).values()
    assert (num_devices, num_arrays) == (4, 3)
    assert difference < 1e-6
