"""How often intervals cover, simulated, beside what is stated of them: the table of `benchmarks.tables.coverage`."""

import pytest

from benchmarks.tables import _coverage_bands as bands
from benchmarks.tables import coverage
from jaxcal.guarantee import Guarantee

pytestmark = pytest.mark.any_precision

SIZES = (1, 5, 9, 19, 20, 99, 100, 999)
STATED = [name for name, method in coverage.METHODS.items() if method.band is not bands.nothing]


@pytest.mark.parametrize(("band", "rule"), [(bands.symmetric, "symmetric"), (bands.two_tails, "conformal")])
def test_ranks_in_exact_fractions_give_the_guarantees(band, rule):
    for size in SIZES:
        for level in coverage.LEVELS:
            assert band(size, level) == (pytest.approx(Guarantee.of(level, size, rule).coverage),) * 2


def test_bands_contain_the_level_where_the_rows_suffice():
    for level, size in ((0.5, 3), (0.8, 9), (0.9, 19), (0.9, 99), (0.99, 199)):
        for band in (bands.symmetric, bands.two_tails, bands.lines, bands.lines_that_end, bands.as_named):
            assert band(size, level) == pytest.approx((level, level))
    assert bands.lines(9, 0.5) == pytest.approx((0.4, 0.6))
    assert bands.lines(5, 0.99) == pytest.approx((4 / 6, 1))
    assert bands.lines_that_end(5, 0.99) == pytest.approx((4 / 6, 4 / 6))
    assert bands.crude(20, 0.9) == pytest.approx((18 / 21, 18 / 21))  # as `crude.fit` says: 85.7 %


def test_a_mean_out_of_its_band_is_named():
    assert coverage.is_as_stated(0.89, 0.0026, (0.9, 0.9))
    assert not coverage.is_as_stated(0.89, 0.0024, (0.9, 0.9))
    assert not coverage.is_as_stated(0.91, 0.0024, (0.9, 0.9))
    assert coverage.is_as_stated(0.95, 0.0, (0.9, 1.0))
    assert coverage.cell(0.89, 0.001, 0.0, False) == "89.0 ± 0.1 **!**"
    assert [coverage.stated(*band) for band in ((0.9, 0.9), (0.7, 1), (0.4, 0.6), (1, 1), (0, 1))] == [
        "90.0",
        "≥ 70.0",
        "40.0 to 60.0",
        "inf",
        "–",
    ]


@pytest.fixture
def few_runs(monkeypatch):
    """As many as a minute has room for."""
    for size in coverage.RUNS:
        monkeypatch.setitem(coverage.RUNS, size, 500)
    for size in coverage.FEWER_RUNS:
        monkeypatch.setitem(coverage.FEWER_RUNS, size, 30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*infinite", "ignore:.*too few", "ignore:.*beyond")
@pytest.mark.parametrize("name", STATED)
def test_intervals_cover_as_stated(name, few_runs):
    method = coverage.METHODS[name]
    for size in {9, 19, 99} & set(method.sizes):
        assert coverage.row(method, size)[1] == [], f"{size} rows"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "band", "size", "level"),
    [
        ('gaussian_mle, preset="paper", right base', bands.as_named, 9, 0.9),
        ('crude, preset="paper", wrong base', bands.two_tails, 19, 0.99),
        ("conformal, groups, without by: worst", bands.symmetric, 99, 0.9),
        ("conformal, shift, without weights", bands.at_least, 99, 0.9),
        ('isotonic, tails="support", right base', bands.lines, 19, 0.9),
    ],
)
@pytest.mark.filterwarnings("ignore:.*infinite", "ignore:.*too few", "ignore:.*beyond")
def test_too_few_that_are_covered_are_found(name, band, size, level, few_runs):
    method = coverage.METHODS[name]._replace(band=band)
    assert level in coverage.row(method, size)[1]
