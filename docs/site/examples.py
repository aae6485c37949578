"""For mkdocstrings: a docstring's section "Example:" is one of examples, whose sessions are set as code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Names the section as griffe's parser of Google's style knows it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
