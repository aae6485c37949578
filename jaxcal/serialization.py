"""Fitted modules and distributions in a file: `save` and `load`.

A file has the format of safetensors: arrays, and a header. Its metadata has one entry, "jaxcal", which is a JSON
object:

    digest     SHA-256 of the whole file with zeros in place of these 64 digits
    format     of the tree: 1
    version    of jaxcal
    tree       the model

None, truth values, whole numbers, finite floats and strings of a tree stand for themselves. Every other value is an
object that says what it is:

    {"array": name, "weak": bool}             an array of JAX; of weak type or not
    {"key": name, "impl": ...}                random keys of JAX
    {"numpy": name}, {"scalar": name}         an array of NumPy, one of its numbers
    {"sparse": [data, indices, starts], "shape": [...]}    a sparse matrix of rows
    {"tuple": [...]}, {"list": [...]}, {"dict": {...}}, {"slice": [start, stop, step]}, {"float": "nan"}
    {"class": name, "fields": {...}}          a module, a dataclass or a named tuple
    {"enum": name, "member": name}
    {"function": name}, {"method": name, "of": ...}, {"partial": function, "args": [...], "keywords": {...}}
    {"unset": true}                           a field that is read from the class
    {"default": true}                         a field that holds the default of the class's __init__

The name of an array is its number. If safetensors lacks a dtype for NumPy, the object also has the key "dtype". Classes
and functions have the name by which they are imported, and are looked up only in a few packages. Objects are made from
their fields, in the same way as equinox unflattens a module. So no code runs that a file names.
"""

import dataclasses
import enum
import hashlib
import importlib
import inspect
import json
import math
import os
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax import dtypes

from jaxcal import _checks, _functions
from jaxcal._files import replacing

_FORMAT = 1
# The beginning of a file, after the eight bytes that hold the length of its header.
_BEGINNING = rb'{"__metadata__":{"jaxcal":"{\"digest\":\"'
_START = 8 + len(_BEGINNING)
_NO_DIGEST = b"0" * (2 * hashlib.sha256().digest_size)
# Classes and functions may come from these parts of jaxcal, and from these modules of other packages.
_PARTS = {
    *("calibrators", "density_ratio", "distributions", "frames", "functional", "gp", "guarantee", "metrics"),
    *("networks", "online", "optimize", "pipeline", "predictors"),
}
_MODULES = ("equinox.nn", "gpjax.kernels", "gpjax.parameters", "paramax")
_DTYPES = {"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))}
_DTYPES |= {"float16", "float32", "float64"}
# Marks for a field that is read from the class, and for a field that holds the default of the class's __init__.
_UNSET_FIELD, _DEFAULT_FIELD = {"unset": True}, {"default": True}


def save(path: str | os.PathLike, model: Any) -> None:
    """Save a fitted module, a distribution, or a tuple, list or dict of them, into one file; `load` reads it.

    The file has the format of safetensors. It holds the arrays and everything else that predictions need. There is no
    pickle in it, and loading runs no code that it names. So a file from a stranger is safe to load. The new file
    replaces an old file in one step. After an error the old file is unchanged.

    Some models cannot be saved, and raise TypeError:

    - Functions of the user, such as `by`, `weights` or `features`, and the user's own classes. A file holds only the
      name of a function or a class. Only names in jaxcal, jax.nn, jax.numpy, equinox.nn and gpjax's kernels are loaded.
      Give arrays, or `jaxcal.frames.labels`, where a calibrator takes them.
    - Models of other packages: an estimator in `jaxcal.pipeline` or `jaxcal.density_ratio`, and `quantile_boosting` of
      LightGBM, XGBoost or CatBoost. Trees of scikit-learn in a pipeline are an exception: they can be saved.

    Such models can be saved by `joblib.dump` or `pickle.dump` if their functions have names, else by cloudpickle.

    Args:
        path: the path of the file, with any suffix; ".safetensors" is usual.
        model: the object to save.

    Raises:
        TypeError: if a part of the model cannot be saved, or a transformation of JAX traces it. The message names the
            part.
        ValueError: if the file cannot be written.

    Example:
        >>> import tempfile
        >>> import jaxcal as jc, numpy as np
        >>> x = np.linspace(0, 1, 50)
        >>> fitted = jc.gaussian_mle.fit(x, jc.Point(x), x**2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jc.save(f"{folder}/fitted.safetensors", fitted)
        ...     loaded = jc.load(f"{folder}/fitted.safetensors")
        >>> bool((loaded(x, jc.Point(x)).std == fitted(x, jc.Point(x)).std).all())
        True
    """
    writer = _Writer()
    about = {"format": _FORMAT, "version": _own_version(), "tree": writer.node(model, "")}
    text = json.dumps({"digest": _NO_DIGEST.decode(), **about}, separators=(",", ":"), allow_nan=False)
    data = safetensors.numpy.save(writer.tensors, {"jaxcal": text})
    start, rest = _around_digest(data)
    with replacing(Path(path)) as file, file.open("xb") as opened:
        opened.writelines((start, _digest(data), rest))


def load(path: str | os.PathLike) -> Any:
    """The model that `save` wrote into a file. Its predictions are the same, bit by bit.

    Its arrays have the same dtypes as before. If a file holds arrays of 64 bits and JAX uses 32 bits, they become
    arrays of 32 bits.

    Args:
        path: the path of the file.

    Raises:
        ValueError: in each of these cases:

            - there is no such file, or it cannot be read;
            - `save` did not write it, it is damaged, or it has a newer format;
            - it names a class, a field or a function that this version of jaxcal does not have;
            - JAX uses 32 bits, and the file holds a number that 32 bits cannot hold.

    Warns:
        UserWarning: if arrays of 64 bits became arrays of 32 bits.

    Example:
        >>> import tempfile
        >>> import jaxcal as jc, numpy as np
        >>> x = np.linspace(0, 1, 50)
        >>> base = jc.Normal(x, 1 + x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jc.save(f"{folder}/both", {"crude": jc.crude.fit(x, base, x**2), "base": base})
        ...     both = jc.load(f"{folder}/both")
        >>> both["crude"](x[:3], jc.Normal(x[:3], 1.0)).mean.shape
        (3,)
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}.") from error
    if not data.startswith(_BEGINNING, 8):
        raise ValueError(f"{path} is not a file that jaxcal.save has written, or not the whole of one.")
    if data[_START : _START + len(_NO_DIGEST)] != _digest(data):
        raise ValueError(f"{path} is damaged or cut short: it does not match the digest that was written with it.")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about = json.loads(header["__metadata__"]["jaxcal"])
    if about["format"] > _FORMAT:
        raise ValueError(
            f"{path} was written by jaxcal {about['version']} in format {about['format']}, and this one reads format "
            f"{_FORMAT}: update jaxcal."
        )
    reader = _Reader(str(path), about["version"], safetensors.numpy.load(data))
    model = reader.value(about["tree"], "")
    if reader.has_narrowed:
        _checks.warn(
            f"{path} was written in 64 bits and is loaded in 32: predictions change by rounding. To keep all digits, "
            "jax.config.update('jax_enable_x64', True) before loading."
        )
    return model


def _digest(data: bytes) -> bytes:
    """The hexadecimal digits of the digest of a file, computed with zeros in their place."""
    start, rest = _around_digest(data)
    digest = hashlib.sha256(start)
    for part in (_NO_DIGEST, rest):
        digest.update(part)
    return digest.hexdigest().encode()


def _around_digest(data: bytes) -> tuple[memoryview, memoryview]:
    """The bytes of a file before its digest and after it."""
    view = memoryview(data)
    return view[:_START], view[_START + len(_NO_DIGEST) :]


# What is written


class _Writer:
    """Makes the tree of a model, and collects its arrays."""

    def __init__(self):
        self.tensors: dict[str, np.ndarray] = {}
        # The key is the identity of an array. The array is kept, too, so that no other array gets this identity.
        self._known: dict[int, tuple[Any, dict]] = {}

    def node(self, value: Any, place: str) -> Any:
        """The part of the tree for a value at a place in the model.

        Raises:
            TypeError: if it cannot be saved.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) in (tuple, list):
            return {type(value).__name__: self._nodes(value, place)}
        if type(value) is dict and all(type(key) is str for key in value):
            return {"dict": {key: self.node(each, f"{place}[{key!r}]") for key, each in value.items()}}
        if type(value) is slice:
            return {"slice": self._nodes((value.start, value.stop, value.step), place)}
        if isinstance(value, jax.Array | np.generic) or type(value) is np.ndarray:
            return self._array(value, place)
        return self._function(value, place) or self._object(value, place)

    def _nodes(self, values: tuple | list, place: str) -> list:
        return [self.node(value, f"{place}[{k}]") for k, value in enumerate(values)]

    def _function(self, value: Any, place: str) -> dict | None:
        """The part for a function; None if the value is no function, or has no name."""
        if name := _name_of_function(value):
            return {"function": name}
        if type(value) is partial:
            parts = {"partial": value.func, "args": list(value.args), "keywords": value.keywords}
            return {key: self.node(part, _join(place, key)) for key, part in parts.items()}
        if (owner := _owner(value)) is not None:
            return {"method": value.__func__.__name__, "of": self.node(owner, _join(place, "__self__"))}
        return None

    def _object(self, value: Any, place: str) -> dict:
        """The part for a module, a dataclass, a named tuple, an enumeration's member or a sparse matrix."""
        if type(value).__module__.startswith("scipy.sparse") and value.format == "csr":
            parts = value.data, value.indices, value.indptr
            return {"sparse": self._nodes(parts, place), "shape": list(map(int, value.shape))}
        name = _name_of(type(value))
        if name is None or not _is_record(type(value)):
            _refuse(value, place)
        if isinstance(value, enum.Enum):
            return {"enum": name, "member": value.name}
        if hasattr(value, "_to_save"):  # it replaces objects of other packages by arrays
            value = value._to_save()
        known = dict(zip(_fields(value), value, strict=True)) if isinstance(value, tuple) else vars(value)
        return {"class": name, "fields": {field: self._field(value, known, field, place) for field in _fields(value)}}

    def _field(self, owner: Any, known: dict, field: str, place: str) -> Any:
        if field not in known:
            return _UNSET_FIELD
        try:
            return self.node(known[field], _join(place, field))
        except TypeError:
            if _is_default(known[field], _default_of_init(type(owner), field)):
                return _DEFAULT_FIELD
            if field in getattr(type(owner), "_not_needed", ()):  # predictions do not need it, and None replaces it
                return None
            raise

    def _array(self, value: Any, place: str) -> dict:
        if _checks.is_traced(value):
            raise TypeError(f"{place or 'the model'} is traced by a transformation of JAX: save outside of it.")
        if id(value) not in self._known:
            self._known[id(value)] = value, self._new_array(value, place)
        return self._known[id(value)][1]

    def _new_array(self, value: Any, place: str) -> dict:
        if not isinstance(value, jax.Array):
            return self._tensor("scalar" if isinstance(value, np.generic) else "numpy", np.asarray(value), place)
        if jnp.issubdtype(value.dtype, dtypes.prng_key):
            data = np.asarray(jax.random.key_data(value))
            return {**self._tensor("key", data, place), "impl": str(jax.random.key_impl(value))}
        return {**self._tensor("array", np.asarray(value), place), "weak": bool(value.weak_type)}

    def _tensor(self, kind: str, array: np.ndarray, place: str) -> dict:
        """The part for an array, which is added to the arrays of the file."""
        name, dtype, beside = str(len(self.tensors)), array.dtype, {}
        if dtype.name not in _DTYPES:
            if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
                raise TypeError(f"{place or 'the model'} is an array of dtype {dtype}: only numbers can be saved.")
            array, beside = array.view(f"u{dtype.itemsize}"), {"dtype": dtype.name}
        self.tensors[name] = np.asarray(array, order="C")
        return {kind: name, **beside}


def _refuse(value: Any, place: str) -> NoReturn:
    """Raise the TypeError for a value that cannot be saved."""
    instead = "joblib.dump or pickle.dump"
    if callable(value) and isinstance(getattr(value, "__qualname__", None), str):
        what = f"the function {value.__module__}.{value.__qualname__}"
        why = "a file holds the name of a function, and only those of jaxcal, jax.nn and jax.numpy are loaded"
        instead = "cloudpickle.dump" if "<" in what else instead
    else:
        what = f"an object of {type(value).__module__}.{type(value).__qualname__}"
        why = "a file holds objects of jaxcal, of equinox.nn and kernels of gpjax"
    raise TypeError(f"{place or 'the model'} is {what}, which cannot be saved: {why}. Take {instead} for this model.")


# What is read


class _Reader:
    """Makes a model of its tree and its arrays.

    Attributes:
        has_narrowed: whether an array of 64 bits has become one of 32.
    """

    def __init__(self, path: str, version: str, tensors: dict[str, np.ndarray]):
        self.has_narrowed = False
        self._path, self._version, self._tensors = path, version, tensors
        self._known: dict[str, jax.Array] = {}

    def value(self, node: Any, place: str) -> Any:
        """The value of a part of the tree, at a place in the model.

        Raises:
            ValueError: if this version of jaxcal has no such value.
        """
        match node:
            case {"float": digits}:
                return float(digits)
            case {"tuple": parts}:
                return tuple(self._values(parts, place))
            case {"list": parts}:
                return self._values(parts, place)
            case {"dict": parts}:
                return {key: self.value(part, f"{place}[{key!r}]") for key, part in parts.items()}
            case {"slice": parts}:
                return slice(*self._values(parts, place))
            case {"numpy": name}:
                return self._stored(name, node)
            case {"scalar": name}:
                return self._stored(name, node)[()]
            case {"array": name}:
                return self._array(name, node, place)
            case {"key": name, "impl": impl}:
                return jax.random.wrap_key_data(jax.device_put(self._stored(name, node)), impl=impl)
            case {"sparse": parts, "shape": shape}:
                from scipy.sparse import csr_matrix

                matrix = csr_matrix(tuple(self._values(parts, place)), tuple(shape))
                matrix.check_format()  # products do not check it, and would read beyond the arrays
                return matrix
            case dict():
                return self._object(node, place)
        return node

    def _object(self, node: dict, place: str) -> Any:
        """A function, or an object of a class."""
        match node:
            case {"function": name}:
                function = _find_function(name)
                return self._refuse(place, f"the function {name}") if function is None else function
            case {"partial": _, "args": _, "keywords": _}:
                parts = ("partial", "args", "keywords")
                function, args, keywords = (self.value(node[part], _join(place, part)) for part in parts)
                return partial(function, *args, **keywords)
            case {"method": name, "of": owner}:
                return self._method(self.value(owner, _join(place, "__self__")), name, place)
            case {"enum": name, "member": member}:
                enum_member = getattr(_find(name), "__members__", {}).get(member)
                return self._refuse(place, f"{name}.{member}") if enum_member is None else enum_member
            case {"class": name, "fields": fields}:
                return self._record(name, fields, place)
        return self._refuse(place, f"of the kind {next(iter(node), '')!r}")

    def _refuse(self, place: str, what: str) -> NoReturn:
        raise ValueError(
            f"{self._path} cannot be loaded: {place or 'the model'} is {what}, which jaxcal {_own_version()} does not "
            f"know. The file was written by jaxcal {self._version}."
        )

    def _values(self, nodes: list, place: str) -> list:
        return [self.value(node, f"{place}[{k}]") for k, node in enumerate(nodes)]

    def _stored(self, name: str, node: dict) -> np.ndarray:
        array = self._tensors[name]
        return array.view(jnp.dtype(node["dtype"])) if "dtype" in node else array

    def _array(self, name: str, node: dict, place: str) -> jax.Array:
        """An array of JAX. An array that occurs several times in the model is one object."""
        if name not in self._known:
            array = jax.device_put(self._in_use(self._stored(name, node), place))
            if node["weak"]:
                # JAX itself does the same when it unpickles an array.
                array.aval = array.aval.update(weak_type=True)  # pyright: ignore[reportAttributeAccessIssue]
            self._known[name] = array
        return self._known[name]

    def _in_use(self, array: np.ndarray, place: str) -> np.ndarray:
        """The array in the precision that JAX uses."""
        dtype = dtypes.canonicalize_dtype(array.dtype)
        if dtype == array.dtype:
            return array
        self.has_narrowed = True
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype)
        lost = np.isfinite(narrow) != np.isfinite(array) if array.dtype.kind == "f" else narrow != array
        if lost.any():
            raise ValueError(
                f"{place or 'the model'} in {self._path} holds {array[lost][0]:g}, which {dtype} cannot: "
                "jax.config.update('jax_enable_x64', True) before loading."
            )
        return narrow

    def _method(self, owner: Any, name: str, place: str) -> Callable:
        if name.startswith("_") or not isinstance(inspect.getattr_static(type(owner), name, None), types.FunctionType):
            self._refuse(place, f"the method {name!r} of a {type(owner).__name__}")
        return getattr(owner, name)

    def _record(self, name: str, nodes: dict, place: str) -> Any:
        """An object of these fields, made without its __init__."""
        cls = _find(name)
        if cls is None or not _is_record(cls):
            self._refuse(place, f"a {name}")
        if extra := sorted(nodes.keys() - set(_fields(cls))):
            self._refuse(place, f"a {cls.__name__} with the field {extra[0]!r}")
        if lacking := sorted(set(_fields(cls)) - nodes.keys()):
            raise ValueError(
                f"{self._path} cannot be loaded: {place or 'the model'} is a {cls.__name__}, and the file lacks its "
                f"field {lacking[0]!r}, which jaxcal {_own_version()} needs. The file was written by jaxcal "
                f"{self._version}."
            )
        values = {field: self._field(cls, field, nodes[field], _join(place, field)) for field in _fields(cls)}
        if issubclass(cls, tuple):
            return tuple.__new__(cls, values.values())
        made = object.__new__(cls)
        for field, value in values.items():
            if value is not _NONE:
                object.__setattr__(made, field, value)
        return made

    def _field(self, cls: type, field: str, node: Any, place: str) -> Any:
        """The value of a field; `_NONE` if it is not set."""
        if node == _UNSET_FIELD:
            return _NONE
        if node != _DEFAULT_FIELD:
            return self.value(node, place)
        default = _default_of_init(cls, field)
        return self._refuse(place, f"the default of a {cls.__name__}") if default is _NONE else default


# Names


def _find(name: str) -> Any:
    """The class or the function of a name, if it may be loaded; else None."""
    module, _, attribute = name.rpartition(".")
    package, *parts = module.split(".")
    own = package == "jaxcal" and parts and parts[0] in _PARTS
    if not own and module not in _MODULES:
        return None
    try:
        thing = vars(importlib.import_module(module)).get(attribute)
    except ImportError:
        return None
    # A module of jaxcal also holds the names that it imports, which may not be loaded from it.
    return None if own and getattr(thing, "__module__", None) != module else thing


def _name_of(thing: Any) -> str | None:
    """The name by which `_find` finds a class or a function; None if there is no such name."""
    name, module = getattr(thing, "__qualname__", ""), str(getattr(thing, "__module__", ""))
    package = module.partition(".")[0]
    candidates = [module, *(each for each in _MODULES if each.partition(".")[0] == package)]
    return next((f"{each}.{name}" for each in candidates if name and _find(f"{each}.{name}") is thing), None)


def _find_function(name: str) -> Callable | None:
    """The function of a name: a function of JAX, or a public function of jaxcal; else None."""
    function = _functions.find(name)
    if function is None and name.startswith("jaxcal.") and not any(part.startswith("_") for part in name.split(".")):
        function = _find(name)
    return function if callable(function) and not isinstance(function, type) else None


def _name_of_function(value: Any) -> str | None:
    """The name by which `_find_function` finds a function; None if it has no such name, or is no function."""
    if not callable(value):
        return None
    name = _functions.named(value)
    name = name if isinstance(name, str) else _name_of(value)
    return name if name is not None and _find_function(name) is value else None


def _owner(value: Any) -> Any:
    """The object whose public method it is; None if it is no public method."""
    function, owner = getattr(value, "__func__", None), getattr(value, "__self__", None)
    name = getattr(function, "__name__", "_")
    return owner if not name.startswith("_") and getattr(type(owner), name, None) is function else None


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


# Records


# A mark for a missing value.
_NONE = object()


def _is_record(cls: Any) -> bool:
    """Whether it is a class whose objects are fully described by their fields, or by a name."""
    if not isinstance(cls, type):
        return False
    return issubclass(cls, enum.Enum | eqx.Module) or dataclasses.is_dataclass(cls) or hasattr(cls, "_field_defaults")


def _fields(record: Any) -> tuple[str, ...]:
    """The names of the fields of a record, or of a class of records."""
    if hasattr(record, "_field_defaults"):
        return record._fields
    return tuple(field.name for field in dataclasses.fields(record))


def _default_of_init(cls: type, name: str) -> Any:
    """The default in the __init__ of a class or of its base classes; `_NONE` if there is none."""
    for parent in cls.__mro__:
        init = vars(parent).get("__init__")
        parameter = None if init is None else inspect.signature(init).parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty:
            return parameter.default
    return _NONE


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value is a default, or an object of the same class without a state, such as gpjax's engines."""
    stateless = not callable(value) and not getattr(value, "__dict__", True) and not getattr(default, "__dict__", True)
    return value is default or (type(value) is type(default) and stateless)


def _own_version() -> str:
    from jaxcal import __version__

    return __version__
