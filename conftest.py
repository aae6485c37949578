"""What every test runs under: shapes checked, rank promotion an error, the same random numbers each time."""

import gc
import os
from pathlib import Path

# One thread a worker: the tests are many small problems, and the workers share the cores.
os.environ.setdefault("NPROC", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers, files, processes of the tests and later runs read what one of them has compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Programs that run once are not worth optimizing, here and in the processes of tests; there `make test-slow` does.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import numpy as np
import pytest
from jaxtyping import install_import_hook

# What a fit on the host calls hundreds of times: to check each call takes as long as all else.
OFTEN_CALLED = frozenset(
    (
        "jaxcal._numpy",
        "jaxcal.functional._lapack",
        "jaxcal.functional.gp_host",
        "jaxcal.functional.kernels",
        "jaxcal.functional.linalg",
        "jaxcal.gp.exact",
        "jaxcal.gp.host",
        "jaxcal.gp.kernels",
        "jaxcal.gp.model",
        "jaxcal.gp.newton",
        "jaxcal.gp.protocols",
        "jaxcal.gp.race",
        "jaxcal.gp.rows",
        "jaxcal.optimize.iterate",
    )
)


def checked_modules(enable_x64: str | None) -> list[str]:
    """The modules whose shapes are checked: all, or, where make runs the tests in both precisions, a part in each.

    Shapes do not depend on the precision. The fewer tests in 32 bits check what is called often, those in 64 the rest.
    """
    if enable_x64 is None:
        return ["jaxcal"]
    if enable_x64 == "0":
        return sorted(OFTEN_CALLED)
    root = Path(__file__).parent
    files = (file.relative_to(root).with_suffix("").parts for file in (root / "jaxcal").rglob("*.py"))
    names = {".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in files}
    # The hook takes a package for all that is in it.
    packages = {name for name in names if any(often.startswith(f"{name}.") for often in OFTEN_CALLED)}
    return sorted(names - OFTEN_CALLED - packages)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare JAX where tests run: the process that only gives tests to its workers starts without it."""
    gives_to_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if gives_to_workers:
        return
    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    # Nearly all of the time goes into compiling small programs that run once: less than half as long with XLA's older
    # emitters. A later version may not have them, and an unknown flag ends the process.
    if jax.__version_info__ < (0, 11):
        emitters = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ.setdefault("XLA_FLAGS", emitters)
    install_import_hook(checked_modules(os.environ.get("JAX_ENABLE_X64")), "beartype.beartype")
    # Traces are many small objects that live long: the collector would go through them again and again.
    gc.set_threshold(50_000, 20, 100)


def pytest_sessionfinish() -> None:
    """pytest collects garbage several times before it ends: not among all that was compiled."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def room_to_compile():
    """Many programs are forgotten after a file: they hold memory maps, and at Linux's limit for them XLA crashes."""
    import jax

    from jaxcal.sweep import _calls

    yield
    if _calls.memory_maps_are_half_used():
        jax.clear_caches()


@pytest.fixture(scope="module")
def own_programs():
    """For a file that changes constants of the library, which compiled programs hold: it shares none with others."""
    import jax

    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def half_precision():
    """Skips a test of float16 in compiled programs on processors that XLA has none for: those without AVX."""
    import jax

    try:
        jax.jit(lambda x: x.astype("float16").astype("float32") - 0.1)(np.ones(3, np.float32)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(f"XLA has no programs of half precision for this processor: {error}")


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng(20201)
