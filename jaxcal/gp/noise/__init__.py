"""The noise of a process: Gaussian, Student t, or Gaussian with a variance that depends on the inputs."""

from jaxcal.gp.noise.gaussian import GaussianNoise as GaussianNoise
from jaxcal.gp.noise.inputs import InputNoise as InputNoise
from jaxcal.gp.noise.student_t import StudentTNoise as StudentTNoise
