"""The fit of known rows given those nearest to each, by NumPy; `gp.inference.nearest` has the same in JAX.

It is for sums of squared exponentials with Gaussian noise. `functional.gp_nearest` has the algebra.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxcal._numpy import AnyArray, threads_for
from jaxcal.functional import gp_host, gp_nearest
from jaxcal.gp.kernels import Kernel, Points
from jaxcal.gp.model import Data, Found, as_vector, bounds, penalty
from jaxcal.gp.protocols import Inference
from jaxcal.gp.rows import Rows, parts_of
from jaxcal.optimize import Result, descend

# The first descent is of so many of the deciding rows, the second one of all.
_FIRST = 500


def optimum(
    inference: Inference,
    neighbors: int,
    first: Found,
    data: Data,
    jitter: Float[AnyArray, ""],
    deciding: Int[np.ndarray, " r"],
    more_noise: tuple[float, ...],
) -> Found:
    """The hyperparameters of the least leave-one-out CRPS that are descended to from what some rows say.

    Args:
        inference: of which tolerance and steps count.
        neighbors: how many rows each is given.
        first: where to begin.
        data: all rows.
        jitter: as a fraction of the prior variance.
        deciding: the numbers of the rows that decide.
        more_noise: fractions of the target's variance that the noise may begin at.
    """
    model = first.model
    rows, (vector, model_of) = Rows.of(model, data), as_vector(model)
    low, high = (np.asarray(bound, float) for bound in bounds(model, data))
    vector, steps, result = vector.astype(float), 0, Result.CONVERGED
    for some in (deciding[:_FIRST], deciding):
        near = _nearest_of_rows(rows.kernels(vector), some, neighbors)

        def loss(vector: Float[np.ndarray, " p"], some=some, near=near) -> tuple[float, Float[np.ndarray, " p"]]:
            on_diagonal, kernels = rows.diagonal(vector, float(jitter), neighbors), rows.kernels(vector)
            cost, slope, _ = penalty(vector, low, high, len(some))
            noisy = gp_nearest.Noisy(on_diagonal.values, on_diagonal.derivatives, rows.targets)
            value, gradient = gp_nearest.log_crps(kernels, some, near, noisy)
            return value + cost, gradient + slope

        if not steps and rows.log_noise is None:
            vector = _of_the_best_noise(loss, vector, int(rows.starts[-1]), more_noise)
        if not vector.size:
            break
        limits = {"max_iterations": inference.max_iterations, "gain_tolerance": inference.tolerance}
        with threads_for(neighbors):
            end = descend(loss, vector, **limits, on_host=True)
        vector, steps, result = end.params, steps + end.steps, end.result
    found = model_of(np.asarray(vector, data.targets.dtype))
    return first._replace(model=found, steps=np.asarray(steps, np.int32), result=np.asarray(result, np.int32))


def predict(
    kernel: Kernel,
    targets: Float[np.ndarray, " n"],
    noises: Float[np.ndarray, " n"],
    at: Points,
    points: Points,
    neighbors: int,
    without: Int[np.ndarray, " m"] | None = None,
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Latent means and variances at points, each given the rows nearest to it, before they are scaled.

    Args:
        kernel: a sum of squared exponentials.
        targets: of all rows.
        noises: of all rows, the variance on the diagonal beside the kernel.
        at: all rows.
        points: where to predict.
        neighbors: how many rows each is given.
        without: for every point the number of a row that does not count; None where all do.
    """
    parts, new = parts_of(kernel, at), [part.rows for part in parts_of(kernel, points)]
    with threads_for(neighbors):
        near = gp_nearest.nearest(parts, new, _number(parts, neighbors), without)
        found = gp_nearest.predict(parts, gp_nearest.Few(new, near), noises.astype(float), targets.astype(float))
    mean, variance = (each.astype(targets.dtype) for each in found)
    return mean, variance


def _nearest_of_rows(parts: list[gp_host.Part], some: Int[np.ndarray, " r"], neighbors: int) -> Int[np.ndarray, "r k"]:
    return gp_nearest.nearest(parts, [part.rows[some] for part in parts], _number(parts, neighbors), some)


def _number(parts: list[gp_host.Part], neighbors: int) -> int:
    return min(neighbors, len(parts[0].rows) - 1)


def _of_the_best_noise(
    loss: Any, vector: Float[np.ndarray, " p"], place: int, more_noise: tuple[float, ...]
) -> Float[np.ndarray, " p"]:
    """The vector with its own noise, or with more."""
    several = [vector, *(np.where(np.arange(len(vector)) == place, np.log(noise), vector) for noise in more_noise)]
    values = [loss(each)[0] for each in several]
    return several[int(np.argmin(np.where(np.isnan(values), np.inf, values)))]
