"""What went over the links, and whether the relay kept up: records for JSON, and a table for people."""

from dataclasses import asdict
from typing import Self

import msgspec

from mpitrain.emulate.links import Tally
from mpitrain.emulate.network import Network

LATE_S = 1e-3
"""A median delay error above this, or a core that is busy for more than the share below, is a limit of the relay."""

BUSY = 0.9
BIN_S, BINS = 1e-5, 10_000
"""Delays are counted in bins, up to 0.1 s."""


class LinkCount(msgspec.Struct, frozen=True):
    """What one direction of a link carried, in whole IP packets; see `links.Tally` for the fields."""

    link: str
    direction: str
    source: str
    dest: str
    packets: int
    bytes: int
    arrived_packets: int
    arrived_bytes: int
    full_packets: int
    full_bytes: int
    lost_packets: int
    lost_bytes: int
    cut_packets: int
    cut_bytes: int
    duplicated_packets: int
    reordered_packets: int


class RelayLoad(msgspec.Struct, frozen=True):
    """How the relay kept up.

    Attributes
    ----------
    delivered_packets, delivered_bytes : int
        What reached a host.
    unroutable_packets : int
        To addresses that no host has (broadcasts and the like), dropped.
    refused_packets : int
        That the kernel did not take, dropped.
    wall_s, cpu_s : float
        Seconds since the start, and those that it computed.
    busiest_share : float
        Share of a core in its busiest second.
    late_median_ms, late_p99_ms : float
        How long after their time packets were handed over; at most 100.
    seconds, limited_seconds : int
        Seconds with traffic, and those in which the relay itself was the limit.
    scheduling : str
        The priority that the kernel granted.
    """

    delivered_packets: int
    delivered_bytes: int
    unroutable_packets: int
    refused_packets: int
    wall_s: float
    cpu_s: float
    busiest_share: float
    late_median_ms: float
    late_p99_ms: float
    seconds: int
    limited_seconds: int
    scheduling: str


class Counts(msgspec.Struct, frozen=True):
    """Both."""

    links: list[LinkCount]
    relay: RelayLoad

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what `to_json` wrote."""
        return msgspec.json.decode(text, type=cls)

    def to_json(self) -> bytes:
        """Write one line of JSON."""
        return msgspec.json.encode(self)

    def table(self) -> list[str]:
        """Render lines for people: links that carried anything, and how the relay kept up."""
        used = [each for each in self.links if each.packets]
        width = max([len(_way(each)) for each in used] + [4])
        lines = [f"{'link':<{width}}  {'packets':>9}  {'MB':>10}  {'queue full':>10}  {'lost':>7}  {'cut':>7}"]
        lines += [
            f"{_way(each):<{width}}  {each.arrived_packets:>9,}  {each.arrived_bytes / 1e6:>10,.3f}  "
            f"{each.full_packets:>10,}  {each.lost_packets:>7,}  {each.cut_packets:>7,}"
            for each in used
        ]
        return [*(lines if used else ["no link carried anything"]), *self._relay_lines()]

    def _relay_lines(self) -> list[str]:
        load = self.relay
        share = load.cpu_s / load.wall_s if load.wall_s else 0.0
        lines = [
            f"relay: {load.delivered_packets:,} packets, {load.delivered_bytes / 1e6:,.3f} MB, late by "
            f"{load.late_median_ms:.2f} ms at the median, {load.late_p99_ms:.2f} ms at the 99th percentile; "
            f"{share:.0%} of a core, {load.busiest_share:.0%} in the busiest second ({load.scheduling})"
        ]
        if load.limited_seconds:
            lines.append(
                f"relay: it was the limit itself in {load.limited_seconds} of {load.seconds} seconds with traffic: "
                "the links were slower than the topology says; raise mtu, or ask for less"
            )
        return lines


def _way(each: LinkCount) -> str:
    return f"{each.source} > {each.dest}"


class Gauge:
    """Collects how late packets are handed over, in bins, and per second whether the relay is the limit."""

    def __init__(self) -> None:
        self.bins = [0] * BINS
        self.packets = self.late = 0
        self.seconds = self.limited_seconds = 0
        self.busiest = 0.0
        self._window = (0.0, 0.0)

    def note(self, late_s: float) -> None:
        """Count one packet."""
        self.bins[min(int(late_s / BIN_S), BINS - 1)] += 1
        self.packets += 1
        self.late += late_s > LATE_S

    def second(self, now_s: float, cpu_s: float) -> None:
        """End a window, of which seconds and computed seconds since the start are given; ask for about one a second."""
        begin_s, used_s = self._window
        self._window = (now_s, cpu_s)
        share = (cpu_s - used_s) / (now_s - begin_s)
        self.busiest = max(self.busiest, share)
        self.seconds += self.packets > 0
        self.limited_seconds += self.packets > 0 and (share > BUSY or self.late > self.packets / 2)
        self.packets = self.late = 0

    def quantile_ms(self, share: float) -> float:
        """Return the delay that a share of the packets did not exceed, to 0.01 ms."""
        wanted, seen = share * sum(self.bins), 0
        for number, packets in enumerate(self.bins):
            seen += packets
            if packets and seen >= wanted:
                return (number + 1) * BIN_S * 1e3
        return 0.0


def link_counts(network: Network) -> list[LinkCount]:
    """Read the tallies of all wires, link by link."""
    found = []
    for (number, up), wire in network.wires.items():
        link = network.topology.links[number]
        source, dest = link.ends if up else reversed(link.ends)
        tally: Tally = wire.tally
        found.append(LinkCount(link.name, "up" if up else "down", source, dest, **asdict(tally)))
    return found
