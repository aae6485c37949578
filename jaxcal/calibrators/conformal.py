"""Split conformal prediction: intervals that cover a new row with at least the probability that they claim.

The scores of calibration rows that the model was not trained on are sorted; that of rank ceil((L + 1) c) is exceeded
by the score of a new, exchangeable row with a probability of at most 1 - c, whatever the model and the data. The
scores, by the argument `score` of `fit`:

============  ===========================================  ==============================================
"absolute"    |y - mean|                                   Papadopoulos et al. 2002; Lei et al. 2018
"scaled"      |y - mean| / std                             Papadopoulos et al. 2002; Lei et al. 2018, 5.2
"signed"      (y - mean) / std, or y - mean: two tails     Linusson, Johansson and Lofstrom 2014
"quantile"    max(lower - y, y - upper), for every level   Romano, Patterson and Candes 2019
============  ===========================================  ==============================================

The first three read their intervals, at any level, from one table: `distributions.Empirical` with the rule "symmetric"
or "conformal". The last one makes intervals at the levels chosen beforehand: `distributions.Quantiles`.
"""

import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from jaxcal import _checks
from jaxcal.calibrators._base import check_base, error_unit, standardised_errors
from jaxcal.distributions import Distribution, Empirical, Point, Quantiles
from jaxcal.functional.quantiles import empirical_quantile, smallest_table
from jaxcal.guarantee import Guarantee

_CONFIDENCE_LEVELS = (0.5, 0.8, 0.9, 0.95)


def fit(
    x: ArrayLike | None,
    base: Distribution,
    y: ArrayLike,
    *,
    score: str | None = None,
    confidence_levels: Sequence[float] | None = None,
) -> "SplitConformal | ConformalisedQuantiles":
    """Sort the scores of the calibration rows, which must not be those that the model was trained on.

    - "absolute", "scaled": the interval at level c is mean -+ s (std) with the score s of rank ceil((L + 1) c).
    - "signed": its ends are mean + z (std) with the z of the ranks floor((L + 1) (1 - c) / 2) and
      ceil((L + 1) (1 + c) / 2), each tail by itself.
    - "quantile": the base's own quantiles at (1 -+ c) / 2 are moved apart (or together, not past the median) by the
      score of rank ceil((L + 1) c) of that level. Where the interval of a higher level would leave out some of that of
      a lower one it is widened, which keeps the promise.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. No gradient passes through the fit;
    predictions are differentiable in base.

    Args:
        x: not looked at; None will do.
        base: the model's predictions at x, [L].
        y: targets [L].
        score: one of the four above; None for "scaled" where the base has a std, else "absolute".
        confidence_levels: the levels c of the intervals of score="quantile" (default 0.5, 0.8, 0.9, 0.95).

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if an argument is empty, not finite, of the wrong shape or length; if a std of base is not positive
            ("quantile" looks at no std); if the score needs a std and base is a `Point`; if there are too few rows for
            a confidence level.

    Source: Papadopoulos, Proedrou, Vovk and Gammerman, ECML 2002; Lei, G'Sell, Rinaldo, Tibshirani and Wasserman,
    JASA 113 (2018); Linusson, Johansson and Lofstrom, PAKDD 2014; Romano, Patterson and Candes, NeurIPS 2019.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcal import Point
        >>> from jaxcal.calibrators import conformal
        >>> fitted = conformal.fit(None, Point(jnp.zeros(99)), jnp.arange(1.0, 100.0))
        >>> lower, upper = fitted(None, Point(1000.0)).interval(0.9)
        >>> print(lower, upper, fitted.guarantee(0.9).coverage)
        [910.] [1090.] 0.9
    """
    score = score or ("absolute" if isinstance(base, Point) else "scaled")
    _checks.check_choice("score", score, ("absolute", "scaled", "signed", "quantile"))
    y = _checks.as_vector("y", y)
    if score == "quantile":
        return _fit_quantiles(base, y, _CONFIDENCE_LEVELS if confidence_levels is None else confidence_levels)
    if confidence_levels is not None:
        raise ValueError(f"confidence_levels go with score='quantile'; score={score!r} answers at any level.")
    check_base(base, y.shape[0])
    scaled = score == "scaled" or (score == "signed" and not isinstance(base, Point))
    rule = "conformal" if score == "signed" else "symmetric"
    return SplitConformal(_table(standardised_errors(base, y, scaled), rule), scaled, rule)


class SplitConformal(eqx.Module):
    """A table of scores; made by `fit`.

    Attributes:
        z: the signed scores [L], in increasing order; or the scores of size and their negatives [2 L].
        scaled: whether errors are measured in predicted stds, or in the unit of y.
        rule: how a quantile is read from the table: "conformal" from signed scores, "symmetric" from scores of size.
    """

    z: Float[Array, "*l"]
    scaled: bool = eqx.field(static=True)
    rule: str = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Empirical:
        """The law whose central intervals keep the promise of `guarantee`.

        They are infinite, with a warning that names the rows needed, at levels for which the calibration rows are too
        few.

        Args:
            x: not looked at; None will do.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite, or a std not positive; if it is a `Point` where errors are
                measured in predicted stds.
        """
        check_base(base)
        return Empirical(base.mean, error_unit(base, self.scaled), self.z, self.rule)

    def guarantee(self, confidence_level: float) -> Guarantee:
        """What the central interval at this level promises.

        Raises:
            ValueError: if the confidence level lies outside (0, 1).
        """
        size = self.z.shape[-1]
        return Guarantee.of(confidence_level, size // 2 if self.rule == "symmetric" else size, self.rule)


class ConformalisedQuantiles(eqx.Module):
    """How far the quantiles of a base are to be moved; made by `fit` with score="quantile".

    Attributes:
        margins: by how much the interval of each level grows at either end, [k], in the unit of y; negative where it
            shrinks.
        confidence_levels: the levels, in increasing order.
        num_calibration: the number of calibration rows.
    """

    margins: Float[Array, "*k"]
    confidence_levels: tuple[float, ...] = eqx.field(static=True)
    num_calibration: int = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Quantiles:
        """The law with these intervals at the levels of the fit, the base's median, and straight lines in between.

        The promise is that of the intervals at these levels alone. The law ends at the widest of them.

        Args:
            x: not looked at; None will do.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean, or a quantile that is needed, is not finite.
        """
        quantiles = _quantiles_of(base, self.confidence_levels)
        return Quantiles(_levels(self.confidence_levels), _moved_outwards(quantiles, self.margins))

    def guarantee(self, confidence_level: float) -> Guarantee:
        """What the interval at one of the levels of the fit promises.

        Raises:
            ValueError: if the confidence level is none of them.
        """
        _checks.check_choice("confidence_level", confidence_level, self.confidence_levels)
        return Guarantee.of(confidence_level, self.num_calibration, "symmetric")


@functools.partial(jax.jit, static_argnames="rule")
def _table(errors: Float[Array, " l"], rule: str) -> Float[Array, "..."]:
    """The sorted errors, or their sizes after the negatives of these."""
    if rule == "conformal":
        return jnp.sort(errors)
    sizes = jnp.sort(jnp.abs(errors))
    return jnp.concatenate([-sizes[::-1], sizes])


def _fit_quantiles(base: Distribution, y: Float[Array, " l"], confidence_levels: Sequence[float]):
    levels = tuple(sorted({float(level) for level in confidence_levels}))
    rows = y.shape[0]
    _checks.check_length("confidence_levels", np.array(levels), None)
    _checks.check_fraction("confidence_levels", np.array(levels))
    if rows < (needed := smallest_table(levels[-1])):
        raise ValueError(f"{rows} rows are too few for confidence level {levels[-1]:g}: at least {needed} are needed.")
    return ConformalisedQuantiles(_margins(_quantiles_of(base, levels, rows), y, np.array(levels)), levels, rows)


def _levels(confidence_levels: tuple[float, ...]) -> np.ndarray:
    """The levels of the quantiles: the lower ends from the widest interval on, the median, the upper ends."""
    central = np.array(confidence_levels)
    return np.concatenate([(1 - central[::-1]) / 2, [0.5], (1 + central) / 2])


def _quantiles_of(base: Distribution, confidence_levels: tuple[float, ...], length: int | None = None):
    """The base's quantiles at these levels, finite, [n, 2 k + 1]."""
    # They may all coincide in a row: its std of 0 is not looked at.
    check_base(Point(base.mean) if isinstance(base, Distribution) else base, length)
    quantiles = base.icdf(_levels(confidence_levels))
    _checks.check_finite("base.icdf(levels)", quantiles)
    return quantiles


@jax.jit
def _margins(quantiles: Float[Array, "l q"], y: Float[Array, " l"], confidence_levels) -> Float[Array, " k"]:
    """The score of rank ceil((L + 1) c) of every level."""
    quantiles, y = lax.stop_gradient((quantiles, y))
    middle = quantiles.shape[1] // 2
    lower, upper = quantiles[:, :middle][:, ::-1], quantiles[:, middle + 1 :]
    errors = jnp.sort(jnp.maximum(lower - y[:, None], y[:, None] - upper), axis=0)
    return jax.vmap(lambda table, level: empirical_quantile(table, level, "conformal"), (1, 0))(
        errors, confidence_levels
    )


@jax.jit
def _moved_outwards(quantiles: Float[Array, "n q"], margins: Float[Array, " k"]) -> Float[Array, "n q"]:
    """The quantiles moved by their margins, each interval so wide that it holds the narrower ones and the median."""
    middle = margins.shape[0]
    margins = margins.astype(quantiles.dtype)
    moved = quantiles + jnp.concatenate([-margins[::-1], jnp.zeros_like(margins[:1]), margins])[None]
    lower = lax.cummin(moved[:, : middle + 1], axis=1, reverse=True)
    upper = lax.cummax(moved[:, middle:], axis=1)
    return jnp.concatenate([lower, upper[:, 1:]], axis=1)
