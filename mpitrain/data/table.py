"""Arrays of a file of rows, checked: whatever is wrong with them is told with file, array, place and remedy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats
from mpitrain.data.problems import Array, nearest, problem, repeated, shown, stamp_of
from mpitrain.data.readers import open_reader
from mpitrain.errors import DataError


class Table:
    """Row arrays of one file. Each is read when asked for, and not kept.

    Parameters
    ----------
    path : str
        File: .npz, .h5, .hdf5 or .csv.

    Attributes
    ----------
    path : Path
        File.

    Raises
    ------
    DataError
        Here where the file is missing, unreadable or of no such format; by every method where the array is missing or
        of the wrong kind, or where the file is no longer what it was here.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()
        self._ahead: dict[str, Array] = {}
        self._stamp = stamp_of(self.path)
        self._reader = open_reader(self.path)
        self._check_unchanged()
        twice = repeated([name for name in self._reader.names if name])
        if twice is not None:
            raise self.fail(twice, "expected one of this name, got several", "rename all but one")

    def fail(self, name: str, what: str, remedy: str) -> DataError:
        """Build the exception for something wrong with an array."""
        return problem(self.path, f'{self._reader.noun} "{name}"', what, remedy)

    def place(self, row: int | np.integer[Any]) -> str:
        """Say where a row is, for messages."""
        return self._reader.place(int(row))

    @contextmanager
    def reading_ahead(self, names: Sequence[str]) -> Iterator[None]:
        """Hold these arrays in memory inside the block: one pass over the file, where its format reads in passes."""
        present = [name for name in dict.fromkeys(self._to_name(name) for name in names) if name in self._reader.names]
        self._ahead = self._read(present)
        try:
            yield
        finally:
            self._ahead = {}

    def read(self, name: str, key: str) -> Array:
        """Read an array that the configuration names in ``data.<key>``; bytes are decoded to text."""
        name, names = self._to_name(name), self._reader.names
        inside = [other for other in names if other.startswith(f"{name}/")]
        if name not in names and inside:
            what = f"expected an array, got a group, which holds {shown(inside)}"
            raise self.fail(name, what, f'name one of them, such as data.{key} = "{inside[0]}"')
        if name not in names:
            near = nearest(name, names)
            remedy = f'did you mean data.{key} = "{near}"?' if near else f"set data.{key}"
            raise self.fail(name, f"not in the file, which has {shown(names)}", remedy)
        array = self._ahead[name] if name in self._ahead else self._read([name])[name]
        return self._decoded(name, array) if array.dtype.kind in "SO" else array

    def read_beside(self, name: str, sibling: str, key: str) -> Array | None:
        """Read the array ``sibling`` of the folder in which ``name`` is, else of the whole file; None without one."""
        if self._reader.rows_only:
            return None
        folder = self._to_name(name).rpartition("/")[0]
        places = [f"{folder}/{sibling}" if folder else sibling, sibling]
        found = next((place for place in places if place in self._reader.names), None)
        return None if found is None else self.read(found, key).ravel()

    def read_numbers(self, name: str, key: str, ndim: int) -> Array:
        """Read an array of ``ndim`` dimensions of bool, integers or floats."""
        return self.check_numbers(name, self.read(name, key), key, ndim)

    def check_numbers(self, name: str, array: Array, key: str, ndim: int) -> Array:
        """Refuse an array of another number of dimensions, or of anything but numbers."""
        if array.ndim != ndim:
            kind = "a matrix [rows, columns]" if ndim == 2 else "one value a row"
            raise self.fail(
                name, f"expected {kind}, got shape {array.shape}", f"reshape it, or name another data.{key}"
            )
        if array.dtype.kind == "U":
            raise self._text_among_numbers(name, array)
        if array.dtype.kind not in "biuf":
            raise self.fail(name, f"expected numbers, got dtype {array.dtype}", "save it with a numeric dtype")
        return array

    def check_rows(self, name: str, rows: int, other: str, expected: int) -> None:
        """Refuse arrays of different lengths."""
        if rows != expected:
            what = f'expected {expected} rows as in "{other}", got {rows}'
            raise self.fail(name, what, "every array needs one entry a row")

    def to_finite(self, name: str, array: Array) -> Floats:
        """Convert the values of a row array to float32, and refuse the first one that is not finite there."""
        with np.errstate(over="ignore"):
            values = array.astype(np.float32)
        bad = ~np.isfinite(values)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise self.not_finite(name, self.place(row), array[row], bad)
        return values

    def not_finite(self, name: str, place: str, got: object, bad: npt.NDArray[np.bool_]) -> DataError:
        """Build the exception for values that are missing, infinite or too large; ``bad`` marks them all."""
        what = f"{place}: expected a finite float32, got {got} ({bad.sum()} of {bad.size} values)"
        return self.fail(name, what, 'repair or remove these rows, or set data.missing = "zero" for NaN in x')

    def _to_name(self, name: str) -> str:
        """Strip the slash that a path inside an HDF5 file may begin with."""
        return name if name in self._reader.names else name.strip("/")

    def _read(self, names: Sequence[str]) -> dict[str, Array]:
        try:
            return self._reader.read(names)
        finally:
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Refuse a file that somebody writes to: its rows may be of two versions."""
        now = stamp_of(self.path)
        if now != self._stamp:
            what = f"changed while it was read (from {self._stamp[0]} to {now[0]} bytes, or only in time)"
            raise problem(self.path, "", what, "start again when nothing writes to it any more")

    def _decoded(self, name: str, array: Array) -> Array:
        """Decode bytes to text; arrays of other objects stay as they are."""
        texts: list[str] = []
        for row, raw in enumerate(array.ravel().tolist()):
            if not isinstance(raw, bytes):
                return array
            try:
                texts.append(raw.decode().strip())
            except UnicodeDecodeError as error:
                what = f"{self.place(row)}: expected UTF-8 text, got {raw[:40]!r} (byte {error.start} of it)"
                raise self.fail(name, what, "write it as UTF-8") from None
        return np.array(texts, np.str_).reshape(array.shape)

    def _text_among_numbers(self, name: str, array: Array) -> DataError:
        """Build the exception for text in a place for numbers: the first one that is no number."""
        texts = [str(text) for text in array.ravel()]
        odd = [position for position, text in enumerate(texts) if not _is_number(text)]
        what = f"expected numbers, got dtype {array.dtype}"
        if odd:
            row, *column = np.unravel_index(odd[0], array.shape)
            beside = f", column {column[0]}" if column else ""
            got = texts[odd[0]][:40]
            what = f'{self.place(row)}{beside}: expected a number, got "{got}" ({len(odd)} of {len(texts)} values)'
        return self.fail(name, what, "write numbers (with a point), and nothing or NaN where a value is missing")


def _is_number(text: str) -> bool:
    try:
        float(text or "nan")
    except ValueError:
        return False
    return "_" not in text
