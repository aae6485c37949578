"""Rows and runs distributed over a mesh give what one device gives; over four pretended devices, in processes of their
own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_precision

COMMON = """
import json
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxcal import Point, gaussian_process, rio
from jaxcal.gp import Exact, GaussianNoise, Sparse
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
    fit = rio.fit(x, Point(mean), y, inference=Sparse(num_inducing=12, mesh=mesh, **POINTS), **OPTIONS)
    distribution = fit(x[:48] + 0.1, Point(mean[:48]))
    return fit.evidence, distribution.mean, distribution.std

print(json.dumps({"fit": compare(fit(*spread([x, mean, y]), line), fit(x, mean, y, None))}))
"""
PROCESS = """
def fit(x, y, mesh):
    fit = gaussian_process.fit(x, y, inference=Sparse(num_inducing=12, mesh=mesh))
    distribution = fit(x[:48] + 0.1)
    return fit.evidence, distribution.mean, distribution.std

print(json.dumps({"fit": compare(fit(*spread([x, y]), line), fit(x, y, None))}))
"""

RUNS = """
import re
from jaxcal import gaussian_mle, mlp
from jaxcal.optimize import over_runs

def fit(x, mean, y, key):
    return METHOD

def floats(module):
    # Biases may be 0, and what is compared is relative.
    return [a for a in jax.tree.leaves(eqx.filter(module, eqx.is_inexact_array)) if np.asarray(a).any()]

x = jnp.asarray(rng.normal(size=(8, 40, 2)))
mean = jnp.sin(x[..., 0])
runs = x, mean, mean + 0.3 * x[..., 1] + 0.1 * rng.normal(size=(8, 40)), jax.random.split(jax.random.key(0), 8)
vmapped = eqx.filter_jit(eqx.filter_vmap(fit))
found = {}
for name, mesh, number in NUMBERS:
    some = jax.tree.map(lambda a: a[:number], runs)
    if number == 8:
        some = jax.device_put(some, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    spread = eqx.filter_jit(over_runs(fit, mesh=mesh))
    program = spread.lower(*some).compile().compiled.as_text() if number == 8 else ""
    exchanged = re.findall("all-gather|all-reduce|all-to-all|collective", program)
    found[name, number] = *compare(floats(spread(*some)), floats(vmapped(*(a[:number] for a in runs)))), exchanged
print(json.dumps([[*key, *value] for key, value in found.items()]))
"""
PLACES = """
from jaxcal.gp import fit
x, y = jax.device_put((rng.normal(size=(30, 2)), rng.normal(size=30)), devices[2])
fit.is_on_host = lambda *_: False  # as on accelerators
fitted = gaussian_process.fit(x, y, inference=Exact(max_iterations=2), noise=GaussianNoise(variance=0.5))
arrays = jax.tree.leaves((eqx.filter(fitted.process, eqx.is_array), fitted.process(x)))
print(json.dumps([list(map(str, array.devices())) == [str(devices[2])] for array in arrays]))
"""
DERIVATIVES = """
from jaxcal.optimize import over_runs

def total(weights, x, mesh):
    run = lambda x, number: jnp.sin(weights @ x) * number
    return jnp.sum(over_runs(run, mesh=mesh)(x, jnp.arange(1.0, 7.0)))

x, weights = jnp.asarray(rng.normal(size=(6, 3))), jnp.asarray(rng.normal(size=3))
for mesh in (line, square, typed):
    ours, alone = (jax.grad(total, (0, 1))(weights, x, mesh) for mesh in (mesh, None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), ours, alone)
try:
    over_runs(jnp.add, mesh=line)(x, weights)
except ValueError as error:
    print(json.dumps(str(error)))
"""


def on_four_devices(script):
    """What the script prints last, as JSON."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    out = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.slow
def test_bound_and_gradients_of_distributed_rows():
    found = on_four_devices(COMMON + SUMS)
    assert list(found) == ["not jitted", "square", "typed", "spread"]
    for num_devices, num_arrays, difference in found.values():
        # The bound, and its gradients by inducing points, lengthscale, noise and precisions.
        assert (num_devices, num_arrays) == (4, 5)
        assert difference < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        RIO.replace("**POINTS", "points='trained', ard=False, tolerance=0.0").replace(
            "**OPTIONS", "preset='paper', kernel='output'"
        ),
        RIO.replace("**POINTS", "").replace("**OPTIONS", ""),
        PROCESS,
    ],
    ids=["rio paper", "rio", "gaussian process"],
)
def test_fit_of_distributed_rows(script):
    ((num_devices, num_arrays, difference),) = on_four_devices(COMMON + ROWS + script).values()
    assert (num_devices, num_arrays) == (4, 3)
    assert difference < 1e-6


# In closed form, of a network, and of an optimizer that is not batched on a CPU.
FITS = {
    "gaussian-mle": ("gaussian_mle.fit(x, Point(mean), y)", 1e-12),
    "mlp": ("mlp.fit(x, y, key=key, hidden=(8,), max_epochs=10)", 1e-12),
    "rio": ("rio.fit(x, Point(mean), y, inference=Exact(ard=False))", 1e-8),
}
SOME = "[('square', square, 3), ('typed', typed, 6), ('line', line, 8)]"
ALL = "[(name, mesh, n) for name, mesh in dict(line=line, square=square, typed=typed).items() for n in (3, 6, 8)]"


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("gaussian-mle", SOME),
        pytest.param("mlp", ALL, marks=pytest.mark.slow),
        pytest.param("rio", ALL, marks=pytest.mark.slow),
    ],
    ids=FITS,
)
def test_runs_spread_over_devices(method, numbers):
    """As a vmap gives them, without an exchange between the devices; also where they do not make up equal parts."""
    fit, tolerance = FITS[method]
    for name, _, num_devices, _, difference, exchanged in on_four_devices(
        COMMON + RUNS.replace("METHOD", fit).replace("NUMBERS", numbers)
    ):
        assert num_devices == 4, name
        assert difference < tolerance, name
        assert exchanged == []


def test_a_fit_by_programs_stays_where_its_rows_are():
    assert all(on_four_devices(COMMON + PLACES))


def test_derivatives_of_runs_spread_over_devices():
    message = on_four_devices(COMMON + DERIVATIVES)
    assert message == "all arrays need one leading axis of runs; their shapes begin with [(3,), (6,)]."


@pytest.mark.slow
def test_example_of_the_documentation():
    text = (Path(__file__).parents[1] / "docs" / "how-to" / "accelerators.md").read_text(encoding="utf-8")
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "make_mesh" in code)
    assert on_four_devices(example) == [8, 4]
