"""CRUDE: the errors on calibration rows, in units of the predicted std, give every prediction its shape.

Zelikman, Healy, Zhou and Avati, "CRUDE: Calibrating Regression Uncertainty Distributions Empirically", 2020. The
predictive distribution y = mean + std Z, with Z uniform on the sorted z = (y - mean) / std of the calibration rows, is
`distributions.Empirical`: its cdf, quantiles (equation 3), mean (1, 4) and variance (2, 5). The index of Algorithm 1
is the rule "crude" of `functional.quantiles.empirical_quantile`. Of vector targets the whitened errors are tabled,
L^-1 (y - mean) with the Cholesky factor L of the predicted covariance: the predictive distribution is
`MultivariateEmpirical`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from jaxcal import _checks
from jaxcal.calibrators._base import (
    check_base,
    check_not_out_of_fold,
    error_unit,
    standardized_errors,
    warn_without_width,
)
from jaxcal.distributions import Distribution, Empirical, MultivariateEmpirical, MultivariateNormal, Point
from jaxcal.functional.quantiles import empirical_rank
from jaxcal.guarantee import Guarantee
from jaxcal.preprocessing import Standardizer

# So many distances to calibration rows are held in memory at once.
_DISTANCES_AT_ONCE = 2**22


@_checks.renamed(neighbours="neighbors")
def fit(
    x: ArrayLike | None,
    base: Distribution | MultivariateNormal,
    y: ArrayLike,
    *,
    rank: str = "crude",
    neighbors: int | None = None,
) -> "CRUDE | VectorCRUDE":
    """Sort the standardized errors z = (y - base.mean) / base.std: the table that shapes every prediction.

    On rows that the model behind `base` was not trained on: its errors on training rows are smaller than new ones.
    `jaxcal.pipeline` has such predictions of all rows, out of fold.

    A base without a std, a `Point`, has scale 1 in every row: z is the error itself. Errors of vector targets, from the
    means of a `MultivariateNormal`, are whitened by its covariance, component by component.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. No gradient passes through the fit;
    predictions are differentiable in base.

    Args:
        x: inputs [L, d]; a vector [L] is one column. They are used only with `neighbors`, and may be None else.
        base: the model's predictions at x, [L]; of vectors [L, t] a `MultivariateNormal`.
        y: targets [L], or [L, t].
        rank: which of the sorted z is the quantile at level p. "crude" is Algorithm 1's z[int(p L)], counted from 0:
            a new row lies at or below it with probability (int(p L) + 1) / (L + 1), and in the 90 % interval of 20
            rows with 85.7 %. "conformal" is the one of rank ceil((L + 1) p), counted from 1, which keeps the guarantee
            of `CRUDE.guarantee`; where L is too small for one the quantile is infinite, and a warning names the L
            needed.
        neighbors: take for each prediction the table of the calibration rows with the nearest inputs, so many of
            them, in place of all: by Euclidean distance, every column standardized by the calibration rows.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if an argument is empty, not finite, of the wrong shape or length; if a std of base is not positive;
            if there are fewer rows than neighbors, or neighbors are asked for without x, with rank="conformal", whose
            guarantee would not hold, or for vectors; if rank="conformal" is asked for vectors, which have no ranks.

    Warns:
        UserWarning: if y equals base.mean in every row, so that no prediction has a width.

    Source: Zelikman et al., CRUDE, 2020, Algorithm 1; `neighbors` and vectors are directions named in its section 7.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcal import Normal
        >>> from jaxcal.calibrators import crude
        >>> base = Normal(jnp.zeros(4), jnp.array([1.0, 2.0, 1.0, 2.0]))
        >>> fitted = crude.fit(None, base, jnp.array([3.0, -2.0, 0.0, 1.0]))
        >>> print(fitted.z, fitted(None, Normal(5.0, 2.0)).icdf(0.75))
        [-1.   0.   0.5  3. ] [11.]
    """
    _checks.check_choice("rank", rank, ("crude", "conformal"))
    if isinstance(base, MultivariateNormal):
        if rank == "conformal" or neighbors is not None:
            raise ValueError("of vector targets there is neither rank='conformal' nor a table of neighbors.")
        return _fit_vectors(base, y)
    y = _checks.as_vector("y", y)
    check_base(base, y.shape[0])
    neighborhood = None if neighbors is None else _neighborhood(x, y.shape[0], neighbors, rank)
    scaled = not isinstance(base, Point)
    z = standardized_errors(base, y, scaled)
    warn_without_width(z)
    # Neighbors are taken from the rows as they came: of equally distant ones the lowest errors must not come first.
    return CRUDE(
        z=jnp.sort(z) if neighbors is None else z,
        neighborhood=neighborhood,
        scaled=scaled,
        rank=rank,
        out_of_fold=base.is_out_of_fold,
    )


class CRUDE(eqx.Module):
    """A table of standardized errors; made by `fit`.

    Attributes:
        z: the standardized errors [L], in increasing order; with neighbors in the order of the calibration rows.
        neighborhood: which errors are taken for a prediction; None for all.
        scaled: whether errors are measured in predicted stds; else, after a `Point`, in the unit of y.
        rank: "crude" or "conformal".
        out_of_fold: whether the errors are those of `jaxcal.out_of_fold`.
    """

    z: Float[Array, "*l"]
    neighborhood: "Neighborhood | None"
    scaled: bool = eqx.field(static=True)
    rank: str = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Empirical:
        """The distribution base.mean + base.std * Z of every row.

        Without neighbors the rows share one table: a million predictions cost a million means and stds. With them
        there is a table of so many values a row.

        Args:
            x: inputs [n, d]; a vector [n] is one column; used only with neighbors.
            base: the model's predictions at x, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if an argument is not finite, of the wrong shape or length; if a std of base is not positive, or
                base is a `Point` where errors are measured in predicted stds.
        """
        check_base(base)
        scale = error_unit(base, self.scaled)
        if self.neighborhood is None:
            return Empirical(base.mean, scale, self.z, self.rank)
        x = _checks.as_matrix("x", x, length=base.mean.shape[0])
        _checks.check_columns("x", x, self.neighborhood.inputs.shape[-1], "the table was fitted on")
        return Empirical(base.mean, scale, self.neighborhood.tables(self.z, x), self.rank)

    def guarantee(self, confidence_level: float) -> Guarantee:
        """The coverage guarantee of the central interval at this level, with rank="conformal".

        Raises:
            ValueError: if the confidence level lies outside (0, 1); if the rank is "crude", which guarantees nothing;
            if
                the errors are out of fold.

        Example:
            >>> import jax.numpy as jnp
            >>> from jaxcal import Point
            >>> from jaxcal.calibrators import crude
            >>> fitted = crude.fit(None, Point(jnp.zeros(99)), jnp.arange(99.0), rank="conformal")
            >>> print(fitted.guarantee(0.9).coverage)
            0.9
        """
        _checks.check_fraction("confidence_level", confidence_level)
        rows = self.z.shape[-1]
        if self.neighborhood is not None:
            raise ValueError("a table of neighbors guarantees nothing: without neighbors, rank='conformal' does.")
        if self.rank == "crude":
            low, high = (empirical_rank((1 + sign * confidence_level) / 2, rows, "crude") for sign in (-1, 1))
            raise ValueError(
                f"rank='crude' guarantees nothing: its {100 * confidence_level:g} % interval covers a new row with "
                f"probability {100 * float(high - low) / (rows + 1):.1f} %; rank='conformal' has a guarantee."
            )
        check_not_out_of_fold(self.out_of_fold)
        return Guarantee.of(confidence_level, rows, self.rank)


class VectorCRUDE(eqx.Module):
    """A table of whitened errors of vector targets; made by `fit`.

    Attributes:
        z: the whitened errors [L, t], in the order of the calibration rows: those of a row stay together, so that what
            the predicted covariance does not explain of their dependence is kept.
    """

    z: Float[Array, "*l t"]

    def __call__(self, x: ArrayLike | None, base: MultivariateNormal) -> MultivariateEmpirical:
        """The distribution base.mean + base.factor Z of every row, Z one of the whitened errors.

        Args:
            x: not used; may be None.
            base: the model's predictions [n, t].

        Raises:
            TypeError: if base is not a `MultivariateNormal`.
            ValueError: if it has another number of components.
        """
        if not isinstance(base, MultivariateNormal):
            raise TypeError(f"base must be a MultivariateNormal, as in the fit; got {type(base).__name__}.")
        return MultivariateEmpirical(base.mean, base.factor, self.z)


class Neighborhood(eqx.Module):
    """The calibration rows nearest to a query.

    Attributes:
        inputs: the standardized inputs of the calibration rows [L, d].
        x_scaler: the standardization of the inputs.
        number: how many rows are taken.
    """

    inputs: Float[Array, "*l d"]
    x_scaler: Standardizer
    number: int = eqx.field(static=True)

    @eqx.filter_jit
    def tables(self, z: Float[Array, " l"], x: Float[Array, "n d"]) -> Float[Array, "n k"]:
        """The sorted errors of the nearest rows of every query."""

        def table(query: Float[Array, " d"]) -> Float[Array, " k"]:
            distances = jnp.sum((self.inputs - query[None]) ** 2, axis=1)
            # In double precision a CPU would sort all distances to find the nearest: ten times slower.
            return jnp.sort(z[lax.top_k(-distances.astype(jnp.float32), self.number)[1]])

        at_once = max(1, _DISTANCES_AT_ONCE // z.shape[0])
        return lax.map(table, lax.stop_gradient(self.x_scaler(x)), batch_size=at_once)


def _fit_vectors(base: MultivariateNormal, y: ArrayLike) -> VectorCRUDE:
    y = _checks.as_matrix("y", y, length=base.mean.shape[0])
    z = lax.stop_gradient(base.whiten(y))
    _checks.check_finite("the whitened errors", z)
    return VectorCRUDE(z)


def _neighborhood(x: ArrayLike | None, length: int, number: int, rank: str) -> Neighborhood:
    if rank == "conformal":
        raise ValueError("neighbors cannot go with rank='conformal': its guarantee holds for the table of all rows.")
    if x is None:
        raise ValueError("x is None, but neighbors are found by their inputs.")
    _checks.check_at_least("neighbors", number, 1)
    if number > length:
        raise ValueError(f"neighbors is {number}, but there are {length} calibration rows.")
    x_scaler, inputs = _standardized(_checks.as_matrix("x", x, length=length))
    return Neighborhood(inputs, x_scaler, number)


@jax.jit
def _standardized(x):
    x = lax.stop_gradient(x)
    x_scaler = Standardizer.of(x)
    return x_scaler, x_scaler(x)
