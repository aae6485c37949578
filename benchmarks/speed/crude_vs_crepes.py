"""CRUDE beside crepes' conformal predictive system: `python benchmarks/speed/crude_vs_crepes.py`.

crepes is a dependency of the extra `benchmarks`. Both are fitted to the same residuals and standard deviations and give
the same quantiles of the same new rows, in float64, on all cores that there are. Their conventions differ: crepes'
"higher" percentile p of L sorted scores is the entry number ceil(p (L + 1)), jaxcal's conformal rank, so the quantiles
above the median are compared by value; where crepes takes the lower entry instead, below the median, they may be one
rank apart. Seconds are the least of several calls, jaxcal's after one that compiles; memory is the process's largest
resident set after all of jaxcal's calls, before crepes is imported.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell, verdict

LEVELS = np.arange(1, 22) / 22
ASKED_SECONDS, ASKED_MEMORY, ASKED_TIMES = 1.0, 1000, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="to fit on, and to predict")
    parser.add_argument("--repeats", type=int, default=5, help="calls, of which the fastest counts")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.rows, arguments.repeats), arguments.out)


def report(rows: int, repeats: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    import jax

    import jaxcal as jc

    jax.config.update("jax_enable_x64", True)
    yield provenance("crepes")
    yield f"{rows} rows to fit on, {rows} to predict, {len(LEVELS)} levels from {LEVELS[0]:.3f} to {LEVELS[-1]:.3f}"
    mean, std, y = drawn(rows, seed=0)
    new_mean, new_std, _ = drawn(rows, seed=1)
    base, new = jc.Normal(mean, std), jc.Normal(new_mean, new_std)
    start = peak_memory()
    yield f"{'':24}{'fit s':>9}{'predict s':>11}"
    module, fit = fastest(lambda: jc.crude.fit(None, base, y, rank="conformal"), repeats)
    ours, predict = fastest(lambda: module(None, new).icdf(LEVELS), repeats)
    peak = peak_memory()
    yield f"{'jaxcal':24}{fit:9.3f}{predict:11.3f}"

    from crepes import ConformalPredictiveSystem

    peer_fit, peer_predict, theirs = crepes_seconds(ConformalPredictiveSystem, mean, std, y, new_mean, new_std, repeats)
    yield f"{'crepes':24}{peer_fit:9.3f}{peer_predict:11.3f}"
    for what, seconds in (("fit", fit), ("predict", predict)):
        yield f"{what}: {seconds:.3f} s (asked for: below {ASKED_SECONDS:g} s; {verdict(seconds < ASKED_SECONDS)})"
    times = (peer_fit + peer_predict) / (fit + predict)
    yield (
        f"jaxcal is {peer_fit / fit:.1f} times as fast in the fit, {peer_predict / predict:.1f} in the prediction, "
        f"{times:.1f} in both together (asked for: {ASKED_TIMES}; {verdict(times >= ASKED_TIMES)})"
    )
    yield (
        f"peak memory {peak:.0f} MB, {peak - start:.0f} MB above that with the rows loaded (asked for: below "
        f"{ASKED_MEMORY} MB; {verdict(peak < ASKED_MEMORY)})"
    )
    above = LEVELS > 0.5
    gap = np.max(np.abs(np.asarray(ours)[:, above] - theirs[:, above]))
    yield f"greatest difference of a quantile above the median: {gap:.1e}"


def crepes_seconds(system, mean, std, y, new_mean, new_std, repeats: int) -> tuple[float, float, np.ndarray]:
    """Of fit and prediction, and the predicted quantiles."""
    fitted, fit = fastest(lambda: system().fit(y - mean, sigmas=std), repeats)
    call = lambda: fitted.predict_percentiles(new_mean, sigmas=new_std, higher_percentiles=list(100 * LEVELS))
    quantiles, predict = fastest(call, 1)
    return fit, predict, quantiles


def drawn(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, standard deviations, and outcomes of a skewed law."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=rows), rng.uniform(0.5, 2, rows)
    return mean, std, mean + std * (rng.gamma(3, size=rows) - 3)


def fastest(call: Callable, repeats: int):
    """What a call returns, and the seconds of the fastest of some, after a first one."""
    import jax

    result, seconds = jax.block_until_ready(call()), []
    for _ in range(repeats):
        began = time.perf_counter()
        result = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return result, min(seconds)


def peak_memory() -> float:
    """The largest resident set so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


if __name__ == "__main__":
    main()
