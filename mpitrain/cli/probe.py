"""``mpitrain probe``: alone, it starts its ranks; under a launcher, these are the ranks, and measure."""

import importlib
import sys
from pathlib import Path

from mpitrain.cli.starting import run
from mpitrain.comm.hints import is_launched
from mpitrain.comm.launching import launcher
from mpitrain.comm.network import Network, read_network
from mpitrain.comm.runtime import Position, fail
from mpitrain.comm.signals import StopRequest
from mpitrain.errors import MpitrainError

MEASURING = "mpitrain.bench.probe"


def main(
    ranks: int | None,
    *,
    topology: Path | None,
    emulate: bool,
    hostfile: Path | None,
    interface: str,
    seconds: float,
    out: Path | None,
    json: Path | None,
) -> int:
    """Measure on ranks, one a host at least."""
    if is_launched():
        return int(importlib.import_module(MEASURING).main(seconds=seconds, out=out, json=json))
    stop = StopRequest()
    stop.listen()
    try:
        return start(ranks, read_network(topology, hostfile, emulate=emulate, interface=interface), stop)
    except MpitrainError as error:
        fail(error, Position())


def start(ranks: int | None, network: Network, stop: StopRequest) -> int:
    """Start the very same command on ranks."""
    ranks = network.ranks(ranks)
    words, _ = launcher(ranks, network.wishes(ranks, allow_root=True, oversubscribe=True))
    network.check_reach(ranks)
    return run([*words, sys.executable, "-m", "mpitrain", *sys.argv[1:]], network, stop, trains=False)
