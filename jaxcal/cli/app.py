"""The command line: `jaxcal demo`, `calibrate`, `monitor`, `methods` and `data`.

It needs the extra `cli`, and computes in 64 bits, which the library itself never turns on. A mistake in the
input ends with one line and exit code 2.
"""

import ast
import importlib
import inspect
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import jax
import numpy as np

from jaxcal import _checks, datasets, guarantee, metrics, online, pipeline, plots
from jaxcal.calibrators import conformal
from jaxcal.cli import files
from jaxcal.compilation import enable_compilation_cache
from jaxcal.distributions import Concatenated, Distribution, Normal, Point
from jaxcal.online.exchangeability import exponential

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from typer.core import TyperGroup
except ImportError as error:
    raise ImportError("The command line needs an extra: pip install 'jaxcal[cli]'.") from error

if TYPE_CHECKING:  # slow to import, and used by one command
    import polars


class _Commands(TyperGroup):
    """Commands that answer a mistake in the input with one line on stderr and exit code 2, and warn in one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", UserWarning)
                warnings.showwarning = lambda message, *_, **__: _complain("Warning", message)
                return super().invoke(ctx)
        except (ValueError, FloatingPointError) as error:
            _complain("Error", error)
            raise typer.Exit(2) from error


def _complain(kind: str, message: object) -> None:
    typer.echo(f"{kind}: {' '.join(str(message).split())}", err=True)


# Of more groups the guarantees are not printed.
_GROUPS_NAMED = 10

app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _set_up() -> None:
    """Turn the predictions of any regression model into calibrated distributions."""
    jax.config.update("jax_enable_x64", True)
    enable_compilation_cache()
    # Read when JAX imports SciPy, at the first factorization: threads of OpenBLAS's own wait for each other, busily.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


# jaxcal demo


@app.command()
def demo(
    dataset: Annotated[str, typer.Option(help="A data set of `jaxcal data`.")] = "auto_mpg",
    seed: Annotated[int, typer.Option(help="Of the model and of the folds.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for two pictures.")] = Path("jaxcal-demo"),
) -> None:
    """Calibrate a model of scikit-learn on real data, and show what its intervals hold before and after."""
    from sklearn.ensemble import GradientBoostingRegressor

    from jaxcal.calibrators import gaussian_mle, rio

    data = _load(dataset)
    _make_folder(out)
    _say(f"{dataset}: {len(data.y)} rows, {data.x.shape[1]} features, target {data.target_name}.")
    model = GradientBoostingRegressor(random_state=seed)
    fit = partial(pipeline.fit, data.x, data.y, predictor=model, folds=5, key=jax.random.key(seed))
    with _timed("Fit boosted trees, RIO and a last step to all rows and, for honest errors, without each of 5 folds"):
        usual = fit(calibrators=[gaussian_mle.fit], recalibrate=None).steps[-1]
        fitted = fit(calibrators=[rio.fit])
    usual = replace(usual, name="std of its training errors")
    first, *others = fitted.steps
    _say(f"\n{replace(fitted, steps=(first, usual, *others))}\n\n{fitted.guarantee(0.9)}\n")
    with _timed("Draw two pictures"):
        forecasts = {"by training errors": usual.predictions, "by jaxcal.pipeline": fitted.out_of_fold}
        reliability, intervals = _draw(out, data.target_name, data.y, forecasts)
    _say(
        f"\n{intervals}: predictions of rows that the model was fitted without, and their 90 % intervals.\n"
        f"{reliability}: the fraction of the targets below each predicted quantile. A calibrated forecast follows the "
        "diagonal up to chance, the gray band.\n\nNext, on a file of yours:"
    )
    _say_columns(
        [
            ("jaxcal calibrate FILE --target y", "fits the best of a short list of models, with intervals"),
            ("jaxcal calibrate FILE --target y --prediction y_hat", "adds intervals to the predictions of your model"),
            ("jaxcal methods", "lists what else there is"),
        ]
    )


def _load(dataset: str) -> datasets.Dataset:
    try:
        return datasets.load(dataset)
    except OSError as error:  # it is not here, and could not be downloaded
        raise ValueError(str(error)) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}.") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write into the folder {folder}: permission denied.")


def _draw(folder: Path, target_name: str, y: np.ndarray, forecasts: dict[str, Distribution]) -> tuple[Path, Path]:
    """The reliability of the forecasts, and their intervals beside each other."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")  # to files, also where there is no screen
    reliability, intervals = folder / "reliability.png", folder / "intervals.png"
    plots.reliability_diagram(y, forecasts)
    plt.savefig(reliability, dpi=200)
    with plt.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        _, axes = plt.subplots(1, len(forecasts), figsize=(7.6, 3), sharey=True, layout="constrained")
    for ax, (name, forecast) in zip(axes, forecasts.items(), strict=True):
        plots.intervals(y, forecast, confidence_levels=[0.9], max_rows=80, ax=ax).set_ylabel("")
        ax.set_title(f"intervals {name}", fontsize=8, fontweight="bold")
    axes[0].set_ylabel(target_name.replace("_", " "))
    plt.savefig(intervals, dpi=150)
    plt.close("all")
    return reliability, intervals


# jaxcal calibrate


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(help="CSV or Parquet, one row a prediction.")],
    target: Annotated[str, typer.Option(help="Column of the true values.")],
    prediction: Annotated[
        str | None, typer.Option(help="Column of the model's predictions.", show_default="fit a model")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Column of its standard deviations, if it has any.")] = None,
    features: Annotated[
        str | None,
        typer.Option(help="Columns of the inputs, a,b,c.", show_default="all other numeric columns"),
    ] = None,
    method: Annotated[str | None, typer.Option(help="A calibrator of `jaxcal methods`.", show_default="rio")] = None,
    by: Annotated[
        str | None,
        typer.Option(help="Column of labels: each group is calibrated by its own rows, if the method can."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Column of weights, such as density ratios, if the method can use them.")
    ] = None,
    calibration_fraction: Annotated[
        float | None,
        typer.Option(
            "--calibration-fraction",
            "--calibration-share",
            help="Fraction of FILE to fit on, drawn at random.",
            show_default="0.5",
        ),
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="Fit on this file, and on no row of FILE.")] = None,
    training: Annotated[
        Path | None, typer.Option(help="The rows that the model was trained on, which sharp-gp uses.")
    ] = None,
    quantiles: Annotated[str, typer.Option(help="Levels of the quantiles to write.")] = "0.05,0.5,0.95",
    seed: Annotated[int, typer.Option(help="Of the random fraction, and of the method.")] = 0,
    prefix: Annotated[str, typer.Option(help="Before the names of the columns written.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="CSV or Parquet.", show_default="FILE with .calibrated in its name")
    ] = None,
) -> None:
    """Write a distribution for every row of FILE: mean, std and quantiles.

    With a column of predictions these are calibrated; the model, whatever it is, should not have been trained on the
    rows that are fitted on. Without one a model is chosen and fitted to all rows whose target is known: what is written
    for these comes from models that were fitted without them.
    """
    levels = _parse_levels(quantiles)
    table = files.read(file)
    names = ["mean", "std", *(f"q{level:g}" for level in levels)]
    names = [prefix + name for name in (names if calibration else [*names, "used_for_fitting"])]
    out = out or file.with_name(f"{file.stem}.calibrated{file.suffix}")
    _check_output(out, (file, calibration, training))
    _check_names(names, file, table)
    _check_calibration(calibration, calibration_fraction, file)
    tables = _Tables(table, file, table if calibration is None else files.read(calibration), calibration or file)
    roles = {"target": target, "prediction": prediction, "std": std, "by": by, "weights": weights}
    columns = _Columns.choose(roles, features, tables.source, tables.source_file)

    if prediction is None:
        given = {
            "--std": std,
            "--method": method,
            "--by": by,
            "--weights": weights,
            "--calibration-fraction": calibration_fraction,
            "--training": training,
        }
        if needless := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{', '.join(needless)} needs a column of predictions, --prediction.")
        predict, fitting = _fit_pipeline(tables, columns, seed)
    else:
        predict, fitting = _fit_calibrator(tables, columns, method or "rio", calibration_fraction, training, seed)
    with _timed(f"Predict {len(table)} rows"):
        values = _values_to_write(predict(), levels, fitting)
        files.write(table, dict(zip(names, values, strict=True)), out)
    _say(f"{out}: the columns of {file.name}, and {', '.join(names)}.")


@dataclass(frozen=True)
class _Tables:
    """The rows to predict, and those to fit on: the same ones, or of another file."""

    table: "polars.DataFrame"
    file: Path
    source: "polars.DataFrame"
    source_file: Path

    @property
    def are_one(self) -> bool:
        return self.source is self.table


def _fit_calibrator(
    tables: _Tables, columns: "_Columns", method: str, fraction: float | None, training: Path | None, seed: int
) -> tuple[Callable[[], Distribution], np.ndarray | None]:
    """A calibrator of a column of predictions: what predicts all rows, and which of them it was fitted to."""
    fit = _find_calibrator(method)
    rows = unseen = _Rows.read(tables.table, columns, tables.file)
    fitting = None
    if tables.are_one:
        fitting, rest = _split(len(tables.table), fraction, seed)
        fitted_on, unseen = rows.take(fitting), rows.take(rest)
    else:
        fitted_on = _Rows.read(tables.source, columns, tables.source_file)
    options = _options(fit, method, fitted_on.x, seed) | _training_rows(fit, method, training, columns)
    for name in fitted_on.counts:
        if name not in inspect.signature(fit).parameters:
            raise ValueError(f"--method {method} does not use --{name}: {_listed(_methods_with(name))} do.")
    with _timed(f"Fit {method} to {len(fitted_on.mean)} rows"):
        calibrator = fit(fitted_on.x, fitted_on.base, fitted_on.y, **fitted_on.counts, **options)
    predict = _prediction(calibrator, tables, columns, list(fitted_on.counts))
    if method in ("split-conformal", "conditional-conformal"):
        _say_guarantees(calibrator, fitted_on.counts.get("by"))
    if unseen.y is None:
        _say(f"No scores: {tables.file} has no column {columns.target!r} to measure against.")
    else:
        forecasts = {"before": unseen.base, "after": predict(unseen)}
        _print_scores(unseen.y, forecasts, f"Measured on {len(unseen.y)} rows not used for fitting.")
    return lambda: predict(rows), fitting


def _prediction(
    calibrator: Any, tables: _Tables, columns: "_Columns", counted: list[str]
) -> Callable[["_Rows"], Distribution]:
    """What predicts rows, by the labels and weights that the call takes of those of the fit."""
    taken = [name for name in counted if name in inspect.signature(type(calibrator).__call__).parameters]
    for name in taken:
        files.check_column(tables.table, getattr(columns, name), tables.file)
    return lambda rows: calibrator(rows.x, rows.base, **{name: rows.counts[name] for name in taken})


def _say_guarantees(calibrator: Any, labels: np.ndarray | None) -> None:
    """The guarantee of the 90 % interval, for each of at most ten groups."""
    if labels is None:
        _say(str(calibrator.guarantee(0.9)))
        return
    groups = np.unique(labels).tolist()
    for label in groups[:_GROUPS_NAMED]:
        try:
            _say(f"{label}: {calibrator.guarantee(0.9, label)}")
        except ValueError as too_few_rows:
            _say(f"{label}: {too_few_rows}")
    if len(groups) > _GROUPS_NAMED:
        _say(f"... and {len(groups) - _GROUPS_NAMED} groups more.")


def _fit_pipeline(
    tables: _Tables, columns: "_Columns", seed: int
) -> tuple[Callable[[], Distribution], np.ndarray | None]:
    """A model of the inputs: what predicts all rows, and which of them it was fitted to."""
    if not columns.features:
        raise ValueError(f"{tables.source_file} has no numeric column beside {columns.target!r} to predict it from.")
    x = files.matrix(tables.source, columns.features, tables.source_file)
    y = files.numbers(tables.source, columns.target, tables.source_file, may_be_missing=True)
    known = np.flatnonzero(np.isfinite(y))
    with _timed(f"Fit models to {len(known)} rows"):
        fitted = pipeline.fit(x[known], y[known], key=jax.random.key(seed))
    _say(f"{fitted}\n\n{fitted.guarantee(0.9)}")
    if not tables.are_one:
        new = files.matrix(tables.table, columns.features, tables.file)
        return lambda: fitted(new), None
    rest = np.flatnonzero(~np.isfinite(y))
    if not rest.size:
        return lambda: fitted.out_of_fold, known
    return lambda: Concatenated([fitted.out_of_fold, fitted(x[rest])], [known, rest]), known


@dataclass(frozen=True)
class _Columns:
    """Which column is what."""

    target: str
    prediction: str | None
    std: str | None
    by: str | None = None
    weights: str | None = None
    features: tuple[str, ...] = ()

    @classmethod
    def choose(
        cls, roles: dict[str, str | None], features: str | None, table: "polars.DataFrame", file: Path
    ) -> "_Columns":
        """The columns asked for, the features by default all other numeric ones of the table to fit on; tell which."""
        named, target = _check_named(roles, table, file), roles["target"]
        others = {name: dtype for name, dtype in table.schema.items() if name not in named}
        chosen = [name for name, dtype in others.items() if files.is_numeric(dtype)]
        if features is not None:
            chosen = [name.strip() for name in features.split(",")]
        if target in chosen:
            raise ValueError(f"the target {target!r} must not be among the features.")
        not_used = ", ".join(
            f"{name} ({'not named' if files.is_numeric(dtype) else 'no numbers'})"
            for name, dtype in others.items()
            if name not in chosen
        )
        _say(f"Inputs: {', '.join(chosen) or 'none'}." + (f" Not used: {not_used}." if not_used else ""))
        return cls(**roles, features=tuple(chosen))  # pyright: ignore[reportArgumentType]


def _check_named(roles: dict[str, str | None], table: "polars.DataFrame", file: Path) -> list[str]:
    """The names of the columns that were given, if they are different and there."""
    named = [name for name in roles.values() if name is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"{', '.join(roles)} must be different columns; got {', '.join(named)}.")
    for column in named:
        files.check_column(table, column, file)
    return named


@dataclass(frozen=True)
class _Rows:
    """Inputs, a model's predictions, and the truth where it is known."""

    x: np.ndarray | None
    mean: np.ndarray
    std: np.ndarray | None
    y: np.ndarray | None
    counts: dict[str, np.ndarray]  # labels of groups, `by`, and `weights`, where there are any

    @classmethod
    def read(cls, table: "polars.DataFrame", columns: _Columns, file: Path, *, may_be_missing: bool = False) -> "_Rows":
        """The rows of a table; without a truth if it has no column of that name; NaN where truths may be missing.

        Raises:
            ValueError: if a column is missing, or holds anything but finite numbers (above 0: std).
        """
        x = files.matrix(table, columns.features, file) if columns.features else None
        mean = files.numbers(table, str(columns.prediction), file)
        std = None if columns.std is None else files.numbers(table, columns.std, file)
        if std is not None and (std <= 0).any():
            raise ValueError(
                f"column {columns.std!r} of {file} must be positive; {np.sum(std <= 0)} values are not, "
                f"the first in data row {np.argmax(std <= 0) + 1}."
            )
        y = files.numbers(table, columns.target, file) if columns.target in table.columns else None
        readers = {"by": (columns.by, files.labels), "weights": (columns.weights, files.numbers)}
        # Rows to predict may come without: not every method asks for those of new rows.
        counts = {
            name: read(table, column, file) for name, (column, read) in readers.items() if column in table.columns
        }
        return cls(x, mean, std, y, counts)

    def take(self, rows: np.ndarray) -> "_Rows":
        pick = lambda values: None if values is None else values[rows]
        counts = {name: values[rows] for name, values in self.counts.items()}
        return _Rows(pick(self.x), self.mean[rows], pick(self.std), pick(self.y), counts)

    @property
    def base(self) -> Distribution:
        return Point(self.mean) if self.std is None else Normal(self.mean, self.std)


def _find_calibrator(method: str) -> Callable:
    methods = {_called(module): module for module in _modules("calibrators")}
    if method not in methods:
        raise ValueError(f"there is no method {method!r}: {files.suggest(method, list(methods))}")
    return importlib.import_module(f"jaxcal.calibrators.{methods[method]}").fit


def _methods_with(option: str) -> list[str]:
    """The methods whose fit has an option."""
    methods = {_called(module): _find_calibrator(_called(module)) for module in _modules("calibrators")}
    return [method for method, fit in methods.items() if option in inspect.signature(fit).parameters]


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _options(fit: Callable, method: str, x: np.ndarray | None, seed: int) -> dict[str, Any]:
    """What a method needs beside the data: a key if it asks for one, a kernel on the output if there are no inputs."""
    wanted = inspect.signature(fit).parameters
    if x is None and NoneType not in get_args(wanted["x"].annotation):
        raise ValueError(f"--method {method} needs columns of inputs, --features: there is no other numeric column.")
    asks = "key" in wanted and wanted["key"].default is inspect.Parameter.empty
    options = {"key": jax.random.key(seed)} if asks else {}
    return options | ({"kernel": "output"} if x is None and "kernel" in wanted else {})


def _training_rows(fit: Callable, method: str, file: Path | None, columns: _Columns) -> dict[str, Any]:
    """The rows that the model was trained on, for a method that uses them."""
    looks = "x_train" in inspect.signature(fit).parameters
    if looks == (file is None):
        needs = "needs" if looks else "does not use"
        raise ValueError(f"--method {method} {needs} the rows that the model was trained on, --training.")
    if file is None:
        return {}
    table = files.read(file)
    x = files.matrix(table, columns.features, file)
    return {"x_train": x, "y_train": files.numbers(table, columns.target, file)}


def _parse_levels(text: str) -> list[float]:
    try:
        levels = [float(level) for level in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--quantiles must be numbers, such as 0.05,0.5,0.95; got {text!r}.") from error
    _checks.check_fraction("--quantiles", np.array(levels))
    return list(dict.fromkeys(levels))


def _split(num_rows: int, fraction: float | None, seed: int) -> tuple[np.ndarray, ...]:
    """The numbers of the rows to fit on, and of the others."""
    fraction = 0.5 if fraction is None else fraction
    _checks.check_fraction("--calibration-fraction", fraction)
    num_fitting = round(fraction * num_rows)
    if min(num_fitting, num_rows - num_fitting) < 2:
        raise ValueError(
            f"{num_rows} rows are too few: {num_fitting} to fit on and {num_rows - num_fitting} to measure "
            "on, where 2 of each are the least."
        )
    return datasets.split(num_rows, (fraction, 1 - fraction), seed=seed)


def _check_calibration(calibration: Path | None, fraction: float | None, file: Path) -> None:
    if calibration is None:
        return
    if fraction is not None:
        raise ValueError("--calibration and --calibration-fraction exclude each other: give one of them.")
    if calibration.exists() and calibration.samefile(file):
        raise ValueError(
            f"--calibration is {file} itself, so no row would be left to measure on: use --calibration-fraction."
        )


def _check_output(out: Path, inputs: Iterable[Path | None]) -> None:
    """Refuse, before anything is fitted, a file that could not be written in the end."""
    files.check_suffix(out)
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise ValueError(f"cannot write {out}: {'it is a folder' if out.is_dir() else f'there is no folder {folder}'}.")
    if not os.access(out if out.exists() else folder, os.W_OK):
        raise ValueError(f"cannot write {out}: permission denied.")
    for file in inputs:
        if file is not None and file.exists() and out.exists() and out.samefile(file):
            raise ValueError(f"--out is {file} itself: its rows would be overwritten.")


def _check_names(names: Sequence[str], file: Path, table: "polars.DataFrame") -> None:
    taken = [name for name in names if name in table.columns]
    if taken:
        raise ValueError(
            f"{file} already has the columns {', '.join(map(repr, taken))}: name the new ones otherwise, by --prefix."
        )


def _values_to_write(forecast: Distribution, levels: Sequence[float], fitting: np.ndarray | None) -> list[np.ndarray]:
    """Mean, std and quantiles of every row and, where a part was fitted on, which rows those were."""
    values = [forecast.mean, forecast.std, *np.asarray(forecast.icdf(np.array(levels))).T]
    if fitting is not None:
        values.append(np.isin(np.arange(len(forecast.mean)), fitting))
    return [np.asarray(value) for value in values]


# jaxcal monitor


@app.command()
def monitor(
    file: Annotated[Path, typer.Argument(help="CSV or Parquet, one row a prediction, in the order of time.")],
    target: Annotated[str, typer.Option(help="Column of the true values; empty where they are not known yet.")],
    prediction: Annotated[str, typer.Option(help="Column of the model's predictions.")],
    std: Annotated[str | None, typer.Option(help="Column of its standard deviations, if it has any.")] = None,
    calibration_rows: Annotated[int, typer.Option(help="How many of the first rows calibrate the intervals.")] = 100,
    confidence_level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.9,
    significance: Annotated[float, typer.Option(help="Probability of a false alarm.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of the order of equal errors in the test.")] = 0,
) -> None:
    """Measure how often intervals cover while FILE grows, and test whether their guarantee is still true.

    The first rows calibrate two intervals of the rows after them: the fixed one of split conformal prediction, and one
    that adapts after every row (adaptive conformal inference). A conformal test martingale tests whether the errors
    change. The command may be repeated whenever rows were added: as long as targets become known in the order of the
    rows, that makes no false alarm more likely.
    """
    _checks.check_at_least("--calibration-rows", calibration_rows, 1)
    for name, value in (("--confidence-level", confidence_level), ("--significance", significance)):
        _checks.check_fraction(name, value)
    table = files.read(file)
    roles = {"target": target, "prediction": prediction, "std": std}
    _check_named(roles, table, file)
    y = files.numbers(table, target, file, may_be_missing=True)
    known = np.flatnonzero(np.isfinite(y))
    if len(known) <= calibration_rows:
        raise ValueError(
            f"{file} has {len(known)} rows whose target is known; more than the {calibration_rows} calibration rows "
            "are needed: give fewer by --calibration-rows."
        )
    rows = _Rows.read(table.drop(target), _Columns(target, prediction, std), file)
    first, new = known[:calibration_rows], known[calibration_rows:]
    base, new_base = rows.take(first).base, rows.take(new).base
    fixed = conformal.fit(None, base, y[first])
    intervals = {"fixed": fixed(None, new_base).interval(confidence_level)}
    state = online.adaptive.init(base, y[first], confidence_level=confidence_level)
    state, intervals["adaptive"] = online.run(state, new_base, y[new])
    key = jax.random.key(seed)
    found = online.check_errors(base, y[first], new_base, y[new], key=key, significance=significance)
    _say(str(fixed.guarantee(confidence_level)))
    _print_coverage(y[new], intervals, found, confidence_level)
    _say(f"{found}\n\n{_next_interval(float(state.threshold()), confidence_level, std, len(y) - len(known))}")


def _print_coverage(
    y: np.ndarray, intervals: dict[str, tuple], found: online.ErrorCheck, confidence_level: float
) -> None:
    """A table of coverages, part after part of the rows, beside the largest value of the martingale so far."""
    low, high = (f"{100 * end:.1f} %" for end in guarantee.calibrated_band(confidence_level, len(y)))
    caption = (
        f"New rows with a known target, inside their {100 * confidence_level:g} % interval. Exact intervals cover "
        f"between {low} and {high} of {len(y)} rows (in 19 of 20 cases)."
    )
    table = Table("new rows", caption=caption, caption_justify="left")
    for name in (*intervals, "martingale, largest"):
        table.add_column(name, justify="right")
    covered = {name: (np.asarray(lower) <= y) & (y <= np.asarray(upper)) for name, (lower, upper) in intervals.items()}
    largest = np.maximum.accumulate(np.maximum(found.log_martingale, 0))
    whole = np.arange(len(y))
    for part in (*np.array_split(whole, min(10, len(y))), whole):
        label = "all" if part is whole else f"{part[0] + 1} to {part[-1] + 1}"
        fractions = (f"{100 * inside[part].mean():.1f} %" for inside in covered.values())
        table.add_row(label, *fractions, exponential(float(largest[part[-1]])))
    _console().print(table)


def _next_interval(threshold: float, confidence_level: float, std: str | None, waiting: int) -> str:
    """The adaptive interval of the rows to come, in plain words."""
    level = f"{100 * confidence_level:g} %"
    rows = f"{waiting} rows whose target is not known yet" if waiting else "next row"
    if not np.isfinite(threshold) or threshold < 0:
        return f"The adaptive {level} interval of the {rows} is {'infinite' if threshold > 0 else 'empty'}."
    times = "" if std is None else f" times {std}"
    return f"The adaptive {level} interval of the {rows}: the prediction plus or minus {_number(threshold)}{times}."


# jaxcal methods and jaxcal data


@app.command()
def methods() -> None:
    """List the predictors and the calibrators."""
    for package, called in (("predictors", str), ("calibrators", _called)):
        _say(f"{package}:")
        _say_columns((called(module), line) for module, line in _modules(package).items())


@app.command()
def data() -> None:
    """List the data sets, their licenses, and where each would be taken from."""
    _say_columns(
        (name, datasets.license_of(name) or "license not established", *_find(name)) for name in datasets.names()
    )


def _find(name: str) -> datasets.Location:
    try:
        return datasets.find(name)
    except OSError as error:  # JAXCAL_DATA names no directory
        raise ValueError(str(error)) from error


def _called(module: str) -> str:
    """The name of a calibrator's method on the command line."""
    return {"conformal": "split-conformal"}.get(module, module.replace("_", "-"))


def _modules(package: str) -> dict[str, str]:
    """The public modules of a package of ours by name, with the first line of each docstring."""
    folder = Path(__file__).parents[1] / package
    files = {file.stem: file for file in folder.glob("[!_]*.py")}
    files |= {file.parent.name: file for file in folder.glob("[!_]*/__init__.py")}
    docstrings = {
        name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for name, file in files.items()
    }
    return {name: docstrings[name].partition("\n")[0] for name in sorted(docstrings)}


# What is printed


def _print_scores(y: np.ndarray, forecasts: dict[str, Distribution], caption: str) -> None:
    """A table of scores, a column for each forecast."""
    scores = {name: metrics.evaluate(y, forecast) for name, forecast in forecasts.items()}
    table = Table("", caption=caption, caption_justify="left")
    for name in (*scores, "wanted"):
        table.add_column(name, justify="right")
    for label, metric, show, wanted in (
        ("RMSE", "rmse", _number, "low"),
        ("NLPD", "nlpd", _density, "low"),
        ("CRPS", "crps", _number, "low"),
        ("ECE", "ece", lambda value: f"{value:.1f} %", "low"),
        ("90 % coverage", "coverage_90", lambda value: f"{100 * value:.1f} %", "90 %"),
        ("90 % width", "width_90", _number, "low"),
    ):
        table.add_row(label, *(show(float(values[metric])) for values in scores.values()), wanted)
    _console().print(table)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _density(value: float) -> str:
    return _number(value) if np.isfinite(value) else "\N{EN DASH}"  # a point has none


def _say(text: str) -> None:
    _console().print(text, markup=False)


def _say_columns(rows: Iterable[tuple[str, ...]]) -> None:
    """Rows of texts in columns; a long line is left to the terminal, so that it can be copied."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *texts, last in rows:
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        _say("  ".join(("", *padded, last)))


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


@contextmanager
def _timed(label: str) -> Iterator[None]:
    """Show that work is going on and, in the end, how long it took."""
    start, console = time.perf_counter(), _console()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(label, total=None)
        yield
    _say(f"{label}: {time.perf_counter() - start:.1f} s.")
