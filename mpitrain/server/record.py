"""What a server has done, for those who count."""

from dataclasses import dataclass, field

from mpitrain.server.messages import Push


@dataclass(frozen=True)
class Taken:
    """A push in an update: whose, of which clock, how stale, and whether it counted."""

    worker: int
    clock: int
    staleness: int
    counted: bool
    push: Push


@dataclass(frozen=True)
class Update:
    """What became of some pushes. ``norm`` is None where the update was rejected; ``lr`` is 0 where there was none."""

    version: int
    clock: int
    lr: float
    norm: float | None
    taken: list[Taken]


@dataclass
class Record:
    """What a server has done since somebody last looked.

    Attributes
    ----------
    updates : list of Update
        In their order.
    dropped : list of Taken
        Pushes that came too late and were forgotten.
    """

    updates: list[Update] = field(default_factory=list)
    dropped: list[Taken] = field(default_factory=list)
