"""The inference if the user names none: it depends on the number of rows, the device, and the leave-one-out CRPS."""

from typing import cast

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from jaxcal._numpy import AnyArray, namespace
from jaxcal.functional import gp, normal
from jaxcal.gp import model as models
from jaxcal.gp.inference import nearest
from jaxcal.gp.inference.exact import Exact
from jaxcal.gp.inference.nearest import Nearest
from jaxcal.gp.inference.sparse import Sparse
from jaxcal.gp.kernels import take
from jaxcal.gp.model import Data
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import Inference, Noise
from jaxcal.optimize import Result

# Up to 2000 rows the exact process is taken. Above that, up to 5000 known rows, LAPACK fits the exact process, and
# `Nearest` is fitted beside it: each predicts better on some data.
_EXACT_ROWS, _EXACT_ROWS_BY_LAPACK = 2000, 5000
# The most known rows of the exact process on an accelerator with at least this memory in GiB: (GiB, rows). An
# evaluation holds six float32 matrices of the rows.
_EXACT_ROWS_BY_MEMORY = (8, 8_000), (14, 12_000), (30, 20_000), (70, 32_000), (120, 42_000)
# Above this number of rows `Nearest` is not tried. To predict n points takes O(n^2), which is hours for a million.
_NEAREST_ROWS = 250_000


def chosen(n: int, noise: Noise, *, is_known: bool, in_numpy: bool) -> tuple[Inference, ...]:
    """The inferences among which the leave-one-out predictions decide; often a single one.

    Args:
        n: how many rows there are.
        noise: the noise of the process.
        is_known: whether no transformation traces the rows.
        in_numpy: whether LAPACK can evaluate the evidence.
    """
    most = _exact_rows(noise, is_known=is_known, in_numpy=in_numpy)
    inference = Exact() if n <= most else Sparse()
    compares = n > _EXACT_ROWS and is_known and noise.is_gaussian and n <= _NEAREST_ROWS
    return (inference, Nearest()) if compares else (inference,)


def _exact_rows(noise: Noise, *, is_known: bool, in_numpy: bool) -> int:
    if not (is_known and noise.is_gaussian):
        return _EXACT_ROWS
    if jax.default_backend() == "cpu":
        return _EXACT_ROWS_BY_LAPACK if in_numpy else _EXACT_ROWS
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30
    return max((rows for least, rows in _EXACT_ROWS_BY_MEMORY if memory >= least), default=_EXACT_ROWS)


def leave_one_out_crps(process: Process, data: Data) -> Float[AnyArray, ""]:
    """The mean leave-one-out CRPS of some rows; infinite if the fit failed.

    If there are enough rows, these rows had no part in the choice of the hyperparameters of `Nearest`. All other rows
    are scored, up to 8000: if few rows have most of the error, the mean of 2000 rows says little.

    Args:
        process: an exact process, or a process with inducing points or with the nearest rows.
        data: the data that the process was fitted to.
    """
    rows, posterior = nearest.other_rows(data), process.posterior
    if isinstance(posterior, nearest.NearestRows):
        others = nearest.leave_one_out(process.model.kernel, posterior, data.points, rows)
    elif process.inference == "exact":
        others = gp.LeaveOneOut(*(each[rows] for each in gp.leave_one_out(cast(gp.Posterior, posterior))))
    else:
        model = eqx.tree_at(lambda m: m.inducing, process.model, process.points, is_leaf=lambda node: node is None)
        others = models.leave_one_out(model, cast(gp.Posterior, posterior), take(data, rows))
    xp = namespace(others.error)
    score = normal.crps(others.error, 0.0, xp.sqrt(others.variance)).mean()
    return xp.where((process.result == Result.NOT_FINITE) | xp.isnan(score), np.inf, score)
