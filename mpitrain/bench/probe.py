"""The ranks of ``mpitrain probe``: latency and rate between all pairs of hosts, written as a topology.

JSON is a list of records ``source dest alpha_ms mbps sent_bytes``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.bench.ranks import on_ranks
from mpitrain.bench.records import Record, show
from mpitrain.comm.agreement import agree
from mpitrain.comm.grid import Axis
from mpitrain.comm.outputs import write_output
from mpitrain.comm.probing import Limits, Way, host_names, probe
from mpitrain.errors import LaunchError
from mpitrain.topology.dump import dump_topology
from mpitrain.topology.links import default_mtu
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology

MBIT = 1e6 / 8
MAX_NAME = 40
"""Characters of a site's name that come from its host's: a topology allows a few more."""

HEADER = """\
# Measured by mpitrain probe, one pair at a time: a mesh of all pairs. What several pairs share (a common uplink) shows
# in no pair alone; write such links by hand where it matters.
"""


@dataclass(frozen=True)
class Station:
    """A host with its first rank and how many it has; or, where there is only one host, a rank, without address."""

    name: str
    address: str
    rank: int
    slots: int


def main(*, seconds: float, out: Path | None, json: Path | None) -> int:
    """Measure; rank 0 prints the table and writes the files. Collective over all ranks of the job."""

    def on(axis: Axis) -> None:
        names = host_names(axis)
        stations = agree(axis, lambda: find_stations(names))
        ways = probe(axis, [station.rank for station in stations], Limits(seconds))
        if axis.rank == 0:
            _tell(stations, ways, axis.size, json)
        agree(axis, lambda: _write(out, measured(stations, ways)) if out and axis.rank == 0 else None)

    return on_ranks("world", None, on)


def find_stations(addresses: Sequence[str]) -> list[Station]:
    """Take the first rank of every host, from the host names of all ranks; every rank where there is one host alone.

    Raises
    ------
    LaunchError
        One rank alone has nothing to measure.
    """
    if len(addresses) < 2:
        raise LaunchError("probe: one rank has no link to measure; start at least two, one a host: -n 2")
    hosts = list(dict.fromkeys(addresses))
    if len(hosts) == 1:
        base = _site_name(hosts[0], set())
        return [Station(f"{base}-{rank}", "", rank, 1) for rank in range(len(addresses))]
    stations: list[Station] = []
    for host in hosts:
        name = _site_name(host, {station.name for station in stations})
        stations.append(Station(name, host, addresses.index(host), addresses.count(host)))
    return stations


def _site_name(host: str, taken: set[str]) -> str:
    """Make the name of a site from that of a host: letters, digits and hyphens; none twice."""
    short = host if re.fullmatch(r"[\d.]+", host) else host.partition(".")[0]
    base = re.sub(r"[^A-Za-z0-9]+", "-", short).strip("-")[:MAX_NAME].rstrip("-") or "host"
    base = f"host-{base}" if re.fullmatch(r"\d+|0[xX].*", base) else base  # a bare number would be an address
    numbered = (base if number == 1 else f"{base}-{number}" for number in range(1, len(taken) + 2))
    return next(name for name in numbered if name not in taken)


def measured(stations: Sequence[Station], ways: Sequence[Way]) -> Topology:
    """Build the mesh of all pairs."""
    names = {station.rank: station.name for station in stations}
    by_ends = {(way.source, way.dest): Direction(Constant(_short(way.bytes_s)), _short(way.alpha_s)) for way in ways}
    links = [
        Link((names[source], names[dest]), up=direction, down=by_ends[dest, source])
        for (source, dest), direction in by_ends.items()
        if source < dest
    ]
    sites = [Site(station.name, slots=station.slots, host=station.address) for station in stations]
    return Topology(tuple(sites), tuple(links), name="probed", mtu=default_mtu(links))


def _short(value: float) -> float:
    """Keep the digits that a measurement has."""
    return float(f"{value:.4g}")


def _tell(stations: Sequence[Station], ways: Sequence[Way], ranks: int, path: Path | None) -> None:
    names = {station.rank: station.name for station in stations}
    records: list[Record] = [
        {
            "source": names[way.source],
            "dest": names[way.dest],
            "alpha_ms": way.alpha_s * 1e3,
            "mbps": way.bytes_s / MBIT,
            "sent_bytes": way.sent_bytes,
        }
        for way in ways
    ]
    if not any(station.address for station in stations):
        print("all ranks are on one host: these are ways through its memory, not links")
    show(f"probe, {ranks} ranks on {len(stations)} sites", records, path)


def _write(path: Path, topology: Topology) -> None:
    write_output(path, HEADER + dump_topology(topology), "--out")
    print(f"wrote {path}: mpitrain launch CONFIG --topology {path}")
