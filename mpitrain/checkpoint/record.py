"""The commit record: the file without which a step does not exist, and what every other file is held against."""

from pathlib import Path
from typing import Annotated, cast

import msgspec

from mpitrain.checkpoint.files import shard_name, write_durably
from mpitrain.errors import CheckpointError, DamageError

COMMIT = "commit.json"
FORMAT = 2
"""Of the files of a step; 1 had the tensors of the index beside its facts."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit record says.

    Attributes
    ----------
    step : int
        Optimizer steps taken; also the name of the folder.
    ranks : int
        Ranks that wrote it, a shard each.
    shards : dict
        SHA-256 of every shard, by name.
    index : str
        SHA-256 of the index.
    owners : dict
        The rank that holds each tensor.
    fixed : list of str
        ``key = value`` of the settings that a resumed run must share.
    """

    format: int = FORMAT
    step: Annotated[int, msgspec.Meta(ge=0)]
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    shards: dict[str, str]
    index: str
    owners: dict[str, Annotated[int, msgspec.Meta(ge=0)]]
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
        if found != FORMAT:
            raise CheckpointError(
                f"checkpoint: {path} is of format {found}, but this version reads {FORMAT}; "
                "use the version that wrote it"
            )
        record = msgspec.json.decode(text, type=Commit)
    except FileNotFoundError:
        raise DamageError(f"checkpoint: {path} is missing: the step was never completed") from None
    except OSError as error:
        raise DamageError(f"checkpoint: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamageError(f"checkpoint: {path} is damaged ({error})") from None
    if wrong := _contradiction(record):
        raise DamageError(f"checkpoint: {path} is damaged ({wrong})")
    return record


def _contradiction(record: Commit) -> str:
    """Say what in a record contradicts the rest of it; empty where nothing does."""
    expected = {shard_name(rank) for rank in range(min(record.ranks, len(record.shards) + 1))}
    if set(record.shards) != expected:
        return f"{record.ranks} ranks, but shards {', '.join(sorted(record.shards)[:3]) or 'of none'}"
    for name, owner in record.owners.items():
        if owner >= record.ranks:
            return f"rank {owner} of {record.ranks} holds {name}"
    return ""
