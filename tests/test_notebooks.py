"""The notebooks run: in a short form where they have one, and as they are stored in a fresh process.

The sizes that decide the time of a notebook stand in one cell with the tag "parameters". The metadata of that cell have
under "short" the assignments of other sizes, which make the notebook run in seconds.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def cells_of(notebook):
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def code_of(notebook):
    return [cell for cell in cells_of(notebook) if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def short_form(cell):
    """The assignments of other sizes; None of a cell that has no sizes."""
    metadata = cell["metadata"]
    return metadata.get("short") if "parameters" in metadata.get("tags", ()) else None


SHORT = [notebook for notebook in NOTEBOOKS if any(short_form(cell) is not None for cell in code_of(notebook))]


@pytest.mark.any_precision
@pytest.mark.parametrize("notebook", SHORT, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")  # where there is a screen
def test_the_short_form_of_a_notebook_runs(notebook, monkeypatch, plt):
    monkeypatch.delenv("JAXCAL_DATA", raising=False)
    namespace = {"__name__": "__main__"}
    # A reader's session promotes ranks; a notebook sets its own style.
    with plt.rc_context(), jax.numpy_rank_promotion("allow"):
        for cell in code_of(notebook):
            for code in filter(None, (source(cell), short_form(cell))):
                exec(compile(code, f"{notebook.name}, {cell['id']}", "exec"), namespace)


@pytest.mark.any_precision
@pytest.mark.parametrize("notebook", SHORT, ids=lambda path: path.stem)
def test_the_short_form_changes_sizes_that_are_there(notebook):
    [cell] = [cell for cell in code_of(notebook) if short_form(cell) is not None]
    assert assigned(short_form(cell)) <= assigned(source(cell))


def assigned(code):
    """The names in a code of nothing but assignments."""
    statements = ast.parse(code).body
    assert all(isinstance(statement, ast.Assign) for statement in statements), code
    nodes = [node for statement in statements for target in statement.targets for node in ast.walk(target)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.any_precision
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran(notebook):
    first, *_ = cells_of(notebook)
    assert first["cell_type"] == "markdown"
    assert source(first).startswith("# ")
    outputs = [output for cell in code_of(notebook) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert all("execution" not in cell["metadata"] for cell in code_of(notebook)), "the time of day is in the file"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook):
    code = "\n".join(map(source, code_of(notebook)))
    environment = {**os.environ, "MPLBACKEND": "Agg"}  # draws without a screen
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
