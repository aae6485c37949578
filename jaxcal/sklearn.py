"""The face of jaxcal for scikit-learn: a regressor whose predictions are calibrated distributions.

`CalibratedRegressor` is `jaxcal.pipeline` around an estimator, for `Pipeline`, `GridSearchCV`, `cross_val_score` and
what else takes estimators. It computes in 64 bits, as scikit-learn does, whatever the precision of JAX is; the
distributions that it gives have JAX's own. It needs scikit-learn, the extra `sklearn`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import dtypes

from jaxcal import _checks, pipeline
from jaxcal.distributions import Distribution
from jaxcal.frames.layout import Layout, Series, Table, is_frame, like, num_rows
from jaxcal.guarantee import Guarantee, MeasuredCoverage, WorstCaseGuarantee
from jaxcal.pipeline.folds import Fold, as_folds
from jaxcal.pipeline.methods import Method, as_method

try:
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin
    from sklearn.model_selection import check_cv
    from sklearn.pipeline import Pipeline
    from sklearn.utils import check_random_state, get_tags
    from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, _routing_enabled, process_routing
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("jaxcal.sklearn needs scikit-learn 1.6 or newer: pip install 'jaxcal[sklearn]'.") from error


class CalibratedRegressor(MetaEstimatorMixin, RegressorMixin, BaseEstimator):
    """A regressor whose predictions are distributions, calibrated by rows that it was not fitted to.

    If `jaxcal.as_distribution` reads a distribution from the estimator, that one is calibrated. `predict` gives the
    means of the estimator itself, where there is one and `recalibrate` is the default.

    Args:
        estimator: a regressor of scikit-learn, or what has `fit` and `predict`; a fit function of jaxcal, such as
            `jc.mlp.fit`; None combines those of a short list (`jc.pipeline.fit`).
        calibrators: fit functions, such as `jc.rio.fit`, in their order; each corrects what the steps before predict.
        recalibrate: the last step, a fit function as these; "auto" as of `jc.pipeline.fit`.
        method: "auto" is "folds"; from 10,000 rows on it is "split" with 2,000 rows set aside, unless there is `cv`.
            "folds": rows are predicted by estimators fitted without them, and the final one is fitted to all rows.
            "split": a quarter of the rows is set aside for the last step. "cv+": the estimators of the folds predict
            together. "prefit": the estimator is fitted already, to other rows. `guarantee_` says what follows.
        cv: number of folds; None for 10 of at most 500 rows and 5 of more. With "folds" and "prefit" also a splitter
            of scikit-learn, or its splits, that holds out every row once at most, such as `GroupKFold` and
            `TimeSeriesSplit`. No step is calibrated by a row that is never held out.
        time_limit: seconds for the fit. Of several estimators what does not end in time is omitted, and
            `pipeline_` names it.
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
        No coverage is guaranteed. The 90 % interval covered 90.0 % of 200 data points, each predicted by a model that
        was fitted without it; exact 90 % intervals cover between 85.5 % and 94.0 % of as many (in 19 of 20 cases).
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        calibrators: Any = (),
        recalibrate: Any = "auto",
        method: Any = "auto",
        cv: Any = None,
        time_limit: Any = None,
        random_state: Any = None,
    ):
        # As scikit-learn wants it nothing is checked here, but in `fit`.
        self.estimator = estimator
        self.calibrators = calibrators
        self.recalibrate = recalibrate
        self.method = method
        self.cv = cv
        self.time_limit = time_limit
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
            groups: labels [n]: rows of one group stay in one fold, or on one side of the split. A splitter gets them in
                place of the pipeline.
            by: labels [n] of groups that are calibrated each by its own rows, the name of a column, or a function of X.

        Raises:
            ValueError: if X or y is masked, y is not finite, or `cv` holds out a row several times; if there are fewer
                rows or groups than folds; if `sample_weight` is negative or not as long as y; if X is a frame with a
                column of dates that the estimator does not take.
        """
        X, y = self._validated(X, y)
        self._check_options(sample_weight)
        _check_not_masked(groups=groups, by=by, sample_weight=sample_weight)
        folds = self._folds(X, y, groups)
        groups = None if isinstance(folds, list) else groups
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        with jax.enable_x64(True), _in_own_words():
            weights = self._weights(sample_weight, num_rows(X))
            self.pipeline_ = pipeline.fit(
                X,
                y,
                predictor=self.estimator,
                calibrators=tuple(self.calibrators),
                recalibrate=self.recalibrate,
                method=self._method(num_rows(X), folds, groups),
                weights=weights,
                by=by,
                time_limit=None if self.time_limit is None else float(self.time_limit),
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
        if not return_std:
            return self._found(X, lambda X: self.pipeline_.means(X, by=by))

        def means_and_stds(X: Table) -> Any:
            forecast, means = self.pipeline_.with_means(X, by=by)
            return means, forecast.std

        return self._found(X, means_and_stds)

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
        """What is wanted of the distributions of the rows."""
        return self._found(X, lambda X: wanted(self.pipeline_(X, by=by)))

    def _found(self, X: Table, wanted: Callable[[Table], Any]) -> Any:
        """What is wanted of the rows, in 64 bits, with arrays of NumPy's."""
        check_is_fitted(self)
        X, _ = self._validated(X)
        with jax.enable_x64(True), _in_own_words():
            predictions = wanted(X)
            return jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, predictions)

    def _validated(self, X: Table, y: Any = "no_validation") -> tuple[Table, Any]:
        """Inputs and targets as scikit-learn checks them; a data frame stays what it is."""
        is_fit = not isinstance(y, str)
        _check_not_masked(X=X, y=y)
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
        checked: Any = validate_data(self, X, y, y_numeric=True, ensure_min_samples=2, **options)
        return checked

    def _check_options(self, sample_weight: Series | None) -> None:
        """Raise ValueError for options that do not go together."""
        has_estimator = self.estimator is not None and not isinstance(self.estimator, list)
        if not has_estimator and (len(self.calibrators) or self.method == "prefit"):
            raise ValueError("calibrators and method='prefit' need an estimator: give one.")
        if self.method == "cv+" and not (has_estimator and self.recalibrate == "auto"):
            raise ValueError("method='cv+' needs an estimator and the default of recalibrate: CV+ is its last step.")

    def _folds(self, X: Table, y: Any, groups: Series | None) -> int | list[Fold] | None:
        """The number of folds, or the rows of each."""
        if self.cv is None:
            return None
        rows = num_rows(X)
        if isinstance(self.cv, Integral):
            number = int(self.cv)
            _checks.check_at_least("cv", number, 2)
            if number > rows:
                raise ValueError(f"cv={number} folds need as many rows at least; X has {rows}.")
            return number
        splitter: Any = check_cv(self.cv)
        if self.method in ("split", "cv+"):
            raise ValueError(f"method={self.method!r} draws its folds itself: give cv as a number; got {self.cv!r}.")
        return as_folds("cv", splitter.split(X, y, groups), rows)

    def _method(self, rows: int, folds: int | list[Fold] | None, groups: Series | None) -> Method:
        """The method, with these folds."""
        name = "folds" if self.method == "auto" and folds is not None else self.method
        return dataclasses.replace(as_method(name, rows), folds=folds, groups=groups)

    def _weights(self, sample_weight: Series | None, length: int) -> np.ndarray | None:
        """The weights that the estimator asks for.

        Raises:
            ValueError: if they are not one for each row, or one is negative or not finite, or all are 0.
        """
        if _routing_enabled():
            metadata = {} if sample_weight is None else {"sample_weight": sample_weight}
            sample_weight = process_routing(self, "fit", **metadata).estimator.fit.get("sample_weight")
        if sample_weight is None:
            return None
        weights = column_or_1d(sample_weight)
        checked = _checks.as_vector("sample_weight", weights, length=length)
        _checks.check_not_negative("sample_weight", checked)
        if not np.any(checked):
            raise ValueError("sample_weight is 0 in all rows: at least one row must count.")
        return weights

    def get_metadata_routing(self) -> MetadataRouter:
        """What metadata the estimator gets."""
        mapping = MethodMapping().add(caller="fit", callee="fit")
        return (
            MetadataRouter(owner=type(self).__name__)
            .add_self_request(self)
            .add(estimator=self.estimator, method_mapping=mapping)
        )

    def __sklearn_tags__(self) -> Any:
        """Missing values are for the estimator to take or to refuse; those of jaxcal take them."""
        tags = super().__sklearn_tags__()
        if self.estimator is None:
            tags.input_tags.allow_nan = True
        elif isinstance(self.estimator, BaseEstimator):
            tags.input_tags.allow_nan = get_tags(self.estimator).input_tags.allow_nan
        return tags


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Errors call the inputs X, as scikit-learn does."""
    try:
        yield
    except ValueError as error:
        told = _OF_INPUTS.sub("X", str(error))
        if type(error) is not ValueError or told == str(error):
            raise
        raise ValueError(told) from error


# The places in which a message of jaxcal names its argument x.
_OF_INPUTS = re.compile(r"^x\b|(?<=\bof )x\b(?!['=])|\bx(?=\.index\b)")


def _check_not_masked(**arrays: Any) -> None:
    """Raise ValueError if a value is masked, since a copy of the array would take it for a number."""
    for name, array in arrays.items():
        masked = np.ma.count_masked(array) if isinstance(array, np.ma.MaskedArray) else 0
        if masked:
            raise ValueError(f"{name} holds {masked} masked values: drop their rows, or give {name}.filled(...).")


def neg_crps(estimator: Any, X: Table, y: Series) -> float:
    """The negative mean continuous ranked probability score, a scorer for searches: `scoring=neg_crps`.

    Args:
        estimator: what has `predict_distribution`, or a `sklearn.pipeline.Pipeline` that ends with it.
        X: inputs [n, d].
        y: targets [n].
    """
    if isinstance(estimator, Pipeline):  # which hands on `predict` alone
        before, estimator = estimator[:-1], estimator[-1]
        X = before.transform(X) if len(before) else X
    return -float(np.mean(estimator.predict_distribution(X).crps(np.asarray(y))))
