"""The ladder of many known rows: some decide on the optimum, and few steps of more rows and of all end it."""

import jax
import numpy as np
import pytest
from compiled import compilations

from jaxcal import Normal, Point, gaussian_process, rio
from jaxcal.gp import Exact, exact
from jaxcal.optimize import Result

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
N = 400
# What few steps of all rows may leave of the evidence, in nats.
NATS = 0.5


def rows(n=N, seed=0):
    """Inputs, means of a base that knows what they do not say, targets, and stds that their noise has."""
    rng = np.random.default_rng(seed)
    x, mean = rng.normal(size=(n, 2)), rng.normal(size=n)
    std = 0.2 + 0.4 * rng.uniform(size=n)
    y = mean + np.sin(2 * mean) + np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + std * rng.normal(size=n)
    return x, mean, y, std


@pytest.fixture
def ladder(monkeypatch):
    """Of more than 150 rows, which begins with 100."""
    monkeypatch.setattr(exact, "LADDER_ROWS", 150)
    monkeypatch.setattr(exact, "_FIRST_RUNG", 100)


def by_process(x, mean, y, std, **options):
    fitted = gaussian_process.fit(x, y - mean - np.sin(2 * mean), **options)
    return fitted, fitted(x[:50] + 0.1)


def by_rio(x, mean, y, std, **options):
    fitted = rio.fit(x, Point(mean), y, **options)
    return fitted, fitted(x[:50] + 0.1, Point(mean[:50]))


def by_rio_with_std(x, mean, y, std, **options):
    fitted = rio.fit(x, Normal(mean, std), y, **options)
    return fitted, fitted(x[:50] + 0.1, Normal(mean[:50], std[:50]))


def test_every_rung_has_about_twice_the_rows_of_the_one_before():
    assert exact.rung_sizes(2000) == [2000]
    assert exact.rung_sizes(5000) == [1000, 2236, 5000]
    for n in (2001, 3000, 4999, 12_345, 50_000):
        sizes = exact.rung_sizes(n)
        assert (sizes[0], sizes[-1]) == (1000, n)
        assert len(sizes) > 1
        growth = np.divide(sizes[1:], sizes[:-1])
        assert (growth > 1.5).all()
        assert (growth < 3.4).all()


@pytest.mark.parametrize("ard", [True, False, "auto"], ids=["by column", "isotropic", "auto"])
@pytest.mark.parametrize("fit", [by_process, by_rio, by_rio_with_std])
def test_it_ends_where_the_plain_search_ends(fit, ard, request):
    plain = {seed: fit(*rows(seed=seed), inference=Exact(ard=ard)) for seed in (0, 1)}
    request.getfixturevalue("ladder")
    assert exact.rung_sizes(N) == [100, 200, 400]
    for seed, (alone, expected) in plain.items():
        found, predicted = fit(*rows(seed=seed), inference=Exact(ard=ard))
        assert found.evidence > alone.evidence - NATS
        assert found.inference == "exact"
        assert found.result != Result.NOT_FINITE
        # The posterior is that of all rows.
        assert found.process.posterior.weights.shape == (N,)
        assert np.max(np.abs(predicted.mean - expected.mean) / expected.std) < 0.15
        np.testing.assert_allclose(predicted.std, expected.std, rtol=0.1)


def test_a_limit_of_steps_is_kept(ladder):
    few, many = (by_process(*rows(), inference=Exact(max_iterations=most))[0] for most in (1, 1000))
    assert few.result == Result.STEP_LIMIT
    assert few.iterations < many.iterations
    assert few.evidence < many.evidence


def test_the_order_of_the_rows_does_not_matter(ladder):
    order = np.random.default_rng(1).permutation(N)
    one, other = by_rio(*rows())[0], by_rio(*(part[order] for part in rows()))[0]
    # The steps are in float32, and the fit ends where it is foreseen to gain less than 0.005 nats.
    np.testing.assert_allclose(other.evidence, one.evidence, rtol=0, atol=0.005 if X64 else NATS)
    x, mean, *_ = rows(20, seed=2)
    of = lambda fitted: fitted(x, Point(mean)).mean
    np.testing.assert_allclose(of(other), of(one), atol=1e-3 if X64 else 5e-2)


def test_nothing_is_compiled(ladder):
    with compilations() as compiled:
        by_rio_with_std(*rows())
    assert compiled == []


def test_several_outputs_climb_one_after_the_other(ladder):
    x, _, y, _ = rows()
    both = np.stack([y, 30 * y + 5], axis=1)
    means = np.zeros((N, 2))
    fitted = rio.fit(x, Point(means), both, kernel="input")
    assert fitted.evidence.shape == (2,)
    for k in range(2):
        alone = rio.fit(x, Point(means[:, k]), both[:, k], kernel="input")
        np.testing.assert_allclose(fitted.evidence[k], alone.evidence, rtol=1e-6)


@pytest.mark.slow
def test_of_really_many_rows(monkeypatch):
    """By the rungs that there are, with the tolerance of few rows."""
    given, inference = rows(2200), Exact(tolerance=0.005)
    found, _ = by_rio(*given, inference=inference)
    monkeypatch.setattr(exact, "LADDER_ROWS", 10_000)
    plain, _ = by_rio(*given, inference=inference)
    assert found.evidence > plain.evidence - NATS
