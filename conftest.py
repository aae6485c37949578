"""What every test runs under: shapes checked, rank promotion an error, the same random numbers each time."""

import os

# One thread a worker: the tests are many small problems, and the workers share the cores.
os.environ.setdefault("NPROC", "1")

import jax
import numpy as np
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
# Nearly all of the time goes into compiling small programs that run once: half as long without optimisations.
jax.config.update("jax_disable_most_optimizations", True)
install_import_hook("jaxcal", "beartype.beartype")


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng(20201)
