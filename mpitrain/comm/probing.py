"""What the links between hosts do: latency by messages there and back, rate by a stream in each direction.

One pair at a time, so nothing is shared. A stream is timed where it arrives, over its later half: neither the slow
start of TCP nor the latency counts. It grows until that half takes long enough to be told from the grain of waiting.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np
from mpi4py import MPI

from mpitrain.arrays import Bytes
from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import wait_all

TRIPS = 9
"""Messages there and back after the first, which opens the connection; the median counts."""

PIECE_BYTES = 60_000
"""Below the least eager limit that is common, 64 KiB, so that pieces arrive one after the other: larger ones are
announced, and all of them end together."""

FIRST_BYTES, MOST_BYTES, GROWTH = 2**16, 2**26, 4
LONG_ENOUGH_S = 0.1
GRAIN_S = 0.005
"""A later half that came in faster may have been there when the first was noticed: the whole stream counts instead."""

STREAMS = 3
"""Streams of the final size; the median counts."""


@dataclass(frozen=True)
class Way:
    """A direction between two ranks: latency in seconds, rate in bytes a second, bytes that were sent to find out."""

    source: int
    dest: int
    alpha_s: float
    bytes_s: float
    sent_bytes: int


@dataclass(frozen=True)
class Limits:
    """What measuring may cost: seconds a direction (checked between streams), bytes a stream, silence of a peer."""

    seconds: float = 3.0
    stream_bytes: int = MOST_BYTES
    timeout_s: float = 60.0


def host_names(axis: Axis) -> list[str]:
    """Name the host of every rank. Collective over ``axis``."""
    return [str(name) for name in gather(axis, MPI.Get_processor_name())]


def probe(axis: Axis, ranks: list[int], limits: Limits) -> list[Way]:
    """Measure every ordered pair of ``ranks``. Collective over ``axis``; all of its ranks get the result.

    Raises
    ------
    PeerLostError
        A pair that exchanges nothing for ``limits.timeout_s``.
    """
    patience_s = limits.timeout_s + len(ranks) * (2 * limits.seconds + limits.timeout_s)
    ways = []
    for first, second in combinations(ranks, 2):
        mine: list[list[float]] = []
        if axis.rank in (first, second):
            peer = second if axis.rank == first else first
            mine = list(_pair(Peer(axis, peer, limits), leads=axis.rank == first))
        everything = gather(axis, mine, timeout_s=patience_s)
        for source, dest in ((first, second), (second, first)):
            # The rank where a stream arrives has timed it; the first of the pair has timed the latency.
            alpha_s = everything[first][0][0]  # type: ignore[index]
            bytes_s, sent = everything[dest][1]  # type: ignore[index]
            ways.append(Way(source, dest, alpha_s, bytes_s, int(sent)))
    return ways


def _pair(peer: "Peer", *, leads: bool) -> Iterator[list[float]]:
    yield [peer.latency() if leads else peer.answer()]
    for receives in (not leads, leads):
        if receives:
            yield list(peer.time_streams())
        else:
            peer.send_streams()


class Peer:
    """The other rank of a pair, for both ends of a measurement.

    Parameters
    ----------
    axis : Axis
    rank : int
        Of the other one.
    limits : Limits
    """

    def __init__(self, axis: Axis, rank: int, limits: Limits) -> None:
        self._axis, self._rank, self._limits = axis, rank, limits
        self._small = np.zeros(1, np.int64)

    def latency(self) -> float:
        """Send messages there and back; return the seconds of one way."""
        seconds = []
        for _ in range(TRIPS + 1):
            begin = time.perf_counter()
            self._tell(0)
            self._hear()
            seconds.append((time.perf_counter() - begin) / 2)
        return median(seconds[1:])

    def answer(self) -> float:
        """Send back what comes."""
        for _ in range(TRIPS + 1):
            self._tell(self._hear())
        return 0.0

    def time_streams(self) -> tuple[float, int]:
        """Ask for streams, larger ones until they are long enough; return bytes a second, and the bytes of all."""
        begin, size, sent = time.perf_counter(), FIRST_BYTES, 0
        rates: list[float] = []
        while len(rates) < STREAMS:
            late = bool(sent) and time.perf_counter() - begin > self._limits.seconds
            if late and rates:
                break
            half_s, whole_s = self._receive(size)
            sent += size
            rate = later_bytes(size) / half_s if half_s > GRAIN_S else size / whole_s
            if half_s >= LONG_ENOUGH_S or late or size >= self._limits.stream_bytes:
                rates.append(rate)
            else:
                size = min(size * GROWTH, self._limits.stream_bytes)
        self._tell(0)
        return median(rates), sent

    def send_streams(self) -> None:
        """Send what the other end asks for, until it asks for nothing."""
        while size := self._hear():
            pieces = _pieces(np.zeros(size, np.uint8))
            requests = [self._axis.comm.Isend([piece, MPI.BYTE], self._rank) for piece in pieces]
            wait_all(requests, self._axis.label(self._rank), timeout_s=self._limits.timeout_s)

    def _receive(self, size: int) -> tuple[float, float]:
        """Ask for a stream; return the seconds in which its later half came in, and all of it."""
        begin = time.perf_counter()
        pieces = _pieces(np.empty(size, np.uint8))
        requests = [self._axis.comm.Irecv([piece, MPI.BYTE], self._rank) for piece in pieces]
        self._tell(size)
        half = len(requests) // 2
        for part in (requests[:half], requests[half:]):
            middle = time.perf_counter()
            wait_all(part, self._axis.label(self._rank), timeout_s=self._limits.timeout_s)
        end = time.perf_counter()
        return end - middle, end - begin

    def _tell(self, number: int) -> None:
        request = self._axis.comm.Isend(np.array([number], np.int64), self._rank)
        wait_all([request], self._axis.label(self._rank), timeout_s=self._limits.timeout_s)

    def _hear(self) -> int:
        request = self._axis.comm.Irecv(self._small, self._rank)
        wait_all([request], self._axis.label(self._rank), timeout_s=self._limits.timeout_s)
        return int(self._small[0])


def later_bytes(size: int) -> int:
    """Count the bytes of the pieces in the later half of a stream."""
    return size - -(-size // PIECE_BYTES) // 2 * PIECE_BYTES


def _pieces(data: Bytes) -> list[Bytes]:
    return [data[start : start + PIECE_BYTES] for start in range(0, data.size, PIECE_BYTES)]
