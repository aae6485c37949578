"""The examples of the README run as they are written, each in a namespace of its own."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_precision

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"example {k + 1}" for k in range(len(EXAMPLES))])
def test_an_example_of_the_readme_runs(example, monkeypatch):
    for library in ("lightgbm", "torch"):
        if library in example:
            pytest.importorskip(library)
    monkeypatch.delenv("JAXCAL_DATA", raising=False)
    exec(compile(example, str(README), "exec"), {})


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
