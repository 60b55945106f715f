"""``mpitrain bench allreduce``: alone, it starts its ranks; under a launcher, these are the ranks, and measure."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from mpitrain.cli.probe import start
from mpitrain.comm.hints import is_launched
from mpitrain.comm.network import read_network
from mpitrain.comm.runtime import Position, fail
from mpitrain.comm.signals import StopRequest
from mpitrain.errors import MpitrainError

MEASURING = "mpitrain.bench.allreduce"
DEFAULT_RANKS = 4


def main(
    ranks: int | None,
    sizes: Sequence[float],
    collectives: Sequence[str],
    cells: Sequence[str],
    *,
    segments: Sequence[int],
    repeats: int,
    topology: Path | None,
    emulate: bool,
    path: Path | None,
) -> int:
    """Measure on ranks: all slots of a topology where their number is left out, else four."""
    bench = importlib.import_module(MEASURING)
    if is_launched():
        options: dict[str, object] = {"segments": segments, "repeats": repeats, "topology": topology, "path": path}
        return int(bench.main(ranks, sizes, collectives, cells, **options))
    stop = StopRequest()
    stop.listen()
    try:
        bench.make_cases(sizes, collectives, cells, segments)  # refused before anything starts
        network = read_network(topology, emulate=emulate)
        return start(ranks if topology else ranks or DEFAULT_RANKS, network, stop)
    except MpitrainError as error:
        fail(error, Position())
