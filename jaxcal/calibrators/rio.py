"""RIO: a Gaussian process on a model's residuals, whose kernel sees the model's input and its output.

Qiu, Meyerson & Miikkulainen, "Quantifying Point-Prediction Uncertainty in Neural Networks via Residual Estimation
with an I/O Kernel", ICLR 2020. Equation 3, the I/O kernel, is `IOKernel`; 4 is
`functional.gp.exact_log_likelihood`; 5 and 6 are `functional.gp.predict`; section 3.3, the sparse form, is
`functional.gp.collapsed_bound`. The rows of the paper's Table 1, by the arguments of `fit`:

=====  ==========  ==========     ======  ==========  ==========
row    target      kernel         row     target      kernel
=====  ==========  ==========     ======  ==========  ==========
RIO    residual    io             Y+IO    outcome     io
R+I    residual    input          SVGP    outcome     input
R+O    residual    output         Y+O     outcome     output
=====  ==========  ==========     ======  ==========  ==========
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks
from jaxcal.calibrators._base import check_base
from jaxcal.distributions import Distribution, Normal, Point
from jaxcal.functional import gp, safe
from jaxcal.optimize import Optimum, Result
from jaxcal.processes import starts, stochastic
from jaxcal.processes.evidence import (
    Data,
    Fitted,
    GaussianProcess,
    Options,
    maximise,
    predict,
    raise_unless_factorised,
)
from jaxcal.processes.kernels import GPJaxKernel, IOKernel, Points
from jaxcal.scaling import Standardiser


class Setting(NamedTuple):
    """The options of `fit` that decide what is compiled."""

    kernel: str
    target: str
    ard: bool
    paper: bool
    options: Options


def fit(
    x: ArrayLike | None,
    base: Distribution,
    y: ArrayLike,
    *,
    kernel: str | tuple = "io",
    target: str = "residual",
    bound: str = "auto",
    num_inducing: int | None = None,
    inducing: str | None = None,
    ard: bool = False,
    max_iterations: int = 1000,
    tolerance: float | None = None,
    epochs: int = 20,
    preset: str | None = None,
    mesh: Mesh | None = None,
    key: PRNGKeyArray | None = None,
    throw: bool = True,
) -> "RIO":
    """Fit a Gaussian process to the residuals y - base.mean, over the inputs and the predictions.

    The kernel's lengthscales and variances and the noise variance maximise the evidence, or its sparse lower bound,
    by L-BFGS. Of a base with a std of its own, the noise learns how far to follow it: the noise variance of a row is
    a mixture, with a learnt share, of a constant and of the base's variance. Several outputs are as many independent
    processes. Inputs, predictions and target are standardised inside: y -> a y + b changes the prediction exactly
    so, up to rounding. Rows that the base model was trained on have residuals smaller than new ones: where the model
    may have overfitted, fit on rows that it has not seen.

    `preset="paper"` repeats the published setting: the sparse bound with 50 trained inducing points that start at
    the first rows, unit initial hyperparameters, and predictions and target not scaled.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`: one run after another on a CPU, all at
    once on an accelerator. No gradient passes through the fit; predictions are differentiable in x and base.

    Args:
        x: inputs [n, d]; a vector [n] is one column; None where the kernel looks at the output alone.
        base: the model's predictions at x, [n] or of several outputs [n, t]; with a std (a Normal, say) or
            without one (a Point).
        y: targets, of the shape of base.mean.
        kernel: "io", "input" or "output" for squared-exponential kernels; or a pair of gpjax kernels (inputs,
            output), one of which may be None, whose hyperparameters start where they are.
        target: what the process explains: the "residual", or the "outcome" itself (then the prediction does not
            build on the base's mean).
        bound: "exact" is the full process, O(n^3); "collapsed" the sparse one, O(n m^2) with m inducing points;
            "auto" takes the exact one up to 1000 rows. "stochastic" maximises the sparse one over minibatches: for x
            that does not fit in memory, a `numpy.memmap`, of which it holds a chunk of rows at a time. It needs a
            key, and is neither for `jit` nor for several outputs.
        num_inducing: how many inducing points (default 100; 50 with the preset), at most n.
        inducing: "greedy" chooses rows by conditional variance at the start, of a random sample where the bound is
            stochastic; "trained" starts from the first rows, or random ones where it is, and optimises them, as the
            paper does. The default is "greedy", with the preset and the stochastic bound "trained".
        ard: a lengthscale for every input column in place of one for all (RIO, appendix D.4).
        max_iterations: of L-BFGS.
        tolerance: L-BFGS ends after two steps in a row, later than the fourth, that raise the log evidence by less, in
            nats (default 1; 0 with the preset). With 1 the evidence is mostly within one or two nats of the optimum,
            seldom ten, for about half of the steps. In any case L-BFGS ends where scipy's does.
        epochs: passes over the rows of the stochastic bound.
        preset: None, or "paper" as above.
        mesh: devices over all of whose axes the rows of the sparse bound are distributed; None for one device.
        key: random key of the order of the rows of the stochastic bound.
        throw: whether to raise if no jitter makes the covariance positive definite; the module's `result` says
            so in any case.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if an argument is empty, not finite, of the wrong shape or length; if fewer than two rows are
            given; if a std of base is not positive; if the target is constant, so that there is nothing to learn.
        FloatingPointError: if a covariance cannot be factorised, and `throw`.

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
    check_base(base, outputs=True)
    y = _checks.as_vector("y", y) if base.mean.ndim == 1 else _checks.as_matrix("y", y)
    _checks.check_rows("y", y, 2)
    check_base(base, y.shape[0], outputs=True)
    setting = _setting(
        y.shape[0], kernel, target, bound, num_inducing, inducing, ard, max_iterations, tolerance, preset, mesh
    )
    if x is None and setting.kernel != "output":
        raise ValueError("x is None, but the kernel looks at the inputs: give x, or take kernel='output'.")
    given = None if isinstance(kernel, str) else _from_gpjax(kernel)
    _check_spread(base.mean, y, target)
    if bound == "stochastic":
        rio = _fit_stochastic(x, base.mean, _own_std(base), y, given, setting, epochs, key)
    else:
        x = None if setting.kernel == "output" else _checks.as_matrix("x", x, length=y.shape[0])
        rio = _fit(x, base.mean, _own_std(base), y, given, setting)
    if throw:
        raise_unless_factorised(rio.result, rio.jitter, y.shape[0])
    return rio


class RIO(eqx.Module):
    """A Gaussian process on the residuals of a model; made by `fit`.

    With several outputs every array has a leading axis of them.

    Attributes:
        process: kernel and noise with the hyperparameters found, in scaled units.
        points: the conditioning points: training rows, or inducing points.
        posterior: what the data say at them.
        scaled_noise: variance of the noise, in units of the scaled target; the mean one, where rows have their own.
        x_scaler: standardisation of the inputs; None where they are not looked at.
        output_scaler: of the base's means.
        target_scaler: of the residuals or outcomes.
        base_variance: the mean variance that the base gave the training rows; None for a base without one.
        target: "residual" or "outcome".
        evidence: log marginal likelihood, or its lower bound, of the scaled target.
        iterations: of L-BFGS.
        result: how the optimisation ended, one of `jaxcal.optimize.Result`.
        jitter: what had to be added to the covariance's diagonal, as a share of its mean.
    """

    process: GaussianProcess
    points: Points
    posterior: gp.Posterior
    scaled_noise: Float[Array, "*runs"]
    x_scaler: Standardiser | None
    output_scaler: Standardiser
    target_scaler: Standardiser
    base_variance: Float[Array, "*runs"] | None
    target: str = eqx.field(static=True)
    evidence: Float[Array, "*runs"]
    iterations: Int[Array, "*runs"]
    result: Int[Array, "*runs"]
    jitter: Float[Array, "*runs"]

    def __call__(self, x: ArrayLike | None, base: Distribution, *, include_noise: bool = True) -> Normal:
        """The distribution of the targets at the rows of x; RIO, eq. 5 to 7.

        Args:
            x: inputs [n, d]; a vector [n] is one column; None where the kernel looks at the output alone.
            base: the model's predictions at x; with a std of its own if the one of `fit` had one.
            include_noise: whether the variance is that of a new observation, as in the paper's code, or that of
                the latent function alone, as its eq. 6 and 7 print it.
        """
        check_base(base, outputs=True)
        std = _own_std(base)
        if (std is None) != (self.base_variance is None):
            raise ValueError(
                f"base is {type(base).__name__}, {'without' if std is None else 'with'} a std of its own; "
                "RIO was fitted the other way."
            )
        if self.x_scaler is None:
            x = None
        else:
            x = _checks.as_matrix("x", x, length=base.mean.shape[0])
            _checks.check_columns("x", x, self.x_scaler.loc.shape[-1], "RIO was fitted on")
        return _predict(self, x, base.mean, std, include_noise)

    @property
    def kernel(self) -> IOKernel:
        """The kernel with the hyperparameters found, in scaled units."""
        return self.process.kernel

    @property
    def noise_variance(self) -> Float[Array, "*runs"]:
        """The (mean) variance of the noise, in squared units of y."""
        return self.scaled_noise * self.target_scaler.scale**2

    @property
    def converged(self) -> Array:
        """Whether L-BFGS met its stopping rule within the iterations allowed."""
        return self.result == Result.CONVERGED


def _own_std(base: Distribution) -> Array | None:
    return None if isinstance(base, Point) else base.std


def _setting(n, kernel, target, bound, num_inducing, inducing, ard, max_iterations, tolerance, preset, mesh) -> Setting:
    """The options, checked, with the defaults that depend on each other filled in."""
    paper = preset == "paper"
    if isinstance(kernel, str):
        _checks.check_choice("kernel", kernel, ("io", "input", "output"))
    _checks.check_choice("target", target, ("residual", "outcome"))
    _checks.check_choice("preset", preset, (None, "paper"))
    if paper:
        bound = "collapsed" if bound == "auto" else bound
        inducing = inducing or "trained"
        num_inducing = 50 if num_inducing is None else num_inducing
        tolerance = 0.0 if tolerance is None else tolerance
    options = Options.of(n, bound, num_inducing, inducing, max_iterations, tolerance, mesh)
    seen = kernel if isinstance(kernel, str) else _seen_by(kernel)
    return Setting(seen, target, ard, paper, options)


def _seen_by(kernels: tuple) -> str:
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


@eqx.filter_jit
def _fit(x, mean, std, y, given: IOKernel | None, setting: Setting) -> "RIO":
    arrays = lax.stop_gradient((x, mean, std, y))
    dtype = jnp.result_type(*jax.tree.leaves(arrays))
    x, mean, std, y = jax.tree.map(lambda a: a.astype(dtype), arrays)
    fit_one = lambda mean, std, y: _fit_one(x, mean, std, y, given, setting)
    # Several outputs are as many independent processes.
    return fit_one(mean, std, y) if y.ndim == 1 else eqx.filter_vmap(fit_one, in_axes=1)(mean, std, y)


def _fit_one(x, mean, std, y, given: IOKernel | None, setting: Setting) -> "RIO":
    scales = _Scales.of(None if x is None else Standardiser.of(x), mean, std, y, setting)
    data = scales.data(x, mean, std, y, setting)
    optimum, fitted = maximise(_starts(data, given, setting), data, setting.options)
    return _made(optimum, fitted, data.points, fitted.process.noise_variance(data.points), scales, setting)


def _fit_stochastic(x, mean, std, y, given: IOKernel | None, setting: Setting, epochs: int, key) -> "RIO":
    """As `_fit`, but x is read part by part."""
    if y.ndim > 1:
        raise ValueError(f"bound='stochastic' fits one output; y has {y.shape[1]}: fit them one by one.")
    key = stochastic.check_key(key)
    n = y.shape[0]
    x = None if setting.kernel == "output" else stochastic.as_rows(x, n)
    x_scaler = None if x is None else stochastic.standardiser(x, y.dtype)
    scales = _Scales.of(x_scaler, mean, std, y, setting)
    # On the host, where to cut out a part compiles nothing.
    columns = (x, *jax.tree.map(np.asarray, (mean, std, y)))

    def read(part) -> Data:
        x, mean, std, own_y = jax.tree.map(lambda column: jnp.asarray(column[part], y.dtype), columns)
        return scales.data(x, mean, std, own_y, setting)

    starts_of = lambda sample: _starts(sample, given, setting)
    optimum, fitted, noise = stochastic.maximise(starts_of, read, n, setting.options, key=key, epochs=epochs)
    return _made(optimum, fitted, Points(None, None), noise, scales, setting)


class _Scales(NamedTuple):
    """What the rows are scaled by."""

    x: Standardiser | None
    output: Standardiser
    target: Standardiser
    base_variance: Float[Array, ""] | None

    @classmethod
    def of(cls, x_scaler: Standardiser | None, mean, std, y, setting: Setting) -> "_Scales":
        scaler = Standardiser.identity if setting.paper else Standardiser.of
        return cls(
            x_scaler,
            scaler(mean),
            scaler(_explained(mean, y, setting)),
            None if std is None else jnp.mean(std**2),
        )

    def data(self, x, mean, std, y, setting: Setting) -> Data:
        """Rows as the process sees them."""
        spread = None if std is None else std**2 / self.base_variance
        points = _points(x, mean, self.x, self.output, setting.kernel)
        return Data(points, self.target(_explained(mean, y, setting)), spread)


def _explained(mean, y, setting: Setting):
    return y - mean if setting.target == "residual" else y


def _made(optimum: Optimum, fitted: Fitted, rows: Points, noise, scales: _Scales, setting: Setting) -> "RIO":
    inducing = fitted.process.inducing
    return RIO(
        fitted.process,
        rows if inducing is None else inducing,
        fitted.posterior,
        noise,
        scales.x,
        scales.output,
        scales.target,
        scales.base_variance,
        setting.target,
        -optimum.loss,
        optimum.steps,
        optimum.result,
        fitted.jitter,
    )


@eqx.filter_jit
def _predict(rio: "RIO", x, mean, std, include_noise: bool) -> Normal:
    predict_one = lambda rio, mean, std: _predict_one(rio, x, mean, std, include_noise)
    if mean.ndim == 1:
        return predict_one(rio, mean, std)
    return eqx.filter_vmap(predict_one, in_axes=(eqx.if_array(0), 1, 1), out_axes=1)(rio, mean, std)


def _predict_one(rio: "RIO", x, mean, std, include_noise: bool) -> Normal:
    points = _points(x, mean, rio.x_scaler, rio.output_scaler, None)
    latent, variance = predict(rio.kernel, rio.posterior, rio.points, points)
    if include_noise:
        relative = rio.process.relative_noise(None if std is None else std**2 / rio.base_variance)
        variance = variance + rio.scaled_noise * (1 if relative is None else relative)
    explained = rio.target_scaler.inverse(latent)
    return Normal(
        mean + explained if rio.target == "residual" else explained, rio.target_scaler.scale * safe.sqrt(variance)
    )


def _points(x, mean, x_scaler, output_scaler, kernel: str | None) -> Points:
    return Points(
        None if x is None else x_scaler(x),
        None if kernel == "input" else output_scaler(mean)[:, None],
    )


def _starts(data: Data, given: IOKernel | None, setting: Setting) -> GaussianProcess:
    """Where the optimisation may start: a grid of lengthscales and noise; in the paper one start, of ones.

    A kernel that was given starts where it is.
    """
    if setting.paper:
        return starts.at(data, 1.0, 1.0, 1.0, ard=setting.ard, given=given)
    return starts.on_grid(data, ard=setting.ard, given=given)
