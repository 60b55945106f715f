"""``mpitrain bench allreduce``: sizes x collectives x codecs beside MPI's own sum, and beside the bound of the links.

To be run by ranks, which the command starts itself where no launcher has.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from mpitrain.bench.ranks import described, on_ranks
from mpitrain.bench.records import show
from mpitrain.bench.sums import FLOAT32_BYTES, Case, measure, peer_of, verdicts
from mpitrain.codecs.memory import SENDERS
from mpitrain.collectives.registry import COLLECTIVES
from mpitrain.comm.agreement import agree
from mpitrain.comm.grid import Axis
from mpitrain.config.codec_names import parse_codec
from mpitrain.config.schema import ExchangeConfig
from mpitrain.config.validate import refusal
from mpitrain.errors import ConfigError
from mpitrain.topology.load import load_topology
from mpitrain.topology.model import Topology

MAX_MB = 4_000
"""Of a vector: there are several of it on every rank."""


def main(
    ranks: int | None,
    sizes: Sequence[float],
    collectives: Sequence[str],
    cells: Sequence[str],
    *,
    segments: Sequence[int],
    repeats: int,
    topology: Path | None,
    path: Path | None,
) -> int:
    """Measure all cases; rank 0 prints the table, and whether encoding pays."""

    def on(axis: Axis) -> None:
        cases = agree(axis, lambda: make_cases(sizes, collectives, cells, segments))
        network = agree(axis, lambda: _network(topology, axis.size))
        records = measure(axis, cases, repeats, network)
        bounds = f", bounds of {network.name}" if network else ""
        title = f"sums over {described(axis)}; medians of {repeats}{bounds}"
        if axis.rank == 0:
            show(title, records, path)
            print("\n".join(verdicts(records)), flush=True)

    return on_ranks("allreduce", ranks, on)


def make_cases(
    sizes: Sequence[float], collectives: Sequence[str], cells: Sequence[str], segments: Sequence[int]
) -> list[Case]:
    """Combine all of them, each with its peers: MPI's own sum, and the same collective with raw values.

    Parameters
    ----------
    sizes : list of float
        Vectors, in 10^6 bytes of float32.
    collectives, cells : list of str
        Cells as `parse_stream` reads them.
    segments : list of int
        Sizes of segments, as `exchange.segment_kb`; empty: its default.

    Raises
    ------
    ConfigError
        Something unknown, or a combination that nobody can make.
    """
    unknown = next((name for name in collectives if name not in COLLECTIVES), None)
    if unknown is not None:
        raise ConfigError(f"bench: --collective: expected one of {', '.join(COLLECTIVES)}, got {unknown!r}")
    streams = list(dict.fromkeys([("raw", "none"), *map(parse_stream, cells)]))
    segments = segments or [ExchangeConfig().segment_kb]
    cases = []
    for megabytes in sizes:
        if not megabytes <= MAX_MB:
            raise ConfigError(f"bench: --size: expected at most {MAX_MB:,} MB, got {megabytes:g}")
        size = round(1e6 * megabytes / FLOAT32_BYTES)
        cases.append(peer_of(size))
        cases += [
            Case(collective, codec, memory, size, segment_kb)
            for collective, (codec, memory), segment_kb in product(collectives, streams, segments)
            if refusal(collective, codec, memory) is None
        ]
    return list(dict.fromkeys(cases))


def parse_stream(text: str) -> tuple[str, str]:
    """Read ``CODEC`` or ``CODEC:MEMORY``; left out, the memory is residual, or none for raw; raises ConfigError."""
    codec, colon, memory = text.partition(":")
    memory = memory if colon else "none" if codec == "raw" else "residual"
    if memory not in SENDERS:
        raise ConfigError(f"bench: --cell {text}: expected a memory of {', '.join(SENDERS)}, got {memory!r}")
    try:
        parse_codec(codec)
    except ConfigError as error:
        raise ConfigError(f"bench: --cell {text}: {error}") from None
    if reason := refusal("direct", codec, memory):
        raise ConfigError(f"bench: --cell {text}: {reason}")
    return codec, memory


def _network(path: Path | None, ranks: int) -> Topology | None:
    topology = load_topology(path) if path else None
    if topology:
        topology.place(ranks)  # refuses more ranks than slots
    return topology
