"""Ranks that all live in one process: their messages are MPI's own, from the process to itself."""

from dataclasses import dataclass, field

from mpi4py import MPI

from mpitrain.comm.frame import Tag


@dataclass
class Place:
    """What a rank sees of a communicator of such ranks; ``sent`` lists tag, destination and bytes of its messages."""

    rank: int
    ranks: int
    sent: list = field(default_factory=list)

    def Get_rank(self):  # noqa: N802
        return self.rank

    def Get_size(self):  # noqa: N802
        return self.ranks

    def Isend(self, message, dest, tag):  # noqa: N802
        self.sent.append((Tag(tag % len(Tag)), dest, message[0].size))
        return MPI.COMM_SELF.Isend(message, 0, self._tag(self.rank, dest, tag))

    def Irecv(self, message, source, tag):  # noqa: N802
        return MPI.COMM_SELF.Irecv(message, 0, self._tag(source, self.rank, tag))

    def _tag(self, source, dest, tag):
        return (tag * self.ranks + source) * self.ranks + dest
