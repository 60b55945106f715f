"""What a checkpoint holds, independent of files."""

from dataclasses import dataclass, field

from mpitrain.arrays import Floats

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
        Arrays that are the same on all ranks of the data axis: parameters, optimizer moments, by name. One rank each
        writes them; all ranks get them back.
    local : dict
        Arrays of this rank alone: the memories of its streams.
    meta : dict
        Small facts, the same on all ranks: configuration, counters.
    fixed : list of str
        ``key = value`` of every choice that must be the same when the step is loaded.
    """

    step: int
    tensors: dict[str, Floats]
    local: dict[str, Floats]
    meta: Meta = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)


def assign_owners(tensors: dict[str, Floats], ranks: int) -> dict[str, int]:
    """Choose which rank writes which tensor: largest first, to the rank with the fewest bytes so far."""
    load = [0] * ranks
    owners: dict[str, int] = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        owner = load.index(min(load))
        owners[name] = owner
        load[owner] += tensors[name].nbytes
    return owners
