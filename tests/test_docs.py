"""The documentation: its code runs as it is written, its links lead to files, its pages are in the site's menu."""

import importlib.util
import re
from pathlib import Path

import jax
import pytest

import jaxcal

pytestmark = pytest.mark.any_precision

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]
# Blocks that import these are passed over where they are not installed.
OPTIONAL = ("catboost", "crepes", "lightgbm", "mapie", "torch", "xgboost")
# Its code needs a cluster: it is compiled alone. `test_sweep_clusters.py` runs the like of it.
CLUSTERS = DOCS / "clusters.md"


def named(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def same_precision():
    """A page may change the precision of its process."""
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.usefixtures("plt", "same_precision")
@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_the_code_of_a_page_runs(page, monkeypatch, tmp_path):
    """Its blocks in their order, in one namespace and an empty folder."""
    monkeypatch.delenv("JAXCAL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        code = compile(block, str(page), "exec")
        absent = [name for name in OPTIONAL if f"import {name}" in block or f"from {name}" in block]
        if page == CLUSTERS or any(importlib.util.find_spec(name) is None for name in absent):
            continue
        with jax.numpy_rank_promotion("allow"):  # as in a reader's session
            exec(code, namespace)


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_the_links_of_a_page_lead_to_files(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        other = page.parent / path if path else page
        assert other.exists(), target
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), target


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [named(page) for page in PAGES if page.relative_to(DOCS).as_posix() not in menu] == []
    notebooks = (ROOT / "notebooks").glob("*.ipynb")
    assert [named(path) for path in notebooks if f"notebooks/{path.name}" not in menu] == []


def test_every_method_has_a_page_with_its_reference():
    methods = [
        path
        for kind in ("calibrators", "predictors")
        for path in (Path(jaxcal.__file__).parent / kind).iterdir()
        if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
    ]
    for path in methods:
        page = DOCS / "methods" / f"{path.stem}.md"
        assert f"::: jaxcal.{path.parent.name}.{path.stem}\n" in page.read_text(encoding="utf-8"), page
