"""Products in turns: every round runs each of them once, so that a drift of the machine meets all alike.

Between two turns all ranks meet, so that the messages of one product never stand in the way of another's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from mpitrain.bench.records import Record
from mpitrain.comm.agreement import NumberGather
from mpitrain.comm.grid import Axis

MS = 1e3

PEER_FIELDS = ("peer", "peer_ms", "peer_alone_ms", "peer_exposed_ms", "step_ratio", "exposed_ratio")
"""Of a record; empty where there are no peers."""


class Taken(NamedTuple):
    """A training step that was taken.

    Attributes
    ----------
    loss : float
        Mean over the samples of the step, as far as this rank knows it.
    norm : float
        Of the gradient before clipping.
    sent_bytes : int or None
        That this rank handed to its library; None where nobody counts them.
    """

    loss: float
    norm: float
    sent_bytes: int | None = None


class Product(Protocol):
    """Something that trains."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    def step(self) -> Taken:
        """Take the next training step."""


@dataclass(frozen=True)
class Family:
    """One product: its step without exchange, and the same step with exchanges of several kinds."""

    alone: Product
    ways: Sequence[Product]

    @property
    def members(self) -> list[Product]:
        """All of them."""
        return [self.alone, *self.ways]


@dataclass(frozen=True)
class Turns:
    """How much is measured.

    Attributes
    ----------
    rounds : int
        Turns of every product.
    steps : int
        Of a turn, that are timed together.
    warm_up : int
        Steps before them, that are not: connections that were idle send slowly at first, and caches are cold.
    timeout_s : float
        Patience at the meetings of all ranks.
    """

    rounds: int
    steps: int
    warm_up: int = 2
    timeout_s: float = 600.0

    @property
    def total(self) -> int:
        """Steps of every product."""
        return self.rounds * (self.steps + self.warm_up)


@dataclass
class Measured:
    """Seconds a step of every turn of a product, and bytes that rank 0 has sent in a step."""

    step_s: list[float]
    sent_bytes: int | None = None

    @property
    def ms(self) -> float:
        """Median of the turns."""
        return MS * median(self.step_s)


def measure(axis: Axis, products: Sequence[Product], turns: Turns) -> dict[str, Measured]:
    """Run all products in turns. Collective over ``axis``; all ranks return the same, by name.

    A turn is timed from its common start until the slowest rank has taken its last step.
    """
    found = {product.name: Measured([]) for product in products}
    for _ in range(turns.rounds):
        for product in products:
            for _ in range(turns.warm_up):
                product.step()
            meet(axis, turns.timeout_s)
            begin = time.perf_counter()
            taken = [product.step() for _ in range(turns.steps)][-1]
            table = meet(axis, turns.timeout_s, time.perf_counter() - begin, float(taken.sent_bytes or 0))
            one = found[product.name]
            one.step_s.append(float(table[:, 0].max()) / turns.steps)
            one.sent_bytes = None if taken.sent_bytes is None else int(table[0, 1])
    return found


def meet(axis: Axis, timeout_s: float, *values: float) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Wait for all ranks, and give each a row of every rank's values. Collective over ``axis``."""
    return NumberGather(axis, np.array([*values, 0.0]), timeout_s=timeout_s).wait().table


def compare(model: str, layout: str, ours: Family, peers: Family | None, found: dict[str, Measured]) -> list[Record]:
    """Make a record of each of our ways beside each of the peers'; of ours alone where there are none.

    What is exposed of the communication is the step minus the same step without exchange, of each product by itself.
    """
    return [
        {
            "model": model,
            "layout": f"{layout} {way.name}",
            **_times("", found[way.name], found[ours.alone.name]),
            "sent_bytes": found[way.name].sent_bytes,
            **_beside(way, peer, ours, peers, found),
        }
        for way in ours.ways
        for peer in (peers.ways if peers else [None])
    ]


def _times(prefix: str, step: Measured, alone: Measured) -> Record:
    return {
        f"{prefix}ms": step.ms,
        f"{prefix}alone_ms": alone.ms,
        f"{prefix}exposed_ms": step.ms - alone.ms,
    }


def _beside(
    way: Product, peer: Product | None, ours: Family, peers: Family | None, found: dict[str, Measured]
) -> Record:
    if peer is None or peers is None:
        return dict.fromkeys(PEER_FIELDS)
    mine, theirs = found[way.name], found[peer.name]
    exposed = mine.ms - found[ours.alone.name].ms
    peer_times = _times("peer_", theirs, found[peers.alone.name])
    return {
        "peer": peer.name,
        **peer_times,
        "step_ratio": theirs.ms / mine.ms,
        # Below zero is nothing but noise, and no divisor.
        "exposed_ratio": (theirs.ms - found[peers.alone.name].ms) / exposed if exposed > 0 else None,
    }
