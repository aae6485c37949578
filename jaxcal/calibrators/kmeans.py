"""One standard deviation for each cluster of inputs: the simplest std that varies with x.

This is the baseline "KM" of Camporeale and Carè (2021), section 5.2. The clusters of the inputs come from
k-means. The std of a cluster is the root mean squared error of the model in it.
"""

import warnings
from functools import partial

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxcal import _checks, _random
from jaxcal._extras import needed
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.calibrators import _groups
from jaxcal.calibrators._base import check_base, checked_rows, rows_that_count
from jaxcal.calibrators._groups import Weights
from jaxcal.distributions import Distribution, Normal
from jaxcal.distributions._rows import predicted_by_buckets
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import linalg
from jaxcal.functional._loops import over_leading_axis


def fit(
    x: "Table",
    base: "Distribution",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    num_clusters: int = 5,
    weights: "Weights | None" = None,
) -> "KMeans":
    """Cluster the standardized inputs by scikit-learn's k-means, and measure the errors in every cluster.

    With weights the standardization of the inputs, the centers and the mean squared errors are weighted. A row of
    weight 2 counts as two rows, and a row of weight 0 does not count. Weights that are all equal have no effect. Let
    w(x) be the density of new inputs divided by the density of the calibration inputs. The weighted results are then
    estimates for new rows.

    scikit-learn works on NumPy arrays, so the fit does not run under `jit`, nor under `vmap` over x or weights. The
    stds are differentiable in base, y and weights; the assignment of rows to clusters has derivative 0.

    Args:
        x: inputs [l, d], or a data frame (`jaxcal.frames`); a vector [l] is one column.
        base: the model's predictions [l] on rows that it was not trained on; only the mean is used.
        y: targets [l].
        key: random key of the first centers.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        num_clusters: number of clusters; fewer are made if there are fewer different rows.
        weights: the weights of the rows [l], not negative, or a function of x that gives them; None for equal weights.
            The call needs no weights.

    Raises:
        TypeError: if base is not a Distribution, or key is no random key. If x, weights or key is traced, other than by
            an eager `jax.grad`.
        ValueError: if x, y or base is empty, not finite or of the wrong shape. If num_clusters is less than 1 or above
            the number of rows, without rows of weight 0. If there are not as many weights as rows, a weight is
            negative, NaN or infinite, or all are 0.
        ImportError: if scikit-learn is missing (the extra `forests` has it).

    Warns:
        UserWarning: if y equals base.mean in every row of a cluster, whose std is then 0.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x, y = np.array([0.0, 0.1, 5.0, 5.1]), np.array([1.0, -1.0, 3.0, -3.0])
        >>> fitted = jc.kmeans.fit(x, jc.Point(np.zeros(4)), y, key=jax.random.key(0), num_clusters=2)
        >>> print(fitted(np.array([0.05, 4.0]), jc.Point(np.zeros(2))).std)
        [1. 3.]
    """
    _checks.check_key(key)
    columns, rows = checked_rows(x, base, y, categorical)
    rows, counts = rows_that_count(rows, _groups.weights_of(x, weights, rows.y.shape[0]))
    inputs, known = lax.stop_gradient((rows.x, counts))  # under an eager jax.grad the values are known
    (counted,), known = rows_that_count((inputs,), known)
    _checks.check_at_least("num_clusters", num_clusters, 1)
    _checks.check_rows("x", counted, num_clusters)
    x_scaler = Standardizer.of(counted, known).without(columns.indicators)
    points = x_scaler(counted)
    if _checks.is_traced(points, known, key):
        raise TypeError(
            "x, weights or key is traced, but scikit-learn needs NumPy arrays: call fit outside jit and vmap."
        )
    seed = _random.bits(key, 32)
    centers = _cluster(np.asarray(points), num_clusters, seed, None if known is None else np.asarray(known))
    std = _stds(rows.y, rows.mean, _nearest(centers, x_scaler(inputs)), len(centers), counts)
    if not _checks.is_traced(std) and (empty := int((np.asarray(std) == 0).sum())):
        _checks.warn(
            f"y equals base.mean in every row of {empty} of {len(centers)} clusters: their std is 0, and no prediction "
            "there has a width. Was the model trained on these rows? Give other rows, or fewer clusters.",
        )
    return KMeans(centers=centers, cluster_std=std, columns=columns, x_scaler=x_scaler)


class KMeans(eqx.Module):
    """Centers of inputs and a std for each; made by `fit`.

    Attributes:
        centers: [k, d], on the scale of `x_scaler`.
        cluster_std: the root mean squared error [k] of the rows nearest to every center.
        columns: the description of the columns of the calibration inputs.
        x_scaler: the standardization of the inputs.
    """

    centers: Float[Array, "k d"]
    cluster_std: Float[Array, " k"]
    columns: Columns
    x_scaler: Standardizer

    def __call__(self, x: Table, base: Distribution) -> Normal:
        """The distributions N(base.mean, std^2), [n], with the std of the center that is nearest to x, [n, d] or [n].

        Raises:
            TypeError, ValueError: as `fit` raises for x and base.
            ValueError: if x has other columns than the calibration inputs.
        """
        x = self.columns(x)
        check_base(base, x.shape[0])
        return Normal(base.mean, _std_of_nearest(self, x))


@numpy_or_jit
def _stds(
    y: Float[AnyArray, " n"],
    mean: Float[AnyArray, " n"],
    labels: Int[AnyArray, " n"],
    number: int,
    weights: Float[AnyArray, " n"] | None,
) -> Float[AnyArray, " k"]:
    """The root mean square of the errors for every label."""
    xp, errors = namespace(y, mean, weights), y - mean
    scale = linalg.scale_of(errors)
    # std = s sqrt(sum w (e / s)^2 / sum w), with the scale s of the errors against overflow.
    w = xp.ones_like(errors) if weights is None else weights / weights.max()
    is_in = labels[None] == xp.arange(number)[:, None]
    squares, counts = (xp.where(is_in, each[None], 0).sum(1) for each in (w * (errors / scale) ** 2, w))
    return scale * linalg.sqrt(squares / counts)


@partial(numpy_or_jit, around=predicted_by_buckets)
def _std_of_nearest(fitted: KMeans, x: Float[AnyArray, "n d"]) -> Float[AnyArray, " n"]:
    return fitted.cluster_std[_nearest(fitted.centers, fitted.x_scaler(x))]


@numpy_or_jit
def _nearest(centers: Float[AnyArray, "k d"], points: Float[AnyArray, "n d"]) -> Int[AnyArray, " n"]:
    """The number of the center that is nearest to each point."""
    return over_leading_axis(lambda center: ((points - center[None]) ** 2).sum(1), centers).argmin(0)


def _cluster(x: np.ndarray, number: int, seed: int, weights: np.ndarray | None) -> Float[Array, "k d"]:
    """Centers of clusters that have at least one row."""
    with needed("scikit-learn", "'jaxcal[forests]'"):
        from sklearn.cluster import KMeans as Clusters
        from sklearn.exceptions import ConvergenceWarning
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # for fewer different rows than clusters
        clusters = Clusters(number, random_state=seed)
        used = np.unique(clusters.fit_predict(x, sample_weight=weights))
    return jax.device_put(clusters.cluster_centers_[used].astype(x.dtype))
