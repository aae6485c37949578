"""Ratios of densities: against that of two normal distributions, and as the weights of conformal intervals."""

import jax
import numpy as np
import pytest

from jaxcal import Point, density_ratio
from jaxcal.calibrators import conformal

pytestmark = pytest.mark.any_precision


def normals(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1, (n, 2)), rng.normal([1, 0], 1, (n // 2, 2))


def test_of_two_normals_it_is_the_exponential_of_a_line():
    x, new_x = normals(8000)
    ratio = density_ratio.fit(x, new_x)
    at = np.array([[-1.0, 0.5], [0.0, 0.0], [1.0, -1.0], [2.0, 1.0]])
    np.testing.assert_allclose(np.log(ratio(at)), at[:, 0] - 0.5, atol=0.15)
    # As a mean over the others it is 1.
    np.testing.assert_allclose(np.mean(ratio(x)), 1, atol=0.05)


@pytest.mark.parametrize("kind", ["function", "forest"])
def test_a_classifier_of_the_user(kind):
    from sklearn.ensemble import RandomForestClassifier

    x, new_x = normals(400)
    step = lambda rows, is_new: lambda x: np.where(x[:, 0] > 0.5, 0.75, 0.2)
    forest = RandomForestClassifier(20, random_state=0)
    ratio = density_ratio.fit(x, new_x, classifier=step if kind == "function" else forest)
    found = np.asarray(ratio(np.array([[2.0, 0.0], [-2.0, 0.0]])))
    if kind == "function":
        np.testing.assert_allclose(found, [2 * 3, 2 * 0.25], rtol=1e-6)
    else:  # where it is certain the ratio is finite, and not 0
        assert 0 < found[1] < 1 < found[0] < np.inf
        assert not hasattr(forest, "classes_")


def test_estimated_weights_keep_the_coverage_after_a_shift():
    """Noise that grows with x, and larger x where it is asked."""
    rng = np.random.default_rng(0)
    noisy = lambda x: np.exp(x[:, 0] / 2) * rng.normal(size=len(x))
    (x, _), (other_x, seen) = normals(4000, 1), normals(4000, 2)
    ratio = density_ratio.fit(other_x, seen)
    y, (_, new_x) = noisy(x), normals(8000, 3)
    new_y, coverage = noisy(new_x), {}
    for name, weights in (("plain", None), ("weighted", ratio)):
        fitted = conformal.fit(x, Point(np.zeros(len(x))), y, weights=weights)
        lower, upper = fitted(new_x, Point(np.zeros(len(new_x)))).interval(0.9)
        coverage[name] = np.mean((lower <= new_y) & (new_y <= upper))
    assert coverage["plain"] < 0.84
    assert abs(coverage["weighted"] - 0.9) < 0.025
    assert fitted.guarantee(0.9).effective < 0.6 * len(x)


def test_wrong_arguments_are_quoted():
    x, new_x = normals(40)
    with pytest.raises(ValueError, match="new_x has 1 columns; x has 2"):
        density_ratio.fit(x, new_x[:, :1])
    with pytest.raises(TypeError, match="must have fit and predict_proba, or be a function; got int"):
        density_ratio.fit(x, new_x, classifier=3)
    with pytest.raises(ValueError, match="must give 40 probabilities between 0 and 1"):
        density_ratio.fit(x, new_x, classifier=lambda rows, is_new: lambda x: 2 * np.ones(len(x)))(x)
    ratio = density_ratio.fit(x, new_x)
    with pytest.raises(ValueError, match="x has 3 columns; the fit had 2"):
        ratio(np.ones((2, 3)))
    with pytest.raises(TypeError, match="x is traced"):
        jax.jit(ratio)(x)
