"""The files of one step: shards and index, each written under a temporary name and then renamed."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.checkpoint.snapshot import Meta
from mpitrain.checkpoint.tensor_record import TensorRecord
from mpitrain.errors import CheckpointError, DamageError
from mpitrain.partition import ShardSpec

INDEX = "index.h5"
DAMAGE = (OSError, RuntimeError, KeyError, TypeError, ValueError)
"""What h5py raises on damaged files, depending on the byte."""

_SHARD_NAME = re.compile(r"shard-\d+\.h5|\.shard-\d+\.h5\.tmp")

MARKS = ("global_shape", "start", "stop")
"""Attributes of a tensor's dataset: its place in the whole."""

WHOLE: Mapping[str, ShardSpec] = {}
"""Of tensors that are not split."""


def shard_name(rank: int) -> str:
    """Name the file of a rank."""
    return f"shard-{rank:05d}.h5"


def shard_paths(folder: Path) -> list[Path]:
    """List the shards in a folder, whole and half-written; raises FileNotFoundError where there is no folder."""
    return [folder / name for name in os.listdir(folder) if _SHARD_NAME.fullmatch(name)]


def temporary_of(path: Path) -> Path:
    """Name the file that becomes ``path`` once it is whole."""
    return path.with_name(f".{path.name}.tmp")


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


def write_durably(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, force it to disk, and move it into place.

    Raises
    ------
    CheckpointError
        The folder cannot be written, or the disk is full; what stood at ``path`` is still there.
    """
    temporary = temporary_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        _force(temporary)
        os.replace(temporary, path)
        _force(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(f"checkpoint: cannot write {path}: {error.strerror or error}") from None


def _force(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_hdf5(path: Path, fill: Callable[[Any], None]) -> None:
    """Make the file in memory, then write it: HDF5 itself may crash on a full disk."""
    with h5py.File(path.name, "w", driver="core", backing_store=False) as file:
        fill(file)
        file.flush()
        image = file.id.get_file_image()
    path.write_bytes(image)


def write_shard(
    path: Path,
    tensors: Mapping[str, Floats],
    local: Mapping[str, Floats | Ints],
    shards: Mapping[str, ShardSpec] = WHOLE,
) -> None:
    """Write one rank's arrays: ``tensors`` with their place in the whole, ``local`` as they are."""

    def fill(file: Any) -> None:
        for name, values in tensors.items():
            dataset = file.create_dataset(f"tensors/{name}", data=values)
            spec = shards.get(name) or ShardSpec.whole(values.shape)
            for key in MARKS:
                dataset.attrs[key] = np.array(getattr(spec, key), np.int64)
        for name, array in local.items():
            file.create_dataset(f"local/{name}", data=array)

    write_durably(path, lambda temporary: _write_hdf5(temporary, fill))


def verify_shard(path: Path, tensors: Mapping[str, Floats], local: Mapping[str, Floats | Ints]) -> None:
    """Read a shard back and compare it bit by bit with the arrays it was written from.

    Raises
    ------
    CheckpointError
        The disk did not keep what was written.
    """
    groups = {"tensors": tensors, "local": local}
    with open_shard(path) as file:
        for group, arrays in groups.items():
            for name, values in arrays.items():
                if read_array(file, f"{group}/{name}").tobytes() != np.ascontiguousarray(values).tobytes():
                    raise CheckpointError(f"checkpoint: {path} was not kept as written ({group}/{name} differs)")


def open_shard(path: Path) -> Any:
    """Open a shard for reading; raises DamageError.

    Without a lock: files never change once they have their name, some network disks know no locks, and a reader that
    holds one must not stop a training.
    """
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise DamageError(f"checkpoint: cannot read {path}: {error}") from None


class OpenShards(dict[Path, Any]):
    """Shards, opened when they are first asked for, and closed with ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, path: Path) -> Any:
        self[path] = self._stack.enter_context(open_shard(path))
        return self[path]


def read_array(file: Any, name: str) -> Floats:
    """Read a dataset; raises DamageError where it cannot be read, CheckpointError where it is not there."""
    try:
        if name in file:
            return cast(Floats, file[name][()])
    except DAMAGE as error:
        raise DamageError(f"checkpoint: {file.filename}: cannot read {name}: {error}") from None
    raise CheckpointError(f"checkpoint: {file.filename} holds no {name}; resume with the configuration that wrote it")


def check_dataset(file: Any, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse a dataset that is not there, or of another shape or type; raises CheckpointError."""
    try:
        dataset = file.get(name)
        found = None if dataset is None else (dataset.shape, str(dataset.dtype))
    except DAMAGE as error:
        raise DamageError(f"checkpoint: {file.filename}: cannot read {name}: {error}") from None
    if found is None:
        raise CheckpointError(
            f"checkpoint: {file.filename} holds no {name}; resume with the configuration that wrote it"
        )
    if found != (shape, dtype):
        raise CheckpointError(
            f"checkpoint: {file.filename}: {name} is {found[1]} {found[0]}, but {dtype} {shape} is needed; "
            "resume with the configuration that wrote it"
        )


def list_names(file: Any, group: str) -> set[str]:
    """Name the datasets right in a group; raises DamageError."""
    try:
        return set(file[group]) if group in file else set()
    except DAMAGE as error:
        raise DamageError(f"checkpoint: {file.filename}: cannot list {group}: {error}") from None


def read_part(file: Any, name: str, index: tuple[slice, ...]) -> Floats:
    """Read a part of a dataset; raises DamageError."""
    try:
        return cast(Floats, file[name][index])
    except DAMAGE as error:
        raise DamageError(f"checkpoint: {file.filename}: cannot read {name}: {error}") from None


def write_index(path: Path, tensors: Mapping[str, TensorRecord], meta: Meta) -> None:
    """Write a file in which any HDF5 viewer sees whole tensors, virtual datasets over the shards, and the facts."""

    def fill(file: Any) -> None:
        for name, tensor in tensors.items():
            layout = h5py.VirtualLayout(tensor.shape, tensor.dtype)
            for rank, spec in tensor.places():
                layout[spec.slices] = h5py.VirtualSource(shard_name(rank), f"tensors/{name}", shape=spec.shape)
            file.create_virtual_dataset(f"tensors/{name}", layout)
        file.create_dataset("meta", data=json.dumps(meta), dtype=h5py.string_dtype("utf-8"))

    write_durably(path, lambda temporary: _write_hdf5(temporary, fill))


def index_entries(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """List the shape and type of the tensors of an index; raises DamageError."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = (item.shape, str(item.dtype))

    with open_shard(path) as file:
        try:
            if "tensors" in file:
                file["tensors"].visititems(visit)
        except DAMAGE as error:
            raise DamageError(f"checkpoint: {path}: cannot list its tensors: {error}") from None
    return found


def read_meta(path: Path) -> Meta:
    """Read the small facts of an index; raises DamageError."""
    with open_shard(path) as file:
        text: object = read_array(file, "meta")
    try:
        meta = json.loads(text) if isinstance(text, bytes) else None
    except (ValueError, RecursionError) as error:
        raise DamageError(f"checkpoint: {path}: damaged facts ({error})") from None
    if not isinstance(meta, dict):
        raise DamageError(f"checkpoint: {path}: damaged facts (a JSON object is expected)")
    return cast(Meta, meta)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file; raises DamageError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise DamageError(f"checkpoint: {path} is missing") from None
    except OSError as error:
        raise DamageError(f"checkpoint: cannot read {path}: {error.strerror}") from None


def check_digest(path: Path, digest: str) -> None:
    """Compare a file with the checksum that its commit record names; raises DamageError."""
    if checksum(path) != digest:
        raise DamageError(f"checkpoint: {path} is damaged (its checksum differs from the commit record)")


def flip_data_byte(path: Path) -> None:
    """Change a byte of an array in a shard, for tests; cut a shard that holds none."""
    with open_shard(path) as file:
        offsets: list[int] = []
        file.visititems(lambda _, item: offsets.append(_data_offset(item)))
    data = [offset for offset in offsets if offset]
    if not data:
        os.truncate(path, path.stat().st_size // 2)
        return
    with path.open("r+b") as raw:
        raw.seek(data[0])
        byte = raw.read(1)[0]
        raw.seek(data[0])
        raw.write(bytes([byte ^ 1]))


def _data_offset(item: Any) -> int:
    return (item.id.get_offset() or 0) if isinstance(item, h5py.Dataset) and item.size else 0
