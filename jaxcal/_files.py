"""Files that are written in one step, and the folder of the user's cache."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Temporary files that are being written. Code that ends the process early removes them.
_unfinished: set[Path] = set()


def remove_unfinished() -> None:
    """Remove the files that are being written."""
    for temporary in list(_unfinished):
        with suppress(OSError):  # some systems do not remove open files
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write. At the end it takes the place of `path`. After an error `path` is unchanged.

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
    """The folder for downloads and compiled programs: `$XDG_CACHE_HOME/jaxcal`, else `~/.cache/jaxcal`.

    It may not exist yet.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxcal"
