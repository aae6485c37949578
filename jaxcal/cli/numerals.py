"""The format of the numbers in a column of texts, and their values.

A column can be ambiguous: "1,234" is 1.234 with a decimal comma, and 1234 with a comma between thousands. The format is
not guessed.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # slow to import
    import polars

# The values of --thousands, with their regular expressions: three spaces and two apostrophes are in use.
THOUSANDS = {",": ",", ".": r"\.", " ": "[ \u00a0\u202f]", "'": "['\u2019]"}
DECIMALS = {".": "point", ",": "comma"}
# Whole numbers with leading zeros are names: 00501 and 01e301.
_PADDED = r"^\s*0[0-9]+([eE][0-9]+)?\s*$"
# The marks in a number.
_MARKED = "[.,'\u2019]|[0-9][ \u00a0\u202f][0-9]"
# The first values are tested before all values: they are enough if a column holds something else.
_FIRST_VALUES = 1000


class Marks(NamedTuple):
    """The decimal mark of numbers, and their thousands separator, if there is one."""

    decimal: str = "."
    thousands: str | None = None

    @property
    def pattern(self) -> str:
        """A regular expression for numbers of this format, with groups of three digits or, as in India, of two."""
        whole = "[0-9]+"
        if self.thousands is not None:
            mark = THOUSANDS[self.thousands]
            whole = (
                f"(?:[0-9]+|[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+|[1-9][0-9]?(?:{mark}[0-9]{{2}})+{mark}[0-9]{{3}})"
            )
        point = f"[{self.decimal}]"
        return rf"^\s*[-+]?(?:{whole}(?:{point}[0-9]*)?|{point}[0-9]+)(?:[eE][-+]?[0-9]+)?\s*$"

    def fit(self, texts: "polars.Series") -> bool:
        """Whether all texts of a column are numbers of this format."""
        there = texts.drop_nulls()
        return all(part.str.contains(self.pattern).all() for part in (there.head(_FIRST_VALUES), there))

    def plain(self, texts: "polars.Series") -> "polars.Series":
        """The texts without thousands separators, and with decimal points; null for a text of another format."""
        if self != Marks():
            texts = texts.set(~texts.str.contains(self.pattern), None)
        if self.thousands is not None:
            texts = texts.str.replace_all(THOUSANDS[self.thousands], "")
        if self.decimal == ",":
            texts = texts.str.replace(",", ".", literal=True)
        return texts.str.strip_chars()

    @property
    def options(self) -> str:
        """The options of a command for this format."""
        decimal = "" if self.thousands and self.decimal == "." else f"--decimal {self.decimal!r}"
        return f"{decimal} --thousands {self.thousands!r}".strip() if self.thousands else decimal


_ALL = [Marks(decimal, thousands) for thousands in (None, *THOUSANDS) for decimal in DECIMALS if decimal != thousands]
# A number in any of these formats.
_ANY = "|".join(marks.pattern for marks in _ALL)


def typed(texts: "polars.Series", marks: Marks, *, keep_padded: bool = True) -> "polars.Series":
    """A column of texts as numbers or truth values, if all texts are such values; else unchanged.

    Args:
        texts: the texts of the column.
        marks: the format of numbers.
        keep_padded: whether whole numbers with leading zeros stay texts.
    """
    import polars

    there = texts.drop_nulls()
    if there.is_empty():
        return texts.cast(polars.Null, strict=False)
    if there.str.contains("(?i)^(true|false)$").all():
        return texts.str.to_lowercase() == "true"
    if _cast(marks.plain(there.head(_FIRST_VALUES)), polars.Float64) is None:
        return texts
    plain = marks.plain(texts)
    numbers = _cast(plain, polars.Float64) if plain.null_count() == texts.null_count() else None
    if numbers is None or (keep_padded and _holds_names(there, numbers)):
        return texts
    whole = _cast(plain, polars.Int64)
    return numbers if whole is None else whole


def _cast(texts: "polars.Series", dtype: Any) -> "polars.Series | None":
    """The numbers in texts; None if a text is no number."""
    numbers = texts.cast(dtype, strict=False)
    return numbers if numbers.null_count() == texts.null_count() else None


def _holds_names(texts: "polars.Series", numbers: "polars.Series") -> bool:
    """Whether numbers are names: with leading zeros, or too large for a float, such as 58e358."""
    is_too_large = numbers.is_infinite().any() and not texts.str.contains("(?i)inf").any()
    return is_too_large or has_leading_zeros(texts)


def has_leading_zeros(texts: "polars.Series") -> bool:
    """Whether a text in a column is a whole number with leading zeros."""
    return bool(texts.str.contains(_PADDED).any())


def numbers_in(texts: "polars.Series") -> "polars.Series | None":
    """The numbers in a column that was read as texts only because of leading zeros; None for other columns."""
    import polars

    has_no_mark = not texts.str.contains(_MARKED).any()
    return _cast(texts.str.strip_chars(), polars.Float64) if has_no_mark else None


def recognize(columns: Iterable["polars.Series"]) -> set[Marks]:
    """The possible formats of the numbers of a table, by all columns of texts that hold only numbers."""
    possible = set(_ALL)
    for texts in columns:
        fitting = _fitting(texts) if texts.null_count() < len(texts) else []
        possible = possible.intersection(fitting) if fitting else possible
    return possible


def _fitting(texts: "polars.Series") -> list[Marks]:
    """The possible formats of the numbers in a column of texts."""
    alone = [decimal for decimal in DECIMALS if Marks(decimal).fit(texts)]
    return [marks for marks in _ALL if marks.decimal in alone or (marks.thousands and marks.fit(texts))]


def not_numbers(texts: "polars.Series") -> "polars.Series":
    """The texts that are numbers in none of the formats."""
    import polars

    there = texts.drop_nulls()
    numbers = there.str.strip_chars().cast(polars.Float64, strict=False)
    return there.filter(~there.str.contains(_ANY) & numbers.is_null())


def explain(texts: "polars.Series") -> str | None:
    """The reason why a column of only numbers was read as texts, as the end of a sentence.

    It is None if the column holds other texts, or names without any mark, such as 00501.
    """
    there = texts.drop_nulls()
    marked = there.filter(there.str.contains(_MARKED))
    if marked.is_empty() or not not_numbers(there).is_empty():
        return None
    ways = _simplest(_fitting(there))
    if not ways:
        return "holds numbers that are written in several ways: write all of them in one way."
    example = marked.filter(~marked.str.contains(Marks(ways[0].decimal).pattern))[0] if ways[0].thousands else marked[0]
    kinds = ["thousands separators" if marks.thousands else f"a decimal {DECIMALS[marks.decimal]}" for marks in ways]
    return (
        f"holds {example!r}, which looks like a number with {' or '.join(dict.fromkeys(kinds))}: "
        f"{' or '.join(marks.options for marks in ways)} reads it."
    )


def _simplest(ways: list[Marks]) -> list[Marks]:
    """The formats without needless marks.

    A thousands separator is needless if the same format without it is possible. A decimal comma beside a thousands
    separator is needless if a decimal point is possible.
    """
    needless = lambda marks: (
        marks.thousands is not None
        and (Marks(marks.decimal) in ways or (marks.decimal == "," and Marks(".", marks.thousands) in ways))
    )
    return [marks for marks in ways if not needless(marks)]
