"""The layers of the house: imports run downwards, and the core stands without any extra."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcal

pytestmark = pytest.mark.any_precision

PACKAGE = Path(jaxcal.__file__).parent
# From the bottom up. A module may import those of layers below its own, and of its own where it is listed as free.
LAYERS = [
    {"_programs"},
    {"_numpy"},
    {"_random"},
    {"_checks", "_extras", "_files", "_functions"},
    {"functional"},
    {"distributions", "guarantee", "progress"},
    {"frames"},
    {"metrics", "optimize", "datasets", "density_ratio", "compilation", "fitted_models", "serialization"},
    {"gp", "networks"},
    {"predictors", "calibrators"},
    {"online", "plots", "pipeline"},
    {"__init__"},
    {"cli", "sklearn", "sweep"},
    {"skpro"},
    {"__main__"},
]
EXTRAS = (
    "beartype",
    "gpjax",
    "matplotlib",
    "ngboost",
    "pandas",
    "polars",
    "pooch",
    "rich",
    "scipy.stats",
    "skpro",
    "sklearn",
    "typer",
)


def layer(name: str) -> int:
    return next(level for level, names in enumerate(LAYERS) if name in names)


def imported_modules(path: Path) -> set[str]:
    """The modules of jaxcal that a file imports, anywhere in it: 'functional', 'predictors', ..."""
    package = ("jaxcal", *path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(name.name.split(".")) for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            stem = start + tuple(node.module.split(".") if node.module else ())
            found |= {(*stem, name.name) for name in node.names}
    return {parts[1] for parts in found if parts[0] == "jaxcal" and len(parts) > 1}


def test_imports_run_downwards():
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        for name in imported_modules(path) - {parts[0]}:
            if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists():
                assert layer(name) < layer(parts[0]), f"{path} imports {name}"


def test_methods_do_not_import_their_own_kind():
    for kind in ("predictors", "calibrators"):
        # A method is a file or a folder.
        methods = {path.stem for path in (PACKAGE / kind).glob("[!_]*")}
        for path in (PACKAGE / kind).rglob("*.py"):
            own = path.relative_to(PACKAGE / kind).with_suffix("").parts[0]
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
            names = {name.name for node in nodes if node.module == f"jaxcal.{kind}" for name in node.names}
            stems = {node.module.split(".")[2] for node in nodes if (node.module or "").startswith(f"jaxcal.{kind}.")}
            assert own == "__init__" or not (names | stems) & (methods - {own}), path


def test_core_imports_without_any_extra():
    """And without gpjax, which takes longer to import than all the rest together."""
    code = f"""
import sys
for name in {EXTRAS!r}:
    sys.modules[name] = None  # makes every import of it fail
import jax, numpy as np, jaxcal as jc
x = np.linspace(0, 1, 20)
network = jc.mlp.fit(x, x**2, key=jax.random.key(0), max_epochs=2)
fitted = jc.rio.fit(x, network(x), x**2, inference=jc.gp.Exact(max_iterations=2))
print(len(jc.metrics.evaluate(x**2, fitted(x, network(x)))) > 5)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "True\n", run.stderr


def test_import_leaves_the_precision_alone():
    code = "import jax; before = jax.config.jax_enable_x64; import jaxcal; print(before == jax.config.jax_enable_x64)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"
