"""What may differ by rank is gathered before anyone acts on it; a failure of one is raised on all."""

import json
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpitrain.arrays import Bytes, Floats
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Requests, wait_all
from mpitrain.errors import BY_EXIT_CODE, ConfigError, MpitrainError

T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""Patience while ranks read data or compile; a rank that dies ends the job by itself."""


def gather(axis: Axis, value: object, *, timeout_s: float = START_TIMEOUT_S) -> list[object]:
    """Give every rank every rank's ``value``, in the order of ranks. Collective over ``axis``.

    ``value`` is anything that JSON can carry: control data, not arrays.
    """
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    counts = np.zeros(axis.size, np.int64)
    wait_all(
        [axis.comm.Iallgather(np.array([mine.size], np.int64), counts)],
        f"all ranks of the {axis.name} axis",
        timeout_s=timeout_s,
    )
    everything = np.empty(int(counts.sum()), np.uint8)
    wait_all(
        [axis.comm.Iallgatherv(mine, [everything, counts.tolist(), None, MPI.BYTE])],
        f"all ranks of the {axis.name} axis",
        timeout_s=timeout_s,
    )
    parts = np.split(everything, np.cumsum(counts)[:-1])
    return [json.loads(part.tobytes()) for part in parts]


class NumberGather:
    """A few numbers of every rank on their way to every rank. Collective over ``axis``.

    Parameters
    ----------
    values : (n,) float64
        This rank's; copied.
    """

    def __init__(self, axis: Axis, values: npt.NDArray[np.float64], *, timeout_s: float) -> None:
        self._axis = axis
        self._timeout_s = timeout_s
        self._mine = values.astype(np.float64)
        self.table: npt.NDArray[np.float64] = np.empty((axis.size, len(values)))
        self._request = axis.comm.Iallgather(self._mine, self.table)

    def wait(self) -> "NumberGather":
        """Complete it; ``table`` then has a row for every rank."""
        wait_all([self._request], f"all ranks of the {self._axis.name} axis", timeout_s=self._timeout_s)
        return self

    @property
    def requests(self) -> Requests:
        """What to wait for, by somebody who does other things meanwhile."""
        return Requests([self._request], f"all ranks of the {self._axis.name} axis")

    def sum_in_order(self) -> tuple[float, ...]:
        """Add up the rows in the order of ranks: the same bits everywhere."""
        return tuple(float(sum(column.tolist())) for column in self.table.T)


def agree(axis: Axis, action: Callable[[], T], *, timeout_s: float = START_TIMEOUT_S) -> T:
    """Do something that may fail on some ranks only, and fail on all ranks if it failed on any.

    Collective over ``axis``.

    Raises
    ------
    MpitrainError
        The error of the lowest rank that failed, of the same kind on all ranks, with ``agreed`` set: rank 0 may print
        it for everyone. Errors of other classes (bugs) are raised as they are, where they are.
    """
    result: T | None = None
    failure: MpitrainError | None = None
    try:
        result = action()
    except MpitrainError as error:
        failure = error
    mine = None if failure is None else [int(failure.exit_code), str(failure)]
    reports = gather(axis, mine, timeout_s=timeout_s)
    failed = [(rank, report) for rank, report in enumerate(reports) if isinstance(report, list)]
    if failed:
        rank, (code, message) = failed[0]
        everywhere = all(report == [code, message] for report in reports)
        agreed = BY_EXIT_CODE.get(code, MpitrainError)(message if everywhere else f"rank {rank}: {message}")
        agreed.agreed = True
        raise agreed
    return result  # type: ignore[return-value]


def same_everywhere(axis: Axis, value: object, what: str) -> None:
    """Refuse to go on where ranks hold different values. Collective over ``axis``; raises ConfigError on all.

    Of lists of one length, the message shows the first items that differ.
    """
    values = gather(axis, value)
    odd = next((rank for rank, other in enumerate(values) if other != values[0]), None)
    if odd is not None:
        mine, other = values[0], values[odd]
        if isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
            mine, other = next((a, b) for a, b in zip(mine, other, strict=True) if a != b)
        error = ConfigError(f"{what} differ: rank 0 has {mine!r}, rank {odd} has {other!r}")
        error.agreed = True
        raise error


def first_on_node(axis: Axis, action: Callable[[], None], *, timeout_s: float = START_TIMEOUT_S) -> None:
    """Let one rank of every host do something before its neighbours do. Collective over ``axis``.

    For numba: the first compiles and fills the cache, the others read it; several writers at once have crashed
    (numba issue 10128).
    """
    node = axis.comm.Split_type(MPI.COMM_TYPE_SHARED)
    if node.Get_rank() == 0:
        action()
    wait_all([node.Ibarrier()], "the first rank of this host to compile", timeout_s=timeout_s)
    if node.Get_rank() != 0:
        action()
    # Freeing is collective, so not after an error on this rank alone.
    node.Free()


def sum_arrays(axis: Axis, values: npt.NDArray[np.float64]) -> None:
    """Replace a small array by its sum over all ranks, in the order MPI likes. Collective over ``axis``."""
    request = axis.comm.Iallreduce(MPI.IN_PLACE, values)
    wait_all([request], f"all ranks of the {axis.name} axis", timeout_s=START_TIMEOUT_S)


def broadcast(axis: Axis, values: Floats | Bytes, *, timeout_s: float, piece_bytes: int, root: int = 0) -> None:
    """Overwrite ``values`` (contiguous, same size on all ranks) with those of ``root``. Collective over ``axis``."""
    flat = values.reshape(-1).view(np.uint8)
    requests = [
        axis.comm.Ibcast([flat[start : start + piece_bytes], MPI.BYTE], root)
        for start in range(0, flat.size, piece_bytes)
    ]
    wait_all(requests, f"{axis.label(root)} to broadcast", timeout_s=timeout_s)
