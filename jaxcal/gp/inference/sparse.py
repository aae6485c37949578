"""The sparse process, which conditions on all rows through a few inducing points."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Float, Int

from jaxcal import _checks
from jaxcal._numpy import ARRAYS, AnyArray, is_array, is_known, namespace, part
from jaxcal.functional import sparse_gp
from jaxcal.gp import model as models
from jaxcal.gp.inference.exact import TOLERANCE, Exact, exact_search
from jaxcal.gp.kernels import Kernel, Points, take
from jaxcal.gp.model import Data, Model, SearchResult, alone
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, MinimizationProblem, Noise, best_initial, descended, has_more_to_learn
from jaxcal.optimize import Result, as_constants

# Fewer inducing points are faster and less exact: benchmarks/results/gp_inducing.txt.
_NUM_INDUCING = 800
# The search may begin at the optimum of the exact evidence of this many rows.
_SUBSET_ROWS = 1000
# This optimum and the initial models are compared by the bound of 4000 rows with 100 inducing points. They are also
# compared with the noise at these fractions of the target's variance.
_COMPARED_ROWS, _COMPARED_POINTS, _MORE_NOISE = 4000, 100, (0.1, 0.5)
# Greedy inducing points are chosen among this many rows, which then decide on the hyperparameters.
_MANY_ROWS = 10_000


class Sparse(Inference):
    """The process through m inducing points: O(n m^2) time.

    The hyperparameters maximize log N(y; 0, Q + noise I) - tr(K - Q) / (2 noise), with Q = K_xz K_zz^-1 K_zx: Titsias
    (2009), eq. 9. This is the bound of SVGP with the optimal q(u) (`functional.sparse_gp.collapsed_bound`). L-BFGS
    begins at the best of several models by this bound. One of these models is the exact optimum of 1000 rows.

    Attributes:
        num_inducing: how many inducing points, at most n. None for 800.
        points: "greedy" chooses rows by conditional variance at the initial values. Above 10,000 rows, 10,000 of them
            decide on the hyperparameters. The option "trained" begins with the first rows and moves the points with the
            hyperparameters. An array [m] of integers gives the rows by their numbers.
        ard: as of `Exact`.
        tolerance: as of `Exact`; None for 1 nat.
        max_iterations: the most steps of L-BFGS.
        mesh: the devices; the rows are distributed over all axes of the mesh. None for one device.

    Raises:
        ValueError: if an option is out of its range, or `num_inducing` is given beside an array of points.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> x = np.linspace(0, 6, 60)
        >>> y = np.sin(x) + 0.1 * np.cos(37 * x)
        >>> fitted = jc.gaussian_process.fit(x, y, inference=jc.gp.Sparse(num_inducing=10))
        >>> fitted.points.shape
        (10, 1)
    """

    num_inducing: int | None = eqx.field(static=True, default=None)
    points: Any = "greedy"
    ard: bool | str | None = eqx.field(static=True, default=None)
    tolerance: Any = None
    max_iterations: Any = 1000
    mesh: Mesh | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        """Check the options."""
        if self.num_inducing is not None:
            _checks.check_at_least("num_inducing", self.num_inducing, 1)
        if isinstance(self.points, str):
            _checks.check_choice("points", self.points, ("greedy", "trained"))
        elif self.num_inducing is not None:
            raise ValueError("points has the numbers of the rows: leave num_inducing out.")
        elif not _are_numbers(self.points):
            raise ValueError(
                f"points must be 'greedy', 'trained' or an array [m] of the rows' numbers; got {self.points!r}."
            )

    def settled(self, n: int, noise: Noise, *, differentiable: bool) -> "Sparse":
        """The same with the number of points and the tolerance for n rows."""
        if differentiable and self.mesh is not None:
            raise ValueError("differentiable=True goes with rows on one device: leave mesh out.")
        number = len(self.points) if not isinstance(self.points, str) else self.num_inducing or _NUM_INDUCING
        if number > n and self.num_inducing is not None:
            _checks.warn(f"num_inducing is {number}, but there are {n} rows; {n} are taken.")
        if not isinstance(self.points, str) and not _checks.is_traced(self.points):
            numbers = np.asarray(self.points)
            least, most = numbers.min(), numbers.max()
            if least < 0 or most >= n:
                raise ValueError(f"points must be numbers of the {n} rows, 0 to {n - 1}; got {least} to {most}.")
        tolerance = 1.0 if self.tolerance is None else self.tolerance
        number = None if not isinstance(self.points, str) else min(number, n)
        return replace(self, num_inducing=number, tolerance=tolerance)

    @property
    def devices(self) -> Mesh | None:
        """The mesh."""
        return self.mesh

    @property
    def is_trained(self) -> bool:
        """Whether the inducing points move."""
        return isinstance(self.points, str) and self.points == "trained"

    @property
    def is_host_driven(self) -> bool:
        """True on one device: `gp.bound_host` computes in NumPy, and small programs compute the rest."""
        return self.mesh is None

    @property
    def takes_many_steps(self) -> bool:
        """Whether inducing points move."""
        return self.is_trained

    def search(
        self, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> SearchResult:
        """The optimum of the bound, from the best of several models."""
        best = sparse_initial(self, initial_models, data, jitter, first)
        model = self.with_inducing_points(best.model, data)
        rows = self.rows_that_decide(data)
        optimum = self.descend(model, rows, jitter)
        if rows is not data:
            optimum = optimum._replace(evidence=self.evidence(optimum.model, data, jitter))
        return optimum._replace(failed_initial_values=best.failed_initial_values)

    def descend(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> SearchResult:
        """The model of the greatest bound near this one, by L-BFGS; trained inducing points move."""
        return descended(self, model, data, jitter, with_inducing=self.is_trained)

    def refine(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> SearchResult:
        """The model of the greatest bound near this one, by L-BFGS; the inducing points stay."""
        return descended(self, model, data, jitter)

    def rows_that_decide(self, data: Data) -> Data:
        """The rows that decide on the hyperparameters: a part of many, on one device, if inducing points stay."""
        return data if self.mesh is not None or self.is_trained else models.some_rows(data, _MANY_ROWS)

    def with_inducing_points(self, model: Model, data: Data) -> Model:
        """The model with its inducing points."""
        chooses = isinstance(self.points, str) and not self.is_trained
        inducing = _inducing(self, model, models.some_rows(data, _MANY_ROWS) if chooses else data)
        return eqx.tree_at(lambda m: m.inducing, model, inducing, is_leaf=lambda node: node is None)

    def kept(self, process: Process, data: Data) -> Any:
        """The inducing points if they are trained, else the numbers of their rows."""
        return process.points if self.is_trained else _numbers(process.points, data.points)

    def problem(self, model: Model, data: Data, jitter: Float[AnyArray, ""], kept: Any) -> MinimizationProblem:
        """The negative bound; inducing points that are rows move with them."""
        some = self.rows_that_decide(data)
        inducing = kept if self.is_trained else take(data.points, kept)
        model = eqx.tree_at(lambda m: m.inducing, model, inducing, is_leaf=lambda node: node is None)
        return MinimizationProblem.of(
            model, some, lambda model: -self.evidence(model, some, jitter), trained=self.is_trained
        )


def _are_numbers(points: Any) -> bool:
    """Whether points are an array [m] of integers."""
    return isinstance(points, ARRAYS) and points.ndim == 1 and np.issubdtype(points.dtype, np.integer)


def sparse_initial(
    sparse: Sparse, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None
) -> SearchResult:
    """The model from which the bound is maximized: the best of several by the same bound.

    The models are the initial models and the optimum of the exact evidence of some rows, each with its own noise and
    with more noise. The variance that few inducing points do not explain counts as noise.
    """
    optimum = optimum_of_some(sparse, initial_models, data, jitter, first)
    if models.number_of(initial_models) == 1 or not has_more_to_learn(initial_models):
        return optimum
    model, value = _best_by_bound(sparse, initial_models, optimum.model, models.some_rows(data, _COMPARED_ROWS), jitter)
    return optimum._replace(model=model, evidence=value)


@part
def _best_by_bound(
    sparse: Sparse, initial_models: Model, model: Model, data: Data, jitter: Float[AnyArray, ""]
) -> tuple[Model, Float[AnyArray, ""]]:
    """The best of initial models and another one, each also with more noise, by the bound through few points."""
    candidates = models.with_more_noise(with_initial(sparse, initial_models, model, data), _MORE_NOISE)
    number = len(sparse.points) if sparse.num_inducing is None else sparse.num_inducing
    few_points = replace(sparse, points="greedy", num_inducing=min(number, _COMPARED_POINTS))
    bound = lambda model: sparse.evidence(few_points.with_inducing_points(model, data), data, jitter)
    best, values = models.greatest(candidates, bound)
    return models.one_of(candidates, best), values[best]


@part
def _inducing(sparse: Sparse, model: Model, data: Data) -> Points:
    """The inducing points of a model, chosen among these rows."""
    if not isinstance(sparse.points, str):
        return take(data.points, sparse.points)
    if sparse.is_trained:
        return take(data.points, slice(sparse.num_inducing))
    return greedy_points(model.kernel, data.points, sparse.num_inducing or 0)


def with_initial(inference: Inference, initial_models: Model, model: Model, data: Data) -> Model:
    """Initial models and another one along a leading axis, with lengthscales by column if the inference asks for them.

    Few rows may show no signal where many rows do. So their optimum is not the only place to begin.
    """
    if inference.ard:
        wide = initial_models.kernel.by_column(data.points)
        initial_models = eqx.tree_at(lambda m: m.kernel, initial_models, wide)
    xp = namespace(data.targets)
    join = lambda several, one: xp.concatenate([several, one]) if is_array(one) else one
    return jax.tree.map(join, initial_models, alone(model))


def optimum_of_some(
    inference: Inference, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First
) -> SearchResult:
    """The model at which a fit to many rows begins: the only initial model, or the exact optimum of some rows."""
    some, xp = models.some_rows(data, _SUBSET_ROWS), np if is_known(data) else jnp
    if not has_more_to_learn(initial_models):
        return best_initial(initial_models, some, jitter)
    if models.number_of(initial_models) == 1:
        return SearchResult(
            model=models.one_of(initial_models),
            evidence=xp.full((), np.nan, data.targets.dtype),
            steps=xp.zeros((), np.int32),
            result=xp.asarray(Result.STEP_LIMIT, np.int32),
            failed_initial_values=xp.zeros((), np.int32),
        )
    if first is not None:
        return first().outcome
    tolerance = xp.minimum(inference.tolerance, TOLERANCE)
    exact = Exact(ard=inference.ard, tolerance=tolerance, max_iterations=inference.max_iterations)
    return exact_search(exact, initial_models, some, jitter)


def greedy_points(kernel: Kernel, points: Points, num_inducing: int) -> Points:
    """The points that leave the least variance unexplained, chosen one by one: `sparse_gp.greedy_rows`.

    Derivatives pass to the points, but not through the choice.
    """
    kernel, held = as_constants((kernel, points))
    covariances_with = lambda row: kernel(alone(take(held, row)), held)[0]
    return take(points, sparse_gp.greedy_rows(covariances_with, kernel.diagonal(held), num_inducing))


def _numbers(some: Points, points: Points) -> Int[AnyArray, " m"]:
    """The numbers of the rows that are equal to some points."""

    def number(point: Points) -> Int[AnyArray, ""]:
        parts = jax.tree.map(lambda rows, one: jnp.sum(jnp.abs(rows - one[None]), axis=1), points, point)
        return jnp.argmin(sum(jax.tree.leaves(parts)))

    return lax.map(number, some)
