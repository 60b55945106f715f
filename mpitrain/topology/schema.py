"""The file of a topology: one frozen structure a table, with types, bounds and defaults in one place."""

from typing import Annotated

from msgspec import Meta

from mpitrain.config.schema import Section

MAX_SITES, MAX_LINKS = 4096, 65_536
MAX_MS = 3_600_000

Mbps = Annotated[float, Meta(ge=1e-3, le=1e6)]
Milliseconds = Annotated[float, Meta(ge=0, le=MAX_MS)]
Percent = Annotated[float, Meta(ge=0, lt=100)]
Queue = Annotated[float, Meta(gt=0, le=1e8)]
Seconds = Annotated[float, Meta(ge=0)]
Word = Annotated[str, Meta(min_length=1, max_length=64)]
Kind = Annotated[str, Meta(pattern=r"\A[\w-]{1,32}\Z")]
File = Annotated[str, Meta(min_length=1, max_length=4096)]


class SiteTable(Section, frozen=True, kw_only=True):
    """[[site]]: a place; ranks go to the sites in the order of the file, each filled before the next."""

    name: Word
    """Also the name of its emulated host: letters, digits and hyphens, at most 48."""
    kind: Kind = "edge"
    """cell, edge, aggregation, core, or a word of your own. The only core is the root of a tree."""
    slots: Annotated[int, Meta(ge=0, le=4096)] = 1
    """Ranks that it may run; 0: it only forwards. Servers are the last ranks, so their site stands last."""
    speed: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.0
    """Of its computation, relative to the others."""
    host: Annotated[str, Meta(max_length=253)] = ""
    """Address under which a launcher reaches it in real runs; its name where left out."""


class LinkKeys(Section, frozen=True, kw_only=True):
    """[defaults]: any key of a link but ``between``, for all links; a link's own keys win."""

    rate_mbps: Mbps | None = None
    """Rate of both directions, in 10^6 bits a second."""
    up_mbps: Mbps | None = None
    """Rate from the first end to the second."""
    down_mbps: Mbps | None = None
    """Rate from the second end to the first."""
    trace_up: File | None = None
    """File with the rate from the first end to the second over time; begins anew after its end."""
    trace_down: File | None = None
    """File with the rate from the second end to the first over time."""
    profile: Word | None = None
    """Measured kind of link, see below: a rate that varies, delay, jitter and loss, as far as they were measured."""
    delay_ms: Milliseconds | None = None
    """One way, without waiting for other packets; the round trip takes twice as long."""
    up_delay_ms: Milliseconds | None = None
    """The same, from the first end to the second."""
    down_delay_ms: Milliseconds | None = None
    """The same, from the second end to the first."""
    jitter_ms: Milliseconds | None = None
    """Standard deviation of the delay; 0 where left out. Packets keep their order."""
    up_jitter_ms: Milliseconds | None = None
    """The same, from the first end to the second."""
    down_jitter_ms: Milliseconds | None = None
    """The same, from the second end to the first."""
    loss_pct: Percent | None = None
    """Packets that are lost; 0 where left out."""
    up_loss_pct: Percent | None = None
    """The same, from the first end to the second."""
    down_loss_pct: Percent | None = None
    """The same, from the second end to the first."""
    duplicate_pct: Percent | None = None
    """Packets that arrive twice; 0 where left out."""
    up_duplicate_pct: Percent | None = None
    """The same, from the first end to the second."""
    down_duplicate_pct: Percent | None = None
    """The same, from the second end to the first."""
    reorder_pct: Percent | None = None
    """Packets that overtake, since they skip the delay; 0 where left out."""
    up_reorder_pct: Percent | None = None
    """The same, from the first end to the second."""
    down_reorder_pct: Percent | None = None
    """The same, from the second end to the first."""
    queue_ms: Queue | None = None
    """How long the last byte of a full queue waits at the mean rate, 200 where left out; at least 32 packets fit. What
    does not fit is dropped."""
    up_queue_ms: Queue | None = None
    """The same, from the first end to the second."""
    down_queue_ms: Queue | None = None
    """The same, from the second end to the first."""
    outages_s: tuple[tuple[Seconds, Seconds], ...] | None = None
    """From when to when, in seconds since the start, it carries nothing: ``[[30, 60], [300, inf]]``; inf: for good."""


class LinkTable(LinkKeys, frozen=True, kw_only=True):
    """[[link]]: what joins two sites; up leads from the first to the second, down back."""

    between: tuple[str, str]
    """Names of the two sites."""


class TopologyTable(Section, frozen=True, kw_only=True):
    """Top level: before the first table."""

    name: Word | None = None
    """Name of the topology; that of the file where left out."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Of everything that is left to chance: rates of profiles, jitter, loss."""
    mtu: Annotated[int, Meta(ge=576, le=65_000)] | None = None
    """Bytes of the largest packet of emulated links; where left out 9000, or 1500 if a mean rate is below 10 Mbit/s."""
    tree: bool = False
    """Whether links must not form a loop: such a file is refused, with the sites along the loop."""
    defaults: LinkKeys = LinkKeys()
    """Keys of all links."""
    site: tuple[SiteTable, ...]
    """A table for each site, 1 to 4096."""
    link: tuple[LinkTable, ...] = ()
    """A table for each link, at most 65,536. All sites must be connected."""
