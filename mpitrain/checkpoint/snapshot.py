"""What a checkpoint holds, independent of files."""

from dataclasses import dataclass, field

from mpitrain.arrays import Floats, Ints
from mpitrain.partition import ShardSpec

Meta = dict[str, object]
"""Small facts that JSON can carry."""


@dataclass
class Snapshot:
    """The training state as one rank sees it. Arrays are views into live buffers: saved from, and loaded into.

    Attributes
    ----------
    step : int
        Optimizer steps taken.
    tensors : dict
        What this rank holds of parameters and optimizer moments, by name. Ranks may hold other tensors, and other
        parts of one; together they hold all of each. Equal parts have equal values; one rank each writes them.
    local : dict
        Arrays of this rank alone: the memories of its streams.
    meta : dict
        Small facts, the same on all ranks: configuration, counters.
    fixed : list of str
        ``key = value`` of every choice that must be the same when the step is loaded.
    shards : dict
        Which part of a tensor the array is; a name that is missing is a whole tensor.
    layout : str
        How the model and the samples are split among the ranks, the same on all. ``local`` arrays come back only to
        the layout that saved them; a loaded ``layout`` is not written to.
    complete : bool
        After loading: whether ``local`` has come back.
    """

    step: int
    tensors: dict[str, Floats]
    local: dict[str, Floats | Ints]
    meta: Meta = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    shards: dict[str, ShardSpec] = field(default_factory=dict)
    layout: str = ""
    complete: bool = True
