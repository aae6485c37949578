"""Sharp calibrated GPs: `NPROC=1 OPENBLAS_NUM_THREADS=1 taskset -c 0 python benchmarks/speed/sharp_gp.py`.

The value and the gradient of eq. 7 at the sizes of concrete (618 training rows, 206 calibration rows, 8 columns), with
the closed-form derivatives and by differentiating through the factorization, which is the peer; and of the
leave-one-out form. Then whole fits of all levels on boston, by the line and by columns, chosen by the training rows and
by the calibration rows. Seconds are processor time, the least of several calls, after one that compiles.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from _common import fastest, peak_memory, provenance, tell, verdict

ASKED_GRADIENT, ASKED_LINE, ASKED_ARD = 0.010, 0.2, 6
NUM_TRAIN, NUM_CALIBRATION, NUM_COLUMNS, NOISE, LEVEL = 618, 206, 8, 0.1, 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="calls, of which the fastest counts")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.repeats), arguments.out)


def report(repeats: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield provenance()
    yield from gradients(repeats)
    yield from fits(repeats)
    yield f"largest resident set {peak_memory():.0f} MB"


def gradients(repeats: int) -> Iterator[str]:
    """Of eq. 7, by the closed forms and by autodiff."""
    import jax
    import jax.numpy as jnp

    from jaxcal.calibrators.sharp_gp import widths
    from jaxcal.functional import kernels, linalg

    rng = np.random.default_rng(0)
    x, at = (jnp.asarray(rng.normal(size=(rows, NUM_COLUMNS))) for rows in (NUM_TRAIN, NUM_CALIBRATION))
    errors, leave_one_out_errors = (jnp.asarray(rng.normal(size=rows)) for rows in (NUM_CALIBRATION, NUM_TRAIN))
    problem = widths.WidthData(x, jnp.asarray(NOISE), errors, at)
    start, level = jnp.full(NUM_COLUMNS, -1.0), jnp.asarray(LEVEL)

    def by_autodiff(log_scale, level):
        covariance = lambda rows: kernels.squared_exponential(x, rows, jnp.exp(-log_scale))
        factor = jnp.linalg.cholesky(linalg.add_diagonal(covariance(x), NOISE))
        known = jax.scipy.linalg.solve_triangular(factor, covariance(at), lower=True)
        return widths.log_width(1 + NOISE - jnp.sum(known**2, axis=0), errors, level)

    leave_one_out = problem._replace(at=None, errors=leave_one_out_errors)
    seconds = {}
    for name, evaluation in (
        ("ours", problem.log_width_and_gradient),
        ("peer", jax.value_and_grad(by_autodiff)),
        ("leave-one-out", leave_one_out.log_width_and_gradient),
    ):
        compiled = jax.jit(evaluation)
        (value, slope), seconds[name] = fastest(partial(compiled, start, level), repeats, time.process_time)
        if name == "ours":
            ours = value, slope
        elif name == "peer":
            np.testing.assert_allclose(value, ours[0], rtol=1e-10)
            np.testing.assert_allclose(slope, ours[1], rtol=1e-8, atol=1e-10)
    yield (
        f"value and gradient of eq. 7, {NUM_TRAIN} and {NUM_CALIBRATION} rows, 64 bits: {1e3 * seconds['ours']:.1f} ms "
        f"(asked for: at most {1e3 * ASKED_GRADIENT:.0f} ms; {verdict(seconds['ours'] <= ASKED_GRADIENT)}); through "
        f"the factorization {1e3 * seconds['peer']:.1f} ms, {seconds['peer'] / seconds['ours']:.1f} times as long"
    )
    yield f"by the {NUM_TRAIN} training rows, by leave-one-out: {1e3 * seconds['leave-one-out']:.1f} ms"


def fits(repeats: int) -> Iterator[str]:
    """All levels of boston."""
    import jaxcal as jc

    data = jc.datasets.load("boston")
    train, rest, _ = jc.datasets.split(len(data.y), (0.6, 0.2, 0.2), seed=0)
    model = jc.gaussian_process.fit(data.x[train], data.y[train])
    given = {"x_train": data.x[train], "y_train": data.y[train], "kernel": model}
    fit: Callable = partial(jc.sharp_gp.fit, data.x[rest], model(data.x[rest]), data.y[rest], **given)
    for search, asked in (("line", ASKED_LINE), ("ard", ASKED_ARD)):
        for fit_on in ("training", "calibration"):
            variance = jc.sharp_gp.Variance(search=search, fit_on=fit_on)
            _, seconds = fastest(partial(fit, variance=variance), max(repeats // 4, 2), time.process_time)
            yield (
                f'boston, all levels, search="{search}", fit_on="{fit_on}": {seconds:.2f} s '
                f"(asked for: below {asked:g} s; {verdict(seconds < asked)})"
            )


if __name__ == "__main__":
    main()
