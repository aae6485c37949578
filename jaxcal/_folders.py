"""The folder of the user's cache, where downloads and compiled programs are kept."""

import os
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/jaxcal`, else `~/.cache/jaxcal`; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxcal"
