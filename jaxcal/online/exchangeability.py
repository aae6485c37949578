"""Is a coverage guarantee still true? Tests of whether new rows are exchangeable with the calibration rows.

If the targets are known, `check_errors` runs a conformal test martingale over the scores of the new rows in the order
of time. Without targets, `check_inputs` tests whether a classifier can separate the new inputs from the inputs of the
calibration rows. Both return the test and its result, and `print` says them in words.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._extras import needed
from jaxcal.distributions import Distribution
from jaxcal.frames.columns import Columns
from jaxcal.frames.layout import Table, is_frame, num_rows, stacked
from jaxcal.functional.martingales import p_values
from jaxcal.online import martingales
from jaxcal.online._base import signed_errors

# With targets


def check_errors(
    base: Distribution,
    y: ArrayLike,
    new_base: Distribution,
    new_y: ArrayLike,
    *,
    key: PRNGKeyArray,
    score: str | None = None,
    martingale: martingales.Martingale | None = None,
    significance: float = 0.01,
) -> "ErrorCheck":
    """Test whether the scores of new rows are exchangeable with the calibration rows' scores, and with each other.

    Each new score gets a smoothed conformal p-value among the calibration scores and the new scores before it. A test
    martingale bets on these p-values. If all rows are exchangeable, its largest value is at least 1 / a with a
    probability of at most a. So the test may be repeated whenever rows have come, with the same key.

    Args:
        base: the model's predictions of the calibration rows, [L].
        y: their targets [L].
        new_base: its predictions of the new rows, [n].
        new_y: their targets [n], in the order of time.
        key: random key for the taus, by which equal scores are ranked.
        score: "absolute", |y - mean|, or "scaled", |y - mean| / std; None for "scaled" if the base has a std.
        martingale: a martingale of `online.martingales`, before its first bet; None for `martingales.jumper()`.
        significance: a, the probability of a false alarm, in (0, 1).

    Returns:
        the result of the test; `print` says it in words.

    Raises:
        TypeError: if a base is not a Distribution, or key is no random key. Also if an array is traced, because the
            result is known on the host only.
        ValueError: if an argument is empty, not finite or of the wrong shape. Also if base is out of fold, or the
            martingale has made a bet. Also if a base is a `Point` and scores are measured in predicted stds.

    Source: Vovk, Nouretdinov and Gammerman, ICML 2003; Vovk et al., COPA 2021.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> noise = np.random.default_rng(0).normal(size=600)
        >>> noise[400:] *= 2
        >>> zeros = lambda rows: jc.Point(np.zeros(rows))
        >>> found = check_errors(zeros(300), noise[:300], zeros(300), noise[300:], key=jax.random.key(0))
        >>> print(found)
        The errors of 300 new rows were tested for exchangeability with those of 300 calibration rows: it is rejected.
        The test martingale, which starts at 1, reached 100 after new row 142 and at most 3.1e+07. For exchangeable rows
        it reaches 100 with a probability of at most 1 %. The premise of a coverage guarantee is false for these rows:
        calibrate with recent rows.
    """
    _checks.check_key(key)
    _checks.check_fraction("significance", significance)
    if getattr(base, "is_out_of_fold", False):
        raise ValueError(
            "the calibration rows are predicted out of fold: by other models than the new rows, so that their errors "
            "differ anyway. Give predictions of rows that were set aside."
        )
    errors, scaled = signed_errors(base, y, score)
    new_errors, _ = signed_errors(new_base, new_y, "scaled" if scaled else "absolute")
    if _checks.is_traced(errors, new_errors):
        raise TypeError("check_errors needs values: it runs outside jit, vmap and grad.")
    martingale = martingales.jumper() if martingale is None else martingale
    capitals = np.exp(np.asarray(martingale.log_capitals, float))
    if not np.allclose(capitals, 1 / len(capitals), rtol=1e-3):
        raise ValueError(
            f"martingale must not have made a bet yet: its capitals are {capitals.round(3)}, not all equal."
        )
    log_values = _log_values(errors, new_errors, martingale, key)
    return ErrorCheck(errors.shape[0], np.asarray(log_values), float(significance))


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorCheck:
    """The result of `check_errors`.

    Args:
        num_calibration: the number of calibration rows.
        log_martingale: the logarithm of the martingale's value after each new row [n].
        significance: a, the probability of a false alarm.
    """

    num_calibration: int
    log_martingale: np.ndarray
    significance: float

    @property
    def log_max(self) -> float:
        """The logarithm of the martingale's largest value, at least 0: it starts at 1."""
        return max(0.0, float(self.log_martingale.max()))

    @property
    def p_value(self) -> float:
        """1 / max M, an upper bound on the probability of a value this large if all rows are exchangeable."""
        return math.exp(-self.log_max)

    @property
    def alarm(self) -> bool:
        """Whether exchangeability is rejected: the martingale has reached 1 / a."""
        return self.first_alarm is not None

    @property
    def first_alarm(self) -> int | None:
        """The first new row's number, from 0, after which the martingale was at least 1 / a; None if there is none."""
        reached = self.log_martingale >= -math.log(self.significance)
        return int(reached.argmax()) if reached.any() else None

    def __str__(self) -> str:
        """The test and its result, in plain words."""
        rows, largest = len(self.log_martingale), exponential(self.log_max)
        tested = (
            f"The errors of {rows} new rows were tested for exchangeability with those of {self.num_calibration} "
            "calibration rows"
        )
        threshold = f"{1 / self.significance:g}"
        if self.first_alarm is None:
            return (
                f"{tested}: no evidence against it. The test martingale, which starts at 1, reached {largest} and not "
                f"{threshold}. This does not prove that coverage guarantees hold: a small change needs more rows to be "
                "found."
            )
        return (
            f"{tested}: it is rejected. The test martingale, which starts at 1, reached {threshold} after new row "
            f"{self.first_alarm + 1} and at most {largest}. For exchangeable rows it reaches {threshold} with a "
            f"probability of at most {100 * self.significance:g} %. The premise of a coverage guarantee is false for "
            "these rows: calibrate with recent rows."
        )


@_programs.jit
def _log_values(
    errors: Float[Array, " l"], new: Float[Array, " n"], martingale: martingales.Martingale, key: PRNGKeyArray
) -> Float[Array, " n"]:
    scores = jnp.abs(jnp.concatenate([errors, new.astype(errors.dtype)]))
    # A row gets the same tau, however many rows follow.
    tau_of = lambda row: 1 - jax.random.uniform(jax.random.fold_in(key, row), (), scores.dtype)
    taus = jax.vmap(tau_of)(jnp.arange(scores.shape[0]))
    return lax.scan(martingales.step, martingale, p_values(scores, taus)[errors.shape[0] :])[1]


def exponential(log_value: float) -> str:
    """A text of exp(log_value), however large it is."""
    if log_value < math.log(1000):
        value = math.exp(log_value)
        return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
    exponent, rest = divmod(log_value / math.log(10), 1)
    return f"{10**rest:.1f}e+{exponent:02.0f}"


# Without targets


def check_inputs(
    x: Table,
    new_x: Table,
    *,
    key: PRNGKeyArray,
    classifier: Any = None,
    groups: ArrayLike | None = None,
    new_groups: ArrayLike | None = None,
    folds: int = 5,
    significance: float = 0.01,
) -> "InputCheck":
    """Test by a classifier whether new inputs are exchangeable with the inputs of the calibration rows.

    All rows are divided into folds at random. Each fold but the first is scored by a classifier that was fitted to the
    folds before it. The AUC counts pairs of a new row and a calibration row in one of these folds. It is the fraction
    of pairs in which the new row has the higher score; equal scores are ordered at random.

    If the rows are exchangeable, all orders of the labels in a fold are equally likely, whatever the classifier has
    learned from the folds before. So the Mann-Whitney statistics of the folds are independent, with known mean and
    variance. The p-value is the probability, by the normal distribution, of a sum of them this large. In ordinary
    cross-validation each fold trains the classifiers of the others, and its statistics are not independent.

    Copies of a row, and rows of one group, are no independent evidence. They stay in one fold, where a classifier
    trained on the other folds cannot recognize them. The variance is at least the variance of independent groups.

    Args:
        x: inputs of the calibration rows [L, d], or a data frame (`jaxcal.frames`); a vector [L] is one column.
        new_x: inputs of the new rows [n, d], or a frame with the columns of x. Labels become indicators.
        key: random key for the folds, the order of equal scores, and the default classifier.
        classifier: any classifier of scikit-learn with `decision_function` or `predict_proba`; None for extremely
            randomized trees.
        groups: labels [L] of rows that depend on each other, such as the rows of one patient. None takes rows with the
            same inputs as a group. But if less than half of the rows differ, the inputs have few values, and every row
            is its own group.
        new_groups: the labels of the new rows [n]; given together with `groups`, or not at all.
        folds: the number of folds.
        significance: the probability of a false alarm, in (0, 1).

    Returns:
        the result of the test; `print` says it in words.

    Raises:
        TypeError: if key is no random key.
        ImportError: if scikit-learn is not installed.
        TypeError: if x or new_x is traced.
        ValueError: if x or new_x is empty, not finite or of the wrong shape. Also if there are fewer rows or groups of
            either kind than 2 * folds, or if only one of `groups` and `new_groups` is given. Also if
            only one of x and new_x is a frame, or the frames differ in columns.

    Source: Lopez-Paz and Oquab, Revisiting classifier two-sample tests, ICLR 2017, on classifiers as two-sample tests;
    Mann and Whitney, Annals of Mathematical Statistics 18 (1947), on the mean and the variance.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> from sklearn.naive_bayes import GaussianNB
        >>> x = np.random.default_rng(0).normal(size=(600, 2))
        >>> print(check_inputs(x[:300], x[300:] + [0.5, 0], classifier=GaussianNB(), key=jax.random.key(0)))
        The inputs of 300 new rows were tested for exchangeability with those of 300 calibration rows: it is rejected. A
        classifier of new rows and calibration rows has an AUC of 0.611 out of fold, where 0.5 is chance (p = 1.5e-05).
        The premise of a coverage guarantee is false for these rows: calibrate with recent rows, or with weights.
    """
    _checks.check_key(key)
    if _checks.is_traced(x, new_x):
        raise TypeError("check_inputs needs values: it runs outside jit, vmap and grad.")
    _checks.check_fraction("significance", significance)
    _checks.check_at_least("folds", folds, 2)
    rows, is_new = _all_rows(x, new_x)
    groups = _groups(rows, is_new, groups, new_groups)
    for name, kind in (("x", ~is_new), ("new_x", is_new)):
        number = len(np.unique(groups[kind]))
        if number < 2 * folds:
            raise ValueError(f"{name} has {number} groups of rows; {2 * folds} are needed for {folds} folds.")
    seed = int(jax.random.bits(key, dtype="uint32"))
    rng = np.random.default_rng(seed)
    fold_of = (rng.permutation(groups.max() + 1) * folds // (groups.max() + 1))[groups]
    wins = pairs = excess = variance = group_variance = 0.0
    for fold in range(1, folds):
        training, held_out = fold_of < fold, fold_of == fold
        scores = _scores(classifier, seed, rows[training], is_new[training], rows[held_out])
        statistic = _rank_statistic(scores, is_new[held_out], groups[held_out], rng)
        wins, pairs = wins + statistic.wins, pairs + statistic.pairs
        excess, variance = excess + statistic.excess, variance + statistic.variance
        group_variance += statistic.group_variance
    # z = excess / std; p = P(N(0, 1) > z) = erfc(z / sqrt(2)) / 2
    z = excess / math.sqrt(max(variance, group_variance)) if variance else 0.0
    return InputCheck(
        auc=wins / pairs if pairs else 0.5,
        p_value=math.erfc(z / math.sqrt(2)) / 2,
        num_calibration=int((~is_new).sum()),
        num_new=int(is_new.sum()),
        significance=float(significance),
    )


@dataclasses.dataclass(frozen=True)
class InputCheck:
    """The result of `check_inputs`.

    Args:
        auc: the area under the curve of the classifier, out of fold: 0.5 by chance, 1 if it recognizes every new row.
        p_value: the probability of an AUC this large if the rows are exchangeable.
        num_calibration: the number of calibration rows.
        num_new: the number of new rows.
        significance: the probability of a false alarm.
    """

    auc: float
    p_value: float
    num_calibration: int
    num_new: int
    significance: float

    @property
    def alarm(self) -> bool:
        """Whether exchangeability is rejected: the p-value is at most the significance."""
        return self.p_value <= self.significance

    def __str__(self) -> str:
        """The test and its result, in plain words."""
        tested = (
            f"The inputs of {self.num_new} new rows were tested for exchangeability with those of "
            f"{self.num_calibration} calibration rows"
        )
        accuracy = (
            f"A classifier of new rows and calibration rows has an AUC of {self.auc:.3f} out of fold, where 0.5 is "
            f"chance (p = {self.p_value:.2g})."
        )
        if self.alarm:
            return (
                f"{tested}: it is rejected. {accuracy} The premise of a coverage guarantee is false for these rows: "
                "calibrate with recent rows, or with weights."
            )
        return f"{tested}: no evidence against it. {accuracy} The targets were not tested: the errors may have changed."


class _RankStatistic(NamedTuple):
    """The statistic of one fold: the pairs that the new row wins, all pairs, and the rank sum's excess over its mean.

    The excess has two variances: one if the rows are independent, one if the groups are independent.
    """

    wins: float
    pairs: float
    excess: float
    variance: float
    group_variance: float


def _rank_statistic(
    scores: np.ndarray, is_new: np.ndarray, groups: np.ndarray, rng: np.random.Generator
) -> _RankStatistic:
    """The Mann-Whitney statistic of new rows against the others, equal scores in random order."""
    size, number = len(scores), int(is_new.sum())
    pairs = float(number * (size - number))
    if not pairs:
        return _RankStatistic(0.0, 0.0, 0.0, 0.0, 0.0)
    ranks = np.empty(size)
    ranks[np.lexsort((rng.random(size), scores))] = np.arange(size)
    centered = ranks - (size - 1) / 2
    # The excess is a sum over rows. The variance of independent groups is the sum of the squares of their sums.
    parts = (is_new - number / size) * centered
    group_sums = np.bincount(groups, weights=parts)
    excess = float(parts.sum())
    # Mann-Whitney: `U = excess + m (N - m) / 2` and `Var U = m (N - m) (N + 1) / 12`, for m new rows among N.
    return _RankStatistic(excess + pairs / 2, pairs, excess, pairs * (size + 1) / 12, float((group_sums**2).sum()))


def _all_rows(x: Table, new_x: Table) -> tuple[np.ndarray, np.ndarray]:
    """The rows of both kinds as numbers, and which are new.

    What labels and missing values become depends on all rows alike: otherwise it would say which of them are new.
    """
    if is_frame(x) or is_frame(new_x):
        both, number = stacked(x, new_x), num_rows(x)
        rows = np.asarray(Columns.of(both)(both))
    else:
        x, new_x = _checks.as_matrix("x", x), _checks.as_matrix("new_x", new_x)
        _checks.check_columns("new_x", new_x, x.shape[1], "the calibration rows have")
        rows, number = np.concatenate([x, new_x]), len(x)
    return rows, np.arange(len(rows)) >= number


def _groups(rows: np.ndarray, is_new: np.ndarray, groups: ArrayLike | None, new_groups: ArrayLike | None) -> np.ndarray:
    """The number of the group of every row, from 0."""
    if (groups is None) != (new_groups is None):
        raise ValueError("groups and new_groups go together: give both, or none.")
    as_labels = lambda labels, which: None if labels is None else _checks.as_labels("groups", labels, int(which.sum()))
    old, new = as_labels(groups, ~is_new), as_labels(new_groups, is_new)
    if old is not None and new is not None:
        return np.unique(np.concatenate([old, new]), return_inverse=True)[1].ravel()
    copies = np.unique(rows, axis=0, return_inverse=True)[1].ravel()
    return copies if copies.max() + 1 >= len(rows) / 2 else np.arange(len(rows))


def _scores(classifier: Any, seed: int, x: np.ndarray, is_new: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """The scores of held-out rows by a classifier that is fitted to others, higher for new rows.

    They are zeros if all rows of the fit are of one kind.
    """
    with needed("scikit-learn", "'jaxcal[sklearn]'"):
        from sklearn.base import clone
        from sklearn.ensemble import ExtraTreesClassifier
    if is_new.all() or not is_new.any():
        return np.zeros(len(held_out))
    if classifier is None:
        classifier = ExtraTreesClassifier(100, min_samples_leaf=5, random_state=seed)
    fresh: Any = clone(classifier)
    fitted = fresh.fit(x, is_new)
    if hasattr(fitted, "decision_function"):
        return fitted.decision_function(held_out)
    return fitted.predict_proba(held_out)[:, 1]
