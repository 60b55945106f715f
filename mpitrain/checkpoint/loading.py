"""Loading by all ranks together: one choice of the step, one verdict on its files.

Rank 0 alone reads the commit record, since on private disks it alone has one, and tells it to everyone. Every file is
held against the checksum in that one record, so no rank can come back with another step than its peers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import msgspec

from mpitrain.arrays import Floats
from mpitrain.checkpoint import files
from mpitrain.checkpoint.record import COMMIT, Commit, read_commit
from mpitrain.checkpoint.snapshot import Meta, Snapshot
from mpitrain.checkpoint.steps import marked_steps, step_folder
from mpitrain.comm.agreement import agree, broadcast, gather
from mpitrain.comm.frame import MAX_MESSAGE_BYTES
from mpitrain.comm.grid import Axis
from mpitrain.errors import CheckpointError, DamageError

T = TypeVar("T")

SHOWN_STEPS = 8


@dataclass(frozen=True)
class Loader:
    """Reads the checkpoints of one run; all methods are collective over the axis.

    Attributes
    ----------
    root : Path
        Folder of the steps; on hosts without a common disk each has its own.
    axis : Axis
        All ranks that load together.
    timeout_s : float
        Patience with the disk of the slowest rank.
    """

    root: Path
    axis: Axis
    timeout_s: float

    def steps(self) -> list[int]:
        """List the steps that were completed, the oldest first.

        Raises
        ------
        CheckpointError
            Some rank has one that rank 0 has not: on private disks the ranks have changed places.
        """
        seen = cast(list[list[int]], gather(self.axis, list(marked_steps(self.root)), timeout_s=self.timeout_s))
        for rank, others in enumerate(seen):
            if more := sorted(set(others) - set(seen[0])):
                _refuse(
                    f"checkpoint: rank {rank} finds step {more[-1]} in {self.root}, but rank 0 does not; start the "
                    "ranks on the hosts that wrote it, in the same order"
                )
        return seen[0]

    def load(self, snapshot: Snapshot, *, step: int | None, fallback: bool, warn: Callable[[str], None]) -> Meta:
        """Fill ``snapshot``; see `CheckpointStore.load`."""
        if fallback and step is not None:
            raise ValueError("an explicit step has no fallback")
        steps = self._choices(step)
        for candidate in reversed(steps) if fallback else [self._pick(steps, step)]:
            meta, damage = self._attempt(candidate, snapshot)
            if meta is not None:
                return meta
            if not fallback:
                _refuse(f"{_first(damage)}; {_remedy(steps, candidate)}")
            if self.axis.rank == 0:
                for text in damage:
                    warn(f"{text}; step {candidate} is left out")
        _refuse(
            f"checkpoint: none of the steps in {self.root} is sound ({_listed(steps)}); mend the files that were "
            "named, or start again with --overwrite"
        )

    def load_tensors(self, tensors: dict[str, Floats], *, step: int | None) -> Meta:
        """Fill whole tensors by name; see `CheckpointStore.load_tensors`."""
        steps = self._choices(step)
        chosen = self._pick(steps, step)
        record, meta, damage = self._open(chosen)
        if record is None:
            _refuse(f"{_first(damage)}; {_other_steps(steps, chosen)}")
        folder = step_folder(self.root, chosen)
        agree(self.axis, lambda: _read_tensors(folder, record, tensors), timeout_s=self.timeout_s)
        return {**meta, "step": record.step, "ranks": record.ranks}

    def _choices(self, step: int | None) -> list[int]:
        """List the steps; refuse where there is none, or not the one that was asked for."""
        steps = self.steps()
        if not steps:
            _refuse(
                f"checkpoint: no complete step in {self.root}; train without --resume first, or name another folder"
            )
        if step is not None and step not in steps:
            _refuse(f"checkpoint: no complete step {step} in {self.root}; there are {_listed(steps)}")
        return steps

    @staticmethod
    def _pick(steps: list[int], step: int | None) -> int:
        return steps[-1] if step is None else step

    def _attempt(self, step: int, snapshot: Snapshot) -> tuple[Meta | None, list[str]]:
        """Load a step, or say what of it is damaged. What it has then overwritten, the next attempt overwrites."""
        record, meta, damage = self._open(step)
        if record is None:
            return None, damage
        folder = step_folder(self.root, step)
        _, damage = self._judge(lambda: _read_own(folder, record, self.axis, snapshot))
        if damage:
            return None, damage
        for name, owner in sorted(record.owners.items()):
            broadcast(
                self.axis,
                snapshot.tensors[name],
                root=owner,
                timeout_s=self.timeout_s,
                piece_bytes=MAX_MESSAGE_BYTES,
            )
        snapshot.step = record.step
        snapshot.meta = meta
        return meta, []

    def _open(self, step: int) -> tuple[Commit | None, Meta, list[str]]:
        """Tell everyone the commit record and the small facts that rank 0 reads, or what is damaged."""
        folder = step_folder(self.root, step)
        opened, damage = self._judge(lambda: None if self.axis.rank else _read_facts(folder, step))
        if damage:
            return None, {}, damage
        facts = gather(self.axis, opened, timeout_s=self.timeout_s)[0]
        record, meta = cast(tuple[object, Meta], facts)
        return msgspec.convert(record, Commit), meta, []

    def _judge(self, action: Callable[[], T]) -> tuple[T | None, list[str]]:
        """Do something that damaged files may prevent; return what came of it, and the damage that any rank met.

        Other errors are raised on all ranks: they are no damage, and another step would not help.
        """

        def attempt() -> tuple[T | None, str | None]:
            try:
                return action(), None
            except DamageError as error:
                return None, str(error)

        result, mine = agree(self.axis, attempt, timeout_s=self.timeout_s)
        found = gather(self.axis, mine, timeout_s=self.timeout_s)
        return result, [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]


def _refuse(message: str) -> NoReturn:
    """Raise what all ranks know."""
    error = CheckpointError(message)
    error.agreed = True
    raise error


def _first(damage: list[str]) -> str:
    return damage[0] + (f" (and {len(damage) - 1} other ranks met damage)" if len(damage) > 1 else "")


def _other_steps(steps: list[int], damaged: int) -> str:
    others = [step for step in steps if step != damaged]
    return f"score one of {_listed(others)} with --step" if others else "there is no other step"


def _remedy(steps: list[int], damaged: int) -> str:
    others = [step for step in steps if step != damaged]
    if not others:
        return "there is no other step; start again with --overwrite"
    return f"go on from the newest sound step with --resume auto, or from one of {_listed(others)} with --resume STEP"


def _listed(steps: list[int]) -> str:
    """Write a list of steps, the last ones of a long one."""
    shown = ", ".join(str(step) for step in steps[-SHOWN_STEPS:])
    return shown if len(steps) <= SHOWN_STEPS else f"… {shown}"


def _read_facts(folder: Path, step: int) -> tuple[object, Meta]:
    record = read_commit(folder)
    if record.step != step:
        raise DamageError(f"checkpoint: {folder / COMMIT} is damaged (it is of step {record.step})")
    files.check_digest(folder / files.INDEX, record.index)
    return msgspec.to_builtins(record), files.read_meta(folder / files.INDEX)


def _read_own(folder: Path, record: Commit, axis: Axis, snapshot: Snapshot) -> None:
    """Fill this rank's memories and the tensors that it has written."""
    if record.ranks != axis.size:
        raise CheckpointError(
            f"checkpoint: {folder} was written by {record.ranks} ranks, but {axis.size} run; start {record.ranks} ranks"
        )
    _check_fixed(folder, record.fixed, snapshot.fixed)
    _check_tensors(folder, set(record.owners), set(snapshot.tensors))
    path = folder / files.shard_name(axis.rank)
    files.check_digest(path, record.shards[path.name])
    with files.open_shard(path) as file:
        saved = set(file.get("local", {}))
        if saved != set(snapshot.local):
            raise CheckpointError(
                f"checkpoint: {path} holds {len(saved)} codec memories, but this configuration has "
                f"{len(snapshot.local)}; resume with the exchange section that wrote it"
            )
        for name, out in snapshot.local.items():
            files.read_into(file, f"local/{name}", out)
        for name, owner in record.owners.items():
            if owner == axis.rank:
                files.read_into(file, f"tensors/{name}", snapshot.tensors[name])


def _read_tensors(folder: Path, record: Commit, tensors: dict[str, Floats]) -> None:
    """Fill whole tensors from the shards of all ranks that wrote them."""
    _check_tensors(folder, set(record.owners) & set(tensors), set(tensors))
    by_shard: dict[str, list[str]] = {}
    for name in tensors:
        by_shard.setdefault(files.shard_name(record.owners[name]), []).append(name)
    for shard, names in sorted(by_shard.items()):
        path = folder / shard
        if not path.exists():
            raise DamageError(
                f"checkpoint: {path} is missing on this disk; after run.shared_fs = false copy the shards of all "
                "hosts into one folder"
            )
        files.check_digest(path, record.shards[shard])
        with files.open_shard(path) as file:
            for name in names:
                files.read_into(file, f"tensors/{name}", tensors[name])


def _check_fixed(folder: Path, saved: list[str], now: list[str]) -> None:
    differ = [(a, b) for a, b in zip(saved, now, strict=False) if a != b]
    if differ or len(saved) != len(now):
        was, here = differ[0] if differ else (f"{len(saved)} settings", f"{len(now)}")
        raise CheckpointError(
            f"checkpoint: {folder} was written with {was}, but now it is {here}; resume with the configuration that "
            "wrote it"
        )


def _check_tensors(folder: Path, saved: set[str], wanted: set[str]) -> None:
    unknown, missing = sorted(saved - wanted), sorted(wanted - saved)
    if unknown or missing:
        shown = f"it holds {unknown[0]}" if unknown else f"it lacks {missing[0]}"
        raise CheckpointError(
            f"checkpoint: {folder} is of another model: {shown} ({len(unknown)} unknown, {len(missing)} missing); "
            "resume with the configuration that wrote it"
        )
