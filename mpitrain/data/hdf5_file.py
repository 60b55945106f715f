"""Arrays of an HDF5 file, named by their path in it."""

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from mpitrain.data.problems import Array, problem
from mpitrain.errors import DataError

_BROKEN = (OSError, RuntimeError, KeyError, ValueError)
"""What h5py raises on damaged files, unknown filters, and types that numpy does not have."""


class Hdf5File:
    """Reads an HDF5 file (a `Reader`); raises DataError where it is none, or is cut short.

    Every read opens the file and closes it again: a handle that a forked process shares returns wrong rows. It is
    opened without a lock, which the file systems of clusters may not have. A link to nothing is named as an array is,
    and harms none but those who read it.
    """

    noun = "array"
    rows_only = False

    def __init__(self, path: Path) -> None:
        self._path = path
        links: dict[str, object] = {}
        try:
            with h5py.File(path, "r", locking=False) as file:
                file.visititems_links(links.__setitem__)
                targets = {name: _dangling_target(file, name, link) for name, link in links.items()}
                self._dangling = {name: target for name, target in targets.items() if target}
                self.names = [name for name in links if name in self._dangling or _is_array(file, name)]
        except _BROKEN as error:
            raise DataError(
                f'data.path: "{path}" is not a whole HDF5 file ({error}); write it with h5py, or copy it again'
            ) from None

    def read(self, wanted: Sequence[str]) -> dict[str, Array]:
        """Read arrays."""
        return {name: self._read(name) for name in wanted}

    def place(self, row: int) -> str:
        """Say where a row is."""
        return f"row {row}"

    def _read(self, name: str) -> Array:
        where = f'{self.noun} "{name}"'
        if name in self._dangling:
            what = f"is a link to nothing ({self._dangling[name]})"
            raise problem(self._path, where, what, "restore what it links to, or name another array")
        try:
            with h5py.File(self._path, "r", locking=False) as file:
                dataset = file[name]
                absent = self._absent_source(dataset)
                values = dataset[()]
        except _BROKEN as error:
            raise problem(self._path, where, f"cannot be read ({error})", "copy or write the file again") from None
        if absent is not None:
            raise problem(self._path, where, f'its values lie in "{absent}", which is missing', "copy that file too")
        if isinstance(values, h5py.Empty):
            raise problem(self._path, where, "expected values, got an empty data set without a shape", "fill it")
        array: Array = np.asarray(values)
        return array

    def _absent_source(self, dataset: h5py.Dataset) -> str | None:
        """Name a file that a virtual data set needs and that is not there: its rows would read as zeros."""
        if not dataset.is_virtual:
            return None
        sources = {source.file_name for source in dataset.virtual_sources()} - {"."}
        return next((name for name in sorted(sources) if not (self._path.parent / name).exists()), None)


def _is_array(file: h5py.File, name: str) -> bool:
    return file.get(name, getclass=True) is h5py.Dataset


def _dangling_target(file: h5py.File, name: str, link: object) -> str:
    """Say where a link by path leads that leads nowhere, or round in a circle; empty for all others."""
    if not isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        return ""
    try:
        _is_array(file, name)
    except _BROKEN:
        beyond = f' in the file "{link.filename}"' if isinstance(link, h5py.ExternalLink) else ""
        return f'to "{link.path}"{beyond}'
    return ""
