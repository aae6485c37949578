"""Compiled programs on disk: one process compiles a program, and later processes read it.

This is JAX's persistent compilation cache, in a folder of the user. By default JAX keeps only programs that took a
second to compile. The programs of jaxcal are many and small, so that here programs of every size are kept. The command
line and the workers of `sweep` turn the cache on. An import of jaxcal does not turn it on. JAX's variable
`JAX_ENABLE_COMPILATION_CACHE=0` turns it off everywhere.
"""

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxcal import _checks
from jaxcal._files import user_cache

# The largest size of the programs of all machines and versions together, in bytes.
_MOST = 2**30


def enable_compilation_cache(path: str | os.PathLike | None = None) -> Path | None:
    """Keep every program that JAX compiles in this process, of jaxcal or not, for later processes.

    A later process reads a program only on the same kind of machine, with the same versions of JAX and XLA. The folder
    must not be writable by users whom you do not trust, because its programs are executed.

    Args:
        path: the folder. None takes the folder in the variable JAX_COMPILATION_CACHE_DIR. Without this variable it
            takes a folder in the user's cache, `$XDG_CACHE_HOME/jaxcal/programs`, by default
            `~/.cache/jaxcal/programs`. At most 1 GiB is kept in the user's cache.

    Returns:
        The folder; None if the variable JAX_ENABLE_COMPILATION_CACHE is 0, or the folder cannot be written to.

    Warns:
        UserWarning: if the folder cannot be written to.

    Example:
        >>> import jaxcal as jc
        >>> folder = jc.enable_compilation_cache()
    """
    if not _setting("jax_enable_compilation_cache"):
        return None
    settings = cache_environment(path)
    folder = Path(settings["JAX_COMPILATION_CACHE_DIR"])
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
        if _programs() in folder.parents:
            _forget_oldest(_programs())
    except OSError as error:
        _checks.warn(f"compiled programs are not kept: {error}. JAX_ENABLE_COMPILATION_CACHE=0 says so.")
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    seconds = settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))
    reset_cache()  # JAX does not look for a folder again after a first program without one
    return folder


def cache_environment(path: str | os.PathLike | None = None) -> dict[str, str]:
    """The environment variables for a process that has not imported JAX yet, so that it keeps its programs, too.

    Args:
        path: as in `enable_compilation_cache`.

    Example:
        >>> sorted(cache_environment("programs"))
        ['JAX_COMPILATION_CACHE_DIR', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS']
    """
    # The variable may have been set after the import of JAX, which did not read it then.
    named = _setting("jax_compilation_cache_dir") or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = path or named or _programs() / _machine()
    seconds = os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": seconds}


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # the type checker does not know JAX's settings


def _programs() -> Path:
    return user_cache() / "programs"


def _machine() -> str:
    """A name for this kind of processor. Another processor may lack instructions of a program."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        features = next(line for line in text.splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):  # not Linux
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _forget_oldest(folder: Path) -> None:
    """Delete the files that were written or read longest ago, if all files together are too large."""
    files = sorted(_files(folder))
    together = sum(size for _, size, _ in files)
    for _, size, path in files:
        if together <= _MOST:
            return
        Path(path).unlink(missing_ok=True)
        together -= size


def _files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """The time of the last use, the size and the path of each file."""
    # `os` is faster than `Path`: there can be thousands of files, and they are read before a command begins.
    for parent, _, names in os.walk(folder):
        for name in names:
            if not name.endswith("-cache"):
                continue
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):  # another process may delete files, too
                status = os.stat(path)
                yield max(status.st_atime, status.st_mtime), status.st_size, path
