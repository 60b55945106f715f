"""What a topology is: sites joined by links. Units are seconds and bytes; files use Mbit/s, ms and percent."""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple, Protocol

from mpitrain.errors import ConfigError


class Rate(Protocol):
    """The rate of one direction of a link over time."""

    @property
    def mean_bytes_s(self) -> float:
        """The mean over a period (or for ever)."""

    def at(self, time_s: float) -> tuple[float, float]:
        """Return the rate in bytes a second at a time since the start, and until when it holds (inf: for ever).

        A rate of 0 is a stall.
        """


@dataclass(frozen=True)
class Constant:
    """A rate that never changes."""

    bytes_s: float

    @property
    def mean_bytes_s(self) -> float:
        """The rate."""
        return self.bytes_s

    def at(self, time_s: float) -> tuple[float, float]:
        """Return the rate, for ever."""
        del time_s
        return self.bytes_s, inf


@dataclass(frozen=True)
class Direction:
    """One direction of a link.

    Attributes
    ----------
    rate : Rate
        Bytes a second.
    delay_s : float
        One way, without queueing and serialization.
    jitter_s : float
        Standard deviation of the delay; packets keep their order unless ``reorder`` says otherwise.
    loss, duplicate, reorder : float
        Shares of packets that are lost, that come twice, and that overtake (are sent on without their delay).
    queue_bytes : int
        Bytes that may wait for the link; more are dropped.
    """

    rate: Rate
    delay_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    queue_bytes: int = 0


@dataclass(frozen=True)
class Site:
    """A place with a machine, or with none.

    Attributes
    ----------
    name : str
        Also its host name: letters, digits and hyphens.
    kind : str
        ``cell``, ``edge``, ``aggregation``, ``core``, or any other word.
    slots : int
        Ranks that it may run; 0 for a place that only forwards.
    speed : float
        Of its computation, relative to the others.
    host : str
        Address under which a launcher reaches it; its name where left out.
    """

    name: str
    kind: str = "edge"
    slots: int = 1
    speed: float = 1.0
    host: str = ""


@dataclass(frozen=True)
class Link:
    """A link between two sites; ``up`` leads from the first to the second of ``ends``, ``down`` back."""

    ends: tuple[str, str]
    up: Direction
    down: Direction
    outages: tuple[tuple[float, float], ...] = ()
    """From when to when, in seconds since the start, it carries nothing in either direction."""

    @property
    def name(self) -> str:
        """The names of both ends."""
        return "-".join(self.ends)


class Hop(NamedTuple):
    """One link on a way: its number in ``Topology.links``, and whether it is used in its up direction."""

    link: int
    up: bool


@dataclass(frozen=True)
class Path:
    """What a message between two sites costs.

    Attributes
    ----------
    hops : tuple of Hop
    alpha_s : float
        Latency, one way: the sum of the delays.
    beta_s : float
        Seconds a byte, of the slowest link by its mean rate.
    """

    hops: tuple[Hop, ...]
    alpha_s: float
    beta_s: float


@dataclass(frozen=True)
class Topology:
    """Sites in the order of their ranks, and links.

    Raises
    ------
    ConfigError
        From ``path``, where no way leads from one site to the other.
    """

    sites: tuple[Site, ...]
    links: tuple[Link, ...]
    name: str = "topology"
    seed: int = 0
    mtu: int = 9000
    source: str = ""
    """The file that it was read from."""
    _paths: dict[str, dict[str, Path]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def slots(self) -> int:
        """Ranks that all sites together may run."""
        return sum(site.slots for site in self.sites)

    def site(self, name: str) -> Site:
        """Return the site of a name; raises ConfigError with the names that there are."""
        if name not in self._sites:
            raise ConfigError(f"topology {self.name}: there is no site {name!r}; it has {', '.join(self._sites)}")
        return self._sites[name]

    @cached_property
    def _sites(self) -> dict[str, Site]:
        return {site.name: site for site in self.sites}

    def place(self, ranks: int) -> list[Site]:
        """Return the site of every rank: sites in order, each filled before the next; raises ConfigError."""
        if ranks > self.slots:
            table = ", ".join(f"{site.name} {site.slots}" for site in self.sites)
            raise ConfigError(
                f"topology {self.name}: {ranks} ranks, but {self.slots} slots ({table}); start fewer or raise slots"
            )
        return [site for site in self.sites for _ in range(site.slots)][:ranks]

    def direction(self, hop: Hop) -> Direction:
        """Return the direction of a link that a hop uses."""
        link = self.links[hop.link]
        return link.up if hop.up else link.down

    def path(self, source: str, dest: str) -> Path:
        """Return the way with the fewest links, of those the one whose first links come first in the file."""
        if source not in self._paths:
            self._paths[source] = self._search(self.site(source).name)
        path = self._paths[source].get(dest)
        if path is None:
            raise ConfigError(f"topology {self.name}: no links lead from {source} to {self.site(dest).name}; add one")
        return path

    def _search(self, source: str) -> dict[str, Path]:
        """Search breadth first for the ways to all sites that can be reached."""
        paths = {source: Path((), 0.0, 0.0)}
        waiting = deque(paths)
        while waiting:
            here = waiting.popleft()
            for hop, there in self.neighbours(here):
                if there not in paths:
                    paths[there] = self._longer(paths[here], hop)
                    waiting.append(there)
        return paths

    def _longer(self, path: Path, hop: Hop) -> Path:
        way = self.direction(hop)
        mean = way.rate.mean_bytes_s
        return Path((*path.hops, hop), path.alpha_s + way.delay_s, max(path.beta_s, 1 / mean if mean else inf))

    def neighbours(self, name: str) -> list[tuple[Hop, str]]:
        """List the links that leave a site, in the order of the file, and where they lead."""
        return self._neighbours.get(name, [])

    @cached_property
    def _neighbours(self) -> dict[str, list[tuple[Hop, str]]]:
        found: dict[str, list[tuple[Hop, str]]] = {site.name: [] for site in self.sites}
        for number, link in enumerate(self.links):
            found[link.ends[0]].append((Hop(number, up=True), link.ends[1]))
            found[link.ends[1]].append((Hop(number, up=False), link.ends[0]))
        return found
