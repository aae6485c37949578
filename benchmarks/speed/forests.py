"""The whole distribution of a forest for many rows, beside quantile-forest: `python benchmarks/speed/forests.py`.

A random forest of 500 trees is fitted to some rows, and 90 % intervals of 100,000 others are predicted: by scikit-learn
the leaves alone, which both need; by jaxcal all of its distribution; and by the package quantile-forest, where it is
installed (`pip install quantile-forest`), the two quantiles, of all targets in the leaves. Processor seconds, of one
thread.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell

LEVEL, COLUMNS, LEAST_IN_LEAF = 0.9, 8, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000, 20_000], help="to fit to")
    parser.add_argument("--new", type=int, default=100_000, help="rows to predict")
    parser.add_argument("--trees", type=int, default=500)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments), arguments.out)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    import jax

    import jaxcal as jc

    yield provenance("scikit-learn")
    yield f"processor seconds; {arguments.trees} trees, {arguments.new:,} rows to predict, {COLUMNS} columns"
    yield f"{'rows':>8}  {'':22}{'fit':>9}{'predict':>10}{'90 % cover':>13}"
    for number in arguments.rows:
        x, y = draw(number, 0)
        new, y_new = draw(arguments.new, 1)
        line = lambda name, fit, predict, ends, number=number, y=y_new: (
            f"{number:8}  {name:22}{fit:9.1f}{predict:10.1f}{np.mean((ends[0] <= y) & (y <= ends[1])):13.3f}"
        )
        grow = lambda x=x, y=y: jc.forests.fit(
            x, y, key=jax.random.key(0), model="random_forest", num_trees=arguments.trees, min_leaf_rows=LEAST_IN_LEAF
        )
        forest, fit = timed(grow)
        _, leaves = timed(lambda forest=forest, new=new: forest.trees.apply(new))
        yield f"{number:8}  {'the leaves alone':22}{'':9}{leaves:10.1f}"
        ends, predict = timed(lambda forest=forest, new=new: forest(new).interval(LEVEL))
        yield line("jaxcal", fit, predict, ends)
        if peer := of_peer(x, y, new, arguments.trees):
            yield line("quantile-forest", *peer)


def of_peer(x: np.ndarray, y: np.ndarray, new: np.ndarray, trees: int) -> tuple[float, float, np.ndarray] | None:
    """The seconds of quantile-forest's fit and prediction, and the ends of its intervals; None if it is not there."""
    try:
        from quantile_forest import RandomForestQuantileRegressor
    except ImportError:
        return None
    model = RandomForestQuantileRegressor(
        n_estimators=trees, min_samples_leaf=LEAST_IN_LEAF, max_samples_leaf=None, random_state=0
    )
    fitted, fit = timed(lambda: model.fit(x, y))
    levels = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    ends, predict = timed(lambda: fitted.predict(new, quantiles=levels))
    return fit, predict, ends.T


def timed(call: Callable) -> tuple:
    """What a call returns, and its processor seconds."""
    import jax

    began = time.process_time()
    found = jax.block_until_ready(call())
    return found, time.process_time() - began


def draw(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose noise depends on a column."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (number, COLUMNS))
    return x, np.sin(3 * x[:, 0]) + np.exp(x[:, 1]) * rng.normal(size=number)


if __name__ == "__main__":
    main()
