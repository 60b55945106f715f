"""Two steps, tensor by tensor, whatever numbers of ranks wrote them."""

from contextlib import ExitStack
from dataclasses import dataclass
from math import sqrt

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.checkpoint.files import OpenShards
from mpitrain.checkpoint.inspection import MEMORIES, Inspection
from mpitrain.checkpoint.pieces import assemble

EQUAL, DIFFERENT, SHAPE, UNREADABLE = "equal", "different", "other shape or type", "unreadable"
ONLY_FIRST, ONLY_OTHER = "only in the first", "only in the other"


@dataclass(frozen=True)
class Difference:
    """How a tensor of one step differs from that of another.

    Attributes
    ----------
    name : str
        As in `inspection.Tensor`.
    state : str
        ``equal`` means equal bits.
    max_abs_difference : float or None
        Largest difference of two elements; None where some are not finite, or the tensors cannot be compared.
    relative_difference : float or None
        Norm of the difference over the norm of the first; None also where the first is zero.
    """

    name: str
    state: str
    max_abs_difference: float | None = None
    relative_difference: float | None = None

    @property
    def is_memory(self) -> bool:
        """Whether it belongs to one rank's codec memories."""
        return self.name.startswith(f"{MEMORIES}/")


def compare(first: Inspection, other: Inspection) -> list[Difference]:
    """Compare all tensors as wholes; the memories of ranks only where ranks of the same grid wrote both steps."""
    names = list(first.tensors) + [name for name in other.tensors if name not in first.tensors]
    if not have_same_grid(first, other):
        names = [name for name in names if not name.startswith(f"{MEMORIES}/")]
    with ExitStack() as stack:
        shards = OpenShards(stack)
        return [_compare(name, first, other, shards) for name in names]


def have_same_grid(first: Inspection, other: Inspection) -> bool:
    """Tell whether as many ranks wrote both steps, and, as far as that is known, in the same layout."""
    layouts = {found.record.layout for found in (first, other) if found.record}
    return len(first.shards) == len(other.shards) and len(layouts) <= 1


def _compare(name: str, first: Inspection, other: Inspection, shards: OpenShards) -> Difference:
    one, two = first.tensors.get(name), other.tensors.get(name)
    if one is None or two is None:
        return Difference(name, ONLY_OTHER if one is None else ONLY_FIRST)
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return Difference(name, SHAPE)
    if not (one.readable and two.readable):
        return Difference(name, UNREADABLE)
    return difference(name, assemble(one.pieces, shards), assemble(two.pieces, shards))


def difference(name: str, first: Floats, other: Floats) -> Difference:
    """Compare two arrays of one shape and type, bit by bit and by value."""
    if first.tobytes() == other.tobytes():
        return Difference(name, EQUAL, 0.0, 0.0)
    a, b = np.ravel(first).astype(np.float64), np.ravel(other).astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return Difference(name, DIFFERENT)
    largest, norm = float(np.abs(a - b).max()), sqrt(float(a @ a))
    relative = sqrt(float(np.square(a - b).sum())) / norm if norm else None
    return Difference(name, DIFFERENT, largest, relative)
