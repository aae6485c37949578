"""A Gaussian process, exact, sparse or by nearest rows, with a squared-exponential or neural-network kernel.

Rasmussen & Williams, "Gaussian Processes for Machine Learning" (2006): `functional.gp.predict` is the prediction, eq.
2.25 and 2.26. `functional.gp.log_likelihood` is the evidence, eq. 2.30. The sparse form, "SVGP", has the optimal q(u)
put into its bound (Titsias 2009, eq. 9): `functional.sparse_gp.collapsed_bound`.

`preset="crude"` is the process of CRUDE: Zelikman, Healy, Zhou & Avati, "CRUDE: Calibrating Regression Uncertainty
Distributions Empirically", 2020, appendix A. `preset="nngp"` is the neural-network Gaussian process of RIO's Table 1,
whose kernel is `gp.nngp.NNGP`: Qiu, Meyerson & Miikkulainen, "Quantifying Point-Prediction Uncertainty in Neural
Networks via Residual Estimation with an I/O Kernel", 2020, appendix D.1.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxcal import _checks
from jaxcal._numpy import AnyArray, is_known
from jaxcal.distributions import Normal, StudentT
from jaxcal.frames import unread
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table, check_same_index
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import linalg
from jaxcal.gp import Exact, GaussianNoise, Stochastic, initial
from jaxcal.gp.fit import Way, check_fit, check_objects, fit_rows
from jaxcal.gp.inference import stochastic
from jaxcal.gp.initial import GivenParts
from jaxcal.gp.kernels import GPJaxKernel, SquaredExponential
from jaxcal.gp.model import Data, Model
from jaxcal.gp.padding import prediction
from jaxcal.gp.process import HoldsProcess, Process
from jaxcal.gp.protocols import Inference, InitialOf, Noise
from jaxcal.optimize import as_constants

# The inference of each preset.
_PRESETS = {None: None, "crude": Exact(ard=False, learning_rate=0.01), "nngp": Exact(ard=False)}
_SQUARED_EXPONENTIAL = "squared_exponential"
# The weight variances and bias variances of RIO, appendix D.1, and the variance of its noise.
_NNGP_VARIANCES = np.linspace(0.1, 5, 30), np.linspace(0, 2, 30)
_NNGP_NOISE = 0.01


def fit(
    x: "Table",
    y: "Series",
    *,
    categorical: "Categorical" = (),
    kernel: Any = "squared_exponential",
    inference: "Inference | None" = None,
    noise: "Noise | None" = None,
    preset: str | None = None,
    differentiable: bool = False,
    key: "PRNGKeyArray | None" = None,
    throw: bool = True,
) -> "GaussianProcess":
    """Fit a Gaussian process whose hyperparameters maximize the evidence, or its sparse lower bound.

    The model is y = f(x) + noise, where f has the covariance v exp(-sum_j (a_j - b_j)^2 / (2 l_j^2)). The lengthscales
    l, the variance v and the variance of the noise begin at the best point of a grid. If there are several maxima, they
    end at one above this point. Inputs and target are standardized by the rows given here. So y -> a y + b changes the
    prediction in exactly this way, up to rounding. Constant columns of x have no effect.

    `preset="crude"` repeats CRUDE's setting, the setting of GPyTorch's examples: the exact process with one
    lengthscale, fitted by Adam with learning rate 0.01. The hyperparameters are the softplus of its parameters. The
    lengthscale, the variance and the noise variance begin at log 2. The paper does not give the number of steps. With
    predictions without the noise (`include_noise=False`), 1000 steps come nearer to its Table 1 than the 50 of the
    examples. The prior mean is the mean of the training rows; the examples learn a constant.

    `kernel="nngp"` is the kernel of an untrained ReLU network with two infinitely wide hidden layers (Lee et al. 2018);
    `gp.nngp.NNGP` has any depth. `preset="nngp"` uses it as RIO's authors do. It takes the pair with the greatest
    evidence out of 30 weight variances from 0.1 to 5 and 30 bias variances from 0 to 2. The noise is 0.01, and the
    target is neither centered nor scaled. The paper does not say what decides between the pairs. Its kernel is
    interpolated from a table of 101 x 151 x 131 entries until a factorization fails; here the kernel is exact.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`: one run after another on a CPU, all at once
    on an accelerator. Predictions are differentiable in x. With `differentiable=True` they are also differentiable in
    the rows of the fit.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n].
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        kernel: "squared_exponential", "nngp" or any kernel of gpjax, whose hyperparameters are the initial values.
        inference: how the process is fitted: `gp.Exact`, `gp.Sparse`, `gp.Nearest` or `gp.Stochastic`, with the options
            of each. None takes the exact process up to 2000 rows. With more known rows, it fits two inferences and
            takes the one with the lower leave-one-out CRPS. Up to 5000 rows these are the exact process and
            `gp.Nearest`, and up to 250,000 rows `gp.Sparse` and `gp.Nearest`. On an accelerator, the limit of the exact
            process depends on the memory. For kernels of gpjax on a CPU it is 2000 rows. Above 250,000 rows only
            `gp.Sparse` is taken. It is also the only choice where more than 2000 rows are traced or the noise is not
            Gaussian. `fitted.inference` is the one that was taken. Here an inference has a lengthscale for every
            column, unless it says otherwise. With fewer than 10 rows a column, the evidence decides between this and
            one lengthscale. With fewer than 3 rows a column, all columns have one lengthscale. This also holds with
            fewer than 10 rows a column and over 100 columns.
        noise: `gp.GaussianNoise`, the default, with `variance=` where the variance is known; `gp.StudentTNoise`, so
            that outliers do not decide the fit; or `gp.InputNoise`, whose variance depends on the inputs.
        preset: None, "crude" or "nngp", as above; a preset also decides the kernel and the noise.
        differentiable: whether derivatives by x, y and the noise's variance pass through the fit, as in `rio.fit`.
            Derivatives by the initial values of a kernel are 0.
        key: random key of the order of the rows in `gp.Stochastic`; nothing else is random.
        throw: whether to raise if no jitter makes the covariance positive definite; the module's `result` says
            so in any case.

    Raises:
        TypeError: if kernel is neither a name nor a kernel of gpjax; if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or if fewer than two rows are given. Also if y
            is constant, so that there is nothing to learn. Also if an option is out of its range, or does not go with
            another.
        FloatingPointError: if a covariance cannot be factorized, and `throw`.

    Warns:
        UserWarning: if a row is an outlier; if the noise is so small that rounding decides.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import gaussian_process
        >>> x = np.linspace(0, 6, 60)
        >>> process = gaussian_process.fit(x, np.sin(x) + 0.1 * np.cos(37 * x), key=jax.random.key(0))
        >>> predicted = process(np.array([np.pi / 2, np.pi, 60]))
        >>> abs(predicted.mean[:2]).round(1).tolist()
        [1.0, 0.0]
        >>> bool(predicted.std[2] > 10 * predicted.std[0])
        True
    """
    if key is not None:
        _checks.check_key(key)
    check_same_index(x, y)
    y = _checks.as_vector("y", y)
    _checks.check_rows("y", y, 2)
    columns = Columns.of(x, categorical)
    noise = GaussianNoise() if noise is None else noise
    check_objects(inference, noise)
    kernel_and_noise = _given(kernel, noise, preset)
    in_numpy = kernel_and_noise.kernel is None and preset is None
    way = Way.of(
        y.shape[0],
        _PRESETS[preset] if inference is None else inference,
        noise,
        ard=preset is None,
        inputs=columns.num_inputs,
        is_known=is_known(as_constants((x, y, noise))),
        in_numpy=in_numpy,
        differentiable=differentiable,
    )
    _checks.check_varies("y is", y, 0 if _checks.is_traced(y) else np.abs(np.asarray(y)).max())
    if isinstance(way.inference, Stochastic):
        if preset:
            raise ValueError(f"preset={preset!r} needs all rows at once: it does not go with Stochastic.")
        fitted = _fit_stochastic(columns, x, y, kernel_and_noise, way.inference, key)
    else:
        rows = columns(x), y
        _checks.check_length("x", rows[0], y.shape[0])
        if not differentiable:
            rows, kernel_and_noise = _checks.without_derivative(
                (rows, kernel_and_noise), "gaussian_process.fit", "give differentiable=True"
            )
        prepare = eqx.Partial(_prepared, columns.indicators, kernel_and_noise, preset, noise.has_heavy_tails)
        scalers, process = fit_rows(prepare, rows, way, in_numpy=in_numpy)
        fitted = GaussianProcess(process=process, columns=columns, x_scaler=scalers.x, y_scaler=scalers.y)
    check_fit(fitted.process, y.shape[0], throw=throw)
    return fitted


class GaussianProcess(HoldsProcess):
    """A Gaussian process conditioned on data, in the units of the data; made by `fit`.

    Attributes:
        process: the Gaussian process conditioned on data, in scaled units.
        columns: what the columns of the training inputs were.
        x_scaler: standardization of the inputs.
        y_scaler: standardization of the target.
    """

    process: Process
    columns: Columns
    x_scaler: Standardizer
    y_scaler: Standardizer

    def __call__(self, x: Table, *, include_noise: bool = True) -> Normal | StudentT:
        """The distribution of the targets at the rows of x; a StudentT where the noise is a Student t.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.
            include_noise: whether the distribution is for new observations; if False, for f alone.

        Raises:
            ValueError: if x is empty, not finite, or has other columns than the training inputs.
        """
        return _predict(self, (self.columns(x),), include_noise)

    @property
    def kernel(self) -> Any:
        """The fitted kernel, in scaled units: a `SquaredExponential`, or a kernel of gpjax.

        Its variances are not yet multiplied by `process.scale`.
        """
        kernel = self.process.model.kernel
        return kernel.kernel if isinstance(kernel, GPJaxKernel) else kernel

    @property
    def failed_initial_values(self) -> Int[Array, "*runs"]:
        """The number of initial values, or of grid points of the preset "nngp", without finite evidence."""
        return self.process.failed_initial_values

    @property
    def lengthscale(self) -> Float[Array, "*runs d"]:
        """The lengthscales, one for each input, in the units of x; only of a squared-exponential kernel."""
        scale = self.x_scaler.scale
        log_lengthscale = self._squared_exponential("lengthscale").log_lengthscale
        if log_lengthscale.ndim < scale.ndim:
            log_lengthscale = log_lengthscale[..., None]
        return jnp.exp(log_lengthscale) * scale

    @property
    def noise_ratio(self) -> Float[Array, "*runs"]:
        """The variance of the noise over the variance of f; only of a squared-exponential kernel."""
        log_variance = self._squared_exponential("noise_ratio").log_variance
        return self.scaled_noise / (self.process.scale * jnp.exp(log_variance))

    @property
    def noise_variance(self) -> Float[Array, "*runs"]:
        """The variance of the noise, in squared units of y; warns where it leaves the range of the dtype."""
        return _checks.squared("noise_variance", jnp.sqrt(self.scaled_noise) * self.y_scaler.scale)

    def _squared_exponential(self, asked: str) -> SquaredExponential:
        """The squared-exponential kernel; a TypeError names the quantity `asked` for another kernel."""
        if not isinstance(self.kernel, SquaredExponential):
            raise TypeError(f"{asked} is there for a squared-exponential kernel; this is {type(self.kernel).__name__}.")
        return self.kernel


def _given(kernel: Any, noise: Noise, preset: str | None) -> GivenParts:
    """The checked kernel and noise."""
    is_name = isinstance(kernel, str)
    _checks.check_choice("preset", preset, tuple(_PRESETS))
    if preset and not (is_name and kernel == _SQUARED_EXPONENTIAL and noise.known_variance is None):
        raise ValueError(f"preset={preset!r} has a kernel and a noise of its own: do not give these.")
    if preset and not noise.is_gaussian:
        raise ValueError(f"preset={preset!r} has Gaussian noise; got {type(noise).__name__}.")
    if is_name:
        _checks.check_choice("kernel", kernel, (_SQUARED_EXPONENTIAL, "nngp"))
        if kernel == _SQUARED_EXPONENTIAL:
            return GivenParts.of(None, noise)
        # Imported only here: it imports gpjax, which takes longer than importing all of jaxcal.
        from jaxcal.gp.nngp import NNGP

        kernel = NNGP()
    return GivenParts.of(GPJaxKernel.of("kernel", kernel), noise)


class _ProcessScalers(NamedTuple):
    """The standardizations of the inputs and of the target."""

    x: Standardizer
    y: Standardizer


def _prepared(
    indicators: Any,
    kernel_and_noise: GivenParts,
    preset: str | None,
    robust: bool,
    x: Float[AnyArray, "n d"],
    y: Float[AnyArray, " n"],
    included: Bool[AnyArray, " n"] | None,
) -> tuple[_ProcessScalers, InitialOf, Data]:
    """The scalers, the initial values, and the rows as the process takes them."""
    dtype = np.result_type(x.dtype, y.dtype)
    x, y = x.astype(dtype), y.astype(dtype)
    weights = None if included is None else included.astype(dtype)
    standardize = partial(Standardizer.of, weights=weights)
    scaler = Standardizer.identity if preset == "nngp" else Standardizer.robust if robust else standardize
    scalers = _ProcessScalers(standardize(x).without(indicators), scaler(y))
    initial_of = eqx.Partial(_initial_models, kernel_and_noise, scalers.y, preset)
    return scalers, initial_of, Data.of(scalers.x(x), scalers.y(y), included=included)


def _fit_stochastic(
    columns: Columns, x, y, kernel_and_noise: GivenParts, inference: Stochastic, key
) -> "GaussianProcess":
    """The fit by a bound whose computation reads x part by part."""
    stochastic.check_known(x, y)
    key = stochastic.given_key(key)
    x = unread.unread_rows(x if columns.is_plain else columns(x), y.shape[0])
    x_scaler, y_scaler = unread.standardizer(x, y.dtype).without(columns.indicators), Standardizer.of(y)
    read = stochastic.reader(lambda x, y: Data(x_scaler(x), y_scaler(y)), (x, y), y.dtype)
    initial_of = eqx.Partial(_initial_models, kernel_and_noise, y_scaler, None)
    process = stochastic.maximize_bound(inference, initial_of, read, y.shape[0], key=key)
    return GaussianProcess(process=process, columns=columns, x_scaler=x_scaler, y_scaler=y_scaler)


def _initial_models(
    kernel_and_noise: GivenParts, y_scaler: Standardizer, preset: str | None, data: Data, noise: AnyArray | None = None
) -> Model:
    """The initial values: a grid of lengthscales and noise variances, or the preset's."""
    if preset == "crude":
        # The softplus of 0, log 2, is GPyTorch's initial value; the noise is kept above 1e-4 by adding 1e-4.
        log = jnp.log(jnp.asarray(math.log(2)))
        return initial.at(data, SquaredExponential(log, log), math.log(2) + 1e-4)
    if preset == "nngp":
        return initial.nngp_grid(data, _NNGP_VARIANCES, _NNGP_NOISE)
    noise = kernel_and_noise.scaled_noise(y_scaler.scale) if noise is None else noise
    if kernel_and_noise.kernel is not None:
        return initial.at_given(data, kernel_and_noise.kernel, noise=noise)
    return initial.on_grid(data, [data.points], lambda kernels: kernels[0], noise=noise)


@prediction
def _predict(process: "GaussianProcess", x: tuple[Float[AnyArray, "n d"]], include_noise: bool) -> Normal | StudentT:
    points, scaled_process = process.x_scaler(x[0]), process.process
    latent, scale, df = scaled_process.observed(points) if include_noise else (*scaled_process(points), None)
    center, scale = process.y_scaler.inverse(latent), process.y_scaler.scale * linalg.sqrt(scale)
    return Normal(center, scale) if df is None else StudentT(df, center, scale)
