"""Noise whose variance depends on the inputs, by a second process; `functional.noise` has the formulas."""

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
from jaxcal.gp.model import Data, Found, Model, leave_one_out
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, InitialOf, Noise, initial_models

# How often the two processes are fitted, and how far the one of the noise is.
_ROUNDS, _STEPS, _TOLERANCE = 2, 20, 0.1


class InputNoise(Noise):
    """Gaussian noise whose log variance is a second process of the inputs, as far as that helps.

    Kersting et al., "Most Likely Heteroscedastic Gaussian Process Regression" (2007), with leave-one-out errors: the
    other rows say how great the noise of a row is. The fraction of the noise that follows them is learned, so that a
    second process that says nothing has no part. It costs three to five times as much as `GaussianNoise`. It goes
    with `Exact` and `Sparse`.
    """

    by_parts: ClassVar[bool] = True

    @property
    def is_gaussian(self) -> bool:
        """Not of one variance."""
        return False

    def fit(
        self, inference: Inference, initial_of: InitialOf, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> Process:
        """The process with the one of its noise, each fitted twice in alternation."""
        found, dtype = inference.search(initial_models(initial_of, data), data, jitter, first), data.targets.dtype
        logit = namespace(found.evidence).zeros((), dtype)
        model = eqx.tree_at(lambda m: m.logit_fraction, found.model, logit, is_leaf=lambda node: node is None)
        variance = np.asarray(noise.LOG_SQUARE_VARIANCE, dtype)
        of_noise = inference.with_limits(_STEPS, _TOLERANCE)

        def one_round(model: Model, relative: Float[AnyArray, " n"]) -> tuple[Found, Process, _Foreseen]:
            logs = _log_noises(inference, model, data._replace(base_variance=relative), jitter)
            second = of_noise.search(initial_models(initial_of, logs, variance), logs, jitter)
            after = of_noise.conclude(second, logs, jitter)
            foreseen = _foreseen(second.model, after, logs, variance)
            better = inference.refine(model, data._replace(base_variance=foreseen.relative), jitter)
            return better, after, foreseen

        better, after, foreseen = _repeated(one_round, model, namespace(data.targets).ones_like(data.targets))
        rows = data._replace(base_variance=foreseen.relative)
        process = inference.conclude(better._replace(failed_initial_values=found.failed_initial_values), rows, jitter)
        put = lambda p: (p.log_noise, p.log_noise_offset)
        return eqx.tree_at(put, process, (after, foreseen.offset), is_leaf=lambda node: node is None)


class _Foreseen(NamedTuple):
    """The noise at every row, as its process predicts it.

    Attributes:
        relative: [n], the variance at every row over the mean variance.
        offset: is added to the log of a variance that the process predicts.
    """

    relative: Float[AnyArray, " n"]
    offset: Float[AnyArray, ""]


@part
def _log_noises(inference: Inference, model: Model, rows: Data, jitter: Float[AnyArray, ""]) -> Data:
    """The logs of noise variances that the rows show, less their mean."""
    errors = leave_one_out(model, inference.posterior(model, rows, jitter), rows).standardized
    responses = noise.log_noise_responses(errors, cast(AnyArray, model.relative_noise(rows.base_variance)))
    return Data(rows.points, responses - responses.mean())


@part
def _foreseen(model: Model, after: Process, logs: Data, variance: Float[AnyArray, ""]) -> _Foreseen:
    """The noise at every row, as the process of the logs predicts it from the other rows."""
    xp, others = namespace(logs.targets), leave_one_out(model, cast(gp.Posterior, after.posterior), logs)
    found = xp.exp(logs.targets - others.error + xp.maximum(others.variance - variance, 0) / 2)
    scale = found.mean()
    return _Foreseen(found / scale, -xp.log(scale))


def _repeated(
    one_round: Callable[..., tuple[Found, Process, _Foreseen]], model: Model, relative: Float[AnyArray, " n"]
) -> tuple[Found, Process, _Foreseen]:
    """What the last round gives, each beginning where the one before ended; in a program one loop."""
    if is_known(model, relative):
        rounds = [one_round(model, relative)]
        while len(rounds) < _ROUNDS:
            rounds.append(one_round(rounds[-1][0].model, rounds[-1][2].relative))
        return rounds[-1]
    arrays, static = eqx.partition(model, is_array)
    rest: list[PyTree] = []

    def step(state, _):
        ended = one_round(eqx.combine(state[0], static), state[1])
        found, rest[:] = eqx.filter(ended, is_array), [eqx.filter(ended, is_array, inverse=True)]
        return (eqx.filter(ended[0].model, is_array), ended[2].relative), found

    _, history = lax.scan(step, carried((arrays, relative)), length=_ROUNDS)
    return eqx.combine(jax.tree.map(lambda array: array[-1], history), rest[0])
