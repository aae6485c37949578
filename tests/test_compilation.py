"""Programs on disk: a second process compiles nothing; the folder, its size and its absence are the user's to say."""

import os
import subprocess
import sys

import jax
import pytest

from jaxcal import compilation, enable_compilation_cache

pytestmark = pytest.mark.any_precision

STORY = """
import jax, jax.numpy as jnp, jaxcal as jc
jax.jit(lambda x: x + 1)(1.0)  # before the cache, where a process looks for one the first time
compiled = []
listen = lambda event, **_: compiled.append(1) if event.endswith("cache_misses") else None
jax.monitoring.register_event_listener(listen)
print(jc.enable_compilation_cache())
jax.jit(lambda x: jnp.sin(x) * 3)(1.0)
print(len(compiled))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's cache with nothing in it, and no variable that names another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def settings():
    """The settings of this process, put back after the test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation.reset_cache()


def told_by(code: str) -> list[str]:
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


def test_a_second_process_compiles_nothing(home):
    folder, misses = told_by(STORY)
    assert folder.startswith(str(home / "jaxcal" / "programs"))
    assert int(misses) > 0
    assert told_by(STORY) == [folder, "0"]


def test_a_variable_of_jax_turns_it_off(home, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    assert told_by(STORY)[0] == "None"
    assert not list(home.iterdir())


def test_a_folder_that_is_named_is_taken(home, settings, tmp_path):
    assert enable_compilation_cache(tmp_path / "mine") == tmp_path / "mine"
    assert enable_compilation_cache() == tmp_path / "mine"
    assert compilation.cache_environment()["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "mine")


def test_where_nothing_can_be_written_a_warning_says_so(home, settings):
    (home / "file").touch()
    with pytest.warns(UserWarning, match="not kept"):
        assert enable_compilation_cache(home / "file" / "folder") is None
    assert jax.config.jax_compilation_cache_dir is None


def test_what_was_used_longest_ago_is_forgotten(home, settings, monkeypatch):
    monkeypatch.setattr(compilation, "_MOST", 250)
    folder = enable_compilation_cache()
    for age, name in enumerate(["newest", "middle", "oldest"]):
        file = folder / f"{name}-cache"
        file.write_bytes(b"0" * 100)
        os.utime(file, (1e9 - age, 1e9 - age))
    enable_compilation_cache()
    assert sorted(file.name for file in folder.iterdir()) == ["middle-cache", "newest-cache"]
