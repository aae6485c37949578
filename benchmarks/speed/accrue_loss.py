"""ACCRUE's loss with its gradient beside one sort: `python benchmarks/speed/accrue_loss.py`.

The bound is twice the time of `jnp.sort` of n values and of 20 elementwise passes over them, in the same process. And
100 runs of each of the paper's problems G, Y and W, five restarts of the network each, as one `vmap`: seconds with and
without compilation. Seconds of the loss are the least of several calls, after one that compiles.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import fastest, provenance, tell, verdict

ASKED_TIMES, ASKED_SECONDS, PASSES = 2, 60, 20
ROWS, RUNS = 100, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the loss")
    parser.add_argument("--repeats", type=int, default=7, help="calls, of which the fastest counts")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.rows, arguments.repeats), arguments.out)


def report(rows: int, repeats: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield provenance()
    yield from beside_a_sort(rows, repeats)
    for name in ("g", "y", "w"):
        first, again = toy_runs(name), toy_runs(name)
        yield (
            f"{name}: {RUNS} runs with five restarts in {first:.1f} s, compiled already in {again:.1f} s (asked for: "
            f"below {ASKED_SECONDS} s; {verdict(first < ASKED_SECONDS)})"
        )


def beside_a_sort(rows: int, repeats: int) -> Iterator[str]:
    """The loss with its gradient in the stds, against its bound."""
    import jax
    import jax.numpy as jnp

    from jaxcal.functional.scores import accrue_loss

    rng = np.random.default_rng(0)
    errors, std = jnp.asarray(rng.normal(size=rows)), jnp.asarray(rng.uniform(0.5, 2, size=rows))

    @jax.jit
    def passes(values):
        for _ in range(PASSES):  # the barrier keeps them from being fused into one
            values = jax.lax.optimization_barrier(1.5 * values + 0.5)
        return values

    sorted_values = jax.jit(jnp.sort)
    _, sort = fastest(lambda: sorted_values(errors), repeats)
    _, elementwise = fastest(lambda: passes(errors), repeats)
    value_and_grad = jax.jit(jax.value_and_grad(lambda std: accrue_loss(errors, std, 0.5)))
    _, loss = fastest(lambda: value_and_grad(std), repeats)
    bound = ASKED_TIMES * (sort + elementwise)
    yield f"{rows} values, 64 bits: sort {sort:.4f} s, {PASSES} passes {elementwise:.4f} s"
    yield (
        f"loss and gradient {loss:.4f} s, {loss / (sort + elementwise):.2f} times as long (asked for: below "
        f"{ASKED_TIMES}; {verdict(loss < bound)})"
    )


def toy_runs(name: str) -> float:
    """Seconds of all runs of a problem, one `vmap`."""
    import equinox as eqx
    import jax

    import jaxcal as jc

    drawn = [jc.datasets.heteroscedastic(name, ROWS, seed=seed) for seed in range(RUNS)]
    x, y, mean, _ = (np.stack(arrays) for arrays in zip(*drawn, strict=True))
    keys = jax.random.split(jax.random.key(0), RUNS)
    fit = lambda x, mean, y, key: jc.accrue.fit(x, jc.Point(mean), y, key=key)
    began = time.perf_counter()
    jax.block_until_ready(eqx.filter_vmap(fit)(x, mean, y, keys))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
