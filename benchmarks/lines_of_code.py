"""How much code the package has: `python benchmarks/lines_of_code.py [DIR ...]`.

A line counts if it holds code: no blank line, no comment, no docstring. Each DIR is a checkout, this one if none is
given; of several the folders stand side by side.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """The lines of a module that hold code."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in _NO_CODE]
    holding = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            holding -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(holding)


def by_folder(checkout: Path) -> Counter[str]:
    """The lines of each folder of the package, and of the files beside them."""
    package, found = checkout / "jaxcal", Counter()
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        found[inside.parts[0] if inside.parts[1:] else "."] += code_lines(path.read_text())
    return found


def main() -> None:
    checkouts = [Path(name) for name in sys.argv[1:]] or [Path(__file__).resolve().parents[1]]
    counts = [by_folder(checkout) for checkout in checkouts]
    for folder in sorted(set().union(*counts)):
        print(f"{folder:16}" + "".join(f"{count[folder]:8}" for count in counts))
    print(f"{'all':16}" + "".join(f"{count.total():8}" for count in counts))


if __name__ == "__main__":
    main()
