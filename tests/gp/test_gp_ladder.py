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
N = 300
# What few steps of all rows may leave of the evidence, in nats.
NATS = 0.5


def rows(n=N, seed=0, noise=0.3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + noise * rng.normal(size=n)
    return x, y, 0.2 + 0.5 * np.abs(x[:, 1])


@pytest.fixture
def ladder(monkeypatch):
    """Of more than 150 rows, which begins with 80."""
    monkeypatch.setattr(exact, "_LADDER_ROWS", 150)
    monkeypatch.setattr(exact, "_FIRST_RUNG", 80)


def by_process(x, y, std, **options):
    return gaussian_process.fit(x, y, **options)


def by_rio(x, y, std, **options):
    return rio.fit(x, Point(np.sin(x[:, 0])), y, **options)


def by_rio_with_std(x, y, std, **options):
    return rio.fit(x, Normal(np.sin(x[:, 0]), std), y, **options)


def predicted(fitted, x, std):
    if isinstance(fitted, gaussian_process.GaussianProcess):
        return fitted(x)
    mean = np.sin(x[:, 0])
    return fitted(x, Point(mean) if fitted.base_std is None else Normal(mean, std))


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
    assert exact.rung_sizes(N) == [80, 155, 300]
    for seed, other in plain.items():
        x, y, std = rows(seed=seed)
        found = fit(x, y, std, inference=Exact(ard=ard))
        assert found.evidence > other.evidence - NATS
        assert found.inference == "exact"
        assert found.result != Result.NOT_FINITE
        one, same = predicted(found, x[:50] + 0.1, std[:50]), predicted(other, x[:50] + 0.1, std[:50])
        assert np.max(np.abs(one.mean - same.mean) / same.std) < 0.15
        np.testing.assert_allclose(one.std, same.std, rtol=0.1)
        # The posterior is that of all rows.
        assert found.process.posterior.weights.shape == (N,)


def test_known_noise_and_few_steps_are_kept(ladder):
    x, y, std = rows()
    few = by_process(x, y, std, inference=Exact(max_iterations=1))
    assert few.result == Result.STEP_LIMIT
    assert np.isfinite(few.evidence)
    many = by_process(x, y, std)
    assert many.evidence > few.evidence


def test_the_order_of_the_rows_does_not_matter(ladder):
    x, y, std = rows()
    order = np.random.default_rng(1).permutation(N)
    one, other = by_process(x, y, std), by_process(x[order], y[order], std[order])
    np.testing.assert_allclose(other.evidence, one.evidence, atol=1e-4 if X64 else NATS)
    np.testing.assert_allclose(other(x[:20]).mean, one(x[:20]).mean, atol=1e-4 if X64 else 5e-2)


def test_nothing_is_compiled(ladder):
    x, y, std = rows()
    with compilations() as compiled:
        by_rio_with_std(x, y, std)
    assert compiled == []


def test_several_outputs_climb_one_after_the_other(ladder):
    x, y, _ = rows()
    both = np.stack([y, 30 * y**2], axis=1)
    means = np.zeros((N, 2))
    fitted = rio.fit(x, Point(means), both, kernel="input")
    assert fitted.evidence.shape == (2,)
    for k in range(2):
        alone = rio.fit(x, Point(means[:, k]), both[:, k], kernel="input")
        np.testing.assert_allclose(fitted.evidence[k], alone.evidence, rtol=1e-6)


@pytest.mark.slow
def test_of_really_many_rows(monkeypatch):
    """With the tolerance of the plain search, to which it comes within half a nat."""
    x, y, std = rows(2200)
    found = by_process(x, y, std)
    monkeypatch.setattr(exact, "_LADDER_ROWS", 10_000)
    plain = by_process(x, y, std, inference=Exact(tolerance=0.005))
    assert found.evidence > plain.evidence - NATS
