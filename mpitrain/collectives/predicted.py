"""What a sum will cost, without making it: bytes, messages and memories follow from sizes alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from mpitrain.codecs.base import Codec
from mpitrain.codecs.prediction import difference_nbytes
from mpitrain.collectives.segments import cut
from mpitrain.comm.frame import HEADER_BYTES
from mpitrain.partition import chunk_bounds, server_bounds


@dataclass(frozen=True)
class Sent:
    """What a rank hands to MPI.

    Attributes
    ----------
    nbytes : int
        Payload and headers.
    messages : int
        Large ones that travel in pieces count once.
    about : bool
        Whether the bytes depend on the values, and are those of typical ones.
    """

    nbytes: int = 0
    messages: int = 0
    about: bool = False

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.nbytes + other.nbytes, self.messages + other.messages, self.about or other.about)

    def __mul__(self, times: int) -> "Sent":
        return Sent(self.nbytes * times, self.messages * times, self.about)


def payload_nbytes(codec: Codec, memory: str, size: int) -> int:
    """Count the bytes of an ordinary vector of ``size`` elements; ``delta`` adds its factors."""
    return codec.nbytes(size) + (difference_nbytes(codec, size) if memory == "delta" else 0)


def sent_for_vector(codec: Codec, memory: str, size: int) -> Sent:
    """Predict a message with a vector of ``size`` elements."""
    return Sent(HEADER_BYTES + payload_nbytes(codec, memory, size), 1, about=not codec.fixed_size)


def sent_for_sum(
    collective: str,
    codec: Codec,
    memory: str,
    size: int,
    ranks: int,
    *,
    servers: int = 1,
    segment: int | None = None,
) -> list[Sent]:
    """Predict what every rank sends for the sum of a vector of ``size`` elements.

    Direct, ring and server move each chunk p - 1 times on its way to its owner and as often back. With direct and ring
    these are 2(p-1)/p of the vector a rank, where it divides evenly; with a server, one vector a rank and p - 1 from
    the server. What MPI makes of its own sum is not known here: ``native`` counts the vector once, as one message.

    Parameters
    ----------
    servers : int
        Ranks that own chunks, where the collective is "server".
    segment : int or None
        Elements of a segment, as of `mpitrain.collectives.base.Transport`.
    """
    if ranks == 1:
        return [Sent()]
    if collective == "native":
        return [Sent(codec.nbytes(size), 1)] * ranks
    messages = _messages(codec, memory, owned(collective, size, ranks, codec.block, servers), segment)
    if collective == "ring":
        return _ring_sends(messages)
    return [there + back for there, back in zip(_scatter_sends(messages), _gather_sends(messages), strict=True)]


def sent_between(
    collective: str, codec: Codec, memory: str, size: int, ranks: int, *, servers: int = 1, segment: int | None = None
) -> list[list[int]]:
    """Predict the bytes that every rank (row) sends to every other (column) for a sum; arguments as above.

    ``native`` counts as if it were ``direct``: what MPI really does is not known.
    """
    if collective == "ring":
        sent = sent_for_sum(collective, codec, memory, size, ranks, segment=segment)
        return [[one.nbytes * (there == (here + 1) % ranks) for there in range(ranks)] for here, one in enumerate(sent)]
    chunks = _messages(codec, memory, owned(collective, size, ranks, codec.block, servers), segment)
    return [
        [(chunks[here] + chunks[there]).nbytes * (here != there) for there in range(ranks)] for here in range(ranks)
    ]


def owned(collective: str, size: int, ranks: int, block: int, servers: int) -> list[tuple[int, int]]:
    """List the chunk that each rank owns."""
    if collective == "server":
        return server_bounds(size, ranks, servers, block)
    return chunk_bounds(size, ranks, block)


def sent_for_scatter(codec: Codec, memory: str, chunks: list[tuple[int, int]]) -> list[Sent]:
    """Predict what every rank sends for a direct reduce-scatter of whole chunks: those of the others, once."""
    return _scatter_sends(_messages(codec, memory, chunks, None))


def sent_for_gather(codec: Codec, memory: str, chunks: list[tuple[int, int]]) -> list[Sent]:
    """Predict what every rank sends for a direct all-gather of whole chunks: its own one, to everyone else."""
    return _gather_sends(_messages(codec, memory, chunks, None))


def _scatter_sends(messages: list[Sent]) -> list[Sent]:
    return [_total(m for chunk, m in enumerate(messages) if chunk != rank) for rank in range(len(messages))]


def _gather_sends(messages: list[Sent]) -> list[Sent]:
    return [message * (len(messages) - 1) for message in messages]


def _ring_sends(messages: list[Sent]) -> list[Sent]:
    """Add up what a rank passes on: partial sums of all chunks but its own, sums of all but its neighbour's."""
    ranks, everything = len(messages), _total(messages)
    without = [(messages[rank], messages[(rank + 1) % ranks]) for rank in range(ranks)]
    return [everything * 2 + (own + above) * -1 for own, above in without]


def _messages(codec: Codec, memory: str, chunks: list[tuple[int, int]], segment: int | None) -> list[Sent]:
    """Add up the messages that carry each chunk, one a segment; an empty chunk needs none."""
    sizes = [[part.size for part in cut(number, *bounds, segment)] for number, bounds in enumerate(chunks)]
    return [_total(sent_for_vector(codec, memory, n) for n in chunk) for chunk in sizes]


def _total(messages: Iterable[Sent]) -> Sent:
    return sum(messages, Sent())


def latencies(collective: str, ranks: int) -> int:
    """Count the messages of a sum that can only follow each other; of ``native``, those of a tree there and back."""
    if ranks == 1:
        return 0
    return {"direct": 2, "server": 2, "ring": 2 * (ranks - 1), "native": 2 * (ranks - 1).bit_length()}[collective]


def memory_elements(
    collective: str, memory: str, size: int, ranks: int, block: int = 1, *, servers: int = 1
) -> list[int]:
    """Predict how many elements every rank remembers of a vector from one sum to the next, both halves together.

    Parameters
    ----------
    block : int
        Of the codec.
    servers : int
        As in ``sent_for_sum``.
    """
    if memory == "none" or collective == "native":
        return [0] * ranks
    chunks = [stop - start for start, stop in owned(collective, size, ranks, block, servers)]
    return [2 * _remembered(collective, memory, chunks, rank) for rank in range(ranks)]


def _remembered(collective: str, memory: str, chunks: list[int], rank: int) -> int:
    """Add up the streams that start at a rank, and with ``delta`` those that end there."""
    size, own = sum(chunks), chunks[rank]
    if memory == "residual":
        return size  # one stream for every chunk, be it a contribution or the sum
    if collective != "ring":
        return 2 * size + (len(chunks) - 2) * own  # contributions to the others' chunks and their sums; all of its own
    return 3 * size - own - chunks[rank - 1]  # partial sums out and in, and the sum of every chunk
