"""Sharp calibrated Gaussian processes: quantiles around any model's mean, wide where a second process is unsure.

Capone, Hirche & Pleiss, "Sharp Calibrated Gaussian Processes", NeurIPS 2023. The delta-quantile of a row is
mean + beta sigma(theta, x). The mean is the model's, and sigma^2 the variance (eq. 3b) of a Gaussian process given the
training inputs, whose lengthscales theta are not those of the regression: they are chosen for every level so that the
quantiles lie close to the mean (eq. 7, `widths.log_width`), with beta the quantile of the errors over sigma
(eq. 6, `functional.quantiles.linear_quantile`).

The paper's Theorem 5.4 needs the errors that set beta not to have chosen theta. So theta and beta are chosen by the
errors of the training rows, each by leave-one-out, and the calibration rows do the rest; `preset="paper"` chooses them
by the calibration rows too, as Algorithm 1 does.

Quantiles of several levels must not cross. From the middle outwards they are nested: no level's quantile is nearer to
the mean than that of the level before it. On the curve through a row's quantiles every error has a place, its score,
and the delta-quantile is the curve at the delta-quantile of the calibration rows' scores (eq. 6 again): exactly j of N
calibration rows lie at or below the quantile at level j / (N + 1). Below level 1 / (N + 1) and above N / (N + 1) no
finite quantile covers as it should.

`conformal` around a Gaussian process gives intervals as narrow, or narrower, on five of six data sets
(docs/results.md): take that where the model is one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal._numpy import JaxArray, namespace, numpy_or_jit, threads_for
from jaxcal.calibrators import _base
from jaxcal.calibrators._base import FINE_LEVELS, Rows
from jaxcal.calibrators.sharp_gp import curves, given, widths
from jaxcal.distributions import Distribution, Quantiles
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table, check_same_index
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import gp, rounding
from jaxcal.functional._loops import over_leading_axis
from jaxcal.functional.quantiles import linear_quantile, smallest_table
from jaxcal.gp.fit import warn_of_rounding
from jaxcal.networks import presets

# Levels near the middle need no lengthscales of their own: their quantiles are close to the mean anyway.
_LEVELS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)
# So many inducing points the sparse variance has, of more rows than the exact one takes.
_NUM_INDUCING = 300
# Up to so many calibration rows the distribution has the level of every rank, j / (N + 1); levels nearer to each other
# than the other number are one.
_MOST_RANKS, _SAME_LEVEL = 1000, 1e-6


class Kernel(NamedTuple):
    """exp(-sum_j (a_j - b_j)^2 / (2 l_j^2)) and noise.

    Attributes:
        lengthscale: [d], or one for all columns, in the units of x.
        noise_ratio: the variance of the noise over that of the process.
    """

    lengthscale: Float[ArrayLike, "..."]
    noise_ratio: Float[ArrayLike, ""]


@runtime_checkable
class HasKernel(Protocol):
    """What has the lengthscales and the noise of a regression: a `Kernel`, or a fitted `gaussian_process`."""

    @property
    def lengthscale(self) -> ArrayLike:
        """As of `Kernel`."""
        ...

    @property
    def noise_ratio(self) -> ArrayLike:
        """As of `Kernel`."""
        ...


class _Setting(NamedTuple):
    """The options of `fit` that decide what is compiled."""

    search: str = "line"
    fit_on: str = "training"
    num_inducing: int | None = None
    num_searched: int = 1000
    differentiable: bool = False
    levels: tuple[float, ...] = ()
    grid: tuple[float, ...] = ()
    is_bounded: bool = True


# By `preset`: jaxcal's own, and the one of Capone, Hirche & Pleiss (2023).
_PRESETS = {None: _Setting(), "paper": _Setting(search="ard", fit_on="calibration", is_bounded=False)}


def fit(
    x: Table,
    base: Distribution,
    y: Series,
    *,
    x_train: Table,
    y_train: Series | None = None,
    categorical: Categorical = (),
    kernel: HasKernel | None = None,
    levels: float | Sequence[float] | None = None,
    search: str | None = None,
    fit_on: str | None = None,
    num_inducing: int | None = None,
    num_searched: int = 1000,
    preset: str | None = None,
    differentiable: bool = False,
    throw: bool = True,
) -> "SharpGP":
    """Choose the lengthscales of every level, and calibrate their quantiles.

    For intervals around a Gaussian process take `conformal.fit(x, model(x), y)`, with `model` a `gaussian_process`:
    stretched to equal coverage of 95 % its intervals are narrower than these by 10 % on boston, 22 % on yacht and 6 %
    on auto_mpg, as wide to 1 % on concrete and kin8nm, and 2 % wider on wine_red (`benchmarks/tables/sharp_gp.py`).
    With rule="randomized" each of its quantiles covers as it should, too. This is for models without a std: than one
    width for all rows it is narrower by 2 to 16 % on five of these six, and as wide on kin8nm.

    x, base and y are calibration rows, which the model was not trained on; x_train and y_train those that it was.

    Of a level the lengthscales minimize log |beta| + log(mean of sigma^2) / 2 over rows, with beta the quantile of the
    rows' errors over sigma. From the middle outwards they do not grow, so that sigma does not fall (Assumption 4.1).
    The process has variance 1, as beta makes up for it, and the noise ratio of the regression.

    Which rows these are is said by `fit_on`:

    - "training": the training rows, by leave-one-out of a Gaussian process. The calibration rows then have no part
      in the curve that they are scored by, and a new exchangeable row lies at or below the quantile at level
      j / (N + 1) with probability j / (N + 1), whatever the model and the data (more where scores are tied).
    - "calibration": the calibration rows, by which the curve is calibrated, too. The quantiles then are closer to the
      mean than they should be, the more so the fewer rows there are: `benchmarks/tables/sharp_gp_coverage.py` measures
      by how much.

    `search` is "line" for common multiples of the regression's lengthscales, or "ard" for a lengthscale a column by
    L-BFGS, from the outermost level inwards.

    N calibration rows hold the levels from 1 / (N + 1) to N / (N + 1): quantiles beyond are infinite, with a warning.

    `preset="paper"` is Algorithm 1, search="ard" and fit_on="calibration", and covers too little, as above; beyond the
    outermost level its quantiles are that level's. Between levels it interpolates quantiles, where the paper
    interpolates lengthscales and beta, whose quantiles may cross.

    Up to 2000 training rows the variance is exact, and the fitted module holds a matrix of these rows for every level;
    beyond, it is that of Titsias' approximation with inducing points, chosen among the rows by conditional variance.
    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. Predictions are differentiable in x and
    base, with `differentiable=True` in the rows that are fitted to and in the kernel, too.

    Args:
        x: inputs [N, d] of calibration rows, which the model was not trained on, or a data frame (`jaxcal.frames`); a
            vector [N] is one column.
        base: the model's predictions at x, of which the mean is used.
        y: targets [N].
        x_train: inputs [n, d] that the variance is conditioned on: those that the model was trained on.
        y_train: targets [n]; may be None with a kernel and fit_on="calibration".
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        kernel: lengthscales and noise of the regression, a `Kernel` or a `gaussian_process` fitted to the training
            rows; None for those of the greatest evidence of the training rows.
        levels: in (0, 1), increasing, each with lengthscales of its own; the distribution has these, all j / (N + 1)
            (beyond 1000 rows 1000 of them, at equal distances) and between them the multiples of 1/200. A number for
            a distribution of that level alone. Default: 0.025, 0.05, 0.1, 0.2, 0.3, 0.4 and their mirror images, as
            far as N calibration rows carry them.
        search: "line" (default) or "ard", as above.
        fit_on: "training" (default) or "calibration", as above.
        num_inducing: how many inducing points; None for the exact variance up to 2000 training rows, else 300.
        num_searched: by how many of the training and of the calibration rows, at equal distances in their order, the
            lengthscales are chosen at most; beta is set by all of them (section 6 of the paper).
        preset: None, or "paper" as above.
        differentiable: whether derivatives pass through the fit, with search="line": which multiples are chosen, and
            which rows are inducing points, stays. Where no kernel is given, its hyperparameters have theirs by the
            implicit function theorem, as in `rio.fit`: they are NaN where `result` is not CONVERGED.
        throw: whether to raise if a covariance cannot be factorized; else the distribution is NaN.

    Raises:
        TypeError: if base is not a Distribution; if a derivative through the fit is asked for without `differentiable`.
        ValueError: if an argument is empty, not finite or of the wrong shape; if there are fewer than two training
            rows; if levels do not increase, lie outside (0, 1) or need more calibration rows than there are; if y_train
            is constant, or is needed and not given; if an option is out of its range.
        FloatingPointError: if a covariance cannot be factorized, and `throw`.

    Warns:
        UserWarning: if y equals base.mean in every row, so that no prediction has a width; if more of the calibration
            rows are among the training rows, by x and y, than chance explains; if the noise is so small that rounding
            decides.

    Example:
        >>> import numpy as np
        >>> import jaxcal as jc
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-2, 2, size=300)
        >>> y = np.sin(3 * x) + 0.1 * rng.normal(size=300)
        >>> model = jc.gaussian_process.fit(x[:200], y[:200])
        >>> fitted = jc.sharp_gp.fit(x[200:], model(x[200:]), y[200:], x_train=x[:200], y_train=y[:200], kernel=model)
        >>> lower, upper = fitted(np.zeros(1), model(np.zeros(1))).interval(0.9)
        >>> bool(0.25 < (upper - lower)[0] < 0.45)
        True
    """
    if y_train is not None:
        check_same_index(x_train, y_train)
    columns = Columns.of(x_train, categorical)
    _, rows = _base.checked_rows(x, base, y, columns)
    x_train = columns(x_train)
    _checks.check_rows("x_train", x_train, 2)
    asked = {"search": search, "fit_on": fit_on, "num_inducing": num_inducing, "num_searched": num_searched}
    setting = presets.settle(_PRESETS, preset, differentiable=differentiable, **asked)
    setting = _checked_setting(setting, levels, rows.y.shape[0], x_train.shape[0])
    if y_train is None:
        if kernel is None or setting.fit_on == "training":
            raise ValueError("y_train may be None only with a kernel and fit_on='calibration'.")
        y_train = np.zeros(x_train.shape[0], x_train.dtype)  # no error of theirs is used
    else:
        y_train = _checks.as_vector("y_train", y_train, length=x_train.shape[0])
        _checks.check_varies("y_train is", y_train, 0 if _checks.is_traced(y_train) else np.abs(y_train).max())
        if known := _base.num_among((rows.x, rows.y), (x_train, y_train)):
            _checks.warn(
                f"{known} of {rows.y.shape[0]} calibration rows are among the training rows, whose errors are smaller "
                "than new ones: intervals will be too narrow. jaxcal.pipeline calibrates by errors of rows that the "
                "model was not trained on.",
            )
    _base.warn_without_width(_errors(rows))
    arrays: Any = rows, x_train, y_train, None if kernel is None else _checked(kernel, x_train.shape[1])
    if not setting.differentiable:
        arrays = _checks.without_derivative(arrays, "sharp_gp.fit", "give differentiable=True")
    rows, x_train, y_train, found = _of_one_dtype(arrays)
    if found is None:
        found = given.of_greatest_evidence(x_train, y_train, columns.indicators, differentiable=setting.differentiable)
    sharp = _fit(rows, columns, x_train, y_train, found, setting=setting)
    if throw and not _checks.is_traced(sharp.scores) and not np.isfinite(sharp.scores).all():
        raise FloatingPointError(
            f"the covariance of {x_train.shape[0]} rows could not be factorized: the noise_ratio of the kernel, "
            f"{np.max(sharp.noise_ratio):.1e}, is too small for {sharp.scores.dtype}. throw=False returns the fit."
        )
    warn_of_rounding(sharp.rounding_fraction)
    return sharp


class SharpGP(eqx.Module):
    """Quantiles around a model's mean; made by `fit`.

    Attributes:
        log_lengthscales: [k, d], those of every level, in scaled units.
        posteriors: for every level, what is known at the conditioning points under its lengthscales.
        points: the conditioning points: training rows, or inducing points.
        noise_ratio: the variance of the noise, that of the process being 1, and what rounding adds to it.
        rounding_fraction: the variance that rounding may hide, over the median one of the rows, at the level where
            that is least.
        beta: [k], what multiplies the sigma of every level, in the unit of y.
        scores: [N], of the calibration rows, in increasing order.
        columns: what the columns of the training inputs were.
        x_scaler: standardization of the inputs.
        result: how the search for the regression's hyperparameters ended, one of `jaxcal.optimize.Result`; CONVERGED
            where the kernel was given.
        levels: the k levels that have lengthscales of their own.
        grid: the levels of the distribution.
        is_bounded: whether quantiles beyond the outermost of these levels are infinite.
    """

    log_lengthscales: Float[JaxArray, "*runs k d"]
    posteriors: gp.Posterior
    points: Float[JaxArray, "*runs m d"]
    noise_ratio: Float[JaxArray, "*runs"]
    rounding_fraction: Float[JaxArray, "*runs"]
    beta: Float[JaxArray, "*runs k"]
    scores: Float[JaxArray, "*runs l"]
    columns: Columns
    x_scaler: Standardizer
    result: Int[JaxArray, "*runs"]
    levels: tuple[float, ...] = eqx.field(static=True)
    grid: tuple[float, ...] = eqx.field(static=True)
    is_bounded: bool = eqx.field(static=True)

    def __call__(self, x: Table, base: Distribution) -> Quantiles:
        """The calibrated distribution of every row.

        Quantiles at levels below 1 / (N + 1) and above N / (N + 1), of N calibration rows, are infinite and come with
        a warning. With `preset="paper"` and with a single level quantiles beyond the outermost level are that level's.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.
            base: the model's predictions at x.

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if an argument is empty, not finite, of the wrong shape, or x has other columns than the
                training inputs.
        """
        x = self.columns(x)
        _base.check_base(base, x.shape[0])
        values = _predict(self, x, base.mean)
        if not self.is_bounded:
            return Quantiles(np.array(self.grid), values)
        rounding = 2 * float(np.finfo(values.dtype).eps)
        grid, number = np.array(self.grid), self.scores.shape[-1]
        lowest, highest = self.grid[0] - rounding, self.grid[-1] + rounding
        return Quantiles(grid, values, lowest=lowest, highest=highest, num_calibration=number)

    @property
    @numpy_or_jit
    def lengthscales(self) -> Float[JaxArray, "*runs k d"]:
        """Those of every level, in the units of x."""
        return namespace(self.log_lengthscales).exp(self.log_lengthscales) * self.x_scaler.scale[..., None, :]


def _checked_setting(
    asked: _Setting, levels: float | Sequence[float] | None, num_rows: int, num_train: int
) -> _Setting:
    """The options, checked, with the defaults that depend on the rows filled in."""
    _checks.check_choice("search", asked.search, ("ard", "line"))
    _checks.check_choice("fit_on", asked.fit_on, ("training", "calibration"))
    _checks.check_at_least("num_searched", asked.num_searched, 2)
    if asked.differentiable and asked.search == "ard":
        # Its objective has kinks, where two errors change places, and mostly it ends at one of them.
        raise ValueError("differentiable=True goes with search='line': the search by column has no derivative.")
    num_inducing = asked.num_inducing
    if num_inducing is None and num_train > given.EXACT_ROWS:
        num_inducing = _NUM_INDUCING
    if num_inducing is not None:
        _checks.check_at_least("num_inducing", num_inducing, 1)
        num_inducing = min(num_inducing, num_train)
    own, grid = _levels(levels, num_rows)
    is_bounded = asked.is_bounded and not _is_single(levels)
    return asked._replace(num_inducing=num_inducing, levels=own, grid=grid, is_bounded=is_bounded)


def _levels(levels: float | Sequence[float] | None, num_rows: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The levels that have lengthscales of their own, and those of the distribution."""
    rows_for = lambda level: smallest_table(max(level, 1 - level))
    carried = lambda levels: tuple(level for level in levels if rows_for(level) <= num_rows)
    if levels is None:
        own = carried(_LEVELS)
        if not own:
            raise ValueError(f"{num_rows} calibration rows are too few: at least {rows_for(0.4)} are needed.")
    else:
        own = _base.as_levels(np.atleast_1d(levels))
        outermost = max(own, key=rows_for)
        if not carried([outermost]):
            raise ValueError(
                f"{num_rows} calibration rows are too few for level {outermost:g}: "
                f"at least {rows_for(outermost)} are needed."
            )
    if _is_single(levels):
        return own, own
    number = min(num_rows, _MOST_RANKS)
    ranks = np.linspace(1, num_rows, number).round() / (num_rows + 1)
    return own, _joined(_joined(own, carried(FINE_LEVELS)), tuple(ranks.tolist()))


def _is_single(levels: float | Sequence[float] | None) -> bool:
    return levels is not None and np.ndim(levels) == 0


def _joined(levels: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
    """Both in increasing order, without the others that are nearly one of the levels."""
    if not others:
        return levels
    distances = np.abs(np.subtract.outer(others, levels)).min(axis=1)
    return tuple(sorted([*levels, *np.array(others)[distances > _SAME_LEVEL].tolist()]))


def _checked(kernel: HasKernel, num_columns: int) -> Kernel:
    """Lengthscales, one for each column, and noise."""
    # JAX would compile a program for a number of Python.
    values = {name: getattr(kernel, name) for name in Kernel._fields}
    known = {name: np.asarray(value) if isinstance(value, float | int) else value for name, value in values.items()}
    lengthscale, noise_ratio = (_checks.as_floats(name, value) for name, value in known.items())
    if lengthscale.shape not in ((), (1,), (num_columns,)) or noise_ratio.shape:
        raise ValueError(
            f"kernel must have a lengthscale for each of the {num_columns} columns and one noise_ratio; got shapes "
            f"{lengthscale.shape} and {noise_ratio.shape}."
        )
    for name, values in (("kernel.lengthscale", lengthscale), ("kernel.noise_ratio", noise_ratio)):
        _checks.check_finite(name, values)
        _checks.check_positive(name, values)
    return Kernel(_of_columns(lengthscale, num_columns), noise_ratio)


@numpy_or_jit
def _of_columns(lengthscale: Float[JaxArray, "*k"], num_columns: int) -> Float[JaxArray, " d"]:
    return namespace(lengthscale).broadcast_to(lengthscale, (num_columns,))


@numpy_or_jit
def _of_one_dtype(arrays: tuple) -> tuple:
    """The rows and the kernel in the widest dtype of the rows."""
    dtype = np.result_type(*(array.dtype for array in jax.tree.leaves(arrays[:3])))
    return jax.tree.map(lambda array: array.astype(dtype), arrays)


@numpy_or_jit
def _errors(rows: Rows) -> Float[JaxArray, " n"]:
    """Those of the model."""
    return rows.y - rows.mean


def _is_exact(*_: object, setting: _Setting) -> bool:
    return setting.num_inducing is None


@numpy_or_jit(when=_is_exact)
def _fit(
    rows: Rows,
    columns: Columns,
    x_train: Float[JaxArray, "n d"],
    y_train: Float[JaxArray, " n"],
    kernel: Kernel | given.Hyperparameters,
    *,
    setting: _Setting,
) -> SharpGP:
    """The fit to rows of one dtype; the hyperparameters of a `Kernel` are in units of x, the other ones scaled."""
    x_scaler, y_scaler = Standardizer.of(x_train).without(columns.indicators), Standardizer.of(y_train)
    found = given.scaled(*kernel, x_scaler) if isinstance(kernel, Kernel) else kernel
    known = given.Given.of(x_scaler(x_train), y_scaler(y_train), found, setting.num_inducing)
    errors, at = _errors(rows), x_scaler(rows.x)
    with threads_for(x_train.shape[0]):
        chosen_by, chosen_at = errors, at
        if setting.fit_on == "training":
            loo = known.leave_one_out(found.log_lengthscale, known.posterior(found.log_lengthscale))
            chosen_by, chosen_at = y_scaler.scale * loo.error, None
        problem = widths.Problem(known.x, known.noise_ratio, chosen_by, chosen_at).of_some_rows(setting.num_searched)
        search = widths.on_line if setting.search == "line" else widths.by_column
        log_lengthscales = -search(problem, -found.log_lengthscale, setting.levels)
        posteriors, beta, variances = _calibrated(known, log_lengthscales, chosen_by, chosen_at, setting.levels)
    sharp = SharpGP(
        log_lengthscales=log_lengthscales,
        posteriors=posteriors,
        points=known.points,
        noise_ratio=known.noise_ratio,
        rounding_fraction=known.rounding / variances.min(),
        beta=beta,
        scores=errors,
        columns=columns,
        x_scaler=x_scaler,
        result=found.result,
        levels=setting.levels,
        grid=setting.grid,
        is_bounded=setting.is_bounded,
    )
    scores = curves.scores(_curves(sharp, at), errors, widths.num_below(setting.levels))
    return eqx.tree_at(lambda sharp: sharp.scores, sharp, namespace(scores).sort(scores))


def _calibrated(
    known: given.Given,
    log_lengthscales: Float[JaxArray, "k d"],
    errors: Float[JaxArray, " m"],
    at: Float[JaxArray, "m d"] | None,
    levels: tuple[float, ...],
) -> tuple[gp.Posterior, Float[JaxArray, " k"], Float[JaxArray, " k"]]:
    """For every level what is known under its lengthscales, beta (eq. 6), and the median variance of the rows.

    Arguments as of `widths.Problem`.
    """
    xp = namespace(log_lengthscales)

    def condition(of_level):
        (log_lengthscale,) = of_level
        posterior = known.posterior(log_lengthscale)
        if at is None:
            return posterior, known.leave_one_out(log_lengthscale, posterior).variance
        return posterior, given.variance(log_lengthscale, posterior, known.points, known.noise_ratio, at)

    def calibrate(of_level):
        variance, level = of_level
        return linear_quantile(xp.sort(errors / xp.sqrt(variance)), level)

    posteriors, variances = _over_levels(condition, log_lengthscales)
    beta = over_leading_axis(calibrate, (variances, xp.asarray(levels, variances.dtype)))
    return posteriors, beta, xp.median(variances, axis=1)


@numpy_or_jit
def _predict(sharp: SharpGP, x: Float[JaxArray, "n d"], mean: Float[JaxArray, " n"]) -> Float[JaxArray, "n l"]:
    """The quantiles of the rows at the levels of the grid."""
    xp = namespace(x, mean)
    with threads_for(sharp.points.shape[-2]):
        of_rows = _curves(sharp, sharp.x_scaler(x))
    scores = linear_quantile(sharp.scores, np.asarray(sharp.grid, sharp.scores.dtype))
    errors = curves.errors(of_rows, scores, widths.num_below(sharp.levels))
    # A score is rounded in units of a piece of the curve, of which none is longer than the whole.
    pieces = xp.abs(scores)[None] * (of_rows[:, -1] - of_rows[:, 0])[:, None]
    side = xp.broadcast_to(np.where(np.array(sharp.grid) < 0.5, -1, 1), errors.shape)
    mean = xp.broadcast_to(mean[:, None], errors.shape)
    # Rounding must not let them cross.
    return curves.greatest_so_far(rounding.outward(mean + errors, side, mean, errors, pieces))


def _curves(sharp: SharpGP, x: Float[JaxArray, "n d"]) -> Float[JaxArray, "n c"]:
    """The rows' quantiles of the error."""

    def sigma(of_level):
        log_lengthscale, posterior = of_level
        variance = given.variance(log_lengthscale, posterior, sharp.points, sharp.noise_ratio, x)
        return namespace(variance).sqrt(variance)

    distances = abs(sharp.beta)[None] * _over_levels(sigma, sharp.log_lengthscales, sharp.posteriors).T
    return curves.nested(distances, widths.num_below(sharp.levels))


def _over_levels(function: Callable, log_lengthscales: Float[JaxArray, "k d"], *others: Any) -> Any:
    """`function` of the lengthscales of every level, and of what follows from them; on the host once for equal ones."""
    arrays = log_lengthscales, *others
    if namespace(log_lengthscales) is jnp:
        return over_leading_axis(function, arrays)
    _, first, place = np.unique(log_lengthscales, axis=0, return_index=True, return_inverse=True)
    found = [function(jax.tree.map(lambda array: array[k], arrays)) for k in first]  # noqa: B023
    return jax.tree.map(lambda *parts: np.stack(parts), *(found[k] for k in place))
