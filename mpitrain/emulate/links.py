"""One direction of a link, without a clock: when a packet that comes at a time arrives at the other end.

Times are seconds since the start of the emulation; nothing here needs root, a network or a real clock.
"""

import random
from collections import deque
from dataclasses import dataclass

from mpitrain.topology.model import Direction, Rate

FOREVER = float("inf")


@dataclass(frozen=True)
class Interrupted:
    """A rate that is 0 in outages.

    Attributes
    ----------
    rate : Rate
        What it is between them.
    outages : tuple of (from_s, to_s)
        In any order; they may overlap; inf is the end of the last one of a link that never returns.
    """

    rate: Rate
    outages: tuple[tuple[float, float], ...]

    @property
    def mean_bytes_s(self) -> float:
        """The mean without outages."""
        return self.rate.mean_bytes_s

    def at(self, time_s: float) -> tuple[float, float]:
        """Return the rate in bytes a second, and until when it holds."""
        ends = [end for begin, end in self.outages if begin <= time_s < end]
        if ends:
            return 0.0, max(ends)
        rate, until = self.rate.at(time_s)
        return rate, min([until, *(begin for begin, _ in self.outages if begin > time_s)])


@dataclass
class Tally:
    """What a direction of a link has been given, and what became of it: every packet arrived, or was full, lost or cut.

    Attributes
    ----------
    packets, bytes : int
        What came. Bytes are those of whole IP packets, as on every field below.
    arrived_packets, arrived_bytes : int
        What came out at the other end, or is sure to do so; copies not counted.
    full_packets, full_bytes : int
        Dropped because the queue was full.
    lost_packets, lost_bytes : int
        Lost on the way, by ``loss``; they took their time on the link.
    cut_packets, cut_bytes : int
        Dropped because the link will never carry anything again.
    duplicated_packets, reordered_packets : int
        Of those that arrived: with a copy; ahead of others.
    """

    packets: int = 0
    bytes: int = 0
    arrived_packets: int = 0
    arrived_bytes: int = 0
    full_packets: int = 0
    full_bytes: int = 0
    lost_packets: int = 0
    lost_bytes: int = 0
    cut_packets: int = 0
    cut_bytes: int = 0
    duplicated_packets: int = 0
    reordered_packets: int = 0


class Wire:
    """A queue and the link behind it, which sends one packet after the other at the rate of the time.

    Packets arrive in the order in which they came, jitter or not, but for those that ``reorder`` picks. During an
    outage the link stands still: what waits goes on afterwards, what finds the queue full is dropped.

    Parameters
    ----------
    direction : Direction
        Rate, delay, faults, length of the queue: bytes that may wait beside the packet that is being sent.
    outages : tuple of (from_s, to_s)
        See `Interrupted`.
    seed : str
        The same one gives the same faults to the same packets.
    """

    def __init__(self, direction: Direction, outages: tuple[tuple[float, float], ...] = (), seed: str = "") -> None:
        self.direction = direction
        self.tally = Tally()
        self._rate: Rate = Interrupted(direction.rate, outages) if outages else direction.rate
        self._bytes_s, self._until_s = self._rate.at(0.0)
        self._free_s = 0.0
        self._last_s = 0.0
        self._waiting: deque[tuple[float, int]] = deque()
        self._waiting_bytes = 0
        self._random = random.Random(seed)
        self._faulty = bool(direction.loss or direction.duplicate or direction.reorder or direction.jitter_s)

    def send(self, now_s: float, nbytes: int) -> tuple[float, ...]:
        """Take a packet; return when it arrives: never, once or twice.

        Parameters
        ----------
        now_s : float
            When it comes; no earlier than the one before.
        nbytes : int
            Its length.
        """
        tally = self.tally
        tally.packets += 1
        tally.bytes += nbytes
        begin_s = self._free_s
        if begin_s <= now_s:
            begin_s = now_s
        elif self._waiting_at(now_s) + nbytes > self.direction.queue_bytes:
            tally.full_packets += 1
            tally.full_bytes += nbytes
            return ()
        end_s = self._end(begin_s, nbytes)
        if end_s == FOREVER:
            tally.cut_packets += 1
            tally.cut_bytes += nbytes
            return ()
        self._free_s = end_s
        if begin_s > now_s:
            self._waiting.append((begin_s, nbytes))
            self._waiting_bytes += nbytes
        if self._faulty:
            return self._faultily(end_s, nbytes)
        tally.arrived_packets += 1
        tally.arrived_bytes += nbytes
        return (end_s + self.direction.delay_s,)

    def _waiting_at(self, now_s: float) -> int:
        """Return the bytes of the packets whose sending has not begun."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= now_s:
            self._waiting_bytes -= waiting.popleft()[1]
        return self._waiting_bytes

    def _end(self, begin_s: float, nbytes: float) -> float:
        """Return when a packet has left, if its sending begins at a time; inf: never."""
        while True:
            if begin_s >= self._until_s:
                self._bytes_s, self._until_s = self._rate.at(begin_s)
            if self._bytes_s:
                end_s = begin_s + nbytes / self._bytes_s
                if end_s <= self._until_s:
                    return end_s
                nbytes -= self._bytes_s * (self._until_s - begin_s)
            elif self._until_s == FOREVER:
                return FOREVER
            begin_s = self._until_s

    def _faultily(self, end_s: float, nbytes: int) -> tuple[float, ...]:
        """Let the dice decide on a packet that has left at a time."""
        direction, tally, draw = self.direction, self.tally, self._random.random
        if direction.loss and draw() < direction.loss:
            tally.lost_packets += 1
            tally.lost_bytes += nbytes
            return ()
        tally.arrived_packets += 1
        tally.arrived_bytes += nbytes
        twice = direction.duplicate and draw() < direction.duplicate
        tally.duplicated_packets += bool(twice)
        if direction.reorder and draw() < direction.reorder:
            tally.reordered_packets += 1
            arrival_s = end_s
        else:
            jitter_s = self._random.gauss(0.0, direction.jitter_s) if direction.jitter_s else 0.0
            arrival_s = self._last_s = max(self._last_s, end_s + max(0.0, direction.delay_s + jitter_s))
        return (arrival_s, arrival_s) if twice else (arrival_s,)
