"""The text of a CSV: its encoding, the separator of its fields, and the end of each record.

New fields are put at the end of each record, and no other byte is changed. The standard library's csv finds the records
and counts their fields, and polars reads the values.
"""

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # slow to import
    import polars

# The usual texts for a missing value.
_MISSING = ("", "NA", "N/A", "n/a", "na", "NaN", "nan", "NAN", "NULL", "Null", "null", "None", "none", "?", "-")
# Separators of fields, and the words for them in messages.
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# The separator is recognized from this number of first records.
_FIRST_RECORDS = 100
# Byte order marks: the first bytes of a file can name its encoding.
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
# The number of records that are written at once.
_CHUNK = 10_000


@dataclass(frozen=True)
class Format:
    """The format of a CSV. A value of None is recognized from the file.

    Attributes:
        separator: the character between fields.
        decimal: the decimal mark, a point or a comma.
        thousands: the thousands separator, if there is one.
        encoding: the name of Python's codec.
    """

    separator: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    encoding: str | None = None

    def told(self, stated: "Format", usual: "Format") -> str:
        """The recognized properties that differ from the usual ones, in words."""
        phrases = []
        if stated.separator is None and self.separator != (usual.separator or ","):
            phrases.append(f"fields separated by {SEPARATORS[str(self.separator)]}")
        if stated.decimal is None and self.decimal != (usual.decimal or "."):
            phrases.append(f"decimal {'commas' if self.decimal == ',' else 'points'}")
        return " and ".join(phrases)


# Everything is recognized from the file.
UNKNOWN = Format()


@dataclass(frozen=True)
class Text:
    """The text of a CSV.

    Attributes:
        utf8: the whole file, in UTF-8.
        ends: where its header and its records end, before their line ends.
        names: of the columns.
        rows: the numbers of the header and the records in a spreadsheet, where a blank line is a row.
        format: its separator and its encoding, and how its numbers are written.
    """

    utf8: bytes
    ends: np.ndarray
    names: list[str]
    rows: np.ndarray
    format: Format

    @classmethod
    def read(cls, file: Path, stated: Format, usual: Format) -> "Text":
        """The text of a file.

        Args:
            file: a CSV.
            stated: the known properties of its format.
            usual: the properties that are assumed where the file leaves them open.

        Raises:
            ValueError: if it has another encoding, its separator is not clear, or a record has too many or too few
                fields.
        """
        utf8, encoding = _decoded(file.read_bytes(), file, stated.encoding, usual.encoding)
        separator = stated.separator or _find_separator(utf8, file, usual.separator)
        form = replace(stated, separator=separator, encoding=encoding)
        return cls(utf8, *_find_records(utf8, separator, file), form)

    def __len__(self) -> int:
        """The number of records below the header."""
        return len(self.ends) - 1

    def frame(self) -> "polars.DataFrame":
        """The values of all columns as texts. The usual texts for a missing value become missing values."""
        import polars

        separator, missing = str(self.format.separator), list(_MISSING)
        read = lambda utf8: polars.read_csv(utf8, separator=separator, infer_schema_length=0, null_values=missing)
        try:
            frame = read(self.utf8) if len(self.rows) == self.rows[-1] else None  # there is no blank line
        except polars.exceptions.PolarsError:
            frame = None
        if frame is None or len(frame) != len(self):
            frame = read(self._rewritten())  # polars reads a blank line as a row, and splits at quotes inside a field
        frame.columns = self.names
        return frame

    def _rewritten(self) -> bytes:
        """The same records without blank lines, with quotes by the standard."""
        separator, rewritten = str(self.format.separator), io.StringIO()
        records = filter(None, _records(_TextLines(self.utf8), separator))
        csv.writer(rewritten, delimiter=separator, lineterminator="\n").writerows(records)
        return rewritten.getvalue().encode()

    def check_names(self, names: Sequence[str], file: Path) -> None:
        """Raise ValueError if the encoding of a file lacks a letter of one of these names."""
        for name in names:
            try:
                name.encode(str(self.format.encoding))
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"the column {name!r} cannot be written in the encoding of {file}: {error}."
                ) from error

    def write(self, columns: "polars.DataFrame", out: Path) -> None:
        """Write the file with further columns of numbers and truth values."""
        import polars

        if self.format.decimal == ",":
            floats = polars.col(polars.Float32, polars.Float64)
            columns = columns.with_columns(floats.cast(polars.String).str.replace(".", ",", literal=True))
        encode = codecs.getincrementalencoder(str(self.format.encoding))().encode
        with out.open("wb") as file:
            for piece in self._pieces(columns):
                file.write(piece if self.format.encoding == "utf-8" else encode(piece.decode()))

    def _pieces(self, columns: "polars.DataFrame") -> Iterator[bytes]:
        """The text with the fields of further columns at the end of each record."""
        separator = str(self.format.separator)
        names = columns[:0].write_csv(separator=separator).rstrip()
        yield self.utf8[: self.ends[0]] + (separator + names).encode()
        for first in range(0, len(self), _CHUNK):
            fields = columns[first : first + _CHUNK].write_csv(separator=separator, include_header=False).encode()
            ends = self.ends[first : first + _CHUNK + 1].tolist()
            records = map(self.utf8.__getitem__, map(slice, ends, ends[1:]))
            yield b"".join(
                record + separator.encode() + added for record, added in zip(records, fields.splitlines(), strict=True)
            )
        yield self.utf8[self.ends[-1] :]


class _TextLines:
    """The lines of a text. `end` is the position where the last line ended, before its line end."""

    def __init__(self, utf8: bytes) -> None:
        # In an old file of a Macintosh, lines end with a carriage return alone.
        self._utf8 = utf8 if b"\n" in utf8 else utf8.replace(b"\r", b"\n")
        self.end = 0

    def __iter__(self) -> Iterator[str]:
        start = 0
        for line in io.BytesIO(self._utf8):
            self.end = start + len(line.rstrip(b"\r\n"))
            yield line.decode() if start else line.removeprefix(codecs.BOM_UTF8).decode()
            start += len(line)


def _records(lines: _TextLines, separator: str) -> Any:
    """A reader of records. Its `line_num` is the number of lines that were read."""
    csv.field_size_limit(2**31 - 1)  # the limit of polars
    return csv.reader(lines, delimiter=separator, strict=True)


def _find_records(utf8: bytes, separator: str, file: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Where the records of a text end, the names of its columns, and the records' numbers in a spreadsheet.

    Raises:
        ValueError: if there is no record, a record has too many or too few fields, or two columns have the same name.
    """
    lines = _TextLines(utf8)
    reader = _records(lines, separator)
    names, ends, rows, start = [], [], [], 1
    try:
        for row, fields in enumerate(reader, 1):
            if fields and len(fields) != len(names) and names:
                raise ValueError(_of_ragged_line(file, start, reader.line_num, len(fields), len(names)))
            if fields:
                names = names or fields
                ends.append(lines.end)
                rows.append(row)
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"cannot read {file}: the record that starts in line {start}: {error}; look at its quotes."
        ) from error
    if not names:
        raise ValueError(f"cannot read {file}: it is empty.")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{file} has more than one column {', '.join(map(repr, twice))}: rename or remove them.")
    return np.array(ends), names, np.array(rows)


def _of_ragged_line(file: Path, start: int, stop: int, number: int, expected: int) -> str:
    """The message about a wrong number of fields of a record."""
    lines = f"line {start} has" if start == stop else f"lines {start} to {stop}, one record by their quotes, have"
    return f"cannot read {file}: {lines} {number} fields, and the header {expected}."


def _find_separator(utf8: bytes, file: Path, usual: str | None) -> str:
    """The separator of the fields: with it most of the first records have as many fields as the header.

    Raises:
        ValueError: if several characters are equally good, and none is usual.
    """
    agreeing = {separator: _num_agreeing(utf8, separator) for separator in {usual or ",", *SEPARATORS}}
    most = max(agreeing.values())
    best = [separator for separator, number in agreeing.items() if number == most]
    if most == 0 or usual in best:
        return usual or ","
    if len(best) > 1:
        named = " or ".join(words for separator, words in SEPARATORS.items() if separator in best)
        raise ValueError(f"the fields of {file} may be separated by {named}: say which, --separator.")
    return best[0]


def _num_agreeing(utf8: bytes, separator: str) -> int:
    """How many of the first records have as many fields as the header; 0 if the header has one field."""
    widths = []
    try:
        for fields in islice(_records(_TextLines(utf8), separator), _FIRST_RECORDS):
            widths.append(len(fields))
    except csv.Error:
        pass  # the separator is another one, or the error is reported when the records are read
    widths = [width for width in widths if width > 0]
    return widths.count(widths[0]) if widths and widths[0] > 1 else 0


def _decoded(raw: bytes, file: Path, known: str | None, usual: str | None) -> tuple[bytes, str]:
    """A text in UTF-8, and the encoding of the file.

    Raises:
        ValueError: if the file does not have the named encoding, or is not UTF-8 and no encoding is named.
    """
    marked = next((name for mark, name in _BYTE_ORDER_MARKS.items() if raw.startswith(mark)), None)
    encoding = _codec(known, marked) if known else marked or "utf-8"
    try:
        if encoding == "utf-8":
            return _checked_utf8(raw), encoding
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        if usual not in (None, encoding) and not known:
            return _decoded(raw, file, usual, None)
        raise ValueError(_of_other_encoding(file, raw, encoding, error)) from error
    if text.encode(encoding) != raw:
        raise ValueError(f"{file} could not be written as it is in the encoding {encoding}: convert it to UTF-8.")
    return text.encode(), encoding


def _codec(name: str, marked: str | None) -> str:
    """The name of a codec with a byte order, which does not add or remove a byte order mark: the text keeps its own."""
    try:
        "".encode(name)
    except LookupError as error:
        raise ValueError(f"--encoding must be an encoding of Python, such as utf-8 or cp1252; got {name!r}.") from error
    codec = codecs.lookup(name).name
    if codec == "utf-16":
        return "utf-16-be" if marked == "utf-16-be" else "utf-16-le"
    return "utf-8" if codec == "utf-8-sig" else codec


def _checked_utf8(raw: bytes) -> bytes:
    """The bytes, if they are UTF-8. Bytes of 0 do not count as UTF-8: such a file is UTF-16 or no text.

    Raises:
        UnicodeDecodeError: if they are not UTF-8.
    """
    if not raw.isascii():
        raw.decode()
    if (place := raw.find(b"\0")) >= 0:
        raise UnicodeDecodeError("utf-8", raw, place, place + 1, "a byte of 0")
    return raw


def _of_other_encoding(file: Path, raw: bytes, encoding: str, error: UnicodeDecodeError) -> str:
    """The message about a file with another encoding than the assumed one: where it differs, and what to do."""
    line = raw.count(b"\n", 0, error.start) + 1
    return (
        f"{file} is not {encoding.upper()}: its byte {error.start}, in line {line}, is 0x{raw[error.start]:02x}. Name "
        "its encoding, such as --encoding cp1252, latin-1 or utf-16."
    )
