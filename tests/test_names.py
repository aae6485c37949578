"""Names tell what they hold: a class name stands once, and a variable is a noun."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import jaxcal

pytestmark = pytest.mark.any_precision

PACKAGE = Path(jaxcal.__file__).parent
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
# What says nothing of what it holds.
NO_NOUN = re.compile(r"_?(found|given|(of|by)_\w+)")


def test_a_class_name_stands_once():
    places = defaultdict(list)
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(file)
    several = {name: files for name, files in places.items() if len(files) > 1}
    assert not several


def test_variables_are_nouns():
    """Functions, and variables that hold one, may begin with a preposition."""
    flagged = []
    for file, tree in TREES.items():
        functions = {
            id(node.targets[0]) for node in ast.walk(tree) if isinstance(node, ast.Assign) and is_function(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in functions:
                flagged += [f"{file}:{node.lineno}: {node.id}"] if NO_NOUN.fullmatch(node.id) else []
            elif isinstance(node, ast.arg) and NO_NOUN.fullmatch(node.arg):
                flagged.append(f"{file}:{node.lineno}: {node.arg}")
    assert not flagged, "\n" + "\n".join(flagged)


def is_function(node: ast.Assign) -> bool:
    return isinstance(node.value, ast.Lambda)
