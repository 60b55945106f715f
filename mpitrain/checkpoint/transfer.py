"""What must be read from which shard for whom. Pure: no MPI, no files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.checkpoint.claims import Claim
from mpitrain.checkpoint.coverage import cut_rows, index_in, overlap
from mpitrain.checkpoint.tensor_record import TensorRecord
from mpitrain.partition import ShardSpec

BLOCK_BYTES = 4 * 10**6
"""Most of what is read at once, unless a row is longer."""

ROUND_BYTES = 32 * 10**6
"""Most of what one rank reads and sends before all ranks say that it went well."""


@dataclass(frozen=True)
class Block:
    """A part of a dataset that somebody needs.

    Attributes
    ----------
    shard : int
        Rank whose shard holds it.
    group, name, dtype : str
        As in `Claim`.
    piece : ShardSpec
        Place of the dataset.
    part : ShardSpec
        Place of the block, inside ``piece``.
    ranks : tuple of int
        Who needs some of it.
    """

    shard: int
    group: str
    name: str
    dtype: str
    piece: ShardSpec
    part: ShardSpec
    ranks: tuple[int, ...]

    @property
    def dataset(self) -> str:
        """Name of the dataset in the shard."""
        return f"{self.group}/{self.name}"

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the block lies in its dataset."""
        return index_in(self.piece, self.part)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.part.shape) * np.dtype(self.dtype).itemsize


def list_blocks(tensors: Mapping[str, TensorRecord], claims: Sequence[Sequence[Claim]]) -> list[Block]:
    """List what must be read so that every rank gets what it claims, each piece once, without what nobody needs.

    Parameters
    ----------
    tensors : dict
        What the shards hold.
    claims : list of list of Claim
        What every rank wants, in the order of ranks; of a tensor the shape and type of its record. ``local`` arrays
        come from the shard of the same rank.
    """
    wanted: dict[str, list[tuple[int, ShardSpec]]] = {}
    blocks: list[Block] = []
    for rank, mine in enumerate(claims):
        for claim in mine:
            if claim.group == "tensors":
                wanted.setdefault(claim.name, []).append((rank, claim.spec))
            else:
                blocks += _cut(rank, claim, [(rank, claim.spec)])
    for name, places in sorted(wanted.items()):
        for shard, spec in tensors[name].places():
            blocks += _cut(shard, Claim("tensors", name, tensors[name].dtype, spec), places)
    return sorted(blocks, key=lambda block: block.shard)


def _cut(shard: int, source: Claim, places: list[tuple[int, ShardSpec]]) -> list[Block]:
    """Cut a dataset into blocks, and keep those that somebody needs."""
    found = []
    for part in cut_rows(source.spec, BLOCK_BYTES // np.dtype(source.dtype).itemsize):
        if ranks := tuple(rank for rank, place in places if overlap(part, place)):
            found.append(Block(shard, source.group, source.name, source.dtype, source.spec, part, ranks))
    return found


def choose_reader(shard: int, having: Sequence[set[int]]) -> int:
    """Choose who reads a shard: the rank of its number if it has the file, or else the first that has.

    Fewer ranks than shards take turns. Where nobody has the file, whose turn it is will tell.

    Parameters
    ----------
    having : list of set of int
        The shards that every rank finds on its disk.
    """
    turn = shard % len(having)
    return min(
        (rank for rank, found in enumerate(having) if shard in found), key=lambda r: (r != turn, r), default=turn
    )


def plan_rounds(blocks: Sequence[Block], readers: Mapping[int, int]) -> list[dict[int, list[Block]]]:
    """Divide blocks into rounds, in each of which every reader sends some, of limited size together."""
    rounds: list[dict[int, list[Block]]] = []
    at: dict[int, tuple[int, int]] = {}
    for block in blocks:
        reader = readers[block.shard]
        number, filled = at.get(reader, (0, 0))
        if filled and filled + block.nbytes > ROUND_BYTES:
            number, filled = number + 1, 0
        at[reader] = (number, filled + block.nbytes)
        if number == len(rounds):
            rounds.append({})
        rounds[number].setdefault(reader, []).append(block)
    return rounds


def place(block: Block, values: Floats, array: Floats | Ints, spec: ShardSpec) -> None:
    """Copy what a block and an array share of their tensor into the array, which is the part ``spec`` of it."""
    if shared := overlap(block.part, spec):
        array[index_in(spec, shared)] = values[index_in(block.part, shared)]
