"""Sharp calibrated Gaussian processes: quantiles around any model's mean, wide where a second process is unsure.

Capone, Hirche & Pleiss, "Sharp Calibrated Gaussian Processes", NeurIPS 2023. The delta-quantile of a row is
mean + beta sigma(theta, x). The mean is the model's, and sigma^2 is the variance (eq. 3b) of a Gaussian process given
the training inputs. Its lengthscales theta differ from the lengthscales of the regression. They are chosen for every
level so that the quantiles lie close to the mean (eq. 7, `widths.log_width`). The factor beta is the quantile of
the errors divided by sigma (eq. 6, `functional.quantiles.linear_quantile`).

The paper's Theorem 5.4 holds only if the errors that set beta did not choose theta. So the errors of the training rows
choose theta and beta, each by leave-one-out, and the calibration rows then calibrate the curve. With `preset="paper"`
the calibration rows choose theta and beta, too, as in Algorithm 1.

Quantiles of several levels must not cross. They are nested from the middle outwards: no quantile is nearer to the mean
than the quantile of the level before it. The quantiles of a row form a curve. The place of an error on this curve is
its score. The delta-quantile is the point of the curve at the delta-quantile of the calibration rows' scores (eq. 6
again). So exactly j of N calibration rows lie at or below the quantile at level `j / (N + 1)`. Below level
`1 / (N + 1)` and above `N / (N + 1)` no finite quantile covers as it should.

If the model is a Gaussian process, use `conformal` around it: its intervals are as narrow, or narrower, on five of six
data sets (docs/results.md).
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
from jaxcal.calibrators._base import FINE_LEVELS, CalibrationData
from jaxcal.calibrators.sharp_gp import conditioning, curves, widths
from jaxcal.distributions import Distribution, Quantiles
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table, check_same_index
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import gp, rounding
from jaxcal.functional._loops import over_leading_axis
from jaxcal.functional.quantiles import linear_quantile, smallest_table
from jaxcal.gp.fit import warn_of_rounding
from jaxcal.networks import presets

# The default levels with lengthscales of their own. Near the middle none are needed: quantiles are close to the mean.
_LEVELS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)
# The number of inducing points of the sparse variance, for more rows than the exact variance takes.
_NUM_INDUCING = 300
# The largest number of training rows, and of calibration rows, that choose the lengthscales.
_NUM_SEARCHED = 1000
# The largest number of levels of ranks, `j / (N + 1)`, in the distribution. Two levels that differ by no more than the
# second number count as one.
_MOST_RANKS, _SAME_LEVEL = 1000, 1e-6


class KernelAndNoise(NamedTuple):
    """exp(-sum_j (a_j - b_j)^2 / (2 l_j^2)) and noise.

    Attributes:
        lengthscale: the lengthscales [d], or one lengthscale for all columns, in the units of x.
        noise_ratio: the variance of the noise divided by the variance of the process.
    """

    lengthscale: Float[ArrayLike, "..."]
    noise_ratio: Float[ArrayLike, ""]


@runtime_checkable
class HasKernel(Protocol):
    """An object with lengthscales and noise of a regression: a `KernelAndNoise`, or a fitted `gaussian_process`."""

    @property
    def lengthscale(self) -> ArrayLike:
        """As of `KernelAndNoise`."""
        ...

    @property
    def noise_ratio(self) -> ArrayLike:
        """As of `KernelAndNoise`."""
        ...


class Variance(eqx.Module):
    """How the variance of every level is chosen; an option that is None has its default.

    Attributes:
        search: "line" (default) for common multiples of the regression's lengthscales. "ard" is for one lengthscale for
            each column by L-BFGS, from the outermost level inwards.
        fit_on: which rows choose the lengthscales, "training" (default) or "calibration", as `fit` describes them. At
            most 1000 of them do, at equal distances in their order; all rows set beta (section 6 of the paper).
        num_inducing: the number of inducing points; None for the exact variance up to 2000 training rows, else 300.

    Raises:
        ValueError: if an option is out of its range.
    """

    search: str | None = eqx.field(static=True, default=None)
    fit_on: str | None = eqx.field(static=True, default=None)
    num_inducing: int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        """Raise ValueError if an option is out of its range."""
        _checks.check_choice("search", self.search, (None, "ard", "line"))
        _checks.check_choice("fit_on", self.fit_on, (None, "training", "calibration"))
        if self.num_inducing is not None:
            _checks.check_at_least("num_inducing", self.num_inducing, 1)


class _StaticOptions(NamedTuple):
    """The options of `fit` that decide what is compiled."""

    search: str = "line"
    fit_on: str = "training"
    num_inducing: int | None = None
    differentiable: bool = False
    levels: tuple[float, ...] = ()
    grid: tuple[float, ...] = ()
    is_bounded: bool = True


# The setting for each `preset`: jaxcal's own, and the setting of Capone, Hirche & Pleiss (2023).
_PRESETS = {None: _StaticOptions(), "paper": _StaticOptions(search="ard", fit_on="calibration", is_bounded=False)}


def fit(
    x: "Table",
    base: "Distribution",
    y: "Series",
    *,
    x_train: "Table",
    y_train: "Series | None" = None,
    categorical: "Categorical" = (),
    kernel: "HasKernel | None" = None,
    levels: "float | Sequence[float] | None" = None,
    variance: "Variance | None" = None,
    preset: str | None = None,
    differentiable: bool = False,
    throw: bool = True,
) -> "SharpGP":
    """Choose the lengthscales of every level, and calibrate their quantiles.

    For intervals around a Gaussian process use `conformal.fit(x, model(x), y)`, with `model` a `gaussian_process`. With
    rule="randomized" each of its quantiles covers as it should, too. Stretched to equal coverage of 95 %, the intervals
    of `conformal.fit` compare with the intervals of `sharp_gp` as follows (`benchmarks/tables/sharp_gp.py`):

    - narrower by 10 % on boston, 22 % on yacht and 6 % on auto_mpg;
    - as wide to 1 % on concrete and kin8nm;
    - wider by 2 % on wine_red.

    `sharp_gp` is for models without a std. Its intervals are narrower than intervals of one width for all rows by 2 to
    16 % on five of these six data sets. On kin8nm they are as wide.

    x, base and y are calibration rows, which the model was not trained on. x_train and y_train are the training rows of
    the model.

    The lengthscales of a level minimize `log |beta| + log(mean of sigma^2) / 2` over rows, with beta the quantile of
    the rows' errors divided by sigma. From the middle outwards the lengthscales do not grow, so that sigma does not
    fall (Assumption 4.1). The process has variance 1, since beta sets the scale, and the noise ratio of the regression.

    `fit_on` of `Variance` chooses these rows:

    - "training": the training rows, by leave-one-out of a Gaussian process. The curve then does not depend on the
      calibration rows that it is calibrated with. So a new exchangeable row lies at or below the quantile at level
      `j / (N + 1)` with probability `j / (N + 1)`, whatever the model and the data. The probability is larger if scores
      are tied.
    - "calibration": the calibration rows, which also calibrate the curve. The quantiles are then closer to the mean
      than they should be, and more so with fewer rows. `benchmarks/tables/sharp_gp_coverage.py` measures by how much.

    N calibration rows support the levels from `1 / (N + 1)` to `N / (N + 1)`. Quantiles beyond are infinite, with a
    warning.

    `preset="paper"` is Algorithm 1, search="ard" and fit_on="calibration". It covers too little, as above, and its
    quantiles beyond the outermost level equal the quantile at that level. It interpolates quantiles between levels. The
    paper interpolates lengthscales and beta, whose quantiles may cross.

    Up to 2000 training rows the variance is exact, and the fitted module holds a matrix of these rows for every level.
    For more rows it is the variance of Titsias' approximation with inducing points, chosen among the rows by
    conditional variance. Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x and base. With `differentiable=True` they are also differentiable in the rows fitted to and in
    the kernel.

    Args:
        x: inputs [N, d] of calibration rows, which the model was not trained on, or a data frame (`jaxcal.frames`); a
            vector [N] is one column.
        base: the model's predictions at x; only the mean is used.
        y: targets [N].
        x_train: inputs [n, d] that the variance is conditioned on: the training inputs of the model.
        y_train: targets [n]; may be None with a kernel and fit_on="calibration".
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        kernel: lengthscales and noise of the regression, a `KernelAndNoise`, or a `gaussian_process` fitted to the
            training rows; None for the maximum of the marginal likelihood of the training rows.
        levels: in (0, 1), increasing, each with lengthscales of its own. The distribution has these levels, all
            `j / (N + 1)` (above 1000 rows 1000 of them, at equal distances) and between them the multiples of 1/200. A
            single number gives a distribution of this level alone. Default: 0.025, 0.05, 0.1, 0.2, 0.3, 0.4 and their
            mirror images, as far as N calibration rows support them.
        variance: how the variance of every level is chosen, a `Variance`; None for its defaults.
        preset: None, or "paper" as above.
        differentiable: whether derivatives pass through the fit; not with search="ard". The choice of the multiples and
            of the inducing points is held constant. Without `kernel` the derivatives of its hyperparameters come
            from the implicit function theorem, as in `rio.fit`. They are NaN if `result` is not CONVERGED.
        throw: whether to raise an error if a covariance cannot be factorized; else the distribution is NaN.

    Raises:
        TypeError: if base is not a Distribution. If a derivative through the fit is requested without `differentiable`.
        ValueError: if an argument is empty, not finite or of the wrong shape. If there are fewer than two training
            rows. If levels do not increase, lie outside (0, 1) or need more calibration rows than there are. If y_train
            is constant, or is needed but None. If an option is out of its range.
        FloatingPointError: if a covariance cannot be factorized and `throw` is set.

    Warns:
        UserWarning: if y equals base.mean in every row, so that no prediction has a width. If more calibration rows
            equal training rows, in x and y, than chance explains. If the noise is so small that rounding decides the
            result.

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
    variance_options = _checks.options_of("variance", variance, Variance, "jc.sharp_gp.Variance")
    setting = presets.settle(_PRESETS, preset, differentiable=differentiable, **variance_options)
    setting = _checked_setting(setting, levels, rows.y.shape[0], x_train.shape[0])
    if y_train is None:
        if kernel is None or setting.fit_on == "training":
            raise ValueError("y_train may be None only with a kernel and fit_on='calibration'.")
        y_train = np.zeros(x_train.shape[0], x_train.dtype)  # their errors are not used
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
    rows, x_train, y_train, hyperparameters = _of_one_dtype(arrays)
    if hyperparameters is None:
        hyperparameters = conditioning.of_greatest_evidence(
            x_train, y_train, columns.indicators, differentiable=setting.differentiable
        )
    sharp = _fit(rows, columns, x_train, y_train, hyperparameters, setting=setting)
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
        log_lengthscales: the log lengthscales of every level [k, d], in scaled units.
        posteriors: for every level the posterior at the conditioning points under its lengthscales.
        points: the conditioning points: training rows, or inducing points.
        noise_ratio: the variance of the noise, with a part for rounding, in units of the variance of the process.
        rounding_fraction: the variance that rounding may hide, divided by the median variance of the rows at the level
            with the least median.
        beta: the factor of the sigma of every level [k], in the unit of y.
        scores: the scores of the calibration rows [N], in increasing order.
        columns: the description of the columns of the training inputs.
        x_scaler: standardization of the inputs.
        result: how the search for the regression's hyperparameters ended, one of `jaxcal.optimize.Result`; CONVERGED
            if `fit` had a kernel.
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

        With N calibration rows, quantiles at levels below `1 / (N + 1)` and above `N / (N + 1)` are infinite and come
        with a warning. Quantiles beyond the outermost level equal the quantile at that level with `preset="paper"` and
        with a single level.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.
            base: the model's predictions at x.

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if an argument is empty, not finite or of the wrong shape, or if x has other columns than the
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
        """The lengthscales of every level, in the units of x."""
        return namespace(self.log_lengthscales).exp(self.log_lengthscales) * self.x_scaler.scale[..., None, :]


def _checked_setting(
    asked: _StaticOptions, levels: float | Sequence[float] | None, num_rows: int, num_train: int
) -> _StaticOptions:
    """The options, checked, with values for the defaults that depend on the rows."""
    if asked.differentiable and asked.search == "ard":
        # The objective of "ard" has kinks where two errors change places, and the search mostly ends at a kink.
        raise ValueError("differentiable=True goes with search='line': the search by column has no derivative.")
    num_inducing = asked.num_inducing
    if num_inducing is None and num_train > conditioning.EXACT_ROWS:
        num_inducing = _NUM_INDUCING
    if num_inducing is not None:
        num_inducing = min(num_inducing, num_train)
    own, grid = _levels(levels, num_rows)
    is_bounded = asked.is_bounded and not _is_single(levels)
    return asked._replace(num_inducing=num_inducing, levels=own, grid=grid, is_bounded=is_bounded)


def _levels(levels: float | Sequence[float] | None, num_rows: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The levels that have lengthscales of their own, and the levels of the distribution."""
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
    """Both in increasing order, without the others that are nearly equal to one of the levels."""
    if not others:
        return levels
    distances = np.abs(np.subtract.outer(others, levels)).min(axis=1)
    return tuple(sorted([*levels, *np.array(others)[distances > _SAME_LEVEL].tolist()]))


def _checked(kernel: HasKernel, num_columns: int) -> KernelAndNoise:
    """A checked kernel, with a lengthscale for each column."""
    # JAX would compile a program for a Python number.
    values = {name: getattr(kernel, name) for name in KernelAndNoise._fields}
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
    return KernelAndNoise(_of_columns(lengthscale, num_columns), noise_ratio)


@numpy_or_jit
def _of_columns(lengthscale: Float[JaxArray, "*k"], num_columns: int) -> Float[JaxArray, " d"]:
    return namespace(lengthscale).broadcast_to(lengthscale, (num_columns,))


@numpy_or_jit
def _of_one_dtype(arrays: tuple) -> tuple:
    """The rows and the kernel in the widest dtype of the rows."""
    dtype = np.result_type(*(array.dtype for array in jax.tree.leaves(arrays[:3])))
    return jax.tree.map(lambda array: array.astype(dtype), arrays)


@numpy_or_jit
def _errors(rows: CalibrationData) -> Float[JaxArray, " n"]:
    """The errors of the model."""
    return rows.y - rows.mean


def _is_exact(*_: object, setting: _StaticOptions) -> bool:
    return setting.num_inducing is None


@numpy_or_jit(when=_is_exact)
def _fit(
    rows: CalibrationData,
    columns: Columns,
    x_train: Float[JaxArray, "n d"],
    y_train: Float[JaxArray, " n"],
    kernel: KernelAndNoise | conditioning.Hyperparameters,
    *,
    setting: _StaticOptions,
) -> SharpGP:
    """The fit to rows of one dtype; a `KernelAndNoise` is in units of x, `Hyperparameters` are in scaled units."""
    x_scaler, y_scaler = Standardizer.of(x_train).without(columns.indicators), Standardizer.of(y_train)
    hyperparameters = conditioning.scaled(*kernel, x_scaler) if isinstance(kernel, KernelAndNoise) else kernel
    known = conditioning.ConditioningData.of(
        x_scaler(x_train), y_scaler(y_train), hyperparameters, setting.num_inducing
    )
    errors, at = _errors(rows), x_scaler(rows.x)
    with threads_for(x_train.shape[0]):
        chosen_by, chosen_at = errors, at
        if setting.fit_on == "training":
            # The errors of the training rows are leave-one-out errors, in the unit of y.
            loo = known.leave_one_out(hyperparameters.log_lengthscale, known.posterior(hyperparameters.log_lengthscale))
            chosen_by, chosen_at = y_scaler.scale * loo.error, None
        problem = widths.WidthData(known.x, known.noise_ratio, chosen_by, chosen_at).of_some_rows(_NUM_SEARCHED)
        search = widths.on_line if setting.search == "line" else widths.by_column
        log_lengthscales = -search(problem, -hyperparameters.log_lengthscale, setting.levels)
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
        result=hyperparameters.result,
        levels=setting.levels,
        grid=setting.grid,
        is_bounded=setting.is_bounded,
    )
    # The score of a calibration row is the place of its error y - mean on its curve.
    scores = curves.scores(_curves(sharp, at), errors, widths.num_below(setting.levels))
    return eqx.tree_at(lambda sharp: sharp.scores, sharp, namespace(scores).sort(scores))


def _calibrated(
    known: conditioning.ConditioningData,
    log_lengthscales: Float[JaxArray, "k d"],
    errors: Float[JaxArray, " m"],
    at: Float[JaxArray, "m d"] | None,
    levels: tuple[float, ...],
) -> tuple[gp.Posterior, Float[JaxArray, " k"], Float[JaxArray, " k"]]:
    """For every level the posterior under its lengthscales, beta (eq. 6), and the median variance of the rows.

    See `widths.WidthData` for the arguments.
    """
    xp = namespace(log_lengthscales)

    def condition(pair):
        (log_lengthscale,) = pair
        posterior = known.posterior(log_lengthscale)
        if at is None:
            return posterior, known.leave_one_out(log_lengthscale, posterior).variance
        return posterior, conditioning.variance(log_lengthscale, posterior, known.points, known.noise_ratio, at)

    def calibrate(pair):
        variance, level = pair
        # beta = the quantile of e / sigma at this level
        return linear_quantile(xp.sort(errors / xp.sqrt(variance)), level)

    posteriors, variances = _over_levels(condition, log_lengthscales)
    beta = over_leading_axis(calibrate, (variances, xp.asarray(levels, variances.dtype)))
    return posteriors, beta, xp.median(variances, axis=1)


@numpy_or_jit
def _predict(sharp: SharpGP, x: Float[JaxArray, "n d"], mean: Float[JaxArray, " n"]) -> Float[JaxArray, "n l"]:
    """The quantiles of the rows at the levels of the grid."""
    xp = namespace(x, mean)
    with threads_for(sharp.points.shape[-2]):
        curves_of_rows = _curves(sharp, sharp.x_scaler(x))
    scores = linear_quantile(sharp.scores, np.asarray(sharp.grid, sharp.scores.dtype))
    errors = curves.errors(curves_of_rows, scores, widths.num_below(sharp.levels))
    # A score is rounded in units of a piece of the curve, and no piece is longer than the whole curve.
    pieces = xp.abs(scores)[None] * (curves_of_rows[:, -1] - curves_of_rows[:, 0])[:, None]
    side = xp.broadcast_to(np.where(np.array(sharp.grid) < 0.5, -1, 1), errors.shape)
    mean = xp.broadcast_to(mean[:, None], errors.shape)
    # The running maximum keeps quantiles from crossing after rounding.
    return curves.greatest_so_far(rounding.outward(mean + errors, side, mean, errors, pieces))


def _curves(sharp: SharpGP, x: Float[JaxArray, "n d"]) -> Float[JaxArray, "n c"]:
    """The rows' quantiles of the error."""

    def sigma(pair):
        log_lengthscale, posterior = pair
        variance = conditioning.variance(log_lengthscale, posterior, sharp.points, sharp.noise_ratio, x)
        return namespace(variance).sqrt(variance)

    # |beta_k| sigma_k(x)
    distances = abs(sharp.beta)[None] * _over_levels(sigma, sharp.log_lengthscales, sharp.posteriors).T
    return curves.nested(distances, widths.num_below(sharp.levels))


def _over_levels(function: Callable, log_lengthscales: Float[JaxArray, "k d"], *others: Any) -> Any:
    """`function` of the arrays of every level; on the host it is called once for levels with equal lengthscales."""
    arrays = log_lengthscales, *others
    if namespace(log_lengthscales) is jnp:
        return over_leading_axis(function, arrays)
    _, first, place = np.unique(log_lengthscales, axis=0, return_index=True, return_inverse=True)
    results = [function(jax.tree.map(lambda array: array[k], arrays)) for k in first]  # noqa: B023
    return jax.tree.map(lambda *parts: np.stack(parts), *(results[k] for k in place))
