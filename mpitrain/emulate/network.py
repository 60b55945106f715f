"""All links of a topology, without a clock: packets in, and out again when their time has come."""

import heapq
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from mpitrain.emulate.links import Wire
from mpitrain.topology.model import Topology


@dataclass(frozen=True)
class Route:
    """The wires from one site to another, and the number of the latter."""

    wires: tuple[Wire, ...]
    dest: int


class Delivery(NamedTuple):
    """A packet that is due at a site: since when (seconds since the start), and at which."""

    due_s: float
    dest: int
    packet: bytes


class Network:
    """The wires of a topology, and the packets on them.

    Parameters
    ----------
    topology : Topology
        Its seed decides which packets are lost.
    header : int
        Bytes before each packet that are not sent over links.
    """

    def __init__(self, topology: Topology, header: int = 0) -> None:
        self.topology = topology
        self._header = header
        self.wires = {
            (number, up): Wire(
                link.up if up else link.down, link.outages, f"{topology.seed} {link.name} {'up' if up else 'down'}"
            )
            for number, link in enumerate(topology.links)
            for up in (True, False)
        }
        self._order = count()
        self._events: list[tuple[float, int, int, Route, bytes]] = []

    def route(self, source: int, dest: int) -> Route:
        """Look the way between two sites up, by their numbers; raises ConfigError where there is none."""
        sites = self.topology.sites
        path = self.topology.path(sites[source].name, sites[dest].name)
        return Route(tuple(self.wires[hop] for hop in path.hops), dest)

    def enter(self, now_s: float, route: Route, packet: bytes) -> None:
        """Send a packet on its way; nothing that is due before may be left (see `due`)."""
        self._onward(now_s, 0, route, packet)

    def due(self, now_s: float) -> list[Delivery]:
        """Move all packets on to a time, and return those that have arrived by then, in order."""
        arrived, events = [], self._events
        while events and events[0][0] <= now_s:
            time_s, _, hop, route, packet = heapq.heappop(events)
            if hop == len(route.wires):
                arrived.append(Delivery(time_s, route.dest, packet))
            else:
                self._onward(time_s, hop, route, packet)
        return arrived

    @property
    def next_s(self) -> float:
        """When the next packet reaches a site; inf where none is under way."""
        return self._events[0][0] if self._events else float("inf")

    def _onward(self, time_s: float, hop: int, route: Route, packet: bytes) -> None:
        for arrival_s in route.wires[hop].send(time_s, len(packet) - self._header):
            heapq.heappush(self._events, (arrival_s, next(self._order), hop + 1, route, packet))
