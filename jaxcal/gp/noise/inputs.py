"""Noise whose variance depends on the inputs, by a second process; `functional.noise` has the formulas."""

from typing import ClassVar, cast

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from jaxcal._numpy import AnyArray, is_array, namespace
from jaxcal.functional import gp, noise
from jaxcal.functional._loops import scan
from jaxcal.gp.model import Data, leave_one_out
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, InitialOf, Noise

# How often the two processes are fitted, and how far the one of the noise is.
_ROUNDS, _STEPS, _TOLERANCE = 2, 20, 0.1


class InputNoise(Noise):
    """Gaussian noise whose log variance is a second process of the inputs, as far as that helps.

    Kersting et al., "Most Likely Heteroscedastic Gaussian Process Regression" (2007), with leave-one-out errors: the
    other rows say how great the noise of a row is. The fraction of the noise that follows them is learned, so that a
    second process that says nothing has no part. It costs three to five times as much as `GaussianNoise`. It goes
    with `Exact` and `Sparse`.
    """

    in_numpy: ClassVar[bool] = True

    @property
    def is_gaussian(self) -> bool:
        """Not of one variance."""
        return False

    def fit(
        self, inference: Inference, initial_of: InitialOf, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> Process:
        """The process with the one of its noise, each fitted twice in alternation."""
        found, xp = inference.search(initial_of(data, None), data, jitter, first), namespace(data.targets)
        logit = xp.zeros_like(found.evidence)
        start = eqx.tree_at(lambda m: m.logit_fraction, found.model, logit, is_leaf=lambda node: node is None)
        variance = xp.asarray(noise.LOG_SQUARE_VARIANCE, data.targets.dtype)
        of_noise = inference.with_limits(_STEPS, _TOLERANCE)
        arrays, static = eqx.partition(start, is_array)
        rest: list[PyTree] = []

        def one_round(state, _):
            arrays, base_variance = state
            model, rows = eqx.combine(arrays, static), data._replace(base_variance=base_variance)
            errors = leave_one_out(model, inference.posterior(model, rows, jitter), rows).standardized
            responses = noise.log_noise_responses(errors, model.relative_noise(base_variance))
            center = responses.mean()
            logs = Data(data.points, responses - center)
            second = of_noise.search(initial_of(logs, variance), logs, jitter)
            after = of_noise.conclude(second, logs, jitter)
            others = leave_one_out(second.model, cast(gp.Posterior, after.posterior), logs)
            foreseen = xp.exp(logs.targets - others.error + xp.maximum(others.variance - variance, 0) / 2)
            scale = foreseen.mean()
            rows = data._replace(base_variance=foreseen / scale)
            better = inference.refine(model, rows, jitter)
            out_arrays, other = eqx.partition((better, after), is_array)
            rest[:] = [other]
            return (eqx.filter(better.model, is_array), rows.base_variance), (out_arrays, -xp.log(scale))

        begin = arrays, xp.ones_like(data.targets)
        (_, base_variance), history = scan(one_round, begin, np.arange(_ROUNDS))
        arrays, offset = jax.tree.map(lambda a: a[-1], history)
        better, after = eqx.combine(arrays, rest[0])
        rows = data._replace(base_variance=base_variance)
        process = inference.conclude(better._replace(failed_initial_values=found.failed_initial_values), rows, jitter)
        put = lambda p: (p.log_noise, p.log_noise_offset)
        return eqx.tree_at(put, process, (after, offset), is_leaf=lambda node: node is None)
