"""A benchmark that starts its own ranks: the very same command under a launcher, on hosts that may be emulated."""

import sys

from mpitrain.comm.launching import launcher
from mpitrain.comm.network import Network
from mpitrain.comm.runtime import ensure_home
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.supervising import supervise
from mpitrain.emulate.emulation import Emulation


def start_ranks(ranks: int, network: Network) -> int:
    """Run this command on ranks; return the launcher's exit code.

    Raises
    ------
    ConfigError, LaunchError
        No launcher, hosts that cannot be reached or emulated, or more ranks than they have slots.
    """
    stop = StopRequest()
    stop.listen()
    words, _ = launcher(ranks, network.wishes(ranks, allow_root=True, oversubscribe=True))
    network.check_reach(ranks)
    command = [*words, sys.executable, "-m", "mpitrain", *sys.argv[1:]]
    ensure_home()
    if not network.emulate or network.topology is None:
        return supervise(command, stop)
    with Emulation(network.topology) as emulation:
        code = emulation.run(command, stop=stop)
    print("\n".join(emulation.counts().table()), flush=True)
    return code
