"""What a derivative through a fit costs: `python benchmarks/speed/derivatives.py`.

Seconds of a fit with the means and stds of 20 rows, of the fit that can be differentiated, and of that with the
gradient in all rows; the ratios of both to the first. Simulated rows, the least of some calls.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from _common import fastest, provenance, tell

import jaxcal as jc
from jaxcal.functional.scores import accrue_loss

NEW = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3, help="the least time of so many is printed")
    parser.add_argument("--out", type=Path, help="file that gets a copy of what is printed")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    tell(lines(arguments.calls), arguments.out)


def lines(calls: int) -> Iterator[str]:
    yield provenance()
    yield f"\n{'':36}{'rows':>8}{'fit':>10}{'with':>10}{'gradient':>10}{'ratios':>14}"
    for (name, rows), (fit, takes_option) in CASES.items():
        data = simulated(rows)
        plain, able = (partial(fit, **option) for option in ({}, {"differentiable": True} if takes_option else {}))
        runs = reading(plain), reading(able), jax.value_and_grad(reading(able), (0, 1, 2, 3))
        first, second, third = (fastest(partial(jax.jit(run), *data), calls)[1] for run in runs)
        ratios = f"{second / first:8.2f}{third / first:6.2f}"
        yield f"{name:36}{rows:8}{first:10.4f}{second:10.4f}{third:10.4f}{ratios:>14}"


def simulated(rows: int) -> tuple[jax.Array, ...]:
    """Inputs, means, stds and targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4))
    mean, std = np.sin(x[:, 0]), np.exp(0.2 * x[:, 1])
    y = mean + 0.5 * mean**2 + 0.3 * x[:, 1] * x[:, 0] + 0.2 * std * rng.normal(size=rows)
    return tuple(map(jnp.asarray, (x, mean, std, y)))


def reading(fit: Callable) -> Callable[..., jax.Array]:
    """The sum of means and stds of a few rows, as a function of the calibration rows."""

    def total(x: jax.Array, mean: jax.Array, std: jax.Array, y: jax.Array) -> jax.Array:
        fitted, base = fit(x, jc.Normal(mean, std), y), jc.Normal(mean[:NEW], std[:NEW])
        distribution = fitted(x[:NEW], base)
        return jnp.sum(distribution.mean + distribution.std)

    return total


def one_column(fit: Callable) -> Callable:
    """A fit to the first column of the inputs alone."""

    def fit_column(x, base, y, **options):
        fitted = fit(x[:, 0], base, y, **options)
        return lambda x, base: fitted(x[:, 0], base)

    return fit_column


def predictor(fit: Callable) -> Callable:
    """A fit that takes no base, as a calibrator."""

    def fit_rows(x, base, y, **options):
        fitted = fit(x, y, **options)
        return lambda x, base: fitted(x)

    return fit_rows


def on_two_parts(x, base, y, **options):
    """`sharp_gp` with every third row as a training row."""
    trains = np.arange(y.shape[0]) % 3 == 0
    training = {"x_train": x[trains], "y_train": y[trains]}
    return jc.sharp_gp.fit(x[~trains], jc.Point(base.mean[~trains]), y[~trains], **training, **options)


def polynomial(**numbers):
    """ACCRUE's polynomial of one column, with numbers of its loss."""
    loss = partial(accrue_loss, **numbers)
    return one_column(partial(jc.accrue.fit, model="polynomial", key=jax.random.key(0), loss=loss))


# What is fitted, to how many rows, and whether it has the option.
CASES = {
    ("crude", 10_000): (jc.crude.fit, False),
    ("crude", 1_000_000): (jc.crude.fit, False),
    ("conformal", 10_000): (jc.conformal.fit, False),
    ("conformal, linear", 10_000): (partial(jc.conformal.fit, rule="linear"), False),
    ("isotonic", 10_000): (jc.isotonic.fit, False),
    ("gaussian_mle", 10_000): (jc.gaussian_mle.fit, False),
    ("rio, exact", 200): (jc.rio.fit, True),
    ("rio, exact", 500): (jc.rio.fit, True),
    ("rio, 100 inducing points", 1000): (partial(jc.rio.fit, inference=jc.gp.Sparse(num_inducing=100)), True),
    ("rio, nearest rows", 500): (partial(jc.rio.fit, inference=jc.gp.Nearest()), True),
    ("gaussian_process, exact", 500): (predictor(jc.gaussian_process.fit), True),
    ("accrue, polynomial, beta=1", 1000): (polynomial(beta=1), True),
    ("accrue, polynomial, smoothed", 1000): (polynomial(smoothing=0.1), True),
    ("sharp_gp", 600): (on_two_parts, True),
}


if __name__ == "__main__":
    main()
