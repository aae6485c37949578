"""The base classes of inferences and noises, and the functions that inferences share."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Int

from jaxcal import _checks
from jaxcal._numpy import AnyArray, as_numpy, is_known, namespace, part
from jaxcal.functional import gp
from jaxcal.gp import model as models
from jaxcal.gp.bound_host import loss_of
from jaxcal.gp.model import Data, Model, SearchResult
from jaxcal.gp.process import Process, process_of
from jaxcal.optimize import Result, descend, minimize

# A function of the rows and of the variance of their noise, or None if it is not known. It gives the initial values:
# models without inducing points, stacked along a leading axis of their arrays.
InitialOf = Callable[[Data, Any], Model]

# Gives the greatest exact evidence of some of many rows, a `host.First`; None if it is not known.
First = Callable[[], Any] | None

S = TypeVar("S")
I = TypeVar("I", bound="Inference")
N = TypeVar("N", bound="Noise")
# Gives the scales of the rows, the initial values, and the rows in the form that the process takes.
Prepare = Callable[..., tuple[S, InitialOf, Data]]

_ARDS = (None, True, False, "auto")
# With more rows "auto" means a lengthscale for every column. Their gain may show with many rows alone, and a
# superfluous lengthscale costs little there.
MANY_ROWS = 2000
# Lengthscales by column fit the noise of few rows: with 100 columns and 150 rows, 90 % intervals covered 30 to 39 %
# (benchmarks/speed/gp_columns.py). With fewer than 10 rows for each input the evidence decides. If there are also fewer
# than 3 rows for each input, or more than 100 inputs, one lengthscale is used. Ascents by column take too long there.
_ROWS_BY_COLUMN, _FEWEST_BY_COLUMN, _MOST_BY_COLUMN = 10, 3, 100


class Inference(eqx.Module):
    """How hyperparameters are found, and how the posterior under them is computed.

    Numbers are arrays while a process is fitted, so that another value compiles nothing.

    Attributes:
        ard: True for a lengthscale for every input column, False for one lengthscale for all columns, "auto" for the
            better of the two by the evidence. With "auto" each further lengthscale must raise the log evidence by
            log(n) / 2 nats. With more than 2000 rows "auto" is True. None for the method's default.
        tolerance: the fit ends when the predicted rise of the log evidence is less, in nats. None for the default.
        max_iterations: the most steps of the optimizer.
    """

    ard: eqx.AbstractVar[bool | str | None]
    tolerance: eqx.AbstractVar[Any]
    max_iterations: eqx.AbstractVar[Any]

    def __check_init__(self) -> None:
        """Check the options."""
        _checks.check_choice("ard", self.ard, _ARDS)
        if self.tolerance is not None:
            _checks.check_not_negative("tolerance", self.tolerance)
        if not _checks.is_traced(self.max_iterations):
            _checks.check_at_least("max_iterations", self.max_iterations, 1)

    @abstractmethod
    def settled(self, n: int, noise: "Noise", *, differentiable: bool) -> "Inference":
        """The same with the defaults for n rows.

        Raises:
            ValueError: if the inference does not support this noise, or derivatives.
        """

    @property
    def is_host_driven(self) -> bool:
        """Whether the host can drive a fit to known rows, with NumPy's arrays or JAX's.

        The fit computes with NumPy, or in functions of `_numpy.part`, which are small programs for JAX's arrays.
        """
        return False

    @property
    def takes_many_steps(self) -> bool:
        """Whether the fit takes hundreds of quick steps. Then one compiled loop is faster than a host."""
        return False

    @abstractmethod
    def search(
        self, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> SearchResult:
        """The best hyperparameters that are found from initial models along a leading axis.

        It is a part of a compiled program; with `is_host_driven` it takes known arrays, too.

        Args:
            initial_models: the initial models, without inducing points.
            data: the rows.
            jitter: as a fraction of the mean prior variance.
            first: where the search may begin, of NumPy's arrays.
        """

    def problem(self, model: Model, data: Data, jitter: Float[AnyArray, ""], kept: Any) -> "MinimizationProblem":
        """The minimization problem of the search near a model, by the data; for `differentiable=True` alone.

        Args:
            model: the result of the search, without inducing points.
            data: the rows.
            jitter: as a fraction of the mean prior variance.
            kept: the rows that are inducing points or neighbors, a result of `kept`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no derivatives.")

    def kept(self, process: Process, data: Data) -> Any:
        """The rows, by number, that a fitted process depends on as inducing points or neighbors; None for all."""
        del process, data

    def climb(self, problem: "MinimizationProblem", jitter: Float[AnyArray, ""]) -> Float[AnyArray, " p"]:
        """The vector of the least loss near the vector of the problem's model, to the last digits."""
        del jitter
        start, most = problem.vector_of(problem.model), self.max_iterations
        return minimize(problem.loss, start, max_iterations=most, loss_tolerance=1e-13, gradient_tolerance=1e-6).params

    def conclude(self, optimum: SearchResult, data: Data, jitter: Float[AnyArray, ""]) -> Process:
        """The process after data at the hyperparameters found."""
        return process_of(optimum, data, jitter, self.devices)

    @property
    def devices(self) -> Mesh | None:
        """The devices over which rows are distributed; None for one device."""
        return None

    @property
    def by_newton(self) -> bool:
        """Whether Newton steps maximize the exact evidence."""
        return False

    def with_ard(self: I, ard: bool | str, n: int, inputs: int) -> I:
        """The same inference with `ard` in place of None; "auto" becomes True if n is large.

        With few rows for each input, None becomes "auto" if `ard` is not False. With even fewer rows, it becomes False.
        """
        if self.ard is not None:
            ard = self.ard
        elif n < _ROWS_BY_COLUMN * inputs:
            ard = "auto" if ard and n >= _FEWEST_BY_COLUMN * inputs and inputs <= _MOST_BY_COLUMN else False
        return replace(self, ard=True if ard == "auto" and n > MANY_ROWS else ard)

    def jitter_of_try(self, step: Int[AnyArray, ""], dtype: DTypeLike) -> Float[AnyArray, ""]:
        """The jitter of a try, a fraction of the mean variance: a hundred times the jitter of the try before."""
        return models.jitter_of_try(step, dtype)

    def with_limits(self: I, max_iterations: int, tolerance: float) -> I:
        """The same with one lengthscale for all columns, and with these limits of the search."""
        there = lambda inference: (inference.max_iterations, inference.tolerance)
        limited = eqx.tree_at(there, self, (np.int32(max_iterations), np.float32(tolerance)))
        return replace(limited, ard=False)

    def of_arrays(self: I) -> I:
        """The same with numbers as arrays, so that a compiled program does not depend on their values."""

        def as_array(leaf: Any) -> Any:
            if isinstance(leaf, bool | str) or not (is_known(leaf) and eqx.is_array_like(leaf)):
                return leaf
            array = np.asarray(leaf)
            return array.astype(np.float32 if np.issubdtype(array.dtype, np.floating) else np.int32)

        whole = isinstance(self.tolerance, int)  # 1 nat is 1.0
        return jax.tree.map(as_array, replace(self, tolerance=float(self.tolerance)) if whole else self)

    def evidence(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
        """The evidence of a model: `model.evidence`."""
        return models.evidence(model, data, jitter, self.devices)

    def posterior(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> gp.Posterior:
        """The posterior under a model: `model.posterior`."""
        return models.posterior(model, data, jitter, self.devices)

    def descend(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> SearchResult:
        """The model of the greatest evidence near this one, by L-BFGS."""
        return descended(self, model, data, jitter)

    def refine(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> SearchResult:
        """The model of the greatest evidence near this one, whose inducing points stay."""
        return descended(self, model, data, jitter)


class Noise(eqx.Module):
    """How targets scatter around the latent function, and how a process with it is fitted.

    Attributes:
        is_host_driven: whether the host can drive a fit, as of `Inference`.
    """

    is_host_driven: ClassVar[bool] = False

    @property
    @abstractmethod
    def is_gaussian(self) -> bool:
        """Whether the noise is Gaussian, with one variance, or with a variance that follows the base's variance."""

    @property
    def has_heavy_tails(self) -> bool:
        """Whether scales of targets must not follow outliers."""
        return False

    @property
    def known_variance(self) -> ArrayLike | None:
        """The known variance, in squared units of y; None if it is learned."""
        return None

    def first_data(self, data: Data) -> Data:
        """The rows, with all that is known about their noise before a search."""
        return data

    def of_arrays(self: N) -> N:
        """The same with numbers as arrays, so that a compiled program does not depend on their values."""
        return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, int | float) else leaf, self)

    @abstractmethod
    def fit(
        self,
        inference: "Inference",
        initial_of: InitialOf,
        data: Data,
        jitter: Float[AnyArray, ""],
        first: First = None,
    ) -> Process:
        """The process with this noise; a part of a compiled program, and with `is_host_driven` for known arrays, too.

        Args:
            inference: how hyperparameters are found.
            initial_of: gives the initial values.
            data: the rows.
            jitter: as a fraction of the mean prior variance.
            first: where a search may begin, of NumPy's arrays.
        """


class MinimizationProblem(NamedTuple):
    """The minimization problem near an optimum.

    Attributes:
        model: a model near the optimum.
        data: the rows that decide.
        vector_of: gives the vector of a model's learned parameters.
        model_of: gives the model of such a vector.
        loss: the loss of a vector, with the penalty beyond the bounds.
    """

    model: Model
    data: Data
    vector_of: Callable[[Model], Float[AnyArray, " p"]]
    model_of: Callable[[Float[AnyArray, " p"]], Model]
    loss: Callable[[Float[AnyArray, " p"]], Float[AnyArray, ""]]

    @classmethod
    def of(
        cls, model: Model, data: Data, loss: Callable[[Model], Array], *, trained: bool = False, n: int | None = None
    ) -> "MinimizationProblem":
        """The problem of a model, and of its inducing points if they are trained; `n` as of `cost_beyond_bounds`."""
        model_of, cost = models.as_vector(model, with_inducing=trained)[1], models.cost_beyond_bounds(model, data, n)

        def total(vector: Float[AnyArray, " p"]) -> Float[AnyArray, ""]:
            model = model_of(vector)
            return cost(model) + loss(model)

        vector_of = lambda model: models.as_vector(model, with_inducing=trained)[0]
        return cls(model=model, data=data, vector_of=vector_of, model_of=model_of, loss=total)

    def loss_with_gradient(self, vector: Float[AnyArray, " p"]) -> tuple[Float[Array, ""], Float[Array, " p"]]:
        """The loss at a vector, and its gradient."""
        return jax.value_and_grad(self.loss)(vector)


def descended(
    inference: Inference, model: Model, data: Data, jitter: Float[AnyArray, ""], *, with_inducing: bool = False
) -> SearchResult:
    """The model of the greatest evidence near this one, by L-BFGS; its inducing points move if `with_inducing`."""
    on_host, dtype = is_known(model, data), data.targets.dtype
    model = as_numpy(model) if on_host else model
    vector, model_of = models.as_vector(model, with_inducing=with_inducing)
    if not vector.size:
        return best_initial(models.alone(model), data, jitter)
    if namespace(data.targets) is np:
        vector, evaluate = vector.astype(float), loss_of(model, data, jitter, with_inducing=with_inducing)
    else:
        near = partial(_near, inference, model, data, jitter, with_inducing=with_inducing)
        evaluate = in_numpy(near) if on_host else near
    xp, limits = namespace(vector), {"max_iterations": inference.max_iterations, "gain_tolerance": inference.tolerance}
    optimum = descend(evaluate, vector, **limits, on_host=on_host)
    return SearchResult(
        model=model_of(optimum.params.astype(dtype)),
        evidence=-optimum.loss.astype(dtype),
        steps=xp.asarray(optimum.steps, np.int32),
        result=xp.where(xp.isfinite(optimum.loss), optimum.result, Result.NOT_FINITE).astype(np.int32),
        failed_initial_values=xp.zeros((), np.int32),
    )


@part
def _near(
    inference: Inference,
    model: Model,
    data: Data,
    jitter: Float[AnyArray, ""],
    vector: Float[AnyArray, " p"],
    *,
    with_inducing: bool,
) -> tuple[Float[AnyArray, ""], Float[AnyArray, " p"]]:
    """The loss of a vector, and its gradient: the negative evidence plus the penalty beyond the bounds."""
    loss = lambda model: -inference.evidence(model, data, jitter)
    return MinimizationProblem.of(model, data, loss, trained=with_inducing).loss_with_gradient(vector)


def in_numpy(function: Callable[..., Any]) -> Callable[[Float[np.ndarray, " p"]], Any]:
    """A function of a vector for the host to call: it gives NumPy's arrays."""
    return lambda vector: as_numpy(function(vector))


@part
def initial_models(initial_of: InitialOf, data: Data, variance: Any = None) -> Model:
    """The initial values for rows; arguments as of `InitialOf`."""
    return initial_of(data, variance)


@part
def best_initial(initial_models: Model, data: Data, jitter: ArrayLike) -> SearchResult:
    """The model of the greatest exact evidence among initial models along the leading axis of their arrays."""
    best, values = models.greatest(initial_models, lambda model: models.evidence(model, data, jitter))
    xp = namespace(values)
    is_nan = xp.isnan(values)
    return SearchResult(
        model=models.one_of(initial_models, best),
        evidence=values[best],
        steps=xp.zeros((), np.int32),
        result=xp.where(is_nan[best], Result.NOT_FINITE, Result.CONVERGED).astype(np.int32),
        failed_initial_values=is_nan.sum(dtype=np.int32),
    )


def has_more_to_learn(model: Model) -> bool:
    """Whether the model has hyperparameters that are not fixed."""
    return bool(jax.tree.leaves(models.split(model)[0]))
