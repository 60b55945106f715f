"""Columns of a .csv file with a header row."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from mpitrain.data.problems import Array, problem
from mpitrain.errors import DataError

_DELIMITERS = ",;\t"
_CHUNK = 50_000
"""Rows that are in memory as text at one time."""

Record = list[str]


class _Records(Protocol):
    """What ``csv.reader`` returns: a type without a public name."""

    line_num: int

    def __iter__(self) -> Iterator[Record]: ...

    def __next__(self) -> Record: ...


class CsvFile:
    """Reads a text file whose first row names the columns (a `Reader`); raises DataError where it has no such row.

    Fields are separated by commas, semicolons or tabs, whichever divides the header row best, and may be quoted. The
    encoding is UTF-8. A column is of integers, of numbers where not all of its fields are integers or some are empty
    or blank (NaN), or else of text.
    """

    noun = "column"
    rows_only = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._delimiter = max(_DELIMITERS, key=self._fitness)
        with self._records() as records:
            header = next(records, [])
        if not header:
            what = "expected a header row with the names of the columns, got " + (
                "an empty first line" if path.stat().st_size else "an empty file"
            )
            raise problem(path, "", what, "write the names of the columns into the first line")
        self.names = [name.strip() for name in header]

    def read(self, wanted: Sequence[str]) -> dict[str, Array]:
        """Read columns in one pass over the file; in a second one those that turn out to be of text half-way."""
        columns, mixed = self._pass(wanted, as_text=False)
        if mixed:
            columns |= self._pass(mixed, as_text=True)[0]
        return columns

    def place(self, row: int) -> str:
        """Say where a row is; the row after the header is 0, and a row may have several lines."""
        with self._records() as records:
            for _ in islice(records, row + 2):
                pass
            return f"row {row} (line {records.line_num})"

    def _pass(self, wanted: Sequence[str], *, as_text: bool) -> tuple[dict[str, Array], list[str]]:
        """Read columns, and name those that are text in some chunks only."""
        chunks: dict[str, list[Array]] = {name: [] for name in wanted}
        seen = 0
        for rows in self._chunks():
            for name, parts in chunks.items():
                place = self.names.index(name)
                texts = [row[place] for row in rows]
                self._refuse_nul(name, texts, seen)
                parts.append(_to_text(texts) if as_text else _to_array(texts))
            seen += len(rows)
        kinds = {name: {part.dtype.kind for part in parts} for name, parts in chunks.items()}
        mixed = [name for name, found in kinds.items() if "U" in found and len(found) > 1]
        empty: list[Array] = [np.empty(0)]
        return {name: np.concatenate(parts or empty) for name, parts in chunks.items() if name not in mixed}, mixed

    def _chunks(self) -> Iterator[list[Record]]:
        """Read some rows at a time, each with a field a column; empty lines at the end are none."""
        width, seen = len(self.names), 0
        with self._records() as records:
            next(records, None)
            while rows := list(islice(records, _CHUNK)):
                if set(map(len, rows)) != {width}:
                    odd = next(place for place, row in enumerate(rows) if len(row) != width)
                    if any(rows[odd:]) or any(records):
                        raise self._ragged(seen + odd, rows[odd])
                    rows = rows[:odd]
                seen += len(rows)
                yield rows

    @contextmanager
    def _records(self) -> Iterator[_Records]:
        """Open the file, and tell what is wrong with its text."""
        try:
            with self._path.open(encoding="utf-8-sig", newline="") as file:
                yield csv.reader(file, delimiter=self._delimiter, skipinitialspace=True, strict=True)
        except UnicodeDecodeError:
            raise self._not_utf8() from None
        except csv.Error as error:
            raise self._not_csv(error) from None
        except OSError as error:
            raise problem(self._path, "", f"cannot be read ({error})", "copy or write the file again") from None

    def _fitness(self, delimiter: str) -> tuple[bool, int]:
        """Rate a delimiter: whether the first two rows have equally many fields, more than one; and how many."""
        try:
            with self._path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
                rows = list(islice(csv.reader(file, delimiter=delimiter, skipinitialspace=True), 2))
        except (csv.Error, OSError):  # which reading the header tells
            return False, 0
        widths = [len(row) for row in rows]
        return len(set(widths)) == 1 and widths[0] > 1, max(widths, default=0)

    def _refuse_nul(self, name: str, texts: list[str], before: int) -> None:
        """Refuse the character U+0000, which numpy cuts off the end of a text; ``before`` rows were read already."""
        if "\0" not in "".join(texts):
            return
        odd = next(row for row, text in enumerate(texts) if "\0" in text)
        what = f"{self.place(before + odd)}: expected a number or a text, got {texts[odd][:40]!r} (a NUL character)"
        raise problem(self._path, f'{self.noun} "{name}"', what, "remove it, or copy or write the file again")

    def _ragged(self, row: int, record: Record) -> DataError:
        width, got = len(self.names), len(record) or "an empty line"
        what = f"{self.place(row)}: expected {width} fields as in the header, got {got}"
        remedy = "complete or remove this row; quote a text that holds the delimiter"
        return problem(self._path, "", f"{what} (fields are divided by {self._delimiter!r})", remedy)

    def _not_csv(self, error: csv.Error) -> DataError:
        what, remedy = f"not CSV ({error})", "close the quotes, or remove them"
        if "field limit" in str(error):
            what = f"a field has more than {csv.field_size_limit()} characters"
            remedy = "close the quotes if one is left open, or shorten the text"
        return problem(self._path, f"line {self._line_of_error()}", what, remedy)

    def _not_utf8(self) -> DataError:
        """Find the first byte that is not UTF-8."""
        offset = number = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    what = f"byte {offset + error.start}: expected UTF-8 text, got 0x{line[error.start]:02x}"
                    return problem(self._path, f"line {number}", what, "save the file in the encoding UTF-8")
                offset += len(line)
        return problem(self._path, f"line {number}", "expected UTF-8 text", "save the file in the encoding UTF-8")

    def _line_of_error(self) -> int:
        """Find the line at which the first row begins that cannot be parsed."""
        begin = 1
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            records = csv.reader(file, delimiter=self._delimiter, skipinitialspace=True, strict=True)
            try:
                for _ in records:
                    begin = records.line_num + 1
            except csv.Error:
                pass
        return begin


def _to_array(texts: list[str]) -> Array:
    """Convert fields to the narrowest of int64, float64 (an empty or blank field is NaN) and text that holds all."""
    if "_" in "".join(texts):  # which Python allows in numbers
        return _to_text(texts)
    for number, dtype in ((int, np.int64), (float, np.float64)):
        try:
            return np.fromiter(map(number, texts), dtype, len(texts))
        except (ValueError, OverflowError):
            pass
    try:
        return np.fromiter(map(float, [text.strip() or "nan" for text in texts]), np.float64, len(texts))
    except ValueError:
        return _to_text(texts)


def _to_text(texts: list[str]) -> Array:
    return np.array([text.strip() for text in texts], np.str_)
