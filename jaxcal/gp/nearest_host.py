"""The fit of known rows, each given the rows nearest to it, by NumPy; `gp.inference.nearest` has the same in JAX.

It is for sums of squared exponentials with Gaussian noise. `functional.gp_nearest` has the algebra.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from jaxcal._numpy import AnyArray, threads_for
from jaxcal.functional import gp_host, gp_nearest
from jaxcal.gp.kernels import Kernel, Points
from jaxcal.gp.model import Data, Model, as_vector, bounds, penalty
from jaxcal.gp.rows import ProcessData, parts_of

Loss = Callable[[Float[np.ndarray, " p"]], tuple[float, Float[np.ndarray, " p"]]]


def loss_near(
    model: Model, data: Data, jitter: Float[AnyArray, ""], deciding: Int[np.ndarray, " r"], neighbors: int
) -> Loss:
    """The log of the leave-one-out CRPS plus the penalty beyond the bounds, and its gradient, by a vector.

    Args:
        model: the model under which the nearest rows are found. `model.as_vector` says what the vector holds.
        data: all rows.
        jitter: as a fraction of the prior variance.
        deciding: the numbers of the rows that decide.
        neighbors: how many rows each of them is given.
    """
    rows, place = ProcessData.of(model, data), as_vector(model)[0].astype(float)
    low, high = (np.asarray(bound, float) for bound in bounds(model, data))
    with threads_for(neighbors):
        near = _nearest_of_rows(rows.kernels(place), deciding, neighbors)

    def loss(vector: Float[np.ndarray, " p"]) -> tuple[float, Float[np.ndarray, " p"]]:
        on_diagonal, kernels = rows.diagonal(vector, float(jitter), neighbors), rows.kernels(vector)
        cost, slope, _ = penalty(vector, low, high, len(deciding))
        noisy = gp_nearest.Noisy(on_diagonal.values, on_diagonal.derivatives, rows.targets)
        with threads_for(neighbors):
            value, gradient = gp_nearest.log_crps(kernels, deciding, near, noisy)
        return value + cost, gradient + slope

    return loss


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
        targets: the targets of all rows.
        noises: the variance of noise and jitter of all rows.
        at: all rows.
        points: where to predict.
        neighbors: how many rows each is given.
        without: for every point the number of a row that does not count. None if all rows count.
    """
    parts, new = parts_of(kernel, at), [part.rows for part in parts_of(kernel, points)]
    with threads_for(neighbors):
        near = gp_nearest.nearest(parts, new, _number(parts, neighbors), without)
        predictions = gp_nearest.predict(parts, gp_nearest.Few(new, near), noises.astype(float), targets.astype(float))
    mean, variance = (each.astype(targets.dtype) for each in predictions)
    return mean, variance


def _nearest_of_rows(parts: list[gp_host.Part], some: Int[np.ndarray, " r"], neighbors: int) -> Int[np.ndarray, "r k"]:
    return gp_nearest.nearest(parts, [part.rows[some] for part in parts], _number(parts, neighbors), some)


def _number(parts: list[gp_host.Part], neighbors: int) -> int:
    return min(neighbors, len(parts[0].rows) - 1)
