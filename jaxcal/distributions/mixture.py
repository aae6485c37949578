"""`Mixture`: the distributions of an ensemble."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._numpy import JaxArray, constant, is_working, namespace, numpy_or_jit, special
from jaxcal.distributions._base import Distribution, as_parameter, match, numpy_knows, of_targets
from jaxcal.distributions._reach import EVERYWHERE, Reach
from jaxcal.distributions._rows import Values, by_buckets, replaced
from jaxcal.distributions.empirical import INFINITE_RULES, Empirical
from jaxcal.distributions.parametric import Normal, Point, StudentT
from jaxcal.functional import linalg, quantiles, scores

T = TypeVar("T")

# For each class of members, the largest number of values of a parameter for which NumPy is used. For an interval of
# 100,000 rows and five normal members in 64 bits, NumPy takes 0.7 times as long as a warm program. In 32 bits it takes
# 4 times as long. The score of Student t members is a quadrature of searches. For 1,000 rows in 64 bits NumPy takes
# 1.1 s, a warm program takes 0.5 s, and its compilation takes 1.4 s.
_MOST = {Normal: 2**18, Point: 2**18, StudentT: 2**12}


class Mixture(Distribution):
    """Mixtures of m distributions of one class, for example the predictions of an ensemble.

    The cdf of a row is the weighted mean of its members' cdfs.

    Args:
        components: a Distribution whose arrays all have a leading member axis of length m. A `vmap` over the members
            makes it.
        weights: [m], not negative, with sum 1; None for equal weights.

    Example:
        >>> members = jax.vmap(Normal)(jnp.array([[-1.0], [1.0]]), jnp.array([[1.0], [1.0]]))
        >>> distribution = Mixture(members)
        >>> print(distribution.variance.round(4))
        [2.]
    """

    components: Distribution
    weights: Float[JaxArray, "*m"]
    _shared: ClassVar = {"weights": 1}
    has_closed_quantiles = False

    def __init__(self, components: Distribution, weights: Values | None = None):
        members, dtype = _stack_of(components)
        if isinstance(components, Empirical) and components.rule in INFINITE_RULES:
            raise ValueError(f"components must not have rule={components.rule!r}: a mixture has no guarantee.")
        self.components = components
        weights = np.full(members, 1 / members) if weights is None else weights
        self.weights = as_parameter(_checks.as_vector("weights", weights, length=members), dtype)
        _checks.check_not_negative("weights", self.weights)
        if not _checks.is_traced(self.weights) and not abs((total := np.asarray(self.weights).sum()) - 1) < 1e-3:
            raise ValueError(f"weights must sum to 1; got {total:g}.")

    @property
    def has_density(self) -> bool:
        """Whether the members have a density."""
        return self.components.has_density

    @property
    def is_continuous(self) -> bool:
        """Whether the members are continuous."""
        return self.components.is_continuous

    @property
    def reach(self) -> Reach:
        """The levels from the lowest level of a member to the highest level of a member."""
        # If the members have no limits, there is no need to take them one by one.
        if type(self.components).reach is Distribution.reach:
            return EVERYWHERE
        of_member = lambda k: jax.tree.map(lambda leaf: leaf[k], self.components).reach
        reach, xp = of_member(0), namespace(self.weights)
        lowest, highest, *_ = zip(*map(of_member, range(len(self.weights))), strict=True)
        return reach._replace(lowest=reduce(xp.minimum, lowest), highest=reduce(xp.maximum, highest))

    @property
    def _in_numpy(self) -> bool:
        """NumPy computes the methods of plain members with few values, where it is nearly as fast as a program."""
        return self._num_filled is not None and jax.tree.leaves(self.components)[0].size <= _MOST[type(self.components)]

    @property
    def _num_filled(self) -> int | None:
        """The number of rows if the members are plain: each parameter of a member has one number for each row."""
        leaves = jax.tree.leaves(self.components)
        is_plain = type(self.components) in _MOST and self.weights.ndim == 1
        return leaves[0].shape[1] if is_plain and all(leaf.ndim == 2 for leaf in leaves) else None

    @property
    @partial(numpy_or_jit, when=numpy_knows, around=by_buckets)
    def mean(self) -> Float[JaxArray, "*n"]:
        """The weighted mean of the members' means."""
        return self._average(self._each(lambda member: member.mean))

    @property
    @partial(numpy_or_jit, when=numpy_knows, around=by_buckets)
    def std(self) -> Float[JaxArray, "*n"]:
        """The root of the mean of the members' variances plus the variance of their means."""
        means, stds = self._each(lambda member: (member.mean, member.std))
        deviations = means - self._average(means)[None]
        # var = sum_k w_k (s_k^2 + (m_k - m)^2), in units of the scale of its terms.
        unit = linalg.scale_of(stds, deviations, axis=0)
        return unit[0] * linalg.sqrt(self._average((stds / unit) ** 2 + (deviations / unit) ** 2))

    @of_targets
    def cdf(self, y: Values) -> Float[JaxArray, "*n"]:
        """The weighted mean of the members' cdfs."""
        return self._average(self._each(lambda member, y: member.cdf(y), y))

    @of_targets
    def log_prob(self, y: Values) -> Float[JaxArray, "*n"]:
        """The log of the weighted mean of the members' densities."""
        logs = self._each(lambda member, y: member.log_prob(y), y)
        xp, dense = namespace(logs), (logs > -np.inf).any(0)
        # If no member has a density at y, the derivatives are 0, not NaN.
        logs = xp.where(dense[None], logs, 0)
        weights = xp.broadcast_to(self._columns(logs.ndim), logs.shape)
        return xp.where(dense, special(logs).logsumexp(logs, axis=0, b=weights), -np.inf)

    @of_targets
    def crps(self, y: Values) -> Float[JaxArray, "*n"]:
        """The score: a closed form for normal and point members, else by `functional.scores.mixture_crps`.

        That function is a quadrature.
        """
        y = match(y, self.mean)
        if isinstance(self.components, Normal | Point):
            return scores.normal_mixture_crps(y, self.components.mean, self.components.std, self.weights)
        crps = lambda y: self._each(lambda member, y: member.crps(y), y)
        icdf = lambda p: self._each(lambda member, p: member.quantile(p), p)
        return scores.mixture_crps(y, self.weights, crps, icdf)

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[JaxArray, "..."]:
        """The values of members drawn at random."""
        _checks.check_key(key)
        members = self.weights.shape[0]
        key_member, key_value = jax.random.split(key)
        keys = jax.random.split(key_value, members)
        values = jax.vmap(lambda member, key: member.sample(key, shape))(self.components, keys)
        drawn = jax.random.choice(key_member, members, (1, *values.shape[1:]), p=self.weights)
        return jnp.take_along_axis(values, drawn, axis=0)[0]

    @numpy_or_jit(when=numpy_knows)
    def quantile(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The root of the cdf, by a bracketing search between the quantiles of the members."""
        if isinstance(self.components, Point):
            return quantiles.weighted_quantile(self.components.mean, self.weights, p)
        # The members' quantiles bracket the mixture's quantile. No derivative passes through the bracket.
        bracketing = jax.tree.map(constant, self)
        ends = bracketing._each(lambda member, p: member.quantile(p), constant(p))
        density = lambda y: namespace(y).exp(self.log_prob(y))
        return quantiles.invert_cdf(self.cdf, p, ends.min(0), ends.max(0), density)

    def _axes(self) -> "Mixture":
        """The axis of rows of every array. In the arrays of the components it comes after the member axis."""
        self._check_one_run()
        member = jax.eval_shape(lambda stack: jax.tree.map(lambda leaf: leaf[0], stack), self.components)
        behind = jax.tree.map(lambda axis: axis + 1 if axis >= 0 else axis, member._axes())
        return replaced(jax.tree.map(lambda _: -1, self), components=behind)

    def _each(self, function: Callable[..., T], *values: Values) -> T:
        """The results of a function of each member and of values of the rows, stacked [m, n]."""
        if is_working():  # the formulas of NumPy hold for all members at once
            all_rows = jax.tree.leaves(self.components)[0]
            return function(self.components, *(np.broadcast_to(match(v, all_rows[0]), all_rows.shape) for v in values))
        return jax.vmap(lambda member: function(member, *values))(self.components)

    def _columns(self, ndim: int) -> Float[JaxArray, "*m"]:
        """The weights with further axes of length 1, to multiply values of the members."""
        return namespace(self.weights).expand_dims(self.weights, tuple(range(1, ndim)))

    def _average(self, values: Float[JaxArray, " m *n"]) -> Float[JaxArray, "*n"]:
        return (self._columns(values.ndim) * values).sum(0)


def _stack_of(components: Distribution) -> tuple[int, Any]:
    """The number of members of a stack, and its dtype."""
    if not isinstance(components, Distribution):
        raise ValueError(f"components must be a Distribution; got {type(components).__name__}.")
    leaves = jax.tree.leaves(components)
    shapes = [leaf.shape for leaf in leaves]
    if any(len(shape) < 2 or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            "components must be a stack, whose arrays all have a leading member axis, as jax.vmap makes it; "
            f"got arrays of shapes {', '.join(map(str, shapes))}."
        )
    return shapes[0][0], leaves[0].dtype
