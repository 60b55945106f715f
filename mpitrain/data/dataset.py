"""What training sees of any data set: samples by global index, of which a rank holds only its own.

Training samples are numbered 0 to N-1, group (station, trace) after group. A data set is made of a `Source`, which
reads or generates any samples asked for, and of the `Block` of samples that this rank has loaded.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints
from mpitrain.config.schema import Task

Split = Literal["train", "test"]
Moments = npt.NDArray[np.float64]

NO_TARGET = -1
"""A class that stands for none: such a target counts neither in the loss nor in the scores."""

_CHUNK = 1024


@dataclass(frozen=True)
class Samples:
    """A batch.

    Attributes
    ----------
    x : (B, T, C) float32 or (B, T) integers
        Windows of T rows of C features, or of T tokens.
    y : (B,) int64, (B, num_outputs) float32 or (B, T) int32
        Classes, the values to be forecast, or the token that follows each one (`NO_TARGET`: none to be scored).
    """

    x: Floats | Ints
    y: Floats | Ints

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Block:
    """Samples in memory; windows that overlap share their rows.

    Attributes
    ----------
    index : (n,) int64
        Global indices, ascending.
    rows : (R, C) float32
        Features of all rows.
    start : (n,) int64
        First row of each sample.
    window : int
        Rows of a sample.
    y : (n,) int64 or (n, num_outputs) float32
        Target of each sample.
    """

    index: Ints
    rows: Floats
    start: Ints
    window: int
    y: Floats | Ints

    def take(self, indices: Ints) -> Samples:
        """Copy samples by global index, in the order asked for.

        Raises
        ------
        IndexError
            A sample is not in memory.
        """
        position = find_held(self.index, indices)
        return Samples(self._windows(position), self.y[position])

    def moments(self, begin: int, end: int) -> Moments:
        """Compute (count, sums, squares about the mean) of the columns over the held samples ``begin`` to ``end``."""
        chunks = [np.arange(low, min(low + _CHUNK, end)) for low in range(begin, end, _CHUNK)]
        count = (end - begin) * self.window
        columns = self.rows.shape[1]
        sums = np.zeros(columns)
        for chunk in chunks:
            sums += self._windows(chunk).reshape(-1, columns).sum(axis=0, dtype=np.float64)
        squares = np.zeros(columns)
        for chunk in chunks:
            squares += np.square(self._windows(chunk).reshape(-1, columns) - sums / count).sum(axis=0)
        return np.concatenate([[count], sums, squares])

    def _windows(self, position: Ints) -> Floats:
        windows: Floats = self.rows[self.start[position][:, None] + np.arange(self.window)]
        return windows


class Held(Protocol):
    """Samples in memory: a `Block`, or one of another kind."""

    def take(self, indices: Ints) -> Samples:
        """Copy samples by global index, in the order asked for (IndexError where one is not in memory)."""


def find_held(held: Ints, indices: Ints) -> npt.NDArray[np.intp]:
    """Find global indices among the ascending ones that are held.

    Raises
    ------
    IndexError
        A sample is not in memory.
    """
    position = np.searchsorted(held, indices)
    inside = position < len(held)
    inside[inside] = held[position[inside]] == indices[inside]
    if not inside.all():
        raise IndexError(f"sample {indices[~inside][0]} was not loaded on this rank ({len(held)} were)")
    return position


class Source(Protocol):
    """Where samples come from."""

    def read(self, split: Split, indices: Ints) -> Held:
        """Read or generate the samples of the ascending ``indices``, and keep no others in memory."""


@dataclass(eq=False)
class Dataset:
    """Samples for training and testing.

    Attributes
    ----------
    task : str
        "classify", "forecast" or "lm".
    input_shape : tuple of int
        (T, C): rows of a window, features of a row; (T,) for tokens.
    num_outputs : int
        Classes, values of a forecast, or V.
    class_names : list of str
        One name a class or token; empty for a forecast.
    feature_names : list of str
        C names; none for tokens.
    group_names, train_group_sizes : list
        Name and number of training samples of each group, in the order of the global index; no group is empty.
    num_test : int
        Test samples of all groups together.
    vocabulary : int
        V, where the inputs are tokens 0 to V - 1; otherwise 0.
    content : str
        Hash of what every rank, and a resumed run, must have read alike; empty where the configuration says it all.
    samples_read : int
        Samples that this rank has loaded so far.
    """

    source: Source
    task: Task
    input_shape: tuple[int, ...]
    num_outputs: int
    class_names: list[str]
    feature_names: list[str]
    group_names: list[str]
    train_group_sizes: list[int]
    num_test: int
    vocabulary: int = 0
    content: str = ""
    samples_read: int = 0
    _blocks: dict[Split, Held] = field(default_factory=dict, repr=False)

    def load(self, train_indices: Ints, test_indices: Ints) -> None:
        """Bring samples into memory, and these alone; a second call replaces them and undoes `standardize`.

        Parameters
        ----------
        train_indices, test_indices : (n,) integer array
            Global indices; order and repetition do not matter.

        Raises
        ------
        DataError
            The samples cannot be read.
        """
        wanted: dict[Split, Ints] = {"train": np.unique(train_indices), "test": np.unique(test_indices)}
        self._blocks = {split: self.source.read(split, indices) for split, indices in wanted.items()}
        self.samples_read += sum(len(indices) for indices in wanted.values())

    def train(self, indices: Ints) -> Samples:
        """Copy training samples by global index (IndexError where one was not loaded)."""
        return self._blocks["train"].take(indices)

    def test(self, indices: Ints) -> Samples:
        """Copy test samples by global index (IndexError where one was not loaded)."""
        return self._blocks["test"].take(indices)

    def moments(self) -> Moments:
        """Sum up the columns of the loaded training samples by group.

        Returns
        -------
        table : (groups, 1 + 2C) float64
            Rows counted, sums, and sums of squares about the group's own mean. Groups of which nothing is loaded are
            zero: where every group lies on one rank, the sum of all ranks' tables is exact in any order.
        """
        block = self._features("train")
        table = np.zeros((len(self.train_group_sizes), 1 + 2 * len(self.feature_names)))
        edges = np.searchsorted(block.index, np.cumsum([0, *self.train_group_sizes]))
        for group in np.flatnonzero(np.diff(edges)):
            table[group] = block.moments(int(edges[group]), int(edges[group + 1]))
        return table

    def standardize(self, mean: Floats, scale: Floats, *, limit: float = 0.0) -> None:
        """Replace every loaded value v by (v - mean) / scale of its column; once a `load`.

        Parameters
        ----------
        mean, scale : (C,) float64
            From `combine_moments` over the groups of all ranks.
        limit : float
            Bound of the new values; 0 for none.
        """
        for split in self._blocks:
            block = self._features(split)
            np.subtract(block.rows, mean, out=block.rows, casting="same_kind")
            np.divide(block.rows, scale, out=block.rows, casting="same_kind")
            if limit:
                np.clip(block.rows, -limit, limit, out=block.rows)

    def _features(self, split: Split) -> Block:
        block = self._blocks[split]
        if not isinstance(block, Block):
            raise TypeError("tokens have no moments")
        return block


def combine_moments(table: Moments) -> tuple[Moments, Moments]:
    """Turn the moments of all groups into the mean and scale of each column (Chan, Golub and LeVeque, 1979).

    Parameters
    ----------
    table : (groups, 1 + 2C) float64
        Sum over ranks of `Dataset.moments`, in global group order; so the result does not depend on who held what.

    Returns
    -------
    mean, scale : (C,) float64
        Scale is the standard deviation; 1 where a column is constant to float32 precision.
    """
    filled = table[table[:, 0] > 0]
    columns = (table.shape[1] - 1) // 2
    count, sums, squares = filled[:, :1], filled[:, 1 : 1 + columns], filled[:, 1 + columns :]
    mean = sums.sum(axis=0) / count.sum()
    between = (count * np.square(sums / count - mean)).sum(axis=0)
    std = np.sqrt((squares.sum(axis=0) + between) / count.sum())
    return mean, np.where(std > 1e-7 * np.abs(mean), std, 1.0)
