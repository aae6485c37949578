"""What is stated of the coverage of an interval: the least and the greatest, for so many calibration rows and a level.

Ranks are counted here in exact fractions, without the library.
"""

import math
from collections.abc import Callable
from fractions import Fraction

from jaxcal.guarantee import WorstCaseGuarantee

Band = Callable[[int, float], tuple[float, float]]


def symmetric(size: int, level: float) -> tuple[float, float]:
    """Of absolute errors: the score of rank k = ceil((L + 1) c) covers with probability k / (L + 1)."""
    return _exactly(min(math.ceil((size + 1) * _exact(level)), size + 1), size)


def two_tails(size: int, level: float) -> tuple[float, float]:
    """Of signed errors: from rank a = floor((L + 1) (1 - c) / 2) to rank L + 1 - a."""
    return _exactly(size + 1 - 2 * math.floor((size + 1) * _tail(level)), size)


def of_neighbors(number: int) -> Band:
    """The same of a table of so many neighbors, if errors do not depend on the inputs."""
    return lambda size, level: two_tails(number, level)


def crude(size: int, level: float) -> tuple[float, float]:
    """Algorithm 1: a new row lies at or below the quantile at level p with probability (int(p L) + 1) / (L + 1)."""
    return _exactly(math.floor(size * (1 - _tail(level))) - math.floor(size * _tail(level)), size)


def crude_of_neighbors(number: int) -> Band:
    """The same of a table of so many neighbors, if errors do not depend on the inputs."""
    return lambda size, level: crude(number, level)


def lines(size: int, level: float) -> tuple[float, float]:
    """Straight lines between the j-th scores at levels j / (L + 1), and tails that end somewhere beyond them."""
    place = (size + 1) * _tail(level)
    # Both ends lie between neighboring scores, or beyond the outermost.
    return 1 - 2 * math.ceil(place) / (size + 1), 1 - 2 * math.floor(place) / (size + 1)


def lines_that_end(size: int, level: float) -> tuple[float, float]:
    """The same, where the outermost scores are the ends."""
    return lines(size, level) if (size + 1) * _tail(level) > 1 else _exactly(size - 1, size)


def lines_of_paper(size: int, level: float) -> tuple[float, float]:
    """Straight lines between the j-th scores at levels j / L, and an atom at the least."""
    low, high = (max(size * each, Fraction(1)) for each in (_tail(level), 1 - _tail(level)))
    return (math.floor(high) - math.ceil(low)) / (size + 1), (math.ceil(high) - math.floor(low)) / (size + 1)


def as_named(size: int, level: float) -> tuple[float, float]:
    """Exactly the level."""
    return level, level


def within_one_percent(size: int, level: float) -> tuple[float, float]:
    """The level, to 0.01."""
    return level - 0.01, level + 0.01


def at_least(size: int, level: float) -> tuple[float, float]:
    """The level, or more."""
    return level, 1.0


def worst_case(num_errors: Callable[[int], int], num_folds: Callable[[int], int | None]) -> Band:
    """What CV+ and its kin guarantee whatever model and data are, given how many errors and folds so many rows have."""
    return lambda size, level: (
        WorstCaseGuarantee(level, num_errors(size), num_folds(size)).coverage,
        1.0,
    )


def nothing(size: int, level: float) -> tuple[float, float]:
    """No statement."""
    return 0.0, 1.0


def _exact(level: float) -> Fraction:
    return Fraction(str(level))


def _tail(level: float) -> Fraction:
    return (1 - _exact(level)) / 2


def _exactly(places: int, size: int) -> tuple[float, float]:
    return places / (size + 1), places / (size + 1)
