"""The commands on small files with a linear model's predictions, and what they answer to mistakes."""

import datetime
import errno
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import jaxcal
from jaxcal import datasets, metrics, pipeline, progress
from jaxcal.calibrators import rio
from jaxcal.cli import console, files
from jaxcal.cli.app import app
from jaxcal.cli.text import Format, Text
from jaxcal.distributions import Normal
from jaxcal.frames.columns import Columns
from jaxcal.pipeline.trees import boosted_trees
from jaxcal.predictors import gaussian_process

pytestmark = pytest.mark.any_precision

ROWS = 40


@pytest.fixture(autouse=True)
def _floats_as_before():
    """The commands turn 64 bits on; other tests of this process must not notice."""
    before = jax.config.read("jax_enable_x64")
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def table(rng):
    """A straight line's predictions of a bent truth."""
    a, b = rng.uniform(-1, 1, size=(2, ROWS))
    truth = 2 * a + np.sin(3 * b) + 0.1 * rng.normal(size=ROWS)
    design = np.stack([a, b, np.ones(ROWS)], axis=1)
    line = design @ np.linalg.lstsq(design, truth, rcond=None)[0]
    return pl.DataFrame(
        {
            "id": [f"row {i}" for i in range(ROWS)],
            "a": a,
            "b": b,
            "truth": truth,
            "line": line,
            "spread": np.full(ROWS, 0.5),
        }
    )


@pytest.fixture
def file(table, tmp_path):
    path = tmp_path / "data.csv"
    table.write_csv(path)
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def calibrate(file, *options):
    return run("calibrate", file, "--target", "truth", "--prediction", "line", "--force", *options)


def printed_scores(output):
    """The printed table: the columns of numbers by the name of the row."""
    rows = (line.strip("│ ").split("│") for line in output.splitlines() if line.startswith("│"))
    return {name.strip(): [value.strip() for value in values] for name, *values in rows}


# What the commands do


def test_calibrate_writes_every_row_and_measures_on_unseen_ones(table, file):
    options = ("--features", "a,b", "--calibration-fraction", "0.6", "--seed", "3")
    result = calibrate(file, "--std", "spread", "--method", "rio", *options)
    assert result.exit_code == 0
    written = pl.read_csv(file.with_name("data.calibrated.csv"))
    assert written.columns == [*table.columns, "mean", "std", "q0.05", "q0.5", "q0.95", "used_for_fitting"]
    assert written.select(table.columns).equals(pl.read_csv(file))
    used = written["used_for_fitting"].to_numpy()
    assert used.sum() == 24

    # The same fit by hand, on the same rows in the same order, in 64 bits as on the command line.
    fitting, _ = datasets.split(40, (0.6, 0.4), seed=3)
    assert sorted(fitting) == list(np.flatnonzero(used))
    columns = {name: table[name].to_numpy() for name in table.columns}
    x, y, base = np.stack([columns["a"], columns["b"]], axis=1), columns["truth"], columns["line"]
    np.testing.assert_allclose(written["q0.5"], written["mean"], rtol=1e-12)
    np.testing.assert_allclose(written["q0.95"] - written["mean"], 1.6448536 * written["std"], rtol=1e-6)
    module = rio.fit(x[fitting], Normal(base[fitting], 0.5), y[fitting])
    expected = module(x, Normal(base, 0.5))
    np.testing.assert_allclose(written["mean"], expected.mean, rtol=1e-3)
    np.testing.assert_allclose(written["std"], expected.std, rtol=1e-2)

    unseen = {
        "before": Normal(base[~used], 0.5),
        "after": Normal(written["mean"].to_numpy()[~used], written["std"].to_numpy()[~used]),
    }
    rows = printed_scores(result.stdout)
    for column, distribution in enumerate(unseen.values()):
        scores = metrics.evaluate(y[~used], distribution)
        for label, metric in {
            "RMSE": "rmse",
            "NLPD": "nlpd",
            "CRPS": "crps",
            "90 % width": "width_90",
        }.items():
            np.testing.assert_allclose(float(rows[label][column]), scores[metric], rtol=1e-3, err_msg=label)
        assert rows["ECE"][column] == f"{scores['ece']:.1f} %"
        assert rows["90 % coverage"][column] == f"{100 * scores['coverage_90']:.1f} %"
    assert "Measured on 16 rows not used for fitting." in result.stdout


def test_groups_are_calibrated_by_their_own_rows(table, file):
    table.with_columns(site=pl.Series(["north", "south"] * (ROWS // 2))).write_csv(file)
    options = ("--method", "split-conformal", "--by", "site", "--quantiles", "0.1,0.9", "--features", "a,b")
    result = calibrate(file, *options)
    assert result.exit_code == 0
    assert "north: The 90 % interval covers a new row" in result.stdout
    written = pl.read_csv(file.with_name("data.calibrated.csv"))
    width = (written["q0.9"] - written["q0.1"]).to_numpy()
    error = (table["truth"] - table["line"]).abs().to_numpy()
    for site in ("north", "south"):
        mine = (written["site"] == site).to_numpy()
        used = np.sort(error[mine & written["used_for_fitting"].to_numpy()])
        rank = int(np.ceil(0.8 * (len(used) + 1) - 1e-9))
        np.testing.assert_allclose(width[mine], 2 * used[rank - 1], rtol=1e-9)
    result = calibrate(file, "--method", "rio", "--by", "site")
    assert result.exit_code == 2
    assert "--method rio does not use --by: " in result.stderr
    assert "split-conformal" in result.stderr


@pytest.mark.slow
def test_weights_of_a_fit_are_not_asked_for_in_other_rows(table, file, tmp_path):
    """And labels are."""
    new, weights, site = tmp_path / "new.csv", table["a"].exp(), pl.Series(["north", "south"] * (ROWS // 2))
    table.with_columns(weight=weights, site=site).write_csv(file)
    table.with_columns(site=site).write_csv(new)
    options = ("--calibration", file, "--weights", "weight", "--by", "site", "--features", "a,b")
    result = calibrate(new, "--method", "gaussian-mle", *options)
    assert result.exit_code == 0, result.output
    mean, truth = table["line"].to_numpy(), table["truth"].to_numpy()
    fitted = jaxcal.gaussian_mle.fit(None, jaxcal.Point(mean), truth, by=site.to_numpy(), weights=weights.to_numpy())
    written = pl.read_csv(new.with_name("new.calibrated.csv"))
    expected = fitted(None, jaxcal.Point(mean), by=site.to_numpy()).std
    np.testing.assert_allclose(written["std"].to_numpy(), expected, rtol=1e-4)
    for method, missing in (("split-conformal", "weight"), ("crude", "weight")):
        assert_refused(calibrate(new, "--method", method, *options), missing)


def test_calibrate_from_another_file_onto_rows_without_a_truth(table, file, tmp_path):
    new, out = tmp_path / "new.parquet", tmp_path / "out.parquet"
    table.drop("truth").write_parquet(new)
    # Numeric columns are features unless they are something else.
    options = ("--calibration", file, "--quantiles", "0.1,0.9", "--prefix", "rio_", "--out", out)
    result = calibrate(new, "--std", "spread", *options)
    assert result.exit_code == 0
    assert "No scores: " in result.stdout
    written = pl.read_parquet(out)
    assert written.columns == [*table.drop("truth").columns, "rio_mean", "rio_std", "rio_q0.1", "rio_q0.9"]
    assert np.corrcoef(written["rio_mean"], table["truth"])[0, 1] > np.corrcoef(table["line"], table["truth"])[0, 1]


def test_without_predictions_a_model_is_chosen_and_fitted(table, file, monkeypatch):
    monkeypatch.setattr(pipeline, "candidates", lambda: [(gaussian_process.fit, ())])
    missing = table.with_columns(truth=pl.when(pl.col("a") > 0.5).then(None).otherwise(pl.col("truth")))
    missing.drop("line", "spread").write_csv(file, null_value="NA")
    result = run("calibrate", file, "--target", "truth", "--quantiles", "0.05,0.95")
    assert result.exit_code == 0
    assert "Features: a, b. Not used: id (seems to name the rows)." in result.stdout
    assert "No coverage is guaranteed." in result.stdout
    written = pl.read_csv(file.with_name("data.calibrated.csv"), null_values="NA")
    used = written["used_for_fitting"].to_numpy()
    assert (used == (table["a"] <= 0.5).to_numpy()).all()
    x, y = table.select("a", "b").to_numpy(), table["truth"].to_numpy()
    fitted = pipeline.fit(x[used], y[used], key=jax.random.key(0))
    np.testing.assert_allclose(written["mean"].to_numpy()[used], fitted.out_of_fold.mean, rtol=1e-6)
    np.testing.assert_allclose(written["mean"].to_numpy()[~used], fitted(x[~used]).mean, rtol=1e-6)
    assert (written["q0.05"] < written["q0.95"]).all()


def test_options_of_predictions_need_some(file):
    result = run("calibrate", file, "--target", "truth", "--method", "crude", "--std", "spread")
    assert_refused(result, "--std, --method needs a column of predictions, --prediction.")


def test_labels_and_missing_values_are_features(table, file):
    """As data frames in Python: the same columns give the same numbers; rows without a target are predicted."""
    labels = pl.Series("site", ["north", "south", None, "west"] * (ROWS // 4))
    rough = table.with_columns(
        labels,
        a=pl.when(pl.int_range(ROWS) == 2).then(None).otherwise("a"),
        truth=pl.when(pl.int_range(ROWS) >= 36).then(None).otherwise("truth"),
        constant=pl.lit(3),
        number=pl.int_range(ROWS).shuffle(seed=0),
    )
    rough.write_csv(file)
    result = calibrate(file, "--seed", "1")
    assert result.exit_code == 0, result.output
    assert "Features: a (1 missing), b, site (4 labels, 10 missing)." in result.stdout
    assert "spread (holds one value), constant (holds one value), number (seems to number the rows)" in result.stdout
    assert result.stderr.count("Warning: ") == 2  # of id, and of number
    assert "column 'number' seems to number the rows and is no feature" in result.stderr
    assert "4 rows of" in result.stdout
    written = pl.read_csv(file.with_name("data.calibrated.csv"))
    fitting = datasets.split(36, (0.5, 0.5), seed=1)[0]
    assert sorted(fitting) == list(np.flatnonzero(written["used_for_fitting"]))
    x, base = rough.select("a", "b", "site"), jaxcal.Point(table["line"].to_numpy())
    columns = Columns.of(x)
    fitted = rio.fit(x[fitting], base[fitting], table["truth"].to_numpy()[fitting], categorical=columns)
    np.testing.assert_allclose(written["mean"].to_numpy(), fitted(x, base).mean, rtol=1e-5)


def test_a_text_among_numbers_does_not_make_a_column_labels(table, file):
    values = [*map(str, table["a"]), "oops"][1:]
    table.with_columns(a=pl.Series(values)).write_csv(file)
    assert_refused(calibrate(file), "column 'a'", "holds numbers, and 'oops' among them")


def test_a_method_that_uses_no_features_does_not_read_them(table, file):
    table.with_columns(broken=pl.lit(float("inf"))).write_csv(file)
    result = calibrate(file, "--method", "crude", "--std", "spread", "--features", "a")
    assert result.exit_code == 0, result.output
    assert "crude uses no features." in result.stdout
    assert "Warning: --features has no effect" in result.stderr


def test_a_chain_is_fitted_to_out_of_fold_errors(table, file):
    result = calibrate(file, "--method", "rio,split-conformal", "--calibration-fraction", "0.75")
    assert result.exit_code == 0, result.output
    assert "The 90 % interval covers" not in result.stdout
    written = pl.read_csv(file.with_name("data.calibrated.csv"))
    fitting = datasets.split(ROWS, (0.75, 0.25), seed=0)[0]
    x, base = table.select("a", "b"), jaxcal.Point(table["line"].to_numpy())
    steps, key = [rio.fit, jaxcal.conformal.fit], jax.random.key(0)
    fitted = jaxcal.chain.fit(x[fitting], base[fitting], table["truth"].to_numpy()[fitting], calibrators=steps, key=key)
    lower, _ = fitted(x, base).interval(0.9)
    np.testing.assert_allclose(written["q0.05"].to_numpy(), lower, rtol=1e-5)
    assert_refused(calibrate(file, "--method", "rio,crud"), "there is no method 'crud': did you mean 'crude'")
    assert_refused(calibrate(file, "--method", "rio,crude", "--weights", "spread"), "--weights goes with one method")


@pytest.mark.parametrize("options", [("--method", "crude", "--std", "spread"), ("--method", "rio,crude", "--by", "id")])
def test_a_saved_calibrator_predicts_the_same(table, file, tmp_path, options):
    table.with_columns(id=pl.Series(["left", "right"] * (ROWS // 2))).write_csv(file)
    model, new = tmp_path / "model.safetensors", tmp_path / "new.parquet"
    result = calibrate(file, *options, "--save", model, "--quantiles", "0.1,0.9", "--prefix", "c_")
    assert result.exit_code == 0, result.output
    pl.read_csv(file).drop("truth").reverse().write_parquet(new)
    result = run("apply", model, new)
    assert result.exit_code == 0, result.output
    names = ["c_mean", "c_std", "c_q0.1", "c_q0.9"]
    written = pl.read_parquet(tmp_path / "new.calibrated.parquet").reverse().select(names)
    expected = pl.read_csv(file.with_name("data.calibrated.csv")).select(names)
    np.testing.assert_allclose(written.to_numpy(), expected.to_numpy(), rtol=1e-12)
    again = run("apply", model, file, "--out", tmp_path / "again.csv")
    scores = printed_scores(again.stdout)
    assert scores["90 % coverage"][0].endswith(" %")
    assert "if some of them were fitted on, these scores are too good" in again.stdout
    pl.read_parquet(new).drop("line").write_parquet(new)
    assert_refused(run("apply", model, new, "--force"), "has no column 'line'")
    assert_refused(run("apply", file, new, "--force"), "is not a file that jaxcal.save has written")


def test_a_saved_pipeline_predicts_the_same(table, file, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "candidates", lambda: [(gaussian_process.fit, ()), (boosted_trees, ())])
    model, new = tmp_path / "model", tmp_path / "new.csv"
    table.drop("line", "spread", "id").write_csv(file)
    result = run("calibrate", file, "--target", "truth", "--save", model)
    assert result.exit_code == 0, result.output
    assert "boosted_trees" in result.stdout
    table.select("b", "a").write_csv(new)
    assert run("apply", model, new).exit_code == 0
    fitted = jaxcal.load(model)["model"]
    written = pl.read_csv(tmp_path / "new.calibrated.csv")
    np.testing.assert_allclose(written["mean"].to_numpy(), fitted(table.select("a", "b")).mean, rtol=1e-9)


def test_models_are_chosen_by_name(table, file):
    table.drop("line", "spread", "id").write_csv(file)
    result = run("calibrate", file, "--target", "truth", "--models", "forests, gaussian-process", "--time-limit", "600")
    assert result.exit_code == 0, result.output
    assert "gaussian_process" in result.stdout
    assert "forests" in result.stdout
    assert "mlp" not in result.stdout
    refused = run("calibrate", file, "--target", "truth", "--models", "oracle", "--force")
    assert_refused(refused, "--models: there is no model 'oracle'; there are deep_ensemble,")
    late = run("calibrate", file, "--target", "truth", "--models", "forests", "--time-limit", "0.001", "--force")
    assert_refused(late, "the --time-limit of 0.001 s passed before")


def test_models_and_a_time_limit_need_no_predictions(file):
    for option in (("--models", "mlp"), ("--time-limit", "60")):
        assert_refused(calibrate(file, *option), "are for a fit without a column of predictions")


def test_the_report_is_one_page(table, file, tmp_path):
    page = tmp_path / "report.html"
    table.rename({"a": "a <b>"}).write_csv(file)
    result = calibrate(file, "--std", "spread", "--method", "rio", "--report", page)
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert text.count("<img ") == text.count("src='data:image/png;base64,") == 5
    assert "http" not in text
    assert "a &lt;b&gt;" in text
    for name, values in printed_scores(result.stdout).items():
        cells = "".join(f"<td>{value}</td>" for value in values)
        assert f"<th>{name}</th>{cells}" in text
    assert "No coverage is guaranteed. The 90 % interval covered" in text


def test_rows_without_targets_are_reported(table, file, tmp_path):
    new, page = tmp_path / "new.csv", tmp_path / "report.html"
    table.drop("truth").write_csv(new)
    options = ("--calibration", file, "--method", "split-conformal", "--std", "spread", "--report", page)
    assert calibrate(new, *options).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<img ") == 1
    assert "covers a new row with probability" in text


def test_long_work_says_how_far_it_is_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(console, "_SECONDS", 0.01)
    told, reached = "Fit: 0 s so far, example: steps 1 of 2", ""
    with console.working("Fit"), progress.work("example: steps", 2) as steps:
        steps.advance()
        for _ in range(1000):
            reached += capsys.readouterr().err
            if told in reached:
                break
            time.sleep(0.01)
    assert told in reached


def test_the_version_is_told():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"jaxcal {jaxcal.__version__}, JAX {jax.__version__}, Python {platform.python_version()}\n"


def test_two_columns_of_one_name_are_refused(file):
    file.write_text("a,b,truth,line,truth\n" + 30 * "1,2,3,4,3\n")
    assert_refused(calibrate(file), "more than one column 'truth'")


def monitor(file, *options):
    return run("monitor", file, "--target", "truth", "--prediction", "line", *options)


@pytest.fixture
def stream(rng, tmp_path):
    """Predictions of rows in the order of time, whose noise doubles; the last five targets are not known yet."""
    line, std = rng.normal(size=605), np.where(np.arange(605) < 300, 1.0, 2.0)
    truth = line + std * rng.normal(size=605)
    table = pl.DataFrame({"line": line, "truth": truth, "spread": np.full(605, 0.5)})
    table = table.with_columns(truth=pl.when(pl.int_range(605) < 600).then("truth"))
    path = tmp_path / "stream.csv"
    table.write_csv(path)
    return path, line[:600], truth[:600]


def test_monitor_measures_and_tests(stream):
    file, line, truth = stream
    result = monitor(file, "--calibration-rows", "200", "--confidence-level", "0.8", "--std", "spread")
    assert result.exit_code == 0, result.output
    assert "The 80 % interval covers a new row with probability 80.1 %" in result.stdout
    rows = printed_scores(result.stdout)
    assert list(rows) == [*(f"{start} to {start + 39}" for start in range(1, 400, 40)), "all"]
    fixed = sorted(abs(truth[:200] - line[:200]))[161 - 1]  # ceil(201 * 0.8) = 161
    covered = abs(truth[200:] - line[200:]) <= fixed
    assert rows["all"][0] == f"{100 * covered.mean():.1f} %"
    assert rows["41 to 80"][0] == f"{100 * covered[40:80].mean():.1f} %"
    assert abs(float(rows["all"][1].rstrip(" %")) - 80) < 4
    text = " ".join(result.stdout.split())
    assert "The errors of 400 new rows were tested for exchangeability with those of 200 calibration rows" in text
    assert "it is rejected" in text
    assert "of the 5 rows whose target is not known yet: the prediction plus or minus" in text
    assert text.endswith("times spread.")


def test_monitor_of_a_short_file_names_what_is_needed(stream):
    file, *_ = stream
    assert_refused(
        monitor(file, "--calibration-rows", "600"), "has 600 rows whose target is known", "--calibration-rows"
    )
    assert_refused(monitor(file, "--confidence-level", "90"), "--confidence-level", "did you mean 0.9?")
    assert_refused(monitor(file, "--calibration-rows", "0"), "--calibration-rows must be at least 1")
    assert_refused(monitor(file, "--std", "line"), "must be different columns")
    result = monitor(file, "--calibration-rows", "5")
    assert result.exit_code == 0
    assert "Warning: 5 calibration rows are too few" in result.stderr


@pytest.mark.parametrize("write", [str, datetime.date.toordinal])
def test_monitor_takes_the_rows_in_the_order_of_time(stream, tmp_path, write):
    file, *_ = stream
    days = [datetime.date(2026, 1, 1) + datetime.timedelta(days=k // 2) for k in range(605)]  # two rows a day
    table = pl.read_csv(file).with_columns(day=pl.Series(list(map(write, days))))
    shuffled = tmp_path / "shuffled.csv"
    order = np.random.default_rng(0).permutation(605)
    table[sorted(range(605), key=lambda k: (order[k // 2], k))].write_csv(shuffled)
    expected = monitor(file).stdout
    result = monitor(shuffled, "--time", "day")
    assert result.exit_code == 0, result.output
    assert "Note: the rows of" in result.stderr
    rows, sorted_rows = printed_scores(result.stdout), printed_scores(expected)
    assert list(rows.values()) == list(sorted_rows.values())
    assert next(iter(rows)) == f"{write(days[100])} to {write(days[149])}"
    alarm = int(re.findall(r"after new row (\d+)", " ".join(expected.split()))[0])
    assert f"New row {alarm} is of {write(days[99 + alarm])}." in " ".join(result.stdout.split())
    table.write_csv(file)
    assert monitor(file, "--time", "day").stderr == ""


@pytest.mark.parametrize(
    ("days", "part"),
    [
        (["2026-01-01", "05.01.2026"], "row 3 of {file} (the header is row 1) holds '05.01.2026'"),
        (["2026-01-01", None], "holds 1 times that are missing, the first in row 3 of {file}"),
        (["2026-01-01", "2026-01-01T10:00Z"], "times with and without a time zone"),
    ],
)
def test_times_that_have_no_order_are_refused(stream, days, part):
    file, *_ = stream
    pl.read_csv(file).with_columns(day=pl.Series([*days, *["2026-01-02"] * 603])).write_csv(file)
    assert_refused(monitor(file, "--time", "day"), part.format(file=file))
    assert_refused(monitor(file, "--time", "dya"), "did you mean 'day'?")


@pytest.mark.slow
def test_demo_measures_and_draws(rng, tmp_path, monkeypatch):
    mirror, out = tmp_path / "mirror", tmp_path / "pictures" / "here"
    mirror.mkdir()
    x = rng.normal(size=(60, 6))
    y = (x[:, 0] + 0.3 * rng.normal(size=60))[:, None]
    names = np.array([f"x{i}" for i in range(6)])
    np.savez(
        mirror / "yacht.npz",
        x=x,
        y=y,
        feature_names=names,
        target_names=np.array(["pull"]),
        categorical=np.zeros(0),
    )
    monkeypatch.setenv("JAXCAL_DATA", str(mirror))
    result = run("demo", "--dataset", "yacht", "--out", out)
    assert result.exit_code == 0
    assert "yacht: 60 rows, 6 features, target pull." in result.stdout
    assert "60 data points, out of fold" in result.stdout
    assert "No coverage is guaranteed. The 90 % interval covered" in result.stdout
    assert "jaxcal calibrate FILE --target y" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.count(" ± ") == 2]
    assert [line.split("  ")[0] for line in lines] == [
        "GradientBoostingRegressor",
        "std of its training errors",
        "rio",
        "learned errors",
    ]
    for name in ("reliability.png", "intervals.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert str(out / name) in result.stdout


def test_methods_and_data_are_listed(monkeypatch):
    monkeypatch.delenv("JAXCAL_DATA", raising=False)
    listed = run("methods").stdout
    assert (rio.__doc__ or "").splitlines()[0] in listed
    assert "mlp" in listed
    assert "_base" not in listed
    diabetes = next(line for line in run("data").stdout.splitlines() if "diabetes" in line)
    words = "diabetes license not established scikit-learn sklearn.datasets.load_diabetes"
    assert " ".join(diabetes.split()) == words
    yacht = next(line for line in run("data").stdout.splitlines() if "yacht" in line)
    assert yacht.split()[:4] == ["yacht", "CC", "BY", "4.0"]


def test_calibrate_without_features_looks_at_the_predictions_alone(table, tmp_path):
    path = tmp_path / "bare.csv"
    table.select("truth", "line").write_csv(path)
    result = calibrate(path)
    assert result.exit_code == 0
    assert printed_scores(result.output)["NLPD"][0] == "none"
    assert (pl.read_csv(tmp_path / "bare.calibrated.csv")["std"].to_numpy() > 0).all()


@pytest.mark.parametrize(
    "method",
    [
        "crude",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gaussian-mle", "isotonic")),
        "split-conformal",
    ],
)
def test_recalibrators_take_a_std(method, table, file):
    """What is written is what the method gives, fitted on the rows that are marked."""
    result = calibrate(file, "--std", "spread", "--method", method)
    assert result.exit_code == 0, result.output
    written = pl.read_csv(file.with_name("data.calibrated.csv"))
    used = written["used_for_fitting"].to_numpy()
    assert 0 < used.sum() < ROWS
    mean, std, truth = (table[name].to_numpy() for name in ("line", "spread", "truth"))
    module = {"split-conformal": "conformal"}.get(method, method.replace("-", "_"))
    fit = getattr(jaxcal, module).fit
    distribution = fit(None, Normal(mean[used], std[used]), truth[used])(None, Normal(mean, std))
    for name, values in (("mean", distribution.mean), ("std", distribution.std), ("q0.5", distribution.icdf(0.5))):
        np.testing.assert_allclose(written[name].to_numpy(), values, rtol=1e-4)
    is_guaranteed = "The 90 % interval covers a new row with probability 9" in result.stdout
    assert is_guaranteed == (method in ("crude", "split-conformal"))


def test_methods_of_inputs_need_some(table, file, tmp_path):
    result = calibrate(file, "--method", "accrue")
    assert result.exit_code == 0, result.output
    assert (pl.read_csv(file.with_name("data.calibrated.csv"))["std"].to_numpy() > 0).all()
    path = tmp_path / "bare.csv"
    table.select("truth", "line").write_csv(path)
    assert_refused(calibrate(path, "--method", "accrue"), "--method accrue needs columns of features")


@pytest.mark.slow
def test_sharp_gp_looks_at_the_rows_that_the_model_was_trained_on(table, file, tmp_path):
    training = tmp_path / "training.csv"
    table.head(25).write_csv(training)
    result = calibrate(file, "--method", "sharp-gp", "--training", training, "--quantiles", "0.2,0.8")
    assert result.exit_code == 0, result.output
    written = pl.read_csv(file.with_name("data.calibrated.csv"))
    assert (written["q0.2"] < written["q0.8"]).all()


def test_training_rows_go_with_the_methods_that_look_at_them(file):
    assert_refused(calibrate(file, "--method", "sharp-gp"), "--method sharp-gp needs the rows", "--training")
    assert_refused(calibrate(file, "--training", file), "--method rio,split-conformal does not use")


def test_a_warning_is_one_line(file):
    result = calibrate(file, "--std", "spread", "--method", "split-conformal", "--quantiles", "0.01")
    assert result.exit_code == 0
    assert "Warning: 20 calibration rows are too few" in result.stderr


def test_the_module_runs_as_a_command():
    result = subprocess.run([sys.executable, "-m", "jaxcal", "--help"], capture_output=True, text=True, check=True)
    assert "calibrate" in result.stdout


# Files come back as they were

# What a program that reads values and writes them again would change.
NASTY = [
    "00001", "01e301", "58e358", "TRUE", "1.10", "1e5", "+3", " 1 ", "NA", "", '""', '"quoted"', '"a, b"', '"a\nb"',
    '"a\r\n""b"""', "Köln", '5" pipe', "=1+1", "-0.0", "12345678901234567890.5", "𝔘", "a'b", "\t",
]  # fmt: skip


def with_column(texts, *, line_end="\n", separator=","):
    """A CSV with a column of texts, raw, beside targets and predictions; its lines."""
    rows = [["raw", "truth", "line"]]
    rows += [[text, f"{(7 * k) % 5}.50", f"{(3 * k) % 4}.0"] for k, text in enumerate(texts)]
    return [separator.join(row) + line_end for row in rows]


def assert_only_added(before, after, *, num_added=4, separator=b",", line_end=b"\n"):
    """Every line of a file, by its record, has new fields at its end, and nothing else has changed."""
    field = rb"[^\r\n" + separator + rb"]+"
    added = rb"(?:" + re.escape(separator) + field + rb"){" + str(num_added).encode() + rb"}"
    assert re.sub(added + rb"(?=" + line_end + rb"|$)", b"", after) == before


CONFORMAL = ("--method", "split-conformal", "--quantiles", "0.5")


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_what_is_not_added_comes_back_to_the_byte(tmp_path, line_end, start):
    file = tmp_path / "data.csv"
    texts = [text for text in NASTY if line_end != "\r" or "\n" not in text]
    file.write_bytes((start + "".join(with_column(texts, line_end=line_end)).rstrip()).encode())
    result = calibrate(file, *CONFORMAL)
    assert result.exit_code == 0, result.output
    written = file.with_name("data.calibrated.csv").read_bytes()
    assert_only_added(file.read_bytes(), written, line_end=line_end.encode())
    assert b"raw,truth,line,mean,std,q0.5,used_for_fitting" + line_end.encode() in written


def test_blank_lines_stay_and_are_no_rows(tmp_path):
    file = tmp_path / "data.csv"
    header, *rows = with_column(NASTY)
    file.write_text("".join(["\n", header, "\n", *rows, "\n\n"]), encoding="utf-8")
    result = calibrate(file, *CONFORMAL)
    assert result.exit_code == 0, result.output
    assert f"Predict {len(NASTY)} rows" in result.stdout
    assert_only_added(file.read_bytes(), file.with_name("data.calibrated.csv").read_bytes())


FIELDS = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_characters='",\r\n\0', exclude_categories=["Cs"])),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(
        lambda text: '"' + text.replace('"', '""') + '"'
    ),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(FIELDS, min_size=1, max_size=4),
    line_end=st.sampled_from(["\n", "\r\n"]),
    separator=st.sampled_from(",;\t|"),
    encoding=st.sampled_from(["utf-8", "utf-16-le", "utf-8-sig", "utf-16", "gb18030"]),
    is_ended=st.booleans(),
)
def test_any_text_comes_back_to_the_byte(tmp_path, texts, line_end, separator, encoding, is_ended):
    texts = [text if text.startswith('"') else text.replace(separator, "") for text in texts]
    lines = with_column(texts, line_end=line_end, separator=separator)
    if not is_ended:
        lines[-1] = lines[-1].removesuffix(line_end)
    file, out = tmp_path / "data.csv", tmp_path / "out.csv"
    file.write_bytes("".join(lines).encode(encoding))
    table = files.FileTable.read(file, Format(separator=separator, encoding=encoding))
    assert table.frame["truth"].to_list() == [float(f"{(7 * k) % 5}.50") for k in range(len(texts))]
    table.write({"new": np.arange(len(texts)) + 0.5}, out)
    ends = [line_end] * len(texts) + [line_end if is_ended else ""]
    new = ["new", *(f"{k}.5" for k in range(len(texts)))]
    expected = [
        line.removesuffix(end) + separator + added + end for line, end, added in zip(lines, ends, new, strict=True)
    ]
    assert out.read_bytes() == "".join(expected).encode(encoding)


def test_numbers_with_leading_zeros_are_labels(table, file, tmp_path):
    zips = pl.Series(["00501", "00544", "10001", "90210"] * (ROWS // 4))
    codes, mixed = (pl.Series([*texts] * (ROWS // 4)) for texts in (["01e301", "58e358"] * 2, ["07", "9", "10", "x"]))
    table.with_columns(zip=zips, code=codes, mixed=mixed).drop("id").write_csv(file)
    model = tmp_path / "model"
    result = calibrate(file, "--method", "kmeans", "--save", model)
    assert result.exit_code == 0, result.output
    assert "zip (4 labels, leading zeros), code (2 labels, leading zeros), mixed (4 labels)" in result.stdout
    new = tmp_path / "new.csv"  # none of them begins with a zero here
    new.write_text("a,b,line,zip,code,mixed\n0.5,0.5,1,90210,58e358,9\n")
    result = run("apply", model, new)
    assert result.exit_code == 0, result.output
    assert "Warning" not in result.stderr
    assert (tmp_path / "new.calibrated.csv").read_text().splitlines()[1].startswith("0.5,0.5,1,90210,58e358,9,")


def test_a_target_with_leading_zeros_is_a_number(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("truth,line\n" + "".join(f"{k:03d},{k}\n" for k in range(20)))
    assert calibrate(file, *CONFORMAL).exit_code == 0


def of_numbers(rows, separator=","):
    """A CSV of texts of numbers in a column a, beside targets and predictions."""
    lines = [separator.join([f'"{text}"' if separator in text else text, str(k % 7), str(k % 3)]) for k, text in rows]
    return "\n".join([separator.join(["a", "truth", "line"]), *lines]) + "\n"


@pytest.mark.parametrize(
    ("separator", "texts", "parts"),
    [
        (",", ["950.00", "1,234.50"], ["'1,234.50'", "a number with thousands separators: --thousands ',' reads it"]),
        (",", ["1", "1,234,567"], ["'1,234,567'", "--thousands ',' reads it"]),
        (",", ["1", "12,34,567"], ["'12,34,567'", "--thousands ',' reads it"]),
        (",", ["1 250", "1"], ["'1 250'", "--thousands ' ' reads it"]),
        (",", ["1'250.5", "1"], ['"1\'250.5"', '--thousands "\'" reads it']),
        (
            ",",
            ["1,234", "5,678"],
            ["a decimal comma or thousands separators: --decimal ',' or --thousands ',' reads it"],
        ),
        (";", ["1,234", "5,678"], ["'1,234'", "--decimal ',' or --thousands ',' reads it"]),
        (";", ["1.234,5", "5,5"], ["'1.234,5'", "--decimal ',' --thousands '.' reads it"]),
        (";", ["1.5", "5,5"], ["holds numbers that are written in several ways"]),
        (",", ["1.5", "5,000.25", "oops"], ["'oops'", "among them"]),
    ],
)
def test_a_number_that_is_written_otherwise_is_shown(tmp_path, separator, texts, parts):
    file = tmp_path / "data.csv"
    file.write_text(of_numbers(enumerate(texts * 12), separator))
    assert_refused(calibrate(file), "column 'a'", *parts)
    of_a_target = run("calibrate", file, "--target", "a", "--prediction", "line", "--force")
    assert_refused(of_a_target, "column 'a'", parts[0])
    assert calibrate(file, "--exclude", "a").exit_code == 0
    assert calibrate(file, *CONFORMAL).exit_code == 0  # it uses no features


@pytest.mark.parametrize(
    ("separator", "texts", "options"),
    [
        (",", ["950.00", "1,234.50"], ("--thousands", ",")),
        (";", ["950,00", "1.234,50"], ("--thousands", ".")),
        (";", ["950,00", "1 234,50"], ("--thousands", " ")),
        (",", ["950,00", "1.234,50"], ("--thousands", ".", "--decimal", ",")),
        ("\t", ["950.00", "1’234.50"], ("--thousands", "'", "--separator", "tab")),
        ("!", ["950.00", "1234.50"], ("--separator", "!")),
    ],
)
def test_options_say_how_numbers_are_written(tmp_path, separator, texts, options):
    file, plain, model = tmp_path / "data.csv", tmp_path / "plain.csv", tmp_path / "model"
    file.write_text(of_numbers(enumerate(texts * 12), separator), encoding="utf-8")
    plain.write_text(of_numbers(enumerate(["950.00", "1234.50"] * 12)))
    kmeans = ("--method", "kmeans", "--quantiles", "0.5")
    result = calibrate(file, *kmeans, *options, "--save", model)
    assert result.exit_code == 0, result.output
    assert "Features: a." in result.stdout
    assert calibrate(plain, *kmeans).exit_code == 0
    mark = "," if separator == ";" or "--decimal" in options else "."
    read = lambda path, **form: pl.read_csv(path, infer_schema_length=0, **form)["std"].to_list()
    written = read(tmp_path / "data.calibrated.csv", separator=separator)
    assert [value.replace(mark, ".") for value in written] == read(tmp_path / "plain.calibrated.csv")
    # A saved model reads new files in the same way, without options.
    again = tmp_path / "again.csv"
    assert run("apply", model, file, "--out", again).exit_code == 0
    assert read(again, separator=separator) == written


@pytest.mark.parametrize("separator", [";", "\t"])
def test_separators_and_decimal_commas_are_recognized_and_told(tmp_path, separator):
    file, model = tmp_path / "data.csv", tmp_path / "model"
    lines = [f"{k % 7},5{separator}{k % 7}{separator}{k % 3},25" for k in range(24)]
    file.write_text("\n".join([separator.join(["a", "truth", "line"]), *lines]))
    result = calibrate(file, "--method", "split-conformal", "--quantiles", "0.5", "--save", model)
    assert result.exit_code == 0, result.output
    words = {";": "semicolons", "\t": "tabs"}[separator]
    told = (
        f"Note: {file} has fields separated by {words} and decimal commas, and was read so: --separator and --decimal"
    )
    assert result.stderr.startswith(told)
    written = file.with_name("data.calibrated.csv").read_bytes()
    assert_only_added(file.read_bytes(), written, separator=separator.encode())
    assert f"{separator}0,25{separator}" in written.decode().splitlines()[1]
    # A saved model knows the format, and recognizes another.
    assert run("apply", model, file, "--force").stderr == ""
    file.write_text("line,b\n1.5,0\n2.5,0\n")
    result = run("apply", model, file, "--force")
    assert result.exit_code == 0, result.output
    assert "decimal points" in result.stderr
    assert file.with_name("data.calibrated.csv").read_text().startswith("line,b,mean,std,q0.5\n1.5,0,1.5,")
    file.write_text("line\n1.234\n")  # which may be 1234
    assert_refused(run("apply", model, file, "--force"), "'1.234'", "--decimal '.' or --decimal ',' --thousands '.'")


def test_monitor_reads_files_in_the_same_way(stream):
    file, *_ = stream
    expected = monitor(file).stdout
    rows = file.read_text().replace(",", ";").replace(".", ",")
    file.write_bytes(rows.replace("line", "Größe").encode("cp1252"))
    result = run("monitor", file, "--target", "truth", "--prediction", "Größe", "--encoding", "cp1252")
    assert result.exit_code == 0, result.output
    assert result.stdout == expected
    assert "has fields separated by semicolons and decimal commas" in result.stderr


def test_texts_in_parquet_are_texts(table, tmp_path):
    path = tmp_path / "data.parquet"
    texts = pl.Series(["1,234.50", "950.00"] * (ROWS // 2))
    table.with_columns(id=texts).write_parquet(path)
    result = calibrate(path, "--method", "kmeans")
    assert result.exit_code == 0, result.output
    assert "id (2 labels)" in result.stdout
    table.with_columns(line=texts).write_parquet(path)
    assert_refused(calibrate(path), "must hold numbers", "row 1 of", "holds '1,234.50'")


def test_points_that_may_separate_thousands_come_with_a_warning(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text(of_numbers(enumerate(["1.234", "5.678"] * 12), ";"))
    result = calibrate(file, *CONFORMAL)
    assert result.exit_code == 0
    assert "Warning: column 'a'" in result.stderr
    assert "'1.234', which was read with a decimal point: --decimal '.' confirms it" in result.stderr
    assert "Warning" not in calibrate(file, *CONFORMAL, "--decimal", ".").stderr


def test_an_encoding_is_kept(tmp_path):
    file, model = tmp_path / "data.csv", tmp_path / "model"
    file.write_bytes("".join(with_column(["Köln", "Bonn"] * 12)).encode("latin-1"))
    assert_refused(calibrate(file), "is not UTF-8: its byte 16, in line 2, is 0xf6", "--encoding cp1252")
    assert_refused(calibrate(file, "--encoding", "latin-11"), "--encoding must be an encoding of Python", "'latin-11'")
    result = calibrate(file, "--method", "kmeans", "--quantiles", "0.5", "--encoding", "latin-1", "--save", model)
    assert result.exit_code == 0, result.output
    assert "raw (2 labels)" in result.stdout
    assert_only_added(file.read_bytes(), file.with_name("data.calibrated.csv").read_bytes())
    assert_refused(calibrate(file, "--encoding", "latin-1", "--prefix", "\u2211"), "cannot be written in the encoding")
    for encoding in ("latin-1", "utf-8", "utf-16"):  # the fit's, and such that tell themselves
        new = tmp_path / "new.csv"
        new.write_bytes("raw,line\nKöln,1\n".encode(encoding))
        result = run("apply", model, new, "--force")
        assert result.exit_code == 0, result.output
        assert "Warning" not in result.stderr
        assert (tmp_path / "new.calibrated.csv").read_bytes().decode(encoding).startswith("raw,line,mean,")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--separator", "ab"), "--separator must be one character"),
        (("--decimal", ";"), "--decimal must be '.' or ','"),
        (("--thousands", "x"), "--thousands must be one of"),
        (("--thousands", ",", "--decimal", ","), "must be different"),
        (("--exclude", "c"), "no column 'c'"),
        (("--exclude", "line"), "--exclude names 'line', which is the column of --prediction"),
        (("--exclude", "b", "--features", "a"), "--exclude and --features exclude each other"),
        (("--out", "out.tsv"), "are not separated by tabs"),
    ],
)
def test_bad_options_of_files(file, options, part):
    assert_refused(calibrate(file, *options), part)


def test_excluded_columns_stay_in_the_file(table, file):
    result = calibrate(file, "--method", "kmeans", "--exclude", "b, id")
    assert result.exit_code == 0, result.output
    assert "Features: a." in result.stdout
    assert "b (excluded)" in result.stdout
    assert pl.read_csv(file.with_name("data.calibrated.csv")).columns[: len(table.columns)] == table.columns


def test_tsv_files_are_read_and_written(table, file, tmp_path):
    path = tmp_path / "data.tsv"
    table.write_csv(path, separator="\t")
    assert calibrate(path, *CONFORMAL).exit_code == 0
    assert pl.read_csv(tmp_path / "data.calibrated.tsv", separator="\t").columns[-1] == "used_for_fitting"
    path = tmp_path / "data.parquet"
    table.write_parquet(path)
    assert calibrate(path, *CONFORMAL, "--out", tmp_path / "out.tsv").exit_code == 0
    assert pl.read_csv(tmp_path / "out.tsv", separator="\t").columns[:-4] == table.columns


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (("--features", "a,b"), "rio,split-conformal"),
        (("--exclude", "a,b,id,spread,weight"), "split-conformal"),
        (("--weights", "weight"), "split-conformal"),
    ],
)
def test_by_default_split_conformal_follows_rio_where_there_are_inputs(table, file, options, method):
    table.with_columns(weight=table["a"].exp()).write_csv(file)
    result = calibrate(file, *options)
    assert result.exit_code == 0, result.output
    assert f"Fit {method} to 20 rows" in result.stdout
    written = pl.read_csv(file.with_name("data.calibrated.csv"))
    half_widths = (written["q0.95"] - written["mean"]).round(9)
    assert (half_widths.n_unique() == ROWS) == method.startswith("rio")  # RIO's stds depend on the inputs


# Files are not overwritten silently


@pytest.mark.parametrize("option", ["--out", "--save", "--report"])
def test_a_file_that_exists_is_overwritten_by_force_alone(file, tmp_path, monkeypatch, option):
    there = tmp_path / {"--out": "there.csv", "--save": "there.safetensors", "--report": "there.html"}[option]
    there.write_text("old")
    calibrate = ("calibrate", file, "--target", "truth", "--prediction", "line", *CONFORMAL, option, there)
    with monkeypatch.context() as patched:
        patched.setattr(files.FileTable, "read", None)  # it is refused before any work
        assert_refused(run(*calibrate), f"{there} exists: --force overwrites it, or {option} names another place.")
    assert there.read_text() == "old"
    assert run(*calibrate, "--force").exit_code == 0
    assert there.read_bytes() != b"old"


def test_outputs_have_names_of_their_own(file, tmp_path):
    both = tmp_path / "both.csv"
    assert_refused(calibrate(file, "--out", both, "--save", both), "--save is", "would be overwritten")
    assert_refused(calibrate(file, "--save", both, "--report", both), "--report is", "would be overwritten")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv"]


def test_apply_and_demo_overwrite_by_force_alone(file, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out.csv"
    out.write_text("old")
    assert calibrate(file, *CONFORMAL, "--save", model).exit_code == 0
    assert_refused(run("apply", model, file, "--out", out), "out.csv exists: --force")
    assert run("apply", model, file, "--out", out, "--force").exit_code == 0
    assert out.read_text() != "old"
    (tmp_path / "intervals.png").touch()
    assert_refused(run("demo", "--out", tmp_path), "intervals.png exists: --force overwrites it, or --out")


# Messages name rows of the file, and options


def test_rows_are_numbered_as_in_a_spreadsheet(file):
    file.write_text('\na,truth,line\n"x\ny",2,3\n\nz,2,3\nz,high,3\n')
    assert_refused(calibrate(file), f"row 6 of {file} (the header is row 2) holds 'high'")


def test_an_outlier_is_named_once_by_its_row(table, file):
    """Not by its number among the rows that were drawn, nor again by the fits of folds."""
    row = sorted(datasets.split(ROWS, (0.9, 0.1), seed=0)[0])[7]
    outlying = pl.when(pl.int_range(ROWS) == row).then(99.0).otherwise("truth")
    table.with_columns(truth=outlying).write_csv(file)
    result = calibrate(file, "--method", "rio,split-conformal", "--calibration-fraction", "0.9", "--exclude", "id")
    assert result.exit_code == 0, result.output
    (told,) = result.stderr.splitlines()
    assert told.startswith(f"Warning: row {row + 2} of {file} (the header is row 1) lies ")
    assert told.endswith("depends on the inputs.")


PROGRAM = re.compile(r"jaxcal\.|jax\.|\b[a-z_]+=|base\.|UserWarning|\.py")


@pytest.mark.parametrize(
    ("change", "options", "part"),
    [
        ({"spread": 0.0}, ("--std", "spread", "--method", "crude"), "--std is 0 and the prediction wrong in 1 rows"),
        ({"spread": 0.0}, ("--std", "spread", "--method", "gaussian-mle"), "--std must be positive; 1 values are not"),
        ({"spread": 1e-320}, ("--std", "spread", "--method", "crude"), "--std must be at least 2.2e-308"),
        ({"spread": -1.0}, ("--weights", "spread"), "weights must not be negative; got -1 in row"),
    ],
)
def test_a_value_that_a_method_does_not_take_is_named_by_its_row(table, file, change, options, part):
    ((name, value),) = change.items()
    row = int(datasets.split(ROWS, (0.5, 0.5), seed=0)[0][3])
    table.with_columns(pl.when(pl.int_range(ROWS) == row).then(value).otherwise(name).alias(name)).write_csv(file)
    (told,) = calibrate(file, *options).stderr.splitlines()
    assert part in told
    assert f"row {row + 2} of {file} (the header is row 1)" in told
    assert not PROGRAM.search(told)


@pytest.mark.parametrize(
    ("change", "options", "part"),
    [
        ({}, ("--method", "neural-quantiles"), "needs a std. --std names it, or --method accrue,neural-quantiles"),
        ({}, ("--calibration-fraction", "0.2", "--method", "split-conformal"), "8 calibration rows are too few"),
        ({}, ("--calibration-fraction", "0.2", "--method", "accrue"), "there are 8 rows to fit to; at least 10"),
        ({"line": pl.col("truth")}, ("--method", "accrue"), "the target equals the prediction in every row"),
        ({"line": pl.col("truth")}, ("--method", "crude"), "the target equals the prediction in every row"),
        ({"line": pl.col("truth")}, ("--method", "rio"), "the errors of the predictions are constant (0)"),
        ({"line": pl.col("truth")}, ("--method", "kmeans"), "Give other rows."),
        ({"line": pl.col("truth")}, ("--method", "gaussian-mle"), "the target equals the (shifted) prediction"),
        ({"spread": pl.lit(1e-12)}, ("--std", "spread", "--method", "isotonic"), "the stds are far too small"),
        ({"truth": pl.lit(3.0), "line": pl.col("a")}, ("--method", "conditional-conformal"), "quantile is infinite"),
    ],
)
def test_no_message_advises_what_a_program_would_write(table, file, change, options, part):
    table.with_columns(**change).write_csv(file)
    told = calibrate(file, *options).stderr
    assert part in told
    assert not PROGRAM.search(told.replace(str(file), ""))
    assert len(set(told.splitlines())) == len(told.splitlines())


@pytest.mark.parametrize(
    ("rows", "options", "part"),
    [
        (2, ("--models", "gaussian_process,forests"), "20 of 20 rows are repeated"),
        pytest.param(1, ("--models", "usnrt"), "--models variance_network fits the same", marks=pytest.mark.slow),
    ],
)
def test_models_are_warned_of_in_words_of_the_command(table, file, rows, options, part):
    few = table.select("a", "b", "truth").head(20 // rows)
    pl.concat([few] * rows).write_csv(file)
    result = run("calibrate", file, "--target", "truth", *options)
    assert result.exit_code == 0, result.output
    assert part in result.stderr
    assert not PROGRAM.search(result.stderr.replace(str(file), ""))


# Groups


def test_a_group_without_rows_to_fit_on_is_named_with_what_to_try(table, file, tmp_path):
    sites = ["north", "south"] * (ROWS // 2)
    unseen = int(datasets.split(ROWS, (0.5, 0.5), seed=0)[1][0])
    sites[unseen] = "rare"
    table.with_columns(site=pl.Series(sites)).write_csv(file)
    by = ("--method", "split-conformal", "--by", "site")
    named = f"'site' has 1 of 3 groups without a row to fit on, such as 'rare' in row {unseen + 2} of {file}"
    assert_refused(calibrate(file, *by), named, "--calibration-fraction", "--seed")
    fitted, model, new = tmp_path / "fitted.csv", tmp_path / "model", tmp_path / "new.csv"
    seen = table.with_columns(site=pl.Series(["north", "south"] * (ROWS // 2)))
    seen.write_csv(fitted)
    assert_refused(calibrate(file, *by, "--calibration", fitted), named, f"Give {fitted} rows of each group")
    result = calibrate(fitted, *by, "--calibration-fraction", "0.3", "--save", model)
    assert "calibration rows, too few for level 0.9" in result.stdout
    assert "Fit to more rows of small groups, by --calibration-fraction, or put small groups together." in result.stdout
    seen.head(3).with_columns(site=pl.lit("mars")).write_csv(new)
    assert_refused(run("apply", model, new), "the group 'mars' had no rows in the fit; there are 'north', 'south'.")
    few = calibrate(fitted, "--method", "gaussian-mle", "--by", "site", "--calibration-fraction", "0.1")
    assert_refused(few, "Give more rows, or put small groups together.")


def test_a_closed_pipe_ends_quietly_with_the_file_written(file, monkeypatch):
    command = [sys.executable, "-m", "jaxcal", "calibrate", file, "--target", "truth", "--prediction", "line"]
    options = ("--method", "split-conformal", "--features", "a")  # the latter has no effect, which is a warning
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        told = process.stderr.read().splitlines()
    assert process.returncode == 0
    assert told == [b"Warning: --features has no effect: split-conformal uses none."]
    assert len(pl.read_csv(file.with_name("data.calibrated.csv"))) == ROWS

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        for _ in range(2):
            console.complain("Warning", "nobody reads this")


# Mistakes: one line, exit code 2


def assert_refused(result, *parts):
    *warnings, error = result.stderr.splitlines()
    assert result.exit_code == 2
    assert error.startswith("Error: ")
    assert all(line.startswith(("Warning: ", "Note: ")) for line in warnings)
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--target", "thruth"], ["no column 'thruth'", "did you mean 'truth'?"]),
        (["--prediction", "Line"], ["did you mean 'line'?"]),
        (["--std", "zzz"], ["no column 'zzz'", "there are id, a, b, truth, line, spread"]),
        (["--features", "a,c"], ["no column 'c'"]),
        (["--features", "a,id"], ["column 'id'", "seems to name the rows: leave it out of --features"]),
        (["--features", "a,truth"], ["the target 'truth' must not be among the features"]),
        (["--target", "line"], ["must be different columns; got line, line"]),
        (["--calibration-fraction", "90"], ["between 0 and 1; got 90: did you mean 0.9?"]),
        (["--calibration-fraction", "-1"], ["between 0 and 1; got -1"]),
        (["--calibration-fraction", "0.01"], ["40 rows are too few: 0 to fit on and 40 to measure on"]),
        (["--quantiles", "0.5,5"], ["--quantiles must lie between 0 and 1; got 5: did you mean 0.05?"]),
        (["--quantiles", "all"], ["--quantiles must be numbers", "got 'all'"]),
        (["--method", "rioo"], ["there is no method 'rioo': did you mean 'rio'?"]),
        (["--method", "_base"], ["there is no method '_base'"]),
        (["--out", "here.xlsx"], ["here.xlsx must end in .csv, .tsv or .parquet"]),
        (["--out", "no/such/folder/out.csv"], ["cannot write", "no folder"]),
        (["--calibration", "missing.csv"], ["there is no file missing.csv"]),
        (["--quantiles", "0.1,0.10000001"], ["--quantiles 0.1, 0.10000001 would be one column, q0.1"]),
        (["--seed", str(2**40)], ["--seed must be a whole number from 0 to 4294967295; got 1099511627776"]),
        (["--seed", "-1"], ["--seed must be a whole number"]),
        (["--save", "no/such/folder/model"], ["cannot write", "no folder"]),
    ],
)
def test_bad_options(file, options, parts):
    assert_refused(calibrate(file, *options), *parts)


def test_both_ways_to_say_what_to_fit_on(file, tmp_path):
    both = ("--calibration", tmp_path / "x.csv", "--calibration-fraction", "0.5")
    assert_refused(calibrate(file, *both), "exclude each other")
    assert_refused(calibrate(file, "--calibration", file), "no row would be left to measure on")


def test_output_that_would_overwrite(table, file, tmp_path):
    assert_refused(calibrate(file, "--out", file), "which would be overwritten")
    other = tmp_path / "other.csv"
    table.write_csv(other)
    assert_refused(calibrate(file, "--calibration", other, "--out", other), "which would be overwritten")
    assert_refused(calibrate(file, "--out", tmp_path), "must end in")
    (tmp_path / "folder.csv").mkdir()
    assert_refused(calibrate(file, "--out", tmp_path / "folder.csv"), "it is a folder")
    table.rename({"spread": "std"}).write_csv(file)
    assert_refused(calibrate(file, "--std", "std"), "already has the columns 'std'", "--prefix")


@pytest.mark.parametrize(
    ("column", "value", "part"),
    [
        (
            "truth",
            float("-inf"),
            "column 'truth' holds 1 values that are infinite, the first in row 5 of {file} (the header is row 1)",
        ),
        ("a", float("inf"), "column 'a' of {file} holds 1 values that are infinite"),
        ("line", float("inf"), "column 'line'"),
        (
            "spread",
            -1.0,
            "column 'spread' must not be negative; 1 values are, the first in row 5 of {file}",
        ),
        ("truth", "high", "column 'truth' must hold numbers; row 5 of {file} (the header is row 1) holds 'high'"),
    ],
)
def test_bad_values(table, file, column, value, part):
    values = table[column].to_list()
    values[3] = value
    table = table.with_columns(pl.Series(column, list(map(str, values)) if value == "high" else values))
    table.write_csv(file)
    assert_refused(calibrate(file, "--std", "spread"), part.format(file=file))


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("data.csv", "a,truth,line\n1,2,3\n1,2,3,4,5\n", "cannot read"),
        ("data.csv", "", "cannot read"),
        ("data.csv", "a,truth,line\n", "holds no rows"),
        ("data.parquet", "this is no parquet file", "cannot read"),
        ("data.txt", "a,truth,line\n1,2,3\n", "must end in .csv, .tsv or .parquet"),
        ("data.csv", "a,truth,line\n" + 3 * "1,2,3\n", "3 rows are too few"),
        ("data.csv", "a,truth,line\n1,2,3\n1,2\n", "line 3 has 2 fields, and the header 3"),
        ("data.csv", "a,truth,line\n1,2,3\n\n1,2,3,4\n", "line 4 has 4 fields, and the header 3"),
        ("data.csv", 'a,truth,line\n"x\ny",2,3\n1,2\n', "line 4 has 2 fields, and the header 3"),
        ("data.csv", 'a,truth,line\n1,2,"x\ny",3\n1,2,3\n', "lines 2 to 3, one record by their quotes, have 4 fields"),
        (
            "data.csv",
            'a,truth,line\n1,2,3\n1,2,"3\n4,5,6\n',
            "the record that starts in line 3: unexpected end of data",
        ),
        ("data.csv", "a;b,truth;line\n" + 3 * "1;2,3;4\n", "separated by commas or semicolons: say which, --separator"),
        ("data.csv", "a,truth,line\n\0,2,3\n", "is not UTF-8: its byte 13, in line 2, is 0x00"),
    ],
)
def test_bad_files(tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    assert_refused(calibrate(tmp_path / name), part)


def test_what_a_csv_cannot_hold_is_refused_before_the_fit(table, tmp_path):
    path = tmp_path / "nested.parquet"
    table.with_columns(pair=pl.concat_list("a", "b")).write_parquet(path)
    assert_refused(calibrate(path, "--out", tmp_path / "o.csv"), "column 'pair' holds List(Float64)", "write Parquet")
    assert calibrate(path, "--method", "split-conformal").exit_code == 0


def test_a_file_that_could_not_be_written_leaves_the_old_one(table, file, tmp_path, monkeypatch):
    out = tmp_path / "out.csv"
    out.write_text("old")

    def full(self, columns, path):
        path.write_text("half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Text, "write", full)
    assert_refused(calibrate(file, "--method", "split-conformal", "--out", out), "cannot write", "No space left")
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv", "out.csv"]


def test_missing_file_and_unknown_data_set(tmp_path, monkeypatch):
    assert_refused(calibrate(tmp_path / "none.csv"), "there is no file")
    assert_refused(run("demo", "--dataset", "diabets", "--out", tmp_path), "did you mean 'diabetes'?")
    (tmp_path / "taken").touch()
    assert_refused(run("demo", "--out", tmp_path / "taken"), "cannot make the folder")
    monkeypatch.setenv("JAXCAL_DATA", str(tmp_path / "nowhere"))
    assert_refused(run("data"), "names no directory")


def test_a_bug_is_not_taken_for_a_mistake(file, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(rio, "fit", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        calibrate(file)


def test_programs_are_kept_and_openblas_has_one_thread(tmp_path):
    code = """
import jax, jax.numpy as jnp, threadpoolctl
from jaxcal.cli.app import app
app(["data"], standalone_mode=False)
jnp.linalg.cholesky(jnp.eye(2))
pools = threadpoolctl.threadpool_info()
print([pool["num_threads"] for pool in pools if "libscipy_openblas-" in pool["filepath"]])
print(jax.config.jax_compilation_cache_dir)
"""
    unset = ("OPENBLAS_NUM_THREADS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    told = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).splitlines()
    assert told[-2] in ("[1]", "[]")  # none where SciPy has another library
    assert Path(told[-1]).parent == tmp_path / "jaxcal" / "programs"
