"""What workers and servers must agree on: the buckets, who owns them, how strict the clocks are, which codec."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.arrays import Floats
from mpitrain.codecs.base import Codec
from mpitrain.codecs.memory import RECEIVERS, Memory, NoMemory
from mpitrain.codecs.raw import Raw
from mpitrain.comm.frame import Tag
from mpitrain.params import Segment
from mpitrain.server.clocks import ASYNC, Rule


@dataclass(frozen=True)
class Piece:
    """A bucket of gradients, and of the weights under them, that travels as one.

    Attributes
    ----------
    index : int
        Its number, the same on worker and server.
    segments : list of Segment
        Consecutive tensors of the worker's layout.
    codec, memory
        Of the gradients.
    """

    index: int
    segments: Sequence[Segment]
    codec: Codec
    memory: str

    @property
    def size(self) -> int:
        """Elements, with the padding between tensors."""
        return self.segments[-1].stop - self.segments[0].start


def deal(sizes: Sequence[int], servers: int) -> list[int]:
    """Give every bucket to one server: largest first to the least loaded (Graham, 1969), ties to the lower number."""
    owner, loads = [0] * len(sizes), [0] * servers
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner[index] = min(range(servers), key=lambda server: (loads[server], server))
        loads[owner[index]] += sizes[index]
    return owner


def slots_of(rule: Rule) -> int:
    """Return the pushes of a worker that may be under way or not yet applied."""
    return rule.window if rule.mode == ASYNC else rule.staleness + 1


def down_memory(codec: Codec, size: int) -> Memory:
    """Make one end of the stream of weights to a worker: changes against what it has, or raw weights."""
    return NoMemory(codec, size) if isinstance(codec, Raw) else RECEIVERS["delta"](codec, size)


def align(memory: Memory, weights: Floats) -> None:
    """Let a stream of changes go on from these weights; both ends must."""
    for state in memory.states().values():
        state.current[:] = weights


@dataclass(frozen=True)
class Setting:
    """What both ends must agree on.

    Attributes
    ----------
    workers : int
        Ranks of the axis that push: the first ones; the others serve.
    pieces : list of Piece
        All buckets.
    rule : Rule
        How strict the clocks are.
    down : Codec
        Of the changes of the weights.
    """

    workers: int
    pieces: Sequence[Piece]
    rule: Rule
    down: Codec

    def owned_by(self, server: int, servers: int) -> list[Piece]:
        """List the buckets of one of the servers."""
        owner = deal([piece.size for piece in self.pieces], servers)
        return [piece for piece in self.pieces if owner[piece.index] == server]

    def weights_tag(self, piece: Piece) -> int:
        """Tag of the raw weights of a bucket."""
        return Tag.REPLY.of_bucket(len(self.pieces) + piece.index)
