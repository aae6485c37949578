"""Simulated problems whose noise depends on the inputs and is known."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxcal import _checks


class Heteroscedastic(NamedTuple):
    """Rows whose noise depends on the inputs, and the truth about them.

    Attributes:
        x: inputs [n, d], uniform over the domain.
        y: targets [n], normal with the mean and the std below.
        mean: true means [n].
        std: true standard deviations [n].
    """

    x: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, " n"]
    mean: Float[np.ndarray, " n"]
    std: Float[np.ndarray, " n"]


def heteroscedastic(name: str, n: int, *, seed: int) -> Heteroscedastic:
    """Draw n rows of a synthetic problem whose noise is known.

    - "g", on [0, 1]: mean 2 sin(2 pi x), std (x + 1) / 2 (Goldberg, Williams and Bishop 1998);
    - "y", on [0, 1]: mean 2 (exp(-30 (x - 1/4)^2) + sin(pi x^2)) - 2, std exp(sin(2 pi x)) / 3 (Yuan and Wahba 2004);
    - "w", on [0, pi]: mean sin(2.5 x) sin(1.5 x), std 0.01 + 0.25 (1 - sin(2.5 x))^2 (Williams 1996);
    - "5d", on [0, 1]^5: mean 0, std 0.45 (cos(pi + 5 sum x) + 1.2) (Genz 1984).

    Args:
        name: one of these problems.
        n: number of rows.
        seed: the seed of NumPy's default generator.

    Raises:
        ValueError: if there is no such problem, or n is less than 1.

    Source: Camporeale and Carè, "ACCRUE" (2021), section 5.1, has the problems in this form.

    Example:
        >>> from jaxcal import datasets
        >>> data = datasets.heteroscedastic("w", 100, seed=0)
        >>> data.x.shape, data.y.shape, round(float(data.std.max()), 1)
        ((100, 1), (100,), 1.0)
    """
    _checks.check_choice("name", name, tuple(_PROBLEMS))
    _checks.check_at_least("n", n, 1)
    problem = _PROBLEMS[name]
    rng = np.random.default_rng(seed)
    x = problem.width * rng.uniform(size=(n, problem.inputs))
    mean, std = heteroscedastic_moments(name, x)
    return Heteroscedastic(x, mean + std * rng.normal(size=n), mean, std)


def heteroscedastic_moments(
    name: str, x: Float[np.ndarray, "n d"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The true means and standard deviations [n] of a problem of `heteroscedastic` at the rows of x.

    Raises:
        ValueError: if there is no such problem, or x has another number of columns.

    Example:
        >>> from jaxcal import datasets
        >>> mean, std = datasets.heteroscedastic_moments("g", np.array([[0.0], [1.0]]))
        >>> std.tolist()
        [0.5, 1.0]
    """
    _checks.check_choice("name", name, tuple(_PROBLEMS))
    problem = _PROBLEMS[name]
    if x.ndim != 2 or x.shape[1] != problem.inputs:
        raise ValueError(f"x must have shape (n, {problem.inputs}); got {x.shape}.")
    t = x.sum(axis=1)
    return problem.mean(t), problem.std(t)


class _SimulatedProblem(NamedTuple):
    """Inputs on [0, width]^inputs; mean and std are functions of their sum."""

    inputs: int
    width: float
    mean: Callable[[np.ndarray], np.ndarray]
    std: Callable[[np.ndarray], np.ndarray]


_PROBLEMS = {
    "g": _SimulatedProblem(1, 1.0, lambda x: 2 * np.sin(2 * np.pi * x), lambda x: (x + 1) / 2),
    "y": _SimulatedProblem(
        1,
        1.0,
        lambda x: 2 * (np.exp(-30 * (x - 0.25) ** 2) + np.sin(np.pi * x**2)) - 2,
        lambda x: np.exp(np.sin(2 * np.pi * x)) / 3,
    ),
    "w": _SimulatedProblem(
        1, np.pi, lambda x: np.sin(2.5 * x) * np.sin(1.5 * x), lambda x: 0.01 + 0.25 * (1 - np.sin(2.5 * x)) ** 2
    ),
    "5d": _SimulatedProblem(5, 1.0, np.zeros_like, lambda t: 0.45 * (np.cos(np.pi + 5 * t) + 1.2)),
}
