"""The exact search for the best split beside a loop over scipy's Levene test: `python benchmarks/speed/levene.py`.

All splits of all features at once, against every tenth split in a loop, as the authors of USNRT do it; the residuals
are those of a linear fit. At protein (36,584 rows, 9 features) the loop runs in full; at gpu_sgemm (193,280 rows, 14
features) it runs on a sample of its splits, and its time is multiplied by the inverse of their share. Beside them, the
time in which numpy argsorts the same columns, and the time of the search against the number of rows, from 10^4 to 10^6.
With orders: the features are sorted already, as they are for all nodes of a tree but the first. Run it on one core,
with NPROC=1.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from _common import fastest, provenance, tell, verdict

# How many times faster than the loop, at protein; the aim beyond, in times of numpy's argsort; the slope against n.
ASKED_RATIO = {"mean": 100, "median": 50}
ASKED_SORTS, ASKED_SLOPE = 10, 1.15
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
    orders, sorting = fastest(lambda: levene.feature_orders(on_device[0]), repeats)
    yield f"numpy's argsort of the columns {sort:.4f} s, feature_orders {sorting:.4f} s"
    for center, asked in ASKED_RATIO.items():
        search = lambda orders, center=center: levene.best_split(
            *on_device, min_leaf=min_leaf, center=center, orders=orders
        )
        split, whole = fastest(lambda search=search: search(None), repeats)
        _, ordered = fastest(lambda search=search: search(orders), repeats)
        largest, loop, note = plain_loop(x, residuals, min_leaf, center, sample)
        yield (
            f"{center}-centred: all splits {whole:.4f} s, with orders {ordered:.4f} s; scipy at step {STEP}"
            f"{note} {loop:.2f} s, {loop / whole:.0f} and {loop / ordered:.0f} times as long"
            + (f" (asked for: {asked}; {verdict(loop / whole >= asked)})" if sample is None else "")
        )
        yield (
            f"  {whole / sort:.1f} and, with orders, {ordered / sort:.1f} times numpy's argsort (the aim beyond: "
            f"{ASKED_SORTS}; {verdict(ordered / sort <= ASKED_SORTS)} with orders); |T| {float(split.statistic):.4f}, "
            f"the loop's best {largest:.4f}"
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
            options = {"min_leaf": rows // 10, "center": center}
            search = partial(levene.best_split, x, residuals, **options)
            times.append(fastest(search, max(repeats // 2, 2))[1])
        slope = np.polyfit(np.log(SIZES), np.log(times), 1)[0]
        listed = ", ".join(f"{rows} rows {spent:.4f} s" for rows, spent in zip(SIZES, times, strict=True))
        yield f"{center}-centred, one feature: {listed}"
        yield f"  log-log slope {slope:.3f} (asked for: below {ASKED_SLOPE}; {verdict(slope < ASKED_SLOPE)})"


def plain_loop(
    x: np.ndarray, residuals: np.ndarray, min_leaf: int, center: str, sample: int | None
) -> tuple[float, float, str]:
    """The largest |T| of every tenth split, the seconds of a loop over all of them, and what was left out."""
    import scipy.stats

    began = time.perf_counter()
    orders = np.argsort(x, axis=0)
    sorting = time.perf_counter() - began
    splits = [(k, left) for k in range(x.shape[1]) for left in range(min_leaf, len(x) - min_leaf + 1, STEP)]
    splits = [(k, left) for k, left in splits if x[orders[left - 1, k], k] < x[orders[left, k], k]]
    chosen = splits if sample is None else [splits[i] for i in np.linspace(0, len(splits) - 1, sample).astype(int)]
    largest = 0.0
    began = time.perf_counter()
    for k, left in chosen:
        order = orders[:, k]
        largest = max(largest, scipy.stats.levene(residuals[order[:left]], residuals[order[left:]], center=center)[0])
    loop = sorting + (time.perf_counter() - began) * len(splits) / len(chosen)
    note = "" if sample is None else f", from {len(chosen)} of its {len(splits)} splits,"
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
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
