"""The fit of known rows given those nearest to each, by NumPy; `gp.inference.nearest` has the same in JAX.

It is for sums of squared exponentials with Gaussian noise. `functional.gp_nearest` has the algebra.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from jaxcal._numpy import AnyArray, threads_for
from jaxcal.functional import gp_host, gp_nearest
from jaxcal.gp.kernels import Kernel, Points
from jaxcal.gp.model import Data, Found, Model, as_vector, bounds, number_of, one_of, penalty
from jaxcal.gp.protocols import Inference
from jaxcal.gp.rows import Rows, parts_of
from jaxcal.optimize import Result, descend

Loss = Callable[[Float[np.ndarray, " p"]], tuple[float, Float[np.ndarray, " p"]]]

# Places to begin are compared by so many of the deciding rows.
COMPARED = 200
# The descent is made twice: with the rows that are nearest at the initial values, and with those nearest at its end. To
# make the first one with fewer deciding rows ends at worse optima: on election the CRPS was .039 in place of .010.
DESCENTS = 2


def optimum(
    inference: Inference,
    neighbors: int,
    starts: Model,
    first: Found,
    data: Data,
    jitter: Float[AnyArray, ""],
    deciding: Int[np.ndarray, " r"],
) -> Found:
    """The hyperparameters of the least leave-one-out CRPS that are descended to from the best of some models.

    Args:
        inference: of which tolerance and steps count.
        neighbors: how many rows each is given.
        starts: the models, along a leading axis.
        first: what some rows say.
        data: all rows.
        jitter: as a fraction of the prior variance.
        deciding: the numbers of the rows that decide.
    """
    model = one_of(starts)
    rows, model_of = Rows.of(model, data), as_vector(model)[1]
    low, high = (np.asarray(bound, float) for bound in bounds(model, data))

    def loss_near(place: Float[np.ndarray, " p"], some: Int[np.ndarray, " s"]) -> Loss:
        near = _nearest_of_rows(rows.kernels(place), some, neighbors)

        def loss(vector: Float[np.ndarray, " p"]) -> tuple[float, Float[np.ndarray, " p"]]:
            on_diagonal, kernels = rows.diagonal(vector, float(jitter), neighbors), rows.kernels(vector)
            cost, slope, _ = penalty(vector, low, high, len(some))
            noisy = gp_nearest.Noisy(on_diagonal.values, on_diagonal.derivatives, rows.targets)
            value, gradient = gp_nearest.log_crps(kernels, some, near, noisy)
            return value + cost, gradient + slope

        return loss

    steps, result, few = 0, Result.CONVERGED, deciding[:COMPARED]
    limits = {"max_iterations": inference.max_iterations, "gain_tolerance": inference.tolerance}
    with threads_for(neighbors):
        places = [as_vector(one_of(starts, k))[0].astype(float) for k in range(number_of(starts))]
        losses = [loss_near(place, few)(place)[0] for place in places] if len(places) > 1 else [0.0]
        vector = places[int(np.argmin(np.where(np.isnan(losses), np.inf, losses)))]
        for _ in range(DESCENTS):
            end = descend(loss_near(vector, deciding), vector, **limits, on_host=True)
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
