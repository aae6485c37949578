"""A standard deviation for every black box, from its errors: ACCRUE.

Camporeale and Carè, "ACCRUE: Accurate and Reliable Uncertainty Estimate in Deterministic Models", International Journal
for Uncertainty Quantification 11 (2021). The distribution of a row is N(base.mean, std(x)^2), with std a function of
the inputs. The std minimizes beta times the mean CRPS plus 1 - beta times the reliability score (equation 11;
`functional.scores` has all of it). With beta=1 the loss is the CRPS alone, the paper's first baseline. Isotonic
recalibration of the result is the paper's RECAL.

**The errors decide everything.** Errors of training rows are too small, and so is a std learned from them. In the
paper's setting the std is too small by half on small data sets. Give rows that the model was not trained on, or
out-of-fold predictions: `jaxcal.out_of_fold`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from jaxcal.functional.scores import accrue_beta, accrue_loss
from jaxcal.networks import FeedForward, TrainingRecord, presets
from jaxcal.networks.training import GIVE_STEPS, check_steps
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


def fit(
    x: Table,
    base: Distribution,
    y: Series,
    *,
    key: PRNGKeyArray,
    categorical: Categorical = (),
    model: str | eqx.Module = "network",
    beta: str | ArrayLike = "auto",
    relative: bool = False,
    restarts: int | None = None,
    validation_fraction: float | None = None,
    validation: tuple | None = None,
    weights: Weights | None = None,
    max_iterations: int | None = None,
    patience: int | None = None,
    steps: int | None = None,
    learning_rate: ArrayLike | None = None,
    differentiable: bool = False,
    smoothing: ArrayLike | None = None,
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
    base, y, weights, beta, the module's own weights and the learning rate. The steps are steps of Adam, since L-BFGS
    chooses the lengths of its steps by comparisons. Any other derivative through the fit raises an error.

    Args:
        x: inputs [l, d], or a data frame (`jaxcal.frames`); a vector [l] is one column.
        base: the model's predictions [l] on rows that it was not trained on; without `relative` only the mean is used.
        y: targets [l].
        key: random key of the initial weights and of the validation set.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        model: "network", "polynomial" or a module, as above.
        beta: the weight of the CRPS in [0, 1]; "auto" is equation 12, see `functional.scores.accrue_beta`.
        relative: whether the model learns a factor that multiplies base.std, in place of the std. If base.std is large
            where the errors are large, the fit then only has to correct the scale. Without it base.std has no effect on
            the result.
        restarts: number of initializations of the network (default 5; one if it takes steps).
        validation_fraction: fraction of the rows in the validation set (default 0.5).
        validation: other rows (x, base, y) as the validation set, in place of a fraction of these rows. If `weights` is
            an array, the weights of the other rows are a fourth part, (x, base, y, weights).
        weights: the weights of the rows [l], not negative, or a function of x that gives them; None for equal weights.
            The call needs no weights.
        max_iterations: the largest number of L-BFGS steps (default 500).
        patience: the number of steps without improvement that ends the training (default 10).
        steps: number of full-batch steps, as `jaxcal.networks.StepOptions` describes them, in place of restarts, a
            validation set, max_iterations and patience; None for a training that the validation set stops.
        learning_rate: the learning rate of Adam in these steps (default 0.01).
        differentiable: whether derivatives pass through the fit of the polynomial, as in `rio.fit`. They come from the
            implicit function theorem at the optimum, which the fit then finds to the last digits. If there is no
            optimum, they are NaN and the result of `training` is not CONVERGED. The order is held constant. It needs
            beta=1 or smoothing: the reliability score has a kink wherever two standardized errors change places. The
            derivatives between kinks do not show how the std moves over larger changes.
        smoothing: None, or a length in standardized errors by which the reliability score is smoothed, see
            `functional.scores.reliability_score`. A length of 0.1 makes a std about 1 or 2 % larger. The time of the
            loss then grows with the square of the number of rows.

    Raises:
        TypeError: if base is not a Distribution, or key is no random key. If a derivative through the fit is requested
            without `differentiable` or `steps`.
        ValueError: if x, y or base is not finite or of the wrong shape. If there are fewer than 10 rows, y is constant,
            or y equals base.mean in every row. If the polynomial gets more than one column, or an option is out of its
            range. If `relative` is set and base is a `Point`, which has no std. If there are not as many weights as
            rows, a weight is negative, NaN or infinite, or all are 0. If only the rows, or only the rows of
            `validation`, have weights. If steps are negative, are given to a polynomial, or come with an option that
            has no effect with steps. If a learning rate is given without steps. If the learning rate or smoothing is
            not positive.
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
    options = {"validation_fraction": validation_fraction, "max_iterations": max_iterations, "patience": patience}
    settings = _settle(steps, learning_rate, validation=validation, restarts=restarts, **options)
    _checks.check_varies("y is", rows.y)
    if not _checks.is_traced(rows.y, rows.mean) and np.array_equal(rows.y, rows.mean):
        raise ValueError("y equals base.mean in every row: there is no std to learn.")
    task = _Task(rows, columns, _Score(_as_weight(beta), _as_length(smoothing)), relative)
    until = jnp.asarray(settings.max_iterations), jnp.asarray(settings.patience)
    if model == "polynomial":
        _check_polynomial(rows, validation, steps)
        if differentiable and smoothing is None and (isinstance(beta, str) or _checks.is_traced(beta) or beta != 1):
            raise ValueError(
                "differentiable=True goes with beta=1, or with smoothing=0.1, say: the reliability score has kinks."
            )
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
        beta: the weight of the CRPS in the loss.
        loss: the lowest loss of the validation set, for errors in units of y's standard deviation. For a polynomial,
            and after `steps`, it is the loss of all rows.
        training: the record of the training, a `jaxcal.networks.TrainingRecord`, whose epochs are steps. A polynomial
            has the record of its last useful order.
    """

    model: Callable
    columns: Columns
    x_scaler: Standardizer
    scale: Float[Array, "*runs"]
    beta: Float[Array, "*runs"]
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


def _settle(
    steps: int | None, learning_rate: ArrayLike | None, validation: tuple | None, **options: Any
) -> presets.ACCRUE:
    """The options of training, with defaults in place of None; options that exclude each other raise an error."""
    check_steps(steps, validation=validation, **options)
    if steps is None and learning_rate is not None:
        raise ValueError("learning_rate is for steps, and L-BFGS has none: give steps, too, or omit learning_rate.")
    settings = presets.settle({None: presets.ACCRUE()}, None, learning_rate=learning_rate, **options)
    for name in ("restarts", "max_iterations", "patience"):
        _checks.check_at_least(name, getattr(settings, name), 1)
    _checks.check_positive("learning_rate", settings.learning_rate)
    return settings


def _as_weight(beta: str | ArrayLike) -> Float[Array, ""] | None:
    """The weight of the CRPS, or None if equation 12 decides it."""
    if isinstance(beta, str):
        _checks.check_choice("beta", beta, ("auto",))
        return None
    weight = _checks.as_floats("beta", beta)
    if weight.ndim or (not _checks.is_traced(weight) and not 0 <= np.asarray(weight) <= 1):
        raise ValueError(f"beta must be 'auto' or one number between 0 and 1; got {beta}.")
    return weight


def _as_length(smoothing: ArrayLike | None) -> Float[Array, ""] | None:
    """The length by which the reliability score is smoothed, or None."""
    if smoothing is None:
        return None
    _checks.check_positive("smoothing", smoothing)
    return _checks.as_floats("smoothing", smoothing)


def _initial_models(model: str | eqx.Module, rows: "_Rows", key: PRNGKeyArray, restarts: int) -> list[eqx.Module]:
    """The initial models: networks with random weights, or `model` alone if it is a module."""
    if not isinstance(model, str):
        return [model]
    _checks.check_choice("model", model, ("network", "polynomial"))
    new = partial(FeedForward, rows.x.shape[1], _HIDDEN, "scalar", activation=_ACTIVATIONS)
    return [new(key=own, dtype=jnp.result_type(*rows[:4])) for own in _random.split(key, restarts)]


class _Rows(NamedTuple):
    """Inputs, the model's means, targets, the unit of the learned std, in the unit of y, and weights."""

    x: Float[AnyArray, "n d"]
    mean: Float[AnyArray, " n"]
    y: Float[AnyArray, " n"]
    unit: Float[AnyArray, " n"]
    weights: Float[AnyArray, " n"] | None


def _as_rows(
    x: Table, base: Distribution, y: Series, weights: Weights | None, relative: bool, categorical: Categorical
) -> tuple[Columns, _Rows]:
    """The columns of x, and checked rows without the rows of weight 0."""
    columns, checked = _base.checked_rows(x, base, y, categorical)
    if relative:
        _base.check_positive_std(base, "leave relative=False, which uses no std")
    rows = _Rows(*checked, unit=_base.error_scale(base, relative), weights=None)
    rows, counts = _base.rows_that_count(rows, _groups.weights_of(x, weights, rows.y.shape[0]))
    return columns, rows._replace(weights=counts)


def _validation_rows(validation: tuple, weights: Weights | None, relative: bool, columns: Columns) -> _Rows:
    """Checked rows of the validation set, with weights if the training rows have weights."""
    x, base, y, *own_weights = validation
    own = own_weights[0] if own_weights else weights if callable(weights) else None
    if (weights is None) != (own is None):
        raise ValueError(
            "only one part, the rows or the validation rows, has weights: give both, "
            "validation=(x, base, y, weights), or a function of x."
        )
    return _as_rows(x, base, y, own, relative, columns)[1]


def _join(rows: _Rows, validation: _Rows) -> _Rows:
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
def _joined(rows: _Rows, validation: _Rows) -> _Rows:
    xp = namespace(rows.y, validation.y)
    if rows.weights is not None or validation.weights is not None:
        # Weights have mean 1 in both parts, whatever the sizes of the parts.
        of = lambda part: xp.ones_like(part.y) if part.weights is None else part.weights / part.weights.mean()
        rows, validation = (part._replace(weights=of(part)) for part in (rows, validation))
    return jax.tree.map(lambda a, b: xp.concatenate([a, b]), rows, validation)


def _check_polynomial(rows: _Rows, validation: tuple | None, steps: int | None) -> None:
    if rows.x.shape[1] > 1:
        raise ValueError(f"model='polynomial' is for one input; x has {rows.x.shape[1]} columns: use model='network'.")
    if validation is not None:
        raise ValueError("model='polynomial' is fitted to all rows, and takes no validation.")
    if steps is not None:
        raise ValueError("model='polynomial' is fitted to its optimum, and takes no steps.")


class _Score(NamedTuple):
    """The options of the loss: the weight of the CRPS, None for equation 12, and the length of smoothing or None."""

    beta: Float[AnyArray, ""] | None
    smoothing: Float[AnyArray, ""] | None


class _Problem(NamedTuple):
    """Rows in the units of the fit."""

    x: Float[AnyArray, "n d"]
    errors: Float[AnyArray, " n"]
    log_scale: Float[AnyArray, " n"]
    weights: Float[AnyArray, " n"] | None

    def loss(self, model: Callable, score: _Score) -> Float[AnyArray, ""]:
        """ACCRUE's loss of a model of log std, in units of the errors' typical size."""
        std = jnp.exp(self.log_scale + jax.vmap(model)(self.x))
        return accrue_loss(self.errors, std, score.beta, weights=self.weights, smoothing=score.smoothing)

    def score(self, options: _Score) -> _Score:
        """The score with a known weight of the CRPS: its own, or the weight of equation 12."""
        if options.beta is None:
            return options._replace(beta=accrue_beta(self.errors, weights=self.weights))
        return options._replace(beta=options.beta.astype(self.errors.dtype))

    def in_bucket(self, score: _Score) -> "_Problem":
        """The rows, filled up to a bucket if that costs little."""
        return _base.in_bucket(self) if len(self.errors) <= _FEW and score.smoothing is None else self

    def part(self, chosen: Int[AnyArray, " m"]) -> "_Problem":
        """Some of the rows."""
        return jax.tree.map(lambda a: a[chosen], self)


class _Task(NamedTuple):
    """The arguments of a fit: the rows, their columns, the score, and whether the std is a factor of base.std."""

    rows: _Rows
    columns: Columns
    score: _Score
    relative: bool

    def problem(self, *, on_range: bool = False) -> tuple[_Problem, Standardizer, Float[AnyArray, ""]]:
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
        problem = _Problem(x_scaler(rows.x), errors, xp.log(typical) + xp.log(unit), rows.weights)
        return problem, x_scaler, typical if self.relative else scale * typical

    def fitted(
        self, model: Callable, x_scaler: Standardizer, scale, beta, optimum: Optimum, *, validated: bool = False
    ) -> ACCRUE:
        """The module made from a model and its optimum; `validated` if a validation set chose it."""
        return ACCRUE(
            model=model,
            columns=self.columns,
            x_scaler=x_scaler,
            scale=scale,
            beta=beta,
            loss=optimum.loss,
            training=TrainingRecord.of(optimum, throw=False, validated=validated),
            relative=self.relative,
        )


def _fit_networks(
    task: _Task, initial: list[eqx.Module], until: tuple, size: int, order: Int[AnyArray, " n"] | None
) -> ACCRUE:
    """The best of the trained models; the training rows are the first `size` rows in an order."""
    task, initial = _checks.without_derivative((task, initial), "accrue.fit", GIVE_STEPS)
    train, validation, score, x_scaler, scale = _divided(task, size, order)
    starts = stacked([eqx.filter(model, eqx.is_inexact_array) for model in initial])
    parts = train.in_bucket(score), validation.in_bucket(score)
    model, optimum = _trained(*parts, score, eqx.combine(starts, initial[0]), until)
    return task.fitted(model, x_scaler, scale, score.beta, optimum, validated=True)


@numpy_or_jit
def _divided(
    task: _Task, size: int, order: Int[AnyArray, " n"] | None
) -> tuple[_Problem, _Problem, _Score, Standardizer, Float[AnyArray, ""]]:
    """The training rows, the validation rows, the score, and the scales of inputs and errors."""
    problem, x_scaler, scale = task.problem()
    places: AnyArray = np.arange(task.rows.y.shape[0]) if order is None else order
    train, validation = problem.part(places[:size]), problem.part(places[size:])
    return train, validation, train.score(task.score), x_scaler, scale


@numpy_or_jit
def _undivided(task: _Task, *, on_range: bool) -> tuple[_Problem, _Score, Standardizer, Float[AnyArray, ""]]:
    """All rows, the score, and the scales of inputs and errors."""
    problem, x_scaler, scale = task.problem(on_range=on_range)
    return problem, problem.score(task.score), x_scaler, scale


@_programs.jit
def _trained(train: _Problem, validation: _Problem, score: _Score, initial, until) -> tuple[Any, Optimum]:
    """The best of the models, which are trained in one `vmap`."""
    params, fixed = eqx.partition(initial, eqx.is_inexact_array)
    loss = lambda problem: lambda params: problem.loss(eqx.combine(params, fixed), score)
    optimum = optimize.minimize_from_each(
        loss(train), params, max_iterations=until[0], validation_loss=loss(validation), patience=until[1]
    )
    return eqx.combine(optimum.params, fixed), optimum


def _fit_by_steps(task: _Task, initial: eqx.Module, learning_rate: ArrayLike, steps: int, key: PRNGKeyArray) -> ACCRUE:
    """A model after `steps` steps on all rows."""
    problem, score, x_scaler, scale = _undivided(task, on_range=False)
    take = partial(optimize.train_full_batch, num_steps=steps, optimizer=optimize.adam, learning_rate=learning_rate)
    optimum = take(_loss_of_all, initial, (problem.in_bucket(score), score), key=key)
    return task.fitted(optimum.params, x_scaler, scale, score.beta, optimum)


def _loss_of_all(model: Callable, rows: tuple[_Problem, _Score], key: PRNGKeyArray | None) -> Float[Array, ""]:
    """For `train_full_batch`."""
    problem, score = rows
    return problem.loss(model, score)


def _fit_polynomial(task: _Task, max_iterations: Int[Array, ""], differentiable: bool) -> ACCRUE:
    """Algorithm 1, with a softplus around the polynomial, on the whole range of x mapped to [-1, 1]."""
    if not differentiable:
        task = _checks.without_derivative(task, "accrue.fit", "give differentiable=True")
    problem, score, x_scaler, scale = _undivided(task, on_range=True)
    optimum = _last_useful(problem.in_bucket(score), score, max_iterations, differentiable)
    return task.fitted(Polynomial(optimum.params), x_scaler, scale, score.beta, optimum)


@_programs.jit
def _last_useful(problem: _Problem, score: _Score, max_iterations: Int[Array, ""], differentiable: bool) -> Optimum:
    """The solution of the last useful order."""
    order, optimum = _by_order(*optimize.as_constants((problem, score)), max_iterations)
    return _with_derivatives(problem, score, order, optimum, max_iterations) if differentiable else optimum


def _by_order(problem: _Problem, score: _Score, max_iterations: Int[Array, ""]) -> tuple[Int[Array, ""], Optimum]:
    """The last useful order, and its solution."""
    weights = problem.weights
    # The effective number of rows: (sum w)^2 / sum w^2.
    num_rows = problem.errors.shape[0] if weights is None else weights.sum() ** 2 / jnp.sum(weights**2)

    def next_order(state):
        order, useless, chosen, best = state
        new = optimize.minimize(_loss_of_order(problem, score, order), best.params, max_iterations=max_iterations)
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
    problem: _Problem, score: _Score, order: Int[Array, ""], optimum: Optimum, max_iterations: Int[Array, ""]
) -> Optimum:
    """The optimum of an order as a function of the problem; its derivatives are NaN if it is no optimum."""

    def near_of(problem: _Problem, score: _Score) -> Float[Array, " k"]:
        return _to_the_end(_loss_of_order(problem, score, order), optimum.params, max_iterations=max_iterations).params

    loss_of = lambda problem, score: _loss_of_order(problem, score, order)
    args = problem, score
    place, result = optimize.as_function(loss_of, near_of, args, optimum.params, optimum.result, _LEAST_CURVATURE)
    return optimum._replace(params=place, loss=loss_of(*args)(place), result=result)


def _loss_of_order(problem: _Problem, score: _Score, order: Int[Array, ""]) -> Callable:
    """The loss of the coefficients; coefficients of higher orders do not enter it and have gradient 0."""
    return lambda coefficients: problem.loss(Polynomial(jnp.where(_places() <= order, coefficients, 0)), score)


def _places() -> Int[Array, " k"]:
    return jnp.arange(_MAX_ORDER + 1)
