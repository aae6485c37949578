"""`jaxcal calibrate`: distributions for the rows of a file. `jaxcal apply`: a saved model predicts another file."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

import jaxcal as jc
from jaxcal.cli import console, files, methods, report, words
from jaxcal.cli.columns import Roles, TableRows, choose_features, targets
from jaxcal.cli.files import FileTable
from jaxcal.cli.options import Decimal, Encoding, Force, Out, Separator, Thousands, csv_format, told
from jaxcal.cli.text import Format

if TYPE_CHECKING:
    from jaxcal.distributions import Distribution

# The guarantees of at most 10 groups are printed.
_GROUPS_NAMED = 10
# The mark of a model that this command saved.
_KIND = "jaxcal calibrate"


@dataclass
class _FittedTable:
    """A fitted model, and its predictions of the rows of FILE.

    Attributes:
        model: the calibrator, or the pipeline.
        taken: the further arguments of the calibrator's call: "by", "weights".
        forecast: the distributions of all rows.
        fitting: the rows of FILE that were fitted on; None if another file had these rows.
        measured: the content of the report.
    """

    model: Any
    taken: list[str]
    forecast: "Distribution"
    fitting: np.ndarray | None
    measured: report.Measured


@dataclass(frozen=True)
class _RowsToFitAndPredict:
    """The rows to predict, and the rows to fit on. They are the same rows, or come from two files.

    Attributes:
        table: the rows of FILE.
        source: the rows to fit on.
        stated: the format of CSVs that the options name.
        usual: the format that is assumed where another file leaves it open.
    """

    table: FileTable
    source: FileTable
    stated: Format
    usual: Format

    @classmethod
    def read(cls, file: Path, calibration: Path | None, stated: Format) -> "_RowsToFitAndPredict":
        source = FileTable.read(calibration or file, stated)
        tables = cls(source, source, stated, Format() if source.text is None else source.text.format)
        return tables if calibration is None else replace(tables, table=tables.read_other(file))

    def read_other(self, file: Path) -> FileTable:
        """The table in a further file. The same columns as in `source` are texts."""
        return FileTable.read(file, self.stated, self.usual, self.source.texts)

    @property
    def are_one(self) -> bool:
        return self.source is self.table


@dataclass(frozen=True)
class _Options:
    """The options of the fit of a model or a calibrator."""

    method: str | None
    fraction: float | None
    training: Path | None
    features: str | None
    exclude: str | None
    models: str | None
    time_limit: float | None
    seed: int


def calibrate(
    file: Annotated[Path, typer.Argument(help="CSV or Parquet, one row a prediction.")],
    target: Annotated[str, typer.Option(help="Column of the true values; empty where they are not known.")],
    prediction: Annotated[str | None, told("Column of the model's predictions.", "fit a model")] = None,
    std: Annotated[str | None, typer.Option(help="Column of its standard deviations, if it has any.")] = None,
    features: Annotated[str | None, told("Columns of the inputs, a,b,c.", "all others with numbers or labels")] = None,
    exclude: Annotated[str | None, told("Columns, a,b,c, that are no features and stay in the file.", "none")] = None,
    method: Annotated[
        str | None,
        told(
            "A calibrator of `jaxcal methods`, or several in their order: rio,crude.",
            "rio,split-conformal; split-conformal without inputs, or with weights",
        ),
    ] = None,
    models: Annotated[
        str | None,
        told(
            "Without predictions: predictors of `jaxcal methods`, boosted_trees, extra_trees or catboost, to combine.",
            "a short list",
        ),
    ] = None,
    time_limit: Annotated[
        float | None, told("Seconds to fit models: those that take longer are omitted and named.", "none")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Column of labels: each group is calibrated by its own rows, if the method can.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Column of weights, such as density ratios, if the method can use them.")
    ] = None,
    calibration_fraction: Annotated[float | None, told("Fraction of FILE to fit on, drawn at random.", "0.5")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Fit on this file, and on no row of FILE.")] = None,
    training: Annotated[
        Path | None, typer.Option(help="The rows that the model was trained on, which sharp-gp uses.")
    ] = None,
    quantiles: Annotated[str, typer.Option(help="Levels of the quantiles to write.")] = "0.05,0.5,0.95",
    seed: Annotated[int, typer.Option(help="Of the random fraction, and of the method.")] = 0,
    prefix: Annotated[str, typer.Option(help="Before the names of the columns written.")] = "",
    out: Out = None,
    force: Force = False,
    save: Annotated[Path | None, typer.Option(help="Keep what was fitted in this file, for `jaxcal apply`.")] = None,
    page: Annotated[
        Path | None, typer.Option("--report", help="A page, .html, with scores and pictures before and after.")
    ] = None,
    separator: Separator = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
) -> None:
    """Write a distribution for every row of FILE: mean, std and quantiles.

    If there is a column of predictions, these are calibrated. Their model may be any model, but the rows to fit on
    should not be among its training rows. If there is no such column, a model is chosen and fitted to all rows whose
    target is known. The distributions that are written for these rows come from models that were fitted without them.
    """
    levels = _parse_levels(quantiles)
    _check_seed(seed)
    _check_calibration(calibration, calibration_fraction, file)
    others = [file, calibration, training]
    out = _checked_out(out, others, force=force)
    for option, other in (("--save", save), ("--report", page)):
        if other is not None:
            files.check_output(other, option, [*others, out], force=force)
            others.append(other)
    tables = _RowsToFitAndPredict.read(file, calibration, csv_format(separator, decimal, thousands, encoding))
    names = _names(levels, prefix, tables.table, are_split=tables.are_one)
    _check_holds(out, tables.table)
    roles = Roles(target, prediction, std, by, weights)
    roles.check(tables.source)
    options = _Options(method, calibration_fraction, training, features, exclude, models, time_limit, seed)
    if prediction is None:
        option_names = ("--std", "--method", "--by", "--weights", "--calibration-fraction", "--training")
        option_values = zip(option_names, (std, method, by, weights, calibration_fraction, training), strict=True)
        if needless := [name for name, value in option_values if value is not None]:
            raise ValueError(f"{', '.join(needless)} needs a column of predictions, --prediction.")
        fitted = _fit_pipeline(tables, roles, options, is_saved=save is not None)
    else:
        if models is not None or time_limit is not None:
            raise ValueError("--models and --time-limit are for a fit without a column of predictions.")
        fitted = _fit_calibrator(tables, roles, options)
    _write(fitted.forecast, tables.table, levels, names, fitted.fitting, out)
    if save is not None:
        _save(save, fitted, tables, levels, prefix)
    if page is not None:
        report.write(page, fitted.measured, fitted.forecast)
        console.say(f"{page}: scores and pictures.")


def apply(
    model: Annotated[Path, typer.Argument(help="What `jaxcal calibrate --save` wrote.")],
    file: Annotated[Path, typer.Argument(help="CSV or Parquet, with the columns of the fit.")],
    quantiles: Annotated[str | None, told("Levels of the quantiles to write.", "those of the fit")] = None,
    prefix: Annotated[str | None, told("Before the names of the columns written.", "that of the fit")] = None,
    out: Out = None,
    force: Force = False,
    separator: Separator = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
) -> None:
    """Write a distribution for every row of FILE by a saved MODEL; where targets are known, measure its scores.

    The format of the fit is assumed where FILE leaves it open, for example for thousands separators and the encoding.
    """
    out = _checked_out(out, [file, model], force=force)
    saved = jc.load(model)
    if not (isinstance(saved, dict) and saved.get("kind") == _KIND):
        raise ValueError(f"{model} was not written by jaxcal calibrate --save: jaxcal.load reads it in Python.")
    roles = Roles(**saved["roles"] | {"features": tuple(saved["roles"]["features"])})
    levels = saved["levels"] if quantiles is None else _parse_levels(quantiles)
    named, usual = csv_format(separator, decimal, thousands, encoding), Format(**saved.get("format", {}))
    table = FileTable.read(file, named, usual, saved.get("texts"))
    names = _names(levels, saved["prefix"] if prefix is None else prefix, table, are_split=False)
    _check_holds(out, table)
    console.say(f"{model}: {saved['about']}")
    with console.working(f"Predict {len(table)} rows"), words.of_rows(table):
        forecast = _predict(saved, roles, table)
    _write(forecast, table, levels, names, None, out)
    y = targets(table, roles.target)
    if y is not None and np.isfinite(y).any():
        known = np.flatnonzero(np.isfinite(y))
        about_rows = f"rows of {file.name}; if some of them were fitted on, these scores are too good"
        scores = console.rows_of_scores(y[known], {"forecast": forecast[known]})
        console.print_scores(["forecast"], scores, f"{len(known)} {about_rows}")


def _predict(saved: dict[str, Any], roles: Roles, table: FileTable) -> "Distribution":
    """The predictions of a saved model for a table."""
    table.check_numerals(set(roles.features) - set(saved.get("texts", roles.features)))
    if roles.prediction is None:
        return saved["model"](table.select(roles.features))
    for name in saved["taken"]:
        table.check_column(getattr(roles, name))
    rows = TableRows.read(table, roles, with_targets=False)
    return saved["model"](rows.x, rows.base, **{name: rows.counts[name] for name in saved["taken"]})


def _save(path: Path, fitted: _FittedTable, tables: _RowsToFitAndPredict, levels: list[float], prefix: str) -> None:
    about = f"{fitted.measured.method}, fitted to {fitted.measured.num_fitting} rows by jaxcal {jc.__version__}."
    saved = {
        "kind": _KIND,
        "about": about,
        "model": fitted.model,
        "taken": fitted.taken,
        "roles": asdict(fitted.measured.roles),
        "levels": levels,
        "prefix": prefix,
        "format": asdict(tables.usual),
        "texts": tables.source.texts,
    }
    try:
        jc.save(path, saved)
    except TypeError as error:
        raise ValueError(f"--save: {error}") from error
    console.say(f"{path}: what was fitted; jaxcal apply {path} FILE predicts by it.")


def _checked_out(out: Path | None, inputs: Sequence[Path | None], *, force: bool) -> Path:
    """The file to write, beside the first input where none is named.

    Raises:
        ValueError: if it could not be written, or exists.
    """
    file = Path(str(inputs[0]))
    out = out or file.with_name(f"{file.stem}.calibrated{file.suffix}")
    files.check_suffix(out)
    files.check_output(out, "--out", inputs, force=force)
    return out


def _check_holds(out: Path, table: FileTable) -> None:
    """Raise ValueError if a file of this name cannot hold a table, or the text that the table is."""
    files.check_holds(out, table)
    file, text = table.file, table.text
    if text is not None and out.suffix.lower() == ".tsv" and text.format.separator != "\t":
        raise ValueError(f"cannot write {out}: the fields of {file} are not separated by tabs, and stay as they are.")


def _write(
    forecast: "Distribution",
    table: FileTable,
    levels: list[float],
    names: list[str],
    fitting: np.ndarray | None,
    out: Path,
) -> None:
    """Write mean, std and quantiles of every row and, where a part was fitted on, which rows those were."""
    with words.of_rows(table):
        values = [forecast.mean, forecast.std, *np.asarray(forecast.icdf(np.array(levels))).T]
    if fitting is not None:
        values.append(np.isin(np.arange(len(table)), fitting))
    table.write(dict(zip(names, map(np.asarray, values), strict=True)), out)
    console.say(f"{out}: the columns of the table, and {', '.join(names)}.")


# A column of predictions


def _fit_calibrator(tables: _RowsToFitAndPredict, roles: Roles, options: _Options) -> _FittedTable:
    """A calibrator of a column of predictions."""
    table = tables.table
    method, roles, chosen = _choose_method(tables, roles, options)
    names = methods.find(method)
    counted = [name for name in ("by", "weights") if getattr(roles, name) is not None]
    table.check_numerals(set(roles.features) - set(tables.source.texts))
    rows = TableRows.read(table, roles)
    source = rows if tables.are_one else TableRows.read(tables.source, roles)
    fitting, rest = _rows_to_fit(source, rows, tables, options)
    fitted_on = source.take(fitting)
    if roles.by is not None:
        _check_groups(source, rows, fitting, tables, roles.by)
    training = _training_rows(options.training, roles, tables)
    fit = methods.fit_of(names, chosen, training, has_inputs=bool(roles.features), seed=options.seed)
    with console.working(f"Fit {method} to {len(fitting)} rows"), words.of_rows(tables.source, fitting):
        calibrator = fit(fitted_on.x, fitted_on.base, fitted_on.y, **fitted_on.counts)
    taken = [name for name in counted if name in inspect.signature(type(calibrator).__call__).parameters]
    for name in taken:
        table.check_column(getattr(roles, name))
    with console.working(f"Predict {len(table)} rows"), words.of_rows(table):
        forecast = calibrator(rows.x, rows.base, **{name: rows.counts[name] for name in taken})
    guarantees = _guarantees(calibrator, fitted_on.counts.get("by"), table)
    for line in guarantees:
        console.say(line)
    unseen = rows.take(rest)
    measured = report.Measured(
        roles=roles,
        table=table,
        method=method,
        num_fitting=len(fitting),
        seed=options.seed,
        y=unseen.y,
        forecasts={"before": unseen.base, "after": forecast[rest]} if rest.size else {},
        guarantees=guarantees,
        labels=unseen.counts.get("by"),
    )
    if measured.forecasts:
        console.print_scores(list(measured.forecasts), measured.scores, measured.rows)
    else:
        console.say(f"No scores: {table.file} has no targets in a column {roles.target!r} to measure against.")
    return _FittedTable(calibrator, taken, forecast, fitting if tables.are_one else None, measured)


def _choose_method(tables: _RowsToFitAndPredict, roles: Roles, options: _Options) -> tuple[str, Roles, dict[str, Any]]:
    """The method, the roles with the features that it uses, and what these hold.

    By default RIO corrects the predictions where there are inputs; its intervals are often too narrow or too wide, so
    that split conformal prediction follows. RIO uses no weights, nor does a chain.
    """
    method = options.method or (None if roles.weights is None else "split-conformal")
    if method is not None:
        steps = methods.find(method)
        methods.check_options(steps, [name for name in ("by", "weights") if getattr(roles, name)])
        if not methods.uses_inputs(steps):
            console.say(f"{method} uses no features.")
            if options.features is not None:
                console.complain("Warning", f"--features has no effect: {method} uses none.")
            return method, roles, {}
    features, columns = choose_features(roles, options.features, options.exclude, tables.source)
    method = method or ("rio,split-conformal" if features else "split-conformal")
    return method, replace(roles, features=features), {} if columns is None else {"categorical": columns}


def _rows_to_fit(
    source: TableRows, rows: TableRows, tables: _RowsToFitAndPredict, options: _Options
) -> tuple[np.ndarray, np.ndarray]:
    """The rows to fit on, in the file for fitting, and the rows of FILE to measure on. Their targets are known."""
    y = np.asarray(source.y)  # its column exists, because the roles were checked
    known = np.flatnonzero(np.isfinite(y))
    if len(known) < len(y):
        console.say(f"{len(y) - len(known)} rows of {tables.source.file} have no target, and are not fitted on.")
    if not tables.are_one:
        return known, np.array([], int) if rows.y is None else np.flatnonzero(np.isfinite(rows.y))
    fitting, rest = _split(len(known), options.fraction, options.seed)
    return known[fitting], known[rest]


def _check_groups(
    source: TableRows, rows: TableRows, fitting: np.ndarray, tables: _RowsToFitAndPredict, column: str
) -> None:
    """Raise ValueError if a row to predict is of a group without a row to fit on."""
    if "by" not in rows.counts:
        return  # whether it is needed, the method says
    labels, fitted_on = rows.counts["by"], source.counts["by"][fitting]
    unseen = labels[~np.isin(labels, fitted_on)]
    if not len(unseen):
        return
    instead = (
        "Give each group more rows, or try another --seed or a larger --calibration-fraction"
        if tables.are_one
        else f"Give {tables.source.file} rows of each group"
    )
    number, groups = len(np.unique(unseen)), len(np.unique(labels))
    first = tables.table.row(int(np.argmax(labels == unseen[0])))
    raise ValueError(
        f"column {column!r} has {number} of {groups} groups without a row to fit on, such as {unseen[0].item()!r} in "
        f"{first}. {instead}, or put small groups together."
    )


def _guarantees(calibrator: Any, labels: np.ndarray | None, table: FileTable) -> list[str]:
    """The guarantee of the 90 % interval, for each of at most ten groups; nothing where there is none."""
    if not hasattr(calibrator, "guarantee"):
        return []
    if labels is None:
        return [_told(calibrator.guarantee, table)]
    groups = np.unique(labels).tolist()
    lines = [f"{label}: {_told(partial(calibrator.guarantee, group=label), table)}" for label in groups[:_GROUPS_NAMED]]
    more = len(groups) - _GROUPS_NAMED
    return [*lines, f"... and {more} groups more."] if more > 0 else lines


def _told(guarantee: Callable, table: FileTable) -> str:
    """What is guaranteed, or why not."""
    try:
        return str(guarantee(0.9))
    except ValueError as nothing:
        return words.reworded(str(nothing), table)


def _training_rows(file: Path | None, roles: Roles, tables: _RowsToFitAndPredict) -> dict[str, Any]:
    """The rows that the model was trained on; empty if there is no file of them."""
    if file is None:
        return {}
    table = tables.read_other(file)
    table.check_numerals(set(roles.features) - set(tables.source.texts))
    return {"x_train": table.select(roles.features), "y_train": table.numbers(roles.target)}


# Without predictions


def _fit_pipeline(tables: _RowsToFitAndPredict, roles: Roles, options: _Options, *, is_saved: bool) -> _FittedTable:
    """Models of the features, combined."""
    import jax

    table, source = tables.table, tables.source
    chosen, columns = choose_features(roles, options.features, options.exclude, source)
    if columns is None:
        raise ValueError(f"{source.file} has no column beside {roles.target!r} to predict it from.")
    table.check_numerals(set(chosen) - set(source.texts))
    x, y = source.select(chosen), source.numbers(roles.target, may_be_missing=True)
    known, rest = np.flatnonzero(np.isfinite(y)), np.flatnonzero(~np.isfinite(y))
    candidates = _candidates(options.models, is_saved=is_saved)
    key, limit = jax.random.key(options.seed), options.time_limit
    fit = partial(jc.pipeline.fit, predictor=candidates, method="folds", categorical=columns, time_limit=limit, key=key)
    with console.working(f"Fit models to {len(known)} rows"), words.of_rows(source, known):
        model = fit(x[known], y[known])
    console.say(f"{model}\n\n{model.guarantee(0.9)}")
    measured = report.Measured(
        roles=replace(roles, features=chosen),
        table=table,
        method=", ".join(step.name for step in model.steps),
        num_fitting=len(known),
        seed=options.seed,
        y=np.asarray(model.steps[-1].y),
        forecasts={"model alone": model.steps[0].predictions, "calibrated": model.out_of_fold},
        guarantees=[str(model.guarantee(0.9))],
        steps=str(model),
    )
    with console.working(f"Predict {len(table)} rows"), words.of_rows(table, None if not tables.are_one else rest):
        if not tables.are_one:
            forecast = model(table.select(chosen))
        elif rest.size:
            forecast = jc.distributions.Concatenated([model.out_of_fold, model(x[rest])], [known, rest])
        else:
            forecast = model.out_of_fold
    return _FittedTable(model, [], forecast, known if tables.are_one else None, measured)


def _candidates(models: str | None, *, is_saved: bool) -> list:
    """The models to combine. CatBoost is not among them if the fit is saved, because a file cannot hold its models.

    Raises:
        ValueError: if no model remains, or there is no model of a name.
    """
    from jaxcal.pipeline.trees import catboost

    named = None if models is None else [name.strip().replace("-", "_") for name in models.split(",")]
    try:
        candidates = jc.pipeline.candidates() if named is None else jc.pipeline.candidates(named)
    except (ImportError, ValueError) as error:
        raise ValueError(f"--models: {error}") from error
    kept = [each for each in candidates if not (is_saved and each[0] is catboost)]
    if not kept:
        raise ValueError("models of CatBoost cannot be saved: omit --save, or name another model.")
    if len(kept) < len(candidates):
        console.say("CatBoost is not among the models: it cannot be saved.")
    return kept


# Checks of options


def _parse_levels(text: str) -> list[float]:
    from jaxcal import _checks

    try:
        levels = [float(level) for level in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--quantiles must be numbers, such as 0.05,0.5,0.95; got {text!r}.") from error
    _checks.check_fraction("--quantiles", np.array(levels))
    levels = list(dict.fromkeys(levels))
    names = [f"q{level:g}" for level in levels]
    twice = [level for level, name in zip(levels, names, strict=True) if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"--quantiles {', '.join(map(repr, twice))} would be one column, q{twice[0]:g}: give one of them."
        )
    return levels


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must be a whole number from 0 to {2**32 - 1}; got {seed}.")


def _names(levels: Sequence[float], prefix: str, table: FileTable, *, are_split: bool) -> list[str]:
    """The columns to write. If a part of the rows is fitted on, a column says which part.

    Raises:
        ValueError: if the table already has such a column, or its encoding lacks a letter of a name.
    """
    names = ["mean", "std", *(f"q{level:g}" for level in levels), *(["used_for_fitting"] if are_split else [])]
    names = [prefix + name for name in names]
    if taken := [name for name in names if name in table.frame.columns]:
        raise ValueError(
            f"{table.file} already has the columns {', '.join(map(repr, taken))}: name the new ones otherwise, by "
            "--prefix."
        )
    if table.text is not None:
        table.text.check_names(names, table.file)
    return names


def _split(num_rows: int, fraction: float | None, seed: int) -> tuple[np.ndarray, ...]:
    """The numbers of the rows to fit on, and of the other rows."""
    from jaxcal import _checks

    fraction = 0.5 if fraction is None else fraction
    _checks.check_fraction("--calibration-fraction", fraction)
    num_fitting = round(fraction * num_rows)
    if min(num_fitting, num_rows - num_fitting) < 2:
        raise ValueError(
            f"{num_rows} rows are too few: {num_fitting} to fit on and {num_rows - num_fitting} to measure "
            "on, where 2 of each are the least."
        )
    return jc.datasets.split(num_rows, (fraction, 1 - fraction), seed=seed)


def _check_calibration(calibration: Path | None, fraction: float | None, file: Path) -> None:
    if calibration is None:
        return
    if fraction is not None:
        raise ValueError("--calibration and --calibration-fraction exclude each other: give one of them.")
    if calibration.exists() and file.exists() and calibration.samefile(file):
        raise ValueError(
            f"--calibration is {file} itself, so no row would be left to measure on: use --calibration-fraction."
        )
