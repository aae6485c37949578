"""The errors of a model: a scale that follows the data, and a distribution with a density everywhere.

Each row has a line: its quantiles as a function of the scores t of Student t. The line is m + u t around a mean m, with
a unit u. If the prediction has a distribution, the line through its quantiles keeps its shape. The score of a target is
the t at which the line of its row meets the target. Boosted trees learn the scale s of these scores from the inputs and
the predictions. The scores divided by the scales have one distribution for all rows, with the quantiles z. The
quantiles of a row are the values of its line at s z. Scale and shape are used if they lower the CRPS.

For the rows of a fold, all this is learned from the other folds. Otherwise intervals are too short.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float
from scipy import special

from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.distributions import SmoothQuantiles
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.functional.small_trees import MOST_LEAVES, SmallTrees, small_trees, sums

F = TypeVar("F")

# The levels whose quantiles define a distribution.
LEVELS = np.array([0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99])
_MEDIAN = int(np.searchsorted(LEVELS, 0.5))
# The degrees of freedom among which the out-of-fold log score chooses.
_DEGREES_OF_FREEDOM = (3.0, 4.0, 6.0, 10.0, 30.0)
# The degrees of freedom of the scores t, and the scores of the levels.
SCORES_DF = 4.0
_KNOTS = special.stdtrit(SCORES_DF, LEVELS)
# The powers of the learned scale among which the out-of-fold CRPS chooses; 0 is a constant scale.
_POWERS = (0.0, 0.5, 1.0)
# This fraction of the median size is added to every size, so that the log of the size is finite.
_LEAST_SIZE = 0.1
# The least slope of quantiles in scores of Student t, as a fraction of the slope between the levels in the middle.
_LEAST_SLOPE = 1e-3
_MIDDLE = (0.1, 0.9)
# About the density of Student t at 0.
_MIDDLE_DENSITY = 0.4
# How often something is learned from all but a part of the rows, at most.
_MOST_PARTS = 10
# The least resolution, as a fraction of the targets' std.
_LEAST_RESOLUTION = 1e-6


class Predicted(NamedTuple):
    """What is known of rows without their targets.

    Attributes:
        mean: the mean of each row [n].
        features: the numbers from which the scale is learned [n, f].
        quantiles: the quantiles of the rows' own distributions at `LEVELS` [n, k]; None if they have none.
    """

    mean: Float[AnyArray, " n"]
    features: Float[AnyArray, "n f"]
    quantiles: Float[AnyArray, "n k"] | None = None


class Tails(NamedTuple):
    """The degrees of freedom of a distribution's tails, and the scores of `LEVELS` with them [k]."""

    df: Float[AnyArray, ""]
    scores: Float[AnyArray, " k"]

    @classmethod
    def of(cls, df: float) -> "Tails":
        """The tails of Student t with `df` degrees of freedom."""
        return cls(np.array(df), special.stdtrit(df, LEVELS))


class Errors(eqx.Module):
    """The distribution of errors; made by `fit_errors`.

    Attributes:
        keeps_shape: whether the lines go through the quantiles of the predictions' own distributions.
        unit: u, the unit of the score in the unit of y, if they do not.
        scale: the scale of the scores.
        z: the quantiles of the scaled scores [k].
        tails: the tails of the distributions.
        resolution: the resolution in which the targets are recorded.
    """

    keeps_shape: bool = eqx.field(static=True)
    unit: Float[AnyArray, ""]
    scale: "Scale"
    z: Float[AnyArray, " k"]
    tails: Tails
    resolution: Float[AnyArray, ""]

    def __call__(self, predicted: Predicted) -> SmoothQuantiles:
        """The distribution of every row."""
        return SmoothQuantiles(LEVELS, self._quantiles(predicted), self.tails.df)

    @numpy_or_jit
    def _quantiles(self, predicted: Predicted) -> Float[AnyArray, "n k"]:
        lines = Lines.of(predicted, self.unit, keeps_shape=self.keeps_shape)
        scale = self.scale(predicted.features)
        # q = line(s z)
        return placed(lines, scale[:, None] * self.z[None], self.tails, self.resolution)


def fit_errors(
    predicted: Predicted, y: Float[np.ndarray, " n"], parts: Sequence[np.ndarray]
) -> tuple[Errors, SmoothQuantiles]:
    """The learned errors of out-of-fold predictions, and the out-of-fold distribution of each row.

    Args:
        predicted: the out-of-fold predictions of the rows.
        y: their targets [n].
        parts: the rows of each fold, as places among these rows. The distributions of a fold are learned from the other
            folds.
    """
    cross, resolution = CrossFit(parts, len(y)), resolution_of(y)
    shapes = (False, True) if _have_shapes(predicted.quantiles) else (False,)
    trials = [_ShapeTrial(predicted, y, cross, resolution, keeps_shape) for keeps_shape in shapes]
    options = [(trial, power) for trial in trials for power in _POWERS if power == 0 or trial.follows]
    trial, power = min(options, key=lambda option: option[0].crps(option[1]))
    distributions = {df: trial.distribution(power, df) for df in _DEGREES_OF_FREEDOM}
    df = max(distributions, key=lambda df: float(np.mean(np.asarray(distributions[df].log_prob(y)))))
    return trial.errors(power, df), marked_out_of_fold(distributions[df])


def _have_shapes(quantiles: Float[np.ndarray, "n k"] | None) -> bool:
    """Whether each row has a distribution of its own with finite quantiles."""
    return quantiles is not None and bool(np.isfinite(quantiles).all() and (quantiles[:, 0] < quantiles[:, -1]).all())


class _ShapeTrial:
    """The errors around lines that keep the shape of the predictions, or around straight lines."""

    def __init__(
        self, predicted: Predicted, y: np.ndarray, cross: "CrossFit", resolution: float, keeps_shape: bool
    ) -> None:
        self.y, self.cross, self.resolution, self.keeps_shape = y, cross, resolution, keeps_shape
        sizes = abs(y - predicted.mean)
        self.features, self.unit = predicted.features, np.array(np.median(sizes) or np.mean(sizes) or 1.0)
        self.lines = Lines.of(predicted, self.unit, keeps_shape=keeps_shape)
        self.scores = self.lines.score(y)
        self.floor = _LEAST_SIZE * float(np.median(abs(self.scores))) or 1.0
        self.log_scale = cross(self._learned, lambda learned, rows: _log_scale(learned, self.features[rows]))

    @property
    def follows(self) -> bool:
        """Whether the learned scale differs between rows."""
        return bool(np.ptp(self.log_scale) > 0)

    def crps(self, power: float) -> float:
        return float(np.mean(np.asarray(self.distribution(power, SCORES_DF).crps(self.y))))

    def distribution(self, power: float, df: float) -> SmoothQuantiles:
        """The distribution of every row, learned from the rows of the other folds."""
        scale = self._scale(None, power).of(self.log_scale)
        # z: the quantiles of the scaled scores t / s; the quantiles of a row are line(s z)
        z = self.cross(
            lambda rows: quantiles_of(self.scores[rows] / scale[rows], df),
            lambda z, rows: np.broadcast_to(z, (len(rows), len(z))),
        )
        values = placed(self.lines, scale[:, None] * z, Tails.of(df), np.array(self.resolution))
        return SmoothQuantiles(LEVELS, values, df)

    def errors(self, power: float, df: float) -> Errors:
        """The errors, learned from all rows."""
        scale = self._scale(self._learned(np.arange(len(self.y))) if power else None, power)
        z = quantiles_of(self.scores / scale.of(self.log_scale), df)
        return Errors(self.keeps_shape, self.unit, scale, z, Tails.of(df), np.array(self.resolution))

    def _scale(self, learned: SmallTrees | None, power: float) -> "Scale":
        return Scale(learned, np.array(power), np.array(self.log_scale.mean()))

    def _learned(self, rows: np.ndarray) -> SmallTrees | None:
        """Boosted trees that predict log(|t| + floor) for the scores t; None without scikit-learn."""
        try:
            from sklearn.ensemble import HistGradientBoostingRegressor
        except ImportError:
            return None
        trees = HistGradientBoostingRegressor(
            max_iter=60,
            learning_rate=0.05,
            max_leaf_nodes=MOST_LEAVES,
            min_samples_leaf=20,
            l2_regularization=5.0,
            early_stopping=cast("Any", False),
            random_state=0,
        )
        trees.fit(self.features[rows], np.log(abs(self.scores[rows]) + self.floor))
        nodes = [predictor.nodes for (predictor,) in trees._predictors]
        return small_trees(nodes, trees._baseline_prediction.item())


def _log_scale(learned: SmallTrees | None, features: Float[AnyArray, "n f"]) -> Float[AnyArray, " n"]:
    return namespace(features).zeros(len(features)) if learned is None else sums(learned, features)


class Lines(NamedTuple):
    """The quantiles of rows as lines between the scores of Student t, relative to a center of each row.

    Attributes:
        center: the center of each row [n].
        offsets: the quantiles at `LEVELS` minus the center [n, k], increasing.
    """

    center: Float[AnyArray, " n"]
    offsets: Float[AnyArray, "n k"]

    @classmethod
    def of(cls, predicted: Predicted, unit: Float[AnyArray, ""], *, keeps_shape: bool) -> "Lines":
        """The lines of predictions: through their own quantiles if the shape is kept, else with the slope `unit`."""
        xp = namespace(predicted.mean)
        if not keeps_shape or predicted.quantiles is None:
            return cls(predicted.mean, xp.broadcast_to(xp.asarray(unit * _KNOTS), (len(predicted.mean), len(_KNOTS))))
        center = predicted.quantiles[:, _MEDIAN]
        offsets = predicted.quantiles - center[:, None]
        return cls(center, _increasing(offsets, xp.asarray(_KNOTS), xp.zeros_like(center), _rounding(center)))

    def score(self, y: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """The scores at which the lines meet the targets."""
        error = y - self.center
        place = np.clip((self.offsets <= error[:, None]).sum(1) - 1, 0, len(_KNOTS) - 2)
        start, end = (np.take_along_axis(self.offsets, place[:, None] + k, 1)[:, 0] for k in (0, 1))
        # t = t_j + (y - m - o_j) / (o_(j+1) - o_j) (t_(j+1) - t_j)
        return _KNOTS[place] + (error - start) / (end - start) * np.diff(_KNOTS)[place]

    def quantiles(self, t: Float[AnyArray, "n k"]) -> Float[AnyArray, "n k"]:
        """The values of the lines at these scores, minus the center."""
        xp = namespace(t, self.center)
        knots = xp.asarray(_KNOTS)
        place = xp.clip(xp.searchsorted(knots, t) - 1, 0, len(_KNOTS) - 2)
        start, end = (xp.take_along_axis(self.offsets, place + k, 1) for k in (0, 1))
        return start + (t - knots[place]) / xp.diff(knots)[place] * (end - start)


class Scale(eqx.Module):
    """The scale of the errors, exp(power (log s - c)): s is learned, and c is the mean of log s.

    Attributes:
        learned: the trees that give log s; None if the power is 0.
        power: how far the scale follows s.
        center: c.
    """

    learned: SmallTrees | None
    power: Float[AnyArray, ""]
    center: Float[AnyArray, ""]

    def __call__(self, features: Float[AnyArray, "n f"]) -> Float[AnyArray, " n"]:
        """The scales of rows."""
        if self.learned is None:
            return namespace(features).ones(len(features))
        return self.of(_log_scale(self.learned, features))

    def of(self, log_scale: Float[AnyArray, " n"]) -> Float[AnyArray, " n"]:
        """The scales of rows whose log s is known."""
        return namespace(log_scale).exp(self.power * (log_scale - self.center))


class CrossFit:
    """For each fold, apply to its rows what is learned from the rows of all other folds."""

    def __init__(self, parts: Sequence[np.ndarray], number: int) -> None:
        # If there are many folds, several are held out together: else there may be as many fits as rows.
        parts = [np.concatenate(parts[k::_MOST_PARTS]) for k in range(min(len(parts), _MOST_PARTS))]
        self.parts = [(np.setdiff1d(np.arange(number), part), part) for part in parts]

    def __call__(self, fit: Callable[[np.ndarray], F], apply: Callable[[F, np.ndarray], np.ndarray]) -> np.ndarray:
        """The results of all rows, in their order."""
        results = [apply(fit(others), part) for others, part in self.parts]
        order = np.argsort(np.concatenate([part for _, part in self.parts]))
        return np.concatenate(results)[order]


def quantiles_of(z: Float[np.ndarray, " n"], df: float) -> Float[np.ndarray, " k"]:
    """The quantiles at `LEVELS` of the distribution of the values z, linear in the scores of Student t.

    The j-th of n sorted values is the quantile at level j / (n + 1). Beyond these levels the slope is the slope in the
    middle.
    """
    ranks = np.arange(1, len(z) + 1) / (len(z) + 1)
    knots, scores, ordered = special.stdtrit(df, ranks), special.stdtrit(df, LEVELS), np.sort(z)
    middle = np.interp(special.stdtrit(df, _MIDDLE), knots, ordered)
    # slope = (q(0.9) - q(0.1)) / (t(0.9) - t(0.1))
    slope = np.diff(middle)[0] / np.diff(special.stdtrit(df, _MIDDLE))[0]
    beyond = slope * (np.minimum(scores - knots[0], 0) + np.maximum(scores - knots[-1], 0))
    return np.interp(scores, knots, ordered) + beyond


def placed(
    lines: Lines, t: Float[AnyArray, "n k"], tails: Tails, resolution: Float[AnyArray, ""]
) -> Float[AnyArray, "n k"]:
    """The quantiles of rows at `LEVELS`: the values of the lines at the scores t.

    No density is larger than 1 over the resolution of the targets, and none is much larger than in the middle.
    """
    xp, center = namespace(t, lines.center), lines.center
    least = xp.full_like(center, _MIDDLE_DENSITY * resolution)
    offsets = _increasing(lines.quantiles(t), xp.asarray(tails.scores), least, _rounding(center))
    return center[:, None] + offsets


def _rounding(center: Float[AnyArray, " n"]) -> Float[AnyArray, " n"]:
    """A step that is large enough to change a number of this size."""
    return 2 * np.finfo(jax.dtypes.canonicalize_dtype(float)).eps * abs(center)


def _increasing(
    values: Float[AnyArray, "n k"],
    t: Float[AnyArray, " k"],
    least_slope: Float[AnyArray, " n"],
    least_step: Float[AnyArray, " n"],
) -> Float[AnyArray, "n k"]:
    """The values, with at least these slopes and a small fraction of the middle slope in t; the median stays."""
    xp = namespace(values)
    low, high = (int(np.searchsorted(LEVELS, level)) for level in _MIDDLE)
    middle = (values[:, high] - values[:, low]) / (t[high] - t[low])
    least = xp.maximum(_LEAST_SLOPE * middle, least_slope)[:, None] * xp.diff(t)[None]
    steps = xp.maximum(xp.diff(values), xp.maximum(least, least_step[:, None]))
    outward = xp.cumsum(xp.pad(steps, ((0, 0), (1, 0))), axis=1)
    return values[:, _MEDIAN, None] + outward - outward[:, _MEDIAN, None]


def resolution_of(y: Float[np.ndarray, " n"]) -> float:
    """The least distance between two different targets, if some are equal; else a millionth of their std."""
    least = _LEAST_RESOLUTION * float(np.std(y) or abs(y).max() or 1)
    distinct = np.unique(y)
    gaps = np.diff(distinct)
    gaps = gaps[gaps > least]
    return float(gaps.min()) if len(distinct) < len(y) and len(gaps) else least
