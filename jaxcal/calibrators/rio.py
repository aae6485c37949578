"""RIO: a Gaussian process on a model's residuals, with a kernel on the model's input and its output.

Qiu, Meyerson & Miikkulainen, "Quantifying Point-Prediction Uncertainty in Neural Networks via Residual Estimation
with an I/O Kernel", ICLR 2020. The paper's equations are in:

- `IOKernel`: equation 3, the I/O kernel.
- `functional.gp.log_likelihood`: equation 4.
- `functional.gp.predict`: equations 5 and 6.
- `functional.sparse_gp.collapsed_bound`: section 3.3, the sparse form.

`gp.nearest`, for many rows, is not in the paper. The arguments of `fit` give the rows of the paper's Table 1:

| row | target | kernel |
|---|---|---|
| RIO | residual | io |
| R+I | residual | input |
| R+O | residual | output |
| Y+IO | outcome | io |
| SVGP | outcome | input |
| Y+O | outcome | output |
"""

import operator
from collections.abc import Iterable
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxcal import _checks
from jaxcal._numpy import AnyArray, is_known, namespace
from jaxcal.calibrators._base import check_base
from jaxcal.distributions import Distribution, Normal, StudentT
from jaxcal.frames import unread
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table, check_same_index
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import linalg
from jaxcal.gp import GaussianNoise, InputNoise, Sparse, Stochastic, initial
from jaxcal.gp.fit import Way, check_fit, check_objects, fit_rows
from jaxcal.gp.inference import stochastic
from jaxcal.gp.initial import GivenParts
from jaxcal.gp.kernels import GPJaxKernel, SquaredExponential
from jaxcal.gp.model import Data, Model, one_of
from jaxcal.gp.padding import prediction
from jaxcal.gp.process import HoldsProcess, Process
from jaxcal.gp.protocols import Inference, InitialOf, Noise
from jaxcal.optimize import Result, as_constants

# The inference for each `preset`.
_PRESETS = {None: None, "paper": Sparse(num_inducing=50, points="trained", ard=False, tolerance=0.0)}


class Points(eqx.Module):
    """The points of the kernel: inputs and outputs of the model, or None for a part that the kernel does not use."""

    inputs: Float[AnyArray, "n d"] | None
    output: Float[AnyArray, "n 1"] | None


class IOKernel(eqx.Module):
    """k_in(x, x') + k_out(m, m') for inputs x and outputs m, or one of the two alone; RIO, eq. 2."""

    input: SquaredExponential | GPJaxKernel | None
    output: SquaredExponential | GPJaxKernel | None

    def __call__(self, a: Points, b: Points) -> Float[AnyArray, "n m"]:
        """The covariance of every row of a with every row of b."""
        return _sum(part(one, other) for part, one, other in self._parts(a, b))

    def diagonal(self, a: Points) -> Float[AnyArray, " n"]:
        """The variance at every row of a."""
        return _sum(part.diagonal(one) for part, one in self._parts(a))

    def derivatives(
        self, a: Points, weights: Float[Array, " n"], cotangents: Float[Array, "n n"]
    ) -> tuple[Float[Array, " p"], Float[Array, "n p"]]:
        """The derivatives of both kernels, of the input's kernel first."""
        sums, products = zip(*(part.derivatives(one, weights, cotangents) for part, one in self._parts(a)), strict=True)
        return jnp.concatenate(sums), jnp.concatenate(products, axis=1)

    def bounds(
        self, a: Points, target_variance: Float[AnyArray, ""], included: Bool[AnyArray, " n"] | None
    ) -> tuple["IOKernel", "IOKernel"]:
        """The least and the greatest hyperparameters that make sense for the rows that count."""
        pairs = [
            (None, None) if part is None or one is None else part.bounds(one, target_variance, included)
            for part, one in ((self.input, a.inputs), (self.output, a.output))
        ]
        low, high = zip(*pairs, strict=True)
        return IOKernel(*low), IOKernel(*high)

    def by_column(self, a: Points) -> "IOKernel":
        """The same kernel with a lengthscale for every input column."""
        if self.input is None or a.inputs is None:
            return self
        return IOKernel(self.input.by_column(a.inputs), self.output)

    def parts(self, a: Points) -> list[tuple[AnyArray, SquaredExponential | GPJaxKernel]]:
        """The kernels of the sum, each with its rows."""
        return [(rows, part) for part, rows in self._parts(a)]

    def _parts(self, *points: Points) -> Iterable[tuple]:
        """The kernels that are not None, each with its own part of the points."""
        each = [(of.inputs, of.output) for of in points]
        return (parts for parts in zip((self.input, self.output), *each, strict=True) if parts[0] is not None)


def _sum(terms: Iterable[AnyArray]) -> AnyArray:
    return reduce(operator.add, terms)


class _RowOptions(NamedTuple):
    """The options of `fit` that decide how rows are prepared."""

    kernel: str
    target: str
    paper: bool
    robust: bool
    has_ard: bool


class _ResidualData(NamedTuple):
    """The rows of a fit: inputs or None, the base's means, its stds or None, and targets."""

    x: Any
    mean: AnyArray
    std: AnyArray | None
    y: AnyArray

    def explained(self, setting: _RowOptions) -> AnyArray:
        """The values that the process explains: residuals or outcomes."""
        return self.y - self.mean if setting.target == "residual" else self.y


def fit(
    x: "Table | None",
    base: "Distribution",
    y: "Series",
    *,
    categorical: "Categorical" = (),
    kernel: str | tuple = "io",
    target: str = "residual",
    inference: "Inference | None" = None,
    noise: "Noise | None" = None,
    preset: str | None = None,
    differentiable: bool = False,
    key: "PRNGKeyArray | None" = None,
    throw: bool = True,
) -> "RIO":
    """Fit a Gaussian process to the residuals y - base.mean, over the inputs and the predictions.

    Intervals cover what they claim if the model behind `base` was not trained on these rows. On training rows, as in
    the paper, the process lowers the error all the same. But residuals of training rows are smaller than new residuals,
    and intervals become too narrow: `jaxcal.pipeline` corrects this by out-of-fold errors.

    The kernel's lengthscales and variances and the noise variance maximize the marginal likelihood. Damped Newton steps
    from several initial values find the maximum. The sparse lower bound is maximized by L-BFGS. If the base has a std,
    the noise variance of a row is a learned mixture of a constant and the base's variance. Several outputs are the same
    number of independent processes. Inputs, predictions and target are standardized inside: y -> a y + b transforms the
    prediction in the same way, up to rounding. A row far from the prediction of the other rows raises a warning.

    `preset="paper"` repeats the published setting: the sparse bound with 50 trained inducing points, initially the
    first rows. Initial hyperparameters are 1, and predictions and target are not scaled.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`: one run after another on a CPU, all at
    once on an accelerator. Predictions are differentiable in x and base. With `differentiable=True` they are also
    differentiable in the rows fitted to.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column. None if the kernel depends
            on the output alone.
        base: the model's predictions at x, [n] or of several outputs [n, t]; with a std (a Normal, say) or
            without one (a Point).
        y: targets, of the shape of base.mean.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        kernel: "io", "input" or "output" for squared-exponential kernels; or a pair of gpjax kernels (inputs,
            output). One of the pair may be None. Their hyperparameters are the initial values.
        target: the values that the process explains: the "residual", or the "outcome" itself. The prediction of an
            outcome does not build on the base's mean.
        inference: how the process is fitted: `gp.Exact`, `gp.Sparse`, `gp.Nearest` or `gp.Stochastic`, with the options
            of each. `fitted.inference` says which of them was used. For None the choice depends on the rows:

            - Up to 2000 rows it is the exact process.
            - Up to 5000 rows the exact process and `gp.Nearest` are fitted, and up to 250,000 rows `gp.Sparse` and
              `gp.Nearest`. The fit with the lower leave-one-out CRPS is taken.
            - On an accelerator its memory decides in place of the 5000 rows. For kernels of gpjax on a CPU the number
              is 2000.
            - If more than 2000 rows are traced, or the noise is not Gaussian, and above 250,000 rows, it is
              `gp.Sparse`.

            Unless the inference has another option, `ard="auto"` chooses the number of lengthscales by the marginal
            likelihood. The default is `ard=False` for the preset and kernels of gpjax (RIO, appendix D.4). It is also
            `ard=False` with fewer than 3 rows for each column, and with fewer than 10 if there are over 100 columns.
        noise: `gp.GaussianNoise`, the default, with `variance=` if the variance is known; `gp.StudentTNoise`, so that
            outliers do not decide the fit; or `gp.InputNoise`, whose variance depends on the inputs.
        preset: None, or "paper" as above.
        differentiable: whether derivatives pass through the fit. They come from the implicit function theorem at the
            optimum, which the fit then finds to the last digits. If there is no optimum, they are NaN and `result` is
            not CONVERGED. The choice of inducing points and of nearest rows is held constant. Only for Gaussian noise
            on one device, and not for `gp.Stochastic`. A fit takes up to twice as long.
        key: random key of the order of the rows of `gp.Stochastic`; nothing else is random.
        throw: whether to raise an error if no jitter makes the covariance positive definite; the module's `result` says
            so in any case.

    Raises:
        TypeError: if base is not a Distribution; if key is no random key.
        ValueError: if an argument is empty, not finite, of the wrong shape or length. If there are fewer than two rows.
            If the target is constant, so that there is nothing to learn.
        FloatingPointError: if a covariance cannot be factorized and `throw` is set.

    Warns:
        UserWarning: if a row is an outlier. If the noise is so small that rounding decides the result.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> x = np.linspace(0, 6, 60)[:, None]
        >>> truth = np.sin(x[:, 0]) + 0.1 * np.cos(37 * x[:, 0])
        >>> model = lambda x: jc.Point(0.8 * np.sin(x[:, 0]))
        >>> rio = jc.rio.fit(x, model(x), truth)
        >>> after = rio(x, model(x))
        >>> bool(jc.metrics.rmse(truth, after) < jc.metrics.rmse(truth, model(x)))
        True
    """
    if key is not None:
        _checks.check_key(key)
    check_base(base, outputs=True)
    check_same_index(x, y)
    y = _checks.as_vector("y", y) if base.mean.ndim == 1 else _checks.as_matrix("y", y)
    _checks.check_rows("y", y, 2)
    check_base(base, y.shape[0], outputs=True)
    noise = GaussianNoise() if noise is None else noise
    check_objects(inference, noise)
    setting = _setting(kernel, target, preset, noise, inference)
    if x is None and setting.kernel != "output":
        raise ValueError("x is None, but the kernel depends on the inputs: give x, or take kernel='output'.")
    columns = None if setting.kernel == "output" else Columns.of(x, categorical)
    in_numpy = isinstance(kernel, str) and not setting.paper
    way = Way.of(
        y.shape[0],
        _PRESETS[preset] if inference is None else inference,
        noise,
        ard="auto" if in_numpy else False,
        inputs=1 if columns is None else columns.num_inputs,
        is_known=is_known(as_constants((x, base.mean, _own_std(base), y, noise))),
        in_numpy=in_numpy,
        differentiable=differentiable,
    )
    if isinstance(noise, InputNoise) and _own_std(base) is not None:
        raise ValueError("base has a std of its own, which the noise follows as far as it helps: omit InputNoise().")
    kernel_and_noise = GivenParts.of(None if isinstance(kernel, str) else _from_gpjax(kernel), noise)
    _check_spread(base.mean, y, target)
    rows = _ResidualData(x, base.mean, _own_std(base), y)
    if isinstance(way.inference, Stochastic):
        rio = _fit_stochastic(columns, rows, kernel_and_noise, setting, way.inference, key)
    else:
        x = None if columns is None else columns(x)
        if x is not None:
            _checks.check_length("x", x, y.shape[0])
        rows = rows._replace(x=x)
        if not differentiable:
            rows, kernel_and_noise = _checks.without_derivative(
                (rows, kernel_and_noise), "rio.fit", "give differentiable=True"
            )
        prepare = eqx.Partial(_prepared, columns, kernel_and_noise, setting)
        scales, process = fit_rows(prepare, rows, way, in_numpy=in_numpy)
        rio = scales.rio(process, setting)
    check_fit(rio.process, y.shape[0], throw=throw)
    return rio


class RIO(HoldsProcess):
    """A Gaussian process on the residuals of a model; made by `fit`.

    With several outputs every array has a leading axis of outputs.

    Attributes:
        process: the posterior of the Gaussian process, in scaled units.
        columns: the description of the columns of the inputs; None if the kernel does not use the inputs.
        x_scaler: standardization of the inputs; None if the kernel does not use the inputs.
        output_scaler: standardization of the base's means.
        target_scaler: standardization of the residuals or outcomes.
        base_std: the root mean square of the base's stds on the training rows; None for a base without a std.
        target: "residual" or "outcome".
    """

    process: Process
    columns: Columns | None
    x_scaler: Standardizer | None
    output_scaler: Standardizer
    target_scaler: Standardizer
    base_std: Float[AnyArray, "*runs"] | None
    target: str = eqx.field(static=True)

    def __call__(self, x: Table | None, base: Distribution, *, include_noise: bool = True) -> Normal | StudentT:
        """The distribution of the targets at the rows of x; RIO, eq. 5 to 7. A StudentT if the noise is Student t.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column. None if the
                kernel depends on the output alone.
            base: the model's predictions at x, with a std if and only if the base of `fit` had a std.
            include_noise: whether the variance is the variance of a new observation, as in the paper's code. Otherwise
                it is the variance of the latent function alone, as in eq. 6 and 7 of the paper.
        """
        check_base(base, outputs=True)
        std = _own_std(base)
        if (std is None) != (self.base_std is None):
            raise ValueError(
                f"base is {type(base).__name__}, {'without' if std is None else 'with'} a std of its own; "
                f"RIO was fitted to a base {'with' if std is None else 'without'} a std."
            )
        x = None if self.columns is None else self.columns(x)
        if x is not None:
            _checks.check_length("x", x, base.mean.shape[0])
        return _predict(self, (x, std, base.mean), include_noise)

    @property
    def kernel(self) -> IOKernel:
        """The kernel with the fitted hyperparameters, in scaled units and before `process.scale`."""
        return cast(IOKernel, self.process.model.kernel)

    @property
    def noise_variance(self) -> Float[Array, "*runs"]:
        """The (mean) variance of the noise, in squared units of y; warns if it leaves the range of the dtype."""
        return _checks.squared("noise_variance", jnp.sqrt(self.scaled_noise) * self.target_scaler.scale)

    @property
    def converged(self) -> Array:
        """Whether the optimizer met its stopping rule within the iterations allowed."""
        return self.result == Result.CONVERGED


def _own_std(base: Distribution) -> Array | None:
    return base.std if base.has_std else None


def _setting(
    kernel: str | tuple, target: str, preset: str | None, noise: Noise, inference: Inference | None
) -> _RowOptions:
    """The checked options that decide how rows are prepared."""
    paper, is_name = preset == "paper", isinstance(kernel, str)
    depends_on = kernel if isinstance(kernel, str) else _depends_on(kernel)
    _checks.check_choice("kernel", depends_on, ("io", "input", "output"))
    _checks.check_choice("target", target, ("residual", "outcome"))
    _checks.check_choice("preset", preset, tuple(_PRESETS))
    if paper and not (noise.is_gaussian and noise.known_variance is None):
        raise ValueError("preset='paper' has Gaussian noise of a variance that is learned: omit noise.")
    ard = inference is not None and inference.ard
    if ard and not is_name:
        raise ValueError("ard has no effect on kernels of gpjax: give them a lengthscale for every column.")
    return _RowOptions(depends_on, target, paper, robust=noise.has_heavy_tails, has_ard=bool(ard))


def _depends_on(kernels: tuple) -> str:
    if not isinstance(kernels, tuple) or len(kernels) != 2 or kernels == (None, None):
        raise ValueError(
            f"kernel must be 'io', 'input', 'output' or a pair of gpjax kernels (inputs, output); got {kernels!r}."
        )
    inputs, output = kernels
    return "input" if output is None else "output" if inputs is None else "io"


def _from_gpjax(kernels: tuple) -> IOKernel:
    return IOKernel(*(None if kernel is None else GPJaxKernel.of("each kernel", kernel) for kernel in kernels))


def _check_spread(mean: Array, y: Array, target: str) -> None:
    """Raise if the target does not vary by more than rounding."""
    if _checks.is_traced(mean, y):
        return
    targets, means = np.asarray(y), np.asarray(mean)
    size = np.maximum(np.abs(targets).max(axis=0), np.abs(means).max(axis=0))
    if target == "residual":
        _checks.check_varies("the residuals y - base.mean are", targets - means, size)
    else:
        _checks.check_varies("y is", targets, size)


def _prepared(
    columns: Columns | None, kernel_and_noise: GivenParts, setting: _RowOptions, *rows: AnyArray | None
) -> tuple["_Scales", InitialOf, Data]:
    """The scales of the rows, the function of the initial values, and the rows in the form that the process takes."""
    *arrays, included = rows
    dtype = np.result_type(*(a.dtype for a in jax.tree.leaves(arrays)))
    some = _ResidualData(*jax.tree.map(lambda a: a.astype(dtype), arrays))
    weights = None if included is None else included.astype(dtype)
    x_scaler = None if columns is None else Standardizer.of(some.x, weights).without(columns.indicators)
    scales = _Scales.of(columns, x_scaler, some, setting, weights)
    initial_of = eqx.Partial(_initial_models, kernel_and_noise, setting, scales.target)
    return scales, initial_of, scales.data(some, setting, included)


def _fit_stochastic(
    columns: Columns | None,
    rows: _ResidualData,
    kernel_and_noise: GivenParts,
    setting: _RowOptions,
    inference: Stochastic,
    key,
) -> "RIO":
    """The fit by a bound that reads x in parts."""
    n, dtype = rows.y.shape[0], rows.y.dtype
    if rows.y.ndim > 1:
        raise ValueError(f"Stochastic fits one output; y has {rows.y.shape[1]}: fit them one by one.")
    stochastic.check_known(*rows)
    key = stochastic.given_key(key)
    x = x_scaler = None
    if columns is not None:
        x = unread.unread_rows(rows.x if columns.is_plain else columns(rows.x), n)
        x_scaler = unread.standardizer(x, dtype).without(columns.indicators)
    scales = _Scales.of(columns, x_scaler, rows, setting)
    read = stochastic.reader(lambda *some: scales.data(_ResidualData(*some), setting), (x, *rows[1:]), dtype)
    initial_of = eqx.Partial(_initial_models, kernel_and_noise, setting, scales.target)
    return scales.rio(stochastic.maximize_bound(inference, initial_of, read, n, key=key), setting)


class _Scales(NamedTuple):
    """The scales of the rows, and the description of the columns of their inputs."""

    columns: Columns | None
    x: Standardizer | None
    output: Standardizer
    target: Standardizer
    base_std: Float[AnyArray, ""] | None

    @classmethod
    def of(
        cls,
        columns: Columns | None,
        x_scaler: Standardizer | None,
        rows: _ResidualData,
        setting: _RowOptions,
        weights: Float[AnyArray, " n"] | None = None,
    ) -> "_Scales":
        scaler = Standardizer.identity if setting.paper else partial(Standardizer.of, weights=weights)
        target_scaler = Standardizer.robust if setting.robust else scaler
        return cls(
            columns=columns,
            x=x_scaler,
            output=scaler(rows.mean),
            target=target_scaler(rows.explained(setting)),
            base_std=None if rows.std is None else _unit(linalg.root_mean_square(rows.std, weights)),
        )

    def data(self, rows: _ResidualData, setting: _RowOptions, included: Bool[AnyArray, " n"] | None = None) -> Data:
        """Rows in the form that the process takes."""
        # The base's variance in units of its mean square on the training rows.
        variance = None if rows.std is None or self.base_std is None else (rows.std / self.base_std) ** 2
        points = _points(rows.x, rows.mean, self.x, self.output, setting.kernel)
        return Data.of(points, self.target(rows.explained(setting)), variance, included)

    def rio(self, process: Process, setting: _RowOptions) -> "RIO":
        """The module that predicts in the units of y with this process."""
        return RIO(
            process=process,
            columns=self.columns,
            x_scaler=self.x,
            output_scaler=self.output,
            target_scaler=self.target,
            base_std=self.base_std,
            target=setting.target,
        )


def _unit(std: AnyArray) -> AnyArray:
    """The divisor of the stds: their size, or 1 if all are 0."""
    return namespace(std).where(std > 0, std, 1)


@prediction
def _predict(rio: "RIO", rows: tuple[AnyArray, ...], include_noise: bool) -> Normal | StudentT:
    x, std, mean = rows
    predict_one = lambda rio, mean, std: _predict_one(rio, x, mean, std, include_noise)
    if mean.ndim == 1:
        center, scale, df = predict_one(rio, mean, std)
    elif namespace(mean) is jnp:
        center, scale, df = eqx.filter_vmap(predict_one, in_axes=(eqx.if_array(0), 1, 1), out_axes=1)(rio, mean, std)
    else:
        of_output = lambda k: predict_one(one_of(rio, k), mean[:, k], None if std is None else std[:, k])
        centers, scales, dfs = zip(*map(of_output, range(mean.shape[1])), strict=True)
        center, scale = np.stack(centers, axis=1), np.stack(scales, axis=1)
        df = None if dfs[0] is None else np.stack(dfs, axis=1)
    return Normal(center, scale) if df is None else StudentT(df, center, scale)


def _predict_one(rio: "RIO", x, mean, std, include_noise: bool) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    """The mean, the std and None; or the location, the scale and the degrees of freedom of a Student t distribution."""
    points = _points(x, mean, rio.x_scaler, rio.output_scaler, None)
    if include_noise:
        latent, scale, df = rio.process.observed(points, None if std is None else (std / rio.base_std) ** 2)
    else:
        (latent, scale), df = rio.process(points), None
    explained = rio.target_scaler.inverse(latent)
    # RIO: y = m + r(x, m), with the residual r in the units of y. An outcome has no m.
    center = mean + explained if rio.target == "residual" else explained
    return center, rio.target_scaler.scale * linalg.sqrt(scale), df


def _points(x, mean, x_scaler, output_scaler, kernel: str | None) -> Points:
    return Points(None if x is None else x_scaler(x), None if kernel == "input" else output_scaler(mean)[:, None])


def _initial_models(
    kernel_and_noise: GivenParts,
    setting: _RowOptions,
    target_scaler: Standardizer,
    data: Data,
    noise: AnyArray | None = None,
) -> Model:
    """The initial values: a grid of lengthscales and noise; all 1 with the preset; or the values of a gpjax kernel."""

    def combine(kernels: Iterable[SquaredExponential]) -> IOKernel:
        each = iter(kernels)
        return IOKernel(*(None if part is None else next(each) for part in (data.points.inputs, data.points.output)))

    if setting.paper:
        ones = combine([SquaredExponential(jnp.zeros(()), jnp.zeros(()))] * 2)
        kernel = kernel_and_noise.kernel or (ones.by_column(data.points) if setting.has_ard else ones)
        return initial.at(data, kernel, 1.0)
    noise = kernel_and_noise.scaled_noise(target_scaler.scale) if noise is None else noise
    if kernel_and_noise.kernel is not None:
        return initial.at_given(data, kernel_and_noise.kernel, noise=noise)
    return initial.on_grid(data, jax.tree.leaves(data.points), combine, noise=noise)
