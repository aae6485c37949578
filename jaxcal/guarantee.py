"""The coverage of an interval, guaranteed or measured, and how much it varies by chance.

Let the calibration rows and a new row be exchangeable: their joint distribution does not depend on their order. The
printed guarantees say that the new row is "drawn like" the others. Between the L sorted scores of the calibration rows
there are L + 1 places for the score of the new row. All places are equally likely. So an interval that contains r
places covers the new row with probability r / (L + 1). This probability is an average over calibration sets. For one
calibration set of independent rows, the interval covers a certain fraction of all new rows. This fraction follows a
Beta distribution (Vovk 2012, "Conditional validity of inductive conformal predictors").
"""

import dataclasses

import numpy as np
from jaxtyping import ArrayLike

from jaxcal import _checks
from jaxcal.functional import quantiles


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """The coverage guarantee of a conformal central interval, made by `module.guarantee(confidence_level)`.

    Its coverage is exact if no two scores are equal; equal scores can only increase it.

    Args:
        confidence_level: the confidence level of the interval, in (0, 1).
        num_calibration: the number L of calibration rows.
        places: r, how many of the L + 1 places between the sorted scores lie in the interval; L + 1 if it is infinite.
        widened_to: how many calibration rows the interval covers, if it is widened to contain intervals of lower
            levels. It covers r calibration rows if it is not widened.
        between_scores: whether each end lies between two scores. Then the interval covers more, by up to 2 / (L + 1).

    Example:
        >>> guarantee = Guarantee.of(0.9, 100, "symmetric")
        >>> print(guarantee)
        The 90 % interval covers a new row with probability 90.1 %, if that row is drawn like the 100 calibration
        rows. Depending on which 100 these were, it covers between 84.8 % and 94.5 % of all new rows (in 9 of 10 cases).
    """

    confidence_level: float
    num_calibration: int
    places: int
    widened_to: int | None = None
    between_scores: bool = False

    @classmethod
    def of(cls, confidence_level: float, num_calibration: int, rule: str) -> "Guarantee":
        """The guarantee of the central interval that a rule reads from the sorted scores of L rows.

        Args:
            confidence_level: c, in (0, 1).
            num_calibration: the number L of calibration rows.
            rule: a rule of `functional.quantiles.empirical_quantile`, or "linear":

                - "symmetric": one rank r = ceil((L + 1) c) of absolute errors.
                - "conformal": the ranks k = ceil((L + 1) (1 + c) / 2) and L + 1 - k of signed errors. Then
                  r = 2 k - (L + 1).
                - "linear": ends between two ranks. Then k = floor((L + 1) (1 + c) / 2), but at most L, and
                  r = max(2 k - (L + 1), 0).

        Raises:
            ValueError: if the confidence level lies outside (0, 1).

        Example:
            >>> print(Guarantee.of(0.9, 20, "conformal").places, Guarantee.of(0.9, 20, "symmetric").places)
            19 19
        """
        confidence_level = _checks.as_fraction("confidence_level", confidence_level)
        _checks.check_choice("rule", rule, (*quantiles.CONFORMAL_RULES, "linear"))
        rank = lambda level: int(quantiles.empirical_rank(level, num_calibration, "conformal"))
        if rule == "symmetric":
            return cls(confidence_level, num_calibration, rank(confidence_level))
        if rule == "linear":
            inner = num_calibration + 1 - max(rank((1 - confidence_level) / 2), 1)
            places = max(2 * inner - (num_calibration + 1), 0)
            return cls(confidence_level, num_calibration, places, between_scores=True)
        return cls(confidence_level, num_calibration, 2 * rank((1 + confidence_level) / 2) - (num_calibration + 1))

    @property
    def coverage(self) -> float:
        """The probability r / (L + 1) that the interval covers a new row: at least the confidence level.

        An interval that is widened to contain other intervals covers more. An interval with ends between scores covers
        more, too. Its r / (L + 1) may be less than the confidence level by up to 2 / (L + 1).
        """
        return self.places / (self.num_calibration + 1)

    def quantile(self, p: float) -> float:
        """The quantile at level p of the realized coverage, which follows Beta(r, L + 1 - r) from set to set.

        The realized coverage is the fraction of all new rows that the interval of one calibration set covers. It is 1
        for an infinite interval.

        Raises:
            ValueError: if p lies outside (0, 1).

        Source: Vovk, Conditional validity of inductive conformal predictors, ACML 2012, section 2.
        """
        from scipy.special import betaincinv

        p = _checks.as_fraction("p", p)
        if not self.places:
            return 0.0
        outside = self.num_calibration + 1 - self.places
        return float(betaincinv(self.places, outside, p)) if outside else 1.0

    def interval(self, probability: float = 0.9) -> tuple[float, float]:
        """The central interval that holds the realized coverage with this probability.

        If the ends lie between scores, the realized coverage is only bounded, and this interval is longer.

        Raises:
            ValueError: if the probability lies outside (0, 1).

        Example:
            >>> print("{:.3f} to {:.3f}".format(*Guarantee.of(0.9, 1000, "symmetric").interval()))
            0.884 to 0.915
        """
        probability = _checks.as_fraction("probability", probability)
        most = self
        if self.between_scores:
            most = dataclasses.replace(self, places=min(self.places + 2, self.num_calibration + 1))
        return self.quantile((1 - probability) / 2), most.quantile((1 + probability) / 2)

    def __str__(self) -> str:
        """The guarantee in plain words."""
        level, rows = f"{100 * self.confidence_level:g} %", self.num_calibration
        if self.places > rows:
            return (
                f"The {level} interval is infinite: {rows} calibration rows are too few for a guarantee at this level."
            )
        at_least = "at least " if self.between_scores else ""
        if not self.places:
            return f"No coverage of the {level} interval follows from {rows} calibration rows: they are too few."
        low, high = (f"{100 * end:.1f} %" for end in self.interval())
        if self.widened_to is not None:
            nested = f"{100 * self.widened_to / (rows + 1):.1f} %"
            return (
                f"The {level} interval covers a new row with probability {nested}, estimated by the {self.widened_to} "
                f"of {rows} calibration rows that it covers: it is widened to contain the intervals of lower levels. "
                f"{100 * self.coverage:.1f} % at least are guaranteed, if that row is drawn like these."
            )
        return (
            f"The {level} interval covers a new row with probability {at_least}{100 * self.coverage:.1f} %, if that "
            f"row is drawn like the {rows} calibration rows. Depending on which {rows} these were, it covers between "
            f"{low} and {high} of all new rows (in 9 of 10 cases)."
        )


@dataclasses.dataclass(frozen=True)
class WorstCaseGuarantee:
    """The coverage that CV+, the jackknife+ and the jackknife+-after-bootstrap guarantee for every model and all data.

    Let a = 1 - confidence_level. The central interval covers a new exchangeable row with at least these probabilities,
    on average over calibration sets:

    - 1 - 2 a, if each model was fitted without one row (jackknife+).
    - 1 - 2 a, if each model was fitted to a bootstrap sample, and the number of samples follows a binomial distribution
      (jackknife+-after-bootstrap).
    - 1 - 2 a - `excess`, if each model was fitted without one of K folds of n / K rows (CV+). The excess is
      min(2 (1 - 1 / K) / (n / K + 1), (1 - K / n) / (K + 1)).

    Args:
        confidence_level: the confidence level of the interval, in (0, 1).
        num_calibration: the number n of calibration rows.
        num_folds: the number K of folds, of equal size; n for the jackknife+. None for bootstrap samples.

    Raises:
        ValueError: if the confidence level lies outside (0, 1), or the folds cannot have equal size.

    Source: Barber, Candes, Ramdas and Tibshirani, Predictive inference with the jackknife+, Annals of Statistics 49
    (2021), Theorems 1 and 4; Kim, Xu and Barber, Predictive inference is free with the jackknife+-after-bootstrap,
    NeurIPS 2020, Theorem 1.

    Example:
        >>> print(WorstCaseGuarantee(0.9, 1000, 10))
        The 90 % interval covers a new row with probability 78.2 % at least, whatever the model and the data. This holds
        if that row is drawn like the 1000 calibration rows. It is about 90 % where models that were fitted
        without different rows predict nearly the same.
    """

    confidence_level: float
    num_calibration: int
    num_folds: int | None = None

    def __post_init__(self):
        """Check the level and the sizes."""
        level = _checks.as_fraction("confidence_level", self.confidence_level)
        object.__setattr__(self, "confidence_level", level)
        if self.num_folds is not None and self.num_calibration % self.num_folds:
            raise ValueError(
                f"num_calibration must be a multiple of num_folds; got {self.num_calibration} and {self.num_folds}."
            )

    @property
    def is_infinite(self) -> bool:
        """Whether there are too few calibration rows for a finite interval."""
        rank = quantiles.empirical_rank(self.confidence_level, self.num_calibration, "conformal")
        return int(rank) > self.num_calibration

    @property
    def coverage(self) -> float:
        """The smallest probability that the interval covers a new row; 0 if nothing is guaranteed.

        Example:
            >>> coverages = [WorstCaseGuarantee(0.9, 100, folds).coverage for folds in (5, 10, 100)]
            >>> print(" ".join(f"{coverage:.3f}" for coverage in coverages))
            0.724 0.718 0.800
        """
        if self.is_infinite:
            return 1.0
        return max(0.0, 2 * self.confidence_level - 1 - self._excess)

    @property
    def _excess(self) -> float:
        """The largest amount by which the miscoverage of folds may exceed 2 a."""
        if self.num_folds is None:
            return 0.0
        folds, fold_size = self.num_folds, self.num_calibration / self.num_folds
        return min(2 * (1 - 1 / folds) / (fold_size + 1), (1 - 1 / fold_size) / (folds + 1))

    def __str__(self) -> str:
        """The guarantee in plain words."""
        level, rows = f"{100 * self.confidence_level:g} %", self.num_calibration
        if self.is_infinite:
            return (
                f"The {level} interval is infinite: {rows} calibration rows are too few for a guarantee at this level."
            )
        typical = f"It is about {level} where models that were fitted without different rows predict nearly the same."
        if not self.coverage:
            return f"In the worst case no coverage of the {level} interval is guaranteed. {typical}"
        return (
            f"The {level} interval covers a new row with probability {100 * self.coverage:.1f} % at least, whatever "
            f"the model and the data. This holds if that row is drawn like the {rows} calibration rows. "
            f"{typical}"
        )


@dataclasses.dataclass(frozen=True)
class WeightedGuarantee:
    """The coverage guarantee of a conformal interval of weighted calibration rows.

    Args:
        confidence_level: the confidence level of the interval, in (0, 1).
        num_calibration: the number of calibration rows.
        effective: the effective number of rows of equal weight, (sum w)^2 / sum w^2.

    Source: Tibshirani, Barber, Candès and Ramdas, Conformal prediction under covariate shift, NeurIPS 2019, theorem 2.

    Example:
        >>> print(WeightedGuarantee(0.9, 500, 220.4))
        The 90 % interval covers a new row with probability 90 % or more. This needs weights proportional to the density
        of new inputs over the density of the 500 calibration inputs. The targets must depend on the inputs as before.
        The rows are worth 220 of equal weight.
    """

    confidence_level: float
    num_calibration: int
    effective: float

    @property
    def coverage(self) -> float:
        """The probability that the interval covers a new row is at least this: the confidence level."""
        return self.confidence_level

    def __str__(self) -> str:
        """The guarantee in plain words."""
        level = f"{100 * self.confidence_level:g} %"
        return (
            f"The {level} interval covers a new row with probability {level} or more. This needs weights proportional "
            f"to the density of new inputs over the density of the {self.num_calibration} calibration inputs. The "
            "targets must depend on the inputs as before. "
            f"The rows are worth {self.effective:.0f} of equal weight."
        )


@dataclasses.dataclass(frozen=True)
class ConditionalGuarantee:
    """The coverage guarantee of a conformal interval that uses features of the inputs.

    Let f be a function of the inputs that is a linear combination of the features, and nowhere negative. On average
    over calibration sets, E[f(x) 1{y in the interval}] >= c E[f(x)] for a new exchangeable row. So the interval covers
    with probability at least c in every group whose indicator is such an f. It also covers with probability at least c
    if the density of new inputs is f times the density of the calibration inputs. If no two scores are equal,
    randomized intervals cover with probability exactly c. If some of them are widened, they cover more.

    Args:
        confidence_level: c, in (0, 1).
        num_calibration: the number n of calibration rows.
        num_features: the number d of independent features, the constant among them.
        randomized: whether the interval is randomized.
        tails: the number of regressions for the interval: 1, or 2 for signed errors.

    Source: Gibbs, Cherian and Candès, Conformal prediction with conditional guarantees, JRSSB 87 (2025), theorem 2
    and section 4.

    Example:
        >>> print(ConditionalGuarantee(0.9, 500, 4))
        The 90 % interval covers a new row with probability 90 % or more in every group of rows whose indicator is a
        combination of the 4 features. The same holds for all rows together. That row must be drawn like the 500
        calibration rows. It may also have another distribution of the inputs, if its density over the density of the
        calibration inputs is a combination of the features. Then the targets must depend on the inputs as before.
    """

    confidence_level: float
    num_calibration: int
    num_features: int
    randomized: bool = False
    tails: int = 1

    @property
    def coverage(self) -> float:
        """The probability that the interval covers a new row is at least this: the confidence level."""
        return self.confidence_level

    def most(self, fraction: float = 1.0) -> float:
        """The largest probability that an interval covers in a group that is this fraction of all rows.

        It is c + d / ((n + 1) fraction) if no two scores are equal, because at most d rows lie on the regression. With
        two tails it is c + 2 d / ((n + 1) fraction). Intervals may be widened to contain the intervals of lower levels,
        or so that they are not empty. Then they may cover more.

        Raises:
            ValueError: if the fraction is not in (0, 1].

        Example:
            >>> print(round(ConditionalGuarantee(0.9, 399, 4).most(fraction=0.2), 3))
            0.95
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must lie in (0, 1]; got {fraction:g}.")
        if self.randomized:
            return self.confidence_level
        excess = self.tails * self.num_features / ((self.num_calibration + 1) * fraction)
        return min(1.0, self.confidence_level + excess)

    def __str__(self) -> str:
        """The guarantee in plain words."""
        level = f"{100 * self.confidence_level:g} %"
        features = f"the {self.num_features} features" if self.num_features > 1 else "the constant"
        return (
            f"The {level} interval covers a new row with probability {level}{'' if self.randomized else ' or more'} in "
            f"every group of rows whose indicator is a combination of {features}. The same holds for all rows "
            f"together. That row must be drawn like the {self.num_calibration} calibration rows. It may also "
            "have another distribution of the inputs, if its density over the density of the calibration inputs is a "
            "combination of the features. Then the targets must depend on the inputs as before."
        )


@dataclasses.dataclass(frozen=True)
class MeasuredCoverage:
    """How many data points an interval covered, where no coverage is guaranteed.

    Args:
        confidence_level: the confidence level of the interval, in (0, 1).
        num_rows: the number n of data points, each predicted by a model that was fitted without it.
        num_covered: how many of the data points lay in their interval.
        num_not_held_out: the number of further data points that no fold held out. The coverage does not include them.

    Example:
        >>> print(MeasuredCoverage(0.9, 300, 262))
        No coverage is guaranteed. The 90 % interval covered 87.3 % of 300 data points, each predicted by a model that
        was fitted without it; exact 90 % intervals cover between 86.3 % and 93.3 % of as many (in 19 of 20 cases).
    """

    confidence_level: float
    num_rows: int
    num_covered: int
    num_not_held_out: int = 0

    @property
    def coverage(self) -> float:
        """The fraction of the data points that were covered."""
        return self.num_covered / self.num_rows

    def band(self) -> tuple[float, float]:
        """The interval that holds the coverage of n independent data points with probability 0.95, if it is exact.

        Example:
            >>> print("{:.3f} to {:.3f}".format(*MeasuredCoverage(0.9, 1000, 900).band()))
            0.881 to 0.918
        """
        low, high = calibrated_band(self.confidence_level, self.num_rows)
        return float(low), float(high)

    def __str__(self) -> str:
        """The measured coverage in plain words."""
        level = f"{100 * self.confidence_level:g} %"
        low, high = (f"{100 * end:.1f} %" for end in self.band())
        left = self.num_not_held_out
        more = f" The other {left} of {self.num_rows + left} data points were never held out." if left else ""
        return (
            f"No coverage is guaranteed. The {level} interval covered {100 * self.coverage:.1f} % of {self.num_rows} "
            "data points, each predicted by a model that was fitted without it; "
            f"exact {level} intervals cover between {low} and {high} of as many (in 19 of 20 cases).{more}"
        )


def calibrated_band(levels: ArrayLike, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The central 95 % band of the coverage of `num_rows` data points at each level, for calibrated forecasts."""
    from scipy.stats import binom  # comes with jax; slow to import

    low, high = (np.asarray(binom.ppf(p, num_rows, levels) / num_rows) for p in (0.025, 0.975))
    return low, high
