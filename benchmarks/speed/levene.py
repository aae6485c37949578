"""The exact search for the best split beside a loop over scipy's Levene test: `python benchmarks/speed/levene.py`.

The search tests all splits of all features, the loop every tenth place, as the code of USNRT's authors does; the
residuals are those of a linear fit. At protein (36,584 rows, 9 features) the loop runs in full, at gpu_sgemm (193,280
rows, 14 features) on a sample of its places, and its time is multiplied by the inverse of their fraction. A place
between equal values is no split; how many are is printed, and the time is that of all places. Beside them, numpy's
argsort of the same columns, and the search of one feature from 10^4 to 10^6 rows. With orders: the features are sorted
already, as they are in all nodes of a tree but the first. Seconds are processor time, the loop's too. To be run on one
core, with NPROC=1.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from _common import fastest, provenance, tell, verdict

# How many times faster than the loop, at protein; in how many times numpy's argsort; the slope against n.
ASKED_RATIO = {"mean": 100, "median": 50}
ASKED_SORTS, ASKED_SLOPE = 5, 1.1
STEP, SHARE_OF_ROWS, SAMPLE = 10, 0.8, 300
SIZES = (10_000, 31_623, 100_000, 316_228, 1_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="calls of the search, of which the fastest counts")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.repeats), arguments.out)


def report(repeats: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield provenance("numpy", "scipy")
    yield from beside_a_loop("protein", None, repeats)
    yield from beside_a_loop("gpu_sgemm", SAMPLE, repeats)
    yield from against_rows(repeats)


def beside_a_loop(name: str, sample: int | None, repeats: int) -> Iterator[str]:
    """The search in both forms, the loop, and numpy's argsort."""
    import jax.numpy as jnp

    from jaxcal.functional import levene

    x, residuals = residuals_of(name)
    min_leaf = max(len(x) // 10, 1000)
    yield f"{name}: {x.shape[0]} rows, {x.shape[1]} features, min_leaf {min_leaf}, 64 bits"
    sort = min(seconds(lambda: np.argsort(x, axis=0)) for _ in range(repeats))
    on_device = jnp.asarray(x), jnp.asarray(residuals)
    orders, sorting = fastest(lambda: levene.feature_orders(on_device[0]), repeats, time.process_time)
    yield f"numpy's argsort of the columns {sort:.4f} s, feature_orders {sorting:.4f} s"
    for center, asked in ASKED_RATIO.items():
        search = partial(levene.best_split, *on_device, min_leaf=min_leaf, center=center)
        split, whole = fastest(search, repeats, time.process_time)
        _, ordered = fastest(partial(search, orders=orders), repeats, time.process_time)
        largest, loop, note = plain_loop(x, residuals, min_leaf, center, sample)
        yield (
            f"{center}-centered: all splits {whole:.4f} s, {whole / sort:.1f} times numpy's argsort (asked for: "
            f"{ASKED_SORTS}; {verdict(whole / sort <= ASKED_SORTS)}), |T| {float(split.statistic):.4f}; with orders "
            f"{ordered:.4f} s, {ordered / sort:.1f} times"
        )
        yield (
            f"  scipy at step {STEP} {loop:.2f} s ({note}), |T| {largest:.4f}: {loop / whole:.0f} and "
            f"{loop / ordered:.0f} times as long (asked for: {asked}; {verdict(loop / whole >= asked)})"
        )


def against_rows(repeats: int) -> Iterator[str]:
    """Seconds of the search of one feature against the number of rows."""
    import jax.numpy as jnp

    from jaxcal.functional import levene

    rng = np.random.default_rng(0)
    for center in ASKED_RATIO:
        times = []
        for rows in SIZES:
            x, residuals = jnp.asarray(rng.normal(size=(rows, 1))), jnp.asarray(rng.normal(size=rows))
            search = partial(levene.best_split, x, residuals, min_leaf=rows // 10, center=center)
            times.append(fastest(search, repeats, time.process_time)[1])
        slope = np.polyfit(np.log(SIZES), np.log(times), 1)[0]
        listed = ", ".join(f"{rows} rows {spent:.4f} s" for rows, spent in zip(SIZES, times, strict=True))
        yield f"{center}-centered, one feature: {listed}"
        yield f"  log-log slope {slope:.3f} (asked for: below {ASKED_SLOPE}; {verdict(slope < ASKED_SLOPE)})"


def plain_loop(
    x: np.ndarray, residuals: np.ndarray, min_leaf: int, center: str, sample: int | None
) -> tuple[float, float, str]:
    """The largest |T| that a loop finds, the seconds of the loop over every tenth place, and what that comprises."""
    import scipy.stats

    places = [(k, left) for k in range(x.shape[1]) for left in range(min_leaf, len(x) - min_leaf + 1, STEP)]
    chosen = places if sample is None else [places[i] for i in np.linspace(0, len(places) - 1, sample).astype(int)]
    is_split = lambda k, left: x[orders[left - 1, k], k] < x[orders[left, k], k]
    largest = 0.0
    began = time.process_time()
    orders = np.argsort(x, axis=0)
    sorted_by = time.process_time()
    for k, left in chosen:
        order = orders[:, k]
        squared = scipy.stats.levene(residuals[order[:left]], residuals[order[left:]], center=center)[0]
        if is_split(k, left):
            largest = max(largest, squared)
    loop = sorted_by - began + (time.process_time() - sorted_by) * len(places) / len(chosen)
    timed = "all" if sample is None else f"{len(chosen)}"
    note = f"{timed} of {len(places)} places timed, {sum(is_split(*place) for place in places)} splits among all"
    return largest**0.5, loop, note


def residuals_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The features of the first rows of a random order, and the residuals of a linear fit on them."""
    import jaxcal as jc

    data = jc.datasets.load(name)
    rows = np.random.default_rng(0).permutation(len(data.y))[: int(SHARE_OF_ROWS * len(data.y))]
    x, y = data.x[rows], data.y[rows]
    design = np.column_stack([np.ones(len(y)), x])
    return x, y - design @ np.linalg.lstsq(design, y, rcond=None)[0]


def seconds(call) -> float:
    """How long a call takes."""
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
