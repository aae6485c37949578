"""Files that are written in one step, and the folder of the user's cache."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Files that are being written: what ends the process before they have their names removes them.
_unfinished: set[Path] = set()


def remove_unfinished() -> None:
    """Remove the files that are being written."""
    for temporary in list(_unfinished):
        with suppress(OSError):  # of a system that keeps open files
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` at the end; after an error all is as it was before.

    Raises:
        ValueError: if it cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{secrets.token_hex(8)}{target.suffix}")
    _unfinished.add(temporary)
    try:
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
            _unfinished.discard(temporary)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}.") from error


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/jaxcal`, else `~/.cache/jaxcal`, for downloads and compiled programs; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxcal"
