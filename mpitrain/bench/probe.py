"""``mpitrain probe``: latency and rate between all pairs of hosts, written as a topology.

Alone, it starts its ranks itself; under a launcher, these are the ranks. JSON is a list of records ``source dest
alpha_ms mbps sent_bytes``.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from mpitrain.bench.probing import Limits, Way, probe
from mpitrain.bench.records import Record, show
from mpitrain.comm.agreement import agree, gather
from mpitrain.comm.grid import Axis
from mpitrain.comm.hints import is_launched
from mpitrain.comm.launching import launcher
from mpitrain.comm.network import Network, read_network
from mpitrain.comm.runtime import Position, ensure_home, fail, finish, start
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.supervising import supervise
from mpitrain.emulate.emulation import Emulation
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.topology.dump import dump_topology
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology

MBIT = 1e6 / 8
HEADER = """\
# Measured by mpitrain probe, one pair at a time: a mesh of all pairs. What several pairs share (a common uplink) shows
# in no pair alone; write such links by hand where it matters.
"""


@dataclass(frozen=True)
class Station:
    """A host, or a rank where there is only one host: its first rank, and how many it has."""

    name: str
    address: str
    rank: int
    slots: int


def main(
    ranks: int | None,
    *,
    topology: Path | None,
    emulate: bool,
    hostfile: Path | None,
    interface: str,
    seconds: float,
    out: Path | None,
    json: Path | None,
) -> int:
    """Measure; rank 0 prints the table and writes the files."""
    try:
        if not is_launched():
            return _launch(ranks, read_network(topology, hostfile, emulate=emulate, interface=interface))
        axis = Axis(start(), "world")
        stations = agree(axis, lambda: find_stations(gather(axis, MPI.Get_processor_name())))
        ways = probe(axis, [station.rank for station in stations], Limits(seconds))
        if axis.rank == 0:
            _tell(stations, ways, axis.size, json)
        agree(axis, lambda: _write(out, measured(stations, ways)) if out and axis.rank == 0 else None)
        finish()
    except BaseException as error:  # whatever it is, no rank may be left waiting
        fail(error, Position())
    return 0


def _launch(ranks: int | None, network: Network) -> int:
    """Start the very same command on ranks."""
    ensure_home()
    ranks = network.ranks(ranks)
    words, _ = launcher(ranks, network.wishes(ranks, allow_root=True, oversubscribe=True))
    network.check_reach(ranks)
    command = [*words, sys.executable, "-m", "mpitrain", *sys.argv[1:]]
    if network.emulate and network.topology:
        with Emulation(network.topology) as emulation:
            return emulation.run(command)
    stop = StopRequest()
    return supervise(command, stop)


def find_stations(names: Sequence[object]) -> list[Station]:
    """Take the first rank of every host, from the host names of all ranks; every rank where there is one host alone.

    Raises
    ------
    LaunchError
        One rank alone has nothing to measure.
    """
    addresses = [str(name) for name in names]
    if len(addresses) < 2:
        raise LaunchError("probe: one rank has no link to measure; start at least two, one a host: -n 2")
    hosts = list(dict.fromkeys(addresses))
    if len(hosts) == 1:
        base = _site_name(hosts[0], set())
        return [Station(f"{base}-{rank}", hosts[0], rank, 1) for rank in range(len(addresses))]
    stations: list[Station] = []
    for host in hosts:
        name = _site_name(host, {station.name for station in stations})
        stations.append(Station(name, host, addresses.index(host), addresses.count(host)))
    return stations


def _site_name(host: str, taken: set[str]) -> str:
    """Make the name of a site from that of a host: letters, digits and hyphens."""
    short = host if re.fullmatch(r"[\d.]+", host) else host.partition(".")[0]
    name = re.sub(r"[^A-Za-z0-9]+", "-", short).strip("-") or "host"
    number = next(number for number in range(1, len(taken) + 2) if (f"{name}-{number}" if number > 1 else name) not in taken)
    return f"{name}-{number}" if number > 1 else name


def measured(stations: Sequence[Station], ways: Sequence[Way]) -> Topology:
    """Build the mesh of all pairs."""
    names = {station.rank: station.name for station in stations}
    by_ends = {(way.source, way.dest): Direction(Constant(way.bytes_s), way.alpha_s) for way in ways}
    links = [
        Link((names[source], names[dest]), up=direction, down=by_ends[dest, source])
        for (source, dest), direction in by_ends.items()
        if source < dest
    ]
    sites = [Site(station.name, slots=station.slots, host=station.address) for station in stations]
    return Topology(tuple(sites), tuple(links), name="probed")


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
    if len({station.address for station in stations}) == 1:
        print("all ranks are on one host: these are ways through its memory, not links")
    show(f"probe, {ranks} ranks on {len(stations)} sites", records, path)


def _write(path: Path, topology: Topology) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + dump_topology(topology), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"probe: cannot write {path}: {error.strerror}; name another file with --out") from None
    print(f"wrote {path}: mpitrain launch CONFIG --topology {path}")
