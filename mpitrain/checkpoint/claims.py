"""Who holds which part of which tensor, and who of them writes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.checkpoint.coverage import contradiction
from mpitrain.checkpoint.tensor_record import PieceRecord, TensorRecord
from mpitrain.errors import CheckpointError
from mpitrain.partition import ShardSpec


@dataclass(frozen=True)
class Claim:
    """An array of one rank.

    Attributes
    ----------
    group : str
        ``tensors``, or ``local`` for what belongs to the rank alone.
    name : str
        Of the tensor, below the group.
    dtype : str
        Element type.
    spec : ShardSpec
        The part of the tensor that the array is.
    """

    group: str
    name: str
    dtype: str
    spec: ShardSpec

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.spec.shape) * np.dtype(self.dtype).itemsize


def claims_of(group: str, arrays: Mapping[str, Floats | Ints], shards: Mapping[str, ShardSpec]) -> list[Claim]:
    """Describe the arrays of this rank; one that ``shards`` does not name is a whole tensor."""
    found = []
    for name, values in arrays.items():
        spec = shards.get(name) or ShardSpec.whole(values.shape)
        if spec.shape != values.shape:
            raise ValueError(f"{name} has shape {values.shape}, but its shard is {spec}")
        found.append(Claim(group, name, str(values.dtype), spec))
    return found


def assign_pieces(claims: Sequence[Sequence[Claim]]) -> dict[str, TensorRecord]:
    """Choose which rank writes which piece, so that every piece is written once.

    The pieces that fewest ranks hold come first, then the largest; each goes to the rank with the fewest bytes so far
    of those that hold it.

    Parameters
    ----------
    claims : list of list of Claim
        The tensors of every rank, in the order of ranks.

    Raises
    ------
    CheckpointError
        The ranks disagree about a tensor, or do not hold all of it: a bug.
    """
    holders: dict[Claim, list[int]] = {}
    for rank, mine in enumerate(claims):
        for claim in mine:
            holders.setdefault(claim, []).append(rank)
    tensors: dict[str, list[Claim]] = {}
    for claim in holders:
        tensors.setdefault(claim.name, []).append(claim)
    tensors = {name: _needed(name, parts) for name, parts in sorted(tensors.items())}
    writers = _balanced({claim: holders[claim] for parts in tensors.values() for claim in parts}, len(claims))
    return {
        name: TensorRecord(
            shape=parts[0].spec.global_shape,
            dtype=parts[0].dtype,
            pieces=[PieceRecord(writers[part], part.spec.start, part.spec.stop) for part in parts],
        )
        for name, parts in tensors.items()
    }


def _needed(name: str, parts: list[Claim]) -> list[Claim]:
    """Sort the parts of a tensor and drop the empty ones, unless nothing else is left; refuse those that do not fit."""
    ordered = sorted(parts, key=lambda part: (part.spec.start, part.spec.stop))
    needed = [part for part in ordered if part.nbytes] or ordered[:1]
    types = sorted({part.dtype for part in parts})
    reason = f"its shards are of types {types}" if len(types) > 1 else contradiction([part.spec for part in needed])
    if reason:
        raise CheckpointError(f"checkpoint: internal error: {name} cannot be saved: {reason}; please report it")
    return needed


def _balanced(holders: Mapping[Claim, Sequence[int]], ranks: int) -> dict[Claim, int]:
    load = [0] * ranks
    writers: dict[Claim, int] = {}
    for claim in sorted(holders, key=lambda claim: _urgency(claim, holders[claim])):
        writer = min(holders[claim], key=lambda rank: (load[rank], rank))
        writers[claim] = writer
        load[writer] += claim.nbytes
    return writers


def _urgency(claim: Claim, holders: Sequence[int]) -> tuple[int, int, str, tuple[int, ...]]:
    return len(holders), -claim.nbytes, claim.name, claim.spec.start
