"""Compiled programs kept on disk: what one process has compiled, later ones only read.

JAX's persistent compilation cache, with a folder of the user and for programs of every size: jaxcal's are many and
small, and JAX alone keeps those that took a second. The command line and the workers of `sweep` turn it on themselves;
at import nothing is turned on. `JAX_ENABLE_COMPILATION_CACHE=0`, a variable of JAX, turns it off everywhere.
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

# What is kept of all machines and versions together, in bytes.
_MOST = 2**30


def enable_compilation_cache(path: str | os.PathLike | None = None) -> Path | None:
    """Keep every program that JAX compiles in this process, jaxcal's or not, for later processes.

    Only programs for the same kind of machine are read again, of the same versions of JAX and XLA. The folder must not
    be writable by users whom you do not trust: what it holds is executed.

    Args:
        path: the folder; None takes the one of the variable JAX_COMPILATION_CACHE_DIR, else one in the user's cache,
            `$XDG_CACHE_HOME/jaxcal/programs`, `~/.cache/jaxcal/programs` by default, of which at most 1 GiB is kept.

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
    reset_cache()  # after a first program without a folder JAX does not look for one again
    return folder


def cache_environment(path: str | os.PathLike | None = None) -> dict[str, str]:
    """The variables by which a process that has not imported JAX yet keeps its programs as this one would.

    Args:
        path: as of `enable_compilation_cache`.

    Example:
        >>> sorted(cache_environment("programs"))
        ['JAX_COMPILATION_CACHE_DIR', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS']
    """
    # Also where the variable was set after the import of JAX, which has not seen it then.
    named = _setting("jax_compilation_cache_dir") or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = path or named or _programs() / _machine()
    seconds = os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": seconds}


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # the type checker does not know JAX's settings


def _programs() -> Path:
    return user_cache() / "programs"


def _machine() -> str:
    """A name for this kind of processor: another one may lack instructions that a program has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        features = next(line for line in text.splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):  # not Linux
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _forget_oldest(folder: Path) -> None:
    """Delete the files that were written or read longest ago, where all together are too large."""
    files = sorted(_files(folder))
    together = sum(size for _, size, _ in files)
    for _, size, path in files:
        if together <= _MOST:
            return
        Path(path).unlink(missing_ok=True)
        together -= size


def _files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Of each file when it was last used, its size and its path."""
    # Not by `Path`: these are thousands, before a command begins.
    for parent, _, names in os.walk(folder):
        for name in names:
            if not name.endswith("-cache"):
                continue
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):  # another process deletes as well
                status = os.stat(path)
                yield max(status.st_atime, status.st_mtime), status.st_size, path
