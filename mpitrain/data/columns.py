"""The columns of a table as the model sees them, before standardization."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.config.flags import COMPARISONS, Flag, parse_flag
from mpitrain.config.schema import DataConfig, Task
from mpitrain.data.problems import Array, position_of, repeated
from mpitrain.data.table import Table
from mpitrain.errors import DataError


@dataclass(frozen=True)
class _Column:
    """Values of every row, and the array of the file that they come from."""

    name: str
    array: str
    values: Array
    in_matrix: bool = False


def split_names(x: str) -> list[str]:
    """List the arrays that ``data.x`` names."""
    return [part.strip() for part in x.split(",") if part.strip()] or [x]


def read_columns(table: Table, config: DataConfig) -> tuple[list[str], Floats]:
    """Read the input columns: flags compared, NaN refused or zero, no logarithms taken yet.

    Returns
    -------
    names : list of str
        One a column.
    x : (rows, C) float32
        All finite.
    """
    flags = [parse_flag(text) for text in config.flags]
    raw = _read_raw(table, config.x)
    twice = repeated([column.name for column in raw])
    if twice is not None:
        what = f'expected one column "{twice}", got several'
        raise table.fail("columns" if raw[0].in_matrix else twice, what, "name every column of data.x once")
    columns = _with_flags(raw, flags, config.path)
    names = [column.name for column in columns]
    return names, _to_matrix(table, columns, missing_zero=config.missing == "zero")


def take_logarithms(names: list[str], x: Floats, config: DataConfig, task: Task) -> None:
    """Replace the columns of ``data.log1p`` in ``x``; raises DataError where there is no such column."""
    targets = {config.y} - set(names) if task == "forecast" else set()
    wanted = [name for name in config.log1p if name not in targets]
    if "*" in wanted:
        texts = {parse_flag(text).text for text in config.flags}
        wanted = [name for name in names if name not in texts]
    for name in wanted:
        column = position_of(name, names, "log1p", config.path)
        x[:, column] = signed_log1p(x[:, column])


def kept_columns(names: list[str], config: DataConfig) -> list[int]:
    """List the columns that the model sees; raises DataError if none is left."""
    dropped = {position_of(name, names, "drop", config.path) for name in config.drop}
    kept = [column for column in range(len(names)) if column not in dropped]
    if not kept:
        raise DataError(f'data: "{config.path}": data.drop leaves none of the {len(names)} columns; keep at least one')
    return kept


def signed_log1p(values: Floats | Ints) -> Floats:
    """Compute sign(v) ln(1 + abs(v))."""
    out: Floats = np.sign(values) * np.log1p(np.abs(values))
    return out


def _read_raw(table: Table, x: str) -> list[_Column]:
    """Read a matrix, whose columns the array "columns" may name, or one row array a name."""
    parts = split_names(x)
    first = table.read(parts[0], "x")
    if len(parts) == 1 and first.ndim != 1:
        matrix = table.check_numbers(parts[0], first, "x", 2)
        names = _names_of(table, parts[0], matrix.shape[1])
        return [_Column(name, parts[0], matrix[:, place], True) for place, name in enumerate(names)]
    columns = [_Column(part, part, table.read_numbers(part, "x", 1)) for part in parts]
    for column in columns:
        table.check_rows(column.name, len(column.values), parts[0], len(columns[0].values))
    return columns


def _names_of(table: Table, matrix: str, count: int) -> list[str]:
    names = table.read_beside(matrix, "columns", "x")
    if names is None:
        return [f"{matrix}[{column}]" for column in range(count)]
    if len(names) != count:
        what = f'expected {count} names as "{matrix}" has columns, got {len(names)}'
        raise table.fail("columns", what, "name every column once, or leave the array out")
    return [str(name) for name in names]


def _with_flags(columns: list[_Column], flags: Sequence[Flag], path: str) -> list[_Column]:
    """Replace every column that is compared by its flags, in their order."""
    names = [column.name for column in columns]
    chosen: dict[int, list[Flag]] = {}
    for flag in flags:
        chosen.setdefault(position_of(flag.column, names, "flags", path), []).append(flag)
    out: list[_Column] = []
    for place, column in enumerate(columns):
        out += [_compare(column, flag) for flag in chosen[place]] if place in chosen else [column]
    return out


def _compare(column: _Column, flag: Flag) -> _Column:
    values = column.values
    result = np.asarray(COMPARISONS[flag.sign](values, flag.number), np.float32)
    if values.dtype.kind == "f":
        result[np.isnan(values)] = np.nan
    return _Column(flag.text, column.array, result, column.in_matrix)


def _to_matrix(table: Table, columns: list[_Column], *, missing_zero: bool) -> Floats:
    """Convert to float32, and refuse the first value that is not finite there."""
    rows = len(columns[0].values) if columns else 0
    if not rows:
        name = columns[0].array if columns else "x"
        raise table.fail(name, f"expected rows and columns, got {rows} rows", "fill the file, or name another data.x")
    x = np.empty((rows, len(columns)), np.float32)
    with np.errstate(over="ignore"):
        for place, column in enumerate(columns):
            x[:, place] = column.values
    if missing_zero:
        x[np.isnan(x)] = 0
    bad = ~np.isfinite(x)
    if bad.any():
        row, place = np.argwhere(bad)[0]
        column = columns[place]
        where = table.place(row) + (f', column "{column.name}"' if column.in_matrix else "")
        raise table.not_finite(column.array, where, column.values[row], bad)
    return x
