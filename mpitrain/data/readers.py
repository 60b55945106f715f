"""One way to read a file of rows, whatever its format."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mpitrain.data.csv_file import CsvFile
from mpitrain.data.hdf5_file import Hdf5File
from mpitrain.data.npz_file import NpzFile
from mpitrain.data.problems import Array, problem


class Reader(Protocol):
    """Reads arrays of one file. It keeps no handle open and no rows in memory.

    Attributes
    ----------
    noun : str
        What the format calls an array, for messages.
    rows_only : bool
        Every array has one entry a row, so that none can name the columns, classes or groups of another.
    names : list of str
        All arrays of the file.
    """

    noun: str
    rows_only: bool
    names: list[str]

    def read(self, wanted: Sequence[str]) -> dict[str, Array]:
        """Read arrays of the file, in one pass; raises DataError where one cannot be read."""

    def place(self, row: int) -> str:
        """Say where a row is, for messages."""


FORMATS: dict[str, Callable[[Path], Reader]] = {
    ".npz": NpzFile,
    ".h5": Hdf5File,
    ".hdf5": Hdf5File,
    ".csv": CsvFile,
}
"""By the end of the file's name, in lower case."""


def open_reader(path: Path) -> Reader:
    """Choose the reader by the file's name; raises DataError where there is none or the file is damaged."""
    reader = FORMATS.get(path.suffix.lower())
    if reader is None:
        raise problem(
            path, "", f"expected a name that ends in {', '.join(FORMATS)}", "convert the file, or rename it to its kind"
        )
    return reader(path)
