"""A fitted pipeline: its predictions, its guaranteed or measured coverage, and the scores of its steps."""

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from jaxcal import _checks, metrics
from jaxcal.distributions import Distribution, Point
from jaxcal.frames.layout import Layout, Series, Table
from jaxcal.guarantee import Guarantee, MeasuredCoverage, WorstCaseGuarantee
from jaxcal.pipeline.chain import Chain
from jaxcal.pipeline.combination import Combination
from jaxcal.pipeline.cross_conformal import JackknifePlus
from jaxcal.pipeline.steps import GroupSource

# The confidence level of the intervals whose coverage is reported.
_LEVEL = 0.9
_HEADER = f"{'':30}{'CRPS':>20}{'RMSE':>20}{'90 % interval covers':>26}"


class Pipeline(eqx.Module):
    """A predictor, calibrators and a last step; made by `fit`. `print(pipeline)` is a table of their scores.

    Attributes:
        chain: predictor and calibrators, fitted to all rows that were not set aside. If errors are learned, it is a
            `Combination` of one or several predictors. With "cv+" it is a `jaxcal.cross_conformal.JackknifePlus` of all
            models that were fitted without a fold.
        last: the last step; None if there is none. It is also None with "cv+", since `chain` is the last step.
        steps: the held-out predictions of the predictor alone, of each calibrator and of the last step. With "cv+", the
            last step's predictions of a fold are calibrated by conformal prediction with the errors of the other folds.
        others: the steps of each pipeline that is combined; if the best was taken, the steps of the others.
        dropped: a line about each pipeline that was dropped after the first fold: its steps and its CRPS there.
        omitted: a line about each pipeline for which the time did not suffice.
        without_weights: a line about each pipeline that was omitted since it takes no weights.
        recipe: what was fitted to all folds, a `Recipe`; None if a file or a pickle could not hold it.
        method: "folds", "split", "cv+" or "prefit".
        layout: the columns of x.
        by: the source of the groups of the last step.
    """

    chain: Chain | Combination | JackknifePlus
    last: Callable | None
    steps: tuple["Step", ...]
    others: tuple[tuple["Step", ...], ...]
    dropped: tuple[str, ...] = eqx.field(static=True)
    omitted: tuple[str, ...] = eqx.field(static=True)
    without_weights: tuple[str, ...] = eqx.field(static=True)
    recipe: "Recipe | None" = eqx.field(static=True)
    method: str = eqx.field(static=True)
    layout: Layout
    by: GroupSource

    _not_needed: ClassVar[tuple[str, ...]] = ("recipe",)

    def __getstate__(self) -> dict[str, Any]:
        """The state for a pickle; without the recipe if it cannot be pickled, such as a function without a name."""
        state = dict(vars(self))
        try:
            pickle.dumps(self.recipe)
        except Exception:  # whatever a user's object raises
            state["recipe"] = None
        return state

    def __call__(self, x: Table, *, by: Series | None = None) -> Distribution:
        """The predictive distribution of every row of x.

        Args:
            x: inputs [n, d], or a data frame with the columns of the fit.
            by: the labels of the groups [n], if the fit had labels.

        Raises:
            ValueError: if x has other columns than in the fit. Also if labels are missing, or are given without groups.
        """
        x = self.layout(x)
        return self._after_last(x, self.chain(x), by)

    def means(self, x: Table, *, by: Series | None = None) -> Float[Array, " n"]:
        """The means of rows [n], by the predictors alone if their errors are learned; arguments as of the call.

        The means of the distributions also include the skewness of the errors.
        """
        if not isinstance(self.chain, Combination):
            return self(x, by=by).mean
        self.by.of_new_rows(by)  # which checks them
        return self.chain.means(self.layout(x))

    def with_means(self, x: Table, *, by: Series | None = None) -> tuple[Distribution, Float[Array, " n"]]:
        """The distributions and `means`, arguments as of the call; every predictor predicts once."""
        if not isinstance(self.chain, Combination):
            forecast = self(x, by=by)
            return forecast, forecast.mean
        x = self.layout(x)
        prediction, means = self.chain.with_means(x)
        return self._after_last(x, prediction, by), means

    def _after_last(self, x: Table, prediction: Distribution, by: Series | None) -> Distribution:
        return prediction if self.last is None else self.last(x, prediction, **self.by.of_new_rows(by))

    @property
    def out_of_fold(self) -> Distribution:
        """The predictions of the rows in `steps[-1].rows` by the whole pipeline, fitted without them."""
        return self.steps[-1].predictions

    def guarantee(self, confidence_level: float) -> Guarantee | WorstCaseGuarantee | MeasuredCoverage:
        """The guaranteed or measured coverage of the central interval at this level; `print` states it in words.

        - "split": the guarantee of the last step, if it gives one. The same holds for "prefit" without calibrators.
        - "cv+": the guarantee of CV+, if there are no groups.
        - "folds", and "prefit" with calibrators: the measured coverage. There is no guarantee, since the model that
            predicts made none of the errors by which it was recalibrated.

        If `by` gave groups, each group has a guarantee of its own, `last.guarantee`. The value is then the measured
        coverage of all rows.

        Raises:
            ValueError: if the confidence level lies outside (0, 1).
        """
        _checks.check_fraction("confidence_level", confidence_level)
        if isinstance(self.chain, JackknifePlus) and not self.chain.has_groups:
            return self.chain.guarantee(confidence_level)
        guarantee = getattr(self.last, "guarantee", None)
        if guarantee is not None and self.by.source is None and not self.out_of_fold.is_out_of_fold:
            return guarantee(confidence_level)
        return self.steps[-1].coverage(confidence_level)

    def __str__(self) -> str:
        """A table of the steps and their scores."""
        how = "out of fold" if self.out_of_fold.is_out_of_fold else "set aside"
        about = f"{len(self.steps[-1].y)} data points, {how}; mean ± standard error."
        lines = [_HEADER, *map(str, self.steps), about, *self._of_equal_targets()]
        if isinstance(self.chain, Combination) and self.chain.has_several:
            lines += ["", "combined by the mean absolute error out of fold:", str(self.chain)]
            lines += ["", "each by itself:", *(line for steps in self.others for line in map(str, steps))]
        else:
            for steps in self.others:
                lines += ["", "tried as well:", *map(str, steps)]
        if self.dropped:
            lines += ["", "dropped after the first fold:", *self.dropped]
        if self.omitted:
            lines += ["", "omitted, for want of time:", *self.omitted]
        if self.without_weights:
            lines += ["", "omitted, since they take no weights:", *self.without_weights]
        return "\n".join(lines)

    def _of_equal_targets(self) -> list[str]:
        """A line if most targets are equal to others: log scores then depend on how far equal targets are spread."""
        if not isinstance(self.chain, Combination):
            return []
        _, place, count = np.unique(self.steps[-1].y, return_inverse=True, return_counts=True)
        equal, over = int((count[place] > 1).sum()), float(self.chain.combiner.errors.resolution)
        line = f"{equal} targets are equal to others: densities, and log scores, are of targets spread over {over:.3g}."
        return [line] if equal > len(place) / 2 else []


@dataclass(frozen=True, eq=False)
class Recipe:
    """The pairs that were fitted to all folds: `jc.pipeline.fit(..., predictor=fitted.recipe)` repeats the fit.

    The repeated fit has no time limit, and drops no pair.

    Attributes:
        pairs: pairs of a predictor and its calibrators.
        combines: whether the pairs were combined; else the best pair was taken.
        folds: the number of folds, if a time limit left time for more than usual.
    """

    pairs: tuple[tuple[Any, tuple[Callable, ...]], ...]
    combines: bool = True
    folds: int | None = None

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.pairs)

    def __getitem__(self, place: int) -> tuple[Any, tuple[Callable, ...]]:
        """One of the pairs."""
        return self.pairs[place]

    def __eq__(self, other: object) -> bool:
        """Any two recipes are equal: pipelines that differ in the recipe alone share compiled programs."""
        return isinstance(other, Recipe)

    def __hash__(self) -> int:
        """The same number for all recipes."""
        return hash(Recipe)


class StepScores(NamedTuple):
    """Means over data points, with their standard errors."""

    crps: float
    crps_error: float
    rmse: float
    rmse_error: float


class Step(eqx.Module):
    """A step of a pipeline, and its predictions of rows to which neither it nor an earlier step was fitted.

    Attributes:
        name: the name of the method.
        predictions: the predictions of m rows.
        y: the targets of these rows [m].
        rows: the numbers of these rows [m].
        num_not_held_out: how many further rows are in no fold, and do not enter the scores.
    """

    name: str = eqx.field(static=True)
    predictions: Distribution
    y: Float[Array, " m"]
    rows: Array
    num_not_held_out: int = eqx.field(static=True, default=0)

    @property
    def scores(self) -> StepScores:
        """Continuous ranked probability score and root mean squared error."""
        with _precision_of(self.y):
            mean, crps = self.predictions.mean, self.predictions.crps(self.y)
            rmse, errors = float(metrics.rmse(self.y, Point(mean))), mean - self.y
        # In units of the RMSE, so that squares do not overflow. The standard error of an RMSE r is the error of r^2,
        # over 2 r.
        unit = rmse or 1.0
        crps, squares = np.asarray(crps, float) / unit, (np.asarray(errors, float) / unit) ** 2
        error_of = lambda values: float(values.std(ddof=1) / np.sqrt(len(values)))
        return StepScores(unit * float(crps.mean()), unit * error_of(crps), rmse, unit * error_of(squares) / 2)

    def coverage(self, confidence_level: float) -> MeasuredCoverage:
        """How many of the rows the central intervals cover."""
        with _precision_of(self.y):
            covered = metrics.coverage(self.y, self.predictions, confidence_level=confidence_level)
        num_rows = len(self.y)
        return MeasuredCoverage(confidence_level, num_rows, round(float(covered) * num_rows), self.num_not_held_out)

    def __str__(self) -> str:
        """A line of the table."""
        scores, covered = self.scores, self.coverage(_LEVEL)
        cells = (f"{v:.4g} ± {e:.2g}" for v, e in ((scores.crps, scores.crps_error), (scores.rmse, scores.rmse_error)))
        low, high = covered.band()
        coverage = f"{100 * covered.coverage:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        if isinstance(self.predictions, Point):
            coverage = "no interval"
        return f"{self.name:30}" + "".join(f"{cell:>20}" for cell in cells) + f"{coverage:>26}"


def _precision_of(y: Array) -> AbstractContextManager:
    """64 bits if y has float64: the regressor for scikit-learn computes in 64 bits, whatever JAX does."""
    return jax.enable_x64(True) if y.dtype == np.float64 else nullcontext()
