"""``mpitrain bench step``: alone, it starts its ranks; under a launcher, these are the ranks, and measure."""

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from mpitrain.cli.probe import start
from mpitrain.comm.hints import is_launched
from mpitrain.comm.network import read_network
from mpitrain.comm.runtime import Position, fail
from mpitrain.comm.signals import StopRequest
from mpitrain.errors import MpitrainError

MEASURING, PEERS = "mpitrain.bench.step", "mpitrain.bench.ddp"
DEFAULT_RANKS = 4


def main(
    config: Path | None,
    ranks: int | None,
    cells: Sequence[str],
    overrides: Sequence[str],
    *,
    rounds: int,
    steps: int,
    topology: Path | None,
    emulate: bool,
    path: Path | None,
) -> int:
    """Measure on ranks: all slots of a topology where their number is left out, else four."""
    bench = importlib.import_module(MEASURING)
    request = bench.Request(config, overrides, cells, rounds, steps)
    if is_launched():
        return int(bench.main(ranks, request, load_peers, path))
    stop = StopRequest()
    stop.listen()
    try:
        network = read_network(topology, emulate=emulate)
        ranks = network.ranks(ranks if topology else ranks or DEFAULT_RANKS)
        request.resolve(ranks)  # refused before anything starts
        return start(ranks, network, stop)
    except MpitrainError as error:
        fail(error, Position())


def load_peers() -> Callable[..., Any]:
    """Import what needs torch, which may not be there (ImportError); it takes seconds, so only ranks do it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or it warns of hosts that have no name
    return cast(Callable[..., Any], importlib.import_module(PEERS).TorchFamily)
