"""Arrays in shards: which part of which tensor lies where, whether the parts make a whole, and the whole itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats
from mpitrain.checkpoint.coverage import contradiction, is_place
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
    if not is_place(spec):
        raise ValueError(f"{name} lies at {spec.start} to {spec.stop} of {spec.global_shape}")
    if spec.shape != dataset.shape:
        raise ValueError(f"{name} has shape {dataset.shape}, but lies at {spec.start} to {spec.stop}")
    return Piece(path, group, name, spec, dataset.dtype)


def disagreement(pieces: list[Piece]) -> str:
    """Say why pieces do not make one whole tensor; empty where they do."""
    types = sorted({str(piece.dtype) for piece in pieces})
    if len(types) > 1:
        return f"its shards disagree about its type ({', '.join(types)})"
    return contradiction([piece.spec for piece in pieces])


def assemble(pieces: list[Piece], files: Mapping[Path, Any]) -> Floats:
    """Build a whole tensor from pieces that cover it, out of open shards; raises DamageError."""
    whole: npt.NDArray[Any] = np.empty(pieces[0].spec.global_shape, pieces[0].dtype)
    for piece in pieces:
        whole[piece.spec.slices] = read_array(files[piece.path], f"{piece.group}/{piece.name}")
    return cast(Floats, whole)
