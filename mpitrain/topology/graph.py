"""Sites and links as a graph: what is connected, what is a tree, and in which order a ring is cheap."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from mpitrain.errors import ConfigError
from mpitrain.topology.model import Site, Topology

RING_BYTES = 65_536
"""Size of the message by which orders of a ring are compared: that of a small bucket's part."""

MAX_NAMED = 8
"""Sites that a message names."""


def check_connected(topology: Topology) -> None:
    """Raise ConfigError with the sites that cannot be reached from the first one."""
    first = topology.sites[0].name
    reached = distances(topology, first)
    lost = [site.name for site in topology.sites if site.name not in reached]
    if lost:
        names = ", ".join(lost[:MAX_NAMED]) + (f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else "")
        raise ConfigError(f"topology {topology.name}: no links lead from {first} to {names}; add some")


def require_tree(topology: Topology) -> None:
    """Raise ConfigError, with the sites of a loop, where the links are no tree."""
    check_connected(topology)
    if loop := find_loop(topology):
        raise ConfigError(
            f"topology {topology.name}: expected a tree, got the loop {' - '.join(loop)}; remove one of these links"
        )


def find_loop(topology: Topology) -> list[str]:
    """Return the sites along a loop, the first again at the end; empty where there is none."""
    parent: dict[str, str] = {}
    for link in topology.links:
        one, other = link.ends
        if (way := _climb(parent, one)) and way[-1] == _climb(parent, other)[-1]:
            shared = set(_climb(parent, other)) & set(way)
            left = way[: next(place for place, name in enumerate(way) if name in shared) + 1]
            right = [name for name in _climb(parent, other) if name not in shared]
            return [*left, *reversed(right), one]
        _hang(parent, one, other)
    return []


def _climb(parent: dict[str, str], name: str) -> list[str]:
    """List a site and all above it."""
    way = [name]
    while (name := parent.get(name, "")) != "":
        way.append(name)
    return way


def _hang(parent: dict[str, str], name: str, above: str) -> None:
    """Make a site the top of its tree, and hang it below another one."""
    way = _climb(parent, name)
    for lower, upper in pairwise(way):
        parent[upper] = lower
    parent[name] = above


def root_of(topology: Topology) -> str:
    """Return the only site of kind ``core``, or else the site from which the farthest one is the nearest."""
    cores = [site.name for site in topology.sites if site.kind == "core"]
    if len(cores) == 1:
        return cores[0]
    return min((site.name for site in topology.sites), key=lambda name: max(distances(topology, name).values()))


def distances(topology: Topology, start: str) -> dict[str, int]:
    """Count the links to all sites that can be reached, the nearest first."""
    found = {start: 0}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        for _, there in topology.neighbours(here):
            if there not in found:
                found[there] = found[here] + 1
                waiting.append(there)
    return found


def ring_order(topology: Topology) -> list[Site]:
    """Order the sites that have slots so that neighbours are near each other, as do the last and the first.

    A tree (a star, a chain) is walked from one of its ends, branch after branch, so that the ring uses every link
    once in each direction. Otherwise each site is followed by the cheapest of those that are left.
    """
    ranked = [site for site in topology.sites if site.slots]
    if not find_loop(topology):
        ends = [site for site in ranked if len(topology.neighbours(site.name)) == 1]
        walk = _walk(topology, (ends or ranked)[0].name)
        return [topology.site(name) for name in walk if topology.site(name).slots]
    order, left = ranked[:1], ranked[1:]
    while left:
        here = order[-1].name
        nearest = min(left, key=lambda site: _cost_s(topology, here, site.name))
        left.remove(nearest)
        order.append(nearest)
    return order


def ring_note(topology: Topology, ranks: int) -> str:
    """Name the order of sites in which a ring of so many ranks has less latency than in that of the file; or nothing.

    Raises
    ------
    ConfigError
        More ranks than slots.
    """
    sites = dict.fromkeys(topology.place(ranks))
    better = [site for site in ring_order(topology) if site in sites]
    now_ms, then_ms = _around_ms(topology, list(sites)), _around_ms(topology, better)
    if then_ms >= now_ms:
        return ""
    names = ", ".join(site.name for site in better)
    return (
        f"{topology.source or topology.name}: once around the ring takes {now_ms:g} ms; with the sites in the order "
        f"{names}, {then_ms:g} ms"
    )


def _around_ms(topology: Topology, sites: Sequence[Site]) -> float:
    """Add up the delays around a ring, to the microsecond: sums of the same numbers in another order are equal."""
    pairs = pairwise([*sites, sites[0]])
    return round(sum(topology.path(one.name, other.name).alpha_s for one, other in pairs) * 1000, 3)


def _walk(topology: Topology, start: str) -> list[str]:
    """List the sites of a tree, depth first."""
    seen: dict[str, None] = {}
    waiting = [start]
    while waiting:
        here = waiting.pop()
        seen[here] = None
        waiting += [there for _, there in reversed(topology.neighbours(here)) if there not in seen]
    return list(seen)


def _cost_s(topology: Topology, source: str, dest: str) -> float:
    path = topology.path(source, dest)
    return path.alpha_s + path.beta_s * RING_BYTES
