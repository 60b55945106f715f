"""A launcher's command, run on this machine's hosts or on emulated ones."""

import importlib
import shlex

from mpitrain.comm.network import Network
from mpitrain.comm.runtime import ensure_home
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.supervising import supervise

EMULATION = "mpitrain.emulate.emulation"
"""Needs rights and devices of the kernel, so it is only loaded where hosts are emulated."""


def shown(command: list[str], network: Network) -> str:
    """Show what can be typed instead."""
    around = ["mpitrain", "emulate", network.topology.source, "--"] if network.emulate and network.topology else []
    return shlex.join([*around, *command])


def run(command: list[str], network: Network, stop: StopRequest, *, survive: bool = False, trains: bool = True) -> int:
    """Run it to its end and return its exit code; wishes to stop are handed on. Raises LaunchError.

    ``survive``: ranks may go on without others (see `Wishes`); ``trains``: as told to `supervise`.
    """
    ensure_home()
    together = not survive
    if not network.emulate:
        return supervise(command, stop, together=together, trains=trains)
    with importlib.import_module(EMULATION).Emulation(network.topology) as emulation:
        code = int(emulation.run(command, stop=stop, together=together, trains=trains))
    print("\n".join(emulation.counts().table()), flush=True)
    return code
