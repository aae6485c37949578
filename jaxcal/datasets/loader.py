"""Named public regression data sets, raw and in their original row order, and their splits.

A set comes from the first of these sources that has it:

1. the local mirror: NAME.npz in the directory that the environment variable JAXCAL_DATA names;
2. the cache of earlier downloads (`$XDG_CACHE_HOME/jaxcal`, else `~/.cache/jaxcal`);
3. this package, which has six small sets;
4. `benchmarks/data` of the checkout that contains the package, which has all sets whose license allows it;
5. a download of the original, checked against its SHA-256 (needs pooch: the extra `data`);
6. scikit-learn, which ships `diabetes` (the extra `data`, too).
"""

import difflib
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxcal._files import user_cache
from jaxcal.datasets.catalog import ENTRIES, NAMES, Original


@dataclass(frozen=True, eq=False)
class Dataset:
    """A regression data set.

    Attributes:
        name: the name that `load` was called with.
        x: features [n, d]. A text column holds positions in the list of its levels.
        y: target [n].
        feature_names: the names of the columns of x.
        target_name: the name of y.
        categorical: the positions of the categorical columns of x.
        source: the origin of the set, and its authors. Credit them.
        license: its license, or None if no license is established.
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
    """The place from which a data set would be loaded.

    Attributes:
        kind: the source; "missing" if no source has the set.
        where: the path, URL or function; if the set is missing, what to do.
    """

    kind: Literal["mirror", "cache", "package", "checkout", "download", "scikit-learn", "missing"]
    where: str


def names() -> tuple[str, ...]:
    """The names of all data sets, whether or not they are available here (see `find`)."""
    return tuple(NAMES)


def find(name: str) -> Location:
    """The place from which `load(name)` would take the data. Nothing is loaded.

    Raises:
        ValueError: if no data set has this name.
        FileNotFoundError: if JAXCAL_DATA names a directory that does not exist.

    Example:
        >>> from jaxcal import datasets
        >>> datasets.find("diabetes").kind in ("mirror", "scikit-learn")
        True
    """
    stem, _ = _lookup(name)
    file, original = f"{stem}.npz", ENTRIES[stem].original
    mirror = _mirror()
    if mirror is not None and (mirror / file).is_file():
        return Location("mirror", str(mirror / file))
    if original is not None and (cached := user_cache() / original.file).is_file():
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
    """The license of a data set, or None if no license is established.

    Raises:
        ValueError: if no data set has this name.
    """
    return ENTRIES[_lookup(name)[0]].license


def load(name: str) -> Dataset:
    """Load a data set by its name.

    Args:
        name: one of `names()`. A set with two targets has a name for each: energy_heating, energy_cooling.

    Raises:
        ValueError: if no data set has this name, or its file is damaged and does not match its checksum.
        FileNotFoundError: if no source has the set. The message says what to do.
        OSError: if the download fails.
        ImportError: if a library of the extra `data` is needed and missing.

    Example:
        >>> from jaxcal import datasets
        >>> data = datasets.load("diabetes")
        >>> data.x.shape, data.y.shape, data.feature_names[:3]
        ((442, 10), (442,), ('age', 'sex', 'bmi'))
    """
    stem, column = _lookup(name)
    entry = ENTRIES[stem]
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


def split(n: int, fractions: Sequence[float], *, seed: int) -> tuple[Int[np.ndarray, " part"], ...]:
    """Random disjoint parts of n rows: the row numbers of each.

    Args:
        n: number of rows.
        fractions: the fraction of each part. Their sum is at most 1. If it is less, the other rows are in no part.
        seed: the seed of NumPy's default generator. The same seed gives the same parts.

    Raises:
        ValueError: if a fraction is not positive, the fractions sum to more than 1, or a part would have no row.

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


def pbp_split(name: str, k: int) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " test"]]:
    """Split k of the benchmark of probabilistic backpropagation: the training rows and the test rows.

    There are 20 splits for each set, and 5 for protein (Hernández-Lobato and Adams, "Probabilistic Backpropagation for
    Scalable Learning of Bayesian Neural Networks", ICML 2015). The energy and naval sets have two targets. The
    benchmark uses energy_heating and naval_compressor, and the same rows serve for the other targets.

    Raises:
        ValueError: if there is no such data set, it has no splits, or k is out of range.
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


class _StoredSet(NamedTuple):
    """The content of a file: a set with all its targets."""

    x: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, "n t"]
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    categorical: tuple[int, ...]


def _lookup(name: str) -> tuple[str, int]:
    """The name of the set's file, and the column of the target."""
    if name in NAMES:
        return NAMES[name]
    nearest = ENTRIES[name].targets if name in ENTRIES else difflib.get_close_matches(name, NAMES, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, nearest))}?" if nearest else "see jaxcal.datasets.names()."
    raise ValueError(f"there is no data set {name!r}: {hint}")


# Folders of npz files: in the package, and in the checkout that contains it.
_OWN: dict[Literal["package", "checkout"], Path] = {
    "package": Path(__file__).parents[1] / "_data",
    "checkout": Path(__file__).parents[2] / "benchmarks" / "data",
}


def _mirror() -> Path | None:
    directory = os.environ.get("JAXCAL_DATA")
    if not directory:
        return None
    if not Path(directory).is_dir():
        raise FileNotFoundError(f"the environment variable JAXCAL_DATA names no directory: {directory!r}.")
    return Path(directory)


def _fetch(original: Original) -> Path:
    """The path of the original in the cache. It is downloaded if it is not there or is damaged."""
    try:
        import pooch
    except ImportError as error:
        raise ImportError("downloading needs pooch: pip install 'jaxcal[data]'.") from error
    try:
        path = pooch.retrieve(original.url, f"sha256:{original.sha256}", original.file, user_cache())
    except OSError as error:
        raise OSError(
            f"{original.url} cannot be downloaded; a local copy can be given by JAXCAL_DATA. {error}"
        ) from error
    return Path(path)


def _read_original(original: Original, path: Path) -> _StoredSet:
    positions = {name: i for i, name in enumerate(original.columns.split())}
    table = np.loadtxt(
        path,
        delimiter=original.delimiter,
        skiprows=0 if original.delimiter is None else 1,
        converters={positions[name]: levels.index for name, levels in original.levels.items()},
        ndmin=2,
    )
    features = tuple(name for name in positions if name not in original.targets)
    x, y = (table[:, [positions[name] for name in names]] for names in (features, original.targets))
    categorical = tuple(map(features.index, original.levels))
    return _StoredSet(x=x, y=y, feature_names=features, target_names=original.targets, categorical=categorical)


def _read_diabetes() -> _StoredSet:
    try:
        from sklearn.datasets import load_diabetes
    except ImportError as error:
        raise ImportError("diabetes needs scikit-learn: pip install 'jaxcal[data]'.") from error
    bunch: Any = load_diabetes(scaled=False)
    return _StoredSet(
        x=bunch.data,
        y=bunch.target[:, None],
        feature_names=tuple(bunch.feature_names),
        target_names=("disease_progression_one_year",),
        categorical=(),
    )


def _read_npz(path: Path) -> _StoredSet:
    with _open_npz(path) as arrays:
        missing = {"x", "y", "feature_names", "target_names", "categorical"}.difference(arrays.files)
        if missing:
            raise ValueError(f"{path} lacks the arrays {', '.join(sorted(missing))}.")
        x, y = arrays["x"].astype(float), arrays["y"].astype(float)
        features, targets = (tuple(map(str, arrays[each])) for each in ("feature_names", "target_names"))
        categorical, columns = tuple(map(int, arrays["categorical"])), y.reshape(len(y), -1)
        table = _StoredSet(x=x, y=columns, feature_names=features, target_names=targets, categorical=categorical)
    if x.shape != (len(y), len(features)) or table.y.shape[1] != len(targets):
        raise ValueError(
            f"{path} does not fit together: x has shape {x.shape} and y {y.shape}, with "
            f"{len(features)} feature and {len(targets)} target names."
        )
    return table


def _open_npz(path: Path) -> np.lib.npyio.NpzFile:
    """Open an archive, after a check of its checksum if a MANIFEST.json holds one."""
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


# The catalog has the addresses and checksums of the originals. A set without an original needs a mirror.
