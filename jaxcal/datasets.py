"""Named public regression data sets, raw and in their original row order, and the splits of them.

A set comes from the first of these that has it:

1. the local mirror: NAME.npz in the directory that the environment variable JAXCAL_DATA names;
2. the cache of earlier downloads (`$XDG_CACHE_HOME/jaxcal`, else `~/.cache/jaxcal`);
3. this package, which has six small ones;
4. `benchmarks/data` of the checkout that the package lies in, which has all whose license allows it;
5. a download of the original, checked against its SHA-256 (needs pooch: the extra `data`);
6. scikit-learn, which ships `diabetes` (the extra `data`, too).
"""

import difflib
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxcal import _checks


@dataclass(frozen=True, eq=False)
class Dataset:
    """A regression data set.

    Attributes:
        name: what `load` was asked for.
        x: features [n, d]; a text column is held as positions in the list of its levels.
        y: target [n].
        feature_names: the names of the columns of x.
        target_name: the name of y.
        categorical: the positions of the categorical columns of x.
        source: where the set is from, and who made it: credit them.
        license: its license, or None where none is established.
    """

    name: str
    x: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, " n"]
    feature_names: tuple[str, ...]
    target_name: str
    categorical: tuple[int, ...]
    source: str
    license: str | None


class Location(NamedTuple):
    """Where a data set would be loaded from.

    Attributes:
        kind: which of the sources; "missing" where none has it.
        where: the path, URL or function; what to do where it is missing.
    """

    kind: Literal["mirror", "cache", "package", "checkout", "download", "scikit-learn", "missing"]
    where: str


def names() -> tuple[str, ...]:
    """The names of all data sets, whether or not they can be had here (see `find`)."""
    return tuple(_NAMES)


def find(name: str) -> Location:
    """Where `load(name)` would take the data from; nothing is loaded.

    Raises:
        ValueError: if no data set has this name.
        FileNotFoundError: if JAXCAL_DATA names a directory that does not exist.

    Example:
        >>> from jaxcal import datasets
        >>> datasets.find("diabetes").kind in ("mirror", "scikit-learn")
        True
    """
    stem, _ = _lookup(name)
    file, original = f"{stem}.npz", _ENTRIES[stem].original
    mirror = _mirror()
    if mirror is not None and (mirror / file).is_file():
        return Location("mirror", str(mirror / file))
    if original is not None and (cached := _cache() / original.file).is_file():
        return Location("cache", str(cached))
    for kind, folder in _OWN.items():
        if (folder / file).is_file():
            return Location(kind, str(folder / file))
    if original is not None:
        return Location("download", original.url)
    if stem == "diabetes":
        return Location("scikit-learn", "sklearn.datasets.load_diabetes")
    return Location("missing", f"set the environment variable JAXCAL_DATA to a directory with {file}")


def license_of(name: str) -> str | None:
    """The license of a data set, or None where none is established.

    Raises:
        ValueError: if no data set has this name.
    """
    return _ENTRIES[_lookup(name)[0]].license


def load(name: str) -> Dataset:
    """Load a data set by its name.

    Args:
        name: one of `names()`. A set with two targets has a name for each: energy_heating, energy_cooling.

    Raises:
        ValueError: if no data set has this name, or its file is damaged: not what its checksum says.
        FileNotFoundError: if no source has it; the message says what to do.
        OSError: if the download fails.
        ImportError: if a library of the extra `data` is needed and missing.

    Example:
        >>> from jaxcal import datasets
        >>> data = datasets.load("diabetes")
        >>> data.x.shape, data.y.shape, data.feature_names[:3]
        ((442, 10), (442,), ('age', 'sex', 'bmi'))
    """
    stem, column = _lookup(name)
    entry = _ENTRIES[stem]
    kind, where = find(name)
    if kind in ("mirror", *_OWN):
        table = _read_npz(Path(where))
    elif entry.original is not None:
        table = _read_original(entry.original, _fetch(entry.original))
    elif kind == "scikit-learn":
        table = _read_diabetes()
    else:
        raise FileNotFoundError(f"{name} is not here and cannot be downloaded: {where}.")
    return Dataset(
        name=name,
        x=table.x,
        y=table.y[:, column],
        feature_names=table.feature_names,
        target_name=table.target_names[column],
        categorical=table.categorical,
        source=entry.source,
        license=entry.license,
    )


@_checks.renamed(shares="fractions")
def split(n: int, fractions: Sequence[float], *, seed: int) -> tuple[Int[np.ndarray, " part"], ...]:
    """Random disjoint parts of n rows: the row numbers of each.

    Args:
        n: number of rows.
        fractions: the fraction of each part; they sum to 1 or less, and then the other rows are in no part.
        seed: of NumPy's default generator; the same seed gives the same parts.

    Raises:
        ValueError: if a fraction is not positive, they sum to more than 1, or a part would have no row.

    Example:
        >>> from jaxcal import datasets
        >>> train, calibration, test = datasets.split(100, (0.6, 0.2, 0.2), seed=0)
        >>> len(train), len(calibration), len(test)
        (60, 20, 20)
    """
    if not (min(fractions, default=0) > 0 and sum(fractions) <= 1 + 1e-9):
        raise ValueError(f"fractions must be positive and sum to at most 1; got {tuple(fractions)}.")
    ends = np.rint(np.cumsum(fractions) * n).astype(int)
    sizes = np.diff(ends, prepend=0)
    if sizes.min() < 1:
        raise ValueError(f"fractions {tuple(fractions)} of {n} rows leave a part empty: sizes {sizes.tolist()}.")
    order = np.random.default_rng(seed).permutation(n)
    return tuple(np.split(order, ends)[: len(sizes)])


class Heteroscedastic(NamedTuple):
    """Rows whose noise depends on the inputs, and the truth about them.

    Attributes:
        x: inputs [n, d], uniform over the domain.
        y: targets [n], normal with the mean and the std below.
        mean: true means [n].
        std: true standard deviations [n].
    """

    x: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, " n"]
    mean: Float[np.ndarray, " n"]
    std: Float[np.ndarray, " n"]


def heteroscedastic(name: str, n: int, *, seed: int) -> Heteroscedastic:
    """Draw n rows of a synthetic problem whose noise is known.

    - "g", on [0, 1]: mean 2 sin(2 pi x), std (x + 1) / 2 (Goldberg, Williams and Bishop 1998);
    - "y", on [0, 1]: mean 2 (exp(-30 (x - 1/4)^2) + sin(pi x^2)) - 2, std exp(sin(2 pi x)) / 3 (Yuan and Wahba 2004);
    - "w", on [0, pi]: mean sin(2.5 x) sin(1.5 x), std 0.01 + 0.25 (1 - sin(2.5 x))^2 (Williams 1996);
    - "5d", on [0, 1]^5: mean 0, std 0.45 (cos(pi + 5 sum x) + 1.2) (Genz 1984).

    Args:
        name: one of these.
        n: number of rows.
        seed: of NumPy's default generator.

    Raises:
        ValueError: if there is no such problem, or n is less than 1.

    Source: in this form Camporeale and Carè, "ACCRUE" (2021), section 5.1.

    Example:
        >>> from jaxcal import datasets
        >>> data = datasets.heteroscedastic("w", 100, seed=0)
        >>> data.x.shape, data.y.shape, round(float(data.std.max()), 1)
        ((100, 1), (100,), 1.0)
    """
    _checks.check_choice("name", name, tuple(_PROBLEMS))
    _checks.check_at_least("n", n, 1)
    problem = _PROBLEMS[name]
    rng = np.random.default_rng(seed)
    x = problem.width * rng.uniform(size=(n, problem.inputs))
    mean, std = heteroscedastic_moments(name, x)
    return Heteroscedastic(x, mean + std * rng.normal(size=n), mean, std)


def heteroscedastic_moments(
    name: str, x: Float[np.ndarray, "n d"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The true means and standard deviations [n] of a problem of `heteroscedastic` at the rows of x.

    Raises:
        ValueError: if there is no such problem, or x has not its number of columns.

    Example:
        >>> from jaxcal import datasets
        >>> mean, std = datasets.heteroscedastic_moments("g", np.array([[0.0], [1.0]]))
        >>> std.tolist()
        [0.5, 1.0]
    """
    _checks.check_choice("name", name, tuple(_PROBLEMS))
    problem = _PROBLEMS[name]
    if x.ndim != 2 or x.shape[1] != problem.inputs:
        raise ValueError(f"x must have shape (n, {problem.inputs}); got {x.shape}.")
    t = x.sum(axis=1)
    return problem.mean(t), problem.std(t)


class _Problem(NamedTuple):
    """Inputs on [0, width]^inputs; mean and std are functions of their sum."""

    inputs: int
    width: float
    mean: Callable[[np.ndarray], np.ndarray]
    std: Callable[[np.ndarray], np.ndarray]


_PROBLEMS = {
    "g": _Problem(1, 1.0, lambda x: 2 * np.sin(2 * np.pi * x), lambda x: (x + 1) / 2),
    "y": _Problem(
        1,
        1.0,
        lambda x: 2 * (np.exp(-30 * (x - 0.25) ** 2) + np.sin(np.pi * x**2)) - 2,
        lambda x: np.exp(np.sin(2 * np.pi * x)) / 3,
    ),
    "w": _Problem(
        1, np.pi, lambda x: np.sin(2.5 * x) * np.sin(1.5 * x), lambda x: 0.01 + 0.25 * (1 - np.sin(2.5 * x)) ** 2
    ),
    "5d": _Problem(5, 1.0, np.zeros_like, lambda t: 0.45 * (np.cos(np.pi + 5 * t) + 1.2)),
}


def pbp_split(name: str, k: int) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " test"]]:
    """Split k of the benchmark of probabilistic backpropagation: the rows to train on, and those to test on.

    There are 20 splits a set, 5 for protein (Hernández-Lobato and Adams, "Probabilistic Backpropagation for
    Scalable Learning of Bayesian Neural Networks", ICML 2015). The benchmark's targets are energy_heating and
    naval_compressor; the same rows serve for their other targets.

    Raises:
        ValueError: if there is no such data set, it has no such splits, or k is out of range.
        FileNotFoundError: if pbp_splits.npz is neither in the mirror nor in a checkout.
    """
    stem, _ = _lookup(name)
    paths = [folder / "pbp_splits.npz" for folder in (_mirror(), *_OWN.values()) if folder is not None]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileNotFoundError("set the environment variable JAXCAL_DATA to a directory with pbp_splits.npz.")
    with _open_npz(path) as arrays:
        if f"{stem}_perm" not in arrays.files:
            having = sorted(key.removesuffix("_perm") for key in arrays.files if key.endswith("_perm"))
            raise ValueError(f"{name} has no PBP splits; these have: {', '.join(having)}.")
        orders, num_train = arrays[f"{stem}_perm"].astype(int), int(arrays[f"{stem}_ntrain"])
    if not 0 <= k < len(orders):
        raise ValueError(f"k must be one of 0 to {len(orders) - 1}, the PBP splits of {name}; got {k}.")
    return orders[k, :num_train], orders[k, num_train:]


class _Table(NamedTuple):
    """What a file holds: a set with all its targets."""

    x: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, "n t"]
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    categorical: tuple[int, ...]


@dataclass(frozen=True)
class _Original:
    """A published text file of numbers, and how it is read."""

    url: str
    sha256: str
    columns: str
    targets: tuple[str, ...]
    delimiter: str | None = None
    header_lines: int = 0
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class _Entry:
    """A data set of the catalog; where it has several targets, each has a name of its own."""

    source: str
    license: str | None = "CC BY 4.0"
    targets: tuple[str, ...] = ()
    original: _Original | None = None


def _lookup(name: str) -> tuple[str, int]:
    """The name of the set's file, and which of its targets is meant."""
    if name in _NAMES:
        return _NAMES[name]
    nearest = _ENTRIES[name].targets if name in _ENTRIES else difflib.get_close_matches(name, _NAMES, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, nearest))}?" if nearest else "see jaxcal.datasets.names()."
    raise ValueError(f"there is no data set {name!r}: {hint}")


# Folders of npz files that come with the package, and with the checkout that it lies in.
_OWN: dict[Literal["package", "checkout"], Path] = {
    "package": Path(__file__).parent / "_data",
    "checkout": Path(__file__).parents[1] / "benchmarks" / "data",
}


def _mirror() -> Path | None:
    directory = os.environ.get("JAXCAL_DATA")
    if not directory:
        return None
    if not Path(directory).is_dir():
        raise FileNotFoundError(f"the environment variable JAXCAL_DATA names no directory: {directory!r}.")
    return Path(directory)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxcal"


def _fetch(original: _Original) -> Path:
    """The path of the original in the cache, after a download where it is not there or is damaged."""
    try:
        import pooch
    except ImportError as error:
        raise ImportError("downloading needs pooch: pip install 'jaxcal[data]'.") from error
    try:
        path = pooch.retrieve(original.url, f"sha256:{original.sha256}", original.file, _cache())
    except OSError as error:
        raise OSError(
            f"{original.url} cannot be downloaded; a local copy can be given by JAXCAL_DATA. {error}"
        ) from error
    return Path(path)


def _read_original(original: _Original, path: Path) -> _Table:
    positions = {name: i for i, name in enumerate(original.columns.split())}
    table = np.loadtxt(
        path,
        delimiter=original.delimiter,
        skiprows=original.header_lines,
        converters={positions[name]: levels.index for name, levels in original.levels.items()},
        ndmin=2,
    )
    features = tuple(name for name in positions if name not in original.targets)
    return _Table(
        x=table[:, [positions[name] for name in features]],
        y=table[:, [positions[name] for name in original.targets]],
        feature_names=features,
        target_names=original.targets,
        categorical=tuple(features.index(name) for name in original.levels),
    )


def _read_diabetes() -> _Table:
    try:
        from sklearn.datasets import load_diabetes
    except ImportError as error:
        raise ImportError("diabetes needs scikit-learn: pip install 'jaxcal[data]'.") from error
    x, y = load_diabetes(return_X_y=True, scaled=False)
    return _Table(
        x=np.asarray(x),
        y=np.asarray(y)[:, None],
        feature_names=("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"),
        target_names=("disease_progression_one_year",),
        categorical=(),
    )


def _read_npz(path: Path) -> _Table:
    with _open_npz(path) as arrays:
        missing = {"x", "y", "feature_names", "target_names", "categorical"}.difference(arrays.files)
        if missing:
            raise ValueError(f"{path} lacks the arrays {', '.join(sorted(missing))}.")
        x, y = arrays["x"].astype(float), arrays["y"].astype(float)
        table = _Table(
            x=x,
            y=y.reshape(len(y), -1),
            feature_names=tuple(map(str, arrays["feature_names"])),
            target_names=tuple(map(str, arrays["target_names"])),
            categorical=tuple(map(int, arrays["categorical"])),
        )
    if x.shape != (len(y), len(table.feature_names)) or table.y.shape[1] != len(table.target_names):
        raise ValueError(
            f"{path} does not fit together: x has shape {x.shape} and y {y.shape}, with "
            f"{len(table.feature_names)} feature and {len(table.target_names)} target names."
        )
    return table


def _open_npz(path: Path) -> np.lib.npyio.NpzFile:
    """Open an archive, after a look at its checksum where a MANIFEST.json holds one."""
    content = path.read_bytes()
    expected = _checksums(path.parent / "MANIFEST.json").get(path.name)
    if expected is not None and hashlib.sha256(content).hexdigest() != expected:
        raise ValueError(f"{path} is damaged: its SHA-256 is not the one in MANIFEST.json.")
    try:
        return np.lib.npyio.NpzFile(io.BytesIO(content))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not an npz file.") from error


def _checksums(manifest: Path) -> dict[str, str]:
    if not manifest.is_file():
        return {}
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        return {entry["file"]: entry["sha256"] for entry in [content["splits"], *content["datasets"]]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest} is malformed: {error!r}.") from error


# The catalog. Addresses and checksums are those of the originals; a set without them needs a mirror.

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_YACHT = _Original(
    url=f"{_UCI}/00243/yacht_hydrodynamics.data",
    sha256="00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
    columns="longitudinal_position_of_buoyancy_centre prismatic_coefficient length_displacement_ratio "
    "beam_draught_ratio length_beam_ratio froude_number residuary_resistance_per_unit_displacement",
    targets=("residuary_resistance_per_unit_displacement",),
)
_AIRFOIL = _Original(
    url=f"{_UCI}/00291/airfoil_self_noise.dat",
    sha256="74c75fd71783f1e6b71f8a622b993dc592897a97cd689c5090a07147a1b097b3",
    columns="frequency_hz angle_of_attack_deg chord_length_m free_stream_velocity_m_s "
    "suction_side_displacement_thickness_m scaled_sound_pressure_level_db",
    targets=("scaled_sound_pressure_level_db",),
)
_WINE_RED = _Original(
    url=f"{_UCI}/wine-quality/winequality-red.csv",
    sha256="4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
    columns="fixed_acidity volatile_acidity citric_acid residual_sugar chlorides free_sulfur_dioxide "
    "total_sulfur_dioxide density ph sulphates alcohol quality",
    targets=("quality",),
    delimiter=";",
    header_lines=1,
)
_WINE_WHITE = replace(
    _WINE_RED,
    url=f"{_UCI}/wine-quality/winequality-white.csv",
    sha256="76c3f809815c17c07212622f776311faeb31e87610d52c26d87d6e361b169836",
)
_PROTEIN = _Original(
    url=f"{_UCI}/00265/CASP.csv",
    sha256="4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40",
    columns="RMSD F1 F2 F3 F4 F5 F6 F7 F8 F9",
    targets=("RMSD",),
    delimiter=",",
    header_lines=1,
)
_FOREST_FIRES = _Original(
    url=f"{_UCI}/forest-fires/forestfires.csv",
    sha256="0d6586a1fa52f55bef48578aef14eb97273f1e9330e1a53423df497a77065253",
    columns="X Y month day FFMC DMC DC ISI temp RH wind rain area_ha",
    targets=("area_ha",),
    delimiter=",",
    header_lines=1,
    levels={"month": _MONTHS, "day": _DAYS},
)
_PARKINSONS = _Original(
    url=f"{_UCI}/parkinsons/telemonitoring/parkinsons_updrs.data",
    sha256="f2c7d5025dec4e92e7feae367a5f7ccf58789a10ac6b54bdf15976c599f9dd39",
    columns="subject# age sex test_time motor_UPDRS total_UPDRS Jitter(%) Jitter(Abs) Jitter:RAP Jitter:PPQ5 "
    "Jitter:DDP Shimmer Shimmer(dB) Shimmer:APQ3 Shimmer:APQ5 Shimmer:APQ11 Shimmer:DDA NHR HNR RPDE DFA PPE",
    targets=("motor_UPDRS", "total_UPDRS"),
    delimiter=",",
    header_lines=1,
)

_WINE_SOURCE = "UCI: Wine Quality; P. Cortez et al. (2009); doi:10.24432/C56S3T"
_NAVAL_SOURCE = "UCI: Naval Propulsion Plants; A. Coraddu et al. (2014); doi:10.24432/C5K31K"

_ENTRIES = {
    "diabetes": _Entry("B. Efron, T. Hastie, I. Johnstone, R. Tibshirani (2004), Least Angle Regression", None),
    "yacht": _Entry(
        "UCI: Yacht Hydrodynamics; J. Gerritsma, R. Onnink, A. Versluis (1981); doi:10.24432/C5XG7R",
        original=_YACHT,
    ),
    "energy": _Entry(
        "UCI: Energy Efficiency; A. Tsanas, A. Xifara (2012); doi:10.24432/C51307",
        targets=("energy_heating", "energy_cooling"),
    ),
    "airfoil": _Entry(
        "UCI: Airfoil Self-Noise; T. Brooks, D. Pope, M. Marcolini (1989); doi:10.24432/C5VW2C",
        original=_AIRFOIL,
    ),
    "concrete": _Entry("UCI: Concrete Compressive Strength; I-C. Yeh (1998); doi:10.24432/C5PK67"),
    "wine_red": _Entry(_WINE_SOURCE, original=_WINE_RED),
    "wine_white": _Entry(_WINE_SOURCE, original=_WINE_WHITE),
    "power_plant": _Entry("UCI: Combined Cycle Power Plant; P. Tufekci, H. Kaya (2014); doi:10.24432/C5002N"),
    "protein": _Entry(
        "UCI: Physicochemical Properties of Protein Tertiary Structure; P. Rana (2013); doi:10.24432/C5QW3H",
        original=_PROTEIN,
    ),
    "forest_fires": _Entry(
        "UCI: Forest Fires; P. Cortez, A. Morais (2007); doi:10.24432/C5D88D", original=_FOREST_FIRES
    ),
    "auto_mpg": _Entry("UCI: Auto MPG; R. Quinlan (1993); doi:10.24432/C5859H"),
    "boston": _Entry("StatLib: Boston housing; D. Harrison, D. L. Rubinfeld (1978)", None),
    "kin8nm": _Entry("DELVE: kin8nm (OpenML 189); University of Toronto (1996)", None),
    "parkinsons": _Entry(
        "UCI: Parkinsons Telemonitoring; A. Tsanas, M. Little (2009); doi:10.24432/C5ZS3N",
        targets=("parkinsons_motor", "parkinsons_total"),
        original=_PARKINSONS,
    ),
    "grid_stability": _Entry("UCI: Electrical Grid Stability Simulated Data; V. Arzamasov (2018); doi:10.24432/C5PG66"),
    "naval": _Entry(_NAVAL_SOURCE, targets=("naval_compressor", "naval_turbine")),
    "cbm": _Entry(_NAVAL_SOURCE),
    "appliances": _Entry("UCI: Appliances Energy Prediction; L. Candanedo (2017); doi:10.24432/C5VC8G"),
    "election": _Entry("UCI: Real-time Election Results: Portugal 2019; N. Moniz (2019)", None),
    "steel": _Entry("UCI: Steel Industry Energy Consumption; V. E. Sathishkumar et al. (2021); doi:10.24432/C52G8C"),
    "beijing_pm25": _Entry("UCI: Beijing PM2.5; S. Chen (2015); doi:10.24432/C5JS49"),
    "traffic": _Entry("UCI: Metro Interstate Traffic Volume; J. Hogue (2019); doi:10.24432/C5X60B"),
    "blog": _Entry("UCI: BlogFeedback, training file; K. Buza (2014); doi:10.24432/C58S3F"),
    "tetuan": _Entry("UCI: Power Consumption of Tetouan City; A. Salam, A. El Hibaoui (2018); doi:10.24432/C5B034"),
    "gpu_sgemm": _Entry(
        "UCI: SGEMM GPU Kernel Performance; E. Paredes, R. Ballester-Ripoll (2017); doi:10.24432/C5MK70"
    ),
}

_NAMES = {
    name: (stem, column) for stem, entry in _ENTRIES.items() for column, name in enumerate(entry.targets or (stem,))
}
