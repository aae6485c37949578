"""A standard deviation for every black box, from its errors: ACCRUE.

Camporeale and Carè, "ACCRUE: Accurate and Reliable Uncertainty Estimate in Deterministic Models", International Journal
for Uncertainty Quantification 11 (2021). The distribution of a row is N(base.mean, std(x)^2), with std a function of
the inputs. The std minimizes beta times the mean CRPS plus 1 - beta times the reliability score (equation 11;
`functional.scores` has all of it), or any other loss. With `functional.normal.crps` the loss is the CRPS alone, the
paper's first baseline. Isotonic recalibration of the result is the paper's RECAL.

**The errors decide everything.** Errors of training rows are too small, and so is a std learned from them. In the
paper's setting the std is too small by half on small data sets. Give rows that the model was not trained on, or
out-of-fold predictions: `jaxcal.out_of_fold`.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs, _random, optimize
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit, stacked
from jaxcal.calibrators import _base, _groups
from jaxcal.calibrators._groups import Weights
from jaxcal.distributions import Distribution, Normal
from jaxcal.distributions._rows import predicted_by_buckets
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional.linalg import weighted_mean
from jaxcal.functional.scores import accrue_beta, accrue_loss
from jaxcal.networks import FeedForward, TrainingRecord, presets
from jaxcal.networks.training import GIVE_STEPS, check_names, check_steps
from jaxcal.optimize import Optimum, Result, num_train

# Section 5.1: the network's layers, of ReLU and of symmetric saturating linear functions; the polynomial's order.
_HIDDEN, _ACTIVATIONS = (50, 10), (jax.nn.relu, jax.nn.hard_tanh)
_MAX_ORDER = 10
# A further order is useless, and is not taken, if it lowers the loss of n rows by less than this number over n. Two
# useless orders in succession end the search, since only the odd orders, or only the even orders, may be useless.
_ORDER_GAIN = 0.1
_LEAST_ROWS = 10
# The median of |z| for standard normal z.
_MEDIAN_SIZE = 0.6745
# L-BFGS stops at these tolerances, and Newton steps find the last digits.
_to_the_end = partial(optimize.minimize, loss_tolerance=1e-13, gradient_tolerance=1e-9)
# A direction with less curvature of the loss has no well-determined optimum. It is a coefficient of a higher order, or
# a coefficient that moves the std toward 0. An error that is 10^4 times too large leaves a curvature of 7e-7.
_LEAST_CURVATURE = 1e-7
# More rows than this are not filled up to a bucket: a fit would take up to a quarter longer. The time of a smoothed
# score grows with the square of the number of rows.
_FEW = 2**12
# The largest ratio of the errors of the validation rows to the errors of the rows fitted to without a warning.
_TOO_LARGE = 1.5


class AccrueOptions(TypedDict, total=False):
    """The options of the training; an option that is None has its default.

    Attributes:
        restarts: number of initializations of the network (default 5; one if it takes steps).
        validation_fraction: fraction of the rows in the validation set (default 0.5).
        max_iterations: the largest number of L-BFGS steps (default 500).
        patience: the number of steps without improvement that ends the training (default 10).
        steps: number of full-batch steps, as `jaxcal.networks.StepOptions` describes them, in place of restarts, a
            validation set, max_iterations and patience; None for a training that the validation set stops.
        learning_rate: the learning rate of Adam in these steps (default 0.01).
    """

    restarts: int | None
    validation_fraction: float | None
    max_iterations: int | None
    patience: int | None
    steps: int | None
    learning_rate: ArrayLike | None


def fit(
    x: "Table",
    base: "Distribution",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    model: "str | eqx.Module" = "network",
    loss: "Callable | None" = None,
    relative: bool = False,
    validation: tuple | None = None,
    weights: "Weights | None" = None,
    differentiable: bool = False,
    **options: "Unpack[AccrueOptions]",
) -> "ACCRUE":
    """Fit a std as a function of the inputs to the errors y - base.mean.

    The rows must not be rows that the model behind `base` was trained on, unless it predicts them out of fold, as
    `jaxcal.out_of_fold` does. Errors of training rows are too small, and so would the std be.

    - "network": hidden layers of 50 ReLU and 10 symmetric saturating linear functions, and log std as the output.
      L-BFGS trains it on a random part of the rows, until the loss on the rest has not fallen for `patience` steps. The
      best of `restarts` initializations, by the loss on the rest, is kept. They train in one `vmap`.
    - "polynomial", for one column of x: std = softplus(polynomial), which is positive everywhere. The order is 1, 2,
      ... up to 10, and each order starts from the solution of the last useful order. The search stops when two
      successive orders lower the loss by less than 0.1 / l. Algorithm 1 stops after one such order, keeps it, and lets
      the std become negative. All rows are fitted to.
    - an Equinox module that maps one standardized input [d] to log std, as a scalar, in units of the errors' typical
      size. It is trained as the network is, from its own weights, once.

    `loss` is any function of the errors [n] and the stds [n], in units of y's standard deviation. It returns one value
    a row, [n], whose mean the fit minimizes, or one number for all rows. A function that takes `weights` gets the
    weights of the rows by this name, if there are any. Examples, with `functional` and `functools.partial`:

    - `partial(scores.accrue_loss, beta=0.5)`, whose weight of the CRPS, in [0, 1], is not the weight of equation 12;
    - `partial(scores.accrue_loss, smoothing=0.1)`, which smooths the reliability score. This length makes a std about
      1 or 2 % larger. The time of the loss then grows with the square of the number of rows;
    - `lambda errors, std: normal.crps(errors, 0.0, std)`, the CRPS alone, as with beta=1.

    Other numbers in a `partial` compile nothing. Another function, such as a new lambda, compiles anew.

    With weights the mean CRPS is weighted, over the training rows and over the validation set. The reliability score
    compares Phi with the weighted empirical cdf of the errors. A row of weight 2 counts as two rows, and a row of
    weight 0 does not count. Weights that are all equal have no effect. Let w(x) be the density of new inputs divided by
    the density of the calibration inputs. Both scores then estimate the scores of new rows, but a std that can follow
    the errors everywhere gains little from such weights. The effective number of rows, (sum w)^2 / sum(w^2), decides
    how far the order of a polynomial may grow.

    Works under `jit` and, over keys and over runs of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x and base. With `differentiable=True` and a polynomial they are also differentiable in the rows
    fitted to and their weights. `functional.scores.accrue_loss` is a loss to train mean and std jointly.

    With `steps` a network or module takes that number of steps on all rows. Derivatives pass through the steps, in x,
    base, y, weights, the numbers of a `partial` in `loss`, the module's own weights and the learning rate. The steps
    are steps of Adam, since L-BFGS chooses the lengths of its steps by comparisons. Any other derivative through the
    fit raises an error.

    Args:
        x: inputs [l, d], or a data frame (`jaxcal.frames`); a vector [l] is one column.
        base: the model's predictions [l] on rows that it was not trained on; without `relative` only the mean is used.
        y: targets [l].
        key: random key of the initial weights and of the validation set.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        model: "network", "polynomial" or a module, as above.
        loss: what is minimized, as above. None is `functional.scores.accrue_loss`, whose beta is the weight of equation
            12 unless a `partial` gives it, see `functional.scores.accrue_beta`.
        relative: whether the model learns a factor that multiplies base.std, in place of the std. If base.std is large
            where the errors are large, the fit then only has to correct the scale. Without it base.std has no effect on
            the result.
        validation: other rows (x, base, y) as the validation set, in place of a fraction of these rows. If `weights` is
            an array, the weights of the other rows are a fourth part, (x, base, y, weights).
        weights: the weights of the rows [l], not negative, or a function of x that gives them; None for equal weights.
            The call needs no weights.
        differentiable: whether derivatives pass through the fit of the polynomial, as in `rio.fit`. They come from the
            implicit function theorem at the optimum, which the fit then finds to the last digits. If there is no
            optimum, they are NaN and the result of `training` is not CONVERGED. The order is held constant. The loss of
            ACCRUE needs beta=1 or smoothing: the reliability score has a kink wherever two standardized errors change
            places. The derivatives between kinks do not show how the std moves over larger changes.
        **options: of the training, as `AccrueOptions` lists them.

    Raises:
        TypeError: if base is not a Distribution, key is no random key, loss is no function, or there is no such option.
            If a derivative through the fit is requested without `differentiable` or `steps`.
        ValueError: if x, y or base is not finite or of the wrong shape. If there are fewer than 10 rows, y is constant,
            or y equals base.mean in every row. If the polynomial gets more than one column, or an option is out of its
            range. If `relative` is set and base is a `Point`, which has no std. If there are not as many weights as
            rows, a weight is negative, NaN or infinite, or all are 0. If only the rows, or only the rows of
            `validation`, have weights. If steps are negative, are given to a polynomial, or come with an option that
            has no effect with steps. If a learning rate is given without steps. If the learning rate or the smoothing
            of the loss is not positive. If the loss returns neither one value a row nor one number, or with weights one
            number without using them.
        FloatingPointError: if the loss becomes NaN or infinite.

    Warns:
        UserWarning: if the errors of the rows of `validation` are typically more than 1.5 times the errors of the other
            rows. The model was then trained on the other rows. If more rows of `validation` are
            among the other rows than chance explains.

    Source: Camporeale and Carè (2021), sections 4 and 5.1.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x = np.linspace(0, 1, 400)
        >>> y = (0.1 + x) * np.random.default_rng(0).normal(size=400)
        >>> fitted = jc.accrue.fit(x, jc.Point(np.zeros(400)), y, key=jax.random.key(0))
        >>> distribution = fitted(np.array([0.0, 1.0]), jc.Point(np.array([5.0, 5.0])))
        >>> distribution.mean.tolist(), bool(distribution.std[1] > 4 * distribution.std[0])
        ([5.0, 5.0], True)
    """
    _checks.check_key(key)
    columns, rows = _as_rows(x, base, y, weights, relative, categorical)
    _checks.check_rows("x", rows.x, _LEAST_ROWS)
    settings = _settle(options, validation)
    steps = settings.steps
    _checks.check_varies("y is", rows.y)
    if not _checks.is_traced(rows.y, rows.mean) and np.array_equal(rows.y, rows.mean):
        raise ValueError("y equals base.mean in every row: there is no std to learn.")
    task = _Task(rows, columns, _Loss.of(loss), relative)
    task.loss.check(rows)
    until = jnp.asarray(settings.max_iterations), jnp.asarray(settings.patience)
    if model == "polynomial":
        _check_polynomial(rows, validation, steps)
        if differentiable:
            task.loss.check_without_kinks()
        fitted = _fit_polynomial(task, until[0], differentiable)
    elif differentiable:
        raise ValueError("differentiable=True is for model='polynomial': give steps= for a network.")
    elif steps is not None:
        (initial,) = _initial_models(model, rows, key, 1)
        fitted = _fit_by_steps(task, initial, settings.learning_rate, steps, key)
    else:
        size = num_train(rows.y.shape[0], settings.validation_fraction) if validation is None else rows.y.shape[0]
        if validation is not None:
            task = task._replace(rows=_join(rows, _validation_rows(validation, weights, relative, columns)))
        split_key, start_key = _random.split(key)
        initial = _initial_models(model, rows, start_key, settings.restarts)
        order = None if validation is not None else _random.permutation(split_key, rows.y.shape[0])
        fitted = _fit_networks(task, initial, until, size, order)
    if not _checks.is_traced(fitted.loss) and not np.isfinite(fitted.loss):
        raise FloatingPointError("the loss is NaN or infinite: are some errors larger by many orders of magnitude?")
    return fitted


class ACCRUE(eqx.Module):
    """A std as a function of the inputs; made by `fit`.

    Attributes:
        model: maps one standardized input [d] to log std, in units of `scale`.
        columns: the description of the columns of the inputs.
        x_scaler: the standardization of the inputs.
        scale: the typical size of the errors, in the unit of y, or with `relative` in predicted stds.
        beta: the weight of the CRPS in ACCRUE's loss; None for another loss.
        loss: the lowest loss of the validation set, for errors in units of y's standard deviation. For a polynomial,
            and after `steps`, it is the loss of all rows.
        training: the record of the training, a `jaxcal.networks.TrainingRecord`, whose epochs are steps. A polynomial
            has the record of its last useful order.
    """

    model: Callable
    columns: Columns
    x_scaler: Standardizer
    scale: Float[Array, "*runs"]
    beta: Float[Array, "*runs"] | None
    loss: Float[Array, "*runs"]
    training: TrainingRecord
    relative: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Table, base: Distribution) -> Normal:
        """The distributions N(base.mean, std(x)^2), [n], at inputs x, [n, d] or [n].

        With `relative` the std is std(x) base.std.

        Raises:
            TypeError, ValueError: as `fit` raises for x and base, and as `std` raises.
        """
        std = self.std(x)
        _base.check_base(base, std.shape[0])
        return Normal(base.mean, std * _base.error_scale(base, True) if self.relative else std)

    def std(self, x: Table) -> Float[Array, " n"]:
        """The standard deviations [n] at the rows of x, in the unit of y, or with `relative` as factors of base.std.

        Raises:
            ValueError: if x is empty, not finite, or has other columns than those fitted on.
        """
        return _predict(self, self.columns(x))


class Polynomial(eqx.Module):
    """log softplus of a polynomial of one variable, by its Chebyshev coefficients [order + 1]."""

    coefficients: Float[Array, "*runs k"]

    def __call__(self, x: Float[Array, "1"]) -> Float[Array, ""]:
        """The log std at one point."""
        # T_0 = 1, T_1 = x, T_(k+1) = 2 x T_k - T_(k-1).
        first, second = jnp.ones_like(x[0]), x[0]
        total = jnp.zeros_like(x[0])
        for coefficient in self.coefficients:
            total += coefficient * first
            first, second = second, 2 * x[0] * second - first
        return jnp.log(jax.nn.softplus(total))


@predicted_by_buckets
@_programs.jit
def _predict(fitted: ACCRUE, x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return fitted.scale[None] * jnp.exp(jax.vmap(fitted.model)(fitted.x_scaler(x)))


def _settle(options: AccrueOptions, validation: tuple | None) -> presets.AccrueSettings:
    """The options of training, with defaults in place of None; options that exclude each other raise an error."""
    check_names(fit, options, AccrueOptions)
    settings = presets.settle({None: presets.AccrueSettings()}, None, **options)
    without = ("restarts", "validation_fraction", "max_iterations", "patience")
    check_steps(settings.steps, validation=validation, **{name: options.get(name) for name in without})
    if settings.steps is None and options.get("learning_rate") is not None:
        raise ValueError("learning_rate is for steps, and L-BFGS has none: give steps, too, or omit learning_rate.")
    for name in ("restarts", "max_iterations", "patience"):
        _checks.check_at_least(name, getattr(settings, name), 1)
    _checks.check_positive("learning_rate", settings.learning_rate)
    return settings


def _initial_models(model: str | eqx.Module, rows: "_AccrueRows", key: PRNGKeyArray, restarts: int) -> list[eqx.Module]:
    """The initial models: networks with random weights, or `model` alone if it is a module."""
    if not isinstance(model, str):
        return [model]
    _checks.check_choice("model", model, ("network", "polynomial"))
    new = partial(FeedForward, rows.x.shape[1], _HIDDEN, "scalar", activation=_ACTIVATIONS)
    return [new(key=own, dtype=jnp.result_type(*rows[:4])) for own in _random.split(key, restarts)]


class _AccrueRows(NamedTuple):
    """Inputs, the model's means, targets, the unit of the learned std, in the unit of y, and weights."""

    x: Float[AnyArray, "n d"]
    mean: Float[AnyArray, " n"]
    y: Float[AnyArray, " n"]
    unit: Float[AnyArray, " n"]
    weights: Float[AnyArray, " n"] | None


def _as_rows(
    x: Table, base: Distribution, y: Series, weights: Weights | None, relative: bool, categorical: Categorical
) -> tuple[Columns, _AccrueRows]:
    """The columns of x, and checked rows without the rows of weight 0."""
    columns, checked = _base.checked_rows(x, base, y, categorical)
    if relative:
        _base.check_positive_std(base, "leave relative=False, which uses no std")
    rows = _AccrueRows(*checked, unit=_base.error_scale(base, relative), weights=None)
    rows, counts = _base.rows_that_count(rows, _groups.weights_of(x, weights, rows.y.shape[0]))
    return columns, rows._replace(weights=counts)


def _validation_rows(validation: tuple, weights: Weights | None, relative: bool, columns: Columns) -> _AccrueRows:
    """Checked rows of the validation set, with weights if the training rows have weights."""
    x, base, y, *own_weights = validation
    own = own_weights[0] if own_weights else weights if callable(weights) else None
    if (weights is None) != (own is None):
        raise ValueError(
            "only one part, the rows or the validation rows, has weights: give both, "
            "validation=(x, base, y, weights), or a function of x."
        )
    return _as_rows(x, base, y, own, relative, columns)[1]


def _join(rows: _AccrueRows, validation: _AccrueRows) -> _AccrueRows:
    """The rows followed by the validation rows; warns if the errors differ in size, or rows are in both."""
    if not _checks.is_traced(*rows, *validation):
        own, new = (np.median(abs(np.subtract(part.y, part.mean))) for part in (rows, validation))
        if new > _TOO_LARGE * own:
            _checks.warn(
                f"the errors of the validation rows are typically {new:.2g}, but only {own:.2g} in the rows fitted to: "
                "it seems that the model was trained on these. The std will be too small for new rows; see "
                "jaxcal.out_of_fold.",
            )
        if known := _base.num_among((validation.x, validation.y), (rows.x, rows.y)):
            _checks.warn(
                f"{known} of {validation.y.shape[0]} rows of validation are among the rows fitted to: they do not show "
                "when to stop.",
            )
    return _joined(rows, validation)


@numpy_or_jit
def _joined(rows: _AccrueRows, validation: _AccrueRows) -> _AccrueRows:
    xp = namespace(rows.y, validation.y)
    if rows.weights is not None or validation.weights is not None:
        # Weights have mean 1 in both parts, whatever the sizes of the parts.
        of = lambda part: xp.ones_like(part.y) if part.weights is None else part.weights / part.weights.mean()
        rows, validation = (part._replace(weights=of(part)) for part in (rows, validation))
    return jax.tree.map(lambda a, b: xp.concatenate([a, b]), rows, validation)


def _check_polynomial(rows: _AccrueRows, validation: tuple | None, steps: int | None) -> None:
    if rows.x.shape[1] > 1:
        raise ValueError(f"model='polynomial' is for one input; x has {rows.x.shape[1]} columns: use model='network'.")
    if validation is not None:
        raise ValueError("model='polynomial' is fitted to all rows, and takes no validation.")
    if steps is not None:
        raise ValueError("model='polynomial' is fitted to its optimum, and takes no steps.")


class _Loss(eqx.Module):
    """A loss of errors and stds, and the numbers of a `partial`, which are arguments of compiled programs."""

    function: Callable = eqx.field(static=True)
    numbers: dict[str, Float[AnyArray, "..."]]

    @classmethod
    def of(cls, loss: Callable | None) -> "_Loss":
        """The loss that a fit is given; None is equation 11."""
        if loss is None:
            return cls(accrue_loss, {})
        if not callable(loss):
            raise TypeError(f"loss must be a function of errors and stds, or None; got {loss!r}.")
        if isinstance(loss, partial) and not loss.args and all(map(_is_number, loss.keywords.values())):
            return cls(loss.func, {name: _checks.as_floats(name, value) for name, value in loss.keywords.items()})
        return cls(loss, {})

    def __call__(
        self, errors: Float[AnyArray, " n"], std: Float[AnyArray, " n"], weights: Float[AnyArray, " n"] | None
    ) -> Float[AnyArray, ""]:
        """The loss of all rows; the mean where the function returns one value a row."""
        arguments = {"weights": weights} if weights is not None and self.takes_weights else {}
        values = self.function(errors, std, **self.numbers, **arguments)
        return weighted_mean(values, weights) if values.ndim else values

    @property
    def is_accrue(self) -> bool:
        """Whether it is equation 11."""
        return self.function is accrue_loss

    @property
    def is_smoothed(self) -> bool:
        """Whether it is equation 11 with a smoothed reliability score."""
        return self.is_accrue and "smoothing" in self.numbers

    @property
    def takes_weights(self) -> bool:
        """Whether the function takes weights of rows."""
        return "weights" in inspect.signature(self.function).parameters

    def can_weigh(self, errors: Float[AnyArray, " n"]) -> bool:
        """Whether rows can have weights: the function takes them, or returns one value a row."""
        return self.takes_weights or bool(self._shape(errors))

    def check(self, rows: _AccrueRows) -> None:
        """Raise ValueError if a number of equation 11 is out of its range, or another loss has a wrong shape."""
        if self.is_accrue:
            _check_numbers(**self.numbers)
            return
        shape = self._shape(rows.y)
        if shape not in ((), rows.y.shape):
            raise ValueError(f"loss must return one value a row, {rows.y.shape}, or one number; got shape {shape}.")
        if rows.weights is not None and not self.can_weigh(rows.y):
            raise ValueError("loss returns one number for all rows: with weights it must take weights=.")

    def check_without_kinks(self) -> None:
        """Raise ValueError if it is equation 11 with a reliability score that is not smoothed."""
        beta = self.numbers.get("beta")
        is_crps = beta is not None and not _checks.is_traced(beta) and np.asarray(beta) == 1
        if self.is_accrue and not self.is_smoothed and not is_crps:
            raise ValueError(
                "differentiable=True goes with beta=1 in the loss, or with smoothing=0.1, say: the reliability score "
                "has kinks."
            )

    def _shape(self, errors: Float[AnyArray, " n"]) -> tuple[int, ...]:
        return jax.eval_shape(partial(self.function, **self.numbers), errors, errors).shape


def _is_number(value: object) -> bool:
    return eqx.is_array_like(value) and not isinstance(value, bool)


def _check_numbers(beta: Array | None = None, smoothing: Array | None = None) -> None:
    """Raise ValueError if a number of `accrue_loss` is out of its range."""
    if beta is not None and (beta.ndim or not (_checks.is_traced(beta) or 0 <= np.asarray(beta) <= 1)):
        raise ValueError(f"beta must be one number between 0 and 1; got {beta}.")
    if smoothing is not None:
        _checks.check_positive("smoothing", smoothing)


class _ScaledRows(NamedTuple):
    """Rows in the units of the fit."""

    x: Float[AnyArray, "n d"]
    errors: Float[AnyArray, " n"]
    log_scale: Float[AnyArray, " n"]
    weights: Float[AnyArray, " n"] | None

    def loss(self, model: Callable, loss: _Loss) -> Float[AnyArray, ""]:
        """The loss of a model of log std, in units of the errors' typical size."""
        return loss(self.errors, jnp.exp(self.log_scale + jax.vmap(model)(self.x)), self.weights)

    def own(self, loss: _Loss) -> _Loss:
        """The loss in the dtype of these rows; ACCRUE's without a weight of the CRPS has the weight of equation 12."""
        numbers = loss.numbers
        if loss.is_accrue and "beta" not in numbers:
            numbers = numbers | {"beta": accrue_beta(self.errors, weights=self.weights)}
        return _Loss(loss.function, {name: value.astype(self.errors.dtype) for name, value in numbers.items()})

    def in_bucket(self, loss: _Loss) -> "_ScaledRows":
        """The rows, filled up to a bucket with rows of weight 0 if the loss can weigh rows and that costs little."""
        is_cheap = len(self.errors) <= _FEW and not loss.is_smoothed
        return _base.in_bucket(self) if is_cheap and loss.can_weigh(self.errors) else self

    def part(self, chosen: Int[AnyArray, " m"]) -> "_ScaledRows":
        """Some of the rows."""
        return jax.tree.map(lambda a: a[chosen], self)


class _Task(NamedTuple):
    """The arguments of a fit: the rows, their columns, the loss, and whether the std is a factor of base.std."""

    rows: _AccrueRows
    columns: Columns
    loss: _Loss
    relative: bool

    def problem(self, *, on_range: bool = False) -> tuple[_ScaledRows, Standardizer, Float[AnyArray, ""]]:
        """The problem, the scaler of its inputs, and the errors' typical size in units of `rows.unit`.

        The inputs are standardized. With `on_range`, for a polynomial, they are mapped from their range to [-1, 1].
        """
        rows, xp = self.rows, namespace(self.rows.y)
        if on_range:
            low, high = rows.x.min(0), rows.x.max(0)
            x_scaler = Standardizer((low + high) / 2, (high - low) / 2)
        else:
            x_scaler = Standardizer.of(rows.x).without(self.columns.indicators)
        scale = Standardizer.of(rows.y, rows.weights).scale
        scale = xp.where(scale > 0, scale, 1)
        errors = (rows.y - rows.mean) / scale
        unit = rows.unit / scale if self.relative else rows.unit
        # The model learns log(std / (typical unit)), with the errors' typical size in multiples of the unit.
        # The median: a single error that is far too large must not decide where the search begins.
        sizes = abs(errors) / unit
        median = xp.median(sizes)
        typical = xp.where(median > 0, median / _MEDIAN_SIZE, xp.sqrt(xp.mean(sizes**2)))
        problem = _ScaledRows(x_scaler(rows.x), errors, xp.log(typical) + xp.log(unit), rows.weights)
        return problem, x_scaler, typical if self.relative else scale * typical

    def fitted(
        self, model: Callable, x_scaler: Standardizer, scale, loss: _Loss, optimum: Optimum, *, validated: bool = False
    ) -> ACCRUE:
        """The module made from a model and its optimum by a loss; `validated` if a validation set chose it."""
        return ACCRUE(
            model=model,
            columns=self.columns,
            x_scaler=x_scaler,
            scale=scale,
            beta=loss.numbers["beta"] if loss.is_accrue else None,
            loss=optimum.loss,
            training=TrainingRecord.of(optimum, throw=False, validated=validated),
            relative=self.relative,
        )


def _fit_networks(
    task: _Task, initial: list[eqx.Module], until: tuple, size: int, order: Int[AnyArray, " n"] | None
) -> ACCRUE:
    """The best of the trained models; the training rows are the first `size` rows in an order."""
    task, initial = _checks.without_derivative((task, initial), "accrue.fit", GIVE_STEPS)
    train, validation, loss, x_scaler, scale = _divided(task, size, order)
    starts = stacked([eqx.filter(model, eqx.is_inexact_array) for model in initial])
    parts = train.in_bucket(loss), validation.in_bucket(loss)
    model, optimum = _trained(*parts, loss, eqx.combine(starts, initial[0]), until)
    return task.fitted(model, x_scaler, scale, loss, optimum, validated=True)


@numpy_or_jit
def _divided(
    task: _Task, size: int, order: Int[AnyArray, " n"] | None
) -> tuple[_ScaledRows, _ScaledRows, _Loss, Standardizer, Float[AnyArray, ""]]:
    """The training rows, the validation rows, the loss, and the scales of inputs and errors."""
    problem, x_scaler, scale = task.problem()
    places: AnyArray = np.arange(task.rows.y.shape[0]) if order is None else order
    train, validation = problem.part(places[:size]), problem.part(places[size:])
    return train, validation, train.own(task.loss), x_scaler, scale


@numpy_or_jit
def _undivided(task: _Task, *, on_range: bool) -> tuple[_ScaledRows, _Loss, Standardizer, Float[AnyArray, ""]]:
    """All rows, the loss, and the scales of inputs and errors."""
    problem, x_scaler, scale = task.problem(on_range=on_range)
    return problem, problem.own(task.loss), x_scaler, scale


@_programs.jit
def _trained(train: _ScaledRows, validation: _ScaledRows, loss: _Loss, initial, until) -> tuple[Any, Optimum]:
    """The best of the models, which are trained in one `vmap`."""
    params, fixed = eqx.partition(initial, eqx.is_inexact_array)
    of = lambda problem: lambda params: problem.loss(eqx.combine(params, fixed), loss)
    optimum = optimize.minimize_from_each(
        of(train), params, max_iterations=until[0], validation_loss=of(validation), patience=until[1]
    )
    return eqx.combine(optimum.params, fixed), optimum


def _fit_by_steps(task: _Task, initial: eqx.Module, learning_rate: ArrayLike, steps: int, key: PRNGKeyArray) -> ACCRUE:
    """A model after `steps` steps on all rows."""
    problem, loss, x_scaler, scale = _undivided(task, on_range=False)
    take = partial(optimize.train_full_batch, num_steps=steps, optimizer=optimize.adam, learning_rate=learning_rate)
    optimum = take(_loss_of_all, initial, (problem.in_bucket(loss), loss), key=key)
    return task.fitted(optimum.params, x_scaler, scale, loss, optimum)


def _loss_of_all(model: Callable, rows: tuple[_ScaledRows, _Loss], key: PRNGKeyArray | None) -> Float[Array, ""]:
    """For `train_full_batch`."""
    problem, loss = rows
    return problem.loss(model, loss)


def _fit_polynomial(task: _Task, max_iterations: Int[Array, ""], differentiable: bool) -> ACCRUE:
    """Algorithm 1, with a softplus around the polynomial, on the whole range of x mapped to [-1, 1]."""
    if not differentiable:
        task = _checks.without_derivative(task, "accrue.fit", "give differentiable=True")
    problem, loss, x_scaler, scale = _undivided(task, on_range=True)
    optimum = _last_useful(problem.in_bucket(loss), loss, max_iterations, differentiable)
    return task.fitted(Polynomial(optimum.params), x_scaler, scale, loss, optimum)


@_programs.jit
def _last_useful(problem: _ScaledRows, loss: _Loss, max_iterations: Int[Array, ""], differentiable: bool) -> Optimum:
    """The solution of the last useful order."""
    order, optimum = _by_order(*optimize.as_constants((problem, loss)), max_iterations)
    return _with_derivatives(problem, loss, order, optimum, max_iterations) if differentiable else optimum


def _by_order(problem: _ScaledRows, loss: _Loss, max_iterations: Int[Array, ""]) -> tuple[Int[Array, ""], Optimum]:
    """The last useful order, and its solution."""
    weights = problem.weights
    # The effective number of rows: (sum w)^2 / sum w^2.
    num_rows = problem.errors.shape[0] if weights is None else weights.sum() ** 2 / jnp.sum(weights**2)

    def next_order(state):
        order, useless, chosen, best = state
        new = optimize.minimize(_loss_of_order(problem, loss, order), best.params, max_iterations=max_iterations)
        gains = best.loss - new.loss >= _ORDER_GAIN / num_rows
        chosen, best = jax.tree.map(partial(jnp.where, gains), (order, new), (chosen, best))
        return order + 1, jnp.where(gains, 0, useless + 1), chosen, best

    def unfinished(state):
        order, useless, *_ = state
        return (order <= _MAX_ORDER) & (useless < 2)

    # softplus(u) = 1 for u = log(e - 1): the std is the errors' typical size everywhere.
    constant = jnp.where(_places() == 0, math.log(math.expm1(1)), 0).astype(problem.errors.dtype)
    infinite, zero = jnp.asarray(jnp.inf, problem.errors.dtype), jnp.int32(0)
    nothing = Optimum(constant, infinite, zero, jnp.asarray(Result.STEP_LIMIT))
    return lax.while_loop(unfinished, next_order, (zero, zero, zero, nothing))[2:]


def _with_derivatives(
    problem: _ScaledRows, loss: _Loss, order: Int[Array, ""], optimum: Optimum, max_iterations: Int[Array, ""]
) -> Optimum:
    """The optimum of an order as a function of the problem; its derivatives are NaN if it is no optimum."""

    def near_of(problem: _ScaledRows, loss: _Loss) -> Float[Array, " k"]:
        return _to_the_end(_loss_of_order(problem, loss, order), optimum.params, max_iterations=max_iterations).params

    loss_of = lambda problem, loss: _loss_of_order(problem, loss, order)
    args = problem, loss
    place, result = optimize.as_function(loss_of, near_of, args, optimum.params, optimum.result, _LEAST_CURVATURE)
    return optimum._replace(params=place, loss=loss_of(*args)(place), result=result)


def _loss_of_order(problem: _ScaledRows, loss: _Loss, order: Int[Array, ""]) -> Callable:
    """The loss of the coefficients; coefficients of higher orders do not enter it and have gradient 0."""
    return lambda coefficients: problem.loss(Polynomial(jnp.where(_places() <= order, coefficients, 0)), loss)


def _places() -> Int[Array, " k"]:
    return jnp.arange(_MAX_ORDER + 1)
