"""Arrays of a file of rows, checked: whatever is wrong with them is told with file, array, place and remedy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats
from mpitrain.data.problems import Array, nearest, position_of, problem, shown
from mpitrain.data.readers import open_reader
from mpitrain.errors import DataError

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """The group of each row.

    Attributes
    ----------
    path : str
        File, for messages.
    codes : (rows,) int64
        Position of the row's group in the lists.
    names : list of str
        What users call the groups.
    numbers : list of int
        What the file calls them.
    """

    path: str
    codes: Codes
    names: list[str]
    numbers: list[int]

    def find(self, wanted: Sequence[int | str], key: str) -> list[int]:
        """Turn names, or numbers of the file, into positions; DataError where there is no such group."""
        by_text = {str(number): position for position, number in enumerate(self.numbers)}
        by_text |= {name: position for position, name in enumerate(self.names)}
        by_number = {number: position for position, number in enumerate(self.numbers)}
        found = [by_number.get(group) if isinstance(group, int) else by_text.get(group) for group in wanted]
        return [
            position_of(str(group), self.names, key, self.path) if position is None else position
            for group, position in zip(wanted, found, strict=True)
        ]


@dataclass(frozen=True)
class Labels:
    """The class of each row.

    Attributes
    ----------
    codes : (rows,) int64
        From 0.
    names : list of str
        What the file calls the classes; empty where it only numbers them.
    """

    codes: Codes
    names: list[str]


class Table:
    """Row arrays of one file. Each is read when asked for, and not kept.

    Parameters
    ----------
    path : str
        File: .npz, .h5, .hdf5 or .csv.

    Raises
    ------
    DataError
        Here where the file is missing, unreadable or of no such format; by every method where the array is missing or
        of the wrong kind, or where the file is no longer what it was here.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self._ahead: dict[str, Array] = {}
        self._stamp = self._look()
        self._reader = open_reader(self._path)
        self._check_unchanged()
        twice = next((name for name in self._reader.names if name and self._reader.names.count(name) > 1), None)
        if twice is not None:
            raise self.fail(twice, "expected one of this name, got several", "rename all but one")

    def fail(self, name: str, what: str, remedy: str) -> DataError:
        """Build the exception for something wrong with an array."""
        return problem(self._path, f'{self._reader.noun} "{name}"', what, remedy)

    def place(self, row: object) -> str:
        """Say where a row is, for messages."""
        return self._reader.place(int(str(row)))

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
        if name not in names:
            near = nearest(name, names)
            remedy = f'did you mean data.{key} = "{near}"?' if near else f"set data.{key}"
            raise self.fail(name, f"not in the file, which has {shown(names)}", remedy)
        array = self._ahead[name] if name in self._ahead else self._read([name])[name]
        return self._decoded(name, array) if array.dtype.kind in "SO" else array

    def read_beside(self, name: str, sibling: str, key: str) -> Array | None:
        """Read the array ``sibling`` of the folder in which ``name`` is, else of the whole file; None without one."""
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

    def read_labels(self, name: str, rows: int, x: str) -> Labels:
        """Read one class a row: a number 0, 1, …, or a text; texts become classes in sorted order."""
        array = self.read(name, "y")
        if array.dtype.kind == "U" and array.ndim == 1:
            self.check_rows(name, len(array), x, rows)
            self._refuse_blank(name, array)
            texts, codes = np.unique(array, return_inverse=True)
            return Labels(codes, [str(text) for text in texts])
        array = self.check_numbers(name, array, "y", 1)
        self.check_rows(name, len(array), x, rows)
        values = self.to_finite(name, array)
        names = self._class_names(name)
        wrong = (values < 0) | (values != np.floor(values)) | ((values >= len(names)) if names else False)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            classes = f"a class 0 to {len(names) - 1} as the file names {len(names)}" if names else "a class 0, 1, …"
            what = f"{self.place(row)}: expected {classes}, got {array[row]} ({wrong.sum()} of {rows} values)"
            remedy = "name every class" if names and values[row] >= len(names) else "number the classes from 0"
            raise self.fail(name, what, f'{remedy}, or set model.task = "forecast"')
        return Labels(array.astype(np.int64), names)

    def read_groups(self, name: str, key: str, rows: int, x: str) -> Groups:
        """Read the group of each row, as ``data.<key>`` names it; one group "all" where ``name`` is empty."""
        if not name:
            return Groups(str(self._path), np.zeros(rows, np.int64), ["all"], [0])
        array = self.read(name, key)
        if array.ndim != 1 or array.dtype.kind not in "iuU":
            place = _first_not_whole(array)
            where = f", {self.place(place)}: got {array[place]}" if place is not None else ""
            what = f"expected an integer or a text a row, got dtype {array.dtype}, shape {array.shape}{where}"
            raise self.fail(name, what, f"name another data.{key}")
        self.check_rows(name, len(array), x, rows)
        if array.dtype.kind == "U":
            self._refuse_blank(name, array)
        present, codes = np.unique(array, return_inverse=True)
        if array.dtype.kind == "U":
            return Groups(str(self._path), codes, [str(text) for text in present], list(range(len(present))))
        numbers = [int(number) for number in present]
        return Groups(str(self._path), codes, self._group_names(name, key, numbers), numbers)

    def _class_names(self, label: str) -> list[str]:
        """Names of the classes, from the array "<label>_names" or "classes"; none without one."""
        for sibling in (f"{label.rpartition('/')[2]}_names", "classes"):
            array = self.read_beside(label, sibling, "y")
            if array is not None:
                return [str(text) for text in array]
        return []

    def _group_names(self, name: str, key: str, numbers: list[int]) -> list[str]:
        sibling = f"{name.rpartition('/')[2]}_names"
        array = self.read_beside(name, sibling, key)
        if array is None:
            return [str(number) for number in numbers]
        strays = [number for number in numbers if not 0 <= number < len(array)]
        if strays:
            what = f'expected a name for each code of "{name}", got {len(array)} names and code {strays[0]}'
            raise self.fail(sibling, what, "name every group, or leave the array out")
        return [str(array[number]) for number in numbers]

    def _to_name(self, name: str) -> str:
        """Strip the slash that a path inside an HDF5 file may begin with."""
        return name if name in self._reader.names else name.strip("/")

    def _read(self, names: Sequence[str]) -> dict[str, Array]:
        try:
            return self._reader.read(names)
        finally:
            self._check_unchanged()

    def _look(self) -> tuple[int, int]:
        """Note the size and the time of the file, and that it may be read."""
        try:
            if self._path.is_file():
                with self._path.open("rb"):
                    status = self._path.stat()
                return status.st_size, status.st_mtime_ns
        except OSError as error:
            raise DataError(
                f'data.path: "{self._path}" cannot be read ({error.strerror}); make it readable for the ranks\' user'
            ) from None
        raise DataError(
            f'data.path: there is no file "{self._path}" (looked from {Path.cwd()}); '
            "set data.path to a file that this machine can see"
        )

    def _check_unchanged(self) -> None:
        """Refuse a file that somebody writes to: its rows may be of two versions."""
        now = self._look()
        if now != self._stamp:
            what = f"changed while it was read (from {self._stamp[0]} to {now[0]} bytes, or only in time)"
            raise problem(self._path, "", what, "start again when nothing writes to it any more")

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

    def _refuse_blank(self, name: str, texts: Array) -> None:
        blank = np.flatnonzero(texts == "")
        if len(blank):
            what = f"{self.place(blank[0])}: expected a text, got nothing ({len(blank)} of {len(texts)} values)"
            raise self.fail(name, what, "fill in or remove these rows")


def _is_number(text: str) -> bool:
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True


def _first_not_whole(array: Array) -> int | None:
    """Row of the first value of a float array that is no integer."""
    if array.ndim != 1 or array.dtype.kind != "f":
        return None
    odd = np.flatnonzero(~(np.floor(array) == array))
    return int(odd[0]) if len(odd) else None
