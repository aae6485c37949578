"""Numbers as people store them: other orders of bytes, half and extended precision, masks; and what is refused."""

import warnings
from decimal import Decimal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc
from jaxcal import _checks

KEY, N = jax.random.key(0), 40
RNG = np.random.default_rng(0)
# Whole numbers, which every dtype holds.
X, MEAN = np.round(4 * RNG.normal(size=(N, 2))), np.round(8 * RNG.normal(size=N))
Y, STD = MEAN + np.round(4 * RNG.normal(size=N)), 1 + np.arange(N) % 3.0
# What is computed in float32, and what in the default precision.
SHORT = {
    "float16": lambda a: a.astype(np.float16),
    "bfloat16": lambda a: a.astype(jnp.bfloat16),
    "bfloat16 of JAX": lambda a: jnp.asarray(a, jnp.bfloat16),
    ">f2": lambda a: a.astype(">f2"),
    ">f4": lambda a: a.astype(">f4"),
}
LONG = {
    ">f8": lambda a: a.astype(">f8"),
    ">i4": lambda a: a.astype(">i4"),
    "unmasked": np.ma.array,
}
# Annotations, which are checked in 64 bits, know nothing of these, and the messages are others.
if not jax.config.jax_enable_x64:
    LONG["longdouble"] = lambda a: a.astype(np.longdouble)
    LONG["decimals"] = lambda a: np.vectorize(Decimal, otypes=[object])(a)
without_annotations = pytest.mark.skipif(jax.config.jax_enable_x64, reason="annotations are checked in 64 bits")


def of_distribution(convert, distribution):
    y, d = convert(Y), distribution
    return [d.mean, d.std, d.cdf(y), d.log_prob(y), d.crps(y), d.crps(y[0])]


def of_levels(convert):
    level, base = convert(np.array([0.0, 1.0])), jc.Normal(convert(MEAN), convert(STD))
    return [base.icdf(level), jc.Quantiles(np.array([0.25, 0.75]), convert(np.stack([MEAN, MEAN + 1], 1))).icdf(level)]


def of_metrics(convert):
    y, base, weights = convert(Y), jc.Normal(convert(MEAN), convert(STD)), convert(STD)
    return [metric(y, base, weights=weights) for metric in (jc.metrics.rmse, jc.metrics.crps, jc.metrics.coverage)]


def of_conformal(convert):
    base, by = jc.Point(convert(MEAN)), convert(STD)
    fitted = jc.conformal.fit(None, base, convert(Y), by=by)
    return [fitted.guarantee(0.5, 1.0).coverage, *fitted(None, base, by=by).interval(0.5)]


def of_rio(convert):
    x, base = convert(X), jc.Normal(convert(MEAN), convert(STD))
    fitted = jc.rio.fit(x, base, convert(Y), inference=jc.gp.Exact(max_iterations=1))(x, base)
    return [fitted.mean, fitted.std]


def of_online(convert):
    base, y = jc.Point(convert(MEAN)), convert(Y)
    return jc.online.run(jc.online.adaptive.init(base, y, confidence_level=0.9), base, y)[1]


def of_a_users_model(convert):
    fit = lambda x, y, *, key: lambda x: convert(np.asarray(x)[:, 0])
    return [jc.out_of_fold(fit, convert(X), convert(Y), key=KEY).mean]


WAYS = {
    "point": lambda convert: of_distribution(convert, jc.Point(convert(MEAN))),
    "normal": lambda convert: of_distribution(convert, jc.Normal(convert(MEAN), convert(STD))),
    "student_t": lambda convert: of_distribution(convert, jc.StudentT(4, convert(MEAN), convert(STD))),
    "empirical": lambda convert: of_distribution(
        convert, jc.Empirical(convert(MEAN), convert(STD), convert(np.sort(Y)))
    ),
    "levels": of_levels,
    "metrics": of_metrics,
    "conformal": of_conformal,
    "rio": of_rio,
    "online": of_online,
    "model": of_a_users_model,
}


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_what_they_are_converted_to(way):
    """Half precision is computed in float32, the rest in the default dtype, and nothing is warned of."""
    expected = {of: [np.asarray(each) for each in WAYS[way](lambda a, of=of: a.astype(of))] for of in ("f4", float)}
    for stored, convert in (SHORT | LONG).items():
        found = [np.asarray(each) for each in WAYS[way](convert)]
        for own, other in zip(found, expected["f4" if stored in SHORT else float], strict=True):
            assert own.dtype == other.dtype, stored
            np.testing.assert_array_equal(own, other, err_msg=stored)


@pytest.mark.usefixtures("half_precision")
def test_tracers_of_half_precision_are_computed_in_float32():
    mean, std, y = (jnp.asarray(a, jnp.float16) for a in (MEAN, STD, Y))
    crps = lambda *arrays: jc.Normal(*arrays[:2]).crps(arrays[2])
    for found in (jax.jit(crps)(mean, std, y), jax.vmap(crps)(mean[None], std[None], y[None])[0]):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, crps(mean, std, y), rtol=1e-6)
    gradient = jax.grad(lambda mean: crps(mean, std, y).sum())(mean)
    assert gradient.dtype == np.float16


@without_annotations
@pytest.mark.parametrize("level", [np.float16(0.9), np.longdouble("0.9"), np.array(0.9, ">f8"), jnp.bfloat16(0.9)])
def test_a_level_of_any_precision_is_that_number_of_python(level):
    base, known = jc.Normal(MEAN, STD), float(level)
    np.testing.assert_array_equal(base.interval(level), base.interval(known))
    scores = [jc.metrics.interval_score(Y, base, confidence_level=each) for each in (level, known)]
    assert scores[0] == scores[1]
    guarantee = jc.conformal.fit(None, base, Y).guarantee
    assert guarantee(level) == guarantee(known)


class HalfOfTorch:
    """As a tensor of bfloat16, which NumPy knows nothing of."""

    dtype = "torch.bfloat16"

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")

    def float(self):
        return Y.astype(np.float32)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (HalfOfTorch(), Y),
        ([np.longdouble(1), 2.5], [1, 2.5]),
        ([Y.astype(">f8"), Y], [Y, Y]),
        ([1.5, None], [1.5, np.nan]),
        (np.array([1e300], np.longdouble) * np.longdouble(1e300), [np.inf]),
        (np.array([1.5, 2.5]).view(np.memmap).astype(">f4"), [1.5, 2.5]),
    ],
    ids=["torch", "list", "nested", "None", "overflow", "memmap"],
)
def test_what_numpy_reads_is_read(values, expected):
    np.testing.assert_array_equal(_checks.as_floats("y", values), expected)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y + 1j, "y must hold real numbers; got dtype complex128"),
        ((Y + 1j).astype(">c16"), "y must hold real numbers; got dtype >c16"),
        (Y.astype([("a", ">f4")]), r"y must hold real numbers; got dtype \[\('a', '>f4'\)\]"),
        (np.arange(N).astype("M8[D]"), r"got dtype datetime64\[D\]: make numbers of them, such as days"),
        (list(np.arange(N).astype("m8[s]")), r"got dtype timedelta64\[s\]: make numbers of them"),
        (np.ma.array(Y, mask=np.arange(N) % 9 == 3), "y holds 5 masked values, the first at index 3: leave their rows"),
        ([*Y[1:], np.ma.masked], "y holds 1 masked values, the first at index 39"),
        (np.full(N, np.longdouble("1e4000")), r"y holds 40 values that are NaN or infinite, .* holds numbers up to"),
    ],
)
def test_targets_that_are_no_numbers_are_named(y, message):
    with pytest.raises(ValueError, match=message):
        jc.mlp.fit(X, y, key=KEY)


def test_a_mask_hides_no_label_and_no_input():
    hidden, base = np.arange(N) == 2, jc.Point(MEAN)
    with pytest.raises(ValueError, match="by holds 1 masked values, the first at index 2"):
        jc.conformal.fit(None, base, Y, by=np.ma.array(STD, mask=hidden))
    with pytest.raises(ValueError, match=r"x holds 1 masked values, the first at index \(2, 0\)"):
        jc.pipeline.fit(np.ma.array(MEAN, mask=hidden), Y, key=KEY)
    with pytest.raises(ValueError, match=r"confidence_level is masked: give a number\."):
        base.interval(np.ma.masked)


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="numbers are beyond the range of float32")
def test_numbers_beyond_the_range_of_float32_are_named_without_a_warning():
    with pytest.raises(
        ValueError, match=r"1 values that are NaN or infinite, .* 1: float32 holds numbers up to 3.4e\+38"
    ):
        jc.Point(np.array([1.0, 1e300]))
    assert jc.Normal(np.zeros(2), 1.0).cdf(np.array([-1e300, 1e300])).tolist() == [0, 1]


# What is refused, and how


@without_annotations
@pytest.mark.parametrize("level", ["0.9", None, 0.9j, [0.5, 0.9], True])
@pytest.mark.parametrize("kind", ["normal", "conformal", "cv+"])
def test_what_is_no_level_is_refused(kind, level):
    base = jc.Normal(MEAN, STD)
    fitted = jc.conformal.fit(None, base, Y)
    distribution = base if kind == "normal" else fitted(None, base)
    if kind == "cv+":
        fitted = jc.cross_conformal.fit(lambda x, y, *, key: lambda x: x[:, 0], X, Y, key=KEY)
        distribution = fitted(X)
    for call in (
        distribution.interval,
        fitted.guarantee,
        partial(jc.metrics.coverage, Y, base, confidence_level=level),
    ):
        with pytest.raises(ValueError, match=r"confidence_level must (be (a real|one) number|hold real|lie between)"):
            call(*(() if isinstance(call, partial) else (level,)))
    if not isinstance(level, bool | list):
        with pytest.raises(ValueError, match="p must "):
            distribution.icdf(level)


@without_annotations
def test_a_string_among_levels_is_refused():
    with pytest.raises(ValueError, match=r"confidence_levels must be an array of real numbers; got '0.5' in row 0"):
        jc.conditional_conformal.fit(None, jc.Point(MEAN), Y, confidence_levels=("0.5", 0.9))


def test_the_first_wrong_value_is_named_and_how_many_there_are():
    weights = np.where(np.arange(N) % 7 == 3, -0.5, 1.0)
    message = r"^weights must not be negative; got -0\.5 at index 3, the first of 6 such values\.$"
    with pytest.raises(ValueError, match=message):
        jc.gaussian_mle.fit(None, jc.Normal(MEAN, STD), Y, weights=weights)
    with pytest.raises(ValueError, match=r"^step_sizes must be positive; got -0\.2 at index 1\.$"):
        jc.online.adaptive.init_aggregated(jc.Point(MEAN), Y, confidence_level=0.5, step_sizes=np.array([0.1, -0.2]))


def nothing(*data, **options):
    """A fit function without a return."""


def line(x, y):
    return lambda x: x[:, 0]


@without_annotations
@pytest.mark.parametrize(
    "fit",
    [
        lambda: jc.out_of_fold(nothing, X, Y, key=KEY),
        lambda: jc.cross_conformal.fit(partial(nothing, option=1), X, Y, key=KEY),
        lambda: jc.pipeline.fit(X, Y, predictor=nothing, key=KEY),
        lambda: jc.pipeline.fit(X, Y, predictor=line, calibrators=[nothing], key=KEY),
        lambda: jc.pipeline.fit(X, Y, predictor=line, recalibrate=nothing, key=KEY),
        lambda: jc.chain.fit(X, jc.Point(MEAN), Y, calibrators=[jc.crude.fit, nothing], key=KEY),
    ],
)
def test_a_fit_function_that_returns_none_is_named(fit):
    with pytest.raises(TypeError, match=r"the fit function nothing returned None: is its return missing\?"):
        fit()


def test_a_fit_function_that_returns_no_function_is_named():
    class Model:
        def predict(self, x):
            return x[:, 0]

    with pytest.raises(TypeError, match="must return a function; got Model: did you mean its method predict"):
        jc.out_of_fold(lambda x, y, *, key: Model(), X, Y, key=KEY)


@pytest.mark.parametrize(
    ("fraction", "shown"), [(1.0, "100 %"), (0.999, "100 %"), (1 / 3, "33 %"), (0.025, "2.5 %"), (1e-7, "0.00001 %")]
)
def test_percents_have_no_exponent(fraction, shown):
    assert _checks.percent(fraction) == shown


def test_all_of_the_values_are_100_percent_of_them():
    with pytest.warns(UserWarning, match="^100 % of the PIT values are 0 or 1 in double precision"):
        jc.isotonic.fit(None, jc.Normal(MEAN, 1e-6), MEAN + 1)


@pytest.mark.parametrize("model", ["quantile_boosting", "ngboost"])
def test_a_constant_is_that_of_the_targets(model):
    """Of the rows that trees are fitted to, where the others vary."""
    pytest.importorskip("sklearn" if model == "quantile_boosting" else model)
    fit = jc.quantile_boosting.fit if model == "quantile_boosting" else partial(jc.forests.fit, model=model)
    seed = int(jax.random.bits(KEY, dtype="uint32")) >> (model == "quantile_boosting")
    held_out = np.random.default_rng(seed).permutation(N)[0]
    with pytest.raises(ValueError, match=r", y is constant \(3\): there is no uncertainty to learn from"):
        fit(X, np.where(np.arange(N) == held_out, 5.0, 3.0), key=KEY)


@pytest.mark.parametrize("shift", ["auto", "constant", "scaled", "none"])
def test_stds_that_are_subnormal_are_refused(shift):
    tiny = np.finfo(jnp.zeros(0).dtype).tiny
    with pytest.raises(ValueError, match=r"base.std must be at least .*, the least normal number of .*, or 0; 40 val"):
        jc.gaussian_mle.fit(None, jc.Normal(MEAN, STD * float(tiny) / 8), Y, shift=shift)
    with pytest.raises(ValueError, match=r"\(y - base.mean\) / base.std leaves the range of float\d\d"):
        jc.gaussian_mle.fit(None, jc.Normal(MEAN, STD * float(tiny)), 1e3 * Y, shift=shift)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = jc.gaussian_mle.fit(None, jc.Normal(MEAN, STD * 1e4 * float(tiny)), Y, shift=shift)
    assert np.isfinite(fitted(None, jc.Normal(MEAN, STD * 1e4 * float(tiny))).std).all()
