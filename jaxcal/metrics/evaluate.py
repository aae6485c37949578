"""All metrics at once, for all rows or for each group, and the reason why a score is infinite."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from jaxcal import _checks, _programs
from jaxcal._numpy import JaxArray, numpy_or_jit
from jaxcal.distributions import Distribution
from jaxcal.functional import linalg, scores
from jaxcal.metrics._common import (
    PERCENTS,
    TAILS,
    Ends,
    OfRows,
    Weights,
    as_targets,
    calibration_rmse_of,
    curve_of,
    ece_of,
    groups_of,
    in_numpy,
    in_order,
    map_groups,
    mean_width_of,
    share_inside,
    tce_of,
)
from jaxcal.metrics.accuracy import crps, mae, nlpd, rmse
from jaxcal.metrics.calibration import ence, max_calibration_error
from jaxcal.metrics.sharpness import mean_std, sharpness


class Scores(dict[Any, Any]):
    """Metrics by name, or `Scores` of groups by label: a `dict` that prints a line for each, and why NLPD is infinite.

    Attributes:
        why: why NLPD is infinite, where it is. Transformations of JAX do not keep it: for them this is a `dict`.
    """

    def __init__(self, values: Mapping, why: str = ""):
        super().__init__(values)
        self.why = why

    def __repr__(self) -> str:
        """A line for each."""
        return "\n".join(_lines(self))


def _lines(scores: Scores) -> Iterator[str]:
    width = 2 + max((len(str(name)) for name in scores), default=0)
    for name, value in scores.items():
        if isinstance(value, Scores):
            yield from (f"{name}:", *(f"  {line}" for line in _lines(value)))
            continue
        is_known_number = not _checks.is_traced(value) and np.ndim(value) == 0
        shown = f"{float(value):.4g}" if is_known_number else str(value)
        yield f"{name:{width}}{shown}" + (f": {scores.why}" if name == "nlpd" and shown == "inf" and scores.why else "")


jax.tree_util.register_pytree_with_keys(
    Scores,
    lambda scores: ([(jax.tree_util.DictKey(name), value) for name, value in scores.items()], tuple(scores)),
    lambda names, values: Scores(dict(zip(names, values, strict=True))),
)


def evaluate(
    y: ArrayLike, distribution: Distribution, *, weights: Weights = None, by: ArrayLike | Sequence | None = None
) -> Scores:
    """Every metric that needs no parameter, by name, with intervals at 90 %; `print` shows a line for each.

    Where NLPD is infinite, its line says why.

    Args:
        y: targets [n].
        distribution: predictions of n rows.
        weights: of the rows [n].
        by: labels of groups [n], numbers or strings. Then the result has the metrics of every group, by its label, and
            the number of its "rows". The cost grows with the number of groups.

    Raises:
        TypeError: if `by` is traced.
        ValueError: if y is not a vector of n finite numbers, or `by` does not have n labels. Also if a predicted
            standard deviation or a weight is negative, or all weights of a group are 0.

    Warns:
        UserWarning: as `Distribution.interval` does, if the interval at 90 % is beyond the distribution's levels.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y = np.array([1.0, 2.0])
        >>> scores = jc.metrics.evaluate(y, jc.Normal(y, 1.0))
        >>> print(scores["rmse"], scores["coverage_90"])
        0.0 1.0
        >>> print(jc.metrics.evaluate(y, jc.Normal(y + [0, 3], 1.0), by=["left", "right"])["right"]["rmse"])
        3.0
        >>> print(str(jc.metrics.evaluate(y, jc.Point(y))).splitlines()[2])
        nlpd                   inf: Point has no density
    """
    y = as_targets(y, distribution)
    _check_std(distribution)
    weights = _checks.as_weights(weights, y.shape[0])
    ends = distribution.interval(0.9)
    if by is None:
        values = _evaluate(y, distribution, ends, weights)
        (why,) = _why_infinite(values["nlpd"], y, distribution, weights, np.zeros(y.shape, int))
        return Scores(values, why)
    labels, number = groups_of(by, weights, y)
    values = _evaluate_groups(y, distribution, ends, number, weights, len(labels))
    why, rows = _why_infinite(values["nlpd"], y, distribution, weights, number), np.bincount(number).tolist()
    of_group = lambda k: {name: value[k] for name, value in values.items()}
    return Scores({label: Scores({"rows": rows[k], **of_group(k)}, why[k]) for k, label in enumerate(labels)})


@numpy_or_jit(when=in_numpy)
def _evaluate(y: OfRows, distribution: Distribution, ends: Ends, weights: Weights) -> Scores:
    """All metrics in the order of a printed table, with one interval and one curve for the metrics that take them."""
    curve = curve_of(y, distribution, PERCENTS, weights)
    of_rows = lambda metric: metric(y, distribution, weights=weights)
    return Scores(
        {
            "rmse": of_rows(rmse),
            "mae": of_rows(mae),
            "nlpd": of_rows(nlpd),
            "crps": of_rows(crps),
            "interval_score_90": linalg.weighted_mean(scores.interval_score(y, *ends, 0.9), weights),
            "coverage_90": share_inside(y, ends, weights),
            "ece": ece_of(curve),
            "tce": tce_of(jax.tree.map(lambda values: values[..., np.array(TAILS)], curve)),
            "calibration_rmse": calibration_rmse_of(curve),
            "calibration_sse": (in_order(curve.at_most - curve.levels)[::5] ** 2).sum(),
            "max_calibration_error": of_rows(max_calibration_error),
            "ence": of_rows(ence),
            "width_90": mean_width_of(ends, weights),
            "sharpness": of_rows(sharpness),
            "mean_std": of_rows(mean_std),
        }
    )


def _check_std(distribution: Distribution) -> None:
    if _checks.is_traced(distribution.std):
        return
    std = np.asarray(distribution.std)
    rows = np.flatnonzero(std < 0)
    if rows.size:
        raise ValueError(
            f"The predicted std is negative in {rows.size} rows, the first at index {rows[0]} ({std[rows[0]]:g})."
        )


@_programs.jit
def _evaluate_groups(
    y: OfRows, distribution: Distribution, ends: Ends, number: Int[ArrayLike, " n"], weights: Weights, groups: int
) -> Scores:
    of_group = lambda weights: _evaluate(y, distribution, ends, weights)
    return map_groups(of_group, number, weights, groups, y.dtype)


def _why_infinite(
    nlpd: Float[JaxArray, "*k"], y: OfRows, distribution: Distribution, weights: Weights, number: Int[ArrayLike, " n"]
) -> list[str]:
    """Why the NLPD of each group is infinite: no density at all, or none at some targets; "" where it is finite."""
    if _checks.is_traced(nlpd) or not (infinite := np.isposinf(np.atleast_1d(nlpd))).any():
        return [""] * nlpd.size
    if not distribution.has_density:
        return [f"{type(distribution).__name__} has no density" if is_one else "" for is_one in infinite]
    counts = np.ones(y.shape, bool) if weights is None else np.asarray(weights) > 0
    without = counts & np.isneginf(distribution.log_prob(y))
    ends = not distribution.is_continuous and np.all(np.asarray(distribution.reach.lowest) > 0)
    where = "at or beyond the outermost quantiles" if ends else "where there is no density"

    def reason(group: int) -> str:
        own = number == group
        rows = np.flatnonzero(without & own)
        if not len(rows):  # finite log densities, whose mean is out of the range of the dtype
            return ""
        return f"{len(rows)} of {(counts & own).sum()} targets lie {where}, the first at index {rows[0]}"

    return [reason(group) if is_one else "" for group, is_one in enumerate(infinite)]
