"""What workers and servers tell each other beside gradients and weights, and how it is numbered."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from mpitrain.errors import ProtocolError
from mpitrain.server.clocks import Apply, Drop, Op, Refresh, Reply


class Push(NamedTuple):
    """What a worker tells of a gradient that it has sent.

    Attributes
    ----------
    clock : int
        Its count of steps with this one.
    version, held : int
        Of the weights that the gradient was computed on: updates in them, and newest complete clock.
    samples, divisor : float
        Samples behind the gradient, and by what number of them their sum was divided.
    finite : float
        0 where some rank of the replica met NaN or infinity: the push is void.
    lost : float
        1 where some rank of the replica got an answer that did not follow on what it has: it needs the weights.
    stop : float
        1 where somebody wants the run to end.
    """

    clock: float
    version: float = 0
    held: float = 0
    samples: float = 1
    divisor: float = 1
    finite: float = 1
    lost: float = 0
    stop: float = 0


class Kind(IntEnum):
    """What an answer brings."""

    CHANGE = 0
    """What has changed of the weights since the last answer (or the weights, with ``server_codec = "raw"``)."""
    WEIGHTS = 1
    """The weights themselves, on which later changes follow."""
    ALIVE = 2
    """Nothing: the server is there, and waits for others."""


class Answer(NamedTuple):
    """What a server tells of the weights that it has sent.

    Attributes
    ----------
    kind : Kind
        What follows.
    version, clock : int
        Updates in the weights, and newest complete clock.
    last : int
        Clock after which the round ends.
    lr, norm : float
        Learning rate and gradient norm of the last update; norm NaN where it was rejected.
    skipped : int
        Updates rejected so far.
    to : int
        The clock of the push that is answered; 0 for none.
    sequence : int
        Number of the change that comes after these weights (kind WEIGHTS).
    dead : int
        1 + the number of a worker that has died; 0 while all live.
    """

    kind: float
    version: float
    clock: float
    last: float
    lr: float
    norm: float
    skipped: float
    to: float
    sequence: float
    dead: float = 0


_CODES = (Apply, Drop, Reply, Refresh)


def pack(op: Op, last: int) -> list[float]:
    """Write an operation, and the clock after which the round ends, as numbers."""
    if isinstance(op, Apply):
        return [last, 0, op.version, op.clock, *(number for push in op.pushes for number in push)]
    return [last, _CODES.index(type(op)), *op]


def unpack(values: Sequence[float]) -> tuple[Op, int]:
    """Read what `pack` wrote; raises ProtocolError."""
    last, code, *rest = map(int, values)
    if not 0 <= code < len(_CODES):
        raise ProtocolError(f"server: expected an operation from 0 to {len(_CODES) - 1}, got {code}")
    kind = _CODES[code]
    if kind is Apply:
        return Apply(tuple(zip(rest[2::2], rest[3::2], strict=True)), rest[0], rest[1]), last
    return kind(*rest), last  # type: ignore[arg-type]
