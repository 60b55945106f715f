"""The class and the group of each row of a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.problems import Array, position_of, repeated
from mpitrain.data.table import Table

Codes = npt.NDArray[np.int64]

_MANY = 1000
_SPARSE = 10
"""More classes than the first, and so many times more than labels: these are no numbers of classes."""


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


def read_labels(table: Table, name: str, rows: int, x: str) -> Labels:
    """Read one class a row: a number 0, 1, …, or a text; texts become classes in sorted order."""
    array = table.read(name, "y")
    if array.dtype.kind == "U" and array.ndim == 1:
        table.check_rows(name, len(array), x, rows)
        _refuse_blank(table, name, array)
        texts, codes = np.unique(array, return_inverse=True)
        return Labels(codes, [str(text) for text in texts])
    array = table.check_numbers(name, array, "y", 1)
    table.check_rows(name, len(array), x, rows)
    values = table.to_finite(name, array)
    names = _class_names(table, name)
    wrong = (values < 0) | (values != np.floor(values)) | ((values >= len(names)) if names else False)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        classes = f"a class 0 to {len(names) - 1} as the file names {len(names)}" if names else "a class 0, 1, …"
        what = f"{table.place(row)}: expected {classes}, got {array[row]} ({wrong.sum()} of {rows} values)"
        remedy = "name every class" if names and values[row] >= len(names) else "number the classes from 0"
        raise table.fail(name, what, f'{remedy}, or set model.task = "forecast"')
    if not names:
        _refuse_sparse(table, name, array)
    return Labels(array.astype(np.int64), names)


def read_groups(table: Table, name: str, key: str, rows: int, x: str) -> Groups:
    """Read the group of each row, as ``data.<key>`` names it; one group "all" where ``name`` is empty."""
    if not name:
        return Groups(str(table.path), np.zeros(rows, np.int64), ["all"], [0])
    array = table.read(name, key)
    if array.ndim != 1 or array.dtype.kind not in "iuU":
        place = _first_not_whole(array)
        where = f", {table.place(place)}: got {array[place]}" if place is not None else ""
        what = f"expected an integer or a text a row, got dtype {array.dtype}, shape {array.shape}{where}"
        raise table.fail(name, what, f"write 64-bit integers or texts, or name another data.{key}")
    table.check_rows(name, len(array), x, rows)
    if array.dtype.kind == "U":
        _refuse_blank(table, name, array)
    present, codes = np.unique(array, return_inverse=True)
    if array.dtype.kind == "U":
        return Groups(str(table.path), codes, [str(text) for text in present], list(range(len(present))))
    numbers = [int(number) for number in present]
    return Groups(str(table.path), codes, _group_names(table, name, key, numbers), numbers)


def _class_names(table: Table, label: str) -> list[str]:
    """Names of the classes, from the array "<label>_names" or "classes"; none without one."""
    for sibling in (f"{label.rpartition('/')[2]}_names", "classes"):
        array = table.read_beside(label, sibling, "y")
        if array is not None:
            return [str(text) for text in array]
    return []


def _group_names(table: Table, name: str, key: str, numbers: list[int]) -> list[str]:
    sibling = f"{name.rpartition('/')[2]}_names"
    array = table.read_beside(name, sibling, key)
    if array is None:
        return [str(number) for number in numbers]
    strays = [number for number in numbers if not 0 <= number < len(array)]
    if strays:
        what = f'expected a name for each code of "{name}", got {len(array)} names and code {strays[0]}'
        raise table.fail(sibling, what, "name every group, or leave the array out")
    names = [str(array[number]) for number in numbers]
    twice = repeated(names)
    if twice is not None:
        what = f'expected one code a name of "{name}", got several for "{twice}"'
        raise table.fail(sibling, what, "name every group once, or give its rows the same code")
    return names


def _refuse_sparse(table: Table, name: str, array: npt.NDArray[Any]) -> None:
    """Refuse whole numbers that can be no classes, such as times; int64 holds all others."""
    if not len(array) or array.max() < _MANY:
        return
    labels = len(np.unique(array))
    large = np.flatnonzero(array >= max(_MANY, _SPARSE * labels))
    if len(large):
        what = (
            f"{table.place(large[0])}: expected a class 0, 1, …, got {array[large[0]]} "
            f"({labels} different labels in {len(array)} rows)"
        )
        remedy = 'number the classes from 0 without gaps, write them as text, or set model.task = "forecast"'
        raise table.fail(name, what, remedy)


def _refuse_blank(table: Table, name: str, texts: Array) -> None:
    blank = np.flatnonzero(texts == "")
    if len(blank):
        what = f"{table.place(blank[0])}: expected a text, got nothing ({len(blank)} of {len(texts)} values)"
        raise table.fail(name, what, "fill in or remove these rows")


def _first_not_whole(array: Array) -> int | None:
    """Row of the first value of a float array that is no integer of 64 bits."""
    if array.ndim != 1 or array.dtype.kind != "f":
        return None
    odd = np.flatnonzero(~((np.floor(array) == array) & (abs(array) < 2.0**63)))
    return int(odd[0]) if len(odd) else None
