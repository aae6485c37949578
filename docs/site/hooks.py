"""What makes the site of the repository's own files: pages from outside of `docs`, links that hold on both, formulas.

On GitHub and on the site the same text is read. Links between files of the repository become links between pages;
where a file is none of the site's, its name stays without a link. Formulas become MathML, which browsers draw
themselves: nothing is loaded from elsewhere.
"""

import html
import logging
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Files of the repository that are pages of the site, and folders that a page lists.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "notebooks": "notebooks/index.md",
    "examples": "examples.md",
}
# Files that are there under their own names.
FILES = ("notebooks/*.ipynb", "benchmarks/results/**/*.*", "benchmarks/data/README.md", "examples/*.py")

CODE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
IN_NOTEBOOK = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<script.*?</script>|<style.*?</style>)", re.DOTALL)
# Where no line ends: about a ± and before a %, in a source that ends its lines anywhere.
KEPT_TOGETHER = re.compile(r"(?<=\d)\s(?=[±%])|(?<=±)\s(?=\d)")
HREF = re.compile(r'href="([^":#]+)"')
RAW_FORMULA = re.compile(r"(\${1,2})([^$]+?)\1")
FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)

log = logging.getLogger("mkdocs.hooks")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that the list of methods links to into the menu, under the headings of the list."""
    text = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    (menu,) = [entry["Methods"] for entry in config.nav or () if "Methods" in entry]
    for section in text.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        menu.append({heading: [f"methods/{page}" for page in re.findall(r"\]\((\w+\.md)\)", body)]})
    return config


@event_priority(100)  # before the plugin of the notebooks looks for them
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie outside of `docs`."""
    for path, uri in PAGES.items():
        if (ROOT / path).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for pattern in FILES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages; a figure stays with its ± and its %."""

    def replace(match: re.Match) -> str:
        mark, text, target, anchor = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        found = _file_of(target, page, files)
        if found is None:
            return text
        return f"{mark}[{text}]({_from(page, found.src_uri)}{anchor or ''})"

    def text(part: str) -> str:
        return KEPT_TOGETHER.sub("\N{NO-BREAK SPACE}", LINK.sub(replace, part))

    return "".join(part if k % 2 else text(part) for k, part in enumerate(CODE.split(markdown)))


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw formulas by MathML; of notebooks, whose text is HTML already, turn links into those of the site as well."""

    def draw(match: re.Match) -> str:
        kind, formula = match.groups()
        formula = html.unescape(formula).strip()
        if kind in ("div", "$$"):  # a frame that scrolls: not every browser scrolls MathML itself
            return f'<span class="formula">{convert(formula, display="block")}</span>'
        return convert(formula)

    def replace(match: re.Match) -> str:
        found = _file_of(match[1], page, files)
        return match[0] if found is None else f'href="{_from(page, found.dest_uri)}"'

    if not page.file.src_uri.endswith(".ipynb"):
        return FORMULA.sub(draw, content)
    parts = IN_NOTEBOOK.split(HREF.sub(replace, content))
    return "".join(part if k % 2 else RAW_FORMULA.sub(draw, part) for k, part in enumerate(parts))


def _file_of(target: str, page: Page, files: Files) -> File | None:
    """The file of the site that a link of a file of the repository leads to; None where it is none of the site's."""
    original = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(original), target))
    found = files.get_file_from_path(PAGES.get(path, path.removeprefix("docs/")))
    if found is None and not (ROOT / path).exists():
        log.warning("%s links to %s, which is not there.", original, target)
    return found


def _from(page: Page, uri: str) -> str:
    """A path of the site as a page has to name it."""
    return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
