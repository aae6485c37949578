"""The words of the documentation, of docstrings and of messages: the field's standard terms, in American spelling.

Each pair is a word that is replaced, as a regular expression, and what to write instead. Code is not looked at: fenced
blocks, what stands between backquotes, examples of docstrings, targets of links, and names with an underscore.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_precision

ROOT = Path(__file__).parents[1]

# Words with spaces between them follow each other, also over the end of a line.
TERMS = {
    r"laws?": "distribution",
    r"(?:left|leaves?|leaving) out": "excluded, omitted, held out",
    r"in turns?": "alternating, or one after another",
    r"(?:tells?|told) from": "distinguished from",
    r"(?:tells?|told) \w+ from": "distinguished from",
    r"(?:tell|told|distinguish|distinguished) from none": "detected",
    r"sees": "uses, receives",
    r"shares? of": "fraction",
    r"(?:an?|the|this|its|their|larger?|largest|small|smaller) shares?": "fraction",
    r"(?:an?|one) (?:half|third|quarter|fifth|tenth) part": "fraction",
    r"honest(?:ly)?": "out-of-fold, held-out, valid",
    r"quirks?": "detail",
    r"promise[sd]?": "guarantee",
    r"dear": "expensive",
    r"cure[sd]?": "correct, remedy",
    r"mend(?:s|ed)?": "correct",
    r"by heart": "memorize, overfit",
    r"(?:to|can) be had": "available",
    r"(?:is|are|was|were) had": "available",
    r"(?:simply|just|easy|easily|obviously)": "nothing: the sentence is as clear without the word",
    r"(?:quantile|check|tilted) loss": "pinball loss",
    r"start(?:ing)? (?:points?|values?)": "initial values",
    r"pseudo-?(?:inputs?|points?)": "inducing points",
    r"nuggets?": "jitter, noise variance",
    r"cross validation": "cross-validation",
    r"leave one out": "leave-one-out",
    r"hyper-parameters?": "hyperparameter",
    r"per cent": "percent, %",
}
STEMS = (
    "categor|character|conformal|custom|discret|emphas|equal|final|general|initial|linear|local|marginal|maxim|memor|"
    "minim|normal|optim|organ|orthogonal|parallel|parametr|penal|quant|random|real|recogn|regular|serial|stabil|"
    "standard|summar|symmetr|synchron|token|util|vector|visual"
)
SPELLING = {
    rf"(?:[a-z-]*(?:{STEMS})|factor)is(?:e|es|ed|er|ers|ing|ation|ations)": "-ize, -ization: minimize, factorization",
    r"[a-z-]*(?:behavi|col|endeav|fav|flav|hon|lab|neighb|rig)our[a-z-]*": "-or: color, behavior, neighbor",
    r"(?:[a-z-]*(?:cent|met|lit)|fib|calib|theat)re[ds]?|[a-z-]*centring": "-er: center, meter, centering",
    r"(?:[a-z-]*label|[a-z-]*model|cancel|channel|level|signal|total|travel)l(?:ed|ing|ers?)": "single l: labeled",
    r"analys(?:e|ed|er|ing)": "analyze",
    r"(?:ana|cata|dia)logues?": "-og: analog, catalog",
    r"(?:licen|defen|offen)ces?": "-se: license",
    r"practis(?:e|es|ed|ing)": "practice",
    r"programmes?": "program",
    r"artefacts?": "artifact",
    r"judgements?": "judgment",
    r"fulfils?|skilful": "fulfill, skillful",
    r"ageing": "aging",
    r"grey(?:s|ed)?": "gray",
    r"learnt|spelt|burnt": "learned, spelled, burned",
    r"whilst|amongst": "while, among",
}
RULES = [([re.compile(word) for word in words.split(" ")], term) for words, term in (TERMS | SPELLING).items()]
WORD = re.compile(r"\w+(?:-\w+)*")

# What is kept, by the name of the file: titles and names that others gave.
KEPT = {
    "notebooks/bayesian_optimisation.ipynb": ["Cases for the nugget in modeling computer experiments"],
    "notebooks/feature_map_for_rio.ipynb": ["promises and pitfalls of deep kernel learning"],
}

CODE_OF_PAGES = re.compile(
    r"^```.*?^```|`[^`]*`|\]\([^)]*\)|https?://\S+|\$\$.*?\$\$|\$[^$]+\$|<[^>]*>", re.DOTALL | re.MULTILINE
)
CODE_OF_DOCSTRINGS = re.compile(r"^ *(?:>>>|\.\.\. ).*$|`[^`]*`|https?://\S+", re.MULTILINE)


def pages() -> list[Path]:
    """The documentation."""
    return [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")] + sorted(ROOT.glob("docs/**/*.md"))


def replaced_words(text: str, code: re.Pattern) -> Iterator[tuple[int, str]]:
    """Of every word that is replaced its line, from 0, and what to write."""
    prose = code.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text).lower()
    words = list(WORD.finditer(prose))
    for number, word in enumerate(words):
        for patterns, term in rules_of(word[0]):
            found = words[number : number + len(patterns)]
            follow = all(prose[left.end() : right.start()].isspace() for left, right in pairwise(found))
            if len(found) == len(patterns) and follow and all(map(matches, patterns, [each[0] for each in found])):
                shown = " ".join(each[0] for each in found)
                yield prose.count("\n", 0, word.start()), f"{shown!r}: write {term}"


@cache
def rules_of(word: str) -> list[tuple[list[re.Pattern], str]]:
    """The rules that begin with this word."""
    return [(patterns, term) for patterns, term in RULES if matches(patterns[0], word)]


@cache
def matches(pattern: re.Pattern, word: str) -> bool:
    return pattern.fullmatch(word) is not None


def strings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and all other strings of a module, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def of_page(path: Path) -> list[str]:
    return [f"{where(path)}:{line + 1}: {what}" for line, what in replaced_words(read(path), CODE_OF_PAGES)]


def of_module(path: Path) -> list[str]:
    return [
        f"{where(path)}:{first + line}: {what}"
        for first, text in strings(read(path))
        for line, what in replaced_words(text, CODE_OF_DOCSTRINGS)
    ]


def of_notebook(path: Path) -> list[str]:
    cells = [cell for cell in json.loads(read(path))["cells"] if cell["cell_type"] == "markdown"]
    return [
        f"{where(path)}: cell {number}, line {line + 1}: {what}"
        for number, cell in enumerate(cells)
        for line, what in replaced_words("".join(cell["source"]), CODE_OF_PAGES)
    ]


def read(path: Path) -> str:
    """The text of a file without what is kept in it; lines stay where they are."""
    text = path.read_text(encoding="utf-8")
    for kept in KEPT.get(where(path), ()):
        assert kept in text, f"{where(path)} no longer has {kept!r}: remove it from KEPT"
        text = text.replace(kept, " " * len(kept))
    return text


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    ("paths", "found_in"),
    [
        pytest.param(pages(), of_page, id="pages"),
        pytest.param(sorted(ROOT.glob("jaxcal/**/*.py")) + sorted(ROOT.glob("examples/*.py")), of_module, id="modules"),
        pytest.param(sorted(ROOT.glob("notebooks/*.ipynb")), of_notebook, id="notebooks"),
    ],
)
def test_standard_terms_in_american_spelling(paths, found_in):
    assert paths
    found = [line for path in paths for line in found_in(path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A lawful outlaw shares a table; left-out, leave-one-out.", []),
        ("Its law\nis left\n  out.", [(0, "distribution"), (1, "excluded")]),
        ("$$\na law\n$$\nThe law $x$ of $y$.\n$$\nlaw\n$$", [(3, "distribution")]),
        ("It minimises `minimise` of\n[a colour](bayesian_optimisation.ipynb).", [(0, "-ize"), (1, "-or")]),
        ("```python\nlaw\n```\ndevise, precise, four, our, analyses, Honest", [(3, "out-of-fold")]),
    ],
)
def test_what_is_found(text, expected):
    found = [(line, what.split("write ")[1]) for line, what in replaced_words(text, CODE_OF_PAGES)]
    assert len(found) == len(expected)
    for (line, term), (expected_line, start) in zip(found, expected, strict=True):
        assert line == expected_line
        assert term.startswith(start)
