"""The file of a sweep: a line of JSON for each finished job, written by one sweep at a time.

A line is {"job": {...}, "stamp": {...}, "records": [{...}, ...]}. A last line that a kill cut short does not count.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxcal import _checks

Record = dict[str, Any]
# The descriptors that hold locks. A forked process inherits them, and could keep the locks longer than this process.
_locks: set[int] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [os.close(lock) for lock in _locks])
# The byte that is locked on Windows, which locks bytes. It is far behind the end of the file, so that others can read
# it.
_LOCKED_BYTE = 2**62


def plain(values: Any, what: str) -> str:
    """A job or a stamp as JSON.

    Raises:
        ValueError: if it is not a dict of plain values by name; the message begins with `what`.
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{what} must be a dict with strings as keys, got {values!r}.")
    try:
        return json.dumps(dict(values))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} must hold plain values, numbers, strings and lists: {error}, in {values!r}."
        ) from None


def name_of(job: Mapping[str, Any]) -> str:
    """The name of a job, which does not depend on the order of its arguments."""
    return json.dumps(job, sort_keys=True)


def check_same(first: Mapping[str, Any], second: Mapping[str, Any], what: str) -> None:
    """Raise a ValueError if both have a key with different values, because one of them would be lost."""
    for key in first.keys() & second.keys():
        if first[key] != second[key] and json.dumps(first[key]) != json.dumps(second[key]):  # NaN differs from itself
            raise ValueError(f"{what} have the key {key!r} with two values, {first[key]!r} and {second[key]!r}.")


def finished_line(job: str, stamp: str, records: str) -> Record:
    """A finished job, given each part as JSON.

    Raises:
        ValueError: if a record gives a key of the job or the stamp another value.
    """
    line = {"job": json.loads(job), "stamp": json.loads(stamp), "records": json.loads(records)}
    for record in line["records"]:
        check_same(line["job"], record, "the job and its record")
        check_same(line["stamp"], record, "the stamp and a record")
    return line


def flat(line: Record) -> list[Record]:
    """The records of a finished job, each with its job and stamp."""
    return [{**line["job"], **line["stamp"], **record} for record in line["records"]]


def read_lines(path: Path) -> dict[str, Record]:
    """The lines of the file, by the name of the job."""
    if not path.exists():
        return {}
    lines, repeated = {}, []
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):  # the last line, cut short by a kill
            break
        line = _parsed(text, f"{path}, line {number},")
        first = lines.setdefault(name_of(line["job"]), line)
        if first is not line and json.dumps(first["records"]) != json.dumps(line["records"]):
            repeated.append(number)
    if repeated:
        _checks.warn(
            f"{path}: line {repeated[0]} is a job that was finished before, with other records; {len(repeated)} such "
            f"lines are not read.",
        )
    return lines


def _parsed(text: bytes, where: str) -> Record:
    try:
        line = json.loads(text)
        flat(line)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is not a finished job: {text[:80]!r}.") from error
    return line


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Callable[[Record], None]]:
    """A function that writes a line to the end of the file, down to the disk; no other sweep writes meanwhile.

    Raises:
        BlockingIOError: if another sweep writes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path), open(path, "ab") as file:
        # A last line that was cut short is removed, so that the next line is whole.
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

        def append(line: Record) -> None:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        yield append


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file, which is made if it is missing.

    The end of the process also unlocks it, whatever ends the process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _locks.add(descriptor)
    try:
        _lock(descriptor, path)
        yield
    finally:
        _locks.remove(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Lock an open file, or raise at once."""
    try:
        if os.name == "nt":
            import msvcrt

            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise BlockingIOError(
            f"another sweep is writing to {path}: wait for its end, or give this sweep its own file."
        ) from None
    except OSError as error:
        _checks.warn(f"{path} cannot be locked ({error}): no other sweep must write to it meanwhile.")
