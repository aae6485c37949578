"""Every method lowers for GPU and TPU on a machine without one, and compiles for a TPU where libtpu is installed.

The rows are in float32 while x64 is on: what is in float64 then follows no dtype.
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import cases
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KEY, SMALL, Case, of_points, predictor
from gpjax.kernels import RBF
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxcal import Point, rio
from jaxcal.calibrators import kmeans
from jaxcal.functional import levene
from jaxcal.gp import Exact, InputNoise, Nearest, Sparse, Stochastic, StudentTNoise, device, model, protocols
from jaxcal.gp import fit as gp_fit
from jaxcal.gp.inference import nearest, sparse, stochastic
from jaxcal.gp.noise import inputs, student_t
from jaxcal.optimize import over_runs
from jaxcal.predictors import _growing, _tree_networks, deep_ensemble, gaussian_process, variance_network

pytestmark = [
    pytest.mark.any_precision,
    # As in test_methods.py.
    pytest.mark.filterwarnings("ignore:the uncertainty is hardly greater"),
]
X, MEAN, Y = (rows.astype(np.float32) for rows in (cases.X, cases.MEAN, cases.Y))
LEVELS = np.array([0.1, 0.9], np.float32)
ON_HOST = {"fit": "its steps run on the host"}
PAPER = Sparse(num_inducing=10, points="trained", ard=False, tolerance=0.0)
KNOWN, FEW = {"kernel": RBF()}, Sparse(num_inducing=5)
# Further forms of a fit, with programs of their own.
FORMS = (
    of_points("rio-paper", rio, {"preset": "paper", "inference": PAPER}),
    of_points("rio-student-t", rio, {"noise": StudentTNoise()}),
    of_points("rio-input-noise", rio, {"noise": InputNoise()}),
    predictor("gaussian-process-adam", gaussian_process, {"inference": Exact(learning_rate=0.01)}),
    predictor("variance-network-alternating", variance_network, {**SMALL, "form": "alternating"}),
    predictor("deep-ensemble-crude", deep_ensemble, {**SMALL, "num_members": 2, "preset": "crude"}),
    # By the programs of known rows, which all kernels have on an accelerator.
    of_points("rio-known", rio, {"kernel": (RBF(), RBF())}, needs_values=ON_HOST, quick_to_trace=True),
    predictor(
        "student-t-known",
        gaussian_process,
        {**KNOWN, "noise": StudentTNoise(), "inference": FEW},
        needs_values=ON_HOST,
    ),
    predictor(
        "input-noise-known",
        gaussian_process,
        {**KNOWN, "noise": InputNoise(), "inference": FEW},
        needs_values=ON_HOST,
    ),
    predictor(
        "nearest-known",
        gaussian_process,
        {**KNOWN, "inference": Nearest(neighbors=5)},
        needs_values=ON_HOST,
    ),
    of_points(
        "rio-stochastic",
        rio,
        {"inference": Stochastic(epochs=1, num_inducing=10), "key": KEY},
        needs_values=ON_HOST,
    ),
)
CASES = (*cases.CASES, *FORMS)
# The compiled parts of the fits that run on the host: the rest of each is NumPy's or scikit-learn's.
PARTS = {
    "usnrt": [
        (_growing, "_arrays_of"),
        (levene, "_search"),
        (_growing, "_bounds"),
        (_tree_networks, "each_run"),
        (_tree_networks, "_by_leaf"),
    ],
    "kmeans": [(kmeans, "_stds")],
    "rio-known": [
        (gp_fit, "_prepared"),
        (device, "_begin"),
        (device, "_near"),
        (model, "posterior"),
        (device, "_concluded"),
    ],
    "student-t-known": [
        (student_t, "_weighted"),
        (sparse, "_best_by_bound"),
        (sparse, "_inducing"),
        (student_t, "_with_student_t"),
        (protocols, "_near"),
    ],
    "input-noise-known": [(inputs, "_log_noises"), (inputs, "_foreseen")],
    "nearest-known": [(nearest, name) for name in ("_deciding_rows", "_starts", "_best_of", "_near_of", "_loss")],
    "rio-stochastic": [(stochastic, name) for name in ("_start", "_pass_over", "_jitted_sum_over", "_conclude")],
}


def params_of(chosen: Iterable[Case]) -> list:
    """The cases by their names; all but a few take long to trace."""
    marks = lambda case: () if case.quick_to_trace else pytest.mark.slow
    return [pytest.param(case, id=case.name, marks=marks(case)) for case in chosen]


class Program(NamedTuple):
    """A function of arrays, which gives arrays."""

    name: str
    fun: Callable
    args: tuple

    def lowered(self, platform: str) -> str:
        """StableHLO for a platform that need not be there."""
        return jax.jit(self.fun).trace(*self.args).lower(lowering_platforms=(platform,)).as_text()


def programs_of(case: Case) -> list[Program]:
    """Fit and prediction in one, or the compiled parts of a fit on the host, and the prediction."""
    fit, call, of_fit = case.fit, case.call, PARTS.get(case.name, ())
    if "fit" not in case.needs_values:
        fitted = lambda mean, y: read(call(fit(X, mean, y), X, mean), y)
        return [Program("fit and prediction", fitted, (MEAN, Y))]
    with recorded(of_fit) as parts:
        module = fit(X, MEAN, Y)
    assert {part.name for part in parts} == {name for _, name in of_fit}
    if "predict" in case.needs_values:
        return parts
    return [
        *parts,
        program("prediction", lambda module, x, mean, y: read(call(module, x, mean), y), module, X, MEAN, Y),
    ]


def read(distribution, y):
    """What is asked of a prediction."""
    return distribution.mean, distribution.std, distribution.icdf(LEVELS), distribution.cdf(y)


def program(name: str, fun: Callable, *args: Any, **options: Any) -> Program:
    """A function as one of its arrays alone."""
    arrays, static = eqx.partition((args, options), lambda leaf: isinstance(leaf, jax.Array | np.ndarray))

    def of_arrays(arrays):
        args, options = eqx.combine(arrays, static)
        return eqx.filter(fun(*args, **options), eqx.is_array)

    return Program(name, of_arrays, (arrays,))


@contextlib.contextmanager
def recorded(functions):
    """The calls of functions of modules, as programs."""
    calls = []

    def recording(function, name, *args, **options):
        calls.append(program(name, function, *args, **options))
        return function(*args, **options)

    with contextlib.ExitStack() as stack:
        for module, name in functions:
            function = getattr(module, name)
            stack.enter_context(mock.patch.object(module, name, partial(recording, function, name)))
        yield calls


def faults(text: str) -> list[str]:
    """The lines of a program where an accelerator would wait for the host, or compute in float64.

    Python's numbers are float64 until they meet an array. Those may be moved and converted to another dtype; nothing
    may be converted to float64, and nothing computed with an array of it.
    """
    return [line.strip() for line in text.splitlines() if _asks_the_host(line) or _computes_in_float64(line)]


def _asks_the_host(line: str) -> bool:
    return re.search(r"callback|stablehlo\.(send|recv|infeed|outfeed)", line) is not None


def _computes_in_float64(line: str) -> bool:
    if "f64>" not in line:
        return False
    if "stablehlo.convert" in line or "stablehlo.bitcast_convert" in line:
        return re.search(r"-> tensor<[\dx]*f64>", line) is not None
    moves = r"func\.func|return|call @|stablehlo\.(constant|broadcast_in_dim|reshape|return)"
    return re.search(r"tensor<\d[\dx]*xf64>", line) is not None and re.search(moves, line) is None


@pytest.mark.parametrize(
    ("fun", "found"),
    [
        (lambda x: 2.5 * x + jnp.asarray(np.arange(3.0), x.dtype), ""),
        (lambda x: x + jnp.log(jnp.arange(3.0)).astype(x.dtype), "log"),
        (lambda x: x + jnp.log(x.sum().astype(float)), "convert"),
        (lambda x: jax.pure_callback(np.sin, x, x), "callback"),
    ],
    ids=["none", "array", "number", "callback"],
)
def test_faults_are_seen(fun, found):
    """Here: a callback does not lower for a platform that is not there."""
    lines = faults(Program("", fun, (X[:3, 0],)).lowered("cpu"))
    assert any(found in line for line in lines) if found else not lines


@pytest.mark.parametrize("case", params_of(CASES))
def test_fit_and_prediction_lower_for_accelerators(case):
    for each in programs_of(case):
        for platform in ("cuda", "tpu"):
            assert faults(each.lowered(platform)) == [], each.name


@pytest.mark.parametrize("case", params_of(case for case in CASES if "fit" not in case.needs_values))
def test_runs_of_a_mesh_pass_the_check_of_what_varies(case):
    """A user's own `shard_map` takes a fit and prediction as they are; from the trace alone."""
    ((_, run, rows),) = programs_of(case)
    runs = [np.stack([part] * 8) for part in rows]
    mesh, spec = AbstractMesh((4,), ("runs",), axis_types=(AxisType.Auto,)), PartitionSpec("runs")
    spread = jax.shard_map(over_runs(run), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    try:
        shapes = jax.eval_shape(spread, *runs)
    except ValueError as error:
        # jax 0.12: its normal distribution function does not pass, and the message says to report it.
        if "Primitive polynomial" not in str(error):
            raise
        pytest.skip("a function of JAX itself does not pass")
    for many, one in zip(shapes, jax.eval_shape(run, *rows), strict=True):
        assert (many.shape, many.dtype) == ((8, *one.shape), np.float32)


def test_float64_on_a_tpu_is_advised_against(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    evidence = lambda y: rio.fit(X, Point(MEAN), y, inference=Exact(ard=False)).evidence
    with pytest.warns(UserWarning, match="Give float32 rows"):
        jax.eval_shape(evidence, Y.astype(float))
    jax.eval_shape(evidence, Y)


COMPILE = """
import sys
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
import test_accelerators

device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
there = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device))
(case,) = [case for case in test_accelerators.CASES if case.name == sys.argv[1]]
for program in test_accelerators.programs_of(case):
    compiled = jax.jit(program.fun).lower(*jax.tree.map(there, program.args)).compile()
    print(program.name, compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, which compiles for a TPU, is not there")
@pytest.mark.parametrize("name", [case.name for case in CASES if "predict" not in case.needs_values])
def test_fit_and_prediction_compile_for_a_tpu(name):
    """Ahead of time, in a process of its own: a compilation cannot be interrupted."""
    subprocess.run(
        [sys.executable, "-c", COMPILE, name],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_X64": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
            # At a flag of another compiler libtpu ends the process.
            "XLA_FLAGS": "",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            # It looks for a TPU's metadata on the network, and lets one process at a time in.
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
