"""The report of `jaxcal calibrate`: one page with scores, guarantees and pictures. It needs no other file."""

import base64
import datetime
import html
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import jaxcal as jc
from jaxcal._files import replacing
from jaxcal.cli import console
from jaxcal.cli.columns import Roles
from jaxcal.cli.files import FileTable

if TYPE_CHECKING:
    from jaxcal.distributions import Distribution


@dataclass(frozen=True)
class Measured:
    """A fit, and its predictions of rows that it was not fitted to.

    Attributes:
        roles: the roles of the table's columns. The target was predicted from the features.
        table: the rows of FILE.
        method: the name of the fitted method.
        num_fitting: the number of rows that it was fitted to.
        seed: the seed of the fit.
        y: the targets of the rows to measure on [m]; None if there are no such rows.
        forecasts: the predictions of these rows before and after; empty if there are no such rows.
        guarantees: the guarantees of the 90 % interval, in words.
        labels: the labels of groups of the rows to measure on [m].
        steps: the table of a pipeline.
    """

    roles: Roles
    table: FileTable
    method: str
    num_fitting: int
    seed: int
    y: np.ndarray | None
    forecasts: "dict[str, Distribution]"
    guarantees: list[str]
    labels: np.ndarray | None = None
    steps: str = ""

    @cached_property
    def scores(self) -> list[tuple[str, ...]]:
        """The scores of the forecasts, a row for each score."""
        return console.rows_of_scores(np.asarray(self.y), self.forecasts)

    @property
    def rows(self) -> str:
        """A description of the rows to measure on."""
        return f"{len(np.asarray(self.y))} rows not used for fitting"


def write(path: Path, measured: Measured, forecast: "Distribution") -> None:
    """Write the page, in one step.

    Args:
        path: the path of the page.
        measured: the content of the page.
        forecast: the distributions of all rows of the file.

    Raises:
        ValueError: if it cannot be written.
    """
    title = html.escape(f"Calibrated predictions of {measured.roles.target}")
    parts = [f"<h1>{title}</h1>", *_introduction(measured), *_scores(measured), *_pictures(measured, forecast)]
    page = _PAGE.format(title=title, style=_STYLE, body="\n".join([*parts, _origin(measured)]))
    with replacing(path) as file:
        file.write_text(page, encoding="utf-8")


def _introduction(measured: Measured) -> Iterator[str]:
    """A paragraph about the fit, then the guarantees or the measured coverage."""
    table, features = measured.table, measured.roles.features
    told = f" Features: {', '.join(features)}." if features else ""
    yield _paragraph(
        f"{measured.method}, fitted to {measured.num_fitting} rows; {table.file.name} has {len(table)}."
        f"{told} Every row has a distribution now: a mean, a standard deviation and quantiles."
    )
    yield "<h2>What holds</h2>"
    lines = list(measured.guarantees)
    if not lines and measured.y is not None and measured.forecasts:
        after = list(measured.forecasts.values())[-1]
        covered = float(jc.metrics.coverage(measured.y, after, confidence_level=0.9))
        lines = [str(jc.guarantee.MeasuredCoverage(0.9, len(measured.y), round(covered * len(measured.y))))]
    yield from map(_paragraph, lines or ["Nothing is guaranteed, and nothing could be measured: no row has a target."])


def _scores(measured: Measured) -> Iterator[str]:
    """The scores before and after, beside the scores of calibrated forecasts."""
    if measured.y is None or not measured.forecasts:
        return
    yield "<h2>Scores</h2>"
    head = ["", *measured.forecasts, "calibrated"]
    yield _table(head, measured.scores)
    yield _paragraph(console.about_scores(measured.rows))
    yield _paragraph(
        "RMSE: root mean squared error of the mean. NLPD: mean negative logarithm of the predicted density at the "
        "target. CRPS: mean continuous ranked probability score, in units of the target. ECE: mean distance of the "
        "reliability curve from the diagonal. Width: mean length of the 90 % interval, in units of the target."
    )
    if measured.steps:
        yield f"<h2>Models</h2><pre>{html.escape(measured.steps)}</pre>"


def _pictures(measured: Measured, forecast: "Distribution") -> Iterator[str]:
    """Pictures of the rows to measure on. If there are no such rows, only the widths are shown."""
    yield "<h2>Pictures</h2><div class='pictures'>"
    if measured.y is None or not measured.forecasts:
        yield _picture(lambda ax: jc.plots.widths(forecast, ax=ax), "How wide the 90 % intervals of all rows are.")
    else:
        yield from _pictures_of(measured.y, measured)
    yield "</div>"


def _pictures_of(y: np.ndarray, measured: Measured) -> Iterator[str]:
    # A point has no interval to draw.
    shown = {name: each for name, each in measured.forecasts.items() if not isinstance(each, jc.Point)}
    after = list(measured.forecasts.values())[-1]
    yield _picture(
        lambda ax: jc.plots.reliability_diagram(y, shown, ax=ax),
        "The fraction of the targets below each predicted quantile. A calibrated forecast follows the diagonal, up to "
        "chance, the gray band.",
    )
    yield _picture(
        lambda ax: jc.plots.pit_histogram(y, shown, ax=ax),
        "Where targets lie in their predicted distributions. Calibrated forecasts are flat, up to chance, the gray "
        "band; a hump means intervals that are too wide, high ends that they are too narrow.",
    )
    yield _picture(
        lambda ax: jc.plots.intervals(y, after, ax=ax),
        "Predictions with their intervals, in the order of the predicted mean; some of the rows.",
    )
    yield _picture(lambda ax: jc.plots.widths(shown, ax=ax), "How wide the 90 % intervals are.")
    by, name = (after.mean, "predicted mean") if measured.labels is None else (measured.labels, measured.roles.by)
    if measured.labels is not None or len(np.unique(np.asarray(by))) > 1:
        yield _picture(
            lambda ax: jc.plots.coverage_by(y, shown, np.asarray(by), ax=ax),
            f"The coverage of the 90 % interval by {name}. The gray bars show where it lies by chance, where intervals "
            "are exact.",
        )


def _picture(draw: Callable, caption: str) -> str:
    """A picture with its caption, as HTML."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")  # also where there is no screen
    figure, ax = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    draw(ax)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=160)
    plt.close(figure)
    data = base64.b64encode(drawn.getvalue()).decode()
    text = html.escape(caption)
    return f"<figure><img alt='{text}' src='data:image/png;base64,{data}'><figcaption>{text}</figcaption></figure>"


def _origin(measured: Measured) -> str:
    date = datetime.date.today().isoformat()
    made_by = f"jaxcal {jc.__version__}, {date}, seed {measured.seed}, {measured.table.file}."
    return f"<footer>{html.escape(made_by)}</footer>"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = lambda kind, values: "".join(f"<{kind}>{html.escape(value)}</{kind}>" for value in values)
    lines = "".join(f"<tr>{cells('th', row[:1])}{cells('td', row[1:])}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{cells('th', head)}</tr></thead><tbody>{lines}</tbody></table></div>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } p { max-width: 46rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .9rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; } thead th { border-bottom: 2px solid #222; }
tbody tr { border-bottom: 1px solid #ddd; } .wide, pre { overflow-x: auto; } pre { font-size: .8rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; } img { width: 100%; } figcaption, footer { color: #555; font-size: .9rem; }
footer { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: .5rem; }
"""
