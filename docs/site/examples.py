"""For mkdocstrings: sections "Example:" are set as code, and a module has the members that it imports for others."""

import ast
import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Names the section as griffe's parser of Google's style knows it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)


class Reexports(griffe.Extension):
    """Names that a module hands on, `from a import b as b`, are public, as type checkers take them."""

    def on_alias_instance(self, *, node: ast.AST, alias: griffe.Alias, **kwargs: Any) -> None:
        """Mark what an import renames to its own name."""
        if isinstance(node, ast.ImportFrom) and any(name.name == name.asname == alias.name for name in node.names):
            alias.public = True
