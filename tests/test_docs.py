"""The documentation: its code runs and prints what is shown, its links lead to files, its pages are in the menu."""

import importlib.util
import re
import shlex
from itertools import zip_longest
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import CASES
from typer.testing import CliRunner

from jaxcal.cli.app import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
# A block of code, and the text below it: what it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
# Blocks that import these are passed over where they are not installed.
OPTIONAL = (
    "catboost",
    "crepes",
    "flax",
    "lightgbm",
    "mapie",
    "quantile_forest",
    "tabicl",
    "tabpfn",
    "torch",
    "xgboost",
    "xgboost_distribution",
)
EXAMPLES = BLOCK.findall(README.read_text(encoding="utf-8"))
# Its programs need a cluster: `test_sweep_clusters.py` runs them.
CLUSTERS = DOCS / "how-to" / "clusters.md"
WITH_CODE = [page for page in PAGES if page != CLUSTERS and BLOCK.search(page.read_text(encoding="utf-8"))]
# Rounding decides how a training goes on: on another processor what these print is another network's.
NETWORKS = [f"jc.{case.method.__name__.rpartition('.')[2]}.fit" for case in CASES if case.is_network]
COMMAND = re.compile(r"```sh\n(jaxcal [^`]*)```\n\n```text\n([^`]*)```")
# Without the lines of tables, whose lengths follow the width of the screen.
NUMBERS_AND_WORDS = re.compile(r"\d+\.?\d*(?:e[+-]?\d+)?|[^\d\s\u2500-\u257f]+")


def named(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def same_precision():
    """A page may change the precision of its process."""
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="pages show what a session in JAX's default precision prints")
@pytest.mark.usefixtures("plt", "same_precision")
@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_the_code_of_a_page_runs_and_prints_what_is_shown(page, monkeypatch, tmp_path, capsys):
    """Its blocks in their order, in one namespace and an empty folder."""
    monkeypatch.delenv("JAXCAL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    text, namespace = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
    tolerance = 0.3 if any(fit in text for fit in NETWORKS) else 0.02
    for block, shown in BLOCK.findall(text):
        code = compile(block, str(page), "exec")
        if not_installed(block):
            continue
        with jax.numpy_rank_promotion("allow"), np.printoptions():  # as in a reader's session
            exec(code, namespace)
        printed = capsys.readouterr().out
        if shown:
            assert alike(shown, printed, tolerance), f"{page} shows\n{shown}\nIts code prints\n{printed}"


def not_installed(block):
    """The optional packages that a block imports and that are not here."""
    needed = [name for name in OPTIONAL if re.search(rf"(import|from) .*\b{name}\b", block)]
    return [name for name in needed if importlib.util.find_spec(name) is None]


@pytest.mark.any_precision
@pytest.mark.parametrize(("example", "shown"), EXAMPLES, ids=[f"example {k + 1}" for k in range(len(EXAMPLES))])
def test_an_example_of_the_readme_runs_and_prints_what_is_shown(example, shown, monkeypatch, capsys):
    """Each in a namespace of its own."""
    if absent := not_installed(example):
        pytest.skip(f"not installed: {', '.join(absent)}")
    monkeypatch.delenv("JAXCAL_DATA", raising=False)
    exec(compile(example, str(README), "exec"), {})
    assert not shown or alike(shown, capsys.readouterr().out, 0.02)


@pytest.mark.any_precision
def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110


@pytest.mark.any_precision
@pytest.mark.usefixtures("same_precision")
@pytest.mark.parametrize("fits_models", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_commands_of_their_page_run_and_print_what_is_shown(fits_models, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "how-to" / "command-line.md").read_text(encoding="utf-8")
    exec(BLOCK.search(text)[1], {})  # it writes the files
    without_seconds = lambda output: re.sub(r"[\d.]+ s\.", "", output)
    commands = COMMAND.findall(text)
    assert [command.split()[1] for command, _ in commands] == [*["calibrate"] * 3, "apply", "monitor"]
    for command, shown in commands[2:3] if fits_models else commands[:2] + commands[3:]:
        _, *arguments = shlex.split(command.replace("\\\n", ""))
        printed = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout  # no progress
        tolerance = 0.3 if fits_models else 0.02  # a network is among the models
        assert alike(*map(without_seconds, (shown, printed)), tolerance), f"{command} prints\n{printed}"


def alike(shown, printed, tolerance):
    """Whether two texts have the same words, and numbers that are near."""
    pairs = list(zip_longest(NUMBERS_AND_WORDS.findall(shown), NUMBERS_AND_WORDS.findall(printed), fillvalue=""))
    return all(one == other or near(one, other, tolerance) for one, other in pairs)


def near(shown, printed, tolerance):
    """Whether both are numbers, and differ by a unit of the last digit that is shown, or relatively by `tolerance`."""
    if not (shown[:1].isdigit() and printed[:1].isdigit()):
        return False
    unit = 10.0 ** -len(re.sub(r"e.*", "", shown).partition(".")[2])
    return abs(float(shown) - float(printed)) <= max(1.01 * unit, tolerance * float(shown))


@pytest.mark.any_precision
def test_what_a_page_shows_is_compared():
    assert alike("CRPS 0.52, [1. 2.5]\n90%", "CRPS 0.523,\n[1.0 2.4] 90%", 0.02)
    assert not alike("CRPS 0.52", "CRPS 0.54", 0.02)
    assert not alike("covers 90%", "covers 85%", 0.02)
    assert not alike("True", "False", 0.3)
    assert not alike("RMSE 1.0", "RMSE 1.0 1.0", 0.3)


@pytest.mark.any_precision
@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_the_links_of_a_page_lead_to_files(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        other = page.parent / path if path else page
        assert other.exists(), target
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), target


@pytest.mark.any_precision
def test_the_readme_has_links():
    assert [target for target in links(README) if not target.startswith("http")]


def links(page):
    """The targets of a page's links, outside of its code."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.any_precision
def test_every_page_is_in_the_menu():
    """The methods' by the list of them, as docs/site/hooks.py reads it."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu += "".join(f"methods/{target}\n" for target in links(DOCS / "methods" / "index.md"))
    assert [named(page) for page in PAGES if page.relative_to(DOCS).as_posix() not in menu] == []
    notebooks = (ROOT / "notebooks").glob("*.ipynb")
    assert [named(path) for path in notebooks if f"notebooks/{path.name}" not in menu] == []
