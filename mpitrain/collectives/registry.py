"""Collectives by the name that a configuration gives them."""

from mpitrain.collectives.base import Reducer, Transport
from mpitrain.collectives.direct import Direct
from mpitrain.collectives.native import Native
from mpitrain.collectives.ring import Ring
from mpitrain.comm.grid import Axis
from mpitrain.errors import ConfigError

COLLECTIVES: dict[str, type[Reducer]] = {kind.name: kind for kind in (Native, Ring, Direct)}


def make_reducer(name: str, axis: Axis, transport: Transport | None = None) -> Reducer:
    """Build a reducer; raises ConfigError for an unknown name."""
    if name not in COLLECTIVES:
        raise ConfigError(f"collective: expected one of {', '.join(COLLECTIVES)}, got {name!r}")
    return COLLECTIVES[name](axis, transport)
