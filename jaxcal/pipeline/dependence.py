"""Signs that rows of different folds tell of each other: then errors out of fold are too small for new rows."""

import numpy as np
from jaxtyping import Float
from scipy import stats

from jaxcal import _checks
from jaxcal.frames.layout import Table
from jaxcal.frames.ordinal import Ordinal
from jaxcal.pipeline.fitted import Step

# So many rows have a twin where nothing is wrong, as a fraction.
_FEW_TWINS = 0.05
_RANDOM_ORDERS = 10
# Errors of neighbors are correlated from here on, if that is no chance: in standard errors.
_CORRELATED, _STANDARD_ERRORS = 0.3, 5
_ADVICE = "groups=labels of Folds or Split keeps rows of a group together"


def warn_of_dependence(x: Table, step: Step) -> None:
    """Warn of rows that are repeated in the data, and of errors that are correlated in the order of the rows.

    Args:
        x: the inputs of the step's rows [n, d].
        step: predictions of these out of fold.
    """
    y = np.asarray(step.y, float)
    if twins := num_twins(Ordinal.of(x)(x), y):
        _checks.warn(
            f"{twins} of {len(y)} rows are repeated: they have the inputs and the target of another row. A model that "
            f"has seen a row knows its twin, and errors out of fold are too small. Drop them; or {_ADVICE}."
        )
    correlation = correlation_of_neighbors(y - np.asarray(step.predictions.icdf(0.5), float))
    if correlation:
        _checks.warn(
            f"errors of neighboring rows are correlated ({correlation:.2f}): rows in the order of time, or of one "
            f"group, tell of each other, and errors of other times or groups are larger. {_ADVICE}. If rows are sorted "
            "by the target or by an input, there is nothing wrong."
        )


def num_twins(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, " n"]) -> int:
    """How many rows have the inputs and the target of another, if they are more than a few.

    Columns of few values are equal by chance, in new rows, too: random orders of the targets show how often.
    """
    if (twins := _num_equal(x, y)) <= _FEW_TWINS * len(y):
        return 0
    rng = np.random.default_rng(0)
    by_chance = max(_num_equal(x, rng.permutation(y)) for _ in range(_RANDOM_ORDERS))
    return twins if twins - by_chance > _FEW_TWINS * len(y) else 0


def _num_equal(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, " n"]) -> int:
    table = np.nan_to_num(np.column_stack([x, y]), nan=np.inf)
    _, place, count = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    return int((count[np.ravel(place)] > 1).sum())


def correlation_of_neighbors(errors: Float[np.ndarray, " n"]) -> float:
    """The correlation of the ranks of each error and the next, if it is more than chance; else 0."""
    ranks = stats.rankdata(errors)  # equal ones have one rank, or their order would be the rows'
    if len(ranks) < 3 or not np.ptp(ranks[:-1]) * np.ptp(ranks[1:]):
        return 0.0
    found = float(np.corrcoef(ranks[:-1], ranks[1:])[0, 1])
    return found if found > max(_CORRELATED, _STANDARD_ERRORS / np.sqrt(len(ranks))) else 0.0
