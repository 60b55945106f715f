"""Where ranks run: hosts with slots, from a host file or a topology; each is filled before the next."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mpitrain.errors import ConfigError, count
from mpitrain.topology.model import Topology

SLOTS_WORDS = ("slots", "max_slots", "max-slots")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Host:
    """A machine; ``name`` is under which it is reached, ``site`` its name in the topology."""

    name: str
    slots: int
    site: str = ""

    def __str__(self) -> str:
        return self.name if self.site in ("", self.name) else f"{self.site} ({self.name})"


@dataclass(frozen=True)
class Placement:
    """The hosts of a run; ``source`` is the file that names them."""

    hosts: tuple[Host, ...]
    source: str

    @property
    def slots(self) -> int:
        """Ranks that all hosts together may run."""
        return sum(host.slots for host in self.hosts)

    def ranks(self, number: int) -> list[range]:
        """Return the ranks of every host."""
        ends = [0]
        for host in self.hosts:
            ends.append(min(number, ends[-1] + host.slots))
        return [range(a, b) for a, b in pairwise(ends)]

    def check(self, number: int) -> None:
        """Refuse more ranks than slots; raises ConfigError."""
        if number > self.slots:
            raise ConfigError(
                f"{self.source}: {count(number, 'rank')}, but {count(self.slots, 'slot')} ({self.slots} < {number}): "
                f"{', '.join(f'{host} {host.slots}' for host in self.hosts)}; start at most {self.slots} ranks, or "
                "raise slots"
            )

    def used(self, number: int) -> str:
        """List the hosts that get ranks, as launchers of all families read them: ``a:2,b:1``; raises ConfigError."""
        odd = next((host for host in self.hosts if ":" in host.name), None)
        if odd:
            raise ConfigError(f"{self.source}: launchers read no IPv6 address such as {odd}; give it a host name")
        parts = zip(self.hosts, self.ranks(number), strict=True)
        return ",".join(f"{host.name}:{host.slots}" for host, ranks in parts if ranks)

    def table(self, number: int, servers: int = 0) -> list[str]:
        """Show which ranks each host gets; the last ``servers`` of them serve."""
        lines = [("host", "slots", "ranks")]
        for host, ranks in zip(self.hosts, self.ranks(number), strict=True):
            serving = [rank for rank in ranks if rank >= number - servers]
            text = _span(ranks) + (f" ({_span(serving)} serves)" if serving else "")
            lines.append((str(host), str(host.slots), text))
        width = max(len(line[0]) for line in lines)
        return [f"{name:<{width}}  {slots:>5}  {ranks}".rstrip() for name, slots, ranks in lines]


def _span(ranks: Sequence[int]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def topology_placement(topology: Topology, *, emulate: bool = False) -> Placement:
    """Return the sites that have slots, under their addresses, or, where they are made up, under their names."""
    ranked = [site for site in topology.sites if site.slots]
    hosts = tuple(Host((not emulate and site.host) or site.name, site.slots, site.name) for site in ranked)
    return Placement(hosts, f"topology {topology.source or topology.name}")


def read_hostfile(path: Path) -> Placement:
    """Read a host file of Open MPI (``name slots=2``) or of MPICH (``name:2``); one slot where none are told.

    Blank lines and comments (#) are skipped; the slots of a host that comes again are added.

    Raises
    ------
    ConfigError
        The file is missing, empty, or has a line that is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"hosts: cannot read the host file {path}: {reason}; correct --hostfile") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            name, here = _read_host(words, f"{path}:{number}", line.strip())
            slots[name] = slots.get(name, 0) + here
    if not sum(slots.values()):
        raise ConfigError(f"{path}: expected a line such as `host1 slots=2`, got no slot at all; add hosts")
    return Placement(tuple(Host(name, here) for name, here in slots.items()), str(path))


def _read_host(words: list[str], where: str, line: str) -> tuple[str, int]:
    name, colon, after = words[0].partition(":")
    settings = dict(word.partition("=")[::2] for word in words[1:])
    texts = [after] * bool(colon) + [settings[word] for word in ("slots",) if word in settings]
    known = set(settings) <= set(SLOTS_WORDS) and len(texts) < 2
    if not HOST.fullmatch(name) or not known or not all(text.isascii() and text.isdecimal() for text in texts):
        raise ConfigError(f"{where}: expected `host1`, `host1 slots=2` or `host1:2`, got `{line}`; correct the line")
    return name, int(texts[0]) if texts else 1
