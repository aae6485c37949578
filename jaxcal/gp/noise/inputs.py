"""Noise whose variance is a second process of the inputs; `functional.noise` has the formulas."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, cast

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jaxtyping import Float, PyTree

from jaxcal._numpy import AnyArray, is_array, is_known, namespace, part
from jaxcal.functional import gp, noise
from jaxcal.functional._loops import carried
from jaxcal.gp.model import Data, Model, SearchResult, leave_one_out
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, InitialOf, Noise, initial_models

# How often the two processes are fitted, and the most steps and the tolerance of the noise process's fit.
_ROUNDS, _STEPS, _TOLERANCE = 2, 20, 0.1


class InputNoise(Noise):
    """Gaussian noise whose log variance is a second process of the inputs, as far as that helps.

    The method is Kersting et al., "Most Likely Heteroscedastic Gaussian Process Regression" (2007), with leave-one-out
    errors: the other rows predict the noise of a row. The fraction of the noise that follows the second process is
    learned. So a second process without information has no effect. The fit costs three to five times as much as with
    `GaussianNoise`. It goes with `Exact` and `Sparse`.
    """

    is_host_driven: ClassVar[bool] = True

    @property
    def is_gaussian(self) -> bool:
        """False, because the noise has no common variance."""
        return False

    def fit(
        self, inference: Inference, initial_of: InitialOf, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> Process:
        """The process with the process of its noise; both are fitted twice, alternating."""
        optimum, dtype = inference.search(initial_models(initial_of, data), data, jitter, first), data.targets.dtype
        logit = namespace(optimum.evidence).zeros((), dtype)
        model = eqx.tree_at(lambda m: m.logit_fraction, optimum.model, logit, is_leaf=lambda node: node is None)
        variance = np.asarray(noise.LOG_SQUARE_VARIANCE, dtype)
        noise_inference = inference.with_limits(_STEPS, _TOLERANCE)

        def one_round(model: Model, relative: Float[AnyArray, " n"]) -> tuple[SearchResult, Process, _Foreseen]:
            logs = _log_noises(inference, model, data._replace(base_variance=relative), jitter)
            second = noise_inference.search(initial_models(initial_of, logs, variance), logs, jitter)
            after = noise_inference.conclude(second, logs, jitter)
            foreseen = _foreseen(second.model, after, logs, variance)
            better = inference.refine(model, data._replace(base_variance=foreseen.relative), jitter)
            return better, after, foreseen

        better, after, foreseen = _repeated(one_round, model, namespace(data.targets).ones_like(data.targets))
        rows = data._replace(base_variance=foreseen.relative)
        process = inference.conclude(better._replace(failed_initial_values=optimum.failed_initial_values), rows, jitter)
        put = lambda p: (p.log_noise, p.log_noise_offset)
        return eqx.tree_at(put, process, (after, foreseen.offset), is_leaf=lambda node: node is None)


class _Foreseen(NamedTuple):
    """The noise at every row, as its process predicts it.

    Attributes:
        relative: [n], the variance at every row over the mean variance.
        offset: the number added to the log variance that the process predicts.
    """

    relative: Float[AnyArray, " n"]
    offset: Float[AnyArray, ""]


@part
def _log_noises(inference: Inference, model: Model, rows: Data, jitter: Float[AnyArray, ""]) -> Data:
    """The log noise variances by the rows' leave-one-out errors, less their mean."""
    errors = leave_one_out(model, inference.posterior(model, rows, jitter), rows).standardized
    responses = noise.log_noise_responses(errors, cast(AnyArray, model.relative_noise(rows.base_variance)))
    return Data(rows.points, responses - responses.mean())


@part
def _foreseen(model: Model, after: Process, logs: Data, variance: Float[AnyArray, ""]) -> _Foreseen:
    """The noise at every row, as the process of the log variances predicts it from the other rows."""
    xp, others = namespace(logs.targets), leave_one_out(model, cast(gp.Posterior, after.posterior), logs)
    # E exp(f) = exp(m + v / 2), with v the variance without the noise of the logs.
    variances = xp.exp(logs.targets - others.error + xp.maximum(others.variance - variance, 0) / 2)
    scale = variances.mean()
    return _Foreseen(variances / scale, -xp.log(scale))


def _repeated(
    one_round: Callable[..., tuple[SearchResult, Process, _Foreseen]], model: Model, relative: Float[AnyArray, " n"]
) -> tuple[SearchResult, Process, _Foreseen]:
    """The result of the last round; each round begins where the one before ended. In a program this is one loop."""
    if is_known(model, relative):
        rounds = [one_round(model, relative)]
        while len(rounds) < _ROUNDS:
            rounds.append(one_round(rounds[-1][0].model, rounds[-1][2].relative))
        return rounds[-1]
    arrays, static = eqx.partition(model, is_array)
    rest: list[PyTree] = []

    def step(state, _):
        ended = one_round(eqx.combine(state[0], static), state[1])
        ended_arrays, rest[:] = eqx.filter(ended, is_array), [eqx.filter(ended, is_array, inverse=True)]
        return (eqx.filter(ended[0].model, is_array), ended[2].relative), ended_arrays

    _, history = lax.scan(step, carried((arrays, relative)), length=_ROUNDS)
    return eqx.combine(jax.tree.map(lambda array: array[-1], history), rest[0])
