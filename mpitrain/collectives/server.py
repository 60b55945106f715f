"""Server: every rank sends its values to the ranks that serve, and these send the sum back to everyone.

Two latencies like direct, for a star of links whose middle is the only place that every rank can reach. A rank that
does not serve sends the vector once, where direct sends it 2(p-1)/p times; what a server sends grows with the ranks.
"""

from mpitrain.collectives.base import Transport
from mpitrain.collectives.direct import Direct
from mpitrain.comm.grid import Axis
from mpitrain.errors import ConfigError, count
from mpitrain.partition import server_bounds


class Server(Direct):
    """Direct, but only the last ranks of the axis own chunks.

    They take part in the sum like all others.

    Parameters
    ----------
    axis, transport
        As in `Reducer`.
    servers : int
        Ranks at the end of the axis that add up; the vector is cut evenly among them.

    Raises
    ------
    ConfigError
        No rank would serve, or none would be served.
    """

    name = "server"

    def __init__(self, axis: Axis, transport: Transport | None = None, *, servers: int = 1) -> None:
        if reason := servers_refusal(servers, axis.size):
            raise ConfigError(f"collective: {reason}")
        super().__init__(axis, transport)
        self.servers = servers

    def chunks(self, size: int, block: int) -> list[tuple[int, int]]:
        """Cut a vector among the servers."""
        return server_bounds(size, self.axis.size, self.servers, block)


def servers_refusal(servers: int, ranks: int) -> str | None:
    """Say why some of the ranks cannot serve the others, or None where they can."""
    if 1 <= servers < ranks:
        return None
    remedy = f"set servers from 1 to {ranks - 1}" if ranks > 1 else "start 2 or more"
    return f"servers = {servers} of {count(ranks, 'rank')} leave no server or no rank to serve; {remedy}"
