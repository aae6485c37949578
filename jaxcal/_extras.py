"""Packages that jaxcal needs for some methods alone."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(package: str, install: str) -> Iterator[None]:
    """About an import: where the package is missing, the error says what to install.

    Raises:
        ImportError: if it is.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{package} is not installed: pip install {install}.") from error
