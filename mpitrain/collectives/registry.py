"""Collectives by the name that a configuration gives them."""

from mpitrain.collectives.base import Transport
from mpitrain.collectives.direct import Direct
from mpitrain.collectives.native import Native
from mpitrain.collectives.reducer import Reducer
from mpitrain.collectives.ring import Ring
from mpitrain.collectives.server import Server
from mpitrain.comm.grid import Axis
from mpitrain.errors import ConfigError

COLLECTIVES: dict[str, type[Reducer]] = {kind.name: kind for kind in (Native, Ring, Direct, Server)}


def make_reducer(name: str, axis: Axis, transport: Transport | None = None, *, servers: int = 1) -> Reducer:
    """Build a reducer.

    Parameters
    ----------
    servers : int
        Ranks at the end of the axis that add up, where ``name`` is "server"; the others have none.

    Raises
    ------
    ConfigError
        An unknown name, or servers that leave no server or no rank to serve.
    """
    if name not in COLLECTIVES:
        raise ConfigError(f"collective: expected one of {', '.join(COLLECTIVES)}, got {name!r}")
    kind = COLLECTIVES[name]
    return Server(axis, transport, servers=servers) if kind is Server else kind(axis, transport)
