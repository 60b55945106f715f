"""Arrays of an .npz file, checked: whatever is wrong with them is told with file, array, place and remedy."""

import difflib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats
from mpitrain.errors import DataError

_SHOWN = 20

Labels = npt.NDArray[np.int64]


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
    codes: Labels
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


class Table:
    """Row arrays of one .npz file. Each is read when asked for, and not kept.

    Parameters
    ----------
    path : str
        File.

    Raises
    ------
    DataError
        Here where the file is missing or is no .npz; by every method where the array is missing or of the wrong kind.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        if not self._path.is_file():
            raise DataError(
                f'data.path: there is no file "{self._path}" (looked from {Path.cwd()}); '
                "set data.path to an .npz file that this machine can see"
            )
        try:
            with zipfile.ZipFile(self._path) as archive:
                self.names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(
                f'data.path: "{self._path}" is not an .npz file ({error}); write it with numpy.savez_compressed'
            ) from None

    def fail(self, array: str, problem: str, remedy: str) -> DataError:
        """Build the exception for something wrong with an array."""
        return DataError(f'data: "{self._path}", array "{array}": {problem}; {remedy}')

    def read(self, name: str, key: str) -> npt.NDArray[np.generic]:
        """Read an array that the configuration names in ``data.<key>``."""
        if name not in self.names:
            raise self.fail(name, f"not in the file, which has {self.names}", _nearest(name, self.names, key))
        try:
            with np.load(self._path, allow_pickle=False) as file:
                array: npt.NDArray[np.generic] = file[name]
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            if "allow_pickle" in str(error):
                problem = "expected numbers, got Python objects (a pickle), which are never loaded"
                raise self.fail(name, problem, "save it with a numeric dtype") from None
            raise self.fail(name, f"cannot be read ({error})", "copy or write the file again") from None
        return array

    def read_numbers(self, name: str, key: str, ndim: int) -> npt.NDArray[np.generic]:
        """Read an array of ``ndim`` dimensions of bool, integers or floats."""
        return self._check_numbers(name, self.read(name, key), key, ndim)

    def _check_numbers(self, name: str, array: npt.NDArray[np.generic], key: str, ndim: int) -> npt.NDArray[np.generic]:
        if array.dtype.kind not in "biuf":
            raise self.fail(name, f"expected numbers, got dtype {array.dtype}", "save it with a numeric dtype")
        if array.ndim != ndim:
            kind = "a matrix [rows, columns]" if ndim == 2 else "one value a row"
            raise self.fail(
                name, f"expected {kind}, got shape {array.shape}", f"reshape it, or name another data.{key}"
            )
        return array

    def read_features(self, config_x: str, *, missing_zero: bool) -> tuple[list[str], Floats]:
        """Read the input columns.

        Parameters
        ----------
        config_x : str
            A matrix [rows, columns], whose columns the array "columns" may name, or 1-D arrays separated by commas.
        missing_zero : bool
            Replace NaN by 0.

        Returns
        -------
        names : list of str
            One a column.
        x : (rows, columns) float32
            All finite.
        """
        parts = [part.strip() for part in config_x.split(",") if part.strip()]
        first = self.read(parts[0] if parts else config_x, "x")
        if len(parts) == 1 and first.ndim != 1:
            matrix = self._check_numbers(parts[0], first, "x", 2)
            return self._column_names(parts[0], matrix.shape[1]), self.to_finite(parts[0], matrix, missing_zero)
        columns = [self.to_finite(part, self.read_numbers(part, "x", 1), missing_zero) for part in parts]
        for part, column in zip(parts, columns, strict=True):
            self.check_rows(part, len(column), parts[0], len(columns[0]))
        return parts, np.stack(columns, axis=1)

    def to_finite(self, name: str, array: npt.NDArray[np.generic], missing_zero: bool = False) -> Floats:
        """Convert numbers to float32, and refuse the first one that is not finite there."""
        with np.errstate(over="ignore"):
            values = array.astype(np.float32)
        if missing_zero:
            values[np.isnan(values)] = 0
        bad = ~np.isfinite(values)
        if bad.any():
            place = np.argwhere(bad)[0]
            column = f', column "{self._column_names(name, array.shape[1])[place[1]]}"' if array.ndim == 2 else ""
            problem = (
                f"row {place[0]}{column}: expected a finite float32, got {array[tuple(place)]} "
                f"({bad.sum()} of {bad.size} values)"
            )
            raise self.fail(name, problem, 'repair or remove these rows, or set data.missing = "zero" for NaN in x')
        return values

    def read_labels(self, name: str, rows: int, x: str) -> Labels:
        """Read one class 0, 1, … a row: (rows,) int64."""
        array = self.read_numbers(name, "y", 1)
        self.check_rows(name, len(array), x, rows)
        values = self.to_finite(name, array)
        wrong = (values < 0) | (values != np.floor(values))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            problem = f"row {row}: expected a class 0, 1, …, got {array[row]} ({wrong.sum()} of {rows} values)"
            raise self.fail(name, problem, 'number the classes from 0, or set model.task = "forecast"')
        return array.astype(np.int64)

    def read_groups(self, name: str, rows: int, x: str) -> Groups:
        """Read the group of each row; one group "all" where ``name`` is empty."""
        if not name:
            return Groups(str(self._path), np.zeros(rows, np.int64), ["all"], [0])
        array = self.read(name, "group")
        if array.ndim != 1 or array.dtype.kind not in "iuU":
            problem = f"expected an integer or a text a row, got dtype {array.dtype}, shape {array.shape}"
            raise self.fail(name, problem, "name another data.group")
        self.check_rows(name, len(array), x, rows)
        present, codes = np.unique(array, return_inverse=True)
        if array.dtype.kind == "U":
            return Groups(str(self._path), codes, [str(text) for text in present], list(range(len(present))))
        numbers = [int(number) for number in present]
        return Groups(str(self._path), codes, self._group_names(name, numbers), numbers)

    def check_rows(self, name: str, rows: int, other: str, expected: int) -> None:
        """Refuse arrays of different lengths."""
        if rows != expected:
            problem = f'expected {expected} rows as in "{other}", got {rows}'
            raise self.fail(name, problem, "every array needs one entry a row")

    def class_names(self, label: str, count: int) -> list[str]:
        """Names of the classes, from the array "<label>_names" or "classes"; their numbers without one."""
        for name in (f"{label}_names", "classes"):
            if name in self.names:
                texts = [str(text) for text in self.read(name, "y").ravel()]
                if len(texts) < count:
                    raise self.fail(name, f"expected {count} names, got {len(texts)}", "name every class, or none")
                return texts[:count]
        return [str(number) for number in range(count)]

    def _group_names(self, name: str, numbers: list[int]) -> list[str]:
        if f"{name}_names" not in self.names:
            return [str(number) for number in numbers]
        texts = [str(text) for text in self.read(f"{name}_names", "group").ravel()]
        strays = [number for number in numbers if not 0 <= number < len(texts)]
        if strays:
            problem = f'expected a name for each code of "{name}", got {len(texts)} names and code {strays[0]}'
            raise self.fail(f"{name}_names", problem, "name every group, or leave the array out")
        return [texts[number] for number in numbers]

    def _column_names(self, matrix: str, count: int) -> list[str]:
        if "columns" not in self.names:
            return [f"{matrix}[{column}]" for column in range(count)]
        texts = [str(text) for text in self.read("columns", "x").ravel()]
        if len(texts) != count:
            raise self.fail("columns", f'expected {count} names as "{matrix}" has columns, got {len(texts)}', "fix it")
        return texts


def _nearest(name: str, names: list[str], key: str) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f'did you mean data.{key} = "{near[0]}"?' if near else f"set data.{key}"


def position_of(name: str, names: list[str], key: str, path: str) -> int:
    """Find a name, or refuse it with the list and the nearest one."""
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, 1)
    hint = f'did you mean "{near[0]}"?' if near else "use one of these names"
    shown = names if len(names) <= _SHOWN else [*names[:_SHOWN], f"… {len(names) - _SHOWN} more"]
    raise DataError(f'data: "{path}": data.{key}: there is no "{name}" among {shown}; {hint}')
