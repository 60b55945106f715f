"""The least that a sum can take on the links of a topology: its bytes on the busiest of them, and its latencies."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from mpitrain.topology.model import Hop, Topology

Latency = Callable[[int, int], float]
"""Seconds of an empty message from a rank to another."""


def bound_s(topology: Topology, collective: str, between: Sequence[Sequence[int]], owners: Sequence[int]) -> float:
    """Bound the seconds of a sum from below: nothing is computed, and no link ever waits.

    On a star whose links are alike this is 2 (p - 1) / p of the vector at the rate of a link, and two latencies. The
    latencies of a ring hide behind the bytes of other segments, all but two; of a small vector, all of them count.

    Parameters
    ----------
    collective : str
        Whose latencies count: those of ``ring``, else of a message to an owner and one back.
    between : list of list of int
        Bytes from every rank to every other.
    owners : list of int
        Ranks that own a part of the vector.
    """
    sites = [site.name for site in topology.place(len(between))]
    loads: dict[Hop, int] = defaultdict(int)
    for here, row in zip(sites, between, strict=True):
        for there, nbytes in zip(sites, row, strict=True):
            for hop in topology.path(here, there).hops:
                loads[hop] += nbytes
    busiest = max((load / topology.direction(hop).rate.mean_bytes_s for hop, load in loads.items()), default=0.0)
    ranks = range(len(sites))

    def alpha_s(source: int, dest: int) -> float:
        return topology.path(sites[source], sites[dest]).alpha_s

    if collective == "ring":
        return _around(ranks, alpha_s, busiest)
    return busiest + _there_and_back(ranks, owners, alpha_s)


def _there_and_back(ranks: range, owners: Sequence[int], alpha_s: Latency) -> float:
    """Add up the longest way to an owner and the longest one from it."""
    ways = (max(alpha_s(r, owner) for r in ranks) + max(alpha_s(owner, r) for r in ranks) for owner in owners)
    return max(ways, default=0.0)


def _around(ranks: range, alpha_s: Latency, busiest: float) -> float:
    """Bound by the bytes and two hops, or by all hops of the part that goes farthest: almost twice around."""
    hops = [alpha_s(rank, (rank + 1) % len(ranks)) for rank in ranks]
    pairs = [hops[rank] + hops[rank - 1] for rank in ranks]
    return max(busiest + max(pairs), 2 * sum(hops) - min(pairs))
