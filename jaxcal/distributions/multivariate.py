"""Distributions of vector targets: every row is a prediction of t outcomes at once.

They are no `Distribution`s, whose rows are numbers, because a vector has no quantiles. The distribution of one
component is a `Distribution`: `marginal` gives it. `whiten` transforms outcomes to components that can be calibrated
one by one.
"""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal import _checks
from jaxcal.distributions._base import Distribution, as_parameter
from jaxcal.distributions._rows import Rows, Values
from jaxcal.distributions.empirical import Empirical
from jaxcal.distributions.parametric import Normal
from jaxcal.functional import linalg


class Multivariate(Rows):
    """A predictive distribution of t outcomes for each of n rows.

    A row has a location, and a triangular factor of its spread.
    """

    mean: eqx.AbstractVar[Float[Array, "*n t"]]
    covariance: eqx.AbstractVar[Float[Array, "*n t t"]]
    loc: eqx.AbstractVar[Float[Array, "*n t"]]
    factor: eqx.AbstractVar[Float[Array, "*n t t"]]

    @abc.abstractmethod
    def marginal(self, j: int) -> Distribution:
        """The distribution of component j in every row.

        Raises:
            ValueError: if there is no such component.
        """

    @abc.abstractmethod
    def _sample_white(self, key: PRNGKeyArray, number: int) -> Float[Array, "number *n t"]:
        """Independent random whitened vectors for all rows."""

    @property
    def std(self) -> Float[Array, "*n t"]:
        """The standard deviations of the components."""
        return linalg.sqrt(jnp.diagonal(self.covariance, axis1=-2, axis2=-1))

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Independent random vectors, of shape `shape` + [n, t]."""
        _checks.check_key(key)
        white = self._sample_white(key, math.prod(shape))
        # y = loc + factor w, with w white.
        values = jax.vmap(lambda white: self.loc + _times(self.factor, white))(white)
        return values.reshape(shape + self.loc.shape)

    def whiten(self, y: Values) -> Float[Array, "*n t"]:
        """The whitened outcomes factor^-1 (y - loc), by a triangular solve.

        Args:
            y: outcomes [n, t].

        Raises:
            ValueError: if y is not of that shape.
        """
        values = _checks.as_floats("y", y).astype(self.loc.dtype)
        if values.shape != self.loc.shape:
            raise ValueError(f"y must have shape {self.loc.shape}; got {values.shape}.")
        error = (values - self.loc)[..., None]
        return jax.lax.linalg.triangular_solve(self.factor, error, left_side=True, lower=True)[..., 0]

    def _check_component(self, j: int) -> None:
        outcomes = self.loc.shape[-1]
        if not 0 <= j < outcomes:
            raise ValueError(f"j must be one of the components 0 to {outcomes - 1}; got {j}.")


class MultivariateNormal(Multivariate):
    """Normal predictions of vectors.

    Args:
        mean: [n, t].
        covariance: [n, t, t], symmetric and positive definite.

    Example:
        >>> distribution = MultivariateNormal(jnp.zeros((1, 2)), jnp.array([[[4.0, 2.0], [2.0, 2.0]]]))
        >>> print(distribution.std[:, 0], distribution.whiten(jnp.array([[2.0, 2.0]])))
        [2.] [[1. 1.]]
        >>> print(distribution.marginal(0).cdf(0.0))
        [0.5]
    """

    mean: Float[Array, "*n t"]
    covariance: Float[Array, "*n t t"]

    def __init__(self, mean: Values, covariance: Values):
        self.mean, self.covariance = _as_rows("mean", mean, "covariance", covariance)
        if not _checks.is_traced(self.covariance):
            _check_covariance(np.asarray(self.covariance))

    @property
    def loc(self) -> Float[Array, "*n t"]:
        """The mean."""
        return self.mean

    @property
    def factor(self) -> Float[Array, "*n t t"]:
        """The lower Cholesky factor of the covariance."""
        return jnp.linalg.cholesky(self.covariance)

    def marginal(self, j: int) -> Normal:
        """The distribution of component j in every row.

        Raises:
            ValueError: if there is no such component.
        """
        self._check_component(j)
        return Normal(self.mean[..., j], self.std[..., j])

    def _sample_white(self, key: PRNGKeyArray, number: int) -> Float[Array, "number *n t"]:
        return jax.random.normal(key, (number, *self.mean.shape), self.mean.dtype)


class MultivariateEmpirical(Multivariate):
    """Predictions loc + factor Z, with Z uniform on one table of whitened vectors that all rows share.

    The components of a vector stay together. So the table holds the dependence that the factor does not explain.

    Args:
        loc: [n, t].
        factor: [n, t, t], lower triangular with a positive diagonal, for example the Cholesky factor of a covariance.
        z: [L, t], whitened vectors.

    Example:
        >>> z = jnp.array([[-1.0, 3.0], [1.0, 5.0]])
        >>> distribution = MultivariateEmpirical(jnp.zeros((1, 2)), 2 * jnp.eye(2)[None], z)
        >>> print(distribution.mean, distribution.marginal(1).icdf(0.9))
        [[0. 8.]] [10.]
    """

    loc: Float[Array, "*n t"]
    factor: Float[Array, "*n t t"]
    z: Float[Array, "*l t"]
    _shared: ClassVar = {"z": 2}

    def __init__(self, loc: Values, factor: Values, z: Values):
        self.loc, self.factor = _as_rows("loc", loc, "factor", factor)
        self.z = jnp.array(_checks.as_matrix("z", z), self.loc.dtype)
        _checks.check_columns("z", self.z, self.loc.shape[-1], "the number of outcomes is")
        if not _checks.is_traced(self.factor):
            _check_factor(np.asarray(self.factor))

    @property
    def mean(self) -> Float[Array, "*n t"]:
        """loc + factor m, with m the mean of the table."""
        return self.loc + _times(self.factor, jnp.broadcast_to(self.z.mean(-2, keepdims=True), self.loc.shape))

    @property
    def covariance(self) -> Float[Array, "*n t t"]:
        """F C F^T, with the factor F, and the covariance C of the table (with the divisor L)."""
        deviations = self.z - self.z.mean(-2, keepdims=True)
        table = deviations.mT @ deviations / self.z.shape[-2]
        table = jnp.broadcast_to(jnp.expand_dims(table, -3), self.factor.shape)
        return self.factor @ table @ self.factor.mT

    def marginal(self, j: int) -> Empirical:
        """The distribution of component j: a sorted table for every row, [n, L] values in total.

        Raises:
            ValueError: if there is no such component.
        """
        self._check_component(j)
        return Empirical(self.loc[..., j], 1.0, jnp.sort(self.factor[..., j, :] @ self.z.mT))

    def _sample_white(self, key: PRNGKeyArray, number: int) -> Float[Array, "number *n t"]:
        return jax.random.choice(key, self.z, (number, *self.loc.shape[:-1]))


def _times(factor: Array, vectors: Array) -> Array:
    """The product of every row's matrix and vector."""
    return (factor @ vectors[..., None])[..., 0]


def _as_rows(name: str, vectors: Any, matrix_name: str, matrices: Any) -> tuple[Array, Array]:
    """Vectors [n, t] and matrices [n, t, t] of one dtype."""
    rows, squares = _checks.as_floats(name, vectors), _checks.as_floats(matrix_name, matrices)
    if rows.ndim != 2:
        raise ValueError(f"{name} must have shape (n, t); got {rows.shape}.")
    if squares.shape != (*rows.shape, rows.shape[1]):
        raise ValueError(f"{matrix_name} must have shape {(*rows.shape, rows.shape[1])}; got {squares.shape}.")
    _checks.as_matrix(name, rows)
    _checks.check_finite(matrix_name, squares)
    dtype = jnp.result_type(rows, squares)
    return as_parameter(rows, dtype), as_parameter(squares, dtype)


def _check_covariance(covariance: np.ndarray) -> None:
    """Raise ValueError unless every row's matrix is symmetric, up to rounding, and positive definite."""
    size = np.abs(covariance).max(axis=(1, 2))
    skew = np.abs(covariance - covariance.mT).max(axis=(1, 2))
    _raise_if(skew > 100 * np.finfo(covariance.dtype).eps * size, "covariance must be symmetric")
    indefinite = np.any(np.isnan(jnp.linalg.cholesky(covariance)), axis=(1, 2))
    _raise_if(indefinite, "covariance must be positive definite")


def _check_factor(factor: np.ndarray) -> None:
    """Raise ValueError unless every row's matrix is lower triangular with a positive diagonal."""
    _raise_if(np.any(np.triu(factor, 1) != 0, axis=(1, 2)), "factor must be lower triangular")
    diagonal = np.diagonal(factor, axis1=1, axis2=2)
    _raise_if(np.any(diagonal <= 0, axis=1), "factor must have a positive diagonal")


def _raise_if(bad: np.ndarray, message: str) -> None:
    if bad.any():
        raise ValueError(f"{message}; {bad.sum()} rows are not so, the first is row {bad.argmax()}.")
