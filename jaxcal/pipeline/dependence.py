"""Signs that rows of different folds depend on each other: out-of-fold errors are then too small for new rows."""

import numpy as np
from jaxtyping import Float
from scipy import stats

from jaxcal import _checks
from jaxcal.frames.layout import Table
from jaxcal.frames.ordinal import Ordinal
from jaxcal.pipeline.fitted import Step

# The fraction of rows that may have a twin before a warning is given.
_FEW_TWINS = 0.05
_RANDOM_ORDERS = 10
# The least correlation of neighboring errors that is reported, and the least one in standard errors.
_CORRELATED, _STANDARD_ERRORS = 0.3, 5
_ADVICE = "groups=labels of Folds or Split keeps rows of a group together"


def warn_of_dependence(x: Table, step: Step) -> None:
    """Warn of rows that are repeated in the data, and of errors that are correlated in the order of the rows.

    Args:
        x: the inputs of the step's rows [n, d].
        step: the out-of-fold predictions of these rows.
    """
    y = np.asarray(step.y, float)
    if twins := num_twins(Ordinal.of(x)(x), y):
        _checks.warn(
            f"{twins} of {len(y)} rows are repeated: they have the inputs and the target of another row. A model that "
            f"was fitted to a row knows the target of its twin, so out-of-fold errors are too small. Drop the repeated "
            f"rows, or give them one group: {_ADVICE}."
        )
    correlation = correlation_of_neighbors(y - np.asarray(step.predictions.icdf(0.5), float))
    if correlation:
        _checks.warn(
            f"errors of neighboring rows are correlated ({correlation:.2f}). Rows that follow in time, or are of one "
            f"group, depend on each other, and errors of other times or groups are larger: {_ADVICE}. If rows are "
            "sorted by the target or by an input, nothing is wrong."
        )


def num_twins(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, " n"]) -> int:
    """How many rows have the inputs and the target of another row, if they are more than a few; else 0.

    If columns have few distinct values, rows are equal by chance, also among new rows. Random orders of the targets
    show how often.
    """
    if (twins := _num_equal(x, y)) <= _FEW_TWINS * len(y):
        return 0
    rng = np.random.default_rng(0)
    chance_number = max(_num_equal(x, rng.permutation(y)) for _ in range(_RANDOM_ORDERS))
    return twins if twins - chance_number > _FEW_TWINS * len(y) else 0


def _num_equal(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, " n"]) -> int:
    table = np.nan_to_num(np.column_stack([x, y]), nan=np.inf)
    _, place, count = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    return int((count[np.ravel(place)] > 1).sum())


def correlation_of_neighbors(errors: Float[np.ndarray, " n"]) -> float:
    """The correlation of the ranks of each error and the next, if it is more than chance; else 0."""
    ranks = stats.rankdata(errors)  # equal errors share a rank: their order would be the order of the rows
    if len(ranks) < 3 or not np.ptp(ranks[:-1]) * np.ptp(ranks[1:]):
        return 0.0
    correlation = float(np.corrcoef(ranks[:-1], ranks[1:])[0, 1])
    return correlation if correlation > max(_CORRELATED, _STANDARD_ERRORS / np.sqrt(len(ranks))) else 0.0
