"""What one step holds, and everything that is wrong with it. No MPI, no locks, nothing is written."""

import os
import tomllib
from dataclasses import dataclass, field
from math import prod, sqrt
from pathlib import Path

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.checkpoint import files
from mpitrain.checkpoint.pieces import Piece, disagreement, list_pieces
from mpitrain.checkpoint.record import COMMIT, Commit, read_commit
from mpitrain.checkpoint.snapshot import Meta
from mpitrain.checkpoint.steps import step_number
from mpitrain.checkpoint.tensor_record import TensorRecord
from mpitrain.errors import CheckpointError

MEMORIES = "memories"
"""First part of the names of what ranks keep for themselves: ``memories/RANK/NAME``."""

_SLAB = 2**20
"""Elements that are looked at together."""


@dataclass
class Statistics:
    """What the values of an array are like; the finite ones, and the counts of the others."""

    num_finite: int = 0
    num_nan: int = 0
    num_infinite: int = 0
    minimum: float | None = None
    maximum: float | None = None
    sum_squares: float = 0.0

    @property
    def rms(self) -> float | None:
        """Root of the mean square of the finite values."""
        return sqrt(self.sum_squares / self.num_finite) if self.num_finite else None

    def add(self, values: Floats) -> None:
        """Take more values into account."""
        flat = np.ravel(values)
        for start in range(0, flat.size, _SLAB):
            slab = flat[start : start + _SLAB].astype(np.float64)
            finite = slab[np.isfinite(slab)]
            num_nan = int(np.isnan(slab).sum())
            self.num_nan += num_nan
            self.num_infinite += slab.size - finite.size - num_nan
            if finite.size:
                self.num_finite += finite.size
                low, high = float(finite.min()), float(finite.max())
                self.minimum = low if self.minimum is None else min(self.minimum, low)
                self.maximum = high if self.maximum is None else max(self.maximum, high)
                self.sum_squares += float(np.square(finite).sum())


@dataclass
class Tensor:
    """An array of a step, whole.

    Attributes
    ----------
    name : str
        ``params/…``, ``optimizer/…``, or ``memories/RANK/…``.
    shape, dtype
        Of the whole array.
    pieces : list of Piece
        Its parts in sound shards; they cover it where ``readable``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    pieces: list[Piece] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    readable: bool = False

    @property
    def kind(self) -> str:
        """What it is for: the first part of its name."""
        return self.name.partition("/")[0]


@dataclass
class Shard:
    """A file of a rank; ``nbytes`` is None where it is missing."""

    name: str
    nbytes: int | None
    sound: bool


@dataclass
class Inspection:
    """All that is known of a step.

    Attributes
    ----------
    folder : Path
        Where it lies.
    step : int or None
        By its record, or else by the name of its folder.
    record : Commit or None
        None where it is missing or damaged.
    meta : dict
        The small facts; empty where the index is damaged.
    problems : list of str
        Everything that is wrong; a step without is sound.
    leftovers : list of str
        Other files in the folder, of a save that was cut short or of somebody else.
    """

    folder: Path
    step: int | None
    record: Commit | None = None
    meta: Meta = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether it can be trusted."""
        return not self.problems

    def note(self, problem: object) -> None:
        """Take down what is wrong."""
        self.problems.append(str(problem).removeprefix("checkpoint: "))

    def of_kind(self, kind: str) -> list[Tensor]:
        """List the tensors of a kind."""
        return [tensor for tensor in self.tensors.values() if tensor.kind == kind]


def inspect_step(folder: Path) -> Inspection:
    """Read every file of a step and hold it against the commit record. Values are read one shard's array at a time."""
    found = Inspection(folder, step_number(Path(os.path.realpath(folder))))
    _look_at_record(found)
    _look_at_index(found)
    for name in _shard_names(found):
        _look_at_shard(found, name)
    _look_at_tensors(found)
    known = {COMMIT, files.INDEX, *(shard.name for shard in found.shards)}
    found.leftovers = sorted(path.name for path in folder.iterdir() if path.name not in known)
    return found


def _look_at_record(found: Inspection) -> None:
    try:
        found.record = read_commit(found.folder)
    except CheckpointError as error:
        found.note(error)
        return
    if found.step not in (None, found.record.step):
        found.note(f"{found.folder / COMMIT} is of step {found.record.step}, not of its folder's")
    found.step = found.record.step


def _look_at_index(found: Inspection) -> None:
    path = found.folder / files.INDEX
    try:
        if found.record:
            files.check_digest(path, found.record.index)
        found.meta = files.read_meta(path)
        for name, (shape, dtype) in files.index_entries(path).items():
            found.tensors[name] = Tensor(name, shape, dtype, prod(shape) * np.dtype(dtype).itemsize)
    except CheckpointError as error:
        found.note(error)


def _shard_names(found: Inspection) -> list[str]:
    """List the shards that should be there; those that are, where no record tells."""
    return sorted(found.record.shards if found.record else (path.name for path in found.folder.glob("shard-*.h5")))


def _look_at_shard(found: Inspection, name: str) -> None:
    path = found.folder / name
    shard = Shard(name, path.stat().st_size if path.is_file() else None, sound=False)
    found.shards.append(shard)
    if shard.nbytes is None:
        where = "; run.shared_fs = false: it is on the disk of its rank" if _has_private_disks(found.meta) else ""
        found.note(f"{path} is missing{where}")
        return
    try:
        if found.record:
            files.check_digest(path, found.record.shards[name])
        with files.open_shard(path) as file:
            for piece in list_pieces(file):
                tensor = _tensor_of(found, piece)
                tensor.statistics.add(files.read_array(file, f"{piece.group}/{piece.name}"))
                tensor.pieces.append(piece)
        shard.sound = True
    except CheckpointError as error:
        found.note(error)


def _has_private_disks(meta: Meta) -> bool:
    try:
        run = tomllib.loads(str(meta.get("config", ""))).get("run")
    except tomllib.TOMLDecodeError:
        return False
    return isinstance(run, dict) and run.get("shared_fs") is False


def _tensor_of(found: Inspection, piece: Piece) -> Tensor:
    name = piece.name
    if piece.group == "local":
        rank = piece.path.stem.removeprefix("shard-").lstrip("0") or "0"
        name = f"{MEMORIES}/{rank}/{piece.name}"
    if name not in found.tensors:
        shape = piece.spec.global_shape
        found.tensors[name] = Tensor(name, shape, str(piece.dtype), prod(shape) * piece.dtype.itemsize)
    return found.tensors[name]


def _look_at_tensors(found: Inspection) -> None:
    """Check that every tensor is whole, is what record and index say, and has finite values."""
    recorded = found.record.tensors if found.record else {}
    for name in sorted(set(recorded) - set(found.tensors)):
        found.note(f"{found.folder}: {name} is in the commit record, but nowhere else")
    sound = {shard.name for shard in found.shards if shard.sound}
    for name, tensor in found.tensors.items():
        if found.record and tensor.kind != MEMORIES and name not in recorded:
            found.note(f"{found.folder}: {name} is not in the commit record")
        if not tensor.pieces:
            # A shard that is gone or damaged was told already; its tensors need no line each.
            if name not in recorded or any(shard in sound for shard in _shards_of(recorded[name])):
                found.note(f"{found.folder}: no shard holds {name}")
            continue
        _look_at_whole(found, tensor, all_sound=len(sound) == len(found.shards))
        bad = tensor.statistics
        if bad.num_nan or bad.num_infinite:
            found.note(f"{found.folder}: {name} holds {bad.num_nan:,} NaN and {bad.num_infinite:,} infinite values")


def _look_at_whole(found: Inspection, tensor: Tensor, *, all_sound: bool) -> None:
    reason = disagreement(tensor.pieces)
    first = tensor.pieces[0]
    if not reason and (first.spec.global_shape, str(first.dtype)) != (tensor.shape, tensor.dtype):
        reason = f"it is {first.dtype} {first.spec.global_shape}, but {tensor.dtype} {tensor.shape} in the index"
    if not reason and found.record and (saved := found.record.tensors.get(tensor.name)):
        reason = _misplaced(tensor, saved)
    tensor.readable = not reason
    if reason and all_sound:
        found.note(f"{found.folder}: {tensor.name} is not whole: {reason}")


def _shards_of(tensor: TensorRecord) -> set[str]:
    return {files.shard_name(rank) for rank, _ in tensor.places()}


def _misplaced(tensor: Tensor, saved: TensorRecord) -> str:
    """Say where a whole tensor is not what the record says, by which it is loaded; empty where it is."""
    there = {(piece.path.name, piece.spec) for piece in tensor.pieces}
    recorded = {(files.shard_name(rank), spec) for rank, spec in saved.places()}
    if saved.dtype != tensor.dtype or there != recorded:
        return "type, shape or pieces are not those in the commit record"
    return ""
