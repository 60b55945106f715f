"""A topology as tables for people: what it consists of, and what a message between two sites costs."""

from collections.abc import Iterable, Sequence
from itertools import islice, permutations

from mpitrain.errors import count
from mpitrain.topology.graph import find_loop, root_of
from mpitrain.topology.model import Direction, Link, Site, Topology
from mpitrain.topology.rates import BYTES_S, Trace

MAX_ROWS = 40
"""Of one table; the others are counted."""


def bdp_bytes(topology: Topology, ranks: int) -> int:
    """Return the largest bandwidth-delay product between any two of the sites of so many ranks.

    That is how many bytes a sender has under way, from when it sends one until it learns of its arrival: the round trip
    times the rate of the path. 0 where all ranks share a site.

    Raises
    ------
    ConfigError
        More ranks than slots.
    """
    sites = list(dict.fromkeys(topology.place(ranks)))
    return max((_bdp(topology, one, other) for one, other in permutations(sites, 2)), default=0)


def _bdp(topology: Topology, source: Site, dest: Site) -> int:
    path, back = topology.path(source.name, dest.name), topology.path(dest.name, source.name)
    return round((path.alpha_s + back.alpha_s) / path.beta_s)


def describe(topology: Topology) -> list[str]:
    """Render the sites, the links, and the paths between sites with slots; each table with at most 40 rows."""
    ranked = [site for site in topology.sites if site.slots]
    shape = "with loops" if find_loop(topology) else f"a tree below {root_of(topology)}"
    facts = [count(len(topology.sites), "site"), count(topology.slots, "slot"), count(len(topology.links), "link")]
    lines = [f"topology {topology.name}: {', '.join(facts)}, {shape}; packets of {topology.mtu} bytes"]
    sites = ([each.name, each.kind, str(each.slots), f"{each.speed:g}", each.host] for each in topology.sites)
    lines += ["", *_table(["site", "kind", "slots", "speed", "host"], sites, len(topology.sites))]
    if topology.links:
        head = ["link", "Mbit/s up", "down", "ms up", "down", "besides"]
        lines += ["", *_table(head, (_link_row(link) for link in topology.links), len(topology.links))]
    if len(ranked) > 1:
        head = ["path", "links", "ms one way", "Mbit/s", "kB under way"]
        pairs = permutations(ranked, 2)
        rows = (_path_row(topology, one, other) for one, other in pairs)
        lines += ["", *_table(head, rows, len(ranked) * (len(ranked) - 1))]
        lines += ["", "kB under way: round trip times rate, what the sender's buffer must hold to keep the path busy"]
    return lines


def _link_row(link: Link) -> list[str]:
    ways = (link.up, link.down)
    numbers = [_mbps(way.rate.mean_bytes_s) for way in ways] + [f"{way.delay_s * 1000:.4g}" for way in ways]
    same = _besides(link.up) == _besides(link.down)
    told = (
        _besides(link.up)
        if same
        else [f"{name} {word}" for name, way in zip(("up", "down"), ways, strict=True) for word in _besides(way)]
    )
    told = told + [f"out from {begin:g} to {end:g} s" for begin, end in link.outages]
    return [link.name, *numbers, ", ".join(told)]


def _besides(way: Direction) -> list[str]:
    """Tell what a direction has beyond rate and delay."""
    told = []
    if isinstance(way.rate, Trace):
        told.append(f"varies ({way.rate.profile or way.rate.file or 'trace'})")
    told += [f"jitter {way.jitter_s * 1000:.3g} ms"] * bool(way.jitter_s)
    for name, share in (("lost", way.loss), ("twice", way.duplicate), ("overtaking", way.reorder)):
        told += [f"{share * 100:.3g} % {name}"] * bool(share)
    return told


def _path_row(topology: Topology, source: Site, dest: Site) -> list[str]:
    path = topology.path(source.name, dest.name)
    numbers = [f"{path.alpha_s * 1000:.4g}", _mbps(1 / path.beta_s), f"{_bdp(topology, source, dest) / 1000:.4g}"]
    return [f"{source.name} -> {dest.name}", str(len(path.hops)), *numbers]


def _mbps(bytes_s: float) -> str:
    return f"{bytes_s / BYTES_S:.4g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], total: int) -> list[str]:
    """Align columns: the first and the last ones, and words, to the left, numbers to the right."""
    shown = [head, *islice(rows, MAX_ROWS)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    numeric = [all(_is_number(cell) for cell in column[1:]) for column in zip(*shown, strict=True)]
    lines = []
    for row in shown:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines + [f"… and {total - MAX_ROWS} more"] * (total > MAX_ROWS)


def _is_number(cell: str) -> bool:
    return cell.replace(".", "").replace("e+", "").isdigit()
