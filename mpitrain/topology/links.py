"""From the table of a link to its two directions: whose key counts, and what a profile or a trace says."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from mpitrain.config.plain import shown
from mpitrain.errors import ConfigError
from mpitrain.topology.model import Constant, Direction, Link, Rate
from mpitrain.topology.profiles import PROFILES
from mpitrain.topology.rates import BYTES_S, generated
from mpitrain.topology.schema import LinkKeys, LinkTable
from mpitrain.topology.traces import read_trace

Facts = dict[str, float | Rate]
"""What is known of one direction: ``rate``, and numbers under the names of their keys."""

NUMBERS = ("delay_ms", "jitter_ms", "loss_pct", "duplicate_pct", "reorder_pct", "queue_ms")
RATES_UP, RATES_DOWN = ("up_mbps", "trace_up"), ("down_mbps", "trace_down")
QUEUE_MS = 200.0
QUEUE_PACKETS = 32
"""A queue has room for so many at least; fewer would keep TCP from ever filling the link."""

SLOW_BYTES_S = 1_250_000
"""Rate of 10 Mbit/s. Below it a packet of 9000 bytes would hold up others for more than 7 ms."""

LARGE_MTU, SMALL_MTU = 9000, 1500


def read_link(table: LinkTable, defaults: LinkKeys, seed: int, folder: Path, where: str) -> Link:
    """Make a link of its table.

    A link's own keys win over its own profile, that over the keys of [defaults], these over the profile of
    [defaults]; in one table the key of one direction wins over that of both.

    Parameters
    ----------
    folder : Path
        Traces are relative to it.
    where : str
        Names the table in messages.

    Raises
    ------
    ConfigError
        A direction without rate or delay, two rates for one direction, an unknown profile, a bad trace or outage.
    """
    name = "-".join(table.between)
    profile = table.profile or defaults.profile
    if profile and profile not in PROFILES:
        near = difflib.get_close_matches(profile, PROFILES, 1)
        raise ConfigError(
            f"{where}: profile: expected one of {', '.join(PROFILES)}, got {shown(profile)}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    for keys, place in ((table, where), (defaults, f"{where}: [defaults]")):
        _refuse_unread(keys, place)
    ways = []
    for way in ("up", "down"):
        measured = _measured(profile, way, seed, name) if profile else {}
        common = _own(defaults, way, folder, f"{where}: [defaults]")
        own = _own(table, way, folder, where)
        facts = common | measured | own if table.profile else measured | common | own
        ways.append(_direction(facts, way, profile, where))
    outages = table.outages_s if table.outages_s is not None else defaults.outages_s or ()
    _check_outages(outages, where)
    return Link(table.between, ways[0], ways[1], outages)


def default_mtu(links: Iterable[Link]) -> int:
    """Return the bytes of the largest packet that suits all of the links."""
    slow = any(way.rate.mean_bytes_s < SLOW_BYTES_S for link in links for way in (link.up, link.down))
    return SMALL_MTU if slow else LARGE_MTU


def with_smallest_queues(link: Link, mtu: int) -> Link:
    """Raise queues that hold less than a few packets."""
    smallest = QUEUE_PACKETS * mtu
    up, down = (replace(way, queue_bytes=max(way.queue_bytes, smallest)) for way in (link.up, link.down))
    return replace(link, up=up, down=down)


def _refuse_unread(table: LinkKeys, where: str) -> None:
    """Refuse a key for both directions that the keys of each leave nothing to."""
    directed = {name: (f"up_{name}", f"down_{name}") for name in NUMBERS}
    pairs = [*directed.items(), *(("rate_mbps", (up, down)) for up in RATES_UP for down in RATES_DOWN)]
    for both, (up, down) in pairs:
        if all(getattr(table, key) is not None for key in (both, up, down)):
            raise ConfigError(f"{where}: {both} counts for neither direction beside {up} and {down}; leave it out")


def _own(table: LinkKeys, way: str, folder: Path, where: str) -> Facts:
    """Collect what a table itself says of one direction."""
    found: Facts = {}
    for name in NUMBERS:
        both, one = getattr(table, name), getattr(table, f"{way}_{name}")
        if both is not None or one is not None:
            found[name] = both if one is None else one
    mbps, trace = getattr(table, f"{way}_mbps"), getattr(table, f"trace_{way}")
    if mbps is not None and trace is not None:
        raise ConfigError(f"{where}: {way}_mbps and trace_{way} both say the rate; leave one of them out")
    mbps = table.rate_mbps if mbps is None else mbps
    if trace is not None:
        try:
            found["rate"] = read_trace(folder / trace)
        except ConfigError as error:
            raise ConfigError(f"{where}: trace_{way}: {error}") from None
    elif mbps is not None:
        found["rate"] = Constant(mbps * BYTES_S)
    return found


def _measured(profile: str, way: str, seed: int, link: str) -> Facts:
    """Collect what a profile says of one direction: half of the delay and the loss of the round trip.

    Jitter of both directions adds up in squares.
    """
    facts = PROFILES[profile]
    jitter = ("jitter_ms", facts.jitter_ms, math.sqrt(2))
    shares = (("delay_ms", facts.rtt_ms, 2.0), jitter, ("loss_pct", facts.loss_pct, 2.0))
    found: Facts = {name: both / parts for name, both, parts in shares if both is not None}
    rate = generated(profile, way, seed, link)
    return found if rate is None else found | {"rate": rate}


def _direction(facts: Mapping[str, float | Rate], way: str, profile: str | None, where: str) -> Direction:
    lacking = f"profile {profile} has none; " if profile else ""
    if "rate" not in facts:
        raise ConfigError(f"{where}: no rate of direction {way}; {lacking}set rate_mbps, {way}_mbps or trace_{way}")
    if "delay_ms" not in facts:
        raise ConfigError(f"{where}: no delay of direction {way}; {lacking}set delay_ms (0 for none)")
    rate = cast(Rate, facts["rate"])
    numbers = {name: cast(float, facts.get(name, 0.0)) for name in NUMBERS}
    queue_ms = cast(float, facts.get("queue_ms", QUEUE_MS))
    return Direction(
        rate=rate,
        delay_s=numbers["delay_ms"] / 1000,
        jitter_s=numbers["jitter_ms"] / 1000,
        loss=numbers["loss_pct"] / 100,
        duplicate=numbers["duplicate_pct"] / 100,
        reorder=numbers["reorder_pct"] / 100,
        queue_bytes=round(rate.mean_bytes_s * queue_ms / 1000),
    )


def _check_outages(outages: tuple[tuple[float, float], ...], where: str) -> None:
    last = 0.0
    for begin, end in outages:
        if not begin < end:
            raise ConfigError(f"{where}: outages_s: expected [from, to] with from < to, got [{begin:g}, {end:g}]")
        if begin < last:
            raise ConfigError(
                f"{where}: outages_s: expected outages one after the other, but [{begin:g}, {end:g}] begins before "
                f"{last:g}, when the last one ends; sort and join them"
            )
        last = end
