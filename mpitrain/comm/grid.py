"""One axis of the process grid, and the grid that owns the communicators."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType

from mpi4py import MPI

from mpitrain.comm.waiting import abandoned, wait_all
from mpitrain.errors import LaunchError, PeerLostError
from mpitrain.partition import GridShape

Comm = MPI.Comm
"""What a caller hands to the package; the name under which the upper layers know it."""


@dataclass(frozen=True)
class Axis:
    """The ranks along one direction of the grid; the only thing layers and reducers know of MPI.

    Attributes
    ----------
    comm : MPI.Comm
        Owned by the grid, or by whoever built the axis.
    members : tuple of int
        Rank of every member in the world of the grid; empty where the axis belongs to none.
    name : str
        Direction, for messages: ``data``, ``pipeline``, ``tensor``, ``replica``, ``world``.
    """

    comm: MPI.Comm
    name: str = "data"
    members: tuple[int, ...] = ()

    def label(self, rank: int) -> str:
        """Name a rank of the axis for messages, by its place in the world where that is known."""
        place = f"rank {rank} of the {self.name} axis"
        return f"{place} (rank {self.members[rank]} of all)" if self.members else place

    @property
    def rank(self) -> int:
        """Position of this process along the axis."""
        return int(self.comm.Get_rank())

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return int(self.comm.Get_size())


def alone() -> Axis:
    """Return a world of this rank only: what is collective over it needs nobody else."""
    return Axis(MPI.COMM_SELF, "world")


def duplicate(comm: MPI.Comm, *, timeout_s: float) -> MPI.Comm:
    """Duplicate a communicator; raises PeerLostError where some rank does not take part."""
    copy, request = comm.Idup()
    try:
        wait_all([request], "all ranks to build the same object", timeout_s=timeout_s)
    except PeerLostError:
        abandoned.append(copy)
        raise
    return copy


class ProcessGrid:
    """World split into axes.

    ``data``: ranks that hold the same part of the model and see other samples; ``pipeline``: the stages of one
    replica, in the order of layers; ``tensor``: ranks that share the layers of one stage; ``replica``: all ranks of
    one replica, which see the same samples. An axis of one rank is an axis like any other.

    Rows that serve are split like replicas, and have axes like them. ``column``: the ranks of all rows that hold the
    same part of the model, servers last; ``servers``: all ranks that serve, None on the others. Where they hold the
    weights (``apart``), the data axis of the replicas does not reach them, and they have one of their own.
    ``first_rank`` is the rank in the world before anybody died.

    Parameters
    ----------
    comm : MPI.Comm
        Every rank of it takes part; it is duplicated, so that no message meets one of the caller's.
    shape : GridShape
        Must cover the communicator.
    apart : bool
        Whether the servers are no replicas of the model.

    Notes
    -----
    Collective over ``comm``. Use as a context manager, or call ``close``: MPI has a few thousand communicators only.
    """

    def __init__(self, comm: MPI.Comm, shape: GridShape, *, apart: bool = False) -> None:
        if shape.size != comm.Get_size():
            raise LaunchError(f"grid of {shape.size} ranks on a communicator of {comm.Get_size()}")
        self.shape = shape
        self._others: list[Axis] = []
        self.world = Axis(comm.Dup(), "world")
        self.first_rank = self.world.rank
        dp, pp, tp = shape.coordinates(self.world.rank)
        places = [shape.coordinates(rank) for rank in range(shape.size)]
        self.row = dp
        self.apart = apart
        self.serves = apart and dp >= shape.dp
        self.column = self._split("column", [(p, t) for _, p, t in places], dp)
        self.data = self._split("data", [(p, t, apart and d >= shape.dp) for d, p, t in places], dp)
        self.pipeline = self._split("pipeline", [(d, t) for d, _, t in places], pp)
        self.tensor = self._split("tensor", [(d, p) for d, p, _ in places], tp)
        self.replica = self._split("replica", [(d, 0) for d, _, _ in places], pp * shape.tp + tp)
        alike = self._split("servers", [(d >= shape.dp,) for d, _, _ in places], self.world.rank)
        self._others.append(alike)
        self.servers = alike if dp >= shape.dp else None

    def among(self, axis: Axis, ranks: Collection[int], name: str) -> Axis | None:
        """Build the axis of some ranks of ``axis``, freed with the grid. Collective over ``axis``.

        Returns None on the other ranks.
        """
        mine = axis.rank in ranks
        members = [axis.members[rank] for rank in sorted(ranks)] if mine else []
        built = Axis(axis.comm.Split(int(mine), axis.rank), name, tuple(members))
        self._others.append(built)
        return built if mine else None

    def _split(self, name: str, groups: Sequence[tuple[int, ...]], key: int) -> Axis:
        """Build this rank's axis from the group that every rank of the world belongs to."""
        mine = groups[self.world.rank]
        members = tuple(rank for rank, group in enumerate(groups) if group == mine)
        return Axis(self.world.comm.Split(members[0], key), name, members)

    def shrink(self) -> None:
        """Let the world be the ranks that live: MPI must be able to tell (ULFM). Collective over them."""
        self.world = Axis(self.world.comm.Shrink(), "world")

    def close(self) -> None:
        """Free the communicators. Collective."""
        for axis in (*self._others, self.replica, self.tensor, self.pipeline, self.data, self.column, self.world):
            axis.comm.Free()

    def __enter__(self) -> "ProcessGrid":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Freeing is collective: after an error on this rank alone it would wait for the others.
        if error is None:
            self.close()
