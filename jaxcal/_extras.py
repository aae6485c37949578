"""Packages that jaxcal needs only for some methods."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(package: str, install: str) -> Iterator[None]:
    """A context for an import. If the package is missing, the error says what to install.

    Raises:
        ImportError: if the package is missing.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{package} is not installed: pip install {install}.") from error
