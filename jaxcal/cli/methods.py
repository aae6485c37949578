"""The methods by their names on the command line."""

import ast
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jaxcal as jc
from jaxcal.cli import files

# These calibrators do not use inputs. All others do.
_WITHOUT_INPUTS = ("crude", "gaussian-mle", "isotonic", "neural-quantiles", "split-conformal")


def first_lines(package: str) -> dict[str, str]:
    """The first line of the docstring of each public module of a package of jaxcal, by name."""
    docstrings = {
        name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        for name, file in _files_of(package).items()
    }
    return {name: docstring.partition("\n")[0] for name, docstring in docstrings.items()}


def _files_of(package: str) -> dict[str, Path]:
    """The files of the public modules of a package of jaxcal, by name."""
    folder = Path(__file__).parents[1] / package
    files_by_name = {file.stem: file for file in folder.glob("[!_]*.py")}
    files_by_name |= {file.parent.name: file for file in folder.glob("[!_]*/__init__.py")}
    return dict(sorted(files_by_name.items()))


def called(module: str) -> str:
    """The name of a calibrator's method on the command line."""
    return {"conformal": "split-conformal"}.get(module, module.replace("_", "-"))


def _calibrators() -> dict[str, str]:
    """The modules of all calibrators by the names of their methods."""
    return {called(module): module for module in _files_of("calibrators")}


def uses_inputs(names: list[str]) -> bool:
    """Whether the predictions of one of the methods depend on inputs."""
    return any(name not in _WITHOUT_INPUTS for name in names)


def find(method: str) -> list[str]:
    """The names in a text: one method, or a chain of several methods with commas between them.

    Raises:
        ValueError: if there is no method of a name.
    """
    known = list(_calibrators())
    names = [name.strip() for name in method.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no method {name!r}: {files.suggest(name, known)}")
    return names


def check_options(names: list[str], options: list[str]) -> None:
    """Raise ValueError if the method, or the last method of a chain, does not take an option, "by" or "weights"."""
    for option in options:
        if option == "weights" and len(names) > 1:
            raise ValueError("--weights goes with one method, and not with a chain of several.")
        if not _takes(names[-1], option):
            able = [name for name in _calibrators() if _takes(name, option)]
            raise ValueError(f"--method {names[-1]} does not use --{option}: {_listed(able)} do.")


def fit_of(names: list[str], options: dict[str, Any], training: dict[str, Any], *, has_inputs: bool, seed: int) -> Any:
    """The fit function of the method, or of a chain of several methods, with all its arguments but the data.

    Args:
        names: the names of the methods.
        options: arguments for all methods that take them.
        training: `x_train` and `y_train`, the rows that the model was trained on, or nothing.
        has_inputs: whether there are columns of inputs.
        seed: the seed of the random key.

    Raises:
        ValueError: if a method needs inputs or training rows that do not exist, or no method uses the training rows.
    """
    import jax

    training_names = [name for name in names if _takes(name, "x_train")]
    if bool(training) != bool(training_names):
        needs = "does not use" if training else "needs"
        method = ",".join(training_names or names)
        raise ValueError(f"--method {method} {needs} the rows that the model was trained on, --training.")
    steps = [_configured(name, options | training, has_inputs) for name in names]
    key = jax.random.key(seed)
    if len(steps) > 1:
        return partial(jc.chain.fit, calibrators=steps, key=key)
    return partial(steps[0], key=key) if _needs_key(steps[0]) else steps[0]


def _configured(name: str, options: dict[str, Any], has_inputs: bool) -> Callable:
    fit = _fit_of(name)
    wanted = inspect.signature(fit).parameters
    taken = {option: value for option, value in options.items() if option in wanted}
    if not has_inputs and uses_inputs([name]):
        if "kernel" not in wanted or "x_train" in wanted:
            raise ValueError(f"--method {name} needs columns of features, --features: there is none.")
        taken["kernel"] = "output"
    return partial(fit, **taken)


def _needs_key(fit: Callable) -> bool:
    parameter = inspect.signature(fit).parameters.get("key")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _fit_of(name: str) -> Callable:
    return importlib.import_module(f"jaxcal.calibrators.{_calibrators()[name]}").fit


def _takes(name: str, option: str) -> bool:
    """Whether the fit of a method has an option."""
    return option in inspect.signature(_fit_of(name)).parameters


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
