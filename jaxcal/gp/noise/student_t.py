"""Student t noise, so that outliers do not decide the fit; `functional.noise` has the formulas."""

from typing import ClassVar

import equinox as eqx
from jaxtyping import Float

from jaxcal._numpy import AnyArray, namespace, part
from jaxcal.functional import noise
from jaxcal.gp.model import Data, Model, StudentTLikelihood, expected_squares
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, InitialOf, Noise, initial_models

# The degrees of freedom for the precisions of the first search, and the initial value of the joint search.
_FIRST_DF, _CLIMBED_DF = 4.0, 10.0


class StudentTNoise(Noise):
    """Noise whose scale and degrees of freedom are learned; predictions are a `StudentTLikelihood`.

    Every row has its own precision, e ~ N(0, variance / w), where w has a gamma distribution. First, hyperparameters
    are searched as with Gaussian noise, with the precisions that the targets alone suggest. From the end of this
    search, hyperparameters, degrees of freedom and precisions are optimized together. If they alternated, the degrees
    of freedom would converge slowly. The fit costs two to four times as much as with `GaussianNoise`. It goes with
    `Exact` and `Sparse`.
    """

    is_host_driven: ClassVar[bool] = True

    @property
    def is_gaussian(self) -> bool:
        """False."""
        return False

    @property
    def has_heavy_tails(self) -> bool:
        """True."""
        return True

    @part
    def first_data(self, data: Data) -> Data:
        """The rows with the precisions that the targets alone suggest."""
        first = noise.student_t_weights(data.targets**2, namespace(data.targets).asarray(_FIRST_DF, data.targets.dtype))
        return data._replace(relative_noise=1 / first)

    def fit(
        self, inference: Inference, initial_of: InitialOf, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> Process:
        """The process of the greatest bound: `functional.noise.student_t_bound`."""
        weighted = self.first_data(data)
        optimum = inference.search(initial_models(initial_of, data), weighted, jitter, first)
        climbed = inference.descend(
            _with_student_t(inference, optimum.model, weighted, jitter, _CLIMBED_DF), data, jitter
        )
        # The last update of the precisions and the degrees of freedom has a closed form, and raises the bound.
        model = _with_student_t(inference, climbed.model, data, jitter)
        value = inference.evidence(model, data, jitter)
        optimum = climbed._replace(model=model, evidence=value, failed_initial_values=optimum.failed_initial_values)
        return inference.conclude(optimum, data, jitter)


@part
def _with_student_t(
    inference: Inference, model: Model, data: Data, jitter: Float[AnyArray, ""], df: float | None = None
) -> Model:
    """The model with Student t noise, whose precisions follow from its posterior; df=None takes the most likely df."""
    after = inference.posterior(model, data, jitter)
    squares = expected_squares(model, after, data) / model.noise_variance(data.points)
    student_t = StudentTLikelihood.of(noise.student_t_df(squares) if df is None else df, squares)
    return eqx.tree_at(lambda m: m.student_t, model, student_t, is_leaf=lambda node: node is None)
