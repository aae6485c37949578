"""The face of jaxcal for scikit-learn: a regressor whose predictions are calibrated distributions.

`CalibratedRegressor` is `jaxcal.pipeline` around an estimator, for `Pipeline`, `GridSearchCV`, `cross_val_score` and
what else takes estimators. It computes in 64 bits, as scikit-learn does, whatever the precision of JAX is; the
distributions that it gives have JAX's own. It needs scikit-learn, the extra `sklearn`.
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import dtypes

from jaxcal import pipeline
from jaxcal.calibrators import conformal
from jaxcal.columns import Layout, Series, Table, is_frame, like
from jaxcal.distributions import Distribution
from jaxcal.guarantee import Guarantee, MeasuredCoverage, WorstCaseGuarantee

try:
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin
    from sklearn.model_selection import check_cv
    from sklearn.utils import check_random_state, get_tags
    from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, _routing_enabled, process_routing
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("jaxcal.sklearn needs scikit-learn 1.6 or newer: pip install 'jaxcal[sklearn]'.") from error


class CalibratedRegressor(MetaEstimatorMixin, RegressorMixin, BaseEstimator):
    """A regressor whose predictions are distributions, calibrated by rows that it was not fitted to.

    `predict` gives means, and with the default `recalibrate` those of the estimator itself.

    Args:
        estimator: a regressor of scikit-learn, or what has `fit` and `predict`; a fit function of jaxcal, such as
            `jc.mlp.fit`; None takes the best of a short list (`jc.pipeline.fit`).
        calibrators: fit functions, such as `jc.rio.fit`, in their order; each corrects what the steps before predict.
        recalibrate: the last step, a fit function as these.
        method: "folds": rows are predicted by estimators fitted without them, and the final one is fitted to all rows.
            "split": a quarter of the rows is set aside for the last step. "cv+": the estimators of the folds predict
            together. "prefit": the estimator is fitted already, to other rows. `guarantee_` says what follows.
        cv: number of folds; None for 10 of at most 1,000 rows and 5 of more. With "folds" also a splitter of
            scikit-learn, or its splits, whose test parts hold every row once.
        random_state: seed, generator or None, as of scikit-learn.

    Attributes:
        pipeline_: what was fitted, a `jaxcal.pipeline.Pipeline`; `print` shows its scores.
        guarantee_: what is known of the coverage of 90 % intervals; `print` tells it in words.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns of X, if it is a data frame.

    Example:
        >>> import numpy as np
        >>> from sklearn.linear_model import LinearRegression
        >>> from jaxcal.sklearn import CalibratedRegressor
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 2))
        >>> y = X[:, 0] + rng.normal(size=200)
        >>> model = CalibratedRegressor(LinearRegression(), random_state=0).fit(X, y)
        >>> model.predict_interval(X[:3], confidence_level=0.9).shape
        (3, 2)
        >>> print(model.guarantee_)
        No coverage is guaranteed. The 90 % interval covered 89.5 % of 200 data points, each predicted by a model that
        was fitted without it; exact 90 % intervals cover between 85.5 % and 94.0 % of as many (in 19 of 20 cases).
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        calibrators: Any = (),
        recalibrate: Any = conformal.fit,
        method: Any = "folds",
        cv: Any = None,
        random_state: Any = None,
    ):
        # As scikit-learn wants it nothing is checked here, but in `fit`.
        self.estimator = estimator
        self.calibrators = calibrators
        self.recalibrate = recalibrate
        self.method = method
        self.cv = cv
        self.random_state = random_state

    def fit(
        self,
        X: Table,
        y: Series,
        sample_weight: Series | None = None,
        groups: Series | None = None,
        by: Series | str | Callable | None = None,
    ) -> "CalibratedRegressor":
        """Fit the estimator, the calibrators and the last step.

        Args:
            X: inputs [n, d]. A data frame comes to the estimator as it is.
            y: targets [n].
            sample_weight: weights of the rows [n] for the estimator; calibration counts every row once.
            groups: labels [n]: rows of one group stay in one fold, or on one side of the split.
            by: labels [n] of groups that are calibrated each by its own rows, the name of a column, or a function of X.
        """
        X, y = self._validated(X, y)
        weights = self._weights(sample_weight)
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        with jax.enable_x64(True):
            self.pipeline_ = pipeline.fit(
                X,
                y,
                predictor=self.estimator,
                calibrators=tuple(self.calibrators),
                recalibrate=self.recalibrate,
                method=self.method,
                folds=self._folds(X, y, groups),
                groups=groups,
                weights=weights,
                by=by,
                key=jax.random.key(seed),
            )
            self.guarantee_ = self.pipeline_.guarantee(0.9)
        return self

    def predict(self, X: Table, return_std: bool = False, by: Series | None = None) -> Any:
        """The means [n] and, if asked for, the stds [n].

        Args:
            X: inputs [n, d].
            return_std: whether stds are given, too.
            by: labels of groups [n], where the fit had labels.
        """
        moments = self._of_forecast(X, by, lambda forecast: (forecast.mean, forecast.std if return_std else None))
        return moments if return_std else moments[0]

    def predict_interval(self, X: Table, confidence_level: float = 0.9, by: Series | None = None) -> Any:
        """The central intervals, [n, 2]; of a data frame a frame of its kind, with its index, `lower` and `upper`."""
        lower, upper = self._of_forecast(X, by, lambda forecast: forecast.interval(confidence_level))
        return like(X, {"lower": lower, "upper": upper})

    def predict_quantiles(self, X: Table, levels: Series = (0.05, 0.5, 0.95), by: Series | None = None) -> Any:
        """The quantiles at k levels, [n, k]; of a data frame a frame of its kind, with columns `q0.05`, ..."""
        levels = np.atleast_1d(levels)
        values = self._of_forecast(X, by, lambda forecast: forecast.icdf(levels))
        return like(X, {f"q{level:g}": column for level, column in zip(levels, values.T, strict=True)})

    def predict_distribution(self, X: Table, by: Series | None = None) -> Distribution:
        """The predictive distributions of the rows, in the precision of JAX."""
        forecast = self._of_forecast(X, by, lambda forecast: forecast)
        usual = lambda array: jax.device_put(array.astype(dtypes.canonicalize_dtype(array.dtype)))
        return jax.tree.map(lambda leaf: usual(leaf) if eqx.is_array_like(leaf) else leaf, forecast)

    def guarantee(self, confidence_level: float) -> Guarantee | WorstCaseGuarantee | MeasuredCoverage:
        """What is known of the coverage of the intervals at this level; `print` tells it in words."""
        check_is_fitted(self)
        with jax.enable_x64(True):
            return self.pipeline_.guarantee(confidence_level)

    def _of_forecast(self, X: Table, by: Series | None, wanted: Callable[[Distribution], Any]) -> Any:
        """What is wanted of the distributions of the rows, in 64 bits, with arrays of NumPy's."""
        check_is_fitted(self)
        X, _ = self._validated(X)
        with jax.enable_x64(True):
            found = wanted(self.pipeline_(X, by=by))
            return jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, found)

    def _validated(self, X: Table, y: Any = "no_validation") -> tuple[Table, Any]:
        """Inputs and targets as scikit-learn checks them; a data frame stays what it is."""
        is_fit = not isinstance(y, str)
        if is_frame(X):
            if hasattr(X, "iloc"):  # scikit-learn knows the names of pandas alone
                validate_data(self, X, y, reset=is_fit, skip_check_array=True)
            elif is_fit:
                self.feature_names_in_ = np.array(Layout.of(X).names, object)
                self.n_features_in_ = len(self.feature_names_in_)
            if is_fit:
                check_consistent_length(X, y)
            return X, y
        finite = "allow-nan" if self.__sklearn_tags__().input_tags.allow_nan else True
        options = {"reset": is_fit, "dtype": "numeric", "ensure_all_finite": finite}
        if not is_fit:
            return validate_data(self, X, **options), y
        found: Any = validate_data(self, X, y, y_numeric=True, ensure_min_samples=2, **options)
        return found

    def _folds(self, X: Table, y: Any, groups: Series | None) -> int | list[np.ndarray] | None:
        """The number of folds, or the rows of each."""
        if self.cv is None or isinstance(self.cv, Integral):
            return None if self.cv is None else int(self.cv)
        splitter: Any = check_cv(self.cv)
        return [test for _, test in splitter.split(X, y, groups)]

    def _weights(self, sample_weight: Series | None) -> np.ndarray | None:
        """The weights that the estimator asks for."""
        if _routing_enabled():
            given = {} if sample_weight is None else {"sample_weight": sample_weight}
            sample_weight = process_routing(self, "fit", **given).estimator.fit.get("sample_weight")
        return None if sample_weight is None else column_or_1d(sample_weight)

    def get_metadata_routing(self) -> MetadataRouter:
        """What metadata the estimator gets."""
        mapping = MethodMapping().add(caller="fit", callee="fit")
        return (
            MetadataRouter(owner=type(self).__name__)
            .add_self_request(self)
            .add(estimator=self.estimator, method_mapping=mapping)
        )

    def __sklearn_tags__(self) -> Any:
        """Missing values are for the estimator to take or to refuse."""
        tags = super().__sklearn_tags__()
        if isinstance(self.estimator, BaseEstimator):
            tags.input_tags.allow_nan = get_tags(self.estimator).input_tags.allow_nan
        return tags


def neg_crps(estimator: Any, X: Table, y: Series) -> float:
    """The negative mean continuous ranked probability score, a scorer for searches: `scoring=neg_crps`.

    Args:
        estimator: what has `predict_distribution`.
        X: inputs [n, d].
        y: targets [n].
    """
    return -float(np.mean(estimator.predict_distribution(X).crps(np.asarray(y))))
