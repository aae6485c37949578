"""What `help` and editors show of the public fits: few arguments, short names of types, and options that are listed."""

import importlib
import inspect
import pkgutil
import typing

import pytest

from jaxcal import calibrators, pipeline, predictors
from jaxcal.pipeline import chain, cross_conformal

pytestmark = pytest.mark.any_precision

MODULES = [
    importlib.import_module(f"{package.__name__}.{found.name}")
    for package in (predictors, calibrators)
    for found in pkgutil.iter_modules(package.__path__)
    if not found.name.startswith("_")
]
MODULES += [pipeline, chain, cross_conformal]
MOST_ARGUMENTS, MOST_CHARACTERS = 12, 400

fits = pytest.mark.parametrize("fit", [pytest.param(module.fit, id=module.__name__) for module in MODULES])


@fits
def test_a_signature_is_short(fit):
    """The options of a training count as one argument."""
    signature = inspect.signature(fit)
    assert len(signature.parameters) <= MOST_ARGUMENTS
    assert len(str(signature)) < MOST_CHARACTERS


@fits
def test_every_argument_has_a_line_of_text_and_a_type(fit):
    parameters = inspect.signature(fit, eval_str=True).parameters.values()
    text = inspect.getdoc(fit) or ""
    for parameter in parameters:
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        assert f"    {stars}{parameter.name}: " in text
        assert parameter.annotation is not parameter.empty
        assert not isinstance(parameter.annotation, str)


OWN_OPTIONS = [
    options
    for module in MODULES
    for parameter in inspect.signature(module.fit, eval_str=True).parameters.values()
    for options in typing.get_args(parameter.annotation)
    if typing.is_typeddict(options) and options.__module__ == module.__name__
]


@pytest.mark.parametrize("options", [pytest.param(each, id=each.__module__) for each in OWN_OPTIONS])
def test_every_option_of_a_training_has_a_line_of_text(options):
    """`tests/networks/test_training.py` tests the options that several networks have in common."""
    for name in options.__annotations__:
        assert f"    {name}: " in (inspect.getdoc(options) or "")
