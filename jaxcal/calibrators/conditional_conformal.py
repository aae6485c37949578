"""Conformal intervals that cover in each of several groups that overlap, and after shifts along given functions.

Split conformal prediction covers on average over all rows. Here the user gives features of the inputs. They are
indicators of groups, which may overlap, or any functions along which the distribution of the inputs may shift. The
quantile of the scores becomes a linear function of the features: the quantile regression of the calibration rows and
the new row. Its coverage holds for all non-negative combinations of the features at once
(`guarantee.ConditionalGuarantee`).

With a constant as the only feature this is split conformal prediction. With indicators of disjoint groups it is a table
for each group, as in `conformal.fit(by=...)`. The constant is always among the features, so that the interval also
covers on average over all rows.

Source: Gibbs, Cherian and Candès, Conformal prediction with conditional guarantees, JRSSB 87 (2025).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray, UInt32

from jaxcal import _checks, _programs
from jaxcal.calibrators._base import (
    ABSOLUTE,
    as_confidence_levels,
    check_base,
    check_not_out_of_fold,
    check_rows_reach,
    location_and_scale,
    standardized_errors,
)
from jaxcal.calibrators._groups import values_at
from jaxcal.distributions import Distribution, Quantiles
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table, check_same_index, is_frame, num_rows
from jaxcal.functional import quantile_regression, rounding
from jaxcal.functional.quantile_regression import FAILED, INFINITE, MINUS_INFINITE, Vertex
from jaxcal.guarantee import ConditionalGuarantee

Features = Table | Callable
T = TypeVar("T")

_SCORES = (None, "absolute", "scaled", "signed")


def fit(
    x: "Table | None",
    base: "Distribution",
    y: "Series",
    *,
    features: "Features | None" = None,
    categorical: "Categorical" = (),
    score: str | None = None,
    confidence_levels: "Sequence[float] | None" = None,
    key: "PRNGKeyArray | None" = None,
) -> "ConditionalConformal":
    """Solve the quantile regression of the scores of calibration rows, on which the model must not have been trained.

    A new row is added to the regression with the largest score that does not lie above the regression of all n + 1
    rows. This score is the cutoff at which its interval ends.

    - score="absolute", "scaled": the interval at level c is mean -+ s, or mean -+ s std. The cutoff s is the value of
      the regression at level c.
    - score="signed": the ends of the interval are mean + z std, or mean + z. The cutoffs z come from two regressions
      at level (1 + c) / 2, of the signed errors and of their negatives. Each tail has a guarantee of its own.

    Intervals are nested: an interval that does not contain the intervals at all lower levels is widened until it does.
    An empty interval, such as one of a negative cutoff of absolute errors, is widened to a point, or to the range
    between its ends. Widening can only increase the coverage.

    With a key the cutoff is randomized. The interval then covers with probability exactly c, apart from the coverage
    that widening adds. Without a key it covers a little more: see `ConditionalGuarantee.most`.

    The number of features should be small compared to the number of rows of each group. Otherwise intervals become
    wide, and they become infinite where few calibration rows resemble a new row. The fit needs values: it does not run
    under `jit` or `vmap`; a call does. In 32 bits the ends may be off by about 1e-5 of the size of the errors.

    Args:
        x: inputs [n, ...], or a data frame (`jaxcal.frames`), for features that are x or a function of x. Other
            features do not use x, and it may be None.
        base: the model's predictions at x, [n].
        y: targets [n].
        features: an array [n, d] or a data frame, or a function of x that gives it; None for the columns of x. A
            constant is added. Features may depend on each other, as indicators of all groups do. A column of labels
            becomes an indicator of each label. If the features are an array here, the call needs features, too:
            `module(x, base, features=array)`.
        categorical: the columns of the features whose values have no order, by position, or of a data frame by name.
        score: "absolute", "scaled" or "signed"; None for "scaled" if the base has a std, else "absolute". Signed
            errors are in predicted stds if the base has stds.
        confidence_levels: the levels c of the intervals (default 0.5, 0.8, 0.9, 0.95).
        key: random key, for randomized intervals. The draw belongs to the position of a row: row i has the same draw in
            all calls.

    Raises:
        TypeError: if base is not a Distribution, or anything is traced; if key is no random key.
        ValueError: if an argument is empty, not finite, of the wrong shape or length. If a score is infinite, since a
            std is 0 and the error is not; score="absolute" divides by no std. If the score needs a std and base is a
            `Point`. If there are too few rows for a level and no key is given.

    Source: Gibbs, Cherian and Candès, Conformal prediction with conditional guarantees, JRSSB 87 (2025).

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcal import Point
        >>> from jaxcal.calibrators import conditional_conformal
        >>> x = jnp.linspace(-1, 1, 400)[:, None]
        >>> y = jnp.where(x[:, 0] > 0, 2.0, 1.0) * jnp.sin(jnp.arange(400.0))
        >>> features = lambda x: jnp.stack([x[:, 0] > 0, x[:, 0] > 0.5], axis=1)  # the second group lies in the first
        >>> fitted = conditional_conformal.fit(x, Point(jnp.zeros(400)), y, features=features)
        >>> lower, upper = fitted(jnp.array([[-0.5], [0.7]]), Point(jnp.zeros(2))).interval(0.9)
        >>> print(upper.round(1), fitted.guarantee(0.9).coverage)
        [1. 2.] 0.9
    """
    if key is not None:
        _checks.check_key(key)
    _checks.check_choice("score", score, _SCORES)
    check_same_index(x, y)
    y = _checks.as_vector("y", y)
    rows = y.shape[0]
    check_base(base, rows)
    levels = as_confidence_levels(confidence_levels)
    if key is None:
        check_rows_reach(rows, levels[-1])
    scaled = score == "scaled" or (score in (None, "signed") and base.has_std)
    errors = standardized_errors(base, y, scaled, finite=True, instead=ABSOLUTE)
    features = inputs if features is None else features
    table = _as_features(x, features, rows)
    columns = Columns.of(table, categorical)
    # Indicators of labels have the default dtype, whatever the dtype of the rows.
    feature_values = columns(table).astype(errors.dtype)
    if _checks.is_traced(errors, feature_values):
        raise TypeError("an argument is traced, but a regression runs by its values: call fit outside jit and vmap.")
    directions = Directions.of(np.asarray(feature_values))
    independent, known = np.asarray(directions(feature_values)[0]), np.asarray(errors)
    if score == "signed":
        tails = [Regressions.of(independent, each, [(1 + c) / 2 for c in levels]) for each in (known, -known)]
    else:
        tails = [Regressions.of(independent, np.abs(known), levels)]
    return ConditionalConformal(
        directions=directions,
        regressions=_stacked(tails),
        seed=None if key is None else jax.random.bits(key, (), "uint32"),
        features=features if callable(features) else None,
        confidence_levels=levels,
        scaled=scaled,
        out_of_fold=base.is_out_of_fold,
        columns=columns,
    )


def _as_features(x: Table | None, features: Features, length: int) -> Table:
    """The features of `length` rows, as a frame or a checked array."""
    table = values_at(x, features, "features")
    if not is_frame(table):
        return _checks.as_matrix("features", table, length=length)
    if (rows := num_rows(table)) != length:
        raise ValueError(f"features has {rows} rows where {length} are expected: the lengths must match.")
    return table


def inputs(x: Table) -> Table:
    """The default features: x itself. This function is public, so that `jaxcal.save` can store its name."""
    return x


class Directions(eqx.Module):
    """The map from features [n, D] to d independent features of mean square 1, the first of which is the constant.

    Attributes:
        center: the means of the features [D].
        scale: their stds [D].
        axes: the directions in which standardized features vary [D, d - 1], of length 1.
        spread: the std of the standardized features in each direction [d - 1].
    """

    center: Float[Array, "*D"]
    scale: Float[Array, "*D"]
    axes: Float[Array, "*D_r"]
    spread: Float[Array, "*r"]

    @classmethod
    def of(cls, features: Float[np.ndarray, "n D"]) -> "Directions":
        """The directions of the features of calibration rows."""
        dtype, values = features.dtype, features.astype(float)
        tolerance = 100 * np.finfo(dtype).eps
        center, std, size = values.mean(axis=0), values.std(axis=0), np.abs(values).max(axis=0)
        scale = np.where(std > tolerance * size, std, np.where(size > 0, size, 1))
        # (phi - center) / scale / sqrt(n) = U diag(spread) axes: each row of axes is a direction with its std.
        _, spread, axes = np.linalg.svd((values - center) / scale / np.sqrt(len(values)), full_matrices=False)
        # The tolerance is relative to size / scale, since the features may be far from 0 when they are rounded.
        varies = spread > tolerance * max(1.0, spread[0], (size / scale).max())
        put = lambda array: jax.device_put(np.array(array, dtype))
        return cls(center=put(center), scale=put(scale), axes=put(axes[varies].T), spread=put(spread[varies]))

    @_programs.jit
    def __call__(self, features: Float[Array, "n D"]) -> tuple[Float[Array, "n d"], Bool[Array, " n"]]:
        """The independent features of rows, and whether each row lies in the span of these directions."""
        dot = lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
        standard = (features - self.center[None]) / self.scale[None]
        # The part of a row outside the directions is s - (s V) V^T, with V the axes.
        along = dot(standard, self.axes)
        rest = jnp.abs(standard - dot(along, self.axes.T)).max(axis=1)
        size = 1 + jnp.abs(standard).max(axis=1) + jnp.abs(self.center / self.scale).max()
        within = rest <= 1e4 * jnp.finfo(features.dtype).eps * size
        independent = jnp.concatenate([jnp.ones_like(standard[:, :1]), along / self.spread[None]], axis=1)
        return independent, within


class Regressions(NamedTuple):
    """The regressions of the scores of one tail, at all levels.

    Attributes:
        features: the independent features [n, d].
        scores: the scores in units of their std [n].
        moved: the scores, moved apart so that no two are equal [n].
        unit: the std of the scores.
        levels: the levels of the regressions [k].
        vertices: the solutions of the regressions, [k, ...] each.
    """

    features: Float[Array, "..."]
    scores: Float[Array, "..."]
    moved: Float[Array, "..."]
    unit: Float[Array, "..."]
    levels: Float[Array, "..."]
    vertices: Vertex

    @classmethod
    def of(cls, features: np.ndarray, scores: np.ndarray, levels: Sequence[float]) -> "Regressions":
        """The regressions, solved on the host; each starts from the solution of the previous level."""
        dtype, unit = scores.dtype, _unit(scores)
        scores = scores / unit
        moved = quantile_regression.separated(scores)
        basis, vertices = quantile_regression.independent_rows(features), []
        for level in levels:
            vertices.append(quantile_regression.solve(features, moved, level, basis))
            basis = np.asarray(vertices[-1].basis)
        put = jax.device_put
        in_dtype = put(np.array(levels, dtype))
        return cls(put(features), put(scores), put(moved.astype(dtype)), put(unit), in_dtype, _stacked(vertices))


def _stacked(trees: list[T]) -> T:
    """Trees of equal shapes as one tree with a leading axis; stacked on the host, without compilation."""
    return jax.tree.map(lambda *each: jax.device_put(np.stack(each)), *trees)


def _unit(scores: np.ndarray) -> np.ndarray:
    """The std of the scores, without overflow of their squares; if all are equal, their size, or 1 if that is 0."""
    size = np.abs(scores).max() or np.ones((), scores.dtype)
    std = (scores / size).std()
    return np.array(size * (std if std > np.finfo(scores.dtype).eps else 1), scores.dtype)


class ConditionalConformal(eqx.Module):
    """Quantile regressions of scores on features; made by `conditional_conformal.fit`.

    Attributes:
        directions: the directions of the features.
        regressions: the regressions of the scores, with a leading axis of length 1, or 2 for the upper and the lower
            tail.
        seed: the seed of the draws of randomized intervals, else None. Unlike a key it can be saved.
        features: the function of x that gives the features, or None if the features come with the rows.
        confidence_levels: the levels of the intervals, in increasing order.
        scaled: whether errors are measured in predicted stds; else they are on the scale of y.
        out_of_fold: whether the errors are errors of `jaxcal.out_of_fold`.
        columns: the description of the columns of the features; None in files of versions that took only arrays.
    """

    directions: Directions
    regressions: Regressions
    seed: UInt32[Array, "*runs"] | None
    features: Callable | None = eqx.field(static=True)
    confidence_levels: tuple[float, ...] = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)
    columns: Columns | None = None

    def __call__(self, x: Table | None, base: Distribution, *, features: Features | None = None) -> Quantiles:
        """The distributions with these intervals at the levels of the fit, and linear interpolation in between.

        The guarantee holds for the intervals at these levels alone. The distribution ends at the widest interval. An
        interval is infinite if too few calibration rows resemble the new row in their features, or no calibration row
        has features of its kind. Mean, std, cdf and score then take the last finite cutoff.

        Args:
            x: inputs, for features that are x or a function of x; else x may be None.
            base: the model's predictions, [n].
            features: the features of the rows [n, d], or a data frame, if the fit had features as such.

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if the mean or std of base is not finite. If base is a `Point` but errors are measured in
                predicted stds. If features are missing, not finite or of the wrong shape.

        Warns:
            UserWarning: if the precision in use is too low to compute the cutoff of a row. Its interval is then
                infinite.
        """
        loc, scale = location_and_scale(base, self.scaled)
        features = self.features if features is None else features
        if features is None:
            raise ValueError("the calibrator was fitted with an array of features: give features= for these rows.")
        table = _as_features(x, features, loc.shape[0])
        columns = self.columns or Columns.of(np.empty((1, self.directions.center.shape[0])))
        if not is_frame(table):
            _checks.check_columns("features", table, columns.num_columns, "the calibrator was fitted with")
        feature_values = columns(table).astype(loc.dtype)
        levels = _levels(self.confidence_levels)
        values, lowest, highest, failed = _quantiles(self, loc, scale, feature_values, levels)
        if not _checks.is_traced(failed) and (count := int(np.asarray(failed).sum())):
            _checks.warn(
                f"in {count} rows the interval is infinite: the regression could not be solved in {loc.dtype}. Rescale "
                "the features, or take 64 bits: jax.config.update('jax_enable_x64', True)."
            )
        return Quantiles(levels, values, lowest=lowest, highest=highest)

    def guarantee(self, confidence_level: float) -> ConditionalGuarantee:
        """The coverage guarantee of the interval at one of the levels of the fit.

        Raises:
            ValueError: if the confidence level is not a level of the fit, or the errors are out of fold.
        """
        _checks.check_choice("confidence_level", confidence_level, self.confidence_levels)
        check_not_out_of_fold(self.out_of_fold)
        tails, rows, count = self.regressions.features.shape[-3:]
        return ConditionalGuarantee(confidence_level, rows, count, self.seed is not None, tails)


def _levels(confidence_levels: tuple[float, ...]) -> np.ndarray:
    """The levels of the ends of the intervals, in increasing order."""
    central = np.array(confidence_levels)
    return np.concatenate([(1 - central[::-1]) / 2, (1 + central) / 2])


@_programs.jit
def _quantiles(
    module: ConditionalConformal, loc: Array, scale: Array, features: Array, levels: Float[ArrayLike, " q"]
) -> tuple[Array, Array, Array, Array]:
    """The finite quantiles [n, 2 k]; the lowest and the highest known level [n] each; the rows without a solution."""
    independent, within = module.directions(features)
    signed, count = module.regressions.features.shape[0] == 2, len(module.confidence_levels)
    draw = None
    if module.seed is not None:
        draw = jax.random.uniform(jax.random.key(module.seed), loc.shape, loc.dtype)
    values, outcome = _cutoffs(module.regressions, independent, within, draw)
    if not signed:  # a negative cutoff, or a cutoff of -inf, is an empty interval: it becomes a point
        values = jnp.where(outcome == MINUS_INFINITE, 0, jnp.maximum(values, 0))
        values, outcome = jnp.concatenate([values, values]), jnp.concatenate([outcome, outcome])
    # Cutoffs z_upper and z_lower = -(cutoff of the negatives): if z_lower > z_upper at the lowest level, they change
    # places.
    inner = -values[1, 0] > values[0, 0]
    values = values.at[:, 0].set(jnp.where(inner[None], -values[::-1, 0], values[:, 0]))
    # The running maximum over increasing levels makes the intervals nested.
    upper, lower = lax.cummax(values, axis=1)
    moves = jnp.concatenate([-lower[::-1], upper]) * scale[None]
    side = jnp.broadcast_to(jnp.repeat(jnp.array([-1, 1]), count)[:, None], moves.shape)
    quantiles = rounding.outward(loc[None] + moves, side, jnp.broadcast_to(loc, moves.shape), moves)
    unknown = (outcome == INFINITE) | (outcome == FAILED)
    known = jnp.cumsum(unknown, axis=1) == 0  # [2, k, n]
    last = known.sum(axis=1)
    levels = jnp.asarray(levels, loc.dtype)
    reach = lambda ends, last, limit: jnp.where(last == count, limit, jnp.append(0.5, ends)[last]).astype(loc.dtype)
    highest = reach(levels[count:], last[0], 1.0)
    lowest = reach(levels[:count][::-1], last[1], 0.0)
    return quantiles.T, lowest, highest, (outcome == FAILED).any(axis=(0, 1))


def _cutoffs(regressions: Regressions, new: Array, within: Array, draw: Array | None) -> tuple[Array, Array]:
    """The cutoffs in units of the errors and their outcomes, [tails, k, n] each."""

    def of_level(regression: Regressions, draw: Array | None, level: Array, vertex: Vertex) -> tuple[Array, Array]:
        dual = jnp.broadcast_to(level, new.shape[:1]) if draw is None else level - 1 + draw
        fit = (regression.features, regression.scores, regression.moved)
        solution = quantile_regression.cutoffs(*fit, vertex, level, new, dual)
        # If phi of the new row lies outside the span of the calibration rows, `sum_i eta_i phi_i + t phi = 0` holds
        # only for the dual t = 0. Its cutoff is then +inf or -inf, by the sign of the dual that it should have.
        outcome = jnp.where(within, solution.outcome, jnp.where(dual > 0, INFINITE, MINUS_INFINITE))
        return solution.value * regression.unit, outcome

    def of_tail(regression: Regressions, draw: Array | None) -> tuple[Array, Array]:
        each = (regression.levels, regression.vertices)
        return lax.map(lambda at: of_level(regression, draw, *at), each)

    if draw is None:
        return lax.map(lambda regression: of_tail(regression, None), regressions)
    # One draw moves both ends of an interval in the same direction, so that they do not cross.
    draws = jnp.stack([draw, 1 - draw])[: regressions.features.shape[0]]
    return lax.map(lambda both: of_tail(*both), (regressions, draws))
