"""Windows of consecutive rows from a file."""

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints
from mpitrain.config.schema import DataConfig, Task
from mpitrain.data.columns import kept_columns, read_columns, signed_log1p, split_names, take_logarithms
from mpitrain.data.dataset import Block, Dataset, Split
from mpitrain.data.labels import Groups, read_groups, read_labels
from mpitrain.data.problems import position_of
from mpitrain.data.table import Table
from mpitrain.errors import DataError

_Starts = npt.NDArray[np.int64]


def open_windows(config: DataConfig, task: Task) -> Dataset:
    """Read and check the file once, and lay out its windows; no rows stay in memory before `Dataset.load`.

    Parameters
    ----------
    config : DataConfig
        ``path``, ``x``, ``y``, ``group``, ``station``, ``test_groups``, ``skip_groups``, ``window``, ``stride``,
        ``horizon``, ``flags``, ``drop``, ``active``, ``log1p``, ``missing``.
    task : {"classify", "forecast"}
        The label of a window's first row, or ``y`` of the ``horizon`` rows that follow the window.

    Raises
    ------
    DataError
        The file is missing or unusable, or leaves no windows to train or to test on.
    """
    table, parts = Table(config.path), split_names(config.x)
    with table.reading_ahead([*parts, config.y, config.group, config.station]):
        names, x = read_columns(table, config)
        groups = read_groups(table, config.group, "group", len(x), parts[0])
        stations = read_groups(table, config.station, "station", len(x), parts[0]) if config.station else groups
        target, class_names = _read_target(table, config, task, len(x))
    kept = kept_columns(names, config)
    used = sorted({*kept, *_active_columns(names, config)})
    said = [[names[column] for column in used], class_names, groups.names, stations.names]
    content = _hash(said, [*(x[:, column] for column in used), target, groups.codes, stations.codes])
    take_logarithms(names, x, config, task)
    starts = _usable_starts(x, names, groups, config, task)
    train, test = _split(starts, groups, stations, config)
    present, sizes = np.unique(stations.codes[train], return_counts=True)
    classes = 1 + int(target[starts].max()) if task == "classify" else 0
    return Dataset(
        source=WindowSource(table, config, task, {"train": train, "test": test}, _to_target(target, config, task)),
        task=task,
        input_shape=(config.window, len(kept)),
        num_outputs=classes or config.horizon,
        class_names=class_names[:classes] or [str(number) for number in range(classes)],
        feature_names=[names[column] for column in kept],
        group_names=[stations.names[position] for position in present],
        train_group_sizes=[int(size) for size in sizes],
        num_test=len(test),
        content=content,
    )


def _hash(names: Sequence[list[str]], columns: Sequence[Floats | Ints]) -> str:
    """Hash what training uses of a table, with SHA-256: all names, and (rows,) columns of float32 or int64.

    That is before logarithms, which other machines round otherwise: ranks that read the same file must agree.
    """
    digest = hashlib.sha256(json.dumps([names, [len(column) for column in columns]]).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column, "<f4" if column.dtype.kind == "f" else "<i8").data)
    return digest.hexdigest()


def _usable_starts(x: Floats, names: list[str], groups: Groups, config: DataConfig, task: Task) -> _Starts:
    """List the first rows of the windows that are active and not skipped."""
    span = config.window + (config.horizon if task == "forecast" else 0)
    starts = window_starts(groups.codes, span, config.stride or config.window)
    if not len(starts):
        longest = int(np.diff(_run_edges(groups.codes)).max(initial=0))
        raise DataError(
            f'data: "{config.path}": {span} rows a window (with its horizon), but the longest run of one group has '
            f"{longest} rows; set data.window to at most {max(longest - span + config.window, 1)}"
        )
    starts = starts[_is_active(x, starts, names, config)]
    return starts[~np.isin(groups.codes[starts], groups.find(config.skip_groups, "skip_groups"))]


def window_starts(codes: Ints, span: int, stride: int) -> _Starts:
    """List the first rows of all windows: ``span`` rows within a run of one group, every ``stride`` rows of the run."""
    edges = _run_edges(codes)
    runs = [np.arange(begin, end - span + 1, stride) for begin, end in pairwise(edges)]
    return np.concatenate([np.empty(0, np.int64), *runs])


class WindowSource:
    """Reads the rows of any windows of the file.

    Parameters
    ----------
    table : Table
        The file.
    config : DataConfig
        As for `open_windows`.
    task : {"classify", "forecast"}
        What the targets are.
    starts : dict of (n,) int64
        First row of each window of both splits, station after station.
    target : (rows,) int64 or float32
        Label or value of each row.
    """

    def __init__(
        self, table: Table, config: DataConfig, task: Task, starts: dict[Split, _Starts], target: Floats | Ints
    ) -> None:
        self._table, self._config, self._task = table, config, task
        self._starts, self._target = starts, target

    def read(self, split: Split, indices: Ints) -> Block:
        """Read the file, and keep the rows of these windows alone."""
        window = self._config.window
        first = self._starts[split][indices]
        with self._table.reading_ahead(split_names(self._config.x)):
            names, x = read_columns(self._table, self._config)
        take_logarithms(names, x, self._config, self._task)
        keep = np.zeros(len(x), np.bool_)
        keep[(first[:, None] + np.arange(window)).ravel()] = True
        moved = np.cumsum(keep) - 1
        y = self._target[first]
        if self._task == "forecast":
            y = self._target[first[:, None] + window + np.arange(self._config.horizon)]
        rows = x[np.flatnonzero(keep)[:, None], kept_columns(names, self._config)]
        return Block(indices, rows, moved[first], window, y)


def _read_target(table: Table, config: DataConfig, task: Task, rows: int) -> tuple[Floats | Ints, list[str]]:
    """Read the target of each row, without its logarithm, and the names of its classes."""
    if task == "classify":
        labels = read_labels(table, config.y, rows, split_names(config.x)[0])
        return labels.codes, labels.names
    values = table.to_finite(config.y, table.read_numbers(config.y, "y", 1))
    table.check_rows(config.y, len(values), split_names(config.x)[0], rows)
    return values, []


def _to_target(values: Floats | Ints, config: DataConfig, task: Task) -> Floats | Ints:
    """Take the logarithm of what is to be forecast, where ``data.log1p`` names it."""
    return signed_log1p(values) if task == "forecast" and {config.y, "*"} & set(config.log1p) else values


def _split(starts: _Starts, groups: Groups, stations: Groups, config: DataConfig) -> tuple[_Starts, _Starts]:
    """Order the windows by station, and take those of the test groups apart."""
    starts = starts[np.argsort(stations.codes[starts], kind="stable")]
    is_test = np.isin(groups.codes[starts], groups.find(config.test_groups, "test_groups"))
    for part, other in ((is_test, "test"), (~is_test, "training")):
        if not part.any():
            present = [groups.names[code] for code in np.unique(groups.codes[starts])]
            raise DataError(
                f'data: "{config.path}": data.test_groups = {list(config.test_groups)} leaves no {other} windows of '
                f"{len(starts)} in the groups {present}; name groups with windows for both, "
                f"{'and' if config.group else 'with data.group set, and'} relax data.active or data.skip_groups"
            )
    return starts[~is_test], starts[is_test]


def _is_active(x: Floats, starts: _Starts, names: list[str], config: DataConfig) -> npt.NDArray[np.bool_]:
    """Tell which windows have a row with any of the active columns above zero."""
    if not config.active:
        return np.ones(len(starts), np.bool_)
    columns = _active_columns(names, config)
    before = np.concatenate([[0], np.cumsum((x[:, columns] > 0).any(axis=1))])
    active: npt.NDArray[np.bool_] = before[starts + config.window] > before[starts]
    return active


def _active_columns(names: list[str], config: DataConfig) -> list[int]:
    return [position_of(name, names, "active", config.path) for name in config.active]


def _run_edges(codes: Ints) -> _Starts:
    """Rows at which the group changes, with both ends of the table."""
    return np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1, [len(codes)]])
