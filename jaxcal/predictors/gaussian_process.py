"""A Gaussian process: exact, sparse, or by the nearest rows; with a squared-exponential kernel, or that of a network.

Rasmussen & Williams, "Gaussian Processes for Machine Learning" (2006): eq. 2.25 and 2.26, the prediction, are
`functional.gp.predict`; 2.30, the evidence, is `functional.gp.log_likelihood`. The sparse form, "SVGP", has the
optimal q(u) put into its bound (Titsias 2009, eq. 9): `functional.sparse_gp.collapsed_bound`. `preset="crude"` is the
process of CRUDE (Zelikman, Healy, Zhou & Avati, "CRUDE: Calibrating Regression Uncertainty Distributions Empirically",
2020, appendix A), and `preset="nngp"` the neural-network Gaussian process of RIO's Table 1 (Qiu, Meyerson &
Miikkulainen, "Quantifying Point-Prediction Uncertainty in Neural Networks via Residual Estimation with an I/O Kernel",
2020, appendix D.1), whose kernel is `gp.nngp.NNGP`.
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
from jaxcal.gp.initial import Given
from jaxcal.gp.kernels import GPJaxKernel, SquaredExponential
from jaxcal.gp.model import Data, Model
from jaxcal.gp.padding import prediction
from jaxcal.gp.process import HoldsProcess, Process
from jaxcal.gp.protocols import Inference, InitialOf, Noise
from jaxcal.optimize import as_constants

# By `preset`: how it is fitted.
_PRESETS = {None: None, "crude": Exact(ard=False, learning_rate=0.01), "nngp": Exact(ard=False)}
_SQUARED_EXPONENTIAL = "squared_exponential"
# Weight variances and bias variances of RIO, appendix D.1, and the variance of its noise.
_NNGP_VARIANCES = np.linspace(0.1, 5, 30), np.linspace(0, 2, 30)
_NNGP_NOISE = 0.01


def fit(
    x: Table,
    y: Series,
    *,
    categorical: Categorical = (),
    kernel: Any = "squared_exponential",
    inference: Inference | None = None,
    noise: Noise | None = None,
    preset: str | None = None,
    differentiable: bool = False,
    key: PRNGKeyArray | None = None,
    throw: bool = True,
) -> "GaussianProcess":
    """Fit a Gaussian process whose hyperparameters maximize the evidence, or its sparse lower bound.

    y = f(x) + noise, with f of the covariance v exp(-sum_j (a_j - b_j)^2 / (2 l_j^2)). The lengthscales l, the variance
    v and the variance of the noise begin at the best point of a grid, and end at a maximum above it, if there are
    several. Inputs and target are standardized by the rows given here, so y -> a y + b changes the prediction exactly
    so, up to rounding; constant columns of x are without effect.

    `preset="crude"` repeats CRUDE's setting, that of GPyTorch's examples: the exact process with one lengthscale, by
    Adam with learning rate 0.01, on parameters whose softplus the hyperparameters are, from a lengthscale, variance
    and noise variance of log 2. The paper does not say for how many steps: 1000 come nearer to its Table 1 than the 50
    of the examples, with predictions without the noise (`include_noise=False`). The mean is that of the training
    rows, where the examples learn a constant.

    `kernel="nngp"` is what a network of two infinitely wide hidden layers of ReLU is before its training (Lee et al.
    2018); with `gp.nngp.NNGP` of any depth. `preset="nngp"` has it as RIO's authors: of 30 weight variances from
    0.1 to 5 and 30 bias variances from 0 to 2 the pair of the greatest evidence, the noise 0.01, the target neither
    centered nor scaled. The paper does not say what decides between the pairs. Its kernel is a table of 101 x 151 x 131
    entries, from which it interpolates until a factorization fails; here the kernel is exact.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`: one run after another on a CPU, all at
    once on an accelerator. Predictions are differentiable in x, with `differentiable=True` also in the rows that are
    fitted to.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n].
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        kernel: "squared_exponential", "nngp", or any kernel of gpjax, with its hyperparameters as initial values.
        inference: how it is fitted: `gp.Exact`, `gp.Sparse`, `gp.Nearest` or `gp.Stochastic`, with the options of each.
            None takes the exact process up to 2000 rows. Of more known rows two are fitted, and the one with the lower
            leave-one-out CRPS is taken: up to 5000 rows the exact process or `gp.Nearest`, up to 250,000 `gp.Sparse` or
            `gp.Nearest`. On an accelerator its memory is in place of the 5000. For kernels of gpjax on a CPU 2000 is.
            `gp.Sparse` alone is taken where more than 2000 rows are traced or the noise is not Gaussian, and above
            250,000 rows. `fitted.inference` says what was taken. Here an inference
            has a lengthscale for every column, unless it says otherwise. With fewer than 10 rows a column the evidence
            decides; with fewer than 3, or fewer than 10 and over 100 columns, all have one.
        noise: `gp.GaussianNoise`, the default, with `variance=` where that is known; `gp.StudentTNoise`, so that
            outliers do not decide the fit; or `gp.InputNoise`, of a variance that depends on the inputs.
        preset: None, "crude" or "nngp" as above: kernel and noise are theirs, too.
        differentiable: whether derivatives by x, y and the noise's variance pass through the fit, as of `rio.fit`.
            Those by the initial values of a kernel are 0.
        key: random key of the order of the rows of `gp.Stochastic`; nothing else is random.
        throw: whether to raise if no jitter makes the covariance positive definite; the module's `result` says
            so in any case.

    Raises:
        TypeError: if kernel is neither a name nor a kernel of gpjax; if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape; if fewer than two rows are given; if y is
            constant, so that there is nothing to learn; if an option is out of its range, or does not go with another.
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
    given = _given(kernel, noise, preset)
    in_numpy = given.kernel is None and preset is None
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
        fitted = _fit_stochastic(columns, x, y, given, way.inference, key)
    else:
        rows = columns(x), y
        _checks.check_length("x", rows[0], y.shape[0])
        if not differentiable:
            rows, given = _checks.without_derivative((rows, given), "gaussian_process.fit", "give differentiable=True")
        prepare = eqx.Partial(_prepared, columns.indicators, given, preset, noise.has_heavy_tails)
        scalers, process = fit_rows(prepare, rows, way, in_numpy=in_numpy)
        fitted = GaussianProcess(process=process, columns=columns, x_scaler=scalers.x, y_scaler=scalers.y)
    check_fit(fitted.process, y.shape[0], throw=throw)
    return fitted


class GaussianProcess(HoldsProcess):
    """A Gaussian process after data, with the units of the data; made by `fit`.

    Attributes:
        process: the Gaussian process after data, in scaled units.
        columns: what the columns of the training inputs were.
        x_scaler: standardization of the inputs.
        y_scaler: standardization of the target.
    """

    process: Process
    columns: Columns
    x_scaler: Standardizer
    y_scaler: Standardizer

    def __call__(self, x: Table, *, include_noise: bool = True) -> Normal | StudentT:
        """The distribution of the targets at the rows of x; a StudentT where the noise is one.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.
            include_noise: whether the variance is that of a new observation, or that of f alone.

        Raises:
            ValueError: if x is empty, not finite, or has other columns than the training inputs.
        """
        return _predict(self, (self.columns(x),), include_noise)

    @property
    def kernel(self) -> Any:
        """The kernel with the hyperparameters found, in scaled units: a `SquaredExponential`, or a kernel of gpjax.

        Its variances are those before `process.scale`.
        """
        kernel = self.process.model.kernel
        return kernel.kernel if isinstance(kernel, GPJaxKernel) else kernel

    @property
    def failed_initial_values(self) -> Int[Array, "*runs"]:
        """How many of the initial values, or of the grid of the preset "nngp", had no finite evidence."""
        return self.process.failed_initial_values

    @property
    def lengthscale(self) -> Float[Array, "*runs d"]:
        """The lengthscales, one for each input, in the units of x; of a squared-exponential kernel alone."""
        scale = self.x_scaler.scale
        log_lengthscale = self._squared_exponential("lengthscale").log_lengthscale
        if log_lengthscale.ndim < scale.ndim:
            log_lengthscale = log_lengthscale[..., None]
        return jnp.exp(log_lengthscale) * scale

    @property
    def noise_ratio(self) -> Float[Array, "*runs"]:
        """The variance of the noise over that of f; of a squared-exponential kernel alone."""
        log_variance = self._squared_exponential("noise_ratio").log_variance
        return self.scaled_noise / (self.process.scale * jnp.exp(log_variance))

    @property
    def noise_variance(self) -> Float[Array, "*runs"]:
        """The variance of the noise, in squared units of y; warns where that leaves the range of the dtype."""
        return _checks.squared("noise_variance", jnp.sqrt(self.scaled_noise) * self.y_scaler.scale)

    def _squared_exponential(self, asked: str) -> SquaredExponential:
        """The kernel, if it is one; TypeError, which names what was asked for, if not."""
        if not isinstance(self.kernel, SquaredExponential):
            raise TypeError(f"{asked} is there for a squared-exponential kernel; this is {type(self.kernel).__name__}.")
        return self.kernel


def _given(kernel: Any, noise: Noise, preset: str | None) -> Given:
    """Kernel and noise, checked."""
    by_name = isinstance(kernel, str)
    _checks.check_choice("preset", preset, tuple(_PRESETS))
    if preset and not (by_name and kernel == _SQUARED_EXPONENTIAL and noise.known_variance is None):
        raise ValueError(f"preset={preset!r} has a kernel and a noise of its own.")
    if preset and not noise.is_gaussian:
        raise ValueError(f"preset={preset!r} has Gaussian noise; got {type(noise).__name__}.")
    if by_name:
        _checks.check_choice("kernel", kernel, (_SQUARED_EXPONENTIAL, "nngp"))
        if kernel == _SQUARED_EXPONENTIAL:
            return Given.of(None, noise)
        # Imported only here: it imports gpjax, which takes longer than all of jaxcal.
        from jaxcal.gp.nngp import NNGP

        kernel = NNGP()
    return Given.of(GPJaxKernel.of("kernel", kernel), noise)


class _Scalers(NamedTuple):
    """By what rows are scaled."""

    x: Standardizer
    y: Standardizer


def _prepared(
    indicators: Any,
    given: Given,
    preset: str | None,
    robust: bool,
    x: Float[AnyArray, "n d"],
    y: Float[AnyArray, " n"],
    included: Bool[AnyArray, " n"] | None,
) -> tuple[_Scalers, InitialOf, Data]:
    """By what rows are scaled, the initial values, and the rows as the process takes them."""
    dtype = np.result_type(x.dtype, y.dtype)
    x, y = x.astype(dtype), y.astype(dtype)
    weights = None if included is None else included.astype(dtype)
    standardize = partial(Standardizer.of, weights=weights)
    scaler = Standardizer.identity if preset == "nngp" else Standardizer.robust if robust else standardize
    scalers = _Scalers(standardize(x).without(indicators), scaler(y))
    initial_of = eqx.Partial(_initial_models, given, scalers.y, preset)
    return scalers, initial_of, Data.of(scalers.x(x), scalers.y(y), included=included)


def _fit_stochastic(columns: Columns, x, y, given: Given, inference: Stochastic, key) -> "GaussianProcess":
    """The fit by a bound that reads x part by part."""
    stochastic.check_known(x, y)
    key = stochastic.given_key(key)
    x = unread.unread_rows(x if columns.is_plain else columns(x), y.shape[0])
    x_scaler, y_scaler = unread.standardizer(x, y.dtype).without(columns.indicators), Standardizer.of(y)
    read = stochastic.reader(lambda x, y: Data(x_scaler(x), y_scaler(y)), (x, y), y.dtype)
    initial_of = eqx.Partial(_initial_models, given, y_scaler, None)
    process = stochastic.maximize_bound(inference, initial_of, read, y.shape[0], key=key)
    return GaussianProcess(process=process, columns=columns, x_scaler=x_scaler, y_scaler=y_scaler)


def _initial_models(
    given: Given, y_scaler: Standardizer, preset: str | None, data: Data, noise: AnyArray | None = None
) -> Model:
    """The initial values: a grid of lengthscales and noise; or as the preset has it."""
    if preset == "crude":
        # The softplus of zero, GPyTorch's initial value; the noise is kept above 1e-4 by adding it.
        log = jnp.log(jnp.asarray(math.log(2)))
        return initial.at(data, SquaredExponential(log, log), math.log(2) + 1e-4)
    if preset == "nngp":
        return initial.nngp_grid(data, _NNGP_VARIANCES, _NNGP_NOISE)
    noise = given.scaled_noise(y_scaler.scale) if noise is None else noise
    if given.kernel is not None:
        return initial.at_given(data, given.kernel, noise=noise)
    return initial.on_grid(data, [data.points], lambda kernels: kernels[0], noise=noise)


@prediction
def _predict(process: "GaussianProcess", x: tuple[Float[AnyArray, "n d"]], include_noise: bool) -> Normal | StudentT:
    points, given = process.x_scaler(x[0]), process.process
    latent, scale, df = given.observed(points) if include_noise else (*given(points), None)
    center, scale = process.y_scaler.inverse(latent), process.y_scaler.scale * linalg.sqrt(scale)
    return Normal(center, scale) if df is None else StudentT(df, center, scale)
