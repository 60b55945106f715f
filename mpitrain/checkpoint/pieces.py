"""Arrays in shards: which part of which tensor lies where, whether the parts make a whole, and the whole itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats
from mpitrain.checkpoint.files import DAMAGE, MARKS, read_array
from mpitrain.errors import DamageError
from mpitrain.partition import ShardSpec

GROUPS = ("tensors", "local")


@dataclass(frozen=True)
class Piece:
    """A dataset of a shard.

    Attributes
    ----------
    path : Path
        The shard.
    group : str
        ``tensors``, or ``local`` for what belongs to the rank of the shard alone.
    name : str
        Of the tensor, below the group.
    spec : ShardSpec
        The part of the tensor that it holds.
    dtype : dtype
        Element type.
    """

    path: Path
    group: str
    name: str
    spec: ShardSpec
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.spec.shape) * self.dtype.itemsize


def list_pieces(file: Any) -> list[Piece]:
    """List the arrays of an open shard; raises DamageError where their places make no sense."""
    found: list[Piece] = []
    try:
        for group in GROUPS:
            datasets: dict[str, Any] = {}
            if group in file:
                file[group].visititems(lambda name, item, into=datasets: into.update({name: item}))
            for name, item in datasets.items():
                if isinstance(item, h5py.Dataset):
                    found.append(_piece(Path(file.filename), group, name, item))
    except DAMAGE as error:
        raise DamageError(f"checkpoint: {file.filename}: cannot list its arrays: {error}") from None
    return found


def _piece(path: Path, group: str, name: str, dataset: Any) -> Piece:
    if group == "tensors":
        spec = ShardSpec(*(tuple(int(number) for number in dataset.attrs[key]) for key in MARKS))
    else:
        spec = ShardSpec.whole(dataset.shape)
    whole, start, stop = spec.global_shape, spec.start, spec.stop
    dims = len(whole) == len(start) == len(stop) == len(dataset.shape)
    if not (dims and all(0 <= a <= b <= n for a, b, n in zip(start, stop, whole, strict=True))):
        raise ValueError(f"{name} lies at {start} to {stop} of {whole}")
    if spec.shape != dataset.shape:
        raise ValueError(f"{name} has shape {dataset.shape}, but lies at {start} to {stop}")
    return Piece(path, group, name, spec, dataset.dtype)


def contradiction(pieces: list[Piece]) -> str:
    """Say why pieces do not cover their tensor exactly once; empty where they do."""
    shapes = {piece.spec.global_shape for piece in pieces}
    types = {piece.dtype for piece in pieces}
    if len(shapes) > 1 or len(types) > 1:
        return f"its shards disagree about its shape or type ({sorted(map(str, shapes | types))})"
    (whole,) = shapes
    covered = sum(prod(piece.spec.shape) for piece in pieces)
    if any(_overlap(one.spec, other.spec) for one, other in combinations(pieces, 2)):
        return "its shards overlap"
    if covered != prod(whole):
        return f"its shards hold {covered:,} of its {prod(whole):,} elements"
    return ""


def _overlap(one: ShardSpec, other: ShardSpec) -> bool:
    ranges = zip(one.start, one.stop, other.start, other.stop, strict=True)
    return all(max(a, c) < min(b, d) for a, b, c, d in ranges)


def assemble(pieces: list[Piece], files: Mapping[Path, Any]) -> Floats:
    """Build a whole tensor from pieces that cover it, out of open shards; raises DamageError."""
    whole: npt.NDArray[Any] = np.empty(pieces[0].spec.global_shape, pieces[0].dtype)
    for piece in pieces:
        whole[piece.spec.slices] = read_array(files[piece.path], f"{piece.group}/{piece.name}")
    return cast(Floats, whole)
