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

import operator
import warnings
from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal.calibrators._base import check_base
from jaxcal.distributions import Distribution, Normal
from jaxcal.functional import gp, safe
from jaxcal.optimize import Optimum, Result, first_finite, minimize, one_run_at_a_time
from jaxcal.scaling import Standardiser

# Up to this many rows "auto" takes the exact Gaussian process: O(n^3), but few iterations.
_EXACT_ROWS = 1000
# Greedy inducing points are chosen anew with the hyperparameters that they led to.
_GREEDY_ROUNDS = 3
# Noise below this share of the target's variance is not told from none.
_NOISE_FLOOR = 1e-6
_PREDICTED_AT_ONCE = 2048
# How many amounts of jitter are tried, each a hundred times the one before.
_JITTER_STEPS = 4


class Points(NamedTuple):
    """Where the kernel is evaluated: what went into the model and what came out, or None where it is not looked at."""

    inputs: Float[Array, "n d"] | None
    output: Float[Array, "n 1"] | None


class SquaredExponential(eqx.Module):
    """variance * exp(-|a - b|^2 / (2 lengthscale^2)), a lengthscale for all columns or one each; RIO, eq. 3."""

    log_variance: Float[Array, ""]
    log_lengthscale: Float[Array, ""] | Float[Array, " d"]

    def __call__(self, a: Float[Array, "n d"], b: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The covariance of every row of a with every row of b."""
        return jnp.exp(self.log_variance) * gp.squared_exponential(a, b, jnp.exp(self.log_lengthscale))

    def diagonal(self, a: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variance at every row of a."""
        return jnp.full_like(a[:, 0], jnp.exp(self.log_variance))


class GPJaxKernel(eqx.Module):
    """A kernel of gpjax in the form of `SquaredExponential`."""

    kernel: Any

    def __call__(self, a: Float[Array, "n d"], b: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The covariance of every row of a with every row of b."""
        return self.kernel.cross_covariance(a, b)

    def diagonal(self, a: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variance at every row of a."""
        return jax.vmap(self.kernel)(a, a)


class IOKernel(eqx.Module):
    """k_in(x, x') + k_out(m, m') of inputs x and outputs m, or one of the two alone; RIO, eq. 2."""

    input: SquaredExponential | GPJaxKernel | None
    output: SquaredExponential | GPJaxKernel | None

    def __call__(self, a: Points, b: Points) -> Float[Array, "n m"]:
        """The covariance of every row of a with every row of b."""
        return _sum(part(one, other) for part, one, other in self._parts(a, b))

    def diagonal(self, a: Points) -> Float[Array, " n"]:
        """The variance at every row of a."""
        return _sum(part.diagonal(one) for part, one in self._parts(a))

    def _parts(self, *points: Points) -> Iterable[tuple]:
        """The kernels that there are, each with what it sees of the points."""
        return (seen for seen in zip((self.input, self.output), *points, strict=True) if seen[0] is not None)


class GaussianProcess(eqx.Module):
    """What is learnt by maximising the evidence; inducing points only where they are, too."""

    kernel: IOKernel
    log_noise: Float[Array, ""]
    inducing: Points | None = None

    def noise_variance(self, points: Points) -> Float[Array, ""]:
        """The variance of the noise at the training rows, in units of the scaled target.

        Noise that rounding in the factorisation of the rows' covariance would drown is not told from none.
        """
        prior = self.kernel.diagonal(points)
        return _NOISE_FLOOR + jnp.exp(self.log_noise) + jnp.finfo(prior.dtype).eps * jnp.sum(prior)


class Setting(NamedTuple):
    """The options of `fit` that decide what is compiled."""

    kernel: str
    target: str
    bound: str
    inducing: str
    num_inducing: int
    ard: bool
    max_iterations: int
    paper: bool


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
    preset: str | None = None,
    throw: bool = True,
) -> "RIO":
    """Fit a Gaussian process to the residuals y - base.mean, over the inputs and the predictions.

    The kernel's lengthscales and variances and the noise variance maximise the evidence, or its sparse lower bound,
    by L-BFGS. Inputs, predictions and target are standardised inside: y -> a y + b changes the prediction exactly
    so, up to rounding. Rows that the base model was trained on have residuals smaller than new ones: where the model
    may have overfitted, fit on rows that it has not seen.

    `preset="paper"` repeats the published setting: the sparse bound with 50 trained inducing points that start at
    the first rows, unit initial hyperparameters, and predictions and target not scaled.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`: one run after another on a CPU, all at
    once on an accelerator. No gradient passes through the fit; predictions are differentiable in x and base.

    Args:
        x: inputs [n, d]; a vector [n] is one column; None where the kernel looks at the output alone.
        base: the model's predictions at x. Only their mean is used.
        y: targets [n].
        kernel: "io", "input" or "output" for squared-exponential kernels; or a pair of gpjax kernels (inputs,
            output), one of which may be None, whose hyperparameters start where they are.
        target: what the process explains: the "residual", or the "outcome" itself (then the prediction does not
            build on the base's mean).
        bound: "exact" is the full process, O(n^3); "collapsed" the sparse one, O(n m^2) with m inducing points;
            "auto" takes the exact one up to 1000 rows.
        num_inducing: how many inducing points (default 100; 50 with the preset), at most n.
        inducing: "greedy" chooses rows by conditional variance, two times anew with the hyperparameters found;
            "trained" starts from the first rows and optimises them, as the paper does. The default is "greedy",
            with the preset "trained".
        ard: a lengthscale for every input column in place of one for all (RIO, appendix D.4).
        max_iterations: of L-BFGS (a round, where inducing points are chosen anew).
        preset: None, or "paper" as above.
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
    y = _checks.as_vector("y", y)
    _checks.check_rows("y", y, 2)
    check_base(base, y.shape[0])
    setting = _setting(y.shape[0], kernel, target, bound, num_inducing, inducing, ard, max_iterations, preset)
    if x is None and setting.kernel != "output":
        raise ValueError("x is None, but the kernel looks at the inputs: give x, or take kernel='output'.")
    x = None if setting.kernel == "output" else _checks.as_matrix("x", x, length=y.shape[0])
    _check_spread(base.mean, y, target)
    given = None if isinstance(kernel, str) else _from_gpjax(kernel)
    rio = _fit(x, base.mean, y, given, setting)
    if throw and not _checks.is_traced(rio.result) and np.any(np.asarray(rio.result) == Result.NOT_FINITE):
        raise FloatingPointError(
            f"the covariance of {y.shape[0]} rows could not be factorised, even with a jitter of {rio.jitter:.0e} of "
            "its mean variance. Is a hyperparameter of the kernel negative or extreme? throw=False returns the fit."
        )
    return rio


class RIO(eqx.Module):
    """A Gaussian process on the residuals of a model; made by `fit`.

    Attributes:
        kernel: with the hyperparameters found, in scaled units.
        points: the conditioning points: training rows, or inducing points.
        posterior: what the data say at them.
        scaled_noise: variance of the noise, in units of the scaled target.
        x_scaler: standardisation of the inputs; None where they are not looked at.
        output_scaler: of the base's means.
        target_scaler: of the residuals or outcomes.
        target: "residual" or "outcome".
        evidence: log marginal likelihood, or its lower bound, of the scaled target.
        iterations: of L-BFGS, in the round that was best.
        result: how the optimisation ended, one of `jaxcal.optimize.Result`.
        jitter: what had to be added to the covariance's diagonal, as a share of its mean.
    """

    kernel: IOKernel
    points: Points
    posterior: gp.Posterior
    scaled_noise: Float[Array, "*runs"]
    x_scaler: Standardiser | None
    output_scaler: Standardiser
    target_scaler: Standardiser
    target: str = eqx.field(static=True)
    evidence: Float[Array, "*runs"]
    iterations: Int[Array, "*runs"]
    result: Int[Array, "*runs"]
    jitter: Float[Array, "*runs"]

    def __call__(self, x: ArrayLike | None, base: Distribution, *, include_noise: bool = True) -> Normal:
        """The distribution of the targets at the rows of x; RIO, eq. 5 to 7.

        Args:
            x: inputs [n, d]; a vector [n] is one column; None where the kernel looks at the output alone.
            base: the model's predictions at x.
            include_noise: whether the variance is that of a new observation, as in the paper's code, or that of
                the latent function alone, as its eq. 6 and 7 print it.
        """
        check_base(base)
        if self.x_scaler is None:
            x = None
        else:
            x = _checks.as_matrix("x", x, length=base.mean.shape[0])
            num_columns = self.x_scaler.loc.shape[-1]
            if x.shape[1] != num_columns:
                raise ValueError(f"x has {x.shape[1]} columns; RIO was fitted on {num_columns}.")
        return _predict(self, x, base.mean, include_noise)

    @property
    def noise_variance(self) -> Float[Array, "*runs"]:
        """The variance of the noise, in squared units of y."""
        return self.scaled_noise * self.target_scaler.scale**2

    @property
    def converged(self) -> Array:
        """Whether L-BFGS met its stopping rule within the iterations allowed."""
        return self.result == Result.CONVERGED


def _setting(n, kernel, target, bound, num_inducing, inducing, ard, max_iterations, preset) -> Setting:
    """The options, checked, with the defaults that depend on each other filled in."""
    paper = preset == "paper"
    if isinstance(kernel, str):
        _checks.check_choice("kernel", kernel, ("io", "input", "output"))
    _checks.check_choice("target", target, ("residual", "outcome"))
    _checks.check_choice("bound", bound, ("auto", "exact", "collapsed"))
    _checks.check_choice("inducing", inducing, (None, "greedy", "trained"))
    _checks.check_choice("preset", preset, (None, "paper"))
    _checks.check_at_least("max_iterations", max_iterations, 1)
    if bound == "auto":
        bound = "exact" if n <= _EXACT_ROWS and not paper else "collapsed"
    num_inducing = (50 if paper else 100) if num_inducing is None else num_inducing
    _checks.check_at_least("num_inducing", num_inducing, 1)
    if num_inducing > n and bound == "collapsed":
        warnings.warn(f"num_inducing is {num_inducing}, but there are {n} rows; {n} are taken.", stacklevel=3)
    seen = kernel if isinstance(kernel, str) else _seen_by(kernel)
    inducing = inducing or ("trained" if paper else "greedy")
    return Setting(seen, target, bound, inducing, min(num_inducing, n), ard, max_iterations, paper)


def _seen_by(kernels: tuple) -> str:
    if not isinstance(kernels, tuple) or len(kernels) != 2 or kernels == (None, None):
        raise ValueError(
            f"kernel must be 'io', 'input', 'output' or a pair of gpjax kernels (inputs, output); got {kernels!r}."
        )
    inputs, output = kernels
    return "input" if output is None else "output" if inputs is None else "io"


def _from_gpjax(kernels: tuple) -> IOKernel:
    # Imported only here: it takes longer to import than all of jaxcal.
    from gpjax.kernels import AbstractKernel

    for kernel in kernels:
        if kernel is not None and not isinstance(kernel, AbstractKernel):
            raise TypeError(f"kernel must hold gpjax kernels; got {type(kernel).__name__}.")
    return IOKernel(*(None if kernel is None else GPJaxKernel(kernel) for kernel in kernels))


def _check_spread(mean: Array, y: Array, target: str) -> None:
    """Raise if the target does not vary by more than rounding."""
    if _checks.is_traced(mean, y):
        return
    values = np.asarray(y) - np.asarray(mean) if target == "residual" else np.asarray(y)
    rounding = 4 * np.finfo(values.dtype).eps * max(np.abs(np.asarray(y)).max(), np.abs(np.asarray(mean)).max())
    if np.ptp(values) <= rounding:
        name = "the residuals y - base.mean are" if target == "residual" else "y is"
        raise ValueError(f"{name} constant ({values[0]:g}): there is no uncertainty to learn from.")


@eqx.filter_jit
def _fit(x, mean, y, given: IOKernel | None, setting: Setting) -> RIO:
    x, mean, y = lax.stop_gradient((x, mean, y))
    dtype = jnp.result_type(*(a for a in (x, mean, y) if a is not None))
    x, mean, y = jax.tree.map(lambda a: a.astype(dtype), (x, mean, y))
    scaler = Standardiser.identity if setting.paper else Standardiser.of
    x_scaler = None if x is None else Standardiser.of(x)
    output_scaler = scaler(mean)
    explained = y - mean if setting.target == "residual" else y
    target_scaler = scaler(explained)
    points = _points(x, mean, x_scaler, output_scaler, setting.kernel)
    targets = target_scaler(explained)
    initial = _initial(points, given, setting, dtype)
    optimum = _optimise(initial, points, targets, setting)
    process, posterior, jitter = optimum.params
    return RIO(
        process.kernel,
        points if process.inducing is None else process.inducing,
        posterior,
        process.noise_variance(points),
        x_scaler,
        output_scaler,
        target_scaler,
        setting.target,
        -optimum.loss,
        optimum.steps,
        optimum.result,
        jitter,
    )


@eqx.filter_jit
def _predict(rio: RIO, x, mean, include_noise: bool) -> Normal:
    points = _points(x, mean, rio.x_scaler, rio.output_scaler, None)

    def at(point: Points):
        row = jax.tree.map(lambda a: a[None], point)
        cross = rio.kernel(row, rio.points)[0]
        return gp.predict(rio.posterior, cross, rio.kernel.diagonal(row)[0])

    latent, variance = lax.map(at, points, batch_size=_PREDICTED_AT_ONCE)
    if include_noise:
        variance = variance + rio.scaled_noise
    explained = rio.target_scaler.inverse(latent)
    return Normal(
        mean + explained if rio.target == "residual" else explained, rio.target_scaler.scale * safe.sqrt(variance)
    )


def _points(x, mean, x_scaler, output_scaler, kernel: str | None) -> Points:
    return Points(
        None if x is None else x_scaler(x),
        None if kernel == "input" else output_scaler(mean)[:, None],
    )


def _initial(points: Points, given: IOKernel | None, setting: Setting, dtype) -> GaussianProcess:
    """Where the optimisation starts; the paper's start is one for every hyperparameter."""
    if given is None:
        seen = sum(p is not None for p in points)
        given = IOKernel(*(None if p is None else _start(p, seen, setting, dtype) for p in points))
    log_noise = jnp.log(jnp.asarray(1 if setting.paper else 0.1, dtype))
    inducing = None
    if setting.bound == "collapsed":
        inducing = jax.tree.map(lambda a: a[: setting.num_inducing], points)
    return GaussianProcess(given, log_noise, inducing)


def _start(points: Float[Array, "n d"], kernels: int, setting: Setting, dtype) -> SquaredExponential:
    """Standardised rows lie about sqrt(2 d) apart; the variance is shared between the kernels."""
    d = points.shape[1]
    variance, lengthscale = (1, 1) if setting.paper else (1 / kernels, np.sqrt(d))
    shape = (d,) if setting.ard and d > 1 else ()
    return SquaredExponential(jnp.log(jnp.asarray(variance, dtype)), jnp.full(shape, np.log(lengthscale), dtype))


def _optimise(initial: GaussianProcess, points: Points, targets: Float[Array, " n"], setting: Setting) -> Optimum:
    """The process of the greatest evidence, its posterior, and the smallest jitter at which both are finite."""
    arrays, static = eqx.partition(initial, eqx.is_array)

    def run(arrays, points, targets):
        initial = eqx.combine(arrays, static)

        def attempt(tries):
            jitter = _jitter(tries, targets.dtype, setting.bound)
            if setting.bound == "collapsed" and setting.inducing == "greedy":
                optimum = _with_greedy_points(initial, points, targets, jitter, setting)
            else:
                optimum = _maximise(initial, points, targets, jitter, setting)
            posterior = _posterior(optimum.params, points, targets, jitter)
            finite = jnp.isfinite(posterior.weights).all() & jnp.isfinite(posterior.shrink).all()
            return optimum._replace(
                params=(eqx.filter(optimum.params, eqx.is_array), posterior, jitter),
                result=jnp.where(finite, optimum.result, Result.NOT_FINITE),
            )

        return first_finite(attempt, _JITTER_STEPS)

    optimum = one_run_at_a_time(run)(arrays, points, targets)
    arrays, *rest = optimum.params
    return optimum._replace(params=(eqx.combine(arrays, static), *rest))


def _jitter(step: Int[Array, ""], dtype, bound: str) -> Float[Array, ""]:
    """The share of the mean variance that is added to the diagonal: a hundred times more at each step.

    Noise is on the exact process's diagonal already: it starts without.
    """
    least = max(1e-8, 10 * float(jnp.finfo(dtype).eps))
    jitter = least * jnp.asarray(100, dtype) ** step
    return jnp.where(step > 0, jitter, 0) if bound == "exact" else jitter


def _with_greedy_points(
    initial: GaussianProcess,
    points: Points,
    targets: Float[Array, " n"],
    jitter: Float[Array, ""],
    setting: Setting,
) -> Optimum:
    """Inducing points chosen with the hyperparameters at hand, these then optimised; again; the best kept."""

    def again(best: Optimum, _):
        process = eqx.combine(best.params, fixed)
        rows = gp.greedy_rows(
            lambda row: process.kernel(_take(points, row[None]), points)[0],
            process.kernel.diagonal(points),
            setting.num_inducing,
        )
        process = eqx.tree_at(lambda p: p.inducing, process, _take(points, rows))
        found = _maximise(process, points, targets, jitter, setting)
        found = found._replace(params=eqx.filter(found.params, eqx.is_array))
        return jax.tree.map(lambda new, old: jnp.where(found.loss < best.loss, new, old), found, best), None

    arrays, fixed = eqx.partition(initial, eqx.is_array)
    nothing = Optimum(arrays, jnp.full((), jnp.inf, targets.dtype), jnp.int32(0), jnp.int32(Result.NOT_FINITE))
    best, _ = lax.scan(again, nothing, length=_GREEDY_ROUNDS)
    return best._replace(params=eqx.combine(best.params, fixed))


def _maximise(
    initial: GaussianProcess,
    points: Points,
    targets: Float[Array, " n"],
    jitter: Float[Array, ""],
    setting: Setting,
) -> Optimum:
    """Maximise the evidence over the hyperparameters, and over the inducing points where they are trained."""
    learnt = jax.tree.map(eqx.is_inexact_array, initial)
    if setting.inducing == "greedy":
        learnt = eqx.tree_at(lambda p: p.inducing, learnt, False, is_leaf=lambda node: node is None)
    params, fixed = eqx.partition(initial, learnt)

    def loss(params):
        return -_evidence(eqx.combine(params, fixed), points, targets, jitter)

    optimum = minimize(loss, params, max_iterations=setting.max_iterations)
    return optimum._replace(params=eqx.combine(optimum.params, fixed))


def _evidence(process: GaussianProcess, points: Points, targets, jitter) -> Float[Array, ""]:
    kernel, noise = process.kernel, process.noise_variance(points)
    if process.inducing is None:
        return gp.exact_log_likelihood(_gram(kernel, points, jitter, noise), targets)
    gram_zx = kernel(process.inducing, points)
    return gp.collapsed_bound(_gram(kernel, process.inducing, jitter), gram_zx, kernel.diagonal(points), targets, noise)


def _posterior(process: GaussianProcess, points: Points, targets, jitter) -> gp.Posterior:
    kernel, noise = process.kernel, process.noise_variance(points)
    if process.inducing is None:
        return gp.exact_posterior(_gram(kernel, points, jitter, noise), targets)
    gram_zx = kernel(process.inducing, points)
    return gp.sparse_posterior(_gram(kernel, process.inducing, jitter), gram_zx, targets, noise)


def _gram(kernel: IOKernel, points: Points, jitter: Array, noise: ArrayLike = 0) -> Float[Array, "n n"]:
    """The covariance of the points with themselves, with jitter and noise on the diagonal."""
    return gp.add_diagonal(kernel(points, points), jitter * jnp.mean(kernel.diagonal(points)) + noise)


def _take(points: Points, rows: Int[Array, " m"]) -> Points:
    return jax.tree.map(lambda a: a[rows], points)


def _sum(terms: Iterable[Array]) -> Array:
    return reduce(operator.add, terms)
