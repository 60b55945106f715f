"""A tensor of a step: its shape and type, and which shard holds which piece of it."""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from mpitrain.partition import ShardSpec

Natural = Annotated[int, msgspec.Meta(ge=0)]


class PieceRecord(NamedTuple):
    """A part of a tensor, and the rank whose shard holds it."""

    rank: Natural
    start: tuple[Natural, ...]
    stop: tuple[Natural, ...]


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor; its pieces cover it exactly once."""

    shape: tuple[Natural, ...]
    dtype: str
    pieces: list[PieceRecord]

    def places(self) -> Iterator[tuple[int, ShardSpec]]:
        """Yield the rank and the place of every piece."""
        for piece in self.pieces:
            yield piece.rank, ShardSpec(self.shape, piece.start, piece.stop)
