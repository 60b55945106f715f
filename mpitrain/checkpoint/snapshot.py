"""What a checkpoint holds, independent of files."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mpitrain.arrays import Floats
from mpitrain.errors import CheckpointError

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


def check_names(names: Iterable[str]) -> None:
    """Refuse names that HDF5 cannot tell apart: it reads them as paths of groups.

    Raises
    ------
    CheckpointError
        A name with an empty part, or one that is also the group of another.
    """
    known = set(names)
    for name in sorted(known):
        parts = name.split("/")
        if any(part in ("", ".") for part in parts):
            raise CheckpointError(
                f"checkpoint: {name!r} cannot be the name of an array; no part of it may be '' or '.'"
            )
        for count in range(1, len(parts)):
            group = "/".join(parts[:count])
            if group in known:
                raise CheckpointError(f"checkpoint: arrays {group!r} and {name!r} cannot both be kept; rename one")
