"""What the scripts of the papers' tables compute: marks of significance, cells, the report of finished runs.

And that all scripts import what is there.
"""

import ast
import importlib
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.tables import _report, _rio_report, _usnrt_report

pytestmark = pytest.mark.any_precision
ROOT = Path(__file__).parents[1]


def test_marks_are_those_of_the_paired_tests(rng):
    rio = rng.normal(size=30)
    for shift in (0.0, 0.2, 0.5, -0.5):
        values = rio + shift + rng.normal(size=30)
        p = stats.ttest_rel(values, rio).pvalue, stats.wilcoxon(values, rio).pvalue
        assert _report.p_values(values, rio) == pytest.approx(p)
        assert _report.marks(values, rio) == "†" * int(p[0] < 0.05) + "‡" * int(p[1] < 0.05)


def test_marks_of_five_runs_and_of_fewer():
    rio = np.arange(5.0)
    assert _report.marks(1.1 * rio + 1, rio) == "†"  # Wilcoxon's least p is 1/16
    assert _report.marks(rio, rio) == ""
    assert _report.marks([1.0], [2.0]) == ""


def test_a_failed_run_is_left_out_of_both_sides(rng):
    rio, values = rng.normal(size=(2, 20))
    assert _report.p_values([*values, math.nan, 1.0], [*rio, 0.0, math.nan]) == _report.p_values(values, rio)


@pytest.mark.parametrize(
    ("values", "cell"),
    [
        ([1.0, 2.0], "1.50 ± 0.71"),
        ([0.61, 0.63, math.nan], "0.620 ± 0.014"),
        ([123.4, 125.0], "124 ± 1"),
        ([2.0], "2.00"),
        ([math.nan], "–"),
    ],
)
def test_cells(values, cell):
    assert _report.mean_and_std(values) == cell


def test_markdown_table():
    assert _report.markdown_table(["", "RMSE"], [["RIO", "1.5"]]) == ("|     | RMSE |\n| --- | ---: |\n| RIO |  1.5 |")


@pytest.fixture
def records():
    """Two runs on yacht, in which RIO halves the error."""
    origin = {"jaxcal": "0", "jax": "1", "device": "cpu", "date": "today"}
    found = []
    for seed in (1, 0):
        common = {**origin, "dataset": "yacht", "seed": seed}
        found.append({**common, "system": "NN", "setting": "base", "RMSE": 2.0 + seed, "time_s": 1.0})
        for setting in _rio_report.SETTINGS:
            for i, system in enumerate(_rio_report.VARIANTS):
                metrics = dict.fromkeys(_rio_report.METRICS, 0.5) | {
                    "RMSE": (1 + seed / 2) * (1 + i),
                    "noise_variance": i,
                }
                found.append({**common, "system": system, "setting": setting, **metrics})
    return found


def test_report(records, tmp_path):
    _rio_report.write(records, 1, {"yacht": 3, "protein": 5}, tmp_path)
    text = (tmp_path / "rio_table1.md").read_text()
    assert "yacht 2 of 3, protein 0 of 5" in text
    cells = lambda start: next(
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(start)
    )
    assert cells("| yacht ")[:4] == ["yacht", "2", "2.50 ± 0.71", "1.25 ± 0.35"]
    assert cells("| yacht ")[4:8] == ["50.0", "yes", "0.126, 0.500", "yes"]
    assert cells("| yacht ")[-1] == "2.30 ± 0.93 †‡ → 1.46 ± 0.49"
    assert cells("| RIO ")[:3] == ["RIO", "1.25 ± 0.35 (1.25)", "1.46 ± 0.49"]
    table = (tmp_path / "rio_table1.csv").read_text().splitlines()
    assert table[0] == "# origin 0: jaxcal 0, jax 1, device cpu, date today"
    assert table[1].startswith("dataset,seed,setting,system,RMSE,NLPD")
    assert table[2] == "yacht,0,base,NN,2,,,1,,,,,,,,,0"
    assert len(table) == 2 + 2 * 13


def test_report_names_fits_that_failed(records, tmp_path):
    failed = records[1]
    failed |= {"result": _rio_report.NOT_FINITE, "RMSE": math.nan}
    _rio_report.write(records, 1, {"yacht": 2}, tmp_path)
    assert "- yacht, RIO, setting paper, seed 1" in (tmp_path / "rio_table1.md").read_text()


@pytest.mark.parametrize("kind", ["device", "jaxcal", "jax"])
def test_runs_of_two_machines_or_versions_are_not_compared(kind):
    made = {"jaxcal": "0.1.0+1a2b3c4", "jax": "0.10", "device": "here", "date": "today"}
    origins = {"USNRT": ("a", "a", "b"), "HNN": ("a", "b", "b")}
    records = [
        {"dataset": "cbm", "seed": seed, "system": system, "ece": 1.0} | made | {kind: origin}
        for system, of_seeds in origins.items()
        for seed, origin in enumerate(of_seeds)
    ]
    assert _usnrt_report.Cells(records, tuple(origins), ["cbm"]).count("cbm") == 2


def test_a_version_without_its_commit_is_that_of_a_day():
    record = {"jaxcal": "0.1.0", "jax": "0.10", "device": "here"}
    assert _report.made_by(record | {"date": "today"}) != _report.made_by(record | {"date": "tomorrow"})
    named = record | {"jaxcal": "0.1.0+1a2b3c4"}
    assert _report.made_by(named | {"date": "today"}) == _report.made_by(named | {"date": "tomorrow"})


def names_imported(script):
    """The modules of jaxcal that a script imports from, with each name."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "jaxcal":
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples"])
def test_scripts_import_what_is_there(folder):
    """Those that run for hours are not run here."""
    for script in sorted((ROOT / folder).rglob("*.py")):
        for module, name in names_imported(script):
            found = importlib.import_module(module)
            is_there = hasattr(found, name) or (hasattr(found, "__path__") and find_spec(f"{module}.{name}"))
            assert is_there, f"{script.relative_to(ROOT)} imports {name} from {module}"
