"""Who trains on which sample at which step: pure arithmetic, so that the step number is the whole cursor."""

from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Ints
from mpitrain.data.hashing import make_key, permute
from mpitrain.errors import DataError
from mpitrain.partition import bounds, split_sizes

Placement = Literal["station", "shuffled"]
Indices = npt.NDArray[np.int64]


class Sampler:
    """The samples of each step, for one rank.

    Every epoch uses every sample exactly once, and every rank takes the same number of steps; a rank's share of a
    step may be empty, the whole step never is.

    Parameters
    ----------
    group_sizes : list of int
        Training samples of each group; global indices run group after group.
    batch_size : int
        Samples of a step over all ranks together.
    ranks, rank : int
        Replicas that train, and the place of this process among them; a rank beyond them has no samples.
    placement : {"station", "shuffled"}
        station: whole groups belong to ranks, and a rank contributes to each step in proportion to what it owns;
        steps differ by at most one sample. shuffled: batch t of an epoch is the same slice of one permutation for any
        number of ranks; the last one is ragged.
    seed : int
        Permutations depend on it and on the epoch.

    Attributes
    ----------
    steps_per_epoch : int
        The number of samples / ``batch_size``, rounded up.
    owned : (n,) int64
        Ascending global indices that this rank may ever ask for.

    Raises
    ------
    DataError
        More ranks than samples, or (station) than groups.
    """

    def __init__(
        self, group_sizes: list[int], batch_size: int, *, ranks: int, rank: int, placement: Placement, seed: int
    ) -> None:
        self.num_samples = sum(group_sizes)
        _check_enough(group_sizes, ranks, placement)
        self.steps_per_epoch = -(-self.num_samples // batch_size)
        self.owned: Indices = np.arange(self.num_samples if rank < ranks else 0)
        self._batch_size, self._ranks, self._rank, self._seed = batch_size, ranks, rank, seed
        self._groups: list[int] = []
        self._quota: Ints | None = None
        self._epoch = -1
        self._order: Indices = self.owned
        if placement == "station":
            owners = assign_groups(group_sizes, ranks)
            ranges = bounds(group_sizes)
            self._groups = owners[rank] if rank < ranks else []
            owned = [np.arange(*ranges[group], dtype=np.int64) for group in self._groups]
            self.owned = np.concatenate([np.empty(0, np.int64), *owned])
            totals = [sum(group_sizes[group] for group in groups) for groups in owners]
            self._quota = _quota(totals, rank, self.steps_per_epoch)

    def indices(self, step: int) -> Indices:
        """Look up this rank's samples at a step (0, 1, …): global indices, (n,) int64, possibly empty."""
        epoch, turn = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = self.owned[permute(len(self.owned), make_key(self._seed, epoch, *self._groups))]
            self._epoch = epoch
        if self._quota is not None:
            return self._order[self._quota[turn] : self._quota[turn + 1]]
        if self._rank >= self._ranks:
            return self.owned
        start = turn * self._batch_size
        low, high = bounds(split_sizes(self.global_count(step), self._ranks))[self._rank]
        return self._order[start + low : start + high]

    def global_count(self, step: int) -> int:
        """Count the samples of a step over all ranks; at least one."""
        turn = step % self.steps_per_epoch
        if self._quota is None:
            return min(self._batch_size, self.num_samples - turn * self._batch_size)
        return _edge(turn + 1, self.num_samples, self.steps_per_epoch) - _edge(
            turn, self.num_samples, self.steps_per_epoch
        )


def assign_groups(group_sizes: list[int], ranks: int) -> list[list[int]]:
    """Give every group to one rank: largest first to the least loaded (Graham, 1969), ties to the lower number.

    Returns
    -------
    owners : list of list of int
        Ascending groups of each rank; every rank has one as long as there are enough groups.
    """
    owners: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for group in sorted(range(len(group_sizes)), key=lambda g: (-group_sizes[g], g)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        owners[rank].append(group)
        loads[rank] += group_sizes[group]
    return [sorted(groups) for groups in owners]


def split_test(num_test: int, ranks: int, rank: int) -> Indices:
    """Cut the test samples into contiguous parts: this rank's global indices, (n,) int64, possibly empty."""
    if rank >= ranks:
        return np.empty(0, np.int64)
    return np.arange(*bounds(split_sizes(num_test, ranks))[rank], dtype=np.int64)


def _edge(turn: int, samples: int, steps: int) -> int:
    return turn * samples // steps


def _quota(totals: list[int], rank: int, steps: int) -> Ints:
    """Position in a rank's permutation at which each step starts: (steps + 1,) int64.

    All ranks' samples are lined up by the fraction of its epoch at which each is due, and steps are even slices of
    this line. Cutting each rank's own line evenly instead would leave steps without any sample when batches are small.
    """
    due = np.concatenate([(np.arange(total) + 0.5) / total for total in totals])
    owner = np.repeat(np.arange(len(totals)), totals)
    mine = owner[np.argsort(due, kind="stable")] == rank
    taken = np.array([0, *accumulate(mine.tolist())], np.int64)
    edges = [_edge(turn, len(mine), steps) for turn in range(steps + 1)]
    return taken[edges]


def _check_enough(group_sizes: list[int], ranks: int, placement: Placement) -> None:
    samples, groups = sum(group_sizes), sum(size > 0 for size in group_sizes)
    if samples < ranks:
        raise DataError(
            f"data: {samples} training samples, but {ranks} ranks; start at most {samples} ranks or provide more data"
        )
    if placement == "station" and groups < ranks:
        raise DataError(
            f'data: {groups} groups with training samples, but {ranks} ranks, and data.placement = "station" gives '
            f'each rank whole groups; start at most {groups} ranks or set data.placement = "shuffled"'
        )
