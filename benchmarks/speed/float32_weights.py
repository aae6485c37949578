"""What a posterior in float32 loses, and what the correction by residuals in float64 regains: `float32_weights.py`.

Each data set gives 2,000 rows for a fit and up to 500 for its predictions. The hyperparameters are those of the exact
fit in 32 bits. Then the weights come from three posteriors: by float64, by a program in float32, and by the same
program with the correction of `gp.device`, as accelerators have it. Told is the root mean square of the differences
between predicted means, in stds of the prediction.
"""

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import fastest, provenance, tell

import jaxcal as jc
from jaxcal._numpy import as_numpy
from jaxcal.gp import device, host
from jaxcal.gp.model import Data, SearchResult, posterior

NAMES = "election", "energy_heating", "kin8nm", "grid_stability", "gpu_sgemm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default=",".join(NAMES))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of rounding: that is what is measured
    tell(report(arguments), arguments.out)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    yield f"# {provenance('numpy')}"
    yield f"# {__doc__.splitlines()[0]}"
    yield "dataset            rows  noise/prior  float32  corrected  seconds: float32, corrected"
    for name in arguments.datasets.split(","):
        yield measured(name, arguments.rows)


def measured(name: str, number: int) -> str:
    dataset = jc.datasets.load(name)
    order = np.random.default_rng(0).permutation(len(dataset.y))
    x, y = (np.asarray(rows, np.float32)[order] for rows in (dataset.x, dataset.y))
    n = min(number, len(y) - 100)
    fitted = jc.gaussian_process.fit(x[:n], y[:n], inference=jc.gp.Exact(tolerance=0.5))
    process, test = fitted.process, fitted.x_scaler(jnp.asarray(x[n : n + 500]))
    data = Data(process.points, fitted.y_scaler(jnp.asarray(y[:n])))
    found = SearchResult(
        process.model, process.evidence, process.iterations, process.result, process.failed_initial_values
    )
    right = host.concluded(*as_numpy((found, data, process.jitter))).posterior.weights

    plain, fast = fastest(lambda: posterior(found.model, data, process.jitter), 1)
    corrected, slow = fastest(lambda: device.concluded(found, data, process.jitter), 1)
    _, variance = eqx.filter_jit(process)(test)
    std = np.sqrt(variance + process.noise_variance)

    def off(weights: jax.Array) -> float:
        by = lambda weights: replace(process, posterior=replace(process.posterior, weights=jnp.asarray(weights)))
        differences = eqx.filter_jit(by(weights))(test)[0] - eqx.filter_jit(by(right))(test)[0]
        return float(jnp.sqrt(jnp.mean((differences / std) ** 2)))

    share = float(process.noise_variance / process.model.kernel.diagonal(process.points).mean())
    errors = f"{off(plain.weights):8.4f} {off(corrected.posterior.weights):10.4f}"
    return f"{name:18} {n:4} {share:12.5f} {errors}  {fast:8.2f} {slow:8.2f}"


if __name__ == "__main__":
    main()
