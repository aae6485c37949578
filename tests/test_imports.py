"""What is loaded when, in processes of their own: names when they are first used, and JAX when something computes."""

import subprocess
import sys

import pytest

import jaxcal


def loaded_after(*lines):
    """The modules that a process has loaded after these lines."""
    code = "\n".join(("import sys", *lines, "print(*sys.modules)"))
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_import_loads_no_name():
    found = loaded_after("import jaxcal")
    assert "jaxcal" in found
    assert not {"jax", "equinox", "jaxcal.distributions"} & found


def test_a_name_loads_what_it_needs():
    found = loaded_after("import jaxcal", "jaxcal.conformal")
    assert "jaxcal.calibrators.conformal" in found
    assert not {"jaxcal.gp", "jaxcal.networks", "optax", "gpjax", "scipy.linalg"} & found


def test_help_needs_no_jax():
    found = loaded_after("from jaxcal.cli.app import app", "app(['--help'], standalone_mode=False)")
    assert "typer" in found
    assert not {"jax", "equinox", "sklearn", "polars"} & found


@pytest.mark.parametrize("name", dir(jaxcal))
def test_every_name_is_there(name):
    assert getattr(jaxcal, name) is not None


def test_a_name_that_is_not_there():
    name = "no_such_method"
    with pytest.raises(AttributeError, match=name):
        getattr(jaxcal, name)
