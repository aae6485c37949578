"""CRUDE beside crepes' conformal predictive system: `python benchmarks/speed/crude_vs_crepes.py`.

crepes is a dependency of the extra `benchmarks`. Both are fitted to the same residuals and standard deviations and give
the same quantiles of the same new rows, in float64, on all cores that there are. crepes' "higher" percentile p of L
sorted scores is the entry number ceil(p (L + 1)), its "lower" one the entry number floor(p (L + 1)): jaxcal's ranks
above and below the median. So all quantiles are compared by value. crepes is measured at fewer rows than jaxcal alone,
since its time grows faster than their number. Seconds are the least of several calls, after one that compiles; memory
is the process's largest resident set after jaxcal's calls at the most rows.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import fastest, peak_memory, provenance, tell, verdict

LEVELS = np.arange(1, 22) / 22
ASKED_SECONDS, ASKED_MEMORY, ASKED_TIMES = 1.0, 1000, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="to fit on, and to predict, by jaxcal alone")
    parser.add_argument("--peer-rows", type=int, default=30_000, help="the same by both")
    parser.add_argument("--repeats", type=int, default=5, help="calls, of which the fastest counts")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.rows, arguments.peer_rows, arguments.repeats), arguments.out)


def report(rows: int, peer_rows: int, repeats: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield provenance("crepes")
    yield f"{len(LEVELS)} levels from {LEVELS[0]:.3f} to {LEVELS[-1]:.3f}; as many rows to fit on as to predict"
    yield f"{'':12}{'rows':>9}{'fit s':>10}{'predict s':>11}"
    data = drawn(rows)
    start = peak_memory()
    fit, predict, _ = by_jaxcal(*data, repeats)
    peak = peak_memory()
    yield f"{'jaxcal':12}{rows:9}{fit:10.4f}{predict:11.4f}"
    yield from (asked(what, seconds) for what, seconds in (("fit", fit), ("predict", predict)))
    yield (
        f"peak memory {peak:.0f} MB, {peak - start:.0f} MB above that with the rows loaded (asked for: below "
        f"{ASKED_MEMORY} MB; {verdict(peak < ASKED_MEMORY)})"
    )
    yield from beside_crepes(drawn(peer_rows), peer_rows, repeats)


def asked(what: str, seconds: float) -> str:
    return f"{what}: {seconds:.3f} s (asked for: below {ASKED_SECONDS:g} s; {verdict(seconds < ASKED_SECONDS)})"


def beside_crepes(data: tuple, rows: int, repeats: int) -> Iterator[str]:
    """Both systems on the same rows."""
    fit, predict, ours = by_jaxcal(*data, repeats)
    yield f"{'jaxcal':12}{rows:9}{fit:10.4f}{predict:11.4f}"
    peer_fit, peer_predict, theirs = by_crepes(*data, repeats)
    yield f"{'crepes':12}{rows:9}{peer_fit:10.4f}{peer_predict:11.4f}"
    times = (peer_fit + peer_predict) / (fit + predict)
    yield (
        f"jaxcal is {peer_predict / predict:.1f} times as fast in the prediction, {times:.1f} in fit and prediction "
        f"together (asked for: {ASKED_TIMES}; {verdict(times >= ASKED_TIMES)})"
    )
    differ = np.any(~np.isclose(ours, theirs, rtol=1e-9, atol=1e-9), axis=0)
    yield (
        f"greatest difference of a quantile: {np.max(np.abs(ours - theirs)[:, ~differ]):.1e}; another rank at "
        f"{', '.join(f'{level:.3f}' for level in LEVELS[differ]) or 'no level'}"
    )


def by_jaxcal(mean, std, y, new_mean, new_std, repeats: int) -> tuple[float, float, np.ndarray]:
    """Seconds of fit and prediction, and the predicted quantiles."""
    import jaxcal as jc

    base, new = jc.Normal(mean, std), jc.Normal(new_mean, new_std)
    module, fit = fastest(lambda: jc.crude.fit(None, base, y), repeats)
    quantiles, predict = fastest(lambda: module(None, new).icdf(LEVELS), repeats)
    return fit, predict, np.asarray(quantiles)


def by_crepes(mean, std, y, new_mean, new_std, repeats: int) -> tuple[float, float, np.ndarray]:
    """Seconds of fit and prediction, and the predicted quantiles."""
    from crepes import ConformalPredictiveSystem

    system, fit = fastest(lambda: ConformalPredictiveSystem().fit(y - mean, sigmas=std), repeats)
    lower, higher = (list(100 * LEVELS[side]) for side in (LEVELS < 0.5, LEVELS >= 0.5))
    options = {"sigmas": new_std, "lower_percentiles": lower, "higher_percentiles": higher}
    call = lambda: system.predict_percentiles(new_mean, **options)
    quantiles, predict = fastest(call, repeats)
    return fit, predict, quantiles


def drawn(rows: int) -> tuple[np.ndarray, ...]:
    """Means, stds and outcomes of a skewed distribution to fit on; means and stds to predict."""
    rng = np.random.default_rng(0)
    mean, new_mean = rng.normal(size=(2, rows))
    std, new_std = rng.uniform(0.5, 2, (2, rows))
    return mean, std, mean + std * (rng.gamma(3, size=rows) - 3), new_mean, new_std


if __name__ == "__main__":
    main()
