"""The commands: `jaxcal demo`, `calibrate`, `apply`, `monitor`, `methods` and `data`.

They compute in 64 bits, which the library itself never turns on. An error in the input ends a command with one line and
exit code 2.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import numpy as np

try:
    import typer

    from jaxcal.cli import console
except ImportError as error:
    raise ImportError("The command line needs an extra: pip install 'jaxcal[cli]'.") from error

import jaxcal as jc
from jaxcal.cli import files
from jaxcal.cli import methods as method_names
from jaxcal.cli.calibrate import apply, calibrate
from jaxcal.cli.monitor import monitor
from jaxcal.cli.options import Force

if TYPE_CHECKING:
    from jaxcal.distributions import Distribution

T = TypeVar("T")

app = typer.Typer(cls=console.Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _say_version(asked: bool | None) -> None:
    if asked:
        import jax

        console.say(f"jaxcal {jc.__version__}, JAX {jax.__version__}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _set_up(
    version: Annotated[bool | None, typer.Option("--version", callback=_say_version, is_eager=True)] = None,
) -> None:
    """Turn the predictions of any regression model into calibrated distributions."""
    import jax

    jax.config.update("jax_enable_x64", True)
    jc.enable_compilation_cache()
    # SciPy reads the variable when JAX imports it, at the first factorization. Several threads of OpenBLAS would wait
    # for each other, and use the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


# jaxcal demo


@app.command()
def demo(
    dataset: Annotated[str, typer.Option(help="A data set of `jaxcal data`.")] = "auto_mpg",
    seed: Annotated[int, typer.Option(help="Of the model and of the folds.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for two pictures.")] = Path("jaxcal-demo"),
    force: Force = False,
) -> None:
    """Calibrate a model of scikit-learn on real data, and show what its intervals hold before and after."""
    import jax
    from sklearn.ensemble import GradientBoostingRegressor

    pictures = out / "reliability.png", out / "intervals.png"
    data = _ask(jc.datasets.load, dataset)
    _make_folder(out)
    for picture in pictures:
        files.check_output(picture, "--out", [], force=force)
    console.say(f"{dataset}: {len(data.y)} rows, {data.x.shape[1]} features, target {data.target_name}.")
    model = GradientBoostingRegressor(random_state=seed)
    folds, key = jc.pipeline.Folds(folds=5), jax.random.key(seed)
    fit = partial(jc.pipeline.fit, data.x, data.y, predictor=model, method=folds, key=key)
    with console.working(
        "Fit boosted trees, RIO and a last step to all rows and, for out-of-fold errors, without each of 5 folds"
    ):
        usual = fit(calibrators=[jc.gaussian_mle.fit], recalibrate=None).steps[-1]
        fitted = fit(calibrators=[jc.rio.fit])
    usual = replace(usual, name="std of its training errors")
    first, *others = fitted.steps
    console.say(f"\n{replace(fitted, steps=(first, usual, *others))}\n\n{fitted.guarantee(0.9)}\n")
    with console.working("Draw two pictures"):
        forecasts = {"by training errors": usual.predictions, "by jaxcal.pipeline": fitted.out_of_fold}
        _draw(pictures, data.target_name, data.y, forecasts)
    reliability, intervals = pictures
    console.say(
        f"\n{intervals}: predictions of rows that the model was fitted without, and their 90 % intervals.\n"
        f"{reliability}: the fraction of the targets below each predicted quantile. A calibrated forecast follows the "
        "diagonal up to chance, the gray band.\n\nNext, on a file of yours:"
    )
    console.say_columns(
        [
            ("jaxcal calibrate FILE --target y", "fits a short list of models, with intervals"),
            ("jaxcal calibrate FILE --target y --prediction y_hat", "adds intervals to the predictions of your model"),
            ("jaxcal methods", "lists what else there is"),
        ]
    )


def _ask(question: Callable[[str], T], dataset: str) -> T:
    """The answer to a question about a data set: its place, or the data."""
    try:
        return question(dataset)
    except OSError as error:  # the set is not here and could not be downloaded, or JAXCAL_DATA names no directory
        raise ValueError(str(error)) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}.") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write into the folder {folder}: permission denied.")


def _draw(pictures: tuple[Path, Path], target_name: str, y: np.ndarray, forecasts: "dict[str, Distribution]") -> None:
    """The reliability of the forecasts, and their intervals beside each other."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")  # to files, also where there is no screen
    reliability, intervals = pictures
    jc.plots.reliability_diagram(y, forecasts)
    plt.savefig(reliability, dpi=200)
    with plt.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        _, axes = plt.subplots(1, len(forecasts), figsize=(7.6, 3), sharey=True, layout="constrained")
    for ax, (name, forecast) in zip(axes, forecasts.items(), strict=True):
        jc.plots.intervals(y, forecast, confidence_levels=[0.9], max_rows=80, ax=ax).set_ylabel("")
        ax.set_title(f"intervals {name}", fontsize=8, fontweight="bold")
    axes[0].set_ylabel(target_name.replace("_", " "))
    plt.savefig(intervals, dpi=150)
    plt.close("all")


# jaxcal calibrate, apply and monitor

app.command()(calibrate)
app.command()(apply)
app.command()(monitor)


# jaxcal methods and jaxcal data


@app.command()
def methods() -> None:
    """List the predictors and the calibrators."""
    for package, called in (("predictors", str), ("calibrators", method_names.called)):
        console.say(f"{package}:")
        console.say_columns((called(module), line) for module, line in method_names.first_lines(package).items())


@app.command()
def data() -> None:
    """List the data sets, their licenses, and where each would be taken from."""
    console.say_columns(
        (name, jc.datasets.license_of(name) or "license not established", *_ask(jc.datasets.find, name))
        for name in jc.datasets.names()
    )
