"""Student t noise: outliers do not decide the fit; `functional.noise` has the formulas."""

from typing import ClassVar

import equinox as eqx
from jaxtyping import Float

from jaxcal._numpy import AnyArray, namespace
from jaxcal.functional import noise
from jaxcal.gp.model import Data, Model, StudentT, expected_squares
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, InitialOf, Noise

# The degrees of freedom of the first precisions, and those that the climb begins with.
_FIRST_DF, _CLIMBED_DF = 4.0, 10.0


class StudentTNoise(Noise):
    """Noise whose scale and degrees of freedom are learned; predictions are a `StudentT`.

    Every row has a precision of its own, e ~ N(0, variance / w), with w of a gamma distribution. The search for
    hyperparameters is the one of Gaussian noise, with the precisions that the targets alone suggest. From its end
    hyperparameters, degrees of freedom and precisions are climbed together: in alternation the degrees of freedom
    creep. It costs two to four times as much as `GaussianNoise`. It goes with `Exact` and `Sparse`.
    """

    in_numpy: ClassVar[bool] = True

    @property
    def is_gaussian(self) -> bool:
        """It is not."""
        return False

    @property
    def has_heavy_tails(self) -> bool:
        """It has."""
        return True

    def first_data(self, data: Data) -> Data:
        """With the precisions that the targets alone suggest."""
        first = noise.student_t_weights(data.targets**2, namespace(data.targets).asarray(_FIRST_DF, data.targets.dtype))
        return data._replace(relative_noise=1 / first)

    def fit(
        self, inference: Inference, initial_of: InitialOf, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> Process:
        """The process of the greatest bound: `functional.noise.student_t_bound`."""
        weighted = self.first_data(data)
        found = inference.search(initial_of(data, None), weighted, jitter, first)

        def squares(model: Model, data: Data) -> Float[AnyArray, " n"]:
            after = inference.posterior(model, data, jitter)
            return expected_squares(model, after, data) / model.noise_variance(data.points)

        student_t = StudentT.of(_CLIMBED_DF, squares(found.model, weighted))
        model = eqx.tree_at(lambda m: m.student_t, found.model, student_t, is_leaf=lambda node: node is None)
        climbed = inference.descend(model, data, jitter)
        # The last update is in closed form, and raises the bound.
        last = squares(climbed.model, data)
        model = eqx.tree_at(lambda m: m.student_t, climbed.model, StudentT.of(noise.student_t_df(last), last))
        value = inference.evidence(model, data, jitter)
        found = climbed._replace(model=model, evidence=value, failed_initial_values=found.failed_initial_values)
        return inference.conclude(found, data, jitter)
