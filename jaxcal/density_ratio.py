"""The density ratio of new inputs to other inputs: the weights of conformal prediction under covariate shift.

It is estimated from inputs alone. A classifier distinguishes m new rows from n other rows, and gives the probability
p(x) that a row is new. Then the ratio of the densities is p(x) / (1 - p(x)) n / m (Sugiyama, Suzuki and Kanamori 2012,
section 4). With these `weights` conformal intervals cover new rows whose inputs have another distribution than the
calibration inputs (Tibshirani, Barber, Candès and Ramdas, NeurIPS 2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from jaxcal import _checks
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Table, is_frame


def fit(x: Table, new_x: Table, *, categorical: Categorical = (), classifier: Any = None) -> "DensityRatio":
    """Fit a classifier that distinguishes the rows new_x from the rows x.

    The rows x should not be the calibration rows themselves, but other rows from the same distribution, such as the
    training rows of the model. A flexible classifier can memorize the rows that it was fitted to. The coverage
    guarantee holds only for weights that do not depend on the calibration rows.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`), with the distribution of the calibration inputs; a vector
            [n] is one column.
        new_x: inputs [m, d], or a data frame, with the distribution of the inputs to predict.
        categorical: the columns of x whose values have no order, by position, or for a data frame by name. The
            classifier gets indicators of their labels.
        classifier: one of these:

            - None: a logistic regression of the standardized columns. Its ratio is the exponential of a linear
              function.
            - An object with the methods `fit` and `predict_proba` of scikit-learn. It is cloned.
            - A function `fit(x, is_new)`. It returns a function that maps inputs [k, p] of numbers to the probabilities
              [k] of being new.

    Raises:
        TypeError: if an argument is traced, or the classifier is of neither kind.
        ValueError: if x or new_x is empty, not finite or of the wrong shape, or they differ in columns. Also if new_x
            lacks values in a column that is complete in x.
        ImportError: if scikit-learn is missing (the extra `sklearn` has it), and the classifier is no function.

    Warns:
        UserWarning: if new_x has a label that x does not have: its rows are of no category.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> rng = np.random.default_rng(0)
        >>> x, new_x = rng.normal(0, 1, 2000), rng.normal(1, 1, 2000)
        >>> ratio = jc.density_ratio.fit(x, new_x)  # it is exp(x - 1/2)
        >>> print(np.log(ratio(np.array([-0.5, 1.5, 2.5]))).round())
        [-1.  1.  2.]
    """
    columns = Columns.of(x, categorical)
    x, new_x = columns(x), _as_new(columns, new_x)
    if _checks.is_traced(x, new_x):
        raise TypeError("an argument is traced, but a classifier needs NumPy arrays: call fit outside jit and vmap.")
    is_new = np.arange(len(x) + len(new_x)) >= len(x)
    rows = np.concatenate([np.asarray(x), np.asarray(new_x)])
    return DensityRatio(_fitted(classifier, rows, is_new), len(x) / len(new_x), columns.num_columns, columns)


def _as_new(columns: Columns, new_x: Table) -> Float[Array, "m p"]:
    """The new rows as numbers, in the columns of x."""
    if not is_frame(new_x):
        new_x = _checks.as_matrix("new_x", new_x)
        _checks.check_columns("new_x", new_x, columns.num_columns, "x has")
    try:
        return columns(new_x)
    except ValueError as error:
        raise ValueError(f"new_x cannot stand beside x: {error}") from error


class DensityRatio(eqx.Module):
    """The ratio of two densities of inputs, a function of x; made by `fit`.

    Attributes:
        probability: a function of NumPy arrays that gives the probability that a row is new.
        odds: the number of other rows for each new row in the fit, n / m.
        num_columns: the number of columns of the inputs.
        columns: the columns of the inputs; None in files of versions that took only arrays.
    """

    probability: Callable[[np.ndarray], np.ndarray] = eqx.field(static=True)
    odds: float = eqx.field(static=True)
    num_columns: int = eqx.field(static=True)
    columns: Columns | None = None

    def __call__(self, x: Table) -> Float[Array, " n"]:
        """The ratio at inputs [n, d], or a data frame.

        Probabilities are clipped, so that the ratio is finite and positive where the classifier is certain.

        Raises:
            TypeError: if x is traced.
            ValueError: if x is not finite or has other columns, or the classifier gives no probabilities.
        """
        columns = self.columns or Columns.of(np.empty((1, self.num_columns)))
        x = columns(x)
        if _checks.is_traced(x):
            raise TypeError("x is traced, but a classifier needs NumPy arrays: call it outside jit and vmap.")
        p = np.asarray(self.probability(np.asarray(x)), float)
        if p.shape != x.shape[:1] or not ((p >= 0) & (p <= 1)).all():
            raise ValueError(f"the classifier must give {len(x)} probabilities between 0 and 1; got shape {p.shape}.")
        least = np.finfo(np.float32).eps
        p = p.clip(least, 1 - least)
        # r(x) = p(x) / (1 - p(x)) n / m.
        return jax.device_put(np.array(self.odds * p / (1 - p), x.dtype))


def _fitted(classifier: Any, rows: np.ndarray, is_new: np.ndarray) -> Any:
    """The probability of being new, by a classifier of any kind."""
    if classifier is not None and not hasattr(classifier, "predict_proba"):
        if not callable(classifier):
            raise TypeError(
                f"classifier must have fit and predict_proba, or be a function; got {type(classifier).__name__}."
            )
        return classifier(rows, is_new)
    try:
        from sklearn.base import clone
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise ImportError("scikit-learn is not installed: pip install 'jaxcal[sklearn]'.") from error
    if classifier is None:
        scaler, regression = StandardScaler(), LogisticRegression(solver="newton-cholesky")
        make_pipeline(scaler, regression).fit(rows, is_new)
        parts = scaler.mean_, scaler.scale_, np.ravel(regression.coef_), np.ravel(regression.intercept_)
        return _Logistic(*map(np.asarray, parts))
    model: Any = clone(classifier)
    return _Classifier(model.fit(rows, is_new))


@dataclass(frozen=True, eq=False)
class _Classifier:
    """The probability of the second class, by a fitted classifier of scikit-learn."""

    model: Any

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.model.predict_proba(x)[:, 1]


@dataclass(frozen=True, eq=False)
class _Logistic:
    """The probability of the second class, by a logistic regression of standardized columns."""

    center: np.ndarray
    scale: np.ndarray
    coefficients: np.ndarray
    intercept: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import expit

        standardized = x.copy()
        standardized -= self.center
        standardized /= self.scale
        return expit(standardized @ self.coefficients + self.intercept)
