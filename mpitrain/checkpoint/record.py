"""The commit record: the file without which a step does not exist, and what every other file is held against."""

from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import numpy as np

from mpitrain.checkpoint.coverage import contradiction, is_place
from mpitrain.checkpoint.files import INDEX, index_entries, shard_name, write_durably
from mpitrain.checkpoint.tensor_record import Natural, PieceRecord, TensorRecord
from mpitrain.errors import CheckpointError, DamageError
from mpitrain.partition import GridShape

COMMIT = "commit.json"
FORMAT = 3
"""Of the files of a step. 2 had whole tensors only, and ranks of the data axis only; 1 is not read."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit record says.

    Attributes
    ----------
    step : int
        Optimizer steps taken; also the name of the folder.
    ranks : int
        Ranks that wrote it, a shard each.
    layout : str
        How model and samples were split among them.
    shards : dict
        SHA-256 of every shard, by name.
    index : str
        SHA-256 of the index.
    tensors : dict
        Shape, type and pieces of each tensor.
    fixed : list of str
        ``key = value`` of the settings that a resumed run must share.
    """

    format: int = FORMAT
    step: Natural
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    layout: str
    shards: dict[str, str]
    index: str
    tensors: dict[str, TensorRecord]
    fixed: list[str]


class _Commit2(msgspec.Struct, kw_only=True):
    """A record of format 2: the rank that holds each tensor; its shape is in the index alone."""

    step: Natural
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    shards: dict[str, str]
    index: str
    owners: dict[str, Natural]
    fixed: list[str]


class _Head(msgspec.Struct):
    format: int


def write_commit(folder: Path, record: Commit) -> None:
    """Make the step exist."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    write_durably(folder / COMMIT, lambda temporary: cast(None, temporary.write_bytes(text)))


def read_commit(folder: Path) -> Commit:
    """Read and check the commit record of a step.

    Raises
    ------
    DamageError
        It is missing, or not what a save writes.
    CheckpointError
        Another version wrote it.
    """
    path = folder / COMMIT
    try:
        text = path.read_bytes()
        found = msgspec.json.decode(text, type=_Head).format
        if found not in (FORMAT, 2):
            raise CheckpointError(
                f"checkpoint: {path} is of format {found}, but this version reads {FORMAT} and 2; "
                "use the version that wrote it"
            )
        record = msgspec.json.decode(text, type=Commit) if found == FORMAT else _read_format_2(folder, text)
    except FileNotFoundError:
        raise DamageError(f"checkpoint: {path} is missing: the step was never completed") from None
    except OSError as error:
        raise DamageError(f"checkpoint: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamageError(f"checkpoint: {path} is damaged ({error})") from None
    if wrong := _contradiction(record):
        raise DamageError(f"checkpoint: {path} is damaged ({wrong})")
    return record


def _read_format_2(folder: Path, text: bytes) -> Commit:
    """Read a record as if this version had written it: the grid is no longer among the settings."""
    old = msgspec.json.decode(text, type=_Commit2)
    entries = index_entries(folder / INDEX)
    if missing := sorted(set(old.owners) - set(entries)):
        raise ValueError(f"the index has no {missing[0]}")
    tensors = {}
    for name, owner in old.owners.items():
        shape, dtype = entries[name]
        tensors[name] = TensorRecord(shape=shape, dtype=dtype, pieces=[PieceRecord(owner, (0,) * len(shape), shape)])
    return Commit(
        format=2,
        step=old.step,
        ranks=old.ranks,
        layout=str(GridShape(old.ranks)),
        shards=old.shards,
        index=old.index,
        tensors=tensors,
        fixed=[setting for setting in old.fixed if not setting.startswith("parallel.")],
    )


def _contradiction(record: Commit) -> str:
    """Say what in a record contradicts the rest of it; empty where nothing does."""
    expected = {shard_name(rank) for rank in range(min(record.ranks, len(record.shards) + 1))}
    if set(record.shards) != expected:
        return f"{record.ranks} ranks, but shards {', '.join(sorted(record.shards)[:3]) or 'of none'}"
    for name, tensor in record.tensors.items():
        if wrong := _tensor_contradiction(record.ranks, tensor):
            return f"{name}: {wrong}"
    return ""


def _tensor_contradiction(ranks: int, tensor: TensorRecord) -> str:
    if not _is_numeric(tensor.dtype):
        return f"no type is called {tensor.dtype!r}"
    for rank, place in tensor.places():
        if rank >= ranks:
            return f"rank {rank} of {ranks} holds it"
        if not is_place(place):
            return f"a piece lies at {place.start} to {place.stop} of {place.global_shape}"
    return contradiction([place for _, place in tensor.places()])


def _is_numeric(name: str) -> bool:
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except (TypeError, ValueError):
        return False
    return bool(np.issubdtype(dtype, np.number))
