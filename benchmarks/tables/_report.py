"""What the scripts of the papers' tables share: published numbers, marks of significance, CSV and Markdown."""

import csv
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

PUBLISHED = Path(__file__).parents[1] / "published"
MISSING = "–"
SIGNIFICANT = 0.05
# What a run was made with.
PROVENANCE = ("jaxcal", "jax", "device", "date")


class Runs:
    """The metrics of finished runs by what they are of, in the order of seeds.

    Args:
        records: of finished jobs.
        by: the names in a record that tell its cell: ("dataset", "model"), say.
    """

    def __init__(self, records: Sequence[dict], by: Sequence[str]):
        self._records = defaultdict(list)
        for record in sorted(records, key=lambda record: record["seed"]):
            self._records[*(record[name] for name in by)].append(record)

    def values(self, *cell_and_metric: str) -> np.ndarray:
        *cell, metric = cell_and_metric
        return np.array([record[metric] for record in self._records[*cell]], float)

    def mean(self, *cell_and_metric: str) -> float:
        return float(self.values(*cell_and_metric).mean())

    def median(self, *cell_and_metric: str) -> float:
        return float(np.median(self.values(*cell_and_metric)))

    def count(self, *cell: str) -> int:
        return len(self._records[*cell])


def made_by(record: dict) -> tuple[str, ...]:
    """The code and the machine of a run. Results depend on both: only runs that share them are paired.

    A version that does not name its commit tells the code of one day alone.
    """
    code = (record["jaxcal"],) if "+" in record["jaxcal"] else (record["jaxcal"], record["date"])
    return (*code, record["jax"], record["device"])


def comparable(records: Sequence[dict], systems: Collection[str], by: str) -> list[dict]:
    """The runs of splits that all systems have by the same code on the same machine, `by` the name of the systems.

    Of several versions and machines that have a split so, the last one counts.
    """
    split_of = lambda record: (record["dataset"], record["seed"])
    found, chosen = defaultdict(set), {}
    for record in records:
        run = (*split_of(record), made_by(record))
        found[run].add(record[by])
        if found[run] >= {*systems}:
            chosen[split_of(record)] = made_by(record)
    return [record for record in records if chosen.get(split_of(record)) == made_by(record)]


@cache
def read_published(name: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """The rows of a published table by data set, method and metric."""
    with open(PUBLISHED / f"{name}.csv", newline="") as file:
        return {(row["dataset"], row["method"], row["metric"]): row for row in csv.DictReader(file)}


def p_values(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The p-values of the paired t-test and of Wilcoxon's signed-rank test, two-sided; NaN where neither applies."""
    differences = np.subtract(values, others)
    differences = differences[np.isfinite(differences)]
    if len(differences) < 2 or not differences.any():
        return math.nan, math.nan
    return float(stats.ttest_1samp(differences, 0).pvalue), float(stats.wilcoxon(differences).pvalue)


def marks(values: Sequence[float], others: Sequence[float]) -> str:
    """† where the paired t-test tells the values from the others at the 5 % level, ‡ where Wilcoxon's does."""
    return "".join(mark for mark, p in zip("†‡", p_values(values, others), strict=True) if p < SIGNIFICANT)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of the values; 0 for a single one."""
    values = np.asarray(values, float)
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def mean(values: Sequence[float], decimals: int | None = None) -> str:
    """The mean of the finite values, of three significant digits where the number of decimals is not given."""
    finite = _finite(values)
    if not len(finite):
        return MISSING
    return f"{finite.mean():.{decimals_of(finite.mean()) if decimals is None else decimals}f}"


def mean_and_std(values: Sequence[float], decimals: int | None = None, *, marks: str = "") -> str:
    """Mean ± sample standard deviation of the finite values: "1.46 ± 0.49 †"."""
    finite = _finite(values)
    cell = mean(finite, decimals)
    if len(finite) > 1:
        cell += f" ± {finite.std(ddof=1):.{len(cell.partition('.')[2])}f}"
    return f"{cell} {marks}".rstrip()


def decimals_of(value: float, digits: int = 3) -> int:
    """How many decimals show this many significant digits."""
    return digits if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))


def published_cell(row: dict[str, str] | None) -> str:
    """A published mean ± standard deviation with its marks."""
    if row is None or not row["mean"]:
        return MISSING
    spread = f" ± {row['std']}" if row["std"] else ""
    return f"{row['mean']}{spread} {row['mark']}".rstrip()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is aligned to the left and the others to the right; columns are padded."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    for line in lines:
        line[0] = line[0].ljust(widths[0])
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def write_csv(path: Path, records: Sequence[dict], columns: Sequence[str]) -> None:
    """Every run, five significant digits; where the runs come from stands in comments above, numbered in `origin`."""
    numbers = {origin: number for number, origin in enumerate(_origins(records))}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        for origin, number in numbers.items():
            named = ", ".join(f"{name} {value}" for name, value in zip(PROVENANCE, origin, strict=True))
            file.write(f"# origin {number}: {named}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, "origin"])
        for record in records:
            writer.writerow([*(_compact(record.get(name, "")) for name in columns), numbers[_origin(record)]])


def read_csv(path: Path) -> list[dict]:
    """The runs that `write_csv` wrote, with where they come from."""
    origins, lines = {}, []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# origin "):
            number, _, named = line.removeprefix("# origin ").partition(": ")
            values = [value.removeprefix(f"{name} ") for name, value in zip(PROVENANCE, named.split(", "), strict=True)]
            origins[number] = dict(zip(PROVENANCE, values, strict=True))
        else:
            lines.append(line)
    return [{**row, **origins[row.pop("origin")], "seed": int(row["seed"])} for row in csv.DictReader(lines)]


def write(path: Path, records: Sequence[dict], columns: Sequence[str], text: str) -> None:
    """Every run as CSV, the text as Markdown beside it, and where they are."""
    write_csv(path, records, columns)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"Every run is in {path}, the tables in {path.with_suffix('.md')}.")


def missed(held: Sequence[str], names: Sequence[str]) -> str:
    """On which data sets something does not hold: " (not on yacht)", or nothing."""
    rest = [name for name in names if name not in held]
    return f" (not on {', '.join(rest)})" if rest else ""


def list_of_origins(records: Sequence[dict]) -> str:
    """A line for every version, machine and day that runs were made with."""
    origins = _origins(records)
    return "\n".join(f"- jaxcal {version}, jax {jax}, {device}, {date}" for version, jax, device, date in origins)


def _origins(records: Sequence[dict]) -> list[tuple[str, ...]]:
    return sorted({*map(_origin, records)})


def _origin(record: dict) -> tuple[str, ...]:
    return tuple(str(record[name]) for name in PROVENANCE)


def _finite(values: Sequence[float]) -> np.ndarray:
    values = np.asarray(values, float)
    return values[np.isfinite(values)]


def _compact(value: float | int | str) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
