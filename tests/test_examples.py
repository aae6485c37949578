"""The scripts of examples run; those of packages that are not there are skipped."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_precision

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"scikit_learn_pipeline": "pandas", "lightgbm_model": "lightgbm", "pytorch_network": "torch"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:X does not have valid feature names")  # LightGBM gave its columns names
def test_an_example_runs_and_its_intervals_hold(path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is of the extra sklearn")
    pytest.importorskip(NEEDS.get(path.stem, "sklearn"), reason="not a dependency: used where it is installed")
    runpy.run_path(str(path))
    *guarantee, coverage = capsys.readouterr().out.splitlines()
    assert "90 % interval" in " ".join(guarantee)
    assert 0.8 < float(coverage.split()[-1]) < 0.97
