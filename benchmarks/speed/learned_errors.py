"""One predictor with learned errors, beside intervals of one width and beside its own distributions.

`OMP_NUM_THREADS=1 python benchmarks/speed/learned_errors.py`. A pipeline is fitted to some hundred rows of each data
set, and predicts others. What is told of each predictor is the CRPS with learned errors, the default, over the one with
`recalibrate=jc.conformal.fit`, and over its own, if it gives distributions: geometric means over the data sets. The
coverage is of 90 % intervals, in the mean. None of the data sets is among those of
`benchmarks/tables/default_answer.py`.
"""

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _common import provenance, tell
from boosted_trees import DATASETS

import jaxcal as jc

NEW_ROWS, SEED = 2000, 5


def predictors() -> dict[str, tuple[Any, tuple[int, ...]]]:
    """What is fitted, by name, and to how many rows."""
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "HistGradientBoostingRegressor": (HistGradientBoostingRegressor(random_state=0), (300, 1000)),
        "RandomForestRegressor": (RandomForestRegressor(random_state=0), (300, 1000)),
        "RidgeCV": (make_pipeline(StandardScaler(), RidgeCV()), (300, 1000)),
        "jc.gaussian_process": (jc.gaussian_process.fit, (400,)),
        "jc.deep_ensemble": (jc.deep_ensemble.fit, (400,)),
        "jc.forests": (jc.forests.fit, (400,)),
        "jc.quantile_boosting": (jc.quantile_boosting.fit, (400,)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    warnings.simplefilter("ignore")
    tell(report(), parser.parse_args().out)


def report() -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance()
    yield f"{'predictor':32}{'rows':>6}{'sets':>6}{'over conformal':>16}{'over its own':>14}{'covers, %':>11}"
    for name, (predictor, sizes) in predictors().items():
        for size in sizes:
            found = [measured(predictor, dataset, size) for dataset in DATASETS]
            table = np.array([each for each in found if each is not None])
            over_conformal, over_own = np.exp(np.log(table[:, :2]).mean(0))
            own = f"{over_own:.3f}" if np.isfinite(over_own) else "no std"
            covered = f"{100 * table[:, 2].mean():.1f}"
            yield f"{name:32}{size:6}{len(table):6}{over_conformal:16.3f}{own:>14}{covered:>11}"


def measured(predictor: Any, dataset: str, size: int) -> tuple[float, float, float] | None:
    """Two ratios of CRPS and the coverage; None of a set with too few rows."""
    data = jc.datasets.load(dataset)
    x, y = np.asarray(data.x), np.asarray(data.y)
    if len(y) < 1.25 * size:
        return None
    order = np.random.default_rng(SEED).permutation(len(y))
    train, test = order[:size], order[size : size + NEW_ROWS]
    fit = lambda **last: jc.pipeline.fit(x[train], y[train], predictor=predictor, key=jax.random.key(0), **last)
    fitted, plain = fit(), fit(recalibrate=jc.conformal.fit)(x[test])
    chain: Any = fitted.chain
    learned, own = fitted(x[test]), chain.chains[0](x[test])
    crps = lambda each: float(jc.metrics.crps(y[test], each))
    over_own = crps(learned) / crps(own) if own.has_std else np.nan
    covered = float(jc.metrics.coverage(y[test], learned, confidence_level=0.9))
    return crps(learned) / crps(plain), over_own, covered


if __name__ == "__main__":
    main()
