"""Arrays of an .npz archive."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpitrain.data.problems import Array, problem
from mpitrain.errors import DataError


class NpzFile:
    """Reads an archive as ``numpy.savez`` writes it (a `Reader`); raises DataError where it is none."""

    noun = "array"
    rows_only = False

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self.names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(
                f'data.path: "{path}" is not an .npz file ({error}); write it with numpy.savez_compressed'
            ) from None

    def read(self, wanted: Sequence[str]) -> dict[str, Array]:
        """Read arrays; one that holds Python objects is refused."""
        return {name: self._read(name) for name in wanted}

    def place(self, row: int) -> str:
        """Say where a row is."""
        return f"row {row}"

    def _read(self, name: str) -> Array:
        try:
            with np.load(self._path, allow_pickle=False) as file:
                array: Array = file[name]
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            what, remedy = f"cannot be read ({error})", "copy or write the file again"
            if "allow_pickle" in str(error):
                what = "expected numbers, got Python objects (a pickle), which are never loaded"
                remedy = "save it with a numeric dtype"
            raise problem(self._path, f'{self.noun} "{name}"', what, remedy) from None
        return array
