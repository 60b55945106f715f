"""The page of all keys of a topology, generated from its schema and the table of profiles."""

from mpitrain.config.reference import key_table, purpose
from mpitrain.topology.profiles import PROFILES, Measured
from mpitrain.topology.schema import LinkKeys, LinkTable, SiteTable, TopologyTable

HEAD = """\
# Every key of a topology

Printed by `mpitrain reference topology` from `mpitrain/topology/schema.py`; the page is `jobs/topologies/reference.md`.

A topology is a TOML file that tells which sites there are and which links join them; the files beside this page are
examples. `mpitrain emulate`, `launch --topology`, `job` and the benchmarks read it, and `mpitrain probe` writes one of
what it has measured. Messages take the way with the fewest links, and those of several pairs share a link. Rates are in
Mbit/s (10^6 bits), times in ms, and delays one way.

The least that a link needs is its rate and its delay, in the table of the link or in `[defaults]`. A link's own keys
win over its profile, that over the keys of `[defaults]`, and these over a profile in `[defaults]`; in one table a key
of one direction wins over that of both. Unknown keys are errors that name the nearest key.
"""

TRACES = """\
## Traces

`trace_up` and `trace_down` name a file relative to the topology. It is one of two kinds, told apart by its first line:

- mahimahi's: a line for each packet of 1500 bytes, with the millisecond at which it may leave. The last line is also
  the period, after which the trace begins anew. Packets within 10 ms are taken together.
- CSV: the line `time_s,mbps`, then lines such as `12.5,3.75` at even distances. A rate holds until the next line, the
  last one as long as the others; then the trace begins anew.

Times that go back, missing lines, negative rates and a trace without any byte are refused. Where one number stands for
a rate, as in choosing buffers, it is the mean.
"""

PROFILE_HEAD = """\
## Profiles

`profile` names a kind of link that was measured; down leads to the user, so `between` names the user's site first.
Where a fit is known, the rate is drawn anew for every second: its logarithm is an autoregression (mean and deviation of
the logarithm of Mbit/s, and phi, the correlation from one second to the next), clipped at the first and the last
percentile, with stalls of the given share and mean length in between. A direction without a fit takes its spread from
its percentiles and phi from the other one, or, where there is none, stays at its median. The draw depends on `seed`,
the link's name and the direction alone, and begins anew after an hour. Delay and loss are half of those of the round
trip, jitter is divided by the root of two. What was not measured is blank, and is told by other keys of the link.

| profile | down p50, p95 | up p50, p95 | mean, deviation, phi | stalls | round trip ms | jitter ms | loss % | source |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> int:
    """Print the page."""
    print(reference(), end="")
    return 0


def reference() -> str:
    """Render the page in Markdown."""
    parts = [HEAD]
    for title, kind in (("Top level", TopologyTable), ("[[site]]", SiteTable), ("[[link]]", LinkTable)):
        head, rule, *rows = key_table(kind)
        rows.sort(key=lambda row: not row.startswith("| `between`"))
        parts.append("\n".join([f"## {title}", "", purpose(kind), "", head, rule, *rows]) + "\n")
    defaults = f"## [defaults]\n\n{purpose(LinkKeys)}\n"
    return "\n".join([*parts, defaults, TRACES, PROFILE_HEAD]) + "".join(_profile_row(name) for name in PROFILES)


def _profile_row(name: str) -> str:
    facts = PROFILES[name]
    cells = [f"`{name}`", *(_percentiles(way) for way in (facts.down, facts.up)), "", ""]
    if facts.down and facts.down.ln_mu is not None:
        cells[-2] = f"{facts.down.ln_mu}, {facts.down.ln_sd}, {facts.down.phi}"
        cells[-1] = f"{facts.down.stall:.1%}, {facts.down.stall_s} s" if facts.down.stall else "none"
    numbers = (facts.rtt_ms, facts.jitter_ms, facts.loss_pct)
    cells += ["" if number is None else f"{number:g}" for number in numbers]
    return f"| {' | '.join([*cells, facts.source])} |\n"


def _percentiles(way: Measured | None) -> str:
    return f"{way.p50:g}, {way.p95:g}" if way else ""
