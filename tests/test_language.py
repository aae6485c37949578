"""Sentences that are read once: short, with a verb, in the field's standard terms and American spelling.

Docstrings, comments, messages and pages are read by syntax. Code is not looked at: fenced blocks, text between
backquotes, formulas, tables, headings, examples of docstrings, and targets of links. A sentence is

- long, if it has more than 25 words;
- a chain, if it has two of "that of", "those of", "what of", or "what" twice;
- without a verb, if it starts with a preposition and has none of the verbs below.
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_precision

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
# The most sentences of a kind, as a fraction or a number.
MOST_LONG, MOST_VERBLESS = 0.04, 20
# The regular expression of a word, and what to write instead.
TERMS = {
    r"laws?": "distribution",
    r"left out|leav(?:e|es|ing) out": "excluded, omitted, held out",
    r"in turns?": "alternating, or one after another",
    r"t(?:ells?|old) from": "distinguished from",
    r"sees": "uses, receives",
    r"shares? of": "fraction",
    r"promise[sd]?": "guarantee",
    r"somebody(?:'s)?|nobody": "who it is",
    r"foreseen": "predicted",
    r"rivals?": "compared method",
    r"so many": "the number",
    r"(?:quantile|check|tilted) loss": "pinball loss",
    r"start(?:ing)? (?:points?|values?)": "initial values",
    r"nuggets?": "jitter, noise variance",
    r"cross validation": "cross-validation",
    r"leave one out": "leave-one-out",
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
# A word does not begin or end inside of another one, or of a name.
WORDS = [
    (re.compile(rf"(?<![\w-])(?:{word.replace(' ', chr(92) + 's+')})(?![\w-])", re.IGNORECASE), term)
    for word, term in (TERMS | SPELLING).items()
]
CHAIN = re.compile(
    r"\b(?:that|those|what|ones?) of\b.*\b(?:that|those|what|ones?) of\b|\bwhat\b.*\bwhat\b", re.IGNORECASE
)
PREPOSITION = re.compile(r"(?:Of|By|With|Without|From|Nor|Beyond|Beside|Under|Above|Below|Where|In)\b")
VERB = re.compile(
    r"\b(?:is|are|was|were|be|has|have|had|do|does|did|can|may|must|will|should|would|"
    r"(?:add|begin|choose|come|compute|cost|count|cover|decide|depend|end|estimate|fall|fit|follow|give|go|hold|keep|"
    r"learn|make|map|maximize|mean|minimize|need|predict|raise|read|return|rise|run|set|show|split|start|stay|stop|take|"
    r"test|train|use|work|write)(?:s|es|ed)?|became|becomes?|began|chose|came|gave|held|kept|made|ran|took|wrote)\b"
)
# Names that others gave, by the file that quotes them.
KEPT = {
    "notebooks/bayesian_optimisation.ipynb": ["Cases for the nugget in modeling computer experiments"],
    "notebooks/feature_map_for_rio.ipynb": ["promises and pitfalls of deep kernel learning"],
}
# What is no running text of a page or a docstring, and what ends a paragraph.
BLOCKS = re.compile(
    r"^ *(```|~~~).*?^ *\1 *$|\$\$.*?\$\$|^ *(?:>>>|\.\.\. |\||#|!|<|:::).*?$", re.DOTALL | re.MULTILINE
)
CODE = re.compile(r"`[^`]*`|\$[^$]+\$|https?://\S+|(?<=\])\([^)]*\)")
ITEM = re.compile(r"^ *(?:[-*+]|\d+\.|\*{0,2}\w+:) +", re.MULTILINE)


def prose_of_page(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose_of_module(path: Path) -> str:
    """The docstrings, the messages of errors and the comments of a module, as paragraphs."""
    source = path.read_text(encoding="utf-8")
    return "\n\n".join([*strings(ast.parse(source)), *comments(source)])


def strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield from (text_of(part) for part in ast.walk(node.exc) if isinstance(part, ast.JoinedStr | ast.Constant))


def text_of(node: ast.JoinedStr | ast.Constant) -> str:
    """A string; values that are put in are code."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(each.value) if isinstance(each, ast.Constant) else "`value`" for each in node.values)


def comments(source: str) -> Iterator[str]:
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines.append(token.string.lstrip("# "))
        elif lines and token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            yield "\n".join(lines)
            lines = []


def prose_of_notebook(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def sentences(prose: str) -> Iterator[str]:
    """The sentences of running text, code as one word."""
    text = ITEM.sub("\n\n", CODE.sub("CODE", BLOCKS.sub("\n\n", prose)))
    for paragraph in re.split(r"\n\s*\n", text):
        yield from (each for each in re.split(r"(?<=[.!?:;])\s+(?=[A-Z\[(])", " ".join(paragraph.split())) if each)


def is_long(sentence: str) -> bool:
    return len(sentence.split()) > MOST_WORDS


def is_verbless(sentence: str) -> bool:
    return len(sentence.split()) > 3 and bool(PREPOSITION.match(sentence)) and not VERB.search(sentence)


def replaced_words(prose: str) -> Iterator[str]:
    text = CODE.sub("CODE", BLOCKS.sub("\n\n", prose))
    for word, term in WORDS:
        yield from (f"{match[0]!r}: write {term}" for match in word.finditer(text))


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
MODULES = sorted(ROOT.glob("jaxcal/**/*.py"))
PROSE = {path: prose_of_page(path) for path in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]}
PROSE |= {path: prose_of_module(path) for path in [*MODULES, *sorted(ROOT.glob("examples/*.py"))]}
PROSE |= {path: prose_of_notebook(path) for path in sorted(ROOT.glob("notebooks/*.ipynb"))}
SENTENCES = [(path, each) for path in [*PAGES, *MODULES] for each in sentences(PROSE[path])]


def shown(flagged: list[tuple[Path, str]]) -> str:
    return "\n" + "\n".join(f"{where(path)}: {sentence}" for path, sentence in flagged[:40])


def test_few_sentences_are_long():
    flagged = [(path, sentence) for path, sentence in SENTENCES if is_long(sentence)]
    assert len(flagged) <= MOST_LONG * len(SENTENCES), shown(flagged)


def test_no_sentence_is_a_chain():
    flagged = [(path, sentence) for path, sentence in SENTENCES if CHAIN.search(sentence)]
    assert not flagged, shown(flagged)


def test_sentences_have_a_verb():
    flagged = [(path, sentence) for path, sentence in SENTENCES if is_verbless(sentence)]
    assert len(flagged) <= MOST_VERBLESS, shown(flagged)


def test_standard_terms_in_american_spelling():
    flagged = []
    for path, prose in PROSE.items():
        for kept in KEPT.get(where(path), ()):
            assert kept in prose, f"{where(path)} no longer has {kept!r}: remove it from KEPT"
            prose = prose.replace(kept, "")
        flagged += [(path, word) for word in replaced_words(prose)]
    assert not flagged, shown(flagged)


@pytest.mark.parametrize(
    ("prose", "terms"),
    [
        ("A lawful outlaw shares a table; left-out, leave-one-out.", []),
        ("Its law\nis left\n  out.", ["distribution", "excluded"]),
        ("$$\na law\n$$\nThe law $x$ of $y$.\n$$\nlaw\n$$", ["distribution"]),
        ("It minimises `minimise` of\n[a colour](bayesian_optimisation.ipynb).", ["-ize", "-or"]),
        ("```python\nlaw\n```\ndevise, precise, four, our, analyses, nobody", ["who"]),
    ],
)
def test_replaced_words_are_detected(prose, terms):
    found = list(replaced_words(prose))
    assert len(found) == len(terms)
    assert all(f"write {term}" in line for line, term in zip(found, terms, strict=True))


def test_sentences_are_told_apart():
    prose = "First `a. B` one; then.\nSecond\nsentence. A third.\n\n- An item.\n- Another.\n\n```\nno\n```\n| no |\n"
    found = ["First CODE one; then.", "Second sentence.", "A third.", "An item.", "Another."]
    assert list(sentences(prose)) == found
    assert is_verbless("Of a base with a std of its own, the noise.")
    assert not is_verbless("In one fold it holds.")
    assert CHAIN.search("the mean is that of x, the std that of y")
    assert is_long("word " * 26)
