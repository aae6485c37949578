"""Data sets: where they come from, what is checked on the way, and the splits of them."""

import functools
import hashlib
import http.server
import json
import os
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from jaxcal import datasets
from jaxcal.datasets import catalog, loader

pytestmark = pytest.mark.any_precision

MIRROR = os.environ.get("JAXCAL_DATA")
OWN = loader._OWN
needs_mirror = pytest.mark.skipif(not MIRROR, reason="JAXCAL_DATA names no mirror of the data sets")
DOWNLOADABLE = [
    "yacht",
    "airfoil",
    "wine_red",
    "wine_white",
    "protein",
    "forest_fires",
    "parkinsons_motor",
    "parkinsons_total",
]


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """No mirror, an empty cache, and nothing that comes with the package or the checkout, unless a test sets them."""
    monkeypatch.delenv("JAXCAL_DATA", raising=False)
    monkeypatch.setattr(loader, "_OWN", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A small mirror: a set of one target, and one of two."""
    directory = tmp_path / "mirror"
    directory.mkdir()
    monkeypatch.setenv("JAXCAL_DATA", str(directory))
    x = np.arange(12.0).reshape(6, 2)
    common = {"x": x, "feature_names": ["a", "b"], "categorical": np.array([1])}
    np.savez(directory / "concrete.npz", y=x[:, 0], target_names=["strength"], **common)
    np.savez(directory / "energy.npz", y=x + 100, target_names=["heating", "cooling"], **common)
    perm = np.array([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]], dtype=np.uint16)
    np.savez(directory / "pbp_splits.npz", energy_perm=perm, energy_ntrain=4)
    return directory


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A web server with one file, which stands for the original of yacht; gives the path of the file."""
    directory = tmp_path / "server"
    directory.mkdir()
    file = directory / "yacht_hydrodynamics.data"
    file.write_text("1 2 3 4 5 6 7 \n8 9 10 11 12 13 14.5\n\n")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    handler = functools.partial(Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever).start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        url = f"http://127.0.0.1:{running.server_address[1]}/{file.name}"
        set_original(monkeypatch, "yacht", url=url, sha256=sha256(file))
        yield file
        running.shutdown()


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def set_original(monkeypatch, stem, **changes):
    changed = replace(catalog.ENTRIES[stem], original=replace(original_of(stem), **changes))
    monkeypatch.setitem(catalog.ENTRIES, stem, changed)


def original_of(stem):
    original = catalog.ENTRIES[stem].original
    assert original is not None
    return original


def test_the_set_of_scikit_learn():
    data = datasets.load("diabetes")
    assert datasets.find("diabetes").kind == "scikit-learn"
    assert data.x.shape == (442, 10)
    assert data.y.shape == (442,)
    assert data.x[:, 0].min() == 19  # years, not standardized
    assert data.feature_names[:3] == ("age", "sex", "bmi")


def test_the_mirror_comes_first(mirror):
    assert datasets.find("concrete") == ("mirror", str(mirror / "concrete.npz"))
    data = datasets.load("concrete")
    np.testing.assert_array_equal(data.x, np.arange(12.0).reshape(6, 2))
    np.testing.assert_array_equal(data.y, data.x[:, 0])
    assert (data.feature_names, data.target_name, data.categorical) == (("a", "b"), "strength", (1,))
    assert "Yeh" in data.source
    assert data.license == "CC BY 4.0"


def test_each_target_has_its_name(mirror):
    heating, cooling = datasets.load("energy_heating"), datasets.load("energy_cooling")
    assert (heating.target_name, cooling.target_name) == ("heating", "cooling")
    np.testing.assert_array_equal(heating.y, heating.x[:, 0] + 100)
    np.testing.assert_array_equal(cooling.y, heating.x[:, 1] + 100)


def test_a_file_that_is_not_what_the_manifest_says(mirror):
    entry = {"file": "concrete.npz", "sha256": sha256(mirror / "concrete.npz")}
    manifest = {"splits": {"file": "pbp_splits.npz", "sha256": "0" * 64}, "datasets": [entry]}
    (mirror / "MANIFEST.json").write_text(json.dumps(manifest))
    assert datasets.load("concrete").x.shape == (6, 2)
    assert datasets.load("energy_heating").x.shape == (6, 2)  # not in the manifest
    with pytest.raises(ValueError, match=r"pbp_splits.npz is damaged: its SHA-256"):
        datasets.pbp_split("energy_heating", 0)


@pytest.mark.parametrize("content", ["no json", "{}", "[]"])
def test_a_malformed_manifest(mirror, content):
    (mirror / "MANIFEST.json").write_text(content)
    with pytest.raises(ValueError, match=r"MANIFEST.json is malformed"):
        datasets.load("concrete")


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_malformed_file(mirror, content):
    (mirror / "concrete.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"concrete.npz is not an npz file"):
        datasets.load("concrete")


def test_a_file_without_all_arrays(mirror):
    np.savez(mirror / "concrete.npz", x=np.ones((3, 2)), y=np.ones(3))
    with pytest.raises(ValueError, match="lacks the arrays categorical, feature_names, target_names"):
        datasets.load("concrete")


def test_a_file_whose_arrays_do_not_fit_together(mirror):
    names = {"feature_names": ["a", "b"], "target_names": ["y"], "categorical": np.array([], int)}
    np.savez(mirror / "concrete.npz", x=np.ones((3, 2)), y=np.ones(4), **names)
    with pytest.raises(ValueError, match=r"does not fit together: x has shape \(3, 2\) and y \(4,\)"):
        datasets.load("concrete")


def test_a_mirror_that_is_not_there(monkeypatch):
    monkeypatch.setenv("JAXCAL_DATA", "/no/such/directory")
    with pytest.raises(FileNotFoundError, match="JAXCAL_DATA names no directory: '/no/such/directory'"):
        datasets.load("diabetes")


def test_a_set_that_no_source_has():
    assert datasets.find("power_plant").kind == "missing"
    with pytest.raises(FileNotFoundError, match=r"set .* JAXCAL_DATA to a directory with power_plant.npz"):
        datasets.load("power_plant")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("yatch", "did you mean 'yacht'"),
        ("energy", "did you mean 'energy_heating' or 'energy_cooling'"),
        ("?", r"see jaxcal.datasets.names\(\)"),
    ],
)
def test_an_unknown_name(name, hint):
    for ask in (datasets.load, datasets.find, functools.partial(datasets.pbp_split, k=0)):
        with pytest.raises(ValueError, match=hint):
            ask(name)


def test_a_download_is_kept_in_the_cache(server):
    assert datasets.find("yacht").kind == "download"
    data = datasets.load("yacht")
    np.testing.assert_array_equal(data.x, [[1, 2, 3, 4, 5, 6], [8, 9, 10, 11, 12, 13]])
    np.testing.assert_array_equal(data.y, [7, 14.5])
    assert data.feature_names[-1] == "froude_number"
    server.unlink()
    assert datasets.find("yacht").kind == "cache"
    np.testing.assert_array_equal(datasets.load("yacht").y, data.y)


def test_a_damaged_file_in_the_cache_is_downloaded_again(server, tmp_path):
    datasets.load("yacht")
    (tmp_path / "cache" / "jaxcal" / "yacht_hydrodynamics.data").write_text("1 2 3 4 5 6 7")
    assert len(datasets.load("yacht").y) == 2


def test_a_download_that_is_not_the_original(server):
    server.write_text("1 2 3 4 5 6 7\n")
    with pytest.raises(ValueError, match="hash"):
        datasets.load("yacht")
    assert datasets.find("yacht").kind == "download"


def test_a_download_that_fails(server):
    server.unlink()
    with pytest.raises(OSError, match=r"yacht_hydrodynamics.data cannot be downloaded; .* JAXCAL_DATA"):
        datasets.load("yacht")


@pytest.mark.parametrize(("name", "library"), [("yacht", "pooch"), ("diabetes", "sklearn.datasets")])
def test_a_missing_library_is_named_with_its_extra(name, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"pip install 'jaxcal\[data\]'"):
        datasets.load(name)


@pytest.mark.parametrize("n", [10, 308, 1001])
def test_splits_are_disjoint_and_have_their_fractions(n):
    parts = datasets.split(n, (0.6, 0.2, 0.1), seed=3)
    rows = np.concatenate(parts)
    assert len(set(rows.tolist())) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < n
    for part, fraction in zip(parts, (0.6, 0.2, 0.1), strict=True):
        assert abs(len(part) - fraction * n) <= 1


def test_fractions_of_one_use_every_row_and_the_seed_decides():
    fractions = (0.8, 0.1, 0.1)  # which sum to a little less than 1
    parts = datasets.split(57, fractions, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(57))
    np.testing.assert_array_equal(parts[0], datasets.split(57, fractions, seed=0)[0])
    assert not np.array_equal(parts[0], datasets.split(57, fractions, seed=1)[0])
    assert not np.array_equal(parts[0], np.sort(parts[0]))


@pytest.mark.parametrize(
    ("n", "fractions", "message"),
    [
        (10, (0.8, 0.3), "sum to at most 1"),
        (10, (0.8, 0.0), "must be positive"),
        (10, (1.2, -0.2), "must be positive"),
        (10, (0.8, float("nan")), "must be positive"),
        (10, (), "must be positive"),
        (3, (0.9, 0.1), "leave a part empty: sizes"),
        (0, (0.5, 0.5), "leave a part empty: sizes"),
    ],
)
def test_bad_splits(n, fractions, message):
    with pytest.raises(ValueError, match=message):
        datasets.split(n, fractions, seed=0)


def test_pbp_splits(mirror):
    train, test = datasets.pbp_split("energy_cooling", 1)
    assert (train.tolist(), test.tolist()) == ([5, 4, 3, 2], [1, 0])
    with pytest.raises(ValueError, match="k must be one of 0 to 1, the PBP splits of energy_heating; got 2"):
        datasets.pbp_split("energy_heating", 2)
    with pytest.raises(ValueError, match="concrete has no PBP splits; these have: energy"):
        datasets.pbp_split("concrete", 0)
    (mirror / "pbp_splits.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"JAXCAL_DATA to a directory with pbp_splits.npz"):
        datasets.pbp_split("energy_heating", 0)


@pytest.fixture
def sources(monkeypatch):
    """All that this machine has: what comes with the checkout, and the mirror, where there is one."""
    monkeypatch.setattr(loader, "_OWN", OWN)
    if MIRROR:
        monkeypatch.setenv("JAXCAL_DATA", MIRROR)


@pytest.mark.parametrize("name", datasets.names())
def test_every_set(name, sources):
    if datasets.find(name).kind == "missing":
        pytest.skip("its license is not established, and JAXCAL_DATA names no mirror that has it")
    data = datasets.load(name)
    assert data.x.shape == (len(data.y), len(data.feature_names))
    assert np.isfinite(data.x).all()
    assert np.isfinite(data.y).all()
    assert np.std(data.y) > 0


@pytest.mark.parametrize("name", datasets.names())
def test_a_set_comes_with_the_checkout_if_its_license_allows_it(name, monkeypatch):
    monkeypatch.setattr(loader, "_OWN", {"checkout": OWN["checkout"]})
    assert (datasets.find(name).kind == "checkout") == (datasets.license_of(name) == "CC BY 4.0")


def test_the_files_of_the_package_are_those_of_the_checkout(monkeypatch):
    monkeypatch.setattr(loader, "_OWN", OWN)
    files = list(OWN["package"].glob("*.npz"))
    assert len(files) == 6
    assert datasets.find("energy_cooling").kind == "package"
    for file in files:
        assert file.read_bytes() == (OWN["checkout"] / file.name).read_bytes()
        assert file.stem in (OWN["package"] / "README.md").read_text(encoding="utf-8")


def test_the_page_of_sources_names_every_file():
    page = (OWN["checkout"] / "README.md").read_text(encoding="utf-8")
    for file in OWN["checkout"].glob("*.npz"):
        assert f"`{file.name}`" in page
    for entry in catalog.ENTRIES.values():
        if entry.license:
            assert entry.source.rpartition("doi:")[2] in page


@needs_mirror
def test_the_set_of_scikit_learn_is_that_of_the_mirror(monkeypatch):
    of_scikit_learn = datasets.load("diabetes")
    monkeypatch.setenv("JAXCAL_DATA", MIRROR)
    # Some versions of scikit-learn ship 4.803999999999999 for 4.804.
    same_data(datasets.load("diabetes"), of_scikit_learn, rtol=2 * np.finfo(float).eps)


@pytest.mark.parametrize("name", DOWNLOADABLE)
def test_reading_an_original_gives_the_same_set(name, tmp_path, monkeypatch, sources):
    """The numbers, written as the original's text into the cache, are read back the same."""
    stem = name.removesuffix("_motor").removesuffix("_total")
    targets = [datasets.load(target) for target in catalog.ENTRIES[stem].targets or (stem,)]
    original = original_of(stem)
    file = tmp_path / "cache" / "jaxcal" / original.file
    file.parent.mkdir(parents=True)
    file.write_text(as_original(original, targets))
    monkeypatch.delenv("JAXCAL_DATA", raising=False)
    set_original(monkeypatch, stem, sha256=sha256(file))
    assert datasets.find(name).kind == "cache"
    same_data(datasets.load(name), next(data for data in targets if data.name == name))


def test_a_published_checksum_is_that_of_the_rewritten_original(sources):
    """For forest_fires the text can be rebuilt byte for byte."""
    original = original_of("forest_fires")
    text = as_original(original, [datasets.load("forest_fires")]).replace("area_ha", "area")
    assert hashlib.sha256(text.encode()).hexdigest() == original.sha256


@pytest.mark.parametrize(("name", "splits"), [("yacht", 20), ("protein", 5), ("naval_compressor", 20)])
def test_the_pbp_splits_use_every_row_once(name, splits, sources):
    n = len(datasets.load(name).y)
    for k in (0, splits - 1):
        train, test = datasets.pbp_split(name, k)
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(n))
        assert abs(len(test) - 0.1 * n) <= 1


def same_data(found, expected, rtol=0.0):
    np.testing.assert_allclose(found.x, expected.x, rtol=rtol, atol=0)
    np.testing.assert_array_equal(found.y, expected.y)
    assert found.feature_names == expected.feature_names
    assert (found.target_name, found.categorical) == (expected.target_name, expected.categorical)


def as_original(original, targets):
    """The text of an original: its columns in its order, with its separator, header and level names."""
    columns = dict(zip(targets[0].feature_names, targets[0].x.T, strict=True))
    columns |= {data.target_name: data.y for data in targets}
    texts = [
        [original.levels[name][int(value)] for value in columns[name]]
        if name in original.levels
        else [np.format_float_positional(value, trim="-") for value in columns[name]]
        for name in original.columns.split()
    ]
    separator = original.delimiter or "\t"
    header = [separator.join(original.columns.split())] * (original.delimiter is not None)
    return "\n".join([*header, *map(separator.join, zip(*texts, strict=True))]) + "\n"


@pytest.mark.parametrize(("name", "columns"), [("g", 1), ("y", 1), ("w", 1), ("5d", 5)])
def test_problems_whose_noise_is_known(name, columns):
    data = datasets.heteroscedastic(name, 20_000, seed=1)
    assert data.x.shape == (20_000, columns)
    z = (data.y - data.mean) / data.std
    assert abs(z.mean()) < 0.03
    assert abs(z.std() - 1) < 0.03
    # The noise is as the formula says where it is small and where it is large.
    small = data.std < np.median(data.std)
    assert abs(z[small].std() - 1) < 0.04
    mean, std = datasets.heteroscedastic_moments(name, data.x)
    np.testing.assert_array_equal(mean, data.mean)
    np.testing.assert_array_equal(std, data.std)


def test_there_is_no_such_problem():
    with pytest.raises(ValueError, match="name must be one of 'g', 'y', 'w', '5d'; got 'x'"):
        datasets.heteroscedastic("x", 10, seed=0)
    with pytest.raises(ValueError, match=r"x must have shape \(n, 5\); got \(3, 1\)"):
        datasets.heteroscedastic_moments("5d", np.zeros((3, 1)))
