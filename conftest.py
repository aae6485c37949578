"""What every test runs under: shapes checked, rank promotion an error, the same random numbers each time."""

import os
from pathlib import Path

# One thread a worker: the tests are many small problems, and the workers share the cores.
os.environ.setdefault("NPROC", "1")
# Workers, files, processes of the tests and later runs read what one of them has compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import numpy as np
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
# Nearly all of the time goes into compiling small programs that run once: less than half as long with XLA's older
# emitters. A later version may not have them, and an unknown flag ends the process.
jax.config.update("jax_disable_most_optimizations", True)
if jax.__version_info__ < (0, 11):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")
install_import_hook("jaxcal", "beartype.beartype")


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file():
    """Programs are forgotten after the file: they hold memory maps, and at Linux's limit of 65,530 XLA crashes."""
    yield
    jax.clear_caches()


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng(20201)
