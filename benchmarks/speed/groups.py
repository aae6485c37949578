"""Many rows in many groups, beside crepes: `python benchmarks/speed/groups.py`.

crepes is a dependency of the extra `benchmarks`. A million rows with a thousand labels are fitted, and the 90 %
intervals of as many new rows predicted, by every calibrator with `by`, and by crepes with the labels as bins. Seconds
are the processor's, as other processes may share the cores: cold those of the first call, which compiles, warm the
least of several others. All in float64, from NumPy arrays.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell, verdict

LEVEL, ASKED_SECONDS = 0.9, 2.0


def calibrators() -> dict[str, Callable]:
    """What is fitted, by name."""
    import jaxcal as jc

    fits = (jc.conformal.fit, jc.crude.fit, jc.isotonic.fit, jc.gaussian_mle.fit)
    return dict(zip(("conformal", "crude", "isotonic", "gaussian_mle"), fits, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="to fit on, and to predict")
    parser.add_argument("--groups", type=int, default=1000, help="labels")
    parser.add_argument("--repeats", type=int, default=5, help="calls, of which the fastest counts")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    tell(report(parser.parse_args()), parser.parse_args().out)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield provenance("crepes")
    yield f"processor seconds, of as many rows to fit on as to predict; {100 * LEVEL:g} % intervals"
    yield f"{'':22}{'rows':>9}{'groups':>8}{'fit, cold':>12}{'warm':>9}{'predict, cold':>15}{'warm':>9}"
    size = arguments.rows, arguments.groups
    rows = drawn(*size)
    for name, fit in calibrators().items():
        cold, warm, ends = by_jaxcal(fit, rows, arguments.repeats)
        yield line(name, size, cold, warm)
        yield (
            f"fit and prediction (asked for: below {ASKED_SECONDS:g} s each): warm {verdict(max(warm) < ASKED_SECONDS)}"
            f", cold {verdict(max(cold) < ASKED_SECONDS)}"
        )
        if peer := PEERS.get(name):
            peer_cold, peer_warm, peer_ends = by_crepes(peer, rows, arguments.repeats)
            yield line(f"crepes, {PEER_KINDS[peer]}", size, peer_cold, peer_warm)
            yield beside(warm, peer_warm, ends, peer_ends)


PEERS = {"conformal": "ConformalRegressor", "crude": "ConformalPredictiveSystem"}
PEER_KINDS = {"ConformalRegressor": "regressor", "ConformalPredictiveSystem": "system"}


def line(name: str, size: tuple[int, int], cold: tuple[float, float], warm: tuple[float, float]) -> str:
    (fit, predict), (warm_fit, warm_predict) = cold, warm
    numbers = f"{fit:12.4f}{warm_fit:9.4f}{predict:15.4f}{warm_predict:9.4f}"
    return f"{name:22}{size[0]:9}{size[1]:8}{numbers}"


def beside(warm: tuple, peer_warm: tuple, ends: np.ndarray, peer_ends: np.ndarray) -> str:
    """How many times as fast jaxcal is, and how often the intervals are the same."""
    fit, predict = (peer / own for own, peer in zip(warm, peer_warm, strict=True))
    same = np.isclose(ends, peer_ends, rtol=1e-9).all(axis=0).mean()
    return (
        f"jaxcal is {fit:.2g} times as fast in the fit, {predict:.2g} in the prediction, "
        f"{sum(peer_warm) / sum(warm):.2g} in both, all warm; {100 * same:.1f} % of the intervals are the same"
    )


def by_jaxcal(fit: Callable, rows: tuple, repeats: int) -> tuple[tuple, tuple, np.ndarray]:
    """Seconds of fit and prediction, cold and warm, and the ends of the intervals."""
    import jax

    import jaxcal as jc

    mean, std, y, labels, *new, new_labels = rows
    fitting = lambda: fit(None, jc.Normal(mean, std), y, by=labels)
    jax.clear_caches()
    return measured(fitting, lambda module: module(None, jc.Normal(*new), by=new_labels).interval(LEVEL), repeats)


def by_crepes(kind: str, rows: tuple, repeats: int) -> tuple[tuple, tuple, np.ndarray]:
    """The same; the ends [2, rows]."""
    import crepes

    mean, std, y, labels, new_mean, new_std, new_labels = rows
    fitting = lambda: getattr(crepes, kind)().fit(y - mean, sigmas=std, bins=labels)
    options = {"sigmas": new_std, "bins": new_labels, "confidence": LEVEL}
    return measured(fitting, lambda fitted: fitted.predict_int(new_mean, **options).T, repeats)


def measured(fit: Callable, predict: Callable, repeats: int) -> tuple[tuple, tuple, np.ndarray]:
    """Processor seconds of fit and prediction, cold and warm, and what is predicted."""
    fitted, cold_fit, warm_fit = timed(fit, repeats)
    ends, cold_predict, warm_predict = timed(lambda: predict(fitted), repeats)
    return (cold_fit, cold_predict), (warm_fit, warm_predict), np.asarray(ends)


def timed(call: Callable, repeats: int):
    """What a call returns, the processor seconds of a first one, and the least of some others."""
    import jax

    result, seconds = None, []
    for _ in range(repeats + 1):
        began = time.process_time()
        result = jax.block_until_ready(call())
        seconds.append(time.process_time() - began)
    return result, seconds[0], min(seconds[1:])


def drawn(rows: int, groups: int) -> tuple[np.ndarray, ...]:
    """Means, stds, outcomes and labels to fit on; means, stds and labels to predict."""
    rng = np.random.default_rng(0)
    mean, new_mean = rng.normal(size=(2, rows))
    std, new_std = rng.uniform(0.5, 2, (2, rows))
    labels, new_labels = rng.integers(groups, size=(2, rows))
    return mean, std, mean + std * (rng.gamma(3, size=rows) - 3), labels, new_mean, new_std, new_labels


if __name__ == "__main__":
    main()
