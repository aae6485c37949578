"""What a new method needs beside its module: a case in the tests, a page, a line in the list of methods, a name."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from cases import CASES

import jaxcal
from jaxcal.cli import methods as of_the_command_line

pytestmark = pytest.mark.any_precision

PACKAGE = Path(jaxcal.__file__).parent
PAGES = Path(__file__).parents[1] / "docs" / "methods"
# What fits methods together has pages there, too.
TOGETHER = ("pipeline", "online")


def modules_of(kind):
    """The public modules of predictors or calibrators: files and folders."""
    paths = [path for path in (PACKAGE / kind).glob("[!_]*") if path.suffix == ".py" or (path / "__init__.py").exists()]
    return [importlib.import_module(f"jaxcal.{kind}.{path.stem}") for path in sorted(paths)]


def named(method):
    return method.__name__.rpartition(".")[2]


METHODS = [module for kind in ("predictors", "calibrators") for module in modules_of(kind) if hasattr(module, "fit")]


def without(what, has):
    """Fails by the names of the methods that do not have it."""
    missing = [method.__name__ for method in METHODS if not has(method)]
    assert not missing, f"without {what}: {', '.join(missing)}"


def test_every_method_has_a_case():
    tested = {case.method for case in CASES}
    without("a case in tests/cases.py", lambda method: method in tested)
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_every_method_has_a_public_name():
    without("a name in jaxcal/__init__.py", lambda method: getattr(jaxcal, named(method), None) is method)


def text_of_page(method):
    page = PAGES / f"{named(method)}.md"
    return page.read_text(encoding="utf-8") if page.exists() else ""


def test_every_method_has_a_page_with_its_reference_and_its_picture():
    without("a page docs/methods/NAME.md", text_of_page)
    without("its reference in its page", lambda method: f"::: {method.__name__}\n" in text_of_page(method))
    without("its picture in its page", lambda method: f"(../pictures/{named(method)}.png)" in text_of_page(method))


def test_the_list_of_methods_has_each():
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    without("a line in docs/methods/index.md", lambda method: f"]({named(method)}.md)" in text)


def test_every_page_is_that_of_a_method():
    pages = {page.stem for page in PAGES.glob("*.md")}
    of_none = pages - {*map(named, METHODS), *TOGETHER, "index"}
    assert not of_none, f"docs/methods has pages of no method: {', '.join(sorted(of_none))}"


def test_every_calibrator_with_a_guarantee_is_tested_on_ties():
    source = Path(__file__).with_name("test_ties.py").read_text(encoding="utf-8")
    fits = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    tested = lambda method: f"jc.{named(method)}.fit" in fits
    without("a form in tests/test_ties.py", lambda method: tested(method) or not gives_guarantees(method))


def gives_guarantees(method):
    classes = [value for value in vars(method).values() if inspect.isclass(value)]
    return any(hasattr(kind, "guarantee") for kind in classes if kind.__module__.startswith(method.__name__))


@pytest.mark.parametrize("calibrator", modules_of("calibrators"), ids=named)
def test_the_command_line_knows_which_methods_need_inputs(calibrator):
    """Those none of whose forms depends on the inputs through the base alone."""
    by_base_alone = any(case.by_base_alone for case in CASES if case.method is calibrator)
    assert of_the_command_line.uses_inputs([of_the_command_line.called(named(calibrator))]) != by_base_alone
