"""The interface of jaxcal to skpro: `jaxcal.sklearn.CalibratedRegressor` as a probabilistic regressor.

It needs skpro, which is in the extra `skpro`.
"""

from typing import Any

import numpy as np

from jaxcal.sklearn import CalibratedRegressor

try:
    import pandas
    from skpro.distributions import QPD_Empirical
    from skpro.regression.base import BaseProbaRegressor
except ImportError as error:
    raise ImportError("jaxcal.skpro needs skpro: pip install 'jaxcal[skpro]'.") from error

# The levels of the quantiles that define a distribution of skpro.
_LEVELS = np.arange(1, 100) / 100


class CalibratedProbaRegressor(BaseProbaRegressor):
    """A probabilistic regressor of skpro whose distributions are calibrated by rows that it was not fitted to.

    `predict_quantiles` and `predict_interval` give the quantiles themselves. `predict_proba` gives a distribution with
    the quantiles at 1 %, 2 %, ..., 99 %. It omits levels that need more calibration rows than there are.

    Args:
        estimator: as in `jaxcal.sklearn.CalibratedRegressor`, like all other arguments.
        calibrators: see there.
        recalibrate: see there.
        method: see there.
        cv: see there.
        random_state: see there.

    Attributes:
        regressor_: the `jaxcal.sklearn.CalibratedRegressor`.

    Example:
        >>> import numpy as np, pandas
        >>> from sklearn.linear_model import LinearRegression
        >>> from jaxcal.skpro import CalibratedProbaRegressor
        >>> X = pandas.DataFrame({"a": np.random.default_rng(0).normal(size=100)})
        >>> y = X.rename(columns={"a": "target"}) + np.random.default_rng(1).normal(size=(100, 1))
        >>> model = CalibratedProbaRegressor(LinearRegression(), random_state=0).fit(X, y)
        >>> list(model.predict_interval(X.head(2), coverage=0.9).columns)
        [('target', 0.9, 'lower'), ('target', 0.9, 'upper')]
    """

    _tags = {"capability:multioutput": False, "capability:missing": True}  # noqa: RUF012, as skpro has them

    def __init__(
        self,
        estimator: Any = None,
        calibrators: Any = (),
        recalibrate: Any = "auto",
        method: Any = "auto",
        cv: Any = None,
        random_state: Any = None,
    ):
        self.estimator = estimator
        self.calibrators = calibrators
        self.recalibrate = recalibrate
        self.method = method
        self.cv = cv
        self.random_state = random_state
        super().__init__()

    def _fit(self, X: Any, y: Any, C: Any = None) -> "CalibratedProbaRegressor":
        self._target = y.columns
        self.regressor_ = CalibratedRegressor(**self.get_params(deep=False)).fit(_named(X), y.iloc[:, 0].to_numpy())
        return self

    def _predict(self, X: Any) -> Any:
        return pandas.DataFrame(self.regressor_.predict(_named(X)), index=X.index, columns=self._target)

    def _predict_var(self, X: Any) -> Any:
        _, std = self.regressor_.predict(_named(X), return_std=True)
        return pandas.DataFrame(std**2, index=X.index, columns=self._target)

    def _predict_quantiles(self, X: Any, alpha: list[float]) -> Any:
        columns = pandas.MultiIndex.from_product([self._target, alpha])
        values = np.asarray(self.regressor_.predict_quantiles(_named(X), alpha))
        return pandas.DataFrame(values, index=X.index, columns=columns)

    def _predict_interval(self, X: Any, coverage: list[float]) -> Any:
        columns = pandas.MultiIndex.from_product([self._target, coverage, ["lower", "upper"]])
        intervals = [np.asarray(self.regressor_.predict_interval(_named(X), level)) for level in coverage]
        return pandas.DataFrame(np.hstack(intervals), index=X.index, columns=columns)

    def _predict_proba(self, X: Any) -> Any:
        values = np.asarray(self.regressor_.predict_quantiles(_named(X), _LEVELS))
        finite = np.isfinite(values).all(axis=0)
        index = pandas.MultiIndex.from_product([_LEVELS[finite], X.index])
        quantiles = pandas.DataFrame(values[:, finite].T.reshape(-1, 1), index=index, columns=self._target)
        return QPD_Empirical(quantiles, index=X.index, columns=self._target)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> Any:
        """The parameters for the tests of skpro."""
        from sklearn.linear_model import LinearRegression, Ridge

        return [
            {"estimator": LinearRegression(), "cv": 3, "random_state": 0},
            {"estimator": Ridge(), "method": "split", "random_state": 0},
        ]


def _named(X: Any) -> Any:
    """The frame with strings as names of its columns, because scikit-learn needs strings."""
    return X.rename(columns=str)
